"""Stopping a candidate's job early: as soon as its gate would block it, or nothing can decide any more.

How it works. The tasks that both sides can be compared on are done in a random order that the job's seed fixes
(tasks of one cluster together, all attempts of a task one after the other). When all rollouts of the next task in
that order are final, its loss x = (share passed by the baseline) − (share passed by the candidate) is added to the
evidence, the value of a bet that the candidate loses more than the margin δ:

    E = the mean, over stakes λ from 0 to 1/(1 + δ), of the product over tasks of 1 + λ·(x − δ)

With one attempt each and no margin that is 2^(m+1)·B(b+1, c+1)·P(Beta(b+1, c+1) > ½), p = (1 + λ)/2 being the
chance that is bet on.

Why it is valid. If the candidate loses at most δ on average over tasks like these, then, whatever came before, no
such bet gains on average: each product is a supermartingale that starts at 1 (never negative, as x ≥ −1), a mean of
them is one, too, and by Ville's inequality E ever reaches 1/α with a chance of at most α. Looking after every task
therefore costs nothing. It blocks when E ≥ 1/(alpha·alpha_share) and the mean loss seen is at least the margin; the
final test gets alpha·(1 − alpha_share), and by the union bound both together fail in at most alpha of the jobs an
agent that is worse by no more than the margin, an identical one included. Three things keep that true:

- evidence is taken over the longest *finished prefix* of the order only. Which rollouts happen to be ready first
  is no random choice: timeouts are late;
- the unit is the task (or the cluster), as in the final test: attempts of one task are not independent evidence
  about agents that differ but are equally good;
- `recheck` computes all of it anew from the records: a job's word that it was stopped is never taken for it.

The job stops as futile, too, when even all remaining tasks going one way could neither block, nor fail the final
test, nor pass it. That never fails an agent, so it costs no error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from dayfly.compare.counting import count
from dayfly.compare.pairing import CHECKS, weakest_isolation
from dayfly.errors import ConfigError
from dayfly.gate.policy import Policy
from dayfly.gate.verdict import EarlyStopped
from dayfly.model import Frozen
from dayfly.results.side import FAILS, FAULTS, MISSING, PASSES, Side, TaskResults

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dayfly.stats import Estimate

NOT_FINAL = MISSING + "cs"
"""Marks of attempts that still may get a verdict: none yet, cancelled, skipped."""
FUTILITY_LOOKS = 20
"""How often futility is asked about at most; it costs two whole final tests each time."""
_GRADED = PASSES + FAILS
_TINY = 1e-12


class BaselineRef(Frozen):
    job: str
    agent: str
    results_digest: str


class EarlyStopTerms(Frozen):
    """`early_stop` of job.json: what was settled before the first rollout."""

    schema_version: int = 1
    policy_name: str
    policy_digest: str
    agent: str
    """The candidate."""
    alpha: Annotated[float, Field(gt=0, lt=1)]
    """What looking early may spend."""
    margin: Annotated[float, Field(ge=0)]
    seed: int
    baseline: BaselineRef
    order: tuple[str, ...] = ()
    """Tasks as they are done. For people; `recheck` makes it anew from the seed."""


def terms_of(policy: Policy, policy_digest: str, base: Side, agent: str, seed: int) -> EarlyStopTerms:
    """What `run --gate` promises. Raises `ConfigError` for a policy in which no margin of the score decides."""
    rule = policy.metrics.get("score")
    if rule is not None and rule.tier == "advisory":
        raise ConfigError(
            f"the score is advisory in policy {policy.name!r}, so it cannot stop a job",
            hint="make it critical or supporting, or run without --gate and use `dayfly gate`",
        )
    if rule is None or rule.margin is None:
        raise ConfigError(
            f"policy {policy.name!r} names no margin of the score, so it cannot stop a job",
            hint="add `metrics: {score: {margin: 0.05}}` to it, or run without --gate and use `dayfly gate`",
        )
    return EarlyStopTerms(
        policy_name=policy.name,
        policy_digest=policy_digest,
        agent=agent,
        alpha=policy.alpha * policy.early_stop.alpha_share,
        margin=rule.margin,
        seed=seed,
        baseline=BaselineRef(job=base.job_id, agent=base.agent, results_digest=base.digest),
    )


# --- the order -----------------------------------------------------------------------------------


def order_of(tasks: Iterable[str], seed: int, clusters: Mapping[str, str] | None = None) -> list[list[str]]:
    """The units of evidence in the order of the seed; a unit is a task, or the tasks of one cluster.

    Sorted by a digest of seed and name: random as far as results are concerned, the same on every machine and
    Python, and a task more or less leaves the others where they are.
    """
    units: dict[tuple[str, str], list[str]] = {}
    for task in sorted(tasks):
        cluster = (clusters or {}).get(task)
        units.setdefault(("task", task) if cluster is None else ("cluster", cluster), []).append(task)

    def rank(kind: str, name: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{kind}\0{name}".encode("utf-8", "surrogatepass")).digest()

    return [
        sorted(tasks, key=lambda t: rank("task", t))
        for _, tasks in sorted(units.items(), key=lambda u: rank(*u[0]))
    ]


def clusters_of(base: Side, cluster_by: str | None) -> dict[str, str]:
    """Task → cluster, from the baseline's metadata: what is compared has the same on both sides."""
    if cluster_by is None:
        return {}
    return {t.task: t.metadata[cluster_by] for t in base.tasks.values() if cluster_by in t.metadata}


