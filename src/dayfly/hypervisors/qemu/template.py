"""Templates: a guest booted once to its waiting agent, saved, and from then on forked.

A template is made before any image, secret or workload exists for it; its disks are blank. It lives in the cache as
`templates/<key>/{ram,state,meta.json}` and, in a process that uses it, as a sealed memory file: QEMU 7.2 opens
the RAM file for writing even when it maps it privately, and a clone that could write it could corrupt all others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from dayfly.errors import BootError, HostError
from dayfly.hypervisors.qemu.disks import extents, open_in
from dayfly.hypervisors.qemu.lock import try_lock

PAGE = 4096
CHUNK = 1024 * 1024
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Build = Callable[[int, int], Awaitable[None]]
"""Boots a guest with the given shared RAM file and saves its state to the other descriptor."""


@dataclass(frozen=True)
class Template:
    """A template ready to fork in this process. `close` when no more forks are to come."""

    digest: str
    ram: int
    """Sealed memory file: every clone maps it privately."""
    state: int
    created_unix: float
    lock: int
    """Shared lock that keeps `prune` away."""

    @contextmanager
    def open_state(self) -> Iterator[int]:
        """The state with a file position of its own."""
        fd = os.open(f"/proc/self/fd/{self.state}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        for fd in (self.ram, self.state, self.lock):
            os.close(fd)


@dataclass(frozen=True)
class TemplateInfo:
    """One template in the cache, for `dayfly template list`."""

    digest: str
    bytes: int
    created_unix: float
    used_unix: float
    in_use: bool
    parts: Mapping[str, object]


def key_digest(parts: Mapping[str, object]) -> str:
    """sha256:… over everything that a saved guest depends on."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


