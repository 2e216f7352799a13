"""The one reward parser: finite numbers or a verifier_error that shows the bytes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import VerifierError
from dayfly.verifiers import choose_reward, parse_rewards
from dayfly.verifiers.rewards import MAX_REWARD_BYTES

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"1", 1.0),
        (b"0\n", 0.0),
        (b" 0.5 \n", 0.5),
        (b"1\r\n", 1.0),
        (b"-2.5e-1", -0.25),
        (b".5", 0.5),
        (b"1.", 1.0),
        (b"+1", 1.0),
        (b"1e308", 1e308),
    ],
)
def test_a_text_reward_is_one_decimal_number(text, value):
    assert parse_rewards(text, None) == {"reward": value}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "no_reward"),
        (b"", "empty_reward"),
        (b"\n\n", "empty_reward"),
        *(
            (bad, "malformed_reward")
            for bad in (
                b"nan", b"NaN", b"inf", b"-Infinity", b"1e309", b"-1e309", b"pass", b"true", b"True", b"1,0",
                b"[1]", b"1 1", b"1\n0", b"0x1", b"1_0", b"1/2", b"50%", b"\xef\xbb\xbf1", b"\xff\xfe1\x00",
                b"1\x00", b"\x00", b'{"reward": 1}', "１".encode(), "1\u00a0".encode(), b"e5", b".", b"--1",
                b"1" * (MAX_REWARD_BYTES + 1),
            )
        ),
    ],
)  # fmt: skip
def test_any_other_text_is_no_verdict(text, cause):
    with pytest.raises(VerifierError) as caught:
        parse_rewards(text, None)
    assert caught.value.cause == cause and caught.value.hint
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "data",
    [
        b"1", b"1.0", b"true", b"null", b'"1"', b"[1]", b"[]", b"{}", b"nan", b"NaN",
        b'{"reward": NaN}', b'{"reward": Infinity}', b'{"reward": -Infinity}', b'{"reward": 1e309}',
        b'{"reward": true}', b'{"reward": null}', b'{"reward": "1"}', b'{"reward": [1]}', b'{"reward": {"a": 1}}',
        b'{"reward": 0, "reward": 1}', b'{"a": {"b": 1, "b": 2}}', b'{"reward": 1', b'{"reward": 1} 1',
        b"{'reward': 1}", b'{"reward": 1,}', b'{"reward": 1,0}', b'{"": 1}', b'{"a\\u0000": 1}', b'{"\\ud800": 1}',
        b'\xef\xbb\xbf{"reward": 1}', b'{"reward\xff": 1}', '{"reward": 1}'.encode("utf-16"),
        b"[" * 60_000, b'{"a":' * 10_000, b'{"reward": 1' + b"0" * 400 + b"}", b'{"reward": 1' + b"0" * 5000 + b"}",
        b'{"reward": 1}' + b" " * MAX_REWARD_BYTES,
    ],
)  # fmt: skip
def test_any_other_json_is_no_verdict(data):
    with pytest.raises(VerifierError) as caught:
        parse_rewards(None, data)
    assert caught.value.cause == "malformed_reward"
    assert repr(data[:10])[2:-1] in caught.value.message and len(caught.value.message) < 500


@pytest.mark.parametrize("data", [b"", b" \r\n"])
def test_an_empty_json_is_no_verdict_even_beside_a_good_text(data):
    with pytest.raises(VerifierError) as caught:
        parse_rewards(b"1", data)
    assert caught.value.cause == "empty_reward"


def test_json_wins_over_text():
    assert parse_rewards(b"1", b'{"reward": 0}') == {"reward": 0.0}
    assert parse_rewards(b"pass", b'{"a": 0.5, "b": 1}\r\n') == {"a": 0.5, "b": 1.0}


@given(finite)
def test_a_number_comes_back_as_it_was_written(value):
    assert parse_rewards(repr(value).encode(), None) == {"reward": value}
    assert parse_rewards(None, json.dumps({"k": value}).encode()) == {"k": value}


@given(st.one_of(st.binary(max_size=60), st.text("0123456789.eE+-naif_, \n\r\t").map(str.encode)))
def test_whatever_bytes_arrive_there_are_finite_numbers_or_an_error_of_ours(data):
    for arguments in ((data, None), (None, data), (data, data)):
        try:
            rewards = parse_rewards(*arguments)
        except VerifierError:
            continue
        assert rewards and all(isinstance(v, float) and math.isfinite(v) for v in rewards.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_json_is_a_verdict_exactly_when_it_is_a_flat_object_of_finite_numbers(value):
    good = (
        isinstance(value, dict)
        and value
        and all(type(v) in (int, float) and math.isfinite(v) and k and k.isprintable() for k, v in value.items())
    )
    data = json.dumps(value).encode()
    if good:
        assert parse_rewards(None, data) == {k: float(v) for k, v in value.items()}
    else:
        with pytest.raises(VerifierError):
            parse_rewards(None, data)


def test_which_of_several_is_the_reward():
    assert choose_reward({"reward": 0.25, "speed": 99.0}, None)[0] == 0.25
    assert choose_reward({"accuracy": 0.75}, None) == (0.75, "the only key, accuracy")
    assert choose_reward({"a": 1.0, "b": 0.0}, None) == (0.5, "the mean of 2 keys")
    assert choose_reward({"a": 40.0, "b": 60.0}, (0.0, 100.0))[0] == 50.0


def test_counts_without_a_reward_are_not_averaged_into_a_pass():
    with pytest.raises(VerifierError) as caught:
        choose_reward({"tests_passed": 12.0, "tests_failed": 3.0}, None)
    assert caught.value.cause == "ambiguous_reward"


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_a_declared_range_holds(value):
    with pytest.raises(VerifierError) as caught:
        choose_reward({"reward": value}, (0.0, 1.0))
    assert caught.value.cause == "reward_out_of_range" and repr(value) in caught.value.message
    assert choose_reward({"reward": value}, None)[0] == value
