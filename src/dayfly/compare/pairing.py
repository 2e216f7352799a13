"""Which tasks of two sides can be compared, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from dayfly.compare.counting import count
from dayfly.compare.model import Allowed, LeftOut, Pair, Reason, Transition
from dayfly.model import VERIFIER_CLASS_ORDER, Isolation, VerifierClass
from dayfly.results.side import Side, TaskResults

ISOLATION_ORDER: tuple[Isolation, ...] = ("fake", "tcg", "kvm")
"""From the weakest to the strictest."""
TRANSITIONS: tuple[Transition, ...] = ("pass→fail", "worse", "fail→pass", "better", "pass", "fail", "mixed")
_RANKS = {name: rank for rank, name in enumerate(TRANSITIONS)}
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Counted:
    """A comparable task with what is counted of it."""

    pair: Pair
    base: TaskResults
    candidate: TaskResults
    trial: tuple[int, int, int, int]
    """Graded and passed attempts of the baseline, then of the candidate: of the attempts both sides planned."""


@dataclass(frozen=True)
class Terms:
    """What makes a task comparable, beyond being the same."""

    allowed: frozenset[Allowed] = frozenset()
    min_task_coverage: float = 0.0
    quarantined: Collection[str] = ()


def pair_tasks(base: Side, candidate: Side, terms: Terms) -> tuple[list[Counted], list[LeftOut]]:
    """The comparable tasks, worst first, and those left out, by name."""
    counted: list[Counted] = []
    out: list[LeftOut] = []
    for name in sorted(base.tasks.keys() | candidate.tasks.keys()):
        old, new = base.tasks.get(name), candidate.tasks.get(name)
        found = _compare_task(name, old, new, terms)
        if isinstance(found, LeftOut):
            out.append(found)
        else:
            counted.append(found)
    counted.sort(key=lambda c: (_RANKS[c.pair.transition], c.pair.candidate - c.pair.base, c.pair.task))
    return counted, out


def _compare_task(name: str, old: TaskResults | None, new: TaskResults | None, terms: Terms) -> Counted | LeftOut:
    if name in terms.quarantined:  # first, as a quarantined task must not count against the comparable share
        return LeftOut(task=name, reason="quarantined")
    if old is None:
        return LeftOut(task=name, reason="only in the candidate")
    if new is None:
        return LeftOut(task=name, reason="only in the baseline")
    for reason, allowed, detail in CHECKS:
        if allowed not in terms.allowed and (said := detail(old, new)):
            return LeftOut(task=name, reason=reason, detail=said)
    return _count_task(old, new, terms.min_task_coverage)


def _count_task(old: TaskResults, new: TaskResults, floor: float) -> Counted | LeftOut:
    planned = min(len(old.marks), len(new.marks))
    before, after = old.marks[:planned], new.marks[:planned]
    (base_graded, base_passed), (graded, passed) = count(before), count(after)
    if not base_graded:
        return LeftOut(task=old.task, reason="not graded in the baseline", detail=f"0 of {planned} attempts")
    if not graded:
        return LeftOut(task=old.task, reason="not graded in the candidate", detail=f"0 of {planned} attempts")
    if min(base_graded, graded) < floor * planned - _ROUNDING:
        detail = f"{base_graded} and {graded} of {planned} attempts graded, floor {floor:g}"
        return LeftOut(task=old.task, reason="under the coverage floor", detail=detail)
    pair = Pair(
        old.task,
        before,
        after,
        base_passed / base_graded,
        passed / graded,
        transition(base_graded, base_passed, graded, passed),
        old.seconds_sum / (count(old.marks)[0]),
        new.seconds_sum / (count(new.marks)[0]),
        new.tags,
    )
    return Counted(pair, old, new, (base_graded, base_passed, graded, passed))


def transition(base_graded: int, base_passed: int, graded: int, passed: int) -> Transition:
    """In whole numbers, so that equal shares are equal."""
    moved = passed * base_graded - base_passed * graded
    if moved < 0:
        return "pass→fail" if base_passed == base_graded and not passed else "worse"
    if moved > 0:
        return "fail→pass" if passed == graded and not base_passed else "better"
    if not passed:
        return "fail"
    return "pass" if passed == graded else "mixed"


# --- what must be the same of a task -----------------------------------------------------------------
# Each says how a task differs, or nothing. What a side did not record cannot be shown to differ.


def verifier_differs(old: TaskResults, new: TaskResults) -> str:
    if not old.verifier_digest or not new.verifier_digest:
        return ""  # then the task's own digest decides, which its tests are a part of
    return _moved(old.verifier_digest, new.verifier_digest)


def task_differs(old: TaskResults, new: TaskResults) -> str:
    return _moved(old.task_digest, new.task_digest)


def limits_differ(old: TaskResults, new: TaskResults) -> str:
    if (old.agent_limit_s, old.verifier_timeout_s, old.machine) == (
        new.agent_limit_s,
        new.verifier_timeout_s,
        new.machine,
    ):
        return ""  # nearly always, and there may be 100,000 tasks
    return "; ".join(
        f"{n} {a} → {b}" for (n, a), (_, b) in zip(limits(old), limits(new), strict=True) if _both(a, b)
    )


def limits(task: TaskResults) -> Iterator[tuple[str, str]]:
    """Names and values; an empty value is not known."""
    for name, seconds in (("agent limit", task.agent_limit_s), ("verifier limit", task.verifier_timeout_s)):
        yield name, "" if seconds is None else f"{seconds:g} s"
    cpus, memory, storage = task.machine or ("", "", "")
    for name, value in (("CPUs", f"{cpus}"), ("memory MiB", f"{memory}"), ("storage MiB", f"{storage}")):
        yield name, value


def _both(a: str, b: str) -> bool:
    return bool(a and b and a != b)


def image_differs(old: TaskResults, new: TaskResults) -> str:
    if old.disk_digests == new.disk_digests:
        return ""
    before, after = sorted(set(old.disk_digests)), sorted(set(new.disk_digests))
    if not before or not after or before == after:
        return ""
    return f"{', '.join(map(short, before))} → {', '.join(map(short, after))}"


def isolation_differs(old: TaskResults, new: TaskResults) -> str:
    """By the weakest, as a task is no better isolated than in its weakest attempt."""
    if old.isolation == new.isolation:
        return ""
    before, after = weakest_isolation(old.isolation), weakest_isolation(new.isolation)
    return f"{before} → {after}" if _both(before, after) else ""


def weakest_isolation(classes: Collection[Isolation]) -> str:
    return min(classes, key=ISOLATION_ORDER.index, default="")


def verifier_class_differs(old: TaskResults, new: TaskResults) -> str:
    if old.verifier_classes == new.verifier_classes:
        return ""
    before, after = weakest_class(old.verifier_classes), weakest_class(new.verifier_classes)
    return f"{before} → {after}" if _both(before, after) else ""


def weakest_class(classes: Collection[VerifierClass]) -> str:
    found = min(classes, key=VERIFIER_CLASS_ORDER.index, default=None)
    return found.value if found else ""


def _moved(old: str, new: str) -> str:
    return f"{short(old)} → {short(new)}" if old != new else ""


def short(digest: str) -> str:
    """Enough of a digest to tell it from another."""
    return digest if len(digest) <= 19 else digest[:19] + "…"


Check = tuple[Reason, Allowed | None, Callable[[TaskResults, TaskResults], str]]
CHECKS: tuple[Check, ...] = (
    ("verifier changed", None, verifier_differs),
    ("task changed", None, task_differs),
    ("limits differ", "limits", limits_differ),
    ("image differs", "image", image_differs),
    ("isolation differs", "isolation", isolation_differs),
    ("verifier class differs", "verifier class", verifier_class_differs),
)
"""In the order in which one of them becomes the reason."""
