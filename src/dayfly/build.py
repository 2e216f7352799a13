"""Disks of Dockerfiles for the rollouts of a job; the work itself is in `dayfly.images.builder`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from dayfly.evidence import sha256_bytes
from dayfly.images import Image, ImageStore
from dayfly.images.builder import BuildRequest, BuildSettings, Built, ImageBuilder
from dayfly.model import Disk, ImageConfig
from dayfly.protocols import Hypervisor


@dataclass
class DiskBuilder:
    """Dockerfile → disk, each built at most once in a job; see `dayfly.rollout.Context.build_disk`."""

    hypervisor: Hypervisor
    in_use: ExitStack
    """Keeps the disks from being pruned until it is closed."""
    settings: BuildSettings = field(default_factory=BuildSettings)
    resolve: Callable[[str], Image] | None = None
    """Base image name → image; None: what is in the store."""
    on_built: Callable[[Path, Built], None] = lambda dockerfile, built: None
    _disks: dict[str, Disk] = field(default_factory=dict)
    _builder: ImageBuilder | None = None

    async def __call__(self, dockerfile: Path, timeout_s: float) -> Disk:
        """Raises `ImageError`, whatever became of the builder's VM: a build is never the agent's fault."""
        if self.hypervisor.isolation == "fake":
            digest = sha256_bytes(dockerfile.read_bytes())
            return Disk(Path("/dev/null"), digest, ImageConfig(workdir="/app"), "Dockerfile", digest)
        if self._builder is None:
            store = ImageStore()
            self._builder = ImageBuilder(store, lambda: self.hypervisor, self.settings, self.resolve)
        request = BuildRequest(dockerfile, dockerfile.parent, timeout_s=timeout_s)
        built = await self._builder.build(request)
        if not built.cached:
            self.on_built(dockerfile, built)
        return await self._disk(self._builder.store, built.image)

    async def _disk(self, store: ImageStore, image: Image) -> Disk:
        disk = await anyio.to_thread.run_sync(partial(store.disk, image))
        if image.digest not in self._disks:
            self._disks[image.digest] = self.in_use.enter_context(store.using(disk))
        return disk
