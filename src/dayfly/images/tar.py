"""Reading and writing tar headers: strict, bounded, on bytes.

An own small reader because layers are hostile and Python's `tarfile` is lenient where it matters here: it
guesses at broken headers, decodes names, and has no bound on what one header may cost.
Read: v7, ustar, GNU long names, PAX, sparse files. Refused by name: multi-volume, unknown types.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dayfly.errors import ImageError
from dayfly.images.sparse import BLOCK as BLOCK
from dayfly.images.sparse import Pieces, Stored, is_sparse, read_stored

MAX_ENTRIES = 1_000_000
MAX_EXTENSION = 1 << 20
"""Bytes of one PAX or GNU long-name header; xattrs are at most 64 KiB each in Linux."""
MAX_NAME = 4095
MAX_COMPONENT = 255
MAX_TIME = 2**32 - 1  # what squashfs holds
MAX_ID = 2**32 - 2
MAX_SIZE = 2**40

_ZERO = bytes(BLOCK)
_XATTR = b"SCHILY.xattr."
_DECIMAL = re.compile(rb"[0-9]{1,20}")
_TIME = re.compile(rb"(-?[0-9]{1,20})(\.[0-9]*)?")


class Kind(StrEnum):
    FILE = "0"
    HARDLINK = "1"
    SYMLINK = "2"
    CHAR = "3"
    BLOCK = "4"
    DIR = "5"
    FIFO = "6"


@dataclass(frozen=True, slots=True)
class Entry:
    """One member. `name` and a hard link's `target` are clean: relative, no `.`, no `..`; b"" is the root."""

    name: bytes
    kind: Kind
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    """Seconds, 0 to 2^32-1."""
    size: int = 0
    offset: int = 0
    """Where a file's content starts in what was read."""
    target: bytes = b""
    device: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    pieces: Pieces | None = None
    """Of a sparse file: what is stored from `offset` on, and where it belongs; the rest is zeros."""


def read_entries(fd: int, size: int, *, need_end: bool = False) -> Iterator[Entry]:
    """The members of the tar in the first `size` bytes of the file `fd`, in their order.

    `need_end`: a missing end marker is an error. Without it (layers, whose digest proves that they are
    whole) the end of the file will do, as some builders write it so. Raises `ImageError`.
    """
    at = count = 0
    shared: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    while at + BLOCK <= size:
        block = os.pread(fd, BLOCK, at)
        if block == _ZERO:
            return
        flag, length = _check(block, at)
        body = at + BLOCK
        count += 1
        if count > MAX_ENTRIES:
            raise ImageError(f"the tar has more than {MAX_ENTRIES} entries")
        if flag in b"xgLK":
            data = _extension(fd, body, length, size)
            if flag == b"g":
                shared |= _pax_records(data)
            elif flag == b"x":
                own |= _pax_records(data)
            else:
                own[b"path" if flag == b"L" else b"linkpath"] = data.split(b"\0", 1)[0]
            at = body + _padded(length)
            continue
        pax, own = shared | own, {}
        stored = _stored(fd, block, flag, body, length, pax)
        entry = _entry(block, flag, length, stored or body, pax)
        end = stored.end if stored else body + entry.size
        if end > size:
            raise _truncated(at)
        at = body + _padded(end - body)
        yield entry
    if need_end or own or size % BLOCK:
        raise _truncated(size)


def write_header(entry: Entry) -> bytes:
    """The header blocks of `entry`: ustar, after a PAX header for what does not fit into it."""
    name = entry.name + (b"/" if entry.kind is Kind.DIR else b"")
    records: dict[bytes, bytes] = {}
    if len(name) > 100:
        records[b"path"] = name
    if len(entry.target) > 100:
        records[b"linkpath"] = entry.target
    for key, number in ((b"uid", entry.uid), (b"gid", entry.gid)):
        if number >= 8**7:
            records[key] = b"%d" % number
    for key, number in ((b"size", entry.size), (b"mtime", entry.mtime)):
        if number >= 8**11:
            records[key] = b"%d" % number
    records |= {_XATTR + key: value for key, value in entry.xattrs}
    extended = b""
    if records:
        body = b"".join(_pax_record(key, records[key]) for key in sorted(records))
        extended = _ustar(Entry(b"pax", Kind.FILE, size=len(body)), b"pax", b"x") + pad(body)
    return extended + _ustar(entry, name, entry.kind.value.encode())


