"""The layer cache: disks of builder VMs that are kept for the next build of the same Dockerfile.

What a build left on its disk was written by the Dockerfile's own programs. So a disk is only ever given to builds
of the same file, on the same bases, and never to one with secrets; the host does not look into it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dayfly.images.builder.request import BuildPlan
from dayfly.images.locks import try_locked

KEPT = 4
"""So many disks stay; the one not used for longest goes first."""
MAX_BYTES = 6 << 30
"""Really used on the host; a disk with more is not kept, since every build adds to it."""


@dataclass(frozen=True)
class KeptLayers:
    path: Path

    def move_to(self, disk: Path) -> None:
        """The kept disk, if there is one, becomes the VM's. Until the build has come to its end, none is kept."""
        with suppress(FileNotFoundError):
            self.path.rename(disk)

    def take(self, disk: Path) -> None:
        """Keep the disk of a VM that is off."""
        if disk.stat().st_blocks * 512 > MAX_BYTES:
            return
        disk.rename(self.path)
        os.utime(self.path)
        disks = sorted(self.path.parent.glob("*.img"), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in disks[KEPT:]:
            old.unlink(missing_ok=True)


@contextmanager
def kept_layers(folder: Path, plan: BuildPlan, builder: str, storage_mb: int) -> Iterator[KeptLayers | None]:
    """The layers of earlier builds of this Dockerfile; None when none are wanted, or another build has them."""
    if not plan.request.layers or plan.secrets:
        yield None
        return
    parts = [builder, str(storage_mb), str(plan.request.dockerfile.resolve()), *sorted(b.mark for b in plan.bases)]
    key = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f"{key}.lock"
    lock.touch()
    with try_locked(lock) as ours:
        yield KeptLayers(folder / f"{key}.img") if ours else None
