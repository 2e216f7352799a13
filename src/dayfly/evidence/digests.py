"""One way to write JSON and one way to write digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dayfly.model import Fingerprint

CHUNK = 1 << 20
BLOCK = 4096
_ZERO_BLOCK = bytes(BLOCK)

DISK_DIGEST = "sparse-sha256:"
"""Prefix of the digest of a sparse file; see `sha256_sparse`."""


def canonical_json(obj: Any) -> bytes:
    """The one byte form of a JSON value: keys sorted, no spaces, ASCII (bytes of paths survive).

    Pydantic models may be anywhere in it. Raises `ValueError` for NaN and infinities, `TypeError` for keys
    that are not strings and for values that JSON does not have.
    """
    _refuse_odd_keys(obj)
    return json.dumps(
        obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain
    ).encode("ascii")


def readable_json(obj: Any) -> bytes:
    """JSON for files that people open: keys as given, indented. Digests are over `canonical_json`, never this."""
    return json.dumps(obj, indent=2, ensure_ascii=True, allow_nan=False, default=_plain).encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _refuse_odd_keys(obj: Any) -> None:
    """`json` would write the keys 1 and "1" alike, and two different values would get one digest."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(f"a JSON key must be a string, not {key!r}")
            _refuse_odd_keys(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            _refuse_odd_keys(value)


def sha256_bytes(data: bytes) -> str:
    """`sha256:…` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """`sha256:…` of a file's bytes, streaming. Follows no link. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def sha256_sparse(path: Path) -> str:
    """`sparse-sha256:…` over the size and every 4 KiB block that is not zero, each with its offset.

    For disks: a 4 GiB file with 2 MiB of data costs 2 MiB of hashing. The same content gives the same
    digest wherever its holes are.
    """
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        digest.update(size.to_bytes(8, "big"))
        for start, end in _data_extents(fd, size):
            for offset in range(start, end, CHUNK):
                chunk = os.pread(fd, min(CHUNK, end - offset), offset)
                for at in range(0, len(chunk), BLOCK):
                    block = chunk[at : at + BLOCK]
                    if block != _ZERO_BLOCK[: len(block)]:
                        digest.update((offset + at).to_bytes(8, "big"))
                        digest.update(block)
    finally:
        os.close(fd)
    return DISK_DIGEST + digest.hexdigest()


def _data_extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges that may hold data, widened to whole blocks."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        start -= start % BLOCK
        end = os.lseek(fd, start, os.SEEK_HOLE) if start >= position else size
        end = min(size, -(-max(end, position + 1) // BLOCK) * BLOCK)
        yield max(start, position), end
        position = end


def fingerprint(parts: dict[str, Any]) -> Fingerprint:
    """The start fingerprint over `parts` (JSON values)."""
    return Fingerprint(digest=sha256_bytes(canonical_json(parts)), parts=parts)
