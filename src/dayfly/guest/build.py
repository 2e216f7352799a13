"""Where the compiled guest agent is. The build hook (`hatch_build.py`) makes it; see `guest/`."""

from __future__ import annotations

from pathlib import Path

from dayfly.errors import HostError

BINARIES = Path(__file__).parent / "bin"


def agent_binary(architecture: str) -> Path:
    """The agent for `architecture` (x86_64 or aarch64). Raises `HostError` when it was not built."""
    path = BINARIES / f"agent-{architecture}"
    if not path.is_file():
        raise HostError(
            f"the guest agent for {architecture} is not built",
            hint=f"run `python hatch_build.py {architecture}` in the source folder, or reinstall dayfly",
            cause="no_guest_agent",
        )
    return path
