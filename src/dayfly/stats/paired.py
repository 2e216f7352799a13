"""Differences of paired tasks: interval, test, and the test of a margin."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dayfly.stats.proportions import mcnemar_exact, tango, tango_p

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW = 8
"""Below so many tasks that differ, t over tasks is not trusted alone."""
DRAWS = 100_000
ALL_SIGNS_UP_TO = 20
LATTICE_UP_TO = 50_000_000
"""Cells times steps of the exact distribution: a fraction of a second."""
LARGEST_DENOMINATOR = 2520
_TINY = 1e-12


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


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[float]:
    if clusters is None:
        return list(values)
    parts: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        parts.setdefault(cluster, []).append(value)
    return [math.fsum(part) for part in parts.values()]


# --- the permutation test ------------------------------------------------------------------------


def sign_flip(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None, seed: int = 0
) -> tuple[float, float]:
    """One-sided p of "no worse" and of "no better" by flipping the signs of differences (Fisher 1935).

    If the two agents are alike, each task's (or cluster's) difference has either sign with equal chance. Exact
    where differences are multiples of one fraction, as shares of attempts are: the sum's distribution is a
    convolution. Else over all 2^T signs for T ≤ 20, else over 100,000 draws with p = (1 + #)/(1 + R).
    """
    sums = [s for s in _cluster_sums(differences, clusters) if abs(s) > _TINY]
    if not sums:
        return 1.0, 1.0
    whole = _on_lattice(sums)
    if whole is not None:
        return _exact_tails(whole)
    import numpy as np

    values, observed = np.array(sums), math.fsum(sums)
    slack = 1e-9 * float(np.abs(values).sum())
    if len(sums) <= ALL_SIGNS_UP_TO:
        flipped = np.zeros(1)
        for value in values:
            flipped = np.concatenate((flipped - value, flipped + value))
        return float((flipped <= observed + slack).mean()), float((flipped >= observed - slack).mean())
    generator = np.random.default_rng(seed)
    worse = better = 0
    for _ in range(20):  # in parts, for the memory of large task sets
        signs = generator.integers(0, 2, (DRAWS // 20, len(sums)), dtype=np.int8)
        flipped = (2 * signs - 1) @ values
        worse += int((flipped <= observed + slack).sum())
        better += int((flipped >= observed - slack).sum())
    return (1 + worse) / (1 + DRAWS), (1 + better) / (1 + DRAWS)


def _on_lattice(sums: Sequence[float]) -> list[int] | None:
    """The sums as integers in a common unit, or None if there is none of moderate size."""
    unit = 1
    for value in {round(s, 12) for s in sums}:
        close = Fraction(value).limit_denominator(LARGEST_DENOMINATOR)
        if abs(float(close) - value) > 1e-9:
            return None
        unit = math.lcm(unit, close.denominator)
        if unit > LARGEST_DENOMINATOR:
            return None
    whole = [round(s * unit) for s in sums]
    divisor = math.gcd(*whole)
    if divisor == 0:  # smaller than any unit that is looked for
        return None
    whole = [w // divisor for w in whole]
    return whole if sum(map(abs, whole)) * len(whole) <= LATTICE_UP_TO else None


def _exact_tails(whole: Sequence[int]) -> tuple[float, float]:
    """P(S ≤ observed) and P(S ≥ observed) of S = Σ ± w, by adding one w after the other.

    With X_w = w·(0 or 1), S = 2·ΣX − Σw, so the distribution of ΣX is what is built up.
    """
    import numpy as np

    sizes = sorted(map(abs, whole))
    total = sum(sizes)
    chances: NDArray[Any] = np.zeros(total + 1)
    chances[0], top = 1.0, 0
    for size in sizes:
        top += size
        shifted = chances[: top + 1 - size].copy()
        chances[: top + 1] *= 0.5
        chances[size : top + 1] += 0.5 * shifted
    place = (sum(whole) + total) // 2
    return min(1.0, float(chances[: place + 1].sum())), min(1.0, float(chances[place:].sum()))


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

    One attempt each and no clusters: exact McNemar and Tango's interval. Else as `estimate_means` over the tasks'
    shares. Raises `ValueError` without tasks.
    """
    if not trials:
        raise ValueError("no tasks")
    if any(n1 != 1 or n2 != 1 for n1, _, n2, _ in trials) or clusters is not None:
        differences = [c2 / n2 - c1 / n1 for n1, c1, n2, c2 in trials]
        return estimate_means(differences, clusters=clusters, alpha=alpha, margin=margin, seed=seed)
    n = len(trials)
    worse = sum(c2 < c1 for _, c1, _, c2 in trials)
    better = sum(c2 > c1 for _, c1, _, c2 in trials)
    low, high = tango(worse, better, n, alpha)
    p_worse = mcnemar_exact(worse, better)
    beyond = None if margin is None else max(p_worse, tango_p(worse, better, n, -margin))
    delta = (better - worse) / n
    return Estimate(
        delta, low, high, p_worse, mcnemar_exact(better, worse), beyond, "Tango score, exact McNemar", n
    )


def estimate_means(
    differences: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    alpha: float,
    margin: float | None = None,
    seed: int = 0,
) -> Estimate:
    """The mean of per-task differences: t over tasks or clusters, and the permutation of signs.

    Where few tasks (or clusters) differ, or all by the same, t would claim more than the data hold. Then the wider
    of t and Tango's interval is taken, the latter on the sums of losses and gains as if these were whole tasks: a
    difference of 1/3 has a ninth of the variance of a whole one, and counts as a third. Raises `ValueError`
    without tasks.
    """
    if not differences:
        raise ValueError("no tasks")
    delta = math.fsum(differences) / len(differences)
    p_worse, p_better = sign_flip(differences, clusters, seed)
    bounds = _t_bounds(differences, clusters, alpha, margin)
    sums = _cluster_sums(differences, clusters)
    method = f"t over {'tasks' if clusters is None else 'clusters'}"
    if bounds is None or sum(abs(s) > _TINY for s in sums) < FEW:
        cautious = _score_bounds(differences, sums, alpha, margin)
        if bounds is None:
            bounds, method = cautious, "Tango score on shares"
        else:
            bounds = (
                min(bounds[0], cautious[0]),
                max(bounds[1], cautious[1]),
                None if bounds[2] is None or cautious[2] is None else max(bounds[2], cautious[2]),
            )
            method += " or Tango score on shares"
    low, high, p = bounds
    if all(abs(d) <= 1 for d in differences):
        low, high = max(low, -1.0), min(high, 1.0)
    beyond = None if p is None else max(p_worse, p)
    return Estimate(
        delta,
        min(low, delta),
        max(high, delta),
        p_worse,
        p_better,
        beyond,
        f"{method}, permutation of signs",
        len(differences),
    )


Bounds = tuple[float, float, float | None]
"""Lower and upper bound, and the p of the margin."""


def _t_bounds(
    values: Sequence[float], clusters: Sequence[Hashable] | None, alpha: float, margin: float | None
) -> Bounds | None:
    from scipy.special import stdtr, stdtrit

    error = standard_error(values, clusters)
    freedom = (len(values) if clusters is None else len(set(clusters))) - 1
    if freedom < 1 or error < _TINY:
        return None
    mean, reach = math.fsum(values) / len(values), float(stdtrit(freedom, 1 - alpha)) * error
    p = None if margin is None else float(stdtr(freedom, (mean + margin) / error))
    return mean - reach, mean + reach, p


def _score_bounds(values: Sequence[float], sums: Sequence[float], alpha: float, margin: float | None) -> Bounds:
    """Tango's bounds of the mean, each unit (task or cluster) taken as one pair of the largest size that occurs."""
    mean, units = math.fsum(values) / len(values), len(sums)
    size = max(1.0, *map(abs, sums))
    worse = math.fsum(-s for s in sums if s < 0) / size
    better = math.fsum(s for s in sums if s > 0) / size
    per_task = size * units / len(values)  # of the mean over units, in the unit of the mean over tasks
    low, high = tango(worse, better, units, alpha)
    p = None if margin is None else tango_p(worse, better, units, -margin / per_task)
    return min(low * per_task, mean), max(high * per_task, mean), p


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
    pair's values is whose. Raises `ValueError` for fewer than two tasks (or clusters), or a mean of 0 or less.
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
    reach = float(stdtrit(freedom, 1 - alpha)) * error
    p_better, p_worse = sign_flip([c - b for b, c in zip(base, candidate, strict=True)], clusters, seed)
    beyond = None
    if margin is not None:
        distance = math.log(ratio) - math.log1p(margin)
        p = float(stdtr(freedom, -distance / error)) if error > _TINY else float(distance <= _TINY)
        beyond = max(p_worse, p)
    low, high = ratio * math.exp(-min(reach, 300.0)) - 1, ratio * math.exp(min(reach, 300.0)) - 1
    return Estimate(ratio - 1, low, high, p_worse, p_better, beyond, "log ratio of means, permutation of labels", n)