def write_tar(*members: tuple[Entry, bytes]) -> bytes:
    """A whole small tar in memory; sizes are taken from the contents."""
    parts = []
    for entry, content in members:
        if len(content) != entry.size:
            raise ValueError(f"{entry.name!r}: size {entry.size}, content {len(content)}")
        parts.append(write_header(entry) + pad(content))
    return b"".join(parts) + END


END = bytes(2 * BLOCK)


def pad(data: bytes) -> bytes:
    """`data` filled up to whole blocks."""
    return data + bytes(-len(data) % BLOCK)


def clean_name(raw: bytes) -> bytes:
    """`raw` below the image's root: without leading `/` and `./` (builders write both), and `a/../b` as `b`.

    Raises `ImageError` for a `..` that leaves the root, as Docker does, and for lengths.
    """
    parts: list[bytes] = []
    for part in raw.split(b"/"):
        if part == b"..":
            if not parts:
                raise ImageError(f"the entry {_show(raw)} leaves the image by '..'", cause="unsafe_name")
            parts.pop()
        elif part not in (b"", b"."):
            parts.append(part)
    name = b"/".join(parts)
    if len(name) > MAX_NAME or any(len(part) > MAX_COMPONENT for part in parts):
        raise ImageError(f"the name of the entry {_show(raw)} is too long for a Linux file system")
    return name


def _check(block: bytes, at: int) -> tuple[bytes, int]:
    stored = _number(block[148:156], "checksum")
    field = range(148, 156)
    unsigned = sum(block) - sum(block[148:156]) + 8 * 0x20
    if stored != unsigned:
        # Some old tars summed the bytes as signed ones.
        signed = unsigned - 256 * sum(1 for i, byte in enumerate(block) if byte > 127 and i not in field)
        if stored != signed:
            raise ImageError(f"broken tar header at byte {at}", hint="the file is damaged or no tar")
    return block[156:157], _within(_number(block[124:136], "size"), MAX_SIZE, "size")


def _stored(
    fd: int, block: bytes, flag: bytes, body: int, length: int, pax: Mapping[bytes, bytes]
) -> Stored | None:
    """How a sparse file lies in the tar; None for anything else."""
    if not is_sparse(flag, pax):
        return None
    if b"size" in pax:
        length = _decimal(pax[b"size"], MAX_SIZE, "size")
    try:
        return read_stored(fd, block, body, length, pax, lambda field: _number(field, "sparse map"))
    except ImageError as e:
        raise ImageError(f"the entry {_show(_raw_name(block, pax))}: {e.message}", hint=e.hint) from e


def _entry(block: bytes, flag: bytes, length: int, content: int | Stored, pax: Mapping[bytes, bytes]) -> Entry:
    """`content`: where the content begins, or how a sparse file's lies."""
    raw = _raw_name(block, pax)
    if flag in b"\x007" or isinstance(content, Stored):
        flag = b"0"
    if flag == b"0" and raw.endswith(b"/"):
        flag = b"5"  # how v7 tars write folders
    if flag not in b"0123456":
        raise ImageError(f"the entry {_show(raw)} is of the unknown type {flag!r}: not supported")
    kind = Kind(flag.decode())
    if b"size" in pax:
        length = _decimal(pax[b"size"], MAX_SIZE, "size")
    name = clean_name(raw)
    if not name and kind is not Kind.DIR:
        raise ImageError(f"an entry with the name {_show(raw)} is no folder")
    target = pax.get(b"linkpath") or block[157:257].split(b"\0", 1)[0]
    return Entry(
        name=name,
        kind=kind,
        mode=_number(block[100:108], "mode") & 0o7777,
        uid=_id(pax.get(b"uid"), block[108:116]),
        gid=_id(pax.get(b"gid"), block[116:124]),
        mtime=_time(pax.get(b"mtime"), block[136:148]),
        # Only files carry content; other kinds may have a size left over from the file they link to.
        size=(content.size if isinstance(content, Stored) else length) if kind is Kind.FILE else 0,
        offset=content.offset if isinstance(content, Stored) else content,
        target=_link_target(kind, target, raw),
        device=_device(block) if kind in (Kind.CHAR, Kind.BLOCK) else (0, 0),
        xattrs=tuple(sorted((key.removeprefix(_XATTR), pax[key]) for key in pax if key.startswith(_XATTR))),
        pieces=content.pieces if isinstance(content, Stored) else None,
    )


