"""`ImageBuilder`: from a Dockerfile to an image in the store. Read `ImageBuilder.build` first."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from dayfly.errors import BootError, GuestLost, HostError, ImageError, SandboxOom
from dayfly.images.builder.builder_image import BUILDER_NAME, ensure_builder, scratch_folder
from dayfly.images.builder.in_vm import build_in_vm
from dayfly.images.builder.kept import kept_layers
from dayfly.images.builder.log import BuildLog
from dayfly.images.builder.on_host import build_on_host, host_builder, refuse_unkept
from dayfly.images.builder.proxy import Proxy, parse_rules
from dayfly.images.builder.request import BuildPlan, BuildRequest, read_request
from dayfly.images.builder.results import make_layout
from dayfly.images.builder.settings import BuildSettings
from dayfly.images.builder.stock import builder_disk
from dayfly.images.builder.stored import StoredImage, stored
from dayfly.images.locks import lock_shared, locked, try_locked
from dayfly.images.store import Image, ImageStore
from dayfly.protocols import Hypervisor

DISK_TIMEOUT_S = 600.0
KEPT_LOGS = 200
LOCK_INTERVAL_S = 0.1
T = TypeVar("T")


@dataclass(frozen=True)
class Built:
    """An image that a Dockerfile stands for now."""

    image: Image
    cached: bool
    """True when it was there already."""
    log: Path
    """The log of the build that made it; gone after many later builds."""
    seconds: float


@dataclass
class ImageBuilder:
    """Builds Dockerfiles, each once. One per process; safe to use from many tasks."""

    store: ImageStore
    hypervisor: Callable[[], Hypervisor]
    """Called in a thread, when a VM is needed."""
    settings: BuildSettings = field(default_factory=BuildSettings)
    resolve: Callable[[str], Image] | None = None
    """Base image name → image, pulled if need be; called in a thread. None: what is in the store."""
    on_output: Callable[[bytes], None] = lambda chunk: None
    folder: Path = field(default_factory=scratch_folder)
    _failed: dict[str, ImageError] = field(default_factory=dict)
    _one_vm: anyio.Lock = field(default_factory=anyio.Lock)

    async def build(self, request: BuildRequest, *, renew: bool = False, name: str = "") -> Built:
        """The image of `request`: from the store if the same was built before, else built now.

        Two processes (or rollouts) that want one image make it once. `renew`: build although it is there. A
        Dockerfile that failed is not tried again by the same `ImageBuilder`. `name`: a further name. Raises
        `ImageError`, `HostError`, `ConfigError` for a bad name.
        """
        begun = time.monotonic()
        request = replace(request, args={**self.settings.args, **request.args})
        builder = await anyio.to_thread.run_sync(self._builder)
        plan = await anyio.to_thread.run_sync(
            partial(
                read_request,
                request,
                self.store,
                self.resolve or self.store.resolve,
                builder if isinstance(builder, str) else builder.digest,
                self.settings.env,
            )
        )
        log = self.folder / "logs" / f"{plan.key[:32]}.log"
        image = None if renew else self.store.find(plan.image_name)
        made = image is None
        if image is None:
            async with _held(self.folder / "locks" / plan.key[:32], request.timeout_s + DISK_TIMEOUT_S):
                image = None if renew else self.store.find(plan.image_name)
                made = image is None
                image = image or await self._make_once(plan, builder, log)
        if name:
            await anyio.to_thread.run_sync(self.store.add_name, image, name)
        return Built(image, not made, log, time.monotonic() - begun)

    async def _make_once(self, plan: BuildPlan, builder: StoredImage | str, log: Path) -> Image:
        """What failed because of the files fails again at once: a job asks once per rollout."""
        if plan.key in self._failed:
            raise self._failed[plan.key]
        try:
            return await self._make(plan, builder, log)
        except ImageError as error:
            if error.cause in ("build_failed", "build_timeout", "secret_leaked"):
                self._failed[plan.key] = error
            raise

    def _builder(self) -> StoredImage | str:
        """The image that builder VMs run, made at first use; or which buildah of this host builds."""
        if self.settings.builder == "host":
            builder = host_builder()
            refuse_unkept(self.settings, builder)
            return builder
        named = self.settings.image
        if named is None or named == BUILDER_NAME:
            return stored(self.store, ensure_builder(self.store, say=self._say))
        return stored(self.store, (self.resolve or self.store.resolve)(named))

    def _say(self, line: str) -> None:
        self.on_output(f"dayfly: {line}\n".encode())

    async def _make(self, plan: BuildPlan, builder: StoredImage | str, log_path: Path) -> Image:
        """Build, then take the result in as any foreign image is taken in."""
        with self._work_folder() as work, BuildLog(log_path, plan.secrets, self.on_output) as log:
            if isinstance(builder, str):
                made = await build_on_host(plan, work, log)
            else:
                made = await self._in_vm(plan, builder, work, log)
            most = 2 * self.settings.storage_mb * 1024 * 1024
            layout, env = work / "layout", tuple(plan.env)
            take_in = partial(make_layout, made, layout, plan.bases, plan.secrets, most=most, env=env)
            await anyio.to_thread.run_sync(take_in)
            image = await anyio.to_thread.run_sync(self.store.import_image, layout, plan.image_name)
        _drop_old_logs(log_path.parent)
        return image

    async def _in_vm(self, plan: BuildPlan, builder: StoredImage, work: Path, log: BuildLog) -> Path:
        """Raises `ImageError`, whatever became of the VM."""
        proxy = None
        if self.settings.network == "proxied":
            proxy = Proxy(parse_rules(self.settings.allow), on_refused=log.say)
        hypervisor = await anyio.to_thread.run_sync(self.hypervisor)
        making_disk = builder_disk(self.folder / "disks", builder, plan.bases, timeout_s=DISK_TIMEOUT_S)
        try:
            async with self._one_vm, _entered(making_disk) as disk:
                storage_mb = self.settings.storage_mb
                with kept_layers(self.folder / "layers", plan, builder.digest, storage_mb) as layers:
                    return await build_in_vm(plan, self.settings, hypervisor, disk, proxy, work, log, layers)
        except (GuestLost, SandboxOom, BootError) as error:
            # never as it is: of a rollout, SandboxOom would count as the agent's
            raise ImageError(
                f"the builder VM of {plan.request.dockerfile} was lost: {error.message}",
                hint=f"{error.hint or ''}\nthe log is {log.path}".strip(),
                cause="builder_lost",
            ) from error
        except ImageError as error:
            if refused := _refused(proxy):
                error.hint = f"RUN was not let to {refused}: see --allow in docs/builds.md\n{error.hint or ''}"
            raise
        finally:
            if proxy is not None:
                _tell_traffic(proxy, log)

    @contextmanager
    def _work_folder(self) -> Iterator[Path]:
        """A private folder; those of dead processes are swept by the next build."""
        root = self.folder / "work"
        root.mkdir(parents=True, exist_ok=True)
        for old in root.iterdir():
            with try_locked(old) as idle:
                if idle:
                    _remove(old)
        folder = Path(tempfile.mkdtemp(dir=root))
        with _locked_folder(folder):
            try:
                yield folder
            finally:
                _remove(folder)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    fd = lock_shared(folder)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _held(path: Path, timeout_s: float) -> AsyncIterator[None]:
    """The lock of a file between processes and tasks, waited for without a thread. Raises `HostError`."""
    deadline = time.monotonic() + timeout_s
    while True:
        lock = locked(path, 0.0, what="another build of the same files")
        try:
            lock.__enter__()
            break
        except HostError as error:
            if error.cause != "host_timeout" or time.monotonic() >= deadline:
                raise
        await anyio.sleep(LOCK_INTERVAL_S)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


@asynccontextmanager
async def _entered(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A blocking context manager, entered in a thread."""
    value = await anyio.to_thread.run_sync(manager.__enter__)
    try:
        yield value
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(manager.__exit__, None, None, None)


def _refused(proxy: Proxy | None) -> str:
    places = [place for place, traffic in proxy.traffic.items() if traffic.refused] if proxy else []
    return ", ".join(places[:5])


def _tell_traffic(proxy: Proxy, log: BuildLog) -> None:
    for place, traffic in sorted(proxy.traffic.items()):
        log.say(
            f"network: {place}: {traffic.connections} connection(s), {traffic.bytes} bytes"
            + (f", {traffic.refused} refused" if traffic.refused else "")
        )


def _drop_old_logs(folder: Path) -> None:
    with suppress(OSError):
        logs = sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in logs[KEPT_LOGS:]:
            path.unlink(missing_ok=True)
