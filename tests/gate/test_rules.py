"""Each rule broken alone: from one pair of sides that passes, one change, and that rule is the one that decides."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dayfly.gate.policy import Quarantine, QuarantineEntry
from dayfly.gate.verdict import EXIT_CODES, NOT_ANSWERED, GateVerdict
from dayfly.model import VerifierClass
from dayfly.results.side import Side

POLICY: dict[str, Any] = {
    "metrics": {"score": {"margin": 0.1, "min": 0.4}, "seconds": {"margin": 0.5, "max": 100.0}},
    "must_pass": ["task-000", "tag:smoke"],
    "no_regression": ["task-00*"],
}


@pytest.fixture
def sides(make_side: Any, make_task: Any, marks: Any) -> dict[str, Any]:
    """A hundred tasks, two attempts each, ninety of them passed: on both sides."""

    def side(job: str) -> Side:
        tasks = [make_task(n, m, tags=("smoke",) if n < "task-003" else ()) for n, m in marks(100, 90, 2).items()]
        made: Side = make_side(tasks, job)
        return made

    return {"policy": POLICY, "candidate": side("candidate"), "baseline": side("baseline"), "more": {}}


Sides = dict[str, Any]
Change = Callable[[Sides], None]


def with_tasks(side: Side, count: int, start: int = 0, **changes: Any) -> Side:
    """The side with so many of its tasks changed; what is counted of the whole job follows."""
    chosen = list(side.tasks)[start : start + count]
    tasks = {n: replace(t, **changes) if n in chosen else t for n, t in side.tasks.items()}
    side = replace(side, tasks=tasks)
    return replace(side, job_planned=side.planned, job_graded=side.graded)


def change(which: str, count: int, start: int = 0, **changes: Any) -> Change:
    def apply(sides: Sides) -> None:
        sides[which] = with_tasks(sides[which], count, start, **changes)

    return apply


def change_side(which: str, **changes: Any) -> Change:
    def apply(sides: Sides) -> None:
        sides[which] = replace(sides[which], **changes)

    return apply


def policy(**keys: Any) -> Change:
    def apply(sides: Sides) -> None:
        sides["policy"] = {**sides["policy"], **keys}

    return apply


def confirmed(count: int = 1, start: int = 0, **changes: Any) -> Change:
    """A confirming job with the candidate's first task, and so many tasks of it changed."""

    def apply(sides: Sides) -> None:
        own = sides["candidate"]
        side = replace(own, job_id="again", tasks={n: own.tasks[n] for n in list(own.tasks)[:1]})
        problems = changes.pop("problems", ())
        sides["more"]["confirm"] = [replace(with_tasks(side, count, start, **changes), problems=problems)]

    return apply


def quarantined(*tasks: str, expires: str = "2026-12-31") -> Change:
    def apply(sides: Sides) -> None:
        until = datetime.date.fromisoformat(expires)
        entries = tuple(QuarantineEntry(task=t, owner="ann", reason="flaky", expires=until) for t in tasks)
        sides["more"]["quarantine"] = Quarantine(tasks=entries)

    return apply


LOOSE = policy(coverage={"job": 0.5, "side": 0.5, "task": 0.5, "comparable": 0.5})
WIDE = policy(metrics={"score": {"margin": 1.0}})
MACHINE = (2, 1024, 4096)