def _raw_name(block: bytes, pax: Mapping[bytes, bytes]) -> bytes:
    return pax.get(b"GNU.sparse.name") or pax.get(b"path") or _ustar_name(block)


def _ustar_name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] != b"ustar\0":
        return name  # v7 and GNU have no prefix field
    prefix = block[345 : 476 if block[508:512] == b"tar\0" else 500].split(b"\0", 1)[0]
    return prefix + b"/" + name if prefix else name


def _link_target(kind: Kind, target: bytes, raw: bytes) -> bytes:
    if kind is Kind.HARDLINK:
        target = clean_name(target)
    if kind in (Kind.HARDLINK, Kind.SYMLINK):
        if not target or len(target) > MAX_NAME or b"\0" in target:
            raise ImageError(f"the link {_show(raw)} has no usable target")
        return target
    return b""


def _device(block: bytes) -> tuple[int, int]:
    major = _within(_number(block[329:337], "device"), 0xFFF, "device major number")
    return major, _within(_number(block[337:345], "device"), 0xFFFFF, "device minor number")


def _extension(fd: int, body: int, length: int, size: int) -> bytes:
    if length > MAX_EXTENSION:
        raise ImageError(f"an extended tar header of {length} bytes is over the limit of {MAX_EXTENSION}")
    if body + length > size:
        raise _truncated(body)
    return os.pread(fd, length, body)


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 9)
        digits = data[at:space]
        if space < 0 or not digits.isdigit():
            raise ImageError("broken PAX header: no length")
        end = at + int(digits)
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end <= space or end > len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise ImageError("broken PAX header: a record does not end where it says")
        if b"\0" in value and not key.startswith((_XATTR, b"LIBARCHIVE.")):
            raise ImageError("broken PAX header: a name with a NUL byte")
        records[key] = value
        at = end
    return records


def _pax_record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return b"%d" % length + rest


def _number(field: bytes, what: str) -> int:
    """An octal field, or a GNU base-256 one (first bit set)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field, "big", signed=True)
    text = field.split(b"\0", 1)[0].strip(b" ") or b"0"
    if text.strip(b"01234567"):
        raise ImageError(f"broken tar header: the field {what} is not a number")
    return int(text, 8)


def _decimal(text: bytes, most: int, what: str) -> int:
    if not _DECIMAL.fullmatch(text):
        raise ImageError(f"broken PAX header: {what} is not a number")
    return _within(int(text), most, what)


def _within(value: int, most: int, what: str) -> int:
    if not 0 <= value <= most:
        raise ImageError(f"a tar header gives {value} as {what}: out of range")
    return value


def _id(text: bytes | None, field: bytes) -> int:
    if text is not None:
        return _decimal(text, MAX_ID, "owner")
    return _within(_number(field, "owner"), MAX_ID, "owner")


def _time(text: bytes | None, field: bytes) -> int:
    if text is None:
        return min(max(_number(field, "time"), 0), MAX_TIME)
    match = _TIME.fullmatch(text)
    if not match:
        raise ImageError("broken PAX header: the time is not a number")
    return min(max(int(match[1]), 0), MAX_TIME)


def _ustar(entry: Entry, name: bytes, flag: bytes) -> bytes:
    fields = (
        (name[:100], 100),
        (b"%07o\0" % entry.mode, 8),
        (b"%07o\0" % (entry.uid % 8**7), 8),
        (b"%07o\0" % (entry.gid % 8**7), 8),
        (b"%011o\0" % (entry.size % 8**11), 12),
        (b"%011o\0" % (entry.mtime % 8**11), 12),
        (b" " * 8, 8),
        (flag, 1),
        (entry.target[:100], 100),
        (b"ustar\x0000", 8),
        (b"", 64),
        (b"%07o\0" % entry.device[0], 8),
        (b"%07o\0" % entry.device[1], 8),
    )
    block = b"".join(value.ljust(width, b"\0") for value, width in fields).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _padded(length: int) -> int:
    return length + -length % BLOCK


def _truncated(at: int) -> ImageError:
    return ImageError(f"the tar ends early, at byte {at}", hint="it was cut off; make or copy it again")


def _show(name: bytes) -> str:
    return repr(name[:200].decode("utf-8", "backslashreplace"))
