"""Bounded readers for what a VMM writes: its console and its standard error."""

from __future__ import annotations

import asyncio
import os

CONSOLE_HEAD = 64 * 1024
CONSOLE_TAIL = 192 * 1024
CHUNK = 64 * 1024


class Tap:
    """Keeps the first `head` and the last `tail` bytes of a stream, read as they come.

    A callback of the event loop and no task: two hundred VMs have four hundred of these. Owns `fd`.
    """

    def __init__(self, fd: int, *, head: int, tail: int) -> None:
        self._fd: int | None = fd
        self._head_size, self._tail_size = head, tail
        self._head, self._tail, self._dropped = bytearray(), bytearray(), 0
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Take one chunk; False at the end of the stream, or when there is nothing now."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._stop()
            return False
        self._add(data)
        return True

    def _add(self, data: bytes) -> None:
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[max(0, room) :]
        if (over := len(self._tail) - self._tail_size) > 0:
            del self._tail[:over]
            self._dropped += over

    def _stop(self) -> None:
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    @property
    def data(self) -> bytes:
        """What was kept, with a marker where something was dropped."""
        if not self._dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + f"\n[... {self._dropped} bytes dropped ...]\n".encode() + bytes(self._tail)

    def last_lines(self, lines: int = 5) -> str:
        text = self.data[-4096:].decode("utf-8", "replace").replace("\r", "").strip()
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """Take what is still there (at most what a socket buffer holds) and stop."""
        for _ in range(64):
            if not self._read():
                break
        self._stop()
