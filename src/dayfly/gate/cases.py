"""The tasks as test cases: what became of each, failing first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dayfly.compare.counting import count
from dayfly.compare.model import LeftOut, Pair
from dayfly.gate.case import Case
from dayfly.gate.verdict import NOT_ANSWERED, RuleResult, Status, TaskCase
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


def unjudged_cases(case: Case) -> tuple[TaskCase, ...]:
    """Every task of either side, of results that are not valid: no figure is named, only why one is left out."""
    names = sorted({t for _, side in case.sides for t in side.tasks})
    left_out = {} if case.comparison is None else {t.task: _why(t) for t in case.comparison.left_out}
    cases = [TaskCase(task=n, status="left out", reason=left_out.get(n, NOT_ANSWERED)) for n in names]
    return tuple(sorted(cases, key=lambda c: c.task not in left_out))


def _why(out: LeftOut) -> str:
    return out.reason + (f": {out.detail}" if out.detail else "")


def _case(
    case: Case, name: str, pairs: Mapping[str, Pair], left_out: Mapping[str, LeftOut], blamed: str
) -> TaskCase:
    own = case.candidate.tasks.get(name)
    pair = pairs.get(name)
    status, reason = _status(case, name, own, pair, left_out.get(name))
    return TaskCase(
        task=name,
        status=status,
        reason="; ".join(filter(None, [blamed, reason])),
        base=_share(case.baseline, name) if pair is None else _counts(pair.base_marks),
        candidate=_share(case.candidate, name) if pair is None else _counts(pair.candidate_marks),
        seconds=own.seconds_sum / own.graded if own is not None and own.graded else None,
    )


def _status(
    case: Case, name: str, own: TaskResults | None, pair: Pair | None, out: LeftOut | None
) -> tuple[Status, str]:
    if name in case.quarantined:
        entry = next(e for e in case.quarantine.tasks if e.task == name)
        return "quarantined", f"{entry.reason} (owner {entry.owner}, until {entry.expires})"
    if out is not None:
        return "left out", _why(out)
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


def _counts(marks: str) -> str:
    """Of the attempts that were compared."""
    return "{1}/{0}".format(*count(marks))


def _share(side: Side | None, name: str) -> str:
    task = side.tasks.get(name) if side is not None else None
    return f"{task.passed}/{task.graded}" if task is not None and task.graded else ""
