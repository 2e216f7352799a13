"""One build with this host's own buildah: for trusted files, and only when somebody says so.

Nothing confines what a Dockerfile runs here: chroot isolation shows it the host's network, processes and devices.
As root the build gets a pid and a mount namespace of its own, so that its end is the end of all its processes.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from dayfly.errors import ConfigError, HostError
from dayfly.evidence import canonical_json
from dayfly.images.builder.blame import failed, timed_out
from dayfly.images.builder.log import BuildLog
from dayfly.images.builder.request import BuildPlan
from dayfly.images.builder.settings import BuildSettings
from dayfly.images.builder.stock import Base
from dayfly.images.layout import INDEX_TYPE
from dayfly.process import kill_group, run, run_async, spawn, wait_gone, which

BUILT = "localhost/dayfly-built:latest"
STORE_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
HINT = "install buildah (1.33 or newer reads heredocs), or leave --builder out: then a VM builds"
FIRST_WITH_ENV = (1, 33)
"""Older ones leave `--env` out of RUN."""


def host_builder() -> str:
    """Which buildah this host has, for the key of builds. Blocking. Raises `HostError`."""
    said = run([which("buildah", HINT), "--version"], timeout_s=30).stdout.decode("utf-8", "replace")
    return f"host {said.split(' (')[0].strip()}"


def refuse_unkept(settings: BuildSettings, builder: str) -> None:
    """Raise `ConfigError` for what only a builder VM can keep: nothing of the settings is passed over."""
    version = tuple(map(int, re.findall(r"\d+", builder)[:2]))
    for wrong, what in (
        (settings.network == "none", "network: none"),
        (bool(settings.allow), "allow"),
        (bool(settings.files), "files"),
        (bool(settings.env) and version < FIRST_WITH_ENV, f"env ({builder} is older than 1.33)"),
    ):
        if wrong:
            raise ConfigError(
                f"--builder host cannot keep the build setting {what}",
                hint="RUN has this host's own network there; leave the setting out, or let a VM build",
            )


async def build_on_host(plan: BuildPlan, work: Path, log: BuildLog) -> Path:
    """Build `plan` in the private folder `work`; returns an OCI layout in it.

    Raises `ImageError` (`build_failed`, `build_timeout`), `HostError`.
    """
    store = _Store(work / "containers")
    try:
        for number, base in enumerate(plan.bases):
            await store.take(base, work / f"base-{number}")
        status = await _run_logged(store.command(*_build_words(plan, work)), plan, log)
        if status != 0:
            raise failed(plan, log)
        await store.run("push", "--quiet", BUILT, f"oci:{work / 'out'}")
        return work / "out"
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(store.remove)


class _Store:
    """buildah with a container storage that lives as long as one build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = which("buildah", HINT)

    def command(self, *words: str) -> list[str | Path]:
        root, runroot = f"--root={self._folder / 'root'}", f"--runroot={self._folder / 'run'}"
        storage = [root, runroot, "--storage-driver=overlay"]
        return [*_alone(), self._buildah, *storage, *words]

    async def run(self, *words: str, cwd: Path | None = None) -> str:
        done = await run_async(self.command(*words), timeout_s=STORE_TIMEOUT_S, cwd=cwd)
        return done.stdout.decode("utf-8", "replace").strip()

    async def take(self, base: Base, layout: Path) -> None:
        """Bring a base image in under the name that the Dockerfile calls it by."""
        await anyio.to_thread.run_sync(_write_layout, base, layout)
        # by its name alone: old ones make an image name of the whole path, and not of every path
        said = await self.run("pull", "--quiet", f"oci:{layout.name}", cwd=layout.parent)
        await self.run("tag", said.splitlines()[-1], base.guest_name)

    def remove(self) -> None:
        """Files of an ordinary user's build belong to its subordinate ids: buildah's namespace removes them."""
        if os.geteuid() != 0 and self._folder.exists():
            with suppress(HostError):
                run([self._buildah, "unshare", "rm", "-rf", self._folder], timeout_s=STORE_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _alone() -> list[str | Path]:
    """An ordinary user's buildah makes namespaces itself, which it could not do within these."""
    if os.geteuid() != 0:
        return []
    return [which("unshare", "install util-linux"), "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc"]


def _build_words(plan: BuildPlan, work: Path) -> list[str]:
    (work / "Dockerfile").write_bytes(plan.text)
    context = work / "context"
    _copy_context(plan, context)
    (work / "ignore").write_bytes(b"")  # what the context leaves out is left out already
    words = ["bud", "--isolation=chroot", "--pull-never", "--layers=false", f"--file={work / 'Dockerfile'}"]
    words += [f"--ignorefile={work / 'ignore'}", f"--tag={BUILT}"]
    words += [f"--build-arg={name}={value}" for name, value in plan.request.args.items()]
    words += [word for name, value in plan.env.items() for word in (f"--env={name}={value}", f"--unsetenv={name}")]
    words += [f"--secret=id={name},src={path.resolve()}" for name, path in plan.request.secrets.items()]
    words += [f"--target={plan.request.target}"] if plan.request.target else []
    for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        soft, hard = resource.getrlimit(kind)  # as they are: raising them may not be allowed
        words += [f"--ulimit={name}={soft}:{hard}"]
    return [*words, str(context)]


def _copy_context(plan: BuildPlan, to: Path) -> None:
    """The files of the context with the modes that they have in a builder VM, so that both build the same."""
    source = plan.context
    to.mkdir()
    for name in sorted(source.names):
        path, copy = source.folder / name, to / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, copy)
        if name in source.meta and (mode := source.meta[name].mode) is not None:
            copy.chmod(mode)


def _write_layout(base: Base, folder: Path) -> None:
    """An OCI layout of links into the image store."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    image = base.image
    for digest in {image.digest, str(image.manifest["config"]["digest"]), *image.layers}:
        (blobs / digest.removeprefix("sha256:")).symlink_to(image.blob(digest))
    top = {
        "mediaType": str(image.manifest.get("mediaType", "application/vnd.oci.image.manifest.v1+json")),
        "digest": image.digest,
        "size": image.blob(image.digest).stat().st_size,
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [top]}
    (folder / "index.json").write_bytes(canonical_json(index))
    (folder / "oci-layout").write_bytes(canonical_json({"imageLayoutVersion": "1.0.0"}))


async def _run_logged(argv: list[str | Path], plan: BuildPlan, log: BuildLog) -> int:
    """The exit status; everything said goes to the log as it comes. Ends with the program, not with its output."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        process = spawn(argv, stdout=writer, stderr=writer)
    finally:
        os.close(writer)
    try:
        with anyio.fail_after(plan.request.timeout_s):
            while process.poll() is None:
                _pass_on(reader, log)
                await anyio.sleep(POLL_S)
        _pass_on(reader, log)
        return process.returncode
    except TimeoutError:
        _pass_on(reader, log)
        raise timed_out(plan, log) from None
    finally:
        with anyio.CancelScope(shield=True):
            kill_group(process)
            await wait_gone(process, STOP_TIMEOUT_S)
            os.close(reader)


def _pass_on(reader: int, log: BuildLog) -> None:
    with suppress(BlockingIOError):
        while chunk := os.read(reader, 65536):
            log.add(chunk)
