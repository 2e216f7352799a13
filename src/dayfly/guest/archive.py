"""The archive format of `put` and `get` (`guest/PROTOCOL.md`), reading and writing host files.

What comes out of a guest is hostile: `ArchiveReceiver` checks every name, counts everything, follows no link and
writes only below the folder that it was given. Blocking; the client calls it in a thread.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dayfly.errors import HostError, LimitError
from dayfly.guest.frames import violation
from dayfly.model import EntryMeta, Transfer
from dayfly.protocols import TransferLimits

END, FILE, DIR, LINK, SKIPPED = range(5)
CHUNK = 32 * 1024
MAX_PATH = 4095
MAX_SKIPPED_NAMES = 10_000
NOT_GIVEN = 0xFFFFFFFF
"""In place of a uid or gid: the guest uses the transfer's owner."""

_ENTRY = struct.Struct("<BBHIIIqHH")
_PIECE = struct.Struct("<QI")
_HASHED = struct.Struct("<BIHH")
_ZERO = bytes(CHUNK)
_LATEST_NS = 2**33 * 10**9

Exclude = Callable[[str], bool]


def text_name(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def raw_name(path: str | bytes) -> bytes:
    return path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Entry:
    kind: int
    path: bytes
    mode: int = 0
    uid: int = NOT_GIVEN
    gid: int = NOT_GIVEN
    mtime_ns: int = 0
    target: bytes = b""

    def encode(self) -> bytes:
        head = _ENTRY.pack(
            self.kind,
            0,
            len(self.path),
            self.mode,
            self.uid,
            self.gid,
            self.mtime_ns,
            len(self.target),
            0,
        )
        return head + self.path + self.target

    @property
    def hashed(self) -> bytes:
        """What the digest covers: neither time nor owner."""
        return _HASHED.pack(self.kind, self.mode, len(self.path), len(self.target)) + self.path + self.target


# --- to the guest ----------------------------------------------------------------------------------


@dataclass
class Sent:
    """What an `ArchiveSender` has counted so far."""

    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)
    digest: str = ""


