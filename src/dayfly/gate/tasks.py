"""Rules about single tasks: those that must pass, and those that must not get worse.

One failed attempt is no evidence of a fault: a failure counts when it is reproducible. A regression is a claim
about two versions, so it must also be shown that the task passes less often than before: a coin fails twice in a
row in a quarter of the jobs of an unchanged agent, and of twenty coins one nearly always does. Attempts of the
confirming jobs are counted here and nowhere else.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from dayfly.errors import ConfigError
from dayfly.gate.case import Case
from dayfly.gate.policy import Policy
from dayfly.gate.verdict import RuleResult
from dayfly.gate.words import listed, plural
from dayfly.results.side import Side, TaskResults

TAG = "tag:"
MOST_AGAIN = 20
"""Attempts that a command asks for: a task that is merely flaky has passed once by then."""
MOST_TASKS_AGAIN = 10
"""Tasks that a command names."""
Standing = Literal["passes", "fails", "unconfirmed"]


# --- which tasks are meant ---------------------------------------------------------------------------


def tags_of(sides: Iterable[Side]) -> dict[str, frozenset[str]]:
    """Every task of the sides, with its tags on any of them."""
    found: dict[str, frozenset[str]] = {}
    for side in sides:
        for name, task in side.tasks.items():
            found[name] = found.get(name, frozenset()) | frozenset(task.tags)
    return found


def matching(pattern: str, tasks: Mapping[str, frozenset[str]]) -> list[str]:
    """Tasks that a name, a pattern or `tag:NAME` means."""
    if pattern.startswith(TAG):
        return [name for name, tags in tasks.items() if pattern.removeprefix(TAG) in tags]
    if pattern in tasks:  # also a name with a bracket in it
        return [pattern]
    return [name for name in tasks if fnmatchcase(name, pattern)]


def pattern_rules(case: Case) -> Iterator[RuleResult]:
    """A list that names a task nobody has would hold for ever, and guard nothing."""
    tasks = tags_of(side for _, side in case.sides)
    for list_name in ("must_pass", "no_regression"):
        patterns: tuple[str, ...] = getattr(case.policy, list_name)
        if not patterns:
            continue
        stray = [p for p in patterns if not matching(p, tasks)]
        said = listed([f"{p!r}{_near(p, tasks)}" for p in stray], 5)
        yield RuleResult(
            id=f"{list_name}.patterns",
            kind="validity",
            tier="critical",
            answer="invalid" if stray else "pass",
            reason=f"{list_name} names tasks that do not exist: {said}"
            if stray
            else f"{list_name}: all tasks exist",
        )


def _near(pattern: str, tasks: Mapping[str, frozenset[str]]) -> str:
    known = [TAG + t for t in {t for tags in tasks.values() for t in tags}] if pattern.startswith(TAG) else tasks
    near = get_close_matches(pattern, sorted(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# --- how a task stands -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempts:
    """The candidate's graded attempts at one task, those of confirming jobs included."""

    task: str
    passed: int
    graded: int
    confirming: int
    """Of the graded ones, those of confirming jobs."""

    @property
    def failed(self) -> int:
        return self.graded - self.passed

    @property
    def words(self) -> str:
        more = f", {self.confirming} of them confirming" if self.confirming else ""
        return f"{self.task} {self.passed}/{self.graded}{more}"

    def standing(self, failures: int) -> Standing:
        """`failures`: so many failed attempts, and none passed, are a reproducible failure."""
        if 2 * self.passed > self.graded:
            return "passes"
        if self.passed == 0 and self.failed >= failures:
            return "fails"
        return "unconfirmed"

    def wanted(self, failures: int) -> int:
        """Attempts after which it could be known."""
        return max(failures - self.failed, 1) if self.passed == 0 else self.failed - self.passed + 1


def attempts_at(case: Case, name: str) -> Attempts:
    own = case.candidate.tasks.get(name)
    more = [side.tasks[name] for side in case.confirm if name in side.tasks]
    found: list[TaskResults] = [*([own] if own else []), *more]
    return Attempts(name, sum(t.passed for t in found), sum(t.graded for t in found), sum(t.graded for t in more))


