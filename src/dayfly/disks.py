"""Disks of the images that the tasks of a job name: pulled and made once, by the digest that the lock holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from dayfly.errors import DayflyError, InfraError, NeedsDecision
from dayfly.evidence import sha256_bytes
from dayfly.images import Image, ImageStore, PullPolicy, Registries, Watch
from dayfly.images.faults import passes
from dayfly.images.names import parse_reference
from dayfly.model import Disk, ImageConfig

AT_ONCE = 4
"""Images that are pulled and made at the same time."""
AGAIN_AFTER_S = 60.0
"""A fault that may pass is met again for so long, before the image is asked for anew."""

T = TypeVar("T")


@dataclass
class ImageDisks:
    """Image name → disk; see `dayfly.rollout.Context.make_disk`."""

    store: ImageStore | None
    """None: for a hypervisor that needs no real disks."""
    in_use: ExitStack
    """Keeps the disks from being pruned until it is closed."""
    policy: PullPolicy = "missing"
    registries: Registries = field(default_factory=Registries)
    digests: dict[str, str] = field(default_factory=dict)
    """Name → digest of the manifest: at first what the lock of a resumed job holds. A tag moves in vain."""
    tell: Callable[..., None] = lambda kind, **fields: None
    """Called with an event's kind and fields, from any thread."""
    on_resolved: Callable[[], None] = lambda: None
    """Called, from any thread, when `digests` has got one more."""
    _disks: dict[str, Disk] = field(default_factory=dict)
    _errors: dict[str, tuple[InfraError, float]] = field(default_factory=dict)
    _locks: dict[str, anyio.Lock] = field(default_factory=dict)
    _resolving: threading.Lock = field(default_factory=threading.Lock)

    async def prepare(self, names: Iterable[str]) -> None:
        """Make the disks of `names`. One that fails keeps no other from being made: its rollouts meet the error.

        Raises `UsageError` for a name that cannot be right, or one that is not here and must not be pulled,
        and `NeedsDecision`.
        """
        limiter = anyio.CapacityLimiter(AT_ONCE)
        stopping: dict[str, DayflyError] = {}

        async def prepare_one(name: str) -> None:
            async with limiter:
                try:
                    await self(name)
                except InfraError as error:
                    self.tell("image_failed", image=name, message=error.message, hint=error.hint or "")
                except DayflyError as error:
                    stopping[name] = error

        async with anyio.create_task_group() as group:
            for name in sorted(set(names)):
                group.start_soon(prepare_one, name)
        for _, error in sorted(stopping.items()):
            raise error

    async def __call__(self, name: str) -> Disk:
        """Raises `ImageError` or `HostError`, at once when it was met before."""
        if self.store is None:
            return Disk(Path("/dev/null"), sha256_bytes(name.encode()), ImageConfig(workdir="/app"), name, name)
        async with self._locks.setdefault(name, anyio.Lock()):
            if name not in self._disks:
                self._meet_again(name)
                try:
                    made = await in_thread(partial(self._make, name))
                except InfraError as error:
                    self._errors[name] = (error, time.monotonic())
                    raise
                self._disks[name] = self.in_use.enter_context(self.store.using(made))
            return self._disks[name]

    def resolve(self, name: str, watch: Watch | None = None) -> Image:
        """The image itself, pulled if need be; for builds on top of it. Blocking."""
        assert self.store is not None
        watch = watch or Watch()
        watch.note = lambda text: self.tell("image_retried", image=name, message=text)
        reference = parse_reference(name)
        known = self.digests.get(name)
        if known is None or not reference.name or reference.digest:
            return self._noted(
                name, watch, lambda store: store.pull(name, self.registries, policy=self.policy, watch=watch)
            )
        pinned = f"{reference.repository}@{known}"
        policy: PullPolicy = "never" if self.policy == "never" else "missing"
        try:
            image = self._noted(
                name, watch, lambda store: store.pull(pinned, self.registries, policy=policy, watch=watch)
            )
        except DayflyError as error:
            now = self.store.find(name)
            if now is None:
                raise
            raise NeedsDecision(
                f"image {name} was {known}, is {now.digest}, and what it was cannot be had: {error.message}",
                hint="import the old image again, or pass --accept-changes",
            ) from error
        if self.store.find(name) is None:
            self.store.add_name(image, name)
        return image

    def _noted(self, name: str, watch: Watch, pull: Callable[[ImageStore], Image]) -> Image:
        """Note the digest as soon as it is known: a later attempt goes on with it, wherever the tag moves."""
        assert self.store is not None
        was_here = self.store.find(name) is not None
        started = time.monotonic()
        try:
            image = pull(self.store)
        finally:
            with self._resolving:
                new = bool(watch.resolved) and name not in self.digests
                if new:
                    self.digests[name] = watch.resolved
            if new:
                self.on_resolved()
        if watch.fetched_bytes or not was_here:
            self.tell(
                "image_pulled",
                image=name,
                digest=image.digest,
                bytes=watch.fetched_bytes,
                seconds=round(time.monotonic() - started, 3),
            )
        return image

    def _make(self, name: str, watch: Watch) -> Disk:
        assert self.store is not None
        return self.store.disk(self.resolve(name, watch))

    def _meet_again(self, name: str) -> None:
        error, at = self._errors.get(name, (None, 0.0))
        if error is not None and (not passes(error) or time.monotonic() - at < AGAIN_AFTER_S):
            raise type(error)(error.message, hint=error.hint, cause=error.cause)


async def in_thread(work: Callable[[Watch], T]) -> T:
    """`work` in a thread; when the caller is cancelled it is told to stop, and not waited for."""
    watch = Watch()
    try:
        return await anyio.to_thread.run_sync(work, watch, abandon_on_cancel=True)
    finally:
        watch.stop.set()


def locked_digests(lock: Mapping[str, object]) -> dict[str, str]:
    """Of a job's lock."""
    images = lock.get("images")
    return {str(k): str(v) for k, v in images.items()} if isinstance(images, dict) else {}