# --- the evidence --------------------------------------------------------------------------------


@cache
def _stakes(margin: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The stakes of the mixture, and their weights' logarithms.

    Any weights that sum to 1 make a valid mixture; these points (Gauss–Legendre) make it the mean over all stakes.
    """
    import numpy as np

    points, weights = np.polynomial.legendre.leggauss(200)
    return (points + 1) / 2 / (1 + margin), np.log(weights / 2)


@lru_cache(maxsize=1 << 12)
def _log_factors(loss: float, margin: float) -> NDArray[np.float64]:
    """Logarithm of what a unit multiplies each bet by; `loss` is what it lost beyond the margin."""
    import numpy as np

    stakes, _ = _stakes(margin)
    return np.log1p(stakes * loss)


class Evidence:
    """E, and what it was made of, over the tasks looked at so far.

    `scale`: how many tasks the largest unit has, so that no unit loses more than the whole stake.
    """

    def __init__(self, margin: float, scale: int = 1) -> None:
        self.margin, self.scale = margin, scale
        self._logs: Any = 0.0
        self.regressions = 0
        self.improvements = 0
        self.pairs = 0
        self._sum = 0.0

    def add(self, differences: Sequence[float]) -> None:
        """Take in one unit: the difference (candidate − baseline) of each of its tasks."""
        self.pairs += len(differences)
        self.regressions += sum(d < 0 for d in differences)
        self.improvements += sum(d > 0 for d in differences)
        together = math.fsum(differences)
        self._sum += together
        beyond = (-together - self.margin * len(differences)) / self.scale
        if abs(beyond) > _TINY:
            self._logs = self._logs + _log_factors(round(beyond, 9), self.margin)

    def copy(self) -> Evidence:
        other = Evidence(self.margin, self.scale)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def log(self) -> float:
        import numpy as np

        return float(np.logaddexp.reduce(self._logs + _stakes(self.margin)[1]))

    @property
    def value(self) -> float:
        return math.exp(min(self.log, 600.0))

    @property
    def delta(self) -> float:
        """Mean difference over the tasks looked at."""
        return self._sum / self.pairs if self.pairs else 0.0

    def blocks(self, alpha: float) -> bool:
        return self.delta <= -self.margin + _TINY and self.delta < 0 and self.log >= -math.log(alpha) - _TINY


# --- the watch -----------------------------------------------------------------------------------


@dataclass
class _Planned:
    """One comparable task: the baseline's marks, and the candidate's as they come in; of equal length."""

    base_marks: str
    marks: str
    floor: float
    """Share of attempts that must be graded on each side, or the task is no pair."""

    @property
    def final(self) -> bool:
        return not any(map(self.marks.count, NOT_FINAL))

    def open(self) -> _Planned:
        """The same as if nothing of it were finished."""
        return _Planned(self.base_marks, MISSING * len(self.marks), self.floor)

    def trial(self, rest: str = "") -> Trial | None:
        """What the final test is given, or None for too few graded attempts.

        `rest`: the mark that attempts without a verdict shall be thought to get. Lost ones are among them: they
        can be done again.
        """
        return _trial(self.base_marks, _with(self.marks, rest), self.floor)

    def difference(self, rest: str = "") -> float | None:
        """What the evidence is given; None when it is no pair."""
        return _difference(self.base_marks, _with(self.marks, rest), self.floor)


Trial = tuple[int, int, int, int]
"""Graded and passed attempts of the baseline, then of the candidate."""


# Of many tasks most have the same few rows of marks.
@lru_cache(maxsize=1 << 16)
def _trial(base_marks: str, marks: str, floor: float) -> Trial | None:
    counts = (*count(base_marks), *count(marks))
    least = max(floor * len(marks), 1) - _TINY
    return counts if counts[0] >= least and counts[2] >= least else None


@lru_cache(maxsize=1 << 16)
def _difference(base_marks: str, marks: str, floor: float) -> float | None:
    """Candidate − baseline over the attempts that both have graded.

    Equal numbers on both sides: an attempt that one side lost is no advantage of the other.
    """
    both = [(b, m) for b, m in zip(base_marks, marks, strict=True) if b in _GRADED and m in _GRADED]
    if not both or _trial(base_marks, marks, floor) is None:
        return None
    return sum((m in PASSES) - (b in PASSES) for b, m in both) / len(both)


def _with(marks: str, rest: str) -> str:
    if rest:
        for mark in NOT_FINAL + FAULTS:
            marks = marks.replace(mark, rest)
    return marks


class EarlyStopWatch:
    """Takes in the candidate's results as they come, and says when to stop.

    `comparable`: the candidate's tasks that may be compared with the baseline's; their marks may be unknown yet.
    """

    def __init__(
        self,
        terms: EarlyStopTerms,
        policy: Policy,
        base: Side,
        comparable: Mapping[str, TaskResults],
        clusters: Mapping[str, str] | None = None,
    ) -> None:
        self.terms = terms
        self.threshold = 1 / terms.alpha
        self.final_alpha = policy.alpha * (1 - policy.early_stop.alpha_share)
        self.clusters = dict(clusters or {})
        self.stopped: EarlyStopped | None = None
        self._planned: dict[str, _Planned] = {}
        for name, task in comparable.items():
            theirs = base.tasks[name].marks
            common = min(len(theirs), len(task.marks))  # attempts that only one side planned pair with nothing
            self._planned[name] = _Planned(theirs[:common], task.marks[:common], policy.coverage.task)
        self._units = order_of(self._planned, terms.seed, self.clusters)
        self.evidence = Evidence(terms.margin, max(map(len, self._units), default=1))
        self._looked = 0
        self._futility_every = max(1, math.ceil(len(self._units) / FUTILITY_LOOKS))
        self._futility = only_score_decides(policy)
        meant = "isolation" in policy.allow_differences
        found = {weakest_isolation(base.tasks[name].isolation) for name in self._planned} - {""}
        self.isolation: frozenset[str] = frozenset() if meant else frozenset(found)
        """Classes of the baseline's rollouts, when the candidate's must be the same; empty: any will do."""

    @property
    def order(self) -> list[str]:
        """The comparable tasks, as they are to be done."""
        return [task for unit in self._units for task in unit]

    @property
    def reason(self) -> str:
        """Why to stop, in words; empty while there is no reason."""
        if (stopped := self.stopped) is None:
            return ""
        seen = (
            f"{stopped.regressions} tasks got worse and {stopped.improvements} better of the first {stopped.pairs} "
            f"compared (evidence {stopped.evidence:.3g}, needed {stopped.threshold:.3g})"
        )
        if stopped.kind == "blocked":
            return f"gate {self.terms.policy_name!r} blocks: {seen}"
        return f"gate {self.terms.policy_name!r} can decide no more, even if all of the rest went one way: {seen}"

    def add(self, task: str, attempt: int, mark: str) -> EarlyStopped | None:
        """Take in one attempt's mark (see `model.MARKS`); why to stop, from then on."""
        planned = self._planned.get(task)
        if planned is not None and attempt <= len(planned.marks):
            planned.marks = planned.marks[: attempt - 1] + mark + planned.marks[attempt:]
        return self.look()

    def look(self) -> EarlyStopped | None:
        """Go on along the order, as far as it is finished."""
        while self.stopped is None and self._looked < len(self._units):
            unit = [self._planned[t] for t in self._units[self._looked]]
            if not all(p.final for p in unit):
                break
            self._looked += 1
            self._take(self.evidence, unit)
            self.stopped = self._verdict()
        return self.stopped

    def _verdict(self) -> EarlyStopped | None:
        if self.evidence.blocks(self.terms.alpha):
            return self._say("blocked")
        last = self._looked == len(self._units)  # then the final test decides
        if self._futility and not last and self._looked % self._futility_every == 0 and not self._can_decide():
            return self._say("futile")
        return None

    def _take(self, evidence: Evidence, unit: Iterable[_Planned], rest: str = "") -> None:
        differences = [d for p in unit if (d := p.difference(rest)) is not None]
        if differences:
            evidence.add(differences)

    def _say(self, kind: Any) -> EarlyStopped:
        e = self.evidence
        return EarlyStopped(
            kind=kind,
            regressions=e.regressions,
            improvements=e.improvements,
            pairs=e.pairs,
            evidence=e.value,
            threshold=self.threshold,
        )

    # --- what can still happen

    def _can_decide(self) -> bool:
        if not any(p.open().trial("F") for p in self._planned.values()):
            return True  # too little of the baseline is graded: that is for the rules of coverage to say
        return self._can_block() or self._can_fail() or self._can_pass()

    def _can_block(self) -> bool:
        """Whether the evidence would suffice if the candidate failed all that is left."""
        worst = self.evidence.copy()
        lost = [u for u in self._units[: self._looked] if any(self._planned[n].difference() is None for n in u)]
        for unit in (*lost, *self._units[self._looked :]):
            self._take(worst, [self._planned[name].open() for name in unit], rest="F")
            if worst.blocks(self.terms.alpha):
                return True
        return False

    def _can_fail(self) -> bool:
        p = self._final(rest="F").p_beyond_margin
        return p is not None and p <= self.final_alpha

    def _can_pass(self) -> bool:
        return bool(self._final(rest="P").low >= -self.terms.margin)

    def _final(self, rest: str) -> Estimate:
        """The final test, if all attempts that are left went one way."""
        from dayfly.stats import estimate_rates

        done = {t for unit in self._units[: self._looked] for t in unit}
        trials, clusters = [], []
        for name, planned in self._planned.items():
            # What finished out of order is not looked at yet: it counts as open.
            shown = planned if name in done else planned.open()
            if (trial := shown.trial(rest)) is not None:
                trials.append(trial)
                clusters.append(self.clusters.get(name, f"\0{name}"))
        return estimate_rates(
            trials,
            clusters=clusters if self.clusters else None,
            alpha=self.final_alpha,
            margin=self.terms.margin,
        )


def only_score_decides(policy: Policy) -> bool:
    """Whether nothing but the score's margin could fail a candidate: only then its futility is the gate's."""
    others = [r for name, r in policy.metrics.items() if name != "score" and r.tier != "advisory"]
    score = policy.metrics["score"]
    bounded = score.min is not None or score.max is not None
    return score.tier == "critical" and not (others or policy.must_pass or policy.no_regression or bounded)


# --- afterwards ----------------------------------------------------------------------------------


def recheck(
    policy: Policy,
    policy_digest: str,
    candidate: Side,
    baseline: Side | None,
    *,
    quarantined: Collection[str] = (),
) -> EarlyStopped | None:
    """What a job that ran with a gate amounts to, from its marks alone; None: it was not stopped early.

    The order is made anew from the seed that job.json gives. Another policy or other results of the baseline than
    the job was started with: not stopped early, so the coverage floors decide.
    """
    terms = read_terms(candidate.early_stop)
    if terms is None or baseline is None or terms.policy_digest != policy_digest:
        return None
    if terms.baseline.results_digest != baseline.digest or terms.agent != candidate.agent:
        return None
    expected = terms_of(policy, policy_digest, baseline, candidate.agent, terms.seed)
    if (expected.alpha, expected.margin) != (terms.alpha, terms.margin):
        return None
    comparable = comparable_tasks(policy, baseline, candidate.tasks, quarantined)
    watch = EarlyStopWatch(terms, policy, baseline, comparable, clusters_of(baseline, policy.cluster_by))
    stopped = watch.look()
    complete = not any(mark in t.marks for t in candidate.tasks.values() for mark in NOT_FINAL)
    if stopped is None or not complete:
        return stopped
    return None if stopped.kind == "futile" else stopped.model_copy(update={"complete": True})


def read_terms(data: Mapping[str, Any] | None) -> EarlyStopTerms | None:
    """`early_stop` of a job.json; None when there is none, or none that we know."""
    try:
        return EarlyStopTerms.model_validate(data) if data else None
    except ValidationError:
        return None


def comparable_tasks(
    policy: Policy, base: Side, tasks: Mapping[str, TaskResults], quarantined: Collection[str] = ()
) -> dict[str, TaskResults]:
    """The candidate's tasks that may be compared with the baseline's, by what is known before any rollout."""
    return {
        name: task
        for name, task in tasks.items()
        if name not in quarantined
        and name in base.tasks
        and _same(base.tasks[name], task, policy.allow_differences)
    }


def _same(base: TaskResults, task: TaskResults, allowed: Collection[str]) -> bool:
    return not any(allowance not in allowed and differs(base, task) for _, allowance, differs in CHECKS)
