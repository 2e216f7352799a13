"""The one place where bytes become rewards. Strict: whatever is not plainly a number is no verdict.

- `reward.json` wins over `reward.txt`, as in Harbor; then the text file is not looked at, not even for errors.
- `reward.txt`: one decimal number; ASCII white space (so also CRLF) around it is allowed.
- `reward.json`: one flat object of finite numbers, with at least one key and none twice.
- UTF-8 without a byte-order mark, at most 64 KiB.

Everything else raises `VerifierError` and shows the offending bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from dayfly.errors import VerifierError

MAX_REWARD_BYTES = 64 * 1024
MAX_KEY_LENGTH = 200
SHOWN_BYTES = 80

_NUMBER = re.compile(rb"[ \t\r\n]*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[ \t\r\n]*")


def parse_rewards(reward_txt: bytes | None, reward_json: bytes | None) -> dict[str, float]:
    """The named rewards in the verifier's files; None means that a file is absent.

    Raises `VerifierError` with cause `no_reward` (no file), `empty_reward` or `malformed_reward`.
    """
    if reward_json is not None:
        return _parse_json(reward_json)
    if reward_txt is not None:
        return {"reward": _parse_text(reward_txt)}
    raise VerifierError(
        "the verifier left no reward",
        hint="it must write /logs/verifier/reward.txt or reward.json; see verifier/test-stdout.txt",
        cause="no_reward",
    )


def choose_reward(rewards: Mapping[str, float], reward_range: tuple[float, float] | None) -> tuple[float, str]:
    """The one reward of a rollout, and the rule that gave it.

    The key `reward`; else the only key; else the mean of all, as Harbor's metrics do. The mean means nothing
    when the numbers are not on one scale (`{"passed": 12, "failed": 3}`), so all must lie in the declared
    range, or in 0 to 1. Raises `VerifierError` for a value outside of the range.
    """
    if "reward" in rewards:
        return _within(rewards["reward"], reward_range), "the key reward"
    if len(rewards) == 1:
        name, value = next(iter(rewards.items()))
        return _within(value, reward_range), f"the only key, {name}"
    low, high = reward_range or (0.0, 1.0)
    outside = {k: v for k, v in rewards.items() if not low <= v <= high}
    if outside:
        name, value = next(iter(outside.items()))
        raise VerifierError(
            f"reward.json has {len(rewards)} keys but not `reward`, and {name} = {value!r} is not within "
            f"{low:g} to {high:g}, so that their mean is not a reward",
            hint="let the verifier write the key `reward`, or declare [dayfly] reward_range",
            cause="ambiguous_reward",
        )
    return math.fsum(rewards.values()) / len(rewards), f"the mean of {len(rewards)} keys"


def _within(value: float, reward_range: tuple[float, float] | None) -> float:
    if reward_range is not None and not reward_range[0] <= value <= reward_range[1]:
        low, high = reward_range
        raise VerifierError(
            f"the reward {value!r} is outside of the declared range {low:g} to {high:g}",
            hint="correct the verifier, or [dayfly] reward_range",
            cause="reward_out_of_range",
        )
    return value


def _parse_text(data: bytes) -> float:
    name = "reward.txt"
    _check_bytes(data, name)
    found = _NUMBER.fullmatch(data)
    if found is None:
        _malformed(name, data, "is not one decimal number")
    return _finite(float(found[1]), name, data)


def _parse_json(data: bytes) -> dict[str, float]:
    name = "reward.json"
    _check_bytes(data, name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) != len(items):
            raise ValueError("has a key twice")
        return dict(items)

    def constant(word: str) -> NoReturn:
        raise ValueError(f"holds {word}, which is not a finite number")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as e:
        _malformed(name, data, f"is not JSON ({e.msg} at character {e.pos})")
    except UnicodeDecodeError:
        _malformed(name, data, "is not UTF-8")
    except RecursionError:
        _malformed(name, data, "is nested too deeply")
    except ValueError as e:
        _malformed(name, data, str(e))
    if not isinstance(value, dict):
        _malformed(name, data, "is not an object of named numbers")
    if not value:
        _malformed(name, data, "has no keys")
    return {_key(key, name, data): _number(key, v, name, data) for key, v in value.items()}


def _key(key: str, name: str, data: bytes) -> str:
    if not key or len(key) > MAX_KEY_LENGTH or not key.isprintable():
        _malformed(name, data, "has a key that is empty, very long or not printable")
    return key


def _number(key: str, value: Any, name: str, data: bytes) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _malformed(name, data, f"gives {key!r} a value that is not a number")
    try:
        return _finite(float(value), name, data)
    except OverflowError:
        _malformed(name, data, "holds a number that is not finite")


def _finite(value: float, name: str, data: bytes) -> float:
    if not math.isfinite(value):
        _malformed(name, data, "holds a number that is not finite")
    return value


def _check_bytes(data: bytes, name: str) -> None:
    if not data.strip(b" \t\r\n"):
        raise VerifierError(
            f"the verifier's {name} is empty ({len(data)} bytes)",
            hint="it may have been cut short, or the disk was full; see verifier/test-stdout.txt",
            cause="empty_reward",
        )
    if len(data) > MAX_REWARD_BYTES:
        _malformed(name, data, f"is longer than {MAX_REWARD_BYTES} bytes")
    if data.startswith(b"\xef\xbb\xbf"):
        _malformed(name, data, "starts with a byte-order mark")


def _malformed(name: str, data: bytes, why: str) -> NoReturn:
    more = f" (the first {SHOWN_BYTES} of {len(data)} bytes)" if len(data) > SHOWN_BYTES else ""
    raise VerifierError(
        f"the verifier's {name} {why}: {data[:SHOWN_BYTES]!r}{more}",
        hint="a malformed reward is no verdict; correct the verifier",
        cause="malformed_reward",
    )
