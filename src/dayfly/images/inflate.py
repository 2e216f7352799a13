"""Compressed layers and tars, told apart by their first bytes."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Protocol, cast

import zstandard

from dayfly.errors import ImageError

CHUNK = 1 << 20
_BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError)


def is_compressed(start: bytes) -> bool:
    """Whether a file with these first bytes (6 will do) is one that `inflate` inflates."""
    return start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh"))


class Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def inflate(source: Readable, start: bytes, most: int) -> Iterator[bytes]:
    """The content of `source`, whose first bytes are `start`, in chunks; gzip, zstd, xz or bzip2 inflated.

    Raises `ImageError` when it is damaged, or when more than `most` bytes come out.
    """
    total = 0
    stream = _open(source, start)
    while True:
        try:
            chunk = stream.read(CHUNK)
        except _BROKEN as e:
            raise ImageError(f"compressed data is damaged: {e}", hint="copy the image again") from e
        if not chunk:
            return
        total += len(chunk)
        if total > most:
            raise ImageError(f"more than {most} bytes come out of compressed data", cause="image_too_big")
        yield chunk


def _open(opened: Readable, start: bytes) -> Readable:
    # The decoders want no more than read().
    source = cast(IO[bytes], opened)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=source, mode="rb")
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        # A bigger window than 128 MiB is refused: it is memory that a hostile layer would cost.
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return reader.stream_reader(source, read_across_frames=True, closefd=False)
    if start.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(source)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(source)
    return source


class HashingReader:
    """Passes reads through and keeps the sha256 and the length of what was read."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.length = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        self.length += len(data)
        return data

    def drain(self) -> None:
        """Read what a decoder left, such as padding after its end mark."""
        while self.read(CHUNK):
            pass

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"