INVALID: list[tuple[str, str, list[Change]]] = [
    ("evidence.candidate", "candidate: 1 record", [change_side("candidate", problems=("a/agent/1: changed",))]),
    ("evidence.baseline", "baseline: 1 record", [change_side("baseline", problems=("a/agent/1: changed",))]),
    ("evidence.confirm", "confirming jobs: 1", [confirmed(problems=("a/agent/1: changed",))]),
    ("coverage.job.candidate", "170 of 200", [change_side("candidate", job_graded=170)]),
    ("coverage.job.baseline", "170 of 200", [change_side("baseline", job_graded=170)]),
    ("coverage.job.candidate", "0 of 0", [change_side("candidate", job_planned=0, job_graded=0)]),
    ("coverage.side.candidate", "184 of 200", [change("candidate", 8, 50, marks="..")]),
    ("coverage.side.baseline", "184 of 200", [change("baseline", 8, 50, marks="..")]),
    ("coverage.side.candidate", "0 of 200", [
        change("candidate", 100, marks=".."),
        policy(coverage={"job": 0, "side": 0, "task": 0, "comparable": 0}),
        change_side("candidate", job_graded=200),
    ]),
    ("coverage.task.candidate", "88 of 100 tasks", [
        change("candidate", 12, 50, marks="P."), policy(coverage={"side": 0.9, "task": 0.6})
    ]),
    ("coverage.task.baseline", "88 of 100 tasks", [
        change("baseline", 12, 50, marks="P."), policy(coverage={"side": 0.9, "task": 0.6})
    ]),
    ("comparable.tasks", "12 verifier changed", [change("candidate", 12, 50, verifier_digest="sha256:new")]),
    ("comparable.tasks", "12 task changed", [change("candidate", 12, 50, task_digest="sha256:new")]),
    ("comparable.tasks", "12 limits differ", [change("candidate", 12, 50, machine=MACHINE)]),
    ("comparable.tasks", "12 limits differ", [change("candidate", 12, 50, agent_limit_s=900.0)]),
    ("comparable.tasks", "12 image differs", [change("candidate", 12, 50, disk_digests=("sha256:new",))]),
    ("comparable.tasks", "12 isolation differs", [change("candidate", 12, 50, isolation=("kvm",))]),
    ("comparable.tasks", "12 verifier class differs", [
        change("candidate", 12, 50, verifier_classes=(VerifierClass.SEPARATE,))
    ]),
    ("comparable.attempts", "2 and 1 attempt planned", [
        change("candidate", 90, marks="P"), change("candidate", 10, 90, marks="F"),
        change_side("candidate", attempts=1),
    ]),
    ("require.isolation.candidate", "required tcg", [change("candidate", 1, 50, isolation=("fake", "tcg"))]),
    ("require.isolation.baseline", "required tcg", [change("baseline", 1, 50, isolation=("fake",))]),
    ("require.isolation.candidate", "required tcg", [change("candidate", 1, 50, isolation=())]),
    ("require.isolation.confirm", "required tcg", [confirmed(isolation=("fake",)),
                                                  policy(allow_differences=["isolation"])]),
    ("require.verifier_class.candidate", "required rebooted", [
        change("candidate", 1, 50, verifier_classes=(VerifierClass.SHARED,)),
        policy(require={"verifier_class": "rebooted"}),
    ]),
    ("require.verifier_class.baseline", "required rebooted", [
        change("baseline", 1, 50, verifier_classes=(VerifierClass.SHARED,)),
        policy(require={"verifier_class": "rebooted"}),
    ]),
    ("infra.rate.candidate", "24 of 200", [LOOSE, change("candidate", 12, 50, marks="iv")]),
    ("infra.rate.baseline", "24 of 200", [LOOSE, change("baseline", 12, 50, marks="ip")]),
    ("infra.difference", "12.0 points apart", [
        LOOSE, change("candidate", 12, 50, marks="ii"), policy(infra={"max_rate": 0.5})
    ]),
    ("quarantine.share", "11 of 100 tasks", [quarantined(*(f"task-{i:03}" for i in range(50, 61)))]),
    ("quarantine.expired", "task-050 on 2026-05-31", [quarantined("task-050", expires="2026-05-31")]),
    ("must_pass.patterns", "(did you mean 'task-000'?)", [policy(must_pass=["task-0000"])]),
    ("must_pass.patterns", "(did you mean 'tag:smoke'?)", [policy(must_pass=["tag:smokes"])]),
    ("no_regression.patterns", "'db-*'", [policy(no_regression=["task-*", "db-*"])]),
]  # fmt: skip

FAIL: list[tuple[str, str, list[Change]]] = [
    ("metric.score.margin", "-30.0 points", [change("candidate", 30, 50, marks="FF")]),
    ("metric.score.min", "at least 99 %", [policy(metrics={"score": {"min": 0.99}})]),
    ("metric.score.max", "at most 50 %", [policy(metrics={"score": {"max": 0.5}})]),
    ("metric.seconds.margin", "seconds: +2", [
        policy(metrics={"seconds": {"margin": 0.5}}), change("candidate", 100, seconds_sum=8.0)
    ]),
    ("metric.seconds.max", "at most 2.0 s", [
        policy(metrics={"seconds": {"max": 2}}), change("candidate", 50, seconds_sum=80.0),
        change("candidate", 50, 50, seconds_sum=88.0),
    ]),
    ("must_pass", "task-000 0/2", [WIDE, change("candidate", 1, marks="FF"), policy(no_regression=[])]),
    ("must_pass", "task-002 0/2", [WIDE, change("candidate", 1, 2, marks="FF"), policy(no_regression=[])]),
    ("no_regression", "task-005 0/2 (baseline 2/2), p 0.17", [
        WIDE, change("candidate", 1, 5, marks="tF"), policy(no_regression=["task-005"], alpha=0.2)
    ]),
]  # fmt: skip


def decided(judge: Any, sides: Sides, changes: list[Change]) -> GateVerdict:
    for apply in changes:
        apply(sides)
    verdict = judge(sides["policy"], sides["candidate"], sides["baseline"], **sides["more"])
    assert isinstance(verdict, GateVerdict)
    return verdict


def test_unchanged_it_passes(judge: Any, sides: Sides) -> None:
    verdict = decided(judge, sides, [])
    assert (verdict.verdict, verdict.exit_code, verdict.decided_by) == ("pass", 0, "")
    assert {r.answer for r in verdict.rules} == {"pass"}
    assert "all 6 critical rules hold" in verdict.reason and verdict.more_rollouts is None


