"""A build's log: kept in a bounded file, passed on as it comes, with secrets blotted out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from dayfly.images.builder.dockerfile import last_step
from dayfly.images.builder.results import secret_needles

MAX_BYTES = 64 * 1024 * 1024
MAX_LINE = 64 * 1024
TAIL = 64 * 1024
BLOT = b"***"


class BuildLog:
    """Takes chunks of output; use it as a context manager.

    Lines are held back until they are whole, so that a secret is not missed where two chunks meet.
    """

    def __init__(self, path: Path, secrets: Mapping[str, bytes], pass_on: Callable[[bytes], None]) -> None:
        self.path = path
        self._pass_on = pass_on
        contents = secret_needles(secrets).values()
        self._needles = sorted({line for c in contents for line in (c, *c.splitlines()) if len(line) >= 6}, key=len)
        self._held = b""
        self._left = MAX_BYTES
        self._tail = bytearray()
        self._file: IO[bytes] | None = None
        self.step: tuple[int | None, int] | None = None
        """Stage (None: the only one) and step that the builder is at, each from 1."""

    def __enter__(self) -> BuildLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(self._held)
        self._held = b""
        if self._file is not None:
            self._file.close()

    def add(self, chunk: bytes) -> None:
        text = self._held + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not end and len(text) > MAX_LINE:
            end = len(text)
        self._held = text[end:]
        self._write(text[:end])

    def say(self, line: str) -> None:
        """A line of our own."""
        self._write(f"dayfly: {line}\n".encode("utf-8", "replace"))

    @property
    def tail(self) -> bytes:
        return bytes(self._tail) + self._held

    def last_lines(self, count: int) -> str:
        lines = [line for line in self.tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])

    def _write(self, data: bytes) -> None:
        for needle in reversed(self._needles):
            data = data.replace(needle, BLOT)
        if not data:
            return
        self.step = last_step(data) or self.step
        self._tail += data
        del self._tail[:-TAIL]
        kept = data[: self._left]
        self._left -= len(kept)
        if self._file is not None and kept:
            self._file.write(kept)
            if not self._left:
                self._file.write(b"\n[... the log is full; the rest was dropped ...]\n")
        self._pass_on(data)
