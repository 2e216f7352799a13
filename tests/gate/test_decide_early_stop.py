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


@pytest.mark.parametrize("broken_off", [1, 4])
def test_tasks_in_the_middle_of_which_it_stopped_are_not_missing(
    judge: Any, make_side: Any, marks: Any, broken_off: int
) -> None:
    base = make_side(marks(60, 60, 3), "baseline")
    order = [task for unit in order_of(base.tasks, 7) for task in unit]
    begun = dict.fromkeys(order[:8], "FFF") | dict.fromkeys(order[8 : 8 + broken_off], "Fcc")
    terms = terms_of(Policy.model_validate(POLICY), DIGEST, base, "agent", 7).model_dump(mode="json")
    side = replace(make_side(dict.fromkeys(base.tasks, "...") | begun), early_stop=terms)
    verdict = judge(POLICY, side, base)
    assert (verdict.verdict, verdict.decided_by) == ("fail", "early_stop"), verdict.reason


def test_a_job_that_went_on_to_its_end_is_not_said_to_be_stopped(
    judge: Any, make_side: Any, base: Side, stopped: Side
) -> None:
    """As after `--no-gate`: the evidence still blocks, and nothing is excused for having been stopped."""
    whole = make_side({n: "F" if t.marks == "F" else "P" for n, t in stopped.tasks.items()})
    side = replace(whole, early_stop=stopped.early_stop, job_planned=120, job_graded=120)
    verdict = judge(POLICY, side, base)
    assert (verdict.verdict, verdict.decided_by) == ("fail", "early_stop")
    assert verdict.early_stop is not None and verdict.early_stop.complete
    assert not [r.reason for r in verdict.rules if "stopped early" in r.reason]
    lost = judge(POLICY, replace(side, job_graded=60), base)
    assert (lost.verdict, lost.decided_by) == ("invalid", "coverage.job.candidate")


def test_the_tier_of_the_score_is_that_of_the_stop(judge: Any, base: Side, stopped: Side) -> None:
    metrics = {"score": {"margin": 0.05, "tier": "supporting"}, "seconds": {"margin": 0.5}}
    terms = terms_of(Policy.model_validate({"metrics": metrics}), DIGEST, base, stopped.agent, 7)
    verdict = judge({"metrics": metrics}, replace(stopped, early_stop=terms.model_dump(mode="json")), base)
    assert verdict.verdict == "fail"
    assert next(r.tier for r in verdict.rules if r.id == "early_stop") == "supporting"


def test_a_baseline_of_which_nothing_is_graded_is_no_crash(judge: Any, make_side: Any) -> None:
    policy = {"metrics": {"score": {"margin": 0.05}}}
    base = make_side(dict.fromkeys("abcdefghij", "i"), "baseline")
    side = make_side(dict.fromkeys("abcdefghij", "P"))
    terms = terms_of(Policy.model_validate(policy), DIGEST, base, side.agent, 7)
    verdict = judge(policy, replace(side, early_stop=terms.model_dump(mode="json")), base)
    assert verdict.verdict == "invalid"