class ArchiveSender:
    """An archive of a host file, folder or some bytes, made block by block."""

    def __init__(
        self,
        source: Path | bytes,
        name: bytes,
        *,
        mode: int | None = None,
        exclude: Exclude | None = None,
        meta: Mapping[str, EntryMeta] | None = None,
    ) -> None:
        """`name` is the single file's name in the guest. For a folder it is empty (its contents are sent), or the
        name of the folder itself, whose mode and owner `meta` then holds under "".
        """
        self.sent = Sent()
        self._prefix = b""
        self._source, self._name, self._mode = source, name, mode
        self._exclude, self._meta = exclude, meta or {}
        self._digest = hashlib.sha256()
        self._blocks = self._all()

    def next_block(self, size: int) -> bytes:
        """About `size` bytes or more of the archive; empty at its end. Raises `HostError`."""
        block = bytearray()
        for part in self._blocks:
            block += part
            if len(block) >= size:
                break
        return bytes(block)

    def close(self) -> None:
        self._blocks.close()

    def _all(self) -> Generator[bytes, None, None]:
        if isinstance(self._source, bytes):
            yield from self._memory(self._source)
        elif self._source.is_dir():
            if self._name:
                yield self._entry(self._made(DIR, self._name, "", self._source.stat()))
                self._prefix = self._name + b"/"
            yield from self._folder(os.fsencode(self._source), b"")
        else:
            yield from self._file(os.fsencode(self._source), self._name, "")
        self.sent.digest = self._digest.hexdigest()
        yield Entry(END, b"").encode()

    def _entry(self, entry: Entry) -> bytes:
        self._digest.update(entry.hashed)
        return entry.encode()

    def _piece(self, offset: int, data: bytes) -> bytes:
        piece = _PIECE.pack(offset, len(data)) + data
        self._digest.update(piece)
        return piece

    def _made(self, kind: int, path: bytes, key: str, st: os.stat_result | None, target: bytes = b"") -> Entry:
        mode = 0o644 if st is None else stat.S_IMODE(st.st_mode)
        if key == "" and self._mode is not None:
            mode = self._mode
        uid = gid = NOT_GIVEN
        if (known := self._meta.get(key)) is not None:
            mode, uid, gid = known.mode, known.uid, known.gid
        mtime_ns = 0 if st is None else st.st_mtime_ns
        return Entry(kind, self._prefix + path, mode & 0o7777, uid, gid, mtime_ns, target)

    def _memory(self, data: bytes) -> Iterator[bytes]:
        yield self._entry(self._made(FILE, self._name, "", None))
        for at in range(0, len(data), CHUNK):
            chunk = data[at : at + CHUNK]
            if chunk != _ZERO[: len(chunk)]:
                yield self._piece(at, chunk)
        yield self._piece(len(data), b"")
        self.sent.files, self.sent.bytes = 1, len(data)

    def _file(self, host_path: bytes, path: bytes, key: str) -> Iterator[bytes]:
        try:
            # a link is followed only when it was named by the caller itself
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if key else 0)
            fd = os.open(host_path, flags)
        except OSError as error:
            raise _host_error(host_path, error) from error
        try:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise HostError(f"{os.fsdecode(host_path)} is not a regular file", cause="not_a_file")
            yield self._entry(self._made(FILE, path, key, st))
            yield from self._content(fd, st.st_size)
        except OSError as error:
            raise _host_error(host_path, error) from error
        finally:
            os.close(fd)
        self.sent.files += 1
        self.sent.bytes += st.st_size

    def _content(self, fd: int, size: int) -> Iterator[bytes]:
        """Pieces cut at multiples of CHUNK, those of zeros left out; the size is what it was at the start."""
        at = 0
        while at < size:
            try:
                at = max(at, os.lseek(fd, at, os.SEEK_DATA) // CHUNK * CHUNK)
            except OSError:
                break  # a hole to the end
            chunk = os.pread(fd, min(CHUNK, size - at), at)
            if not chunk:
                break
            if chunk != _ZERO[: len(chunk)]:
                yield self._piece(at, chunk)
            at += CHUNK
        yield self._piece(size, b"")

    def _folder(self, host_path: bytes, path: bytes) -> Iterator[bytes]:
        try:
            with os.scandir(host_path) as found:
                entries = sorted(found, key=lambda e: e.name)
        except OSError as error:
            raise _host_error(host_path, error) from error
        for found_entry in entries:
            child = path + b"/" + found_entry.name if path else found_entry.name
            yield from self._child(found_entry, child)

    def _child(self, found: os.DirEntry[bytes], path: bytes) -> Iterator[bytes]:
        name = text_name(path)
        is_dir = found.is_dir(follow_symlinks=False)
        if self._exclude is not None and self._exclude(name + "/" if is_dir else name):
            self.sent.skipped.append(name)
            return
        if found.is_symlink():
            target = os.readlink(found.path)  # noqa: PTH115 - names are bytes
            yield self._entry(self._made(LINK, path, name, found.stat(follow_symlinks=False), target))
        elif is_dir:
            yield self._entry(self._made(DIR, path, name, found.stat(follow_symlinks=False)))
            yield from self._folder(found.path, path)
        elif found.is_file(follow_symlinks=False):
            yield from self._file(found.path, path, name)
        else:
            self.sent.skipped.append(name)


def _host_error(path: bytes, error: OSError) -> HostError:
    return HostError(f"{os.fsdecode(path)} cannot be read: {error.strerror}", cause="host_file")


# --- from the guest ----------------------------------------------------------------------------------


class ArchiveReceiver:
    """Writes an archive that a guest sends, piece by piece, to a host file or below a host folder.

    `feed` raises `LimitError` over a cap, `GuestLost` (protocol_violation) for an archive that no honest agent
    sends, `HostError` when the host cannot write.
    """

    def __init__(self, dest: Path, limits: TransferLimits, exclude: Exclude | None = None) -> None:
        self._dest, self._limits, self._exclude = dest, limits, exclude
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self._stack = ExitStack()
        self._parse: Iterator[int] = self._entries()
        self._need = next(self._parse)
        self._root = -1
        self._parent: tuple[bytes, int] | None = None
        self._folders: dict[bytes, bool] = {}
        self._seen: set[bytes] = set()
        self._links: list[tuple[bytes, bytes]] = []
        self._count = self._left_out = 0
        self._single: Path | None = None
        self.ended = False
        self.files = self.bytes = 0
        self.skipped: list[str] = []
        self.entries: dict[str, EntryMeta] = {}

    def feed(self, data: bytes) -> None:
        self._buffer += data
        if self.ended and self._buffer:
            raise violation("bytes after the end of an archive")
        while not self.ended and len(self._buffer) >= self._need:
            try:
                self._need = next(self._parse)
            except StopIteration:
                self.ended = True
                if self._buffer:
                    raise violation("bytes after the end of an archive") from None

    def finish(self, digest: bytes) -> Transfer:
        """Compare with the guest's digest and make the links, which come last."""
        if not self.ended:
            raise violation("an archive without an end")
        if digest != self._digest.digest():
            raise violation("the digest of a transfer does not match its content")
        for path, target in self._links:
            self._write_link(path, target)
        return Transfer(
            files=self.files,
            bytes=self.bytes,
            digest="sha256:" + self._digest.hexdigest(),
            skipped=tuple(self.skipped),
            entries=self.entries,
        )

    def close(self) -> None:
        """Give back descriptors; a single file that is not whole is removed."""
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None
        self._stack.close()
        if self._single is not None and not self.ended:
            self._single.unlink(missing_ok=True)

    # --- parsing: a generator that yields how many bytes it needs next

    def _take(self, length: int) -> bytes:
        taken = bytes(self._buffer[:length])
        del self._buffer[:length]
        return taken

    def _entries(self) -> Iterator[int]:
        first = True
        while True:
            yield _ENTRY.size
            kind, zero, path_length, mode, uid, gid, mtime, target_length, zero2 = _ENTRY.unpack(
                self._take(_ENTRY.size)
            )
            if zero or zero2 or kind > SKIPPED or path_length > MAX_PATH or target_length > MAX_PATH:
                raise violation("an archive entry that is not well formed")
            yield path_length
            path = self._take(path_length)
            yield target_length
            target = self._take(target_length)
            entry = Entry(kind, path, mode, uid, gid, mtime, target)
            if kind == END:
                return
            if kind != SKIPPED and not (kind == DIR and not path):
                self._digest.update(entry.hashed)
            yield from self._one(entry, first)
            first = False

    def _one(self, entry: Entry, first: bool) -> Iterator[int]:
        if first:
            yield from self._first(entry)
            return
        self._check(entry)
        name = text_name(entry.path)
        if self._is_left_out(entry, name):
            self._note_skipped(name)
            if entry.kind == FILE:
                yield from self._content(None, name)
            return
        self._count += 1
        if self._count > self._limits.files:
            raise LimitError(f"the transfer has more than {self._limits.files} entries")
        if entry.kind == SKIPPED:
            self._note_skipped(name)
            return
        if entry.kind == LINK and not is_inside(entry.path, entry.target):
            self._note_skipped(name)
            return
        self.entries[name] = EntryMeta(mode=entry.mode & 0o7777, uid=entry.uid, gid=entry.gid)
        if entry.kind == DIR:
            self._make_folder(entry.path)
        elif entry.kind == LINK:
            self._links.append((entry.path, entry.target))
        else:
            yield from self._file(entry)

    def _first(self, entry: Entry) -> Iterator[int]:
        """The source itself: a file, or a folder whose contents follow."""
        if entry.path or entry.kind not in (FILE, DIR):
            raise violation("an archive that does not start with its source")
        self.entries[""] = EntryMeta(mode=entry.mode & 0o7777, uid=entry.uid, gid=entry.gid)
        if entry.kind == DIR:
            self._open_root(self._dest)
            self._folders[b""] = True
            return
        if self._dest.is_dir() and not self._dest.is_symlink():
            raise HostError(f"{self._dest} is a folder, and the guest has a file", cause="host_file")
        self._open_root(self._dest.parent)
        self._dest.unlink(missing_ok=True)
        self._single = self._dest
        yield from self._written(self._root, os.fsencode(self._dest.name), entry)

    def _open_root(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"{folder} cannot be written: {error.strerror}", cause="host_file") from error
        self._stack.callback(os.close, self._root)

    def _check(self, entry: Entry) -> None:
        if self._single is not None:
            raise violation("more than one entry for a single file")
        parts = entry.path.split(b"/")
        if b"\0" in entry.path or any(p in (b"", b".", b"..") or len(p) > 255 for p in parts):
            raise violation(f"the name {entry.path[:100]!r}")
        if len(parts) > self._limits.depth:
            raise LimitError(f"the transfer has folders nested deeper than {self._limits.depth}")
        if b"/".join(parts[:-1]) not in self._folders or entry.path in self._seen:
            raise violation(f"the name {entry.path[:100]!r} out of order")
        self._seen.add(entry.path)
        if len(self._seen) > 10 * self._limits.files + 1000:
            raise LimitError("the transfer has far too many entries")

    def _is_left_out(self, entry: Entry, name: str) -> bool:
        parent = entry.path.rpartition(b"/")[0]
        left_out = not self._folders[parent]
        if not left_out and self._exclude is not None:
            left_out = self._exclude(name + "/" if entry.kind == DIR else name)
        if entry.kind == DIR:
            self._folders[entry.path] = not left_out
        return left_out

    def _note_skipped(self, name: str) -> None:
        if len(self.skipped) < MAX_SKIPPED_NAMES:
            self.skipped.append(name)

    # --- writing

    def _open_parent(self, path: bytes) -> tuple[int, bytes]:
        """A descriptor of the folder that `path` goes to, reached without following a link."""
        parent, _, name = path.rpartition(b"/")
        if not parent:
            return self._root, name
        if self._parent is None or self._parent[0] != parent:
            at = os.dup(self._root)
            for part in parent.split(b"/"):
                next_at = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = next_at
            if self._parent is not None:
                os.close(self._parent[1])
            self._parent = parent, at
        return self._parent[1], name

    def _make_folder(self, path: bytes) -> None:
        at, name = self._open_parent(path)
        try:
            os.mkdir(name, 0o700, dir_fd=at)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                raise HostError(f"{text_name(path)} is on the host already", cause="host_file") from None
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _file(self, entry: Entry) -> Iterator[int]:
        at, name = self._open_parent(entry.path)
        yield from self._written(at, name, entry)

    def _written(self, at: int, name: bytes, entry: Entry) -> Iterator[int]:
        mode = 0o700 if entry.mode & 0o100 else 0o600
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, mode, dir_fd=at)
        except OSError as error:
            raise self._cannot_write(entry.path, error) from error
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            yield from self._content(fd, text_name(entry.path))
            mtime = min(max(entry.mtime_ns, 0), _LATEST_NS)
            os.utime(fd, ns=(mtime, mtime))
        self.files += 1

    def _content(self, fd: int | None, name: str) -> Iterator[int]:
        """The pieces of one file; `fd` None reads past them."""
        expected = 0
        while True:
            yield _PIECE.size
            head = self._take(_PIECE.size)
            offset, length = _PIECE.unpack(head)
            self._digest.update(head)
            if length > CHUNK or offset < expected or offset + length > 2**62:
                raise violation("a piece of a file out of order")
            end = offset + length
            if fd is not None and (end > self._limits.file_bytes or self.bytes + end > self._limits.bytes):
                raise LimitError(
                    f"{name or 'the file'}: over the limit of {self._limits.file_bytes} bytes a file, "
                    f"{self._limits.bytes} in all"
                )
            if length == 0:
                self._finish_file(fd, offset)
                return
            yield length
            data = self._take(length)
            self._digest.update(data)
            if fd is not None:
                self._write(fd, data, offset)
            expected = end

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        try:
            while data:
                done = os.pwrite(fd, data, offset)
                data, offset = data[done:], offset + done
        except OSError as error:
            raise self._cannot_write(b"a file", error) from error

    def _finish_file(self, fd: int | None, size: int) -> None:
        if fd is None:
            return
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            raise self._cannot_write(b"a file", error) from error
        self.bytes += size

    def _write_link(self, path: bytes, target: bytes) -> None:
        at, name = self._open_parent(path)
        try:
            os.symlink(target, name, dir_fd=at)
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _cannot_write(self, path: bytes, error: OSError) -> HostError:
        return HostError(
            f"{text_name(path)} cannot be written below {self._dest}: {error.strerror}", cause="host_file"
        )


def is_inside(path: bytes, target: bytes) -> bool:
    """Whether a link at `path` stays inside the transfer, whatever other links of it do.

    `..` may only come first: climbing from a real folder ends in a real folder, while climbing after a name may
    climb from wherever that name, being a link, leads.
    """
    if not target or target.startswith(b"/") or b"\0" in target:
        return False
    depth, parts = path.count(b"/"), target.split(b"/")
    ups = 0
    while ups < len(parts) and parts[ups] == b"..":
        ups += 1
    return ups <= depth and b".." not in parts[ups:]