# --- the rules ---------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a rule found out about the tasks of its list."""

    failing: dict[str, str] = field(default_factory=dict)
    """Task → its counts."""
    open: dict[str, str] = field(default_factory=dict)
    """Tasks of which it is not known, and why."""
    wanted: dict[str, int] = field(default_factory=dict)
    """Of those, attempts after which it could be known; not of one that no attempt helps."""
    flaky: list[str] = field(default_factory=list)
    holding: int = 0


def task_rules(case: Case) -> Iterator[RuleResult]:
    tasks = tags_of(side for _, side in case.sides)
    if case.policy.must_pass:
        yield _rule(case, "must_pass", "reproducibly failing", _must_pass(case, tasks))
    if case.policy.no_regression and case.baseline is not None:
        yield _rule(case, "no_regression", "shown to pass less often", _no_regression(case, case.baseline, tasks))


def _meant(case: Case, patterns: Iterable[str], tasks: Mapping[str, frozenset[str]]) -> list[str]:
    found = dict.fromkeys(name for p in patterns for name in matching(p, tasks))
    return [name for name in found if name not in case.quarantined]


def _must_pass(case: Case, tasks: Mapping[str, frozenset[str]]) -> Found:
    found, failures = Found(), case.policy.confirm.failures
    for name in _meant(case, case.policy.must_pass, tasks):
        attempts = attempts_at(case, name)
        standing = attempts.standing(failures)
        if standing == "fails":
            found.failing[name] = attempts.words
        elif standing == "passes":
            _holds(found, attempts)
        else:
            found.open[name] = attempts.words
            found.wanted[name] = attempts.wanted(failures)
    return found


def _holds(found: Found, attempts: Attempts) -> None:
    found.holding += 1
    if attempts.failed:
        found.flaky.append(attempts.words)


def _no_regression(case: Case, baseline: Side, tasks: Mapping[str, frozenset[str]]) -> Found:
    """Each task's attempts against the baseline's, corrected for all tasks of the list.

    Also for those that the baseline fails: which they are was decided by the same attempts.
    """
    from dayfly.stats import fisher_worse, holm

    found, incomparable = Found(), _incomparable(case)
    meant = _meant(case, case.policy.no_regression, tasks)
    p: dict[str, float] = {}
    pairs: dict[str, tuple[TaskResults, Attempts]] = {}
    for name in meant:
        before = baseline.tasks.get(name)
        if before is None:
            continue
        if not before.graded:
            found.open[name] = f"not graded in the baseline: {name}"
        elif 2 * before.passed <= before.graded:
            continue
        elif name in incomparable:
            found.open[name] = f"{incomparable[name]}: {name}"
        else:
            attempts = attempts_at(case, name)
            pairs[name] = before, attempts
            if attempts.failed >= case.policy.confirm.failures:
                p[name] = fisher_worse(before.passed, before.graded, attempts.passed, attempts.graded)
    corrected = case.policy.multiplicity == "holm"
    if corrected:
        p = holm(p, of=len(meant))
    for name, (before, attempts) in pairs.items():
        counts = f"{attempts.words} (baseline {before.passed}/{before.graded})"
        if attempts.graded == 0:
            found.open[name], found.wanted[name] = counts, 1
        elif p.get(name, 1.0) <= case.alpha:
            found.failing[name] = f"{counts}, p {p[name]:.2g}"
        elif attempts.passed:
            _holds(found, attempts)
        else:
            found.open[name] = counts
            found.wanted[name] = _until_shown(case, before, attempts, case.alpha / (len(meant) if corrected else 1))
    return found


