"""The folder of one rollout while it is being made."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath

from dayfly.errors import DayflyError
from dayfly.evidence.durable import PRIVATE_FILE, PRIVATE_FOLDER, host_errors, write_all

Sink = Callable[[bytes], None]  # as in protocols, which is a layer above

RECORD_NAME = "rollout.json"
DISK_NAME = "disk.img"
MAX_TAIL = 1 << 20
"""Bytes kept of the end of a stream that is over its cap."""


class RolloutFolder:
    """What a rollout leaves (`folder`) and what it only needs while it goes on (`scratch`).

    Implements `protocols.Record`. The agent's files come to lie in `folder`, so no path here follows a link.
    """

    def __init__(self, work: Path, *, max_bytes: int = 64 << 20) -> None:
        """`work` is a folder of this rollout alone; `max_bytes` caps each sink."""
        self.work = work
        self.max_bytes = max_bytes
        self.notes: list[str] = []
        self._folder = work / "evidence"
        self._scratch = work / "scratch"
        with host_errors(f"making {work}"):
            work.mkdir(PRIVATE_FOLDER, parents=True)
            self._folder.mkdir(PRIVATE_FOLDER)
            self._scratch.mkdir(PRIVATE_FOLDER)

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def scratch(self) -> Path:
        """For disks and temporary files; gone when the rollout ends."""
        return self._scratch

    @asynccontextmanager
    async def sink(self, name: str) -> AsyncIterator[Sink]:
        """A new file `name` that takes chunks. Every byte is with the kernel when the call returns.

        Up to `max_bytes` the file is the complete stream. Beyond, it is the first and the last part with a
        marker between them that says how many bytes were dropped.
        """
        with host_errors(f"making {name}"):
            fd = _open_new(self._folder, name)
        stream = BoundedFile(fd, self.max_bytes)

        def take(chunk: bytes) -> None:
            with host_errors(f"writing {name}"):
                stream.write(chunk)

        try:
            yield take
        finally:
            with host_errors(f"writing {name}"):
                stream.close()

    def write(self, name: str, data: bytes) -> None:
        """Make or replace the file `name`. It becomes durable with the rollout."""
        with host_errors(f"writing {name}"):
            fd = _open_new(self._folder, name, replace=True)
            try:
                write_all(fd, data)
            finally:
                os.close(fd)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def keep_disk(self, source: Path | None = None) -> None:
        """Make the final disk (default: `disk.img` of `scratch`) part of the evidence, if there is one.

        Only when its VM is gone: evidence must not change afterwards.
        """
        with host_errors("keeping the final disk"), suppress(FileNotFoundError):
            (source or self._scratch / DISK_NAME).rename(self._folder / DISK_NAME)


class BoundedFile:
    """Head of a stream, then a ring of its end, both in one file, so that a crash loses neither."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._ring = min(MAX_TAIL, max_bytes // 2)
        self._head = max_bytes - self._ring
        self.total = 0

    @property
    def dropped(self) -> int:
        return max(0, self.total - self._head - self._ring)

    def write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        room = max(0, self._head - self.total)
        if room:
            self._put(view[:room], self.total)
            view = view[room:]
        over = self.total + len(chunk) - self._head
        self.total += len(chunk)
        if over > 0 and self._ring:
            last = view[-self._ring :]
            at = (over - len(last)) % self._ring
            first = last[: self._ring - at]
            self._put(first, self._head + at)
            self._put(last[len(first) :], self._head)

    def _put(self, view: memoryview, offset: int) -> None:
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def close(self) -> None:
        """Put the ring in order, with the marker before it. Idempotent."""
        if self._fd < 0:
            return
        try:
            if self.dropped:
                ring = os.pread(self._fd, self._ring, self._head)
                turn = (self.total - self._head) % self._ring if self._ring else 0
                marker = f"\n[... {self.dropped} bytes dropped ...]\n".encode()
                self._put(memoryview(marker + ring[turn:] + ring[:turn]), self._head)
        finally:
            os.close(self._fd)
            self._fd = -1


def _open_new(root: Path, name: str, *, replace: bool = False) -> int:
    """Open `name` below `root` for writing and reading, making parents; no component may be a link."""
    parts = _checked(name)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, PRIVATE_FOLDER, dir_fd=folder)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = below
        if replace:
            with suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(parts[-1], flags, PRIVATE_FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _checked(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    bad = not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or name.endswith("/")
    if bad or path == PurePosixPath(RECORD_NAME):
        raise DayflyError(
            f"{name!r} cannot be the name of a file of a rollout",
            hint=f"use a relative path without `..`; {RECORD_NAME} is written when the rollout is sealed",
            cause="bad_name",
        )
    return path.parts
