"""Build hook: compiles the guest agent with the C compiler of the `ziglang` wheel.

Runs for wheels (both architectures) and editable installs (this host's); `python hatch_build.py` does the same by
hand. A binary is made again only when its source changed. The wheel ships the binaries, git does not.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHITECTURES = ("x86_64", "aarch64")
FLAGS = ("-static", "-O2", "-s", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
TIMEOUT_S = 600


class GuestAgentHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            here = platform.machine()
            wanted = ARCHITECTURES if version != "editable" or here not in ARCHITECTURES else (here,)
            build_all(Path(self.root), wanted)


def build_all(root: Path, architectures: tuple[str, ...]) -> None:
    for architecture in architectures:
        build(root / "guest", root / "src" / "dayfly" / "guest" / "bin", architecture)


def build(source: Path, folder: Path, architecture: str) -> None:
    """Make `folder`/agent-ARCHITECTURE from the C files in `source`, unless it is up to date."""
    binary, mark = folder / f"agent-{architecture}", folder / f"agent-{architecture}.source"
    digest = _digest(source)
    if binary.exists() and mark.exists() and mark.read_text() == digest:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
        fresh = Path(work) / "agent"
        # the compiler's own cache stays where the user's caches are (libc is compiled once)
        env = {**os.environ, "ZIG_LOCAL_CACHE_DIR": work}
        argv = [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-musl", *FLAGS]
        subprocess.run([*argv, "-o", str(fresh), str(source / "agent.c")], env=env, check=True, timeout=TIMEOUT_S)
        fresh.replace(binary)
    mark.write_text(digest)


def _digest(source: Path) -> str:
    found = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(source.glob("*.[ch]")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    build_all(Path(__file__).resolve().parent, tuple(sys.argv[1:]) or (platform.machine(),))
