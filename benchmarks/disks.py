"""Which disk format a guest reads fastest: first `ls -R /` and first `python3 -c pass`, each in a fresh VM.

    python benchmarks/disks.py [--tar IMAGE.tar] [--samples 5] [--json]

The same root filesystem as squashfs (lz4, zstd, gzip, not compressed) and as EROFS (lz4, not compressed), as far as
this host has the tools. The page cache of each VM is empty, so what is measured is reading and inflating by the
guest's CPU. The formats alternate; figures are medians, and their ratios to the format that dayfly uses.

ext4 is no candidate: `mke2fs -d` needs the tree unpacked by root, and from a tar it can lose hard links.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import anyio

from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings
from dayfly.images.squashfs import COMPRESSION, DISK_VIRTUAL_BYTES
from dayfly.model import Disk, ImageConfig, Machine
from dayfly.protocols import StartOptions

MACHINE = Machine(memory_mib=512, storage_mib=1024)
PROGRAMS = {
    "list": ["sh", "-c", "ls -R / >/dev/null 2>&1; true"],
    "python": ["python3", "-c", "pass"],
}
CHOSEN = f"squashfs {COMPRESSION[0]}"
PLAIN = ["-noI", "-noD", "-noF", "-noX", "-no-fragments"]
_numbers = count()


@dataclass
class Candidate:
    name: str
    tool: str
    make: Callable[[Path, Path, Path], None]
    """Tar, unpacked tree, new file."""
    disk: Disk | None = None
    make_s: float = 0.0
    mib: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PROGRAMS})


def run(argv: list[str | Path], stdin: Path | None = None) -> None:
    with (stdin or Path(os.devnull)).open("rb") as source:
        subprocess.run(
            argv, stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True, timeout=600
        )


def squashfs(compressor: str, *extra: str) -> Candidate:
    def make(tar: Path, tree: Path, new: Path) -> None:
        run(["tar2sqfs", "-q", "--no-skip", "-c", compressor, *extra, new], tar)

    return Candidate(f"squashfs {compressor}", "tar2sqfs", make)


def erofs(name: str, *options: str) -> Candidate:
    return Candidate(name, "mkfs.erofs", lambda tar, tree, new: run(["mkfs.erofs", *options, new, tree]))


CANDIDATES = [
    squashfs("lz4"),
    squashfs("zstd", "-X", "level=3"),
    squashfs("gzip", "-X", "level=1"),
    Candidate("squashfs none", "sqfstar", lambda tar, tree, new: run(["sqfstar", *PLAIN, new], tar)),
    erofs("erofs lz4", "-zlz4"),
    erofs("erofs none"),
]


def make_disks(tar: Path, work: Path) -> list[Candidate]:
    tree = work / "tree"
    tree.mkdir()
    run(["tar", "-x", "--numeric-owner", "-C", tree, "-f", tar])
    made = []
    for candidate in CANDIDATES:
        if shutil.which(candidate.tool) is None:
            print(f"{candidate.name}: left out, {candidate.tool} is not installed", file=sys.stderr)
            continue
        path = work / candidate.name.replace(" ", "-")
        started = time.perf_counter()
        candidate.make(tar, tree, path)
        candidate.make_s = time.perf_counter() - started
        candidate.mib = path.stat().st_size / 2**20
        os.truncate(path, DISK_VIRTUAL_BYTES)
        candidate.disk = Disk(path, f"sha256:{candidate.name}", ImageConfig(), "benchmark", candidate.name)
        made.append(candidate)
    return made


async def first_s(hypervisor: QemuHypervisor, disk: Disk, folder: Path, argv: list[str]) -> float:
    """Seconds from asking for the program to its end, as the first that a VM runs."""
    name = f"bench-{next(_numbers)}"
    options = StartOptions(name, folder / f"{name}.img")
    async with hypervisor.start(disk, MACHINE, options) as vm:
        started = time.perf_counter()
        result = await vm.exec(argv, user="root", timeout_s=300)
        taken = time.perf_counter() - started
        assert result.ok, result
    options.writable.unlink()
    return taken


async def measure(candidates: list[Candidate], folder: Path, samples: int) -> str:
    hypervisor = QemuHypervisor(QemuSettings())
    try:
        for number in range(samples + 1):  # the first round warms the host's page cache and the template
            for candidate in candidates:
                assert candidate.disk is not None
                for name, argv in PROGRAMS.items():
                    seconds = await first_s(hypervisor, candidate.disk, folder, argv)
                    if number:
                        candidate.seconds[name].append(seconds)
        return hypervisor.isolation
    finally:
        hypervisor.close()


def table(candidates: list[Candidate], isolation: str) -> dict[str, object]:
    def medians(candidate: Candidate) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in candidate.seconds.items()}

    chosen = medians(next(c for c in candidates if c.name == CHOSEN))
    rows = {
        c.name: {
            "mib": round(c.mib, 1),
            "make_s": round(c.make_s, 2),
            **{f"{name}_s": round(value, 3) for name, value in medians(c).items()},
            **{f"{name}_over_chosen": round(value / chosen[name], 2) for name, value in medians(c).items()},
        }
        for c in candidates
    }
    samples = len(candidates[0].seconds["list"])
    return {"benchmark": "disks", "isolation": isolation, "samples": samples, "chosen": CHOSEN, "formats": rows}


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tar", type=Path, default=cache / "dayfly" / "base" / "demo-base.tar")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        candidates = make_disks(given.tar, Path(folder))
        found = table(candidates, anyio.run(measure, candidates, Path(folder), given.samples))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for name, row in found["formats"].items():  # type: ignore[attr-defined]
        print(f"{name:14}", *(f"{key} {value}" for key, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
