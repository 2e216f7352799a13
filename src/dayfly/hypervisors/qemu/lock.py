"""Advisory file locks with a bound; the kernel drops them when their owner dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dayfly.errors import HostError


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Lock `path` (made if absent) without waiting; the descriptor that holds the lock, or None.

    The file may be removed by its last owner between open and lock; then the lock would guard a name that
    is no longer there, so this looks again.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
                return None
            raise
        if _still_named(fd, path):
            return fd
        os.close(fd)


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the exclusive lock of `path`. Blocking: call it in a thread. Raises `HostError` at the bound."""
    deadline = time.monotonic() + timeout_s
    while (fd := try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise HostError(
                f"the lock {path} was not free within {timeout_s:g} s",
                hint="another dayfly process holds it; see `fuser` on that file",
                cause="lock_timeout",
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(fd)


def _still_named(fd: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