@pytest.mark.parametrize(("rule", "said", "changes"), INVALID, ids=[f"{i}-{c[0]}" for i, c in enumerate(INVALID)])
def test_a_broken_rule_of_validity_decides(
    judge: Any, sides: Sides, rule: str, said: str, changes: list[Change]
) -> None:
    verdict = decided(judge, sides, changes)
    assert (verdict.verdict, verdict.exit_code, verdict.decided_by) == ("invalid", EXIT_CODES["invalid"], rule)
    assert said in verdict.reason
    for other in verdict.rules:
        if other.kind in ("metric", "tasks"):
            assert (other.answer, other.reason, other.tasks) == ("inconclusive", NOT_ANSWERED, ())


@pytest.mark.parametrize(("rule", "said", "changes"), FAIL, ids=[f"{i}-{c[0]}" for i, c in enumerate(FAIL)])
def test_a_broken_rule_fails_the_candidate(
    judge: Any, sides: Sides, rule: str, said: str, changes: list[Change]
) -> None:
    verdict = decided(judge, sides, changes)
    assert (verdict.verdict, verdict.exit_code, verdict.decided_by) == ("fail", 1, rule)
    assert said in verdict.reason
    assert [r.id for r in verdict.rules if r.answer != "pass" and r.kind != "notice"] == [rule]


def test_every_rule_of_the_example_is_broken_above(judge: Any, sides: Sides) -> None:
    quarantined("task-050")(sides)
    confirmed()(sides)
    ids = {r.id for r in decided(judge, sides, []).rules if r.kind != "notice"}
    broken = {rule for rule, *_ in INVALID + FAIL}
    assert ids - broken == {"require.verifier_class.confirm"}


@pytest.mark.parametrize(
    ("difference", "changes"),
    [
        ("limits", {"machine": MACHINE, "agent_limit_s": 5.0}),
        ("image", {"disk_digests": ("sha256:new",)}),
        ("isolation", {"isolation": ("kvm",)}),
        ("verifier class", {"verifier_classes": (VerifierClass.SEPARATE,)}),
    ],
)
def test_a_difference_that_is_meant_is_let_through(
    judge: Any, sides: Sides, difference: str, changes: dict[str, Any]
) -> None:
    apply = [change("candidate", 100, **changes)]
    assert decided(judge, sides, apply).decided_by == "comparable.tasks"
    assert decided(judge, sides, [policy(allow_differences=[difference])]).verdict == "pass"


def test_a_changed_task_or_verifier_is_never_meant(judge: Any, sides: Sides) -> None:
    every = ["attempts", "limits", "image", "isolation", "verifier class"]
    changes = [change("candidate", 20, 50, verifier_digest="sha256:new"), policy(allow_differences=every)]
    assert decided(judge, sides, changes).decided_by == "comparable.tasks"


def test_what_is_left_out_within_the_floor_is_listed_and_does_not_decide(judge: Any, sides: Sides) -> None:
    verdict = decided(judge, sides, [change("candidate", 2, 95, verifier_digest="sha256:new")])
    rule = next(r for r in verdict.rules if r.id == "comparable.tasks")
    assert verdict.verdict == "pass" and rule.tasks == ("task-095", "task-096")
    assert "98 of 100 tasks comparable" in rule.reason
    left_out = [t for t in verdict.tasks if t.status == "left out"]
    assert [t.task for t in left_out] == ["task-095", "task-096"]
    assert all(t.reason.startswith("verifier changed") for t in left_out)


def test_quarantined_tasks_count_nowhere(judge: Any, sides: Sides) -> None:
    held = [f"task-{i:03}" for i in range(10)]
    changes = [change("candidate", 10, marks="ii"), change_side("candidate", job_graded=180)]
    assert decided(judge, sides, changes).decided_by == "coverage.side.candidate"
    verdict = decided(judge, sides, [quarantined(*held)])
    assert verdict.verdict == "pass", verdict.reason
    assert [t.task for t in verdict.tasks if t.status == "quarantined"] == held
    assert all("owner ann, until 2026-12-31" in t.reason for t in verdict.tasks if t.status == "quarantined")
    assert verdict.comparison is not None and verdict.comparison.comparable == 90


def test_an_entry_that_names_no_task_is_said(judge: Any, sides: Sides) -> None:
    verdict = decided(judge, sides, [quarantined("gone", "task-001")])
    notice = next(r for r in verdict.rules if r.id == "quarantine.unused")
    assert verdict.verdict == "pass" and notice.kind == "notice" and "gone" in notice.reason


def test_tampered_attempts_are_failures_and_are_said(judge: Any, sides: Sides) -> None:
    verdict = decided(judge, sides, [change("candidate", 1, 50, marks="xx")])
    notice = next(r for r in verdict.rules if r.id == "tampered.candidate")
    assert notice.tasks == ("task-050",) and verdict.candidate.score == pytest.approx(0.89)
    assert next(t for t in verdict.tasks if t.task == "task-050").status == "regressed"
