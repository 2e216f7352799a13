"""The disks of a VM as open descriptors: a read-only image and a writable layer with a hard cap.

The size of the file is the cap: QEMU refuses a write beyond its end, whatever the guest believes.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from dayfly.errors import HostError
from dayfly.hypervisors.qemu.lock import locked
from dayfly.hypervisors.qemu.machine import DISK_VIRTUAL_SIZE
from dayfly.process import run, which

MIB = 1024 * 1024
MKFS_TIMEOUT_S = 120.0

MKFS_OPTIONS = (
    *("-q", "-F", "-b", "4096", "-m", "0", "-L", "work"),
    # the same bytes each time; the guest never sees another disk to confuse this one with
    *("-U", "d0d0d0d0-0000-4000-8000-000000000001"),
    # a sparse file reads as zeros: nothing to initialise, neither now nor by a kernel thread in the guest
    *("-E", "lazy_itable_init=0,lazy_journal_init=1,nodiscard,hash_seed=d0d0d0d0-0000-4000-8000-000000000002"),
    *("-J", "size=16"),
)


def open_in(stack: ExitStack, path: Path | str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def memory_file(stack: ExitStack, name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def open_blank(stack: ExitStack) -> tuple[int, int]:
    """What a template is given in place of its disks: as large as they seem, and empty.

    Returns a descriptor to read and write, and one to read.
    """
    fd = memory_file(stack, "dayfly-blank")
    os.ftruncate(fd, DISK_VIRTUAL_SIZE)
    return fd, open_in(stack, f"/proc/self/fd/{fd}", os.O_RDONLY)


def ensure_writable(path: Path, size_mib: int, cache: Path) -> None:
    """Make the writable layer at `path` unless it is there already (the final disk of a rollout). Blocking."""
    if path.exists():
        return
    source = empty_filesystem(size_mib, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        copy_sparse(source, fresh)
        fresh.replace(path)
    except OSError as error:
        raise HostError(
            f"the writable disk {path} cannot be made: {error.strerror}",
            hint="free some disk space" if error.errno == errno.ENOSPC else None,
            cause="host_disk_full" if error.errno == errno.ENOSPC else "host_error",
        ) from error
    finally:
        fresh.unlink(missing_ok=True)


def empty_filesystem(size_mib: int, cache: Path) -> Path:
    """An empty ext4 of that size in the cache, made once. Blocking."""
    folder = cache / "empty"
    ready = folder / f"v1-{size_mib}.ext4"
    if ready.exists():
        return ready
    folder.mkdir(parents=True, exist_ok=True)
    mkfs = which("mkfs.ext4", "install the package e2fsprogs")
    with locked(folder / ".lock", MKFS_TIMEOUT_S):
        if ready.exists():
            return ready
        fd, name = tempfile.mkstemp(dir=folder, prefix=".making-")
        fresh = Path(name)
        try:
            os.ftruncate(fd, size_mib * MIB)
            run([mkfs, *MKFS_OPTIONS, fresh], timeout_s=MKFS_TIMEOUT_S, env={"E2FSPROGS_FAKE_TIME": "1"})
            fresh.replace(ready)
        finally:
            os.close(fd)
            fresh.unlink(missing_ok=True)
    return ready


def copy_sparse(source: Path, dest: Path) -> None:
    """Copy a file and keep its holes. `dest` is made private to the caller; it must not exist."""
    with ExitStack() as stack:
        old = open_in(stack, source, os.O_RDONLY)
        new = os.open(dest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, new)
        os.ftruncate(new, os.fstat(old).st_size)
        for start, end in extents(old):
            _copy_range(old, new, start, end)


def extents(fd: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data, as (start, end)."""
    size, end = os.fstat(fd).st_size, 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _copy_range(old: int, new: int, start: int, end: int) -> None:
    while start < end:
        os.lseek(new, start, os.SEEK_SET)
        sent = os.sendfile(new, old, start, end - start)
        if sent == 0:
            return
        start += sent
