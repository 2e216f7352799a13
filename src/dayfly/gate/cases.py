"""The tasks as test cases: what became of each, failing first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dayfly.compare.model import LeftOut, Pair
from dayfly.gate.case import Case
from dayfly.gate.verdict import RuleResult, Status, TaskCase
from dayfly.results.side import Side, TaskResults

ORDER: tuple[Status, ...] = ("regressed", "failed", "flaky", "left out", "quarantined", "improved", "passed")


def task_cases(case: Case, rules: Iterable[RuleResult]) -> tuple[TaskCase, ...]:
    """Every task of either side, once. Tasks that a failing rule names come first."""
    blamed: dict[str, str] = {}
    for rule in rules:
        if rule.kind == "tasks" and rule.answer in ("fail", "inconclusive"):
            for task in rule.tasks:
                blamed.setdefault(task, rule.id)
    pairs: dict[str, Pair] = {}
    left_out: dict[str, LeftOut] = {}
    if case.comparison is not None:
        pairs = {p.task: p for p in case.comparison.pairs}
        left_out = {t.task: t for t in case.comparison.left_out}
    worst_first = [*pairs, *sorted({t for _, side in case.sides for t in side.tasks} - set(pairs))]
    cases = [_case(case, name, pairs, left_out, blamed.get(name, "")) for name in worst_first]
    return tuple(sorted(cases, key=lambda c: (c.task not in blamed, ORDER.index(c.status))))


def _case(
    case: Case, name: str, pairs: Mapping[str, Pair], left_out: Mapping[str, LeftOut], blamed: str
) -> TaskCase:
    own = case.candidate.tasks.get(name)
    status, reason = _status(case, name, own, pairs.get(name), left_out.get(name))
    return TaskCase(
        task=name,
        status=status,
        reason="; ".join(filter(None, [blamed, reason])),
        base=_share(case.baseline, name),
        candidate=_share(case.candidate, name),
        seconds=own.seconds_sum / own.graded if own is not None and own.graded else None,
    )


def _status(
    case: Case, name: str, own: TaskResults | None, pair: Pair | None, out: LeftOut | None
) -> tuple[Status, str]:
    if name in case.quarantined:
        entry = next(e for e in case.quarantine.tasks if e.task == name)
        return "quarantined", f"{entry.reason} (owner {entry.owner}, until {entry.expires})"
    if out is not None:
        return "left out", out.reason + (f": {out.detail}" if out.detail else "")
    if own is None or not own.graded:
        return "left out", "not graded in the candidate"
    if pair is not None and _lost(pair):
        return "regressed", f"passed {pair.base:.0%} before, {pair.candidate:.0%} now"
    if own.passed == 0:
        return "failed", "failed before, too" if pair is not None else "no attempt passed"
    if own.flaky:
        return "flaky", f"{own.passed} of {own.graded} attempts passed"
    if pair is not None and pair.delta > 0:
        return "improved", f"passed {pair.base:.0%} before"
    return "passed", ""


def _lost(pair: Pair) -> bool:
    """No attempt passes any more, or most did before and now do not; anything between is a flaky task."""
    return pair.candidate < pair.base and (pair.candidate == 0 or pair.candidate <= 0.5 < pair.base)


def _share(side: Side | None, name: str) -> str:
    task = side.tasks.get(name) if side is not None else None
    return f"{task.passed}/{task.graded}" if task is not None and task.graded else ""
