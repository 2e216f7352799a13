"""Rules about single tasks: those that must pass, and those that must not get worse.

One failed attempt is no evidence of a fault: a failure counts when it is reproducible. Attempts of the
confirming jobs are counted here and nowhere else.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
Standing = Literal["passes", "fails", "unconfirmed", "unknown"]


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
        if self.graded == 0:
            return "unknown"
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


def task_rules(case: Case) -> Iterator[RuleResult]:
    tasks = tags_of(side for _, side in case.sides)
    if case.policy.must_pass:
        yield _rule(case, "must_pass", _meant(case, case.policy.must_pass, tasks), {})
    if case.policy.no_regression and case.baseline is not None:
        meant = [t for t in _meant(case, case.policy.no_regression, tasks) if _baseline_passes(case.baseline, t)]
        yield _rule(case, "no_regression", meant, _incomparable(case))


def _meant(case: Case, patterns: Iterable[str], tasks: Mapping[str, frozenset[str]]) -> list[str]:
    found = dict.fromkeys(name for p in patterns for name in matching(p, tasks))
    return [name for name in found if name not in case.quarantined]


def _baseline_passes(baseline: Side, name: str) -> bool:
    task = baseline.tasks.get(name)
    return task is not None and 2 * task.passed > task.graded


def _incomparable(case: Case) -> dict[str, str]:
    """Tasks whose results say nothing of a regression, and why. Too few or no results are seen from the marks."""
    assert case.comparison is not None
    of_results = ("under the coverage floor", "not graded in the candidate", "not graded in the baseline")
    return {t.task: t.reason for t in case.comparison.left_out if t.reason not in of_results}


def _rule(case: Case, list_name: str, meant: list[str], incomparable: Mapping[str, str]) -> RuleResult:
    failures = case.policy.confirm.failures
    found = {name: attempts_at(case, name) for name in meant}
    by: dict[Standing, list[str]] = {"passes": [], "fails": [], "unconfirmed": [], "unknown": []}
    for name, attempts in found.items():
        by["unknown" if name in incomparable else attempts.standing(failures)].append(name)
    common = {"id": list_name, "kind": "tasks", "tier": "critical"}
    if by["fails"]:
        words = listed([found[t].words for t in by["fails"]], 5)
        said = f"{list_name}: {plural(len(by['fails']), 'task')} reproducibly failing: {words}"
        return RuleResult(**common, answer="fail", reason=said, tasks=(*by["fails"], *by["unconfirmed"]))
    open_ = [*by["unconfirmed"], *by["unknown"]]
    if open_:
        wanted = {t: found[t].wanted(failures) for t in open_ if t not in incomparable}
        said = f"{list_name}: not known of {plural(len(open_), 'task')}: " + listed(
            [incomparable[t] + f": {t}" if t in incomparable else found[t].words for t in open_], 5
        )
        if wanted:
            said += f"; to confirm: {rerun_command(case, wanted)}, then `dayfly gate … --confirm last`"
        return RuleResult(
            **common,
            answer="inconclusive",
            reason=said,
            tasks=tuple(open_),
            more_rollouts=sum(wanted.values()) or None,
        )
    flaky = [found[t].words for t in by["passes"] if found[t].failed]
    said = f"{list_name}: {plural(len(meant), 'task')} not failing" if meant else f"{list_name}: no task to guard"
    if flaky:
        said += f"; flaky: {listed(flaky, 5)}"
    return RuleResult(**common, answer="pass", reason=said)


def rerun_command(case: Case, wanted: Mapping[str, int]) -> str:
    """The command that does these tasks again, as often as the one that needs it most."""
    words = ["--agent", case.candidate.agent]
    for name in wanted:
        words += ["--task", glob.escape(name)]  # it takes patterns
    return f"`dayfly run JOBFILE {shlex.join([*words, '--attempts', str(max(wanted.values()))])}`"


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
