"""Differences over the comparable tasks. What is not known is so said, and is never 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from dayfly.compare.counting import count
from dayfly.compare.model import Group, Metric
from dayfly.compare.pairing import Counted
from dayfly.results.side import TaskResults

if TYPE_CHECKING:
    from dayfly.stats import Estimate

RELATIVE = ("seconds", "tokens", "cost_usd")
LARGEST = 1e100
"""Reward whose square is still a number."""
NO_TASKS = "no task is comparable"
MOST_GROUPS = 100
"""With more tags, those of the most tasks."""


@dataclass(frozen=True)
class Settings:
    """How differences are estimated."""

    alpha: float
    margins: Mapping[str, float]
    cluster_by: str | None


def measure(
    counted: Sequence[Counted], attempts: int, wanted: Iterable[str], settings: Settings
) -> dict[str, Metric]:
    """Every metric by name, in the order in which it is read."""
    names = ["score", "reward", *_passes(attempts, [*wanted, *settings.margins]), *RELATIVE]
    return {name: _metric(name, counted, settings) for name in names}


def _passes(attempts: int, wanted: Iterable[str]) -> list[str]:
    """pass@K and pass^K: of as many attempts as both sides planned, and those asked for."""
    found = {f"pass{sign}{attempts}" for sign in "@^" if attempts > 1}
    found |= {name for name in wanted if name.startswith(("pass@", "pass^"))}
    return sorted(found, key=lambda name: (int(name[5:]), name))


def _metric(name: str, counted: Sequence[Counted], settings: Settings) -> Metric:
    made = _Maker(name, counted, settings)
    if not counted:
        return made.unknown(NO_TASKS)
    if name == "score":
        return _score(made)
    if name == "reward":
        base, candidate = [_reward(c.base) for c in counted], [_reward(c.candidate) for c in counted]
        if max(map(abs, (*base, *candidate))) > LARGEST:
            return made.unknown(f"rewards over {LARGEST:g} cannot be added up")
        return made.of_means(base, candidate)
    if name.startswith("pass"):
        return _pass(made, name[4], int(name[5:]))
    return _relative(made)


@dataclass(frozen=True)
class _Maker:
    name: str
    counted: Sequence[Counted]
    settings: Settings

    @property
    def relative(self) -> bool:
        return self.name in RELATIVE

    def unknown(self, reason: str) -> Metric:
        return Metric(
            name=self.name,
            relative=self.relative,
            higher_is_better=not self.relative,
            known=False,
            reason=reason,
            margin=self.settings.margins.get(self.name),
        )

    def of_means(self, base: list[float], candidate: list[float]) -> Metric:
        from dayfly.stats import estimate_means

        differences = [new - old for old, new in zip(base, candidate, strict=True)]
        estimate = estimate_means(
            differences,
            clusters=self.clusters(),
            alpha=self.settings.alpha,
            margin=self.margin,
            bounded=min(*base, *candidate) >= 0 and max(*base, *candidate) <= 1,
        )
        return self.known(base, candidate, estimate)

    @property
    def margin(self) -> float | None:
        return self.settings.margins.get(self.name)

    def clusters(self) -> list[str] | None:
        return clusters_of(self.counted, self.settings.cluster_by)

    def known(self, base: Sequence[float], candidate: Sequence[float], estimate: Estimate) -> Metric:
        low, high = finite(estimate.low), finite(estimate.high)
        p_worse, beyond = finite(estimate.p_worse), finite(estimate.p_beyond_margin)
        if beyond is not None and p_worse is not None:
            beyond = max(beyond, p_worse)
        return Metric(
            name=self.name,
            relative=self.relative,
            higher_is_better=not self.relative,
            known=True,
            reason=""
            if low is not None and high is not None
            else "an interval needs more tasks, or tasks that differ",
            tasks=len(self.counted),
            base=mean(base),
            candidate=mean(candidate),
            delta=finite(estimate.delta),
            low=low,
            high=high,
            p_worse=p_worse,
            p_better=finite(estimate.p_better),
            margin=self.margin,
            p_beyond_margin=beyond,
            method=estimate.method + self._remarks(),
        )

    def _remarks(self) -> str:
        """What else the figures rest on."""
        said = ""
        key = self.settings.cluster_by
        if key is not None:
            without = sum(key not in c.base.metadata for c in self.counted)
            said += f"; clusters by {key}" + (f", {without} tasks without it each their own" if without else "")
        cut = any(len(c.base.marks) != len(c.candidate.marks) for c in self.counted)
        if cut and (self.relative or self.name == "reward"):
            said += "; means over all attempts of each side, though only the first ones are paired"
        return said


def clusters_of(counted: Sequence[Counted], key: str | None) -> list[str] | None:
    """The cluster of each task: its value of the metadata, or, without one, itself."""
    if key is None:
        return None
    return [f"={c.base.metadata[key]}" if key in c.base.metadata else f"\0{c.pair.task}" for c in counted]


def _score(made: _Maker) -> Metric:
    from dayfly.stats import estimate_rates

    estimate = estimate_rates(
        [c.trial for c in made.counted],
        clusters=made.clusters(),
        alpha=made.settings.alpha,
        margin=made.margin,
    )
    return made.known([c.pair.base for c in made.counted], [c.pair.candidate for c in made.counted], estimate)


def _reward(task: TaskResults) -> float:
    return task.reward_sum / count(task.marks)[0]


def _pass(made: _Maker, sign: str, k: int) -> Metric:
    short = sum(min(c.trial[0], c.trial[2]) < k for c in made.counted)
    if short:
        return made.unknown(
            f"{short} of {len(made.counted)} tasks have fewer than {k} graded attempts on one of the sides"
        )
    of = _pass_of(sign, k)
    return made.of_means([of(*c.trial[:2]) for c in made.counted], [of(*c.trial[2:]) for c in made.counted])


def _pass_of(sign: str, k: int) -> Callable[[int, int], float]:
    from dayfly.stats import pass_all_k, pass_at_k

    formula = pass_at_k if sign == "@" else pass_all_k

    @cache
    def of(graded: int, passed: int) -> float:
        value = formula([(graded, passed)], k)
        assert value is not None  # there are K graded attempts
        return value

    return of


def _relative(made: _Maker) -> Metric:
    from dayfly.stats import estimate_ratio

    of = _MEANS[made.name]
    base, candidate = [of(c.base) for c in made.counted], [of(c.candidate) for c in made.counted]
    old, new = _all_known(base), _all_known(candidate)
    if old is None or new is None:
        sides = [
            f"{values.count(None)} in the {side}" for side, values in _by_side(base, candidate) if None in values
        ]
        return made.unknown(f"not recorded for tasks of {len(base)}: {', '.join(sides)}")
    if math.fsum(old) <= 0:
        return made.unknown("the baseline's mean is 0, which no share can be taken of")
    try:
        estimate = estimate_ratio(old, new, clusters=made.clusters(), alpha=made.settings.alpha, margin=made.margin)
    except ValueError as error:
        return made.unknown(str(error))
    return made.known(old, new, estimate)


def _by_side(base: list[float | None], candidate: list[float | None]) -> list[tuple[str, list[float | None]]]:
    return [("baseline", base), ("candidate", candidate)]


def _all_known(values: list[float | None]) -> list[float] | None:
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) else None


def _mean_of(total: float | None, task: TaskResults) -> float | None:
    return None if total is None else total / count(task.marks)[0]


_MEANS: dict[str, Callable[[TaskResults], float | None]] = {
    "seconds": lambda t: _mean_of(t.seconds_sum, t),
    "tokens": lambda t: _mean_of(t.tokens_sum, t),
    "cost_usd": lambda t: _mean_of(t.cost_sum, t),
}


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def finite(value: float | None) -> float | None:
    """None also for what is no number: JSON has no word for it, and it is not known."""
    return float(value) if value is not None and math.isfinite(value) else None


def group_by_tag(counted: Sequence[Counted], settings: Settings) -> tuple[Group, ...]:
    """The score of the tasks of each tag, the largest drop first."""
    tagged: dict[str, list[Counted]] = {}
    for one in counted:
        for tag in dict.fromkeys(one.pair.tags):
            tagged.setdefault(tag, []).append(one)
    largest = sorted(tagged, key=lambda tag: (-len(tagged[tag]), tag))[:MOST_GROUPS]
    groups = [_group(tag, tagged[tag], settings) for tag in largest]
    return tuple(sorted(groups, key=lambda g: (g.delta, g.tag)))


def _group(tag: str, counted: Sequence[Counted], settings: Settings) -> Group:
    from dayfly.stats import interval_of_rates

    base, candidate = mean([c.pair.base for c in counted]), mean([c.pair.candidate for c in counted])
    low = high = None
    if len(counted) > 1:
        clusters = clusters_of(counted, settings.cluster_by)
        interval = interval_of_rates([c.trial for c in counted], clusters=clusters, alpha=settings.alpha)
        low, high = map(finite, interval)
    return Group(
        tag=tag, tasks=len(counted), base=base, candidate=candidate, delta=candidate - base, low=low, high=high
    )
