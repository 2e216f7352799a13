"""What a person should know, and what decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dayfly.gate.case import Case
from dayfly.gate.verdict import RuleResult
from dayfly.gate.words import listed, plural

SHOWN = 10


def notices(case: Case) -> Iterator[RuleResult]:
    for name, side in case.sides:
        if side.remarks:
            yield _notice(f"source.{name}", f"{name}: {listed(side.remarks, SHOWN, '; ')}")
    if case.baseline is not None and case.baseline.label == case.candidate.label:
        yield _notice("same_results", f"{case.candidate.label} is compared with itself, which shows nothing")
    yield from _tampered(case)
    yield from _flaky(case)
    yield from _quarantine(case)
    yield from _not_applied(case)
    if case.candidate.early_stop is not None and case.stopped is None:
        yield _notice(
            "early_stop.terms",
            "the job was run with a gate; it was not stopped by this policy and baseline, so missing rollouts "
            f"count as missing, and α is {case.alpha:g} because of the early looks",
        )


def _notice(id: str, reason: str, tasks: Iterable[str] = ()) -> RuleResult:
    return RuleResult(id=id, kind="notice", tier="advisory", answer="pass", reason=reason, tasks=tuple(tasks))


def _tampered(case: Case) -> Iterator[RuleResult]:
    for name, side in case.sides:
        found = [t.task for t in side.tasks.values() if "x" in t.marks]
        if found:
            yield _notice(
                f"tampered.{name}",
                f"{name}: a verdict was planted or changed in {plural(len(found), 'task')}, which is a failure: "
                + listed(found, SHOWN),
                found,
            )


def _flaky(case: Case) -> Iterator[RuleResult]:
    for name, side in case.sides:
        found = [t for t in case.counted(side) if t.flaky]
        if found:
            said = listed([f"{t.task} {t.passed}/{t.graded}" for t in found], SHOWN)
            yield _notice(
                f"flaky.{name}",
                f"{name}: attempts disagree in {plural(len(found), 'task')}: {said}",
                (t.task for t in found),
            )


def _quarantine(case: Case) -> Iterator[RuleResult]:
    known = {task for _, side in case.sides for task in side.tasks}
    stray = [e.task for e in case.quarantine.tasks if e.task not in known]
    if stray:
        yield _notice("quarantine.unused", f"quarantined, but no task of either side: {listed(stray, SHOWN)}")


def _not_applied(case: Case) -> Iterator[RuleResult]:
    """Said of what compares with a baseline, when there is none."""
    if case.baseline is not None:
        return
    names = [f"metrics.{name}.margin" for name, rule in case.policy.metrics.items() if rule.margin is not None]
    if case.policy.no_regression:
        names.append("no_regression")
    if names:
        yield _notice("not_applied", f"not applied, as no baseline was given: {', '.join(names)}")
