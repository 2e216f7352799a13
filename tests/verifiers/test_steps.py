"""From the verdicts of steps to one, and when the next step is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import VerifierError
from dayfly.model import Task, Verdict
from dayfly.verifiers import combine, shortfall


def step(**fields) -> Task:
    return Task(name="t", digest="", path=Path(), instruction="", image="x", step="s", **fields)


def task(steps: int = 2, **fields) -> Task:
    return step(**fields).model_copy(update={"steps": (step(),) * steps, "step": None})


def verdict(reward: float | None = None, **rewards: float) -> Verdict:
    named = rewards if reward is None else {"reward": reward, **rewards}
    return Verdict(reward=named.get("reward", 0.0), rewards=named, passed=False, exit_code=3)


@pytest.mark.parametrize(
    ("least", "got", "short"),
    [
        ({}, None, False),
        ({"reward": 0.5}, verdict(0.5), False),
        ({"reward": 0.5}, verdict(0.49), True),
        ({"reward": -9.0}, None, True),
        ({"a": 1, "b": 1}, verdict(a=1, b=0.5), True),
        ({"a": 1, "b": 1}, verdict(a=1, b=1), False),
        ({"reward": 0.0}, verdict(a=1), True),
    ],
)
def test_a_missing_reward_is_below_any_least_one(least, got, short):
    assert (shortfall(step(min_reward=least), got) is not None) is short


def test_the_mean_is_taken_of_each_named_reward():
    found = combine(task(), [verdict(1, speed=0.5), verdict(0)], None)
    assert found.rewards == {"reward": 0.5, "speed": 0.25}  # a step without a name counts 0
    assert (found.reward, found.passed, found.exit_code) == (0.5, False, 3)
    assert found.details["reward_from"] == "mean of 2 of 2 steps"


def test_final_is_what_the_last_step_got():
    final = task(reward_strategy="final")
    assert combine(final, [verdict(0), verdict(1)], None).passed
    assert combine(final, [verdict(1), None], "broken") is None
    assert not combine(final, [verdict(1)], "too low").passed


def test_only_what_was_done_whole_passes():
    assert combine(task(), [verdict(1), verdict(1)], None).passed
    assert not combine(task(), [verdict(1)], "too low").passed
    assert not combine(task(), [verdict(1), None], "broken").passed
    assert combine(task(), [None], "broken") is None and combine(task(), [], None) is None


def test_a_mean_of_counts_is_no_reward():
    with pytest.raises(VerifierError) as caught:
        combine(task(), [verdict(passed=12, failed=3), verdict(passed=1, failed=0)], None)
    assert caught.value.cause == "ambiguous_reward"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_a_mean_lies_among_its_rewards(rewards):
    found = combine(task(len(rewards)), [verdict(r) for r in rewards], None)
    assert min(rewards) - 1e-9 <= found.reward <= max(rewards) + 1e-9