def _until_shown(case: Case, before: TaskResults, attempts: Attempts, alpha: float) -> int:
    """More failed attempts, with none passed, after which the regression is shown."""
    from dayfly.stats import fisher_worse

    def shown(graded: int) -> bool:
        return fisher_worse(before.passed, before.graded, 0, graded) <= alpha

    high = max(attempts.graded + 1, case.policy.confirm.failures)
    low = high - 1
    while not shown(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high - attempts.graded


def _incomparable(case: Case) -> dict[str, str]:
    """Tasks whose results say nothing of a regression, and why. Too few or no results are seen from the marks."""
    assert case.comparison is not None
    of_results = ("under the coverage floor", "not graded in the candidate", "not graded in the baseline")
    return {t.task: t.reason for t in case.comparison.left_out if t.reason not in of_results}


def _rule(case: Case, list_name: str, failing: str, found: Found) -> RuleResult:
    common = {"id": list_name, "kind": "tasks", "tier": "critical"}
    if found.failing:
        said = (
            f"{list_name}: {plural(len(found.failing), 'task')} {failing}: {listed([*found.failing.values()], 5)}"
        )
        return RuleResult(**common, answer="fail", reason=said, tasks=(*found.failing, *found.open))
    if found.open:
        said = f"{list_name}: not known of {plural(len(found.open), 'task')}: {listed([*found.open.values()], 5)}"
        if found.wanted:
            said += f"; {_to_confirm(case, found.wanted)}"
        more = sum(found.wanted.values()) or None
        return RuleResult(**common, answer="inconclusive", reason=said, tasks=tuple(found.open), more_rollouts=more)
    said = (
        f"{list_name}: {plural(found.holding, 'task')} not failing"
        if found.holding
        else f"{list_name}: no task to guard"
    )
    if found.flaky:
        said += f"; flaky: {listed(found.flaky, 5)}"
    return RuleResult(**common, answer="pass", reason=said)


def _to_confirm(case: Case, wanted: Mapping[str, int]) -> str:
    most = max(wanted.values())
    said = f"to confirm: {rerun_command(case, wanted)}, then `dayfly gate … --confirm last`"
    if len(wanted) > MOST_TASKS_AGAIN:
        said += f" (the first {MOST_TASKS_AGAIN} of {len(wanted)} tasks)"
    if most > MOST_AGAIN:
        said += f" (with no pass it takes up to {most}; a baseline with more attempts needs fewer)"
    return said


def rerun_command(case: Case, wanted: Mapping[str, int]) -> str:
    """The command that does these tasks again, as often as the one that needs it most, within reason."""
    words = ["--agent", case.candidate.agent]
    for name in [*wanted][:MOST_TASKS_AGAIN]:
        words += ["--task", glob.escape(name)]  # it takes patterns
    return f"`dayfly run JOBFILE {shlex.join([*words, '--attempts', str(min(max(wanted.values()), MOST_AGAIN))])}`"


# --- confirming jobs ---------------------------------------------------------------------------------


def refuse_foreign_confirmations(policy: Policy, candidate: Side, confirm: Iterable[Side]) -> None:
    """Raise `ConfigError` for a job that says nothing about the candidate as it was tested."""
    seen = {candidate.job_id}
    for side in confirm:
        if side.job_id in seen:
            raise ConfigError(f"job {side.job_id} is counted already", hint="--confirm takes jobs of their own")
        seen.add(side.job_id)
        if side.agent_digest != candidate.agent_digest:
            raise ConfigError(
                f"{side.label} is another agent version than the candidate {candidate.label}",
                hint="confirm with the same agent, unchanged",
            )
        for name, task in side.tasks.items():
            own = candidate.tasks.get(name)
            if own is not None and (what := _changed(policy, own, task)):
                raise ConfigError(
                    f"{what} of task {name!r} in {side.label} is not as in the candidate {candidate.label}",
                    hint="confirm with the same tasks, judged and limited in the same way",
                )


def _changed(policy: Policy, own: TaskResults, other: TaskResults) -> str | None:
    allowed = policy.allow_differences
    if own.task_digest != other.task_digest:
        return "the content"
    if own.verifier_digest != other.verifier_digest:
        return "the verifier"
    limits = [(t.agent_limit_s, t.verifier_timeout_s, t.machine) for t in (own, other)]
    if limits[0] != limits[1] and "limits" not in allowed:
        return "a limit"
    if _differ(own.disk_digests, other.disk_digests) and "image" not in allowed:
        return "the image"
    if _differ(own.isolation, other.isolation) and "isolation" not in allowed:
        return "the isolation"
    if _differ(own.verifier_classes, other.verifier_classes) and "verifier class" not in allowed:
        return "the verifier class"
    return None


def _differ(own: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Where one side has nothing on record, it has no results that could differ."""
    return bool(own and other) and set(own) != set(other)
