"""A job that `run --gate` looked at: what was not begun is not missing, and no other test is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dayfly.gate.early_stop import order_of, terms_of
from dayfly.gate.policy import Policy
from dayfly.gate.verdict import GateVerdict
from dayfly.results.side import Side

DIGEST = "sha256:" + "1" * 64
POLICY: dict[str, Any] = {"metrics": {"score": {"margin": 0.05, "min": 0.99}}, "must_pass": ["task-*"]}


def rules(verdict: GateVerdict) -> dict[str, str]:
    return {r.id: r.answer for r in verdict.rules}


@pytest.fixture
def base(make_side: Any, marks: Any) -> Side:
    side: Side = make_side(marks(60, 60), "baseline")
    return side


@pytest.fixture
def stopped(make_side: Any, base: Side) -> Side:
    """Of sixty tasks, the first eight of the job's order were done, and each failed."""
    order = [task for unit in order_of(base.tasks, 7) for task in unit]
    side: Side = make_side({n: "F" if n in order[:8] else "." for n in base.tasks})
    terms = terms_of(Policy.model_validate(POLICY), DIGEST, base, side.agent, 7)
    return replace(side, early_stop=terms.model_dump(mode="json"))


def test_a_blocked_candidate_fails_without_its_other_rollouts(judge: Any, base: Side, stopped: Side) -> None:
    verdict = judge(POLICY, stopped, base)
    assert (verdict.verdict, verdict.exit_code, verdict.decided_by) == ("fail", 1, "early_stop"), verdict.reason
    assert "8 regressions and 0 improvements in the first 8 tasks" in verdict.reason
    assert verdict.early_stop is not None and verdict.early_stop.evidence >= verdict.early_stop.threshold == 40
    answers = rules(verdict)
    assert answers["coverage.side.candidate"] == answers["comparable.tasks"] == "pass"
    assert answers["metric.score.margin"] == answers["metric.score.min"] == "inconclusive"
    assert sum(t.status == "left out" for t in verdict.tasks) == 52


def test_the_word_of_the_job_is_not_enough(judge: Any, base: Side, stopped: Side) -> None:
    """Under another policy, or against other results, the missing rollouts are missing."""
    for verdict in (
        judge({**POLICY, "alpha": 0.02}, stopped, base, policy_digest="sha256:other"),
        judge(POLICY, stopped, replace(base, digest="sha256:other")),
        judge(POLICY, replace(stopped, early_stop={}), base),
    ):
        assert (verdict.verdict, verdict.decided_by) == ("invalid", "coverage.job.candidate")
        assert verdict.early_stop is None
        assert "early_stop.terms" in rules(verdict)


def test_looking_early_leaves_less_for_the_final_test(judge: Any, base: Side, make_side: Any, marks: Any) -> None:
    """Five regressions (p = 0.031) fail at α = 0.05, and no more when half of it was spent."""
    policy: dict[str, Any] = {"metrics": {"score": {"margin": 0.0}}}
    candidate = make_side(marks(60, 55))
    assert judge(policy, candidate, base).verdict == "fail"
    terms = terms_of(Policy.model_validate(policy), DIGEST, base, candidate.agent, 7)
    looked_at = replace(candidate, early_stop=terms.model_dump(mode="json"))
    verdict = judge(policy, looked_at, base)
    assert verdict.verdict == "inconclusive" and verdict.early_stop is None
    assert verdict.comparison is not None and verdict.comparison.alpha == 0.025
