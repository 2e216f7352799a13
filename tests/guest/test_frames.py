"""Frames and fields: whole or not, in pieces or not, and nothing that is not allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import GuestLost
from dayfly.guest.frames import (
    FROM_GUEST,
    MAX_PAYLOAD,
    Fields,
    Frame,
    FrameReader,
    Type,
    encode,
    encode_fields,
)

frames = st.lists(
    st.builds(
        Frame,
        type=st.sampled_from(sorted(FROM_GUEST)),
        id=st.integers(0, 2**32 - 1),
        channel=st.integers(0, 2),
        payload=st.binary(max_size=300),
    ),
    max_size=8,
)


@given(frames, st.lists(st.integers(0, 2000)))
def test_a_stream_cut_anywhere_gives_the_same_frames(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(encode(f.type, f.id, f.payload, f.channel) for f in sent)
    reader, got = FrameReader(), []
    at = 0
    for cut in sorted(c for c in cuts if c < len(data)):
        got += reader.feed(data[at:cut])
        at = cut
    got += reader.feed(data[at:])
    assert got == sent


@pytest.mark.parametrize(
    "header",
    [
        encode(Type.DATA, 1, b"")[:0] + (MAX_PAYLOAD + 1).to_bytes(4, "little") + bytes([4, 1, 0, 0, 1, 0, 0, 0]),
        b"\xff" * 12,
        encode(Type.REQUEST, 1),
        encode(Type.PING, 0),
        encode(Type.CANCEL, 1),
        encode(Type.DATA, 1, b"x", channel=3),
        encode(Type.DATA, 1, b"x", flags=1),
    ],
)
def test_what_a_guest_may_not_send(header: bytes) -> None:
    with pytest.raises(GuestLost) as caught:
        FrameReader().feed(header)
    assert caught.value.cause == "protocol_violation"


def test_a_frame_that_is_not_whole_is_all_that_is_kept() -> None:
    reader = FrameReader()
    data = encode(Type.DATA, 1, b"x" * MAX_PAYLOAD, channel=1) * 10
    for at in range(0, len(data), 50_000):
        reader.feed(data[at : at + 50_000])
        assert len(reader._rest) <= MAX_PAYLOAD + 12


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=9), st.binary(max_size=100), max_size=9))
def test_fields_survive(values: dict[str, bytes]) -> None:
    decoded = Fields.decode(encode_fields(values.items()))
    assert {k: decoded.raw(k) for k in values} == values


@given(st.binary(max_size=64))
def test_fields_of_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        Fields.decode(data)
    except GuestLost as error:
        assert error.cause == "protocol_violation"


@pytest.mark.parametrize("value", [b"", b"-1", b"1e3", b"9" * 30, b"\xd9\xa1", b" 1", b"256"])
def test_numbers_are_strict(value: bytes) -> None:
    with pytest.raises(GuestLost):
        Fields({"n": value}).number("n", 255)


def test_text_for_showing_is_bounded_and_harmless() -> None:
    text = Fields({"message": b"\x1b[31m\xff" + b"x" * 5000}).text("message")
    assert len(text) == 1000
    assert "\x1b" not in text
