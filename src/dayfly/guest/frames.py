"""Frames and fields of the guest protocol (`guest/PROTOCOL.md`): pure, and strict about what a guest sends."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from dayfly.errors import GuestLost

MAX_PAYLOAD = 64 * 1024
WINDOW = 128 * 1024
"""Bytes that may be under way per stream and direction before the receiver has granted more."""
MAX_FIELDS = 4096

_HEADER = struct.Struct("<IBBHI")
HEADER_SIZE = _HEADER.size
MORE = 1
"""Flag of a REQUEST that goes on in the next one."""


class Type(IntEnum):
    REQUEST = 1
    REPLY = 2
    ERROR = 3
    DATA = 4
    END = 5
    CREDIT = 6
    CANCEL = 7
    PING = 8
    PONG = 9
    STARTED = 10


FROM_GUEST = frozenset({Type.REPLY, Type.ERROR, Type.DATA, Type.END, Type.CREDIT, Type.PONG, Type.STARTED})


@dataclass(frozen=True, slots=True)
class Frame:
    type: Type
    id: int
    channel: int = 0
    payload: bytes = b""


def violation(message: str) -> GuestLost:
    """The guest broke the protocol: that ends this VM and nothing else."""
    return GuestLost(f"the guest broke the protocol: {message}", cause="protocol_violation")


def encode(type: Type, id: int, payload: bytes = b"", channel: int = 0, flags: int = 0) -> bytes:
    return _HEADER.pack(len(payload), type, channel, flags, id) + payload


class FrameReader:
    """Cuts a byte stream from a guest into frames. Holds at most one frame that is not whole."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now. Raises `GuestLost` (protocol_violation)."""
        rest = self._rest
        rest += data
        frames: list[Frame] = []
        at = 0
        while len(rest) - at >= HEADER_SIZE:
            length, type, channel, flags, id = _HEADER.unpack_from(rest, at)
            _check_header(length, type, channel, flags)
            end = at + HEADER_SIZE + length
            if len(rest) < end:
                break
            frames.append(Frame(Type(type), id, channel, bytes(rest[at + HEADER_SIZE : end])))
            at = end
        del rest[:at]
        return frames


def _check_header(length: int, type: int, channel: int, flags: int) -> None:
    if length > MAX_PAYLOAD:
        raise violation(f"a frame of {length} bytes")
    if type not in FROM_GUEST or flags != 0 or channel > 2:
        raise violation(f"a frame of type {type}, channel {channel}, flags {flags}")


Value = bytes | str | int


def encode_fields(fields: Iterable[tuple[str, Value]]) -> bytes:
    """Each field is its key's length (1 byte), key, value's length (4 bytes), value."""
    out = bytearray()
    for key, value in fields:
        raw = raw_value(value)
        name = key.encode()
        out += bytes([len(name)]) + name + len(raw).to_bytes(4, "little") + raw
    return bytes(out)


def raw_value(value: Value) -> bytes:
    """Text as UTF-8 with surrogate escapes (a name of any bytes survives), numbers in decimal."""
    if isinstance(value, bytes):
        return value
    return str(value).encode("utf-8", "surrogateescape")


class Fields:
    """The fields of a reply, read strictly: what is absent or no number is a violation."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    @classmethod
    def decode(cls, data: bytes) -> Fields:
        values: dict[str, bytes] = {}
        at = count = 0
        while at < len(data):
            count += 1
            key_end = at + 1 + data[at]
            start = key_end + 4
            end = start + int.from_bytes(data[key_end:start], "little")
            if start > len(data) or end > len(data) or count > MAX_FIELDS:
                raise violation("fields that are not well formed")
            values[data[at + 1 : key_end].decode("ascii", "replace")] = data[start:end]
            at = end
        return cls(values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str) -> bytes:
        value = self._values.get(key)
        if value is None:
            raise violation(f"a reply without {key!r}")
        return value

    def text(self, key: str, most: int = 1000) -> str:
        """For showing: bounded, without control characters."""
        text = self.raw(key).decode("utf-8", "replace")
        return "".join(c if c.isprintable() else " " for c in text[:most])

    def number(self, key: str, most: int = 2**63 - 1) -> int:
        """A decimal between 0 and `most`."""
        raw = self.raw(key)
        if not raw.isdigit() or len(raw) > 19 or int(raw) > most:
            raise violation(f"{key!r} is {raw[:32]!r}")
        return int(raw)
