"""Sparse members of a tar: where the pieces that are stored belong in the file.

Formats (GNU tar manual, appendix "Storing Sparse Files"): the old GNU header of type `S`, and the PAX formats 0.1
(the map in a header) and 1.0 (the map before the data). 0.0, which repeats keys, was written only by GNU tar 1.14.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dayfly.errors import ImageError

BLOCK = 512
MAX_PIECES = 100_000
MAX_SPARSE_SIZE = 2**36
"""A hole costs no byte of the layer, so the layer's own bound does not hold here."""

Pieces = tuple[tuple[int, int], ...]
"""(place in the file, length in bytes), ascending and apart."""


@dataclass(frozen=True)
class Stored:
    """How a sparse member lies in the tar. All in bytes."""

    size: int
    """Of the file."""
    pieces: Pieces
    offset: int
    """Where the pieces' data begin, one after the other."""
    end: int
    """Where the data end; the next header is at the next whole block."""


def is_sparse(flag: bytes, pax: Mapping[bytes, bytes]) -> bool:
    return flag == b"S" or any(key.startswith(b"GNU.sparse.") for key in pax)


def read_stored(
    fd: int, block: bytes, body: int, length: int, pax: Mapping[bytes, bytes], number: Callable[[bytes], int]
) -> Stored:
    """The layout of the sparse member whose header is `block` and whose `length` bytes begin at `body`.

    `number` reads a header's number field. Raises `ImageError` for a map that is broken or of an unknown format.
    """
    if block[156:157] == b"S":
        size, flat, offset = _old_map(fd, block, body, number)
        end = offset + length
    elif b"GNU.sparse.map" in pax:
        size, flat, offset = _decimal(pax.get(b"GNU.sparse.size", b"")), _listed(pax[b"GNU.sparse.map"]), body
        end = offset + length
    elif (pax.get(b"GNU.sparse.major"), pax.get(b"GNU.sparse.minor")) == (b"1", b"0"):
        size = _decimal(pax.get(b"GNU.sparse.realsize", b""))
        flat, offset = _map_before_data(fd, body, length)
        end = body + length
    else:
        raise ImageError("a sparse file of an unknown format", hint="write the layer without --sparse")
    return Stored(size, _checked(flat, size, end - offset), offset, end)


def _old_map(fd: int, block: bytes, body: int, number: Callable[[bytes], int]) -> tuple[int, list[int], int]:
    flat = _fields(block[386:482], number)
    more = block[482:483] != b"\0"
    while more:
        extension = os.pread(fd, BLOCK, body)
        if len(extension) < BLOCK or len(flat) > 2 * MAX_PIECES:
            raise _broken("it does not end")
        flat += _fields(extension[:504], number)
        more = extension[504:505] != b"\0"
        body += BLOCK
    return number(block[483:495]), flat, body


def _fields(data: bytes, number: Callable[[bytes], int]) -> list[int]:
    """Pairs of twelve-byte numbers; unused ones are zero bytes."""
    found: list[int] = []
    for at in range(0, len(data), 24):
        if not data[at]:
            break
        found += (number(data[at : at + 12]), number(data[at + 12 : at + 24]))
    return found


def _listed(text: bytes) -> list[int]:
    return [_decimal(part) for part in text.split(b",")] if text else []


def _map_before_data(fd: int, body: int, length: int) -> tuple[list[int], int]:
    """The count of pieces, then offsets and lengths, one decimal number a line, filled up to whole blocks."""
    text, at, wanted = b"", body, 1
    while (lines := text.count(b"\n")) < wanted:
        if at + BLOCK > body + length:
            raise _broken("it is longer than the member")
        text += os.pread(fd, BLOCK, at)
        at += BLOCK
        if lines == 0 and b"\n" in text:
            wanted = 1 + 2 * _decimal(text.split(b"\n", 1)[0])
            if wanted > 2 * MAX_PIECES:
                raise _broken(f"it has more than {MAX_PIECES} pieces")
    return [_decimal(line) for line in text.split(b"\n")[1:wanted]], at


def _checked(flat: list[int], size: int, stored: int) -> Pieces:
    if len(flat) % 2 or len(flat) > 2 * MAX_PIECES:
        raise _broken("it has no pairs of numbers, or too many")
    if size > MAX_SPARSE_SIZE:
        raise ImageError(f"a sparse file of {size} bytes is over the limit of {MAX_SPARSE_SIZE}")
    pieces = tuple(zip(flat[::2], flat[1::2], strict=True))
    after = 0
    for start, length in pieces:
        if start < after or start + length > size:
            raise _broken("its pieces overlap or leave the file")
        after = start + length
    if sum(length for _, length in pieces) != stored:
        raise _broken("it does not fit the data that are stored")
    return tuple(piece for piece in pieces if piece[1])  # a last empty one says how long the file is


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise _broken("a number is missing")
    return int(text)


def _broken(why: str) -> ImageError:
    return ImageError(f"the map of a sparse file is broken: {why}", hint="the layer is damaged or no tar")
