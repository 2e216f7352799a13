"""Differences of paired tasks: interval, test, and the test of a margin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from dayfly.stats.permutation import flip_signs, relabel
from dayfly.stats.proportions import mcnemar_exact, tango, tango_p

_TINY = 1e-12
ENOUGH_EQUAL = 20
"""Units (tasks or clusters) from which values without any spread count as having none: then at most 14 % of such
units differ (1 − 0.05^(1/20)). Fewer say nothing about the spread of what has no limit."""


@dataclass(frozen=True)
class Estimate:
    """A difference, candidate − baseline, with one-sided bounds at 1 − alpha each."""

    delta: float
    low: float
    high: float
    p_worse: float
    """One-sided exact or permutation p of "no worse"."""
    p_better: float
    p_beyond_margin: float | None
    """One-sided p of "worse by at most the margin", never under `p_worse`; None without a margin."""
    method: str
    n: int
    """Tasks."""


def standard_error(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> float:
    """Standard error of a mean over tasks, robust to clusters (Miller 2024, "Adding Error Bars to Evals").

    sqrt(G/(G−1) · Σ_g(Σ_{i∈g}(aᵢ − ā))²)/T; with each task its own cluster sqrt(Σ(aᵢ − ā)²/(T(T−1))). 0 for G < 2.
    """
    mean = math.fsum(values) / len(values)
    sums = _cluster_sums([v - mean for v in values], clusters)
    if len(sums) < 2:
        return 0.0
    return math.sqrt(len(sums) / (len(sums) - 1) * math.fsum(s * s for s in sums)) / len(values)


def _cluster_sums(values: Iterable[float], clusters: Sequence[Hashable] | None) -> list[float]:
    """Of the values of each cluster, in the order in which clusters first occur."""
    if clusters is None:
        return list(values)
    parts: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        parts.setdefault(cluster, []).append(value)
    return [math.fsum(part) for part in parts.values()]


def sign_flip(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None, seed: int = 0
) -> tuple[float, float]:
    """One-sided p of "no worse" and of "no better": the sign of each task's (or cluster's) difference is flipped.

    If the two agents are alike, either sign has the same chance (Fisher 1935). See `permutation.flip_signs`.
    """
    return flip_signs(_cluster_sums(differences, clusters), seed)


# --- estimates -----------------------------------------------------------------------------------


def estimate_rates(
    trials: Sequence[tuple[int, int, int, int]],
    *,
    clusters: Sequence[Hashable] | None = None,
    alpha: float,
    margin: float | None = None,
    seed: int = 0,
) -> Estimate:
    """The difference of pass rates; `trials`: graded and passed attempts of baseline and candidate, per task.

    One attempt each and no cluster of several tasks: exact McNemar and Tango's interval. Else as `estimate_means`
    over the tasks' shares. Where a task has more attempts on one side, its difference is skewed even between equal
    agents, which a flipped sign does not show: the p is then the larger of that one and of dealing each task's
    attempts anew to the two sides. Raises `ValueError` without tasks.
    """
    if not trials:
        raise ValueError("no tasks")
    if not _once_each(trials, clusters):
        differences = _differences(trials)
        p_worse, p_better = sign_flip(differences, clusters, seed)
        if any(n1 != n2 for n1, _, n2, _ in trials):
            dealt = relabel(trials)
            p_worse, p_better = max(p_worse, dealt[0]), max(p_better, dealt[1])
        return _estimate(differences, clusters, alpha, margin, p_worse, p_better)
    worse, better, n = _counts(trials)
    low, high = tango(worse, better, n, alpha)
    p_worse = mcnemar_exact(worse, better)
    beyond = None if margin is None else max(p_worse, tango_p(worse, better, n, -margin))
    delta = (better - worse) / n
    return Estimate(
        delta, low, high, p_worse, mcnemar_exact(better, worse), beyond, "Tango score, exact McNemar", n
    )


def interval_of_rates(
    trials: Sequence[tuple[int, int, int, int]], *, clusters: Sequence[Hashable] | None = None, alpha: float
) -> tuple[float, float]:
    """The bounds of `estimate_rates` without its tests, which take long. Raises `ValueError` without tasks."""
    if not trials:
        raise ValueError("no tasks")
    if _once_each(trials, clusters):
        return tango(*_counts(trials), alpha)
    return _bounds(_differences(trials), clusters, alpha, None)[:2]


def _once_each(trials: Sequence[tuple[int, int, int, int]], clusters: Sequence[Hashable] | None) -> bool:
    """Whether each task is one pair of attempts, and a unit of evidence by itself."""
    alone = clusters is None or len(set(clusters)) == len(trials)
    return alone and all(n1 == 1 and n2 == 1 for n1, _, n2, _ in trials)


def _differences(trials: Sequence[tuple[int, int, int, int]]) -> list[float]:
    return [c2 / n2 - c1 / n1 for n1, c1, n2, c2 in trials]


def _counts(trials: Sequence[tuple[int, int, int, int]]) -> tuple[int, int, int]:
    """Of pairs of one attempt each: regressions, improvements, pairs."""
    worse = sum(c2 < c1 for _, c1, _, c2 in trials)
    return worse, sum(c2 > c1 for _, c1, _, c2 in trials), len(trials)


def estimate_means(
    differences: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    alpha: float,
    margin: float | None = None,
    seed: int = 0,
    bounded: bool = True,
) -> Estimate:
    """The mean of per-task differences: permutation of signs, and the wider of t and a score interval.

    t over tasks (or clusters) claims too much where few of them differ, and certainty where all differ by the same;
    see `_score_bounds`. `bounded`: the values lie within 0 and 1, so that what was not seen has a limit; without
    one, fewer than `ENOUGH_EQUAL` equal differences give infinite bounds. Raises `ValueError` without tasks.
    """
    if not differences:
        raise ValueError("no tasks")
    p_worse, p_better = sign_flip(differences, clusters, seed)
    return _estimate(differences, clusters, alpha, margin, p_worse, p_better, bounded)


def _estimate(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None,
    alpha: float,
    margin: float | None,
    p_worse: float,
    p_better: float,
    bounded: bool = True,
) -> Estimate:
    low, high, beyond, method = _bounds(values, clusters, alpha, margin, bounded)
    return Estimate(
        delta=math.fsum(values) / len(values),
        low=low,
        high=high,
        p_worse=p_worse,
        p_better=p_better,
        p_beyond_margin=None if margin is None else max(p_worse, beyond),
        method=f"{method}, permutation of signs",
        n=len(values),
    )


def _bounds(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None,
    alpha: float,
    margin: float | None,
    bounded: bool = True,
) -> tuple[float, float, float, str]:
    """The wider bounds of t and score, the larger p of the margin, and what they are called."""
    units = "tasks" if clusters is None else "clusters"
    few = len(values if clusters is None else set(clusters)) < ENOUGH_EQUAL
    if not bounded and few and _t_bounds(values, clusters, alpha, margin) is None:
        return -math.inf, math.inf, 1.0, "no interval"
    low, high, beyond = _score_bounds(values, clusters, alpha, margin)
    method = "Tango score on shares"
    if (narrow := _t_bounds(values, clusters, alpha, margin)) is not None:
        low, high, method = min(low, narrow[0]), max(high, narrow[1]), f"wider of t over {units} and Tango score"
        beyond = max(beyond, narrow[2])
    if bounded:
        low, high = max(low, -1.0), min(high, 1.0)
    return low, high, beyond, method


Bounds = tuple[float, float, float]
"""Lower and upper bound, and the p of the margin (1 without one)."""


def _t_bounds(
    values: Sequence[float], clusters: Sequence[Hashable] | None, alpha: float, margin: float | None
) -> Bounds | None:
    """Mean ± t · standard error; None where there is no spread to take it from."""
    from scipy.special import stdtr, stdtrit

    error = standard_error(values, clusters)
    freedom = (len(values) if clusters is None else len(set(clusters))) - 1
    if freedom < 1 or error < _TINY:
        return None
    mean, reach = math.fsum(values) / len(values), float(stdtrit(freedom, 1 - alpha)) * error
    p = 1.0 if margin is None else float(stdtr(freedom, (mean + margin) / error))
    return mean - reach, mean + reach, p


def _score_bounds(
    values: Sequence[float], clusters: Sequence[Hashable] | None, alpha: float, margin: float | None
) -> Bounds:
    """Tango's bounds on the shares of the mean that losses and gains have, counted in steps of one size.

    A step is what one unit (task or cluster) that differs moves the mean by: Σu²/Σ|u| over the units' parts u of
    the mean, so that the variance of so many steps is that of the mean. One whole unit more is added to both sums:
    what has not been seen may be a task (or cluster) that turns from all passed to none. With one attempt of each
    task the step is 1/n, and this is Tango's interval itself.
    """
    count, largest = len(values), max(1.0, *map(abs, values))
    parts = [s / largest / count for s in _cluster_sums(values, clusters)]
    sizes = [1] * count if clusters is None else Counter(clusters).values()
    unseen = sum(size * size for size in sizes) / count**2
    step = (math.fsum(u * u for u in parts) + unseen**2) / (math.fsum(map(abs, parts)) + unseen)
    worse, better = math.fsum(-u for u in parts if u < 0) / step, math.fsum(u for u in parts if u > 0) / step
    low, high = tango(worse, better, 1 / step, alpha)
    p = 1.0 if margin is None else tango_p(worse, better, 1 / step, -margin / largest)
    return low * largest, high * largest, p


def estimate_ratio(
    base: Sequence[float],
    candidate: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    alpha: float,
    margin: float | None = None,
    seed: int = 0,
) -> Estimate:
    """The change of a mean as a share of the baseline's, where more is worse (time, tokens, cost).

    The logarithm of the ratio of the two means is taken as t-distributed; its standard error is that of the paired
    residuals c/c̄ − b/b̄ (the delta method; Cochran 1977, chapter 6, for the ratio). The test permutes which of a
    pair's values is whose. Fewer than `ENOUGH_EQUAL` residuals that are all 0 say nothing: the bounds are infinite.
    Raises `ValueError` for fewer than two tasks (or clusters), or a mean of 0 or less.
    """
    from scipy.special import stdtr, stdtrit

    n = len(base)
    freedom = (n if clusters is None else len(set(clusters))) - 1
    if freedom < 1:
        raise ValueError("one task says nothing about the spread of its values")
    mean_b, mean_c = math.fsum(base) / n, math.fsum(candidate) / n
    if mean_b <= 0 or mean_c <= 0:
        raise ValueError("a mean of 0 has no ratio")
    ratio = mean_c / mean_b
    error = standard_error([c / mean_c - b / mean_b for b, c in zip(base, candidate, strict=True)], clusters)
    unknown = error <= _TINY and freedom + 1 < ENOUGH_EQUAL
    reach = float(stdtrit(freedom, 1 - alpha)) * error
    p_better, p_worse = sign_flip([c - b for b, c in zip(base, candidate, strict=True)], clusters, seed)
    beyond = None
    if margin is not None:
        distance = math.log(ratio) - math.log1p(margin)
        p = float(stdtr(freedom, -distance / error)) if error > _TINY else float(unknown or distance <= _TINY)
        beyond = max(p_worse, p)
    low, high = ratio * math.exp(-min(reach, 300.0)) - 1, ratio * math.exp(min(reach, 300.0)) - 1
    if unknown:
        low, high = -math.inf, math.inf
    return Estimate(ratio - 1, low, high, p_worse, p_better, beyond, "log ratio of means, permutation of labels", n)
