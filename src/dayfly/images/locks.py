"""File locks between processes, with a bound on the wait. The kernel drops them when a process dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dayfly.errors import HostError


@contextmanager
def locked(
    path: Path, timeout_s: float, *, what: str, while_waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`, made if absent. Raises `HostError` after `timeout_s`.

    `while_waiting` is called now and then, and may raise to end the wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    while (fd := _try(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)) is None:
        if time.monotonic() >= deadline:
            raise HostError(
                f"waited {timeout_s:g} s for {what}",
                hint=f"another dayfly process holds {path}; see `fuser {path}`",
                cause="host_timeout",
            )
        while_waiting()
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def try_locked(path: Path) -> Iterator[bool]:
    """Try for the exclusive lock of an existing file at once; a file that is not there counts as locked."""
    try:
        fd = _try(path, os.O_RDONLY, fcntl.LOCK_EX)
    except FileNotFoundError:
        yield True
        return
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def lock_shared(path: Path) -> int | None:
    """A descriptor that holds the shared lock of an existing file; None when it was exclusively locked.

    Raises FileNotFoundError.
    """
    return _try(path, os.O_RDONLY, fcntl.LOCK_SH)


def _try(path: Path, flags: int, kind: int) -> int | None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        # Between open and lock the file may have been deleted or replaced: then the lock means nothing.
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except BlockingIOError:
        pass
    except FileNotFoundError:
        if not flags & os.O_CREAT:  # else the next try makes it
            os.close(fd)
            raise
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
