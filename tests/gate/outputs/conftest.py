"""Verdicts made by hand: one of each answer, and ones full of hostile names."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dayfly.compare.model import Comparison, Metric, SideFacts, Transitions
from dayfly.gate.policy import QuarantineEntry
from dayfly.gate.verdict import GateVerdict, RuleResult, TaskCase
from dayfly.model import VerifierClass

# (verdict, exit code): as `on_inconclusive` says, an inconclusive one has three of them.
ANSWERS = [("pass", 0), ("fail", 1), ("inconclusive", 3), ("inconclusive", 1), ("inconclusive", 0), ("invalid", 4)]

HOSTILE = [
    "a|b",
    "`code`",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](http://evil.example/)",
    "![x](http://evil.example/x.png)",
    "www.evil.example",
    "https://evil.example",
    "@octocat",
    "me@evil.example",
    "#1",
    "line\nbreak",
    "carriage\rreturn",
    "::error title=x::planted",
    "  ::set-output name=x::planted",
    "##[error]planted",
    "%0A::error::planted",
    "\x1b[31mred",
    "\x00nul\x08",
    "\ud800half",
    "\ufffenot a character\uffff",
    "\u202eright to left",
    "&amp;&lt;",
    "]]>",
    "--- ",
    "$x^2$",
    ":tada:",
    "**bold** _it_ ~~gone~~",
    "a\\|b",
    "back\\",
    "</details>",
    "'\"",
    " ",
    "",
    "x" * 100_000,
]

RULES = {
    "coverage.side.candidate": ("validity", "critical"),
    "metric.score.margin": ("metric", "critical"),
    "metric.seconds.margin": ("metric", "supporting"),
    "metric.cost_usd.margin": ("metric", "advisory"),
    "must_pass": ("tasks", "critical"),
}
BROKEN = {
    "pass": {"metric.cost_usd.margin": "fail", "metric.seconds.margin": "inconclusive"},
    "fail": {"metric.score.margin": "fail", "must_pass": "fail", "metric.seconds.margin": "inconclusive"},
    "inconclusive": {"metric.score.margin": "inconclusive", "metric.cost_usd.margin": "fail"},
    "invalid": {"coverage.side.candidate": "invalid", "metric.score.margin": "fail"},
}
"""What each rule that does not pass says, by verdict."""


def side(name: str, **more: Any) -> SideFacts:
    facts = {
        "job_id": f"job-{name}",
        "job_name": name,
        "agent": "agent",
        "agent_digest": "sha256:" + "a" * 64,
        "results_digest": f"sha256:{name}",
        "planned": 20,
        "graded": 19,
        "faults": 1,
        "coverage": 0.95,
        "tasks": 10,
        "attempts": 2,
        "score": 0.75,
        "isolation": ("kvm",),
        "verifier_classes": (VerifierClass.SEPARATE,),
        "started_unix": 1.0,
        "source": "files",
    }
    return SideFacts.model_validate(facts | more)


def comparison() -> Comparison:
    score = Metric(
        name="score", relative=False, higher_is_better=True, known=True, tasks=9, base=0.85, candidate=0.75,
        delta=-0.1, low=-0.2, high=0.01, p_worse=0.04, p_better=0.9, method="Tango score, exact McNemar",
    )  # fmt: skip
    counts = dict.fromkeys(Transitions.model_fields, 0)
    return Comparison(
        base=side("baseline"), candidate=side("candidate"), alpha=0.05, same=(), differences=(), comparable=9,
        left_out=(), transitions=Transitions(**counts), pairs=(), metrics={"score": score},
    )  # fmt: skip


def rules(answer: str) -> tuple[RuleResult, ...]:
    return tuple(
        RuleResult(
            id=id,
            kind=kind,
            tier=tier,
            answer=BROKEN[answer].get(id, "pass"),
            reason=f"{id}: 3 of 4, floor 95 %",
            tasks=("db-migrate",) if id == "must_pass" else (),
        )
        for id, (kind, tier) in RULES.items()
    )


def tasks() -> tuple[TaskCase, ...]:
    return (
        TaskCase(task="db-migrate", status="regressed", base="2/2", candidate="0/2", seconds=1.5),
        TaskCase(task="web-form", status="regressed", base="2/2", candidate="1/2", seconds=2.5),
        TaskCase(task="hard", status="failed", base="0/2", candidate="0/2", seconds=3),
        TaskCase(task="coin", status="flaky", reason="1 of 2 attempts passed", base="1/2", candidate="1/2"),
        TaskCase(task="new", status="left out", reason="only in the candidate", candidate="2/2"),
        TaskCase(task="known-bad", status="quarantined", reason="until 2026-12-31"),
        TaskCase(task="better", status="improved", base="0/2", candidate="2/2", seconds=1),
        TaskCase(task="easy", status="passed", base="2/2", candidate="2/2", seconds=0.25),
    )


@pytest.fixture
def make_verdict() -> Callable[..., GateVerdict]:
    """A verdict of an answer and an exit code; any field can be given."""

    def make(answer: str = "pass", exit_code: int | None = None, **more: Any) -> GateVerdict:
        codes = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid": 4}
        decided = {"pass": "", "fail": "metric.score.margin", "inconclusive": "metric.score.margin"}
        facts: dict[str, Any] = {
            "verdict": answer,
            "exit_code": codes[answer] if exit_code is None else exit_code,
            "reason": "the score fell by 10 points, the margin is 5",
            "rules": rules(answer),
            "decided_by": decided.get(answer, "coverage.side.candidate"),
            "more_rollouts": 40 if answer == "inconclusive" else None,
            "policy_name": "release",
            "policy_digest": "sha256:" + "c" * 64,
            "baseline": side("baseline"),
            "candidate": side("candidate"),
            "tasks": tasks(),
            "quarantined": (
                QuarantineEntry(
                    task="known-bad", owner="core", reason="image is gone", expires=datetime.date(2026, 12, 31)
                ),
            ),
            "comparison": comparison(),
            "dayfly_version": "1.0",
            "decided_unix": 1_800_000_000.0,
        }
        return GateVerdict(**facts | more)

    return make


@pytest.fixture(params=ANSWERS, ids=lambda p: f"{p[0]}-{p[1]}")
def verdict(request: pytest.FixtureRequest, make_verdict: Callable[..., GateVerdict]) -> GateVerdict:
    return make_verdict(*request.param)


@pytest.fixture(params=["pass", "fail", "inconclusive", "invalid"])
def hostile(request: pytest.FixtureRequest, make_verdict: Callable[..., GateVerdict]) -> GateVerdict:
    """Every field that an agent, a task or a person fills holds every hostile name."""
    return make_hostile(make_verdict, request.param, HOSTILE)


def whole(text: str) -> str:
    """What the quarantine file can hold: something, and no half characters."""
    return text.replace("\ud800", "") or "-"


def make_hostile(make: Callable[..., GateVerdict], answer: str, names: Sequence[str]) -> GateVerdict:
    statuses = ["regressed", "failed", "flaky", "quarantined", "left out", "improved", "passed"]
    answers = [answer, "pass"]
    every = " ".join(n[:50] for n in names)
    return make(
        answer,
        reason=every,
        decided_by=names[0],
        rules=tuple(
            RuleResult(id=n, kind="tasks", tier="critical", answer=answers[i % 2], reason=n, tasks=tuple(names))
            for i, n in enumerate(names)
        ),
        policy_name=every,
        baseline=side("baseline", job_id=every, agent=every),
        candidate=side("candidate", agent=every),
        tasks=tuple(
            TaskCase(task=n, status=statuses[i % len(statuses)], reason=n, base=n, candidate=n)
            for i, n in enumerate(names)
        ),
        quarantined=tuple(
            QuarantineEntry(task=n, owner=whole(n), reason=whole(n), expires=datetime.date(2026, 12, 31))
            for n in names
        ),
    )