class TemplateStore:
    """The templates of one cache folder; any number of processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def get(self, parts: Mapping[str, object], ram_bytes: int, build: Build, timeout_s: float) -> Template:
        """The template for `parts`: loaded, or built by one process while others wait for it.

        Raises `BootError` when it cannot be built, `HostError` when another process does not finish in time.
        """
        digest = key_digest(parts)
        await anyio.to_thread.run_sync(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        lock = await self._lock_for_building(digest, timeout_s)
        try:
            loaded = await anyio.to_thread.run_sync(self._load, digest)
            if loaded is None:
                await self._build(parts, ram_bytes, build)
                loaded = await anyio.to_thread.run_sync(self._load, digest)
        finally:
            os.close(lock)
        if loaded is None:
            raise BootError("a template could not be read right after it was made", hint=f"look at {self.folder}")
        return loaded

    async def _lock_for_building(self, digest: str, timeout_s: float) -> int:
        with anyio.move_on_after(timeout_s):
            while (fd := try_lock(self._path(digest, ".build"))) is None:  # noqa: ASYNC110 - a file lock
                await anyio.sleep(0.05)
            return fd
        raise HostError(
            f"another process has been building the template for more than {timeout_s:g} s",
            hint="run `dayfly gc`, or look for a hanging dayfly process",
            cause="lock_timeout",
        )

    async def _build(self, parts: Mapping[str, object], ram_bytes: int, build: Build) -> None:
        digest = key_digest(parts)
        self._remove_leftovers(digest)
        with ExitStack() as stack:
            ram = os.memfd_create("dayfly-template", os.MFD_CLOEXEC)
            stack.callback(os.close, ram)
            os.ftruncate(ram, ram_bytes)
            state = os.memfd_create("dayfly-state", os.MFD_CLOEXEC)
            stack.callback(os.close, state)
            await build(ram, state)
            await anyio.to_thread.run_sync(self._keep, digest, parts, ram, state)

    def _keep(self, digest: str, parts: Mapping[str, object], ram: int, state: int) -> None:
        """Write everything under a temporary name, then rename: a template is there whole or not at all."""
        stage = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".{_short(digest)}-"))
        ram_digest = copy_pages(ram, stage / "ram")
        state_digest = copy_pages(state, stage / "state")
        meta = {
            "parts": parts,
            "ram": ram_digest,
            "state": state_digest,
            "created_unix": time.time(),
        }
        (stage / "meta.json").write_text(json.dumps(meta, indent=1))
        shutil.rmtree(self._path(digest), ignore_errors=True)
        stage.rename(self._path(digest))

    def _load(self, digest: str) -> Template | None:
        """Copy a template into sealed memory and check it. None when there is none, or a broken one (removed)."""
        folder = self._path(digest)
        if not folder.is_dir():
            return None
        lock = self._lock_for_use(digest)
        opened = [lock]
        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            for name in ("ram", "state"):
                opened.append(_seal_copy(folder / name, meta[name]))
            created = float(meta["created_unix"])
        except (OSError, ValueError, KeyError, TypeError):
            for fd in opened:
                os.close(fd)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        os.utime(lock)
        return Template(digest, opened[1], opened[2], created, lock)

    def _lock_for_use(self, digest: str) -> int:
        """Shared. `prune` is kept away by the build lock, which we hold; `listing` only looks for a moment."""
        for _ in range(500):
            fd = try_lock(self._path(digest, ".use"), shared=True)
            if fd is not None:
                return fd
            time.sleep(0.01)
        raise HostError(f"the template {digest} stays locked", hint="run `dayfly gc`", cause="lock_timeout")

    def listing(self) -> list[TemplateInfo]:
        """What is in the cache, most recently used first."""
        found = [self._info(p) for p in self.folder.glob("*/meta.json")]
        return sorted((i for i in found if i), key=lambda i: i.used_unix, reverse=True)

    def _info(self, meta_path: Path) -> TemplateInfo | None:
        digest, use = "sha256:" + meta_path.parent.name, meta_path.parent.with_suffix(".use")
        try:
            meta = json.loads(meta_path.read_bytes())
            size = sum(p.stat().st_blocks * 512 for p in meta_path.parent.iterdir())
            used = use.stat().st_mtime if use.exists() else meta_path.stat().st_mtime
            created, parts = float(meta["created_unix"]), meta["parts"]
        except (OSError, ValueError, KeyError):
            return None
        fd = try_lock(use)
        if fd is not None:
            os.close(fd)
        return TemplateInfo(digest, size, created, used, fd is None, parts)

    def prune(self, unused_for_s: float = 0.0) -> list[str]:
        """Remove templates that no process uses, last used at least `unused_for_s` ago; returns their digests."""
        removed = []
        for info in self.listing():
            if time.time() - info.used_unix >= unused_for_s and self._remove(info.digest):
                removed.append(info.digest)
        return removed

    def _remove(self, digest: str) -> bool:
        """Remove one template unless somebody uses or builds it."""
        with ExitStack() as stack:
            for suffix in (".build", ".use"):
                fd = try_lock(self._path(digest, suffix))
                if fd is None:
                    return False
                stack.callback(os.close, fd)
            shutil.rmtree(self._path(digest), ignore_errors=True)
            self._remove_leftovers(digest)
            for suffix in (".use", ".build"):
                self._path(digest, suffix).unlink(missing_ok=True)
        return True

    def _remove_leftovers(self, digest: str) -> None:
        """Stages of a builder that was killed; the caller holds the build lock."""
        for stage in self.folder.glob(f".{_short(digest)}-*"):
            shutil.rmtree(stage, ignore_errors=True)

    def _path(self, digest: str, suffix: str = "") -> Path:
        return self.folder / (digest.removeprefix("sha256:") + suffix)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:16]


def copy_pages(source: int, dest: Path) -> str:
    """Copy a memory file sparsely, leaving out pages of zeros too; returns the digest that `_seal_copy` checks."""
    with ExitStack() as stack:
        new = os.open(dest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        stack.callback(os.close, new)
        os.ftruncate(new, os.fstat(source).st_size)
        for at, data in _pages(source):
            os.pwrite(new, data, at)
        os.fsync(new)
    with dest.open("rb") as file:
        return _content_digest(file.fileno())


def _pages(source: int) -> Iterator[tuple[int, bytes]]:
    """Runs of pages that are not zero."""
    zero = bytes(PAGE)
    for start, end in extents(source):
        for at in range(start, end, CHUNK):
            data = os.pread(source, min(CHUNK, end - at), at)
            run_start: int | None = None
            for offset in range(0, len(data), PAGE):
                if data[offset : offset + PAGE] == zero[: len(data) - offset]:
                    if run_start is not None:
                        yield at + run_start, data[run_start:offset]
                    run_start = None
                elif run_start is None:
                    run_start = offset
            if run_start is not None:
                yield at + run_start, data[run_start:]


def _content_digest(fd: int) -> str:
    digest = hashlib.sha256(str(os.fstat(fd).st_size).encode())
    for at, data in _pages(fd):
        digest.update(at.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _seal_copy(source: Path, wanted: str) -> int:
    """A sealed memory file with the content of `source`. Raises `ValueError` when that is not as it was written."""
    fd = os.memfd_create(f"dayfly-{source.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with ExitStack() as stack:
            old = open_in(stack, source, os.O_RDONLY)
            os.ftruncate(fd, os.fstat(old).st_size)
            digest = hashlib.sha256(str(os.fstat(old).st_size).encode())
            for at, data in _pages(old):
                digest.update(at.to_bytes(8, "little"))
                digest.update(data)
                os.pwrite(fd, data, at)
        if digest.hexdigest() != wanted:
            raise ValueError(f"{source} is damaged")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
