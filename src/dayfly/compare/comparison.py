"""Two sides side by side: pure functions of what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from dayfly.compare.aspects import compare_aspects
from dayfly.compare.counting import count, first_attempt
from dayfly.compare.metrics import Settings, group_by_tag, measure
from dayfly.compare.model import Allowed, Comparison, Flaky, SideFacts, Transitions
from dayfly.compare.pairing import ISOLATION_ORDER, Counted, Terms, pair_tasks
from dayfly.model import VERIFIER_CLASS_ORDER
from dayfly.results.side import FAILS, PASSES, Side


def compare_sides(
    base: Side,
    candidate: Side,
    *,
    alpha: float = 0.05,
    margins: Mapping[str, float] | None = None,
    metrics: Iterable[str] = (),
    allowed: Iterable[Allowed] = (),
    cluster_by: str | None = None,
    min_task_coverage: float = 0.0,
    quarantined: Collection[str] = (),
) -> Comparison:
    """Pair the tasks of both sides and estimate what changed.

    Intervals are two-sided at 1 − 2·`alpha`. `margins` are the largest worsening of a metric, by its name;
    `metrics` names more of pass@K and pass^K. `allowed` differences leave tasks comparable. `cluster_by` is a
    key of the tasks' metadata. A task with a smaller share of graded attempts than `min_task_coverage` is left out.
    """
    meant = tuple(dict.fromkeys(allowed))
    counted, left_out = pair_tasks(base, candidate, Terms(frozenset(meant), min_task_coverage, quarantined))
    same, differences = compare_aspects(base, candidate)
    settings = Settings(alpha, margins or {}, cluster_by)
    return Comparison(
        base=side_facts(base, quarantined),
        candidate=side_facts(candidate, quarantined),
        alpha=alpha,
        same=same,
        differences=differences,
        allowed=meant,
        comparable=len(counted),
        left_out=tuple(left_out),
        transitions=_transitions(counted),
        pairs=tuple(c.pair for c in counted),
        metrics=measure(counted, min(base.attempts, candidate.attempts), metrics, settings),
        groups=group_by_tag(counted, settings),
        flaky=(*_flaky(base, "base"), *_flaky(candidate, "candidate")),
    )


def side_facts(side: Side, quarantined: Collection[str] = ()) -> SideFacts:
    """Which results a side is, and how much of it is graded; quarantined tasks are not counted."""
    tasks = [t for t in side.tasks.values() if t.task not in quarantined]
    counts = [count(t.marks) for t in tasks]
    planned = sum(len(t.marks) for t in tasks)
    graded = sum(n for n, _ in counts)
    shares = [passed / n for n, passed in counts if n]
    isolation = {i for t in tasks for i in t.isolation}
    classes = {c for t in tasks for c in t.verifier_classes}
    return SideFacts(
        job_id=side.job_id,
        job_name=side.job_name,
        agent=side.agent,
        agent_digest=side.agent_digest,
        results_digest=side.digest,
        planned=planned,
        graded=graded,
        faults=sum(t.faults for t in tasks),
        coverage=graded / planned if planned else 0.0,
        tasks=len(tasks),
        attempts=side.attempts,
        score=sum(shares) / len(shares) if shares else None,
        isolation=tuple(sorted(isolation, key=ISOLATION_ORDER.index)),
        verifier_classes=tuple(sorted(classes, key=VERIFIER_CLASS_ORDER.index)),
        started_unix=side.started_unix,
        source=side.source,
        problems=side.problems,
        remarks=side.remarks,
    )


def _transitions(counted: Iterable[Counted]) -> Transitions:
    found = Counter(c.pair.transition for c in counted)
    return Transitions(
        pass_to_fail=found["pass→fail"],
        worse=found["pass→fail"] + found["worse"],
        fail_to_pass=found["fail→pass"],
        better=found["fail→pass"] + found["better"],
        both_pass=found["pass"],
        both_fail=found["fail"],
        mixed=found["mixed"],
    )


def _flaky(side: Side, name: Literal["base", "candidate"]) -> Iterator[Flaky]:
    """Of all tasks of the side, comparable or not."""
    for task in side.tasks.values():
        graded, passed = count(task.marks)
        if 0 < passed < graded:
            yield Flaky(
                task=task.task,
                side=name,
                passed=passed,
                graded=graded,
                passing=attempt_label(task.task, side.agent, task.marks, PASSES),
                failing=attempt_label(task.task, side.agent, task.marks, FAILS),
            )


def attempt_label(task: str, agent: str, marks: str, wanted: str) -> str:
    """TASK/AGENT/ATTEMPT of the first attempt with one of these marks; empty when there is none."""
    number = first_attempt(marks, wanted)
    return "" if number is None else f"{task}/{agent}/{number}"
