"""Writing so that it survives `kill -9` and power loss: temporary name, fsync, rename, fsync folder.

Everything is private to the caller: folders 0700, files 0600.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dayfly.errors import HostError, NotFoundError
from dayfly.evidence.digests import canonical_json

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600


@contextmanager
def host_errors(doing: str) -> Iterator[None]:
    """Turn an `OSError` into a `HostError` that says what was being done."""
    try:
        yield
    except OSError as error:
        hints = {
            errno.ENOSPC: "free disk space, or put --jobs-dir on a larger disk",
            errno.EDQUOT: "your disk quota is used up; free space, or put --jobs-dir elsewhere",
            errno.EACCES: "check who owns the folder and its mode",
            errno.EROFS: "the file system is read-only; put --jobs-dir elsewhere",
        }
        where = f" ({error.filename})" if error.filename else ""
        raise HostError(
            f"{doing} failed: {error.strerror or error}{where}", hint=hints.get(error.errno or 0)
        ) from error


def write_durable(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, durably: afterwards it holds all of the old or all of the new bytes.

    Raises `HostError`.
    """
    with host_errors(f"writing {path}"):
        temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
        try:
            write_new(temporary, data, durable=True)
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def write_new(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Make the private file `path`. Raises `FileExistsError` when there is anything, a link included."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, PRIVATE_FILE)
    with os.fdopen(fd, "wb", buffering=0) as file:
        write_all(file.fileno(), data)
        if durable:
            os.fsync(file.fileno())


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; a single `write` may be cut short by a signal or a full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(path: Path) -> None:
    """Make a private folder and its missing parents, durably."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):  # another thread or process was faster
        path.mkdir(PRIVATE_FOLDER)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Make every file and folder at and below `folder` private and durable."""
    folder.chmod(PRIVATE_FOLDER)
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                sync_tree(path)
            elif entry.is_file(follow_symlinks=False):
                _sync_file(path)
    sync_folder(folder)


def _sync_file(path: Path) -> None:
    if stat.S_IMODE(path.lstat().st_mode) != PRIVATE_FILE:
        path.chmod(PRIVATE_FILE)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(folder_tmp: Path, folder_final: Path) -> None:
    """Give a finished folder its final name, durably; what is there under that name is never overwritten.

    Both must be on one file system. Raises `HostError` (cause `exists` when the name is taken).
    """
    with host_errors(f"publishing {folder_final}"):
        sync_tree(folder_tmp)
        make_folders(folder_final.parent)
        move_folder(folder_tmp, folder_final)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder durably. Raises `HostError` (cause `exists`) when `target` is there, else `OSError`."""
    # rename(2) would replace an empty folder; two of our own never race, as the job's lock is held.
    if os.path.lexists(target):
        raise _taken(target)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _taken(target) from error
        raise
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def _taken(path: Path) -> HostError:
    return HostError(f"{path} is there already and is not overwritten", cause="exists")


def remove_tree(folder: Path) -> None:
    """Delete a folder that may hold anything, folders without permissions included. Absent is fine."""

    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except PermissionError:
        _unlock(folder)
        shutil.rmtree(folder)


def _unlock(folder: Path) -> None:
    folder.chmod(PRIVATE_FOLDER)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _unlock(Path(entry.path))


# --- JSON files and the event log ------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises `NotFoundError`, or `HostError` naming the file when it is broken."""
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is not there") from error
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HostError(
            f"{path} is not valid JSON: {error}",
            hint="the file was changed or damaged; `dayfly show --verify` lists what differs",
            cause="broken_file",
        ) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def append_event(path: Path, event: dict[str, Any], *, durable: bool = False) -> None:
    """Add one line to an event log, with a single write, so that lines of several writers never mix.

    Raises `HostError`; `ValueError` or `TypeError` for an event that is not JSON.
    """
    line = canonical_json(event) + b"\n"
    with host_errors(f"writing {path}"):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)


def end_torn_line(path: Path) -> None:
    """After a crash: end a half-written last line, so that the next event does not stick to it."""
    with host_errors(f"writing {path}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
        finally:
            os.close(fd)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log in order; torn lines are left out. A log that is not there has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
