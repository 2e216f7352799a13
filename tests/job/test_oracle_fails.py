"""A job ends itself when reference solutions fail in a row: then it is not the agents that got worse (fault 41)."""

from __future__ import annotations

import pytest

from dayfly.job import JobResult
from dayfly.model import Outcome

FAILS = "#!fake\nwrite /logs/verifier/reward.txt 0\n"
"""As a test script whose tools could not be fetched, and that goes on and writes 0 for everyone."""
AGENT = {"name": "mine", "kind": "command", "options": {"argv": ["sh", "-c", "true"]}}


@pytest.fixture
def run(make_task, plan_job, run_fake):
    def go(broken: str, agents: list[object] | None = None, **more: object) -> JobResult:
        for number, kind in enumerate(broken):
            make_task(f"task-{number}", **({"test": FAILS} if kind == "x" else {}))
        return run_fake(plan_job(agents or ["oracle", AGENT], concurrency=1, **more))

    return go


def test_three_failures_in_a_row_stop_the_job(run):
    result = run("xxxxxx")
    assert "reference solutions of 3 tasks" in result.stopped
    assert (result.exit_code, result.interrupted) == (4, False)
    assert 3 <= sum(r.agent == "oracle" and r.graded for r in result.records) < 6


@pytest.mark.parametrize(
    ("broken", "more"),
    [
        ("xx.xx.x", {}),
        ("xxxx", {"stop_after_oracle_failures": 0}),
        ("xxxx", {"agents": ["oracle", "no-op"]}),
        ("xxxx", {"agents": [AGENT]}),
    ],
    ids=["one passes in between", "switched off", "nobody to be judged", "no oracle"],
)
def test_other_failures_do_not(run, broken, more):
    result = run(broken, **more)
    assert (result.stopped, result.exit_code) == ("", 0)
    assert all(r.outcome in (Outcome.PASSED, Outcome.FAILED) for r in result.records)
