"""Rules that say whether there is a valid answer at all. Any that does not hold makes the verdict `invalid`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from dayfly.gate.case import Case
from dayfly.gate.verdict import RuleResult
from dayfly.gate.words import listed, percent, plural
from dayfly.model import VERIFIER_CLASS_ORDER
from dayfly.results.side import Side, TaskResults

ISOLATION_ORDER = ("fake", "tcg", "kvm")
"""From the weakest to the strictest."""
ROUNDING = 1e-9


def validity_rules(case: Case) -> Iterator[RuleResult]:
    yield from _evidence(case)
    yield from _clusters(case)
    yield from _coverage(case)
    yield from _comparable(case)
    yield from _required(case)
    yield from _infra(case)
    yield from _quarantine(case)


def _rule(id: str, holds: bool, reason: str, tasks: Iterable[str] = ()) -> RuleResult:
    return RuleResult(
        id=id,
        kind="validity",
        tier="critical",
        answer="pass" if holds else "invalid",
        reason=reason,
        tasks=tuple(tasks),
    )


# --- evidence --------------------------------------------------------------------------------------


def _evidence(case: Case) -> Iterator[RuleResult]:
    for name, side in case.sides:
        yield _intact(case, f"evidence.{name}", name, [side])
    if case.confirm:
        yield _intact(case, "evidence.confirm", "confirming jobs", case.confirm)


def _intact(case: Case, id: str, name: str, sides: Sequence[Side]) -> RuleResult:
    found = [p for side in sides for p in side.problems]
    if not found:
        return _rule(id, True, f"{name}: {_what_was_checked(case, sides)}")
    return _rule(id, False, f"{name}: {plural(len(found), 'record')} not as sealed: {listed(found, 3, '; ')}")


def _what_was_checked(case: Case, sides: Sequence[Side]) -> str:
    if case.policy.require.intact_evidence:
        return "all evidence is there and as it was sealed"
    if any(side.source == "index" for side in sides):
        return "read from the index, where no seal is checked (require.intact_evidence checks all evidence)"
    return "every record can be read and is as it was sealed"


# --- coverage --------------------------------------------------------------------------------------


def _coverage(case: Case) -> Iterator[RuleResult]:
    floors = case.policy.coverage
    for name, side in case.sides:
        if case.stopped is not None and not case.stopped.complete and side is case.candidate:
            yield _rule(f"coverage.job.{name}", True, f"{name}: the job was stopped early, which loses no coverage")
        else:
            yield _floor(f"coverage.job.{name}", f"{name}'s job", side.job_graded, side.job_planned, floors.job)
    for name, side in case.sides:
        counts = case.counts(side)
        yield _floor(f"coverage.side.{name}", name, counts.graded, counts.planned, floors.side)
    for name, side in case.sides:
        yield _task_coverage(case, name, side)


def _floor(id: str, what: str, graded: int, planned: int, floor: float) -> RuleResult:
    holds = graded > 0 and graded / max(planned, 1) >= floor - ROUNDING
    share = f" ({percent(graded / planned)})" if planned else ""
    return _rule(id, holds, f"{what}: {graded} of {planned} rollouts graded{share}, floor {percent(floor)}")


def _task_coverage(case: Case, name: str, side: Side) -> RuleResult:
    floor, share = case.policy.coverage.task, case.policy.coverage.comparable
    begun = [t for t in case.counted(side) if not case.spared(side, t)]
    under = [t.task for t in begun if t.graded == 0 or t.graded / t.planned < floor - ROUNDING]
    enough = len(begun) - len(under)
    holds = enough > 0 and enough / len(begun) >= share - ROUNDING
    return _rule(
        f"coverage.task.{name}",
        holds,
        f"{name}: {enough} of {plural(len(begun), 'task')} with {percent(floor)} of their attempts graded, "
        f"floor {percent(share)} of the tasks",
        under,
    )


# --- are the sides comparable? ---------------------------------------------------------------------


def _comparable(case: Case) -> Iterator[RuleResult]:
    comparison, base = case.comparison, case.baseline
    if comparison is None or base is None:
        return
    meant = "attempts" in case.policy.allow_differences
    equal = base.attempts == case.candidate.attempts
    planned = f"{base.attempts} and {plural(case.candidate.attempts, 'attempt')} planned for each task"
    yield _rule(
        "comparable.attempts", equal or meant, planned + (", which is allowed" if meant and not equal else "")
    )
    out = [t for t in comparison.left_out if t.reason != "quarantined" and not _broken_off(case, t.task)]
    total = comparison.comparable + len(out)
    floor = case.policy.coverage.comparable
    holds = comparison.comparable > 0 and comparison.comparable / total >= floor - ROUNDING
    why = Counter(str(t.reason) for t in out)
    reasons = listed([f"{count} {reason}" for reason, count in why.most_common()], 12)
    yield _rule(
        "comparable.tasks",
        holds,
        f"{comparison.comparable} of {plural(total, 'task')} comparable, floor {percent(floor)}"
        + (f" ({reasons})" if reasons else ""),
        (t.task for t in out),
    )


def _broken_off(case: Case, task: str) -> bool:
    """Whether an early stop came before this task, or in the middle of it."""
    results = case.candidate.tasks.get(task)
    return results is not None and case.spared(case.candidate, results) > 0


def _clusters(case: Case) -> Iterator[RuleResult]:
    """A misspelt key would leave every task by itself, and intervals too narrow."""
    key = case.policy.cluster_by
    if key is None:
        return
    tasks = [t for side in (case.baseline or case.candidate,) for t in case.counted(side)]
    without = [t.task for t in tasks if key not in t.metadata]
    known = sorted({k for t in tasks for k in t.metadata})
    said = f"cluster_by: {len(without)} of {plural(len(tasks), 'task')} without {key!r} in their metadata"
    holds = len(without) < len(tasks) or not tasks
    if not holds:
        said += f", which have: {listed(known, 20) or 'none'}"
    elif without:
        said += ", each of which counts by itself"
    yield _rule("cluster_by", holds, said, without)


# --- isolation and verifier class ------------------------------------------------------------------


def _required(case: Case) -> Iterator[RuleResult]:
    require = case.policy.require
    counted = [*case.sides, *(("confirm", side) for side in case.confirm[:1])]
    for name, side in counted:
        tasks = case.counted(side) if name != "confirm" else [t for s in case.confirm for t in case.counted(s)]
        yield _at_least(
            f"require.isolation.{name}", f"{name}: isolation", tasks, lambda t: t.isolation, ISOLATION_ORDER,
            require.isolation,
        )  # fmt: skip
    for name, side in counted:
        tasks = case.counted(side) if name != "confirm" else [t for s in case.confirm for t in case.counted(s)]
        yield _at_least(
            f"require.verifier_class.{name}", f"{name}: verifier class", tasks, lambda t: t.verifier_classes,
            VERIFIER_CLASS_ORDER, require.verifier_class,
        )  # fmt: skip


def _at_least(
    id: str,
    what: str,
    tasks: Iterable[TaskResults],
    classes: Callable[[TaskResults], tuple[str, ...]],
    order: tuple[str, ...],
    weakest: str,
) -> RuleResult:
    """Of every graded attempt. What is not recorded is taken for the weakest class."""
    graded = [t for t in tasks if t.graded]
    floor = order.index(weakest)
    under = [t.task for t in graded if min(map(order.index, classes(t) or order[:1])) < floor]
    found = sorted({str(c) for t in graded for c in classes(t)}) or ["not recorded"]
    return _rule(id, not under, f"{what} {listed(found, 3)}, required {weakest}", under)


# --- infrastructure --------------------------------------------------------------------------------


def _infra(case: Case) -> Iterator[RuleResult]:
    limits = case.policy.infra
    rates = []
    for name, side in case.sides:
        counts = case.counts(side)
        rates.append(counts.fault_rate)
        yield _rule(
            f"infra.rate.{name}",
            counts.fault_rate <= limits.max_rate + ROUNDING,
            f"{name}: {counts.faults} of {counts.planned} rollouts lost to infrastructure, provider or verifier "
            f"({percent(counts.fault_rate)}), at most {percent(limits.max_rate)}",
        )
    if len(rates) == 2:
        apart = abs(rates[0] - rates[1])
        yield _rule(
            "infra.difference",
            apart <= limits.max_difference + ROUNDING,
            f"the sides' shares of lost rollouts are {100 * apart:.1f} points apart, "
            f"at most {100 * limits.max_difference:g}",
        )


# --- quarantine ------------------------------------------------------------------------------------


def _quarantine(case: Case) -> Iterator[RuleResult]:
    entries = case.quarantine.tasks
    if not entries:
        return
    known = {task for _, side in case.sides for task in side.tasks}
    held = [e.task for e in entries if e.task in known]
    share = len(held) / len(known) if known else 0.0
    most = case.policy.max_quarantined
    yield _rule(
        "quarantine.share",
        share <= most + ROUNDING,
        f"{len(held)} of {plural(len(known), 'task')} quarantined ({percent(share)}), at most {percent(most)}",
        held,
    )
    over = [e for e in entries if e.expires < case.today]
    said = listed([f"{e.task} on {e.expires} (owner {e.owner})" for e in over], 5)
    reason = f"expired: {said}; renew or remove the entry" if over else "no entry has expired"
    yield _rule("quarantine.expired", not over, reason, (e.task for e in over))
