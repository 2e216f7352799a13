"""Shares of one sample, and the difference of two paired ones."""

from __future__ import annotations

import math
from statistics import NormalDist

_STEPS = 80
"""Halvings of an interval of length 2: far below the spacing of floats."""


def wilson(rate: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a rate over `n` ≥ 1 trials (Wilson 1927)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def clopper_pearson(passed: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share (Clopper and Pearson 1934), by quantiles of the beta distribution.

    `passed` may be a fraction, as of a mean of shares; the interval then lies between those of its neighbours.
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(passed, n - passed + 1, tail)) if passed else 0.0
    high = float(betaincinv(passed + 1, n - passed, 1 - tail)) if passed < n else 1.0
    return low, high


def upper_bound_of_never(n: int, confidence: float = 0.95) -> float:
    """The one-sided upper bound of a share that was 0 in `n` ≥ 1 trials: 1 − (1 − confidence)^(1/n)."""
    return -math.expm1(math.log1p(-confidence) / n)


def mcnemar_exact(worse: int, better: int) -> float:
    """One-sided exact p of "no worse" (McNemar 1947): P(X ≥ worse) with X binomial(worse + better, ½)."""
    from scipy.special import bdtrc

    if worse <= 0:
        return 1.0
    return float(bdtrc(worse - 1, worse + better, 0.5))


def fisher_worse(base_passed: int, base_graded: int, passed: int, graded: int) -> float:
    """One-sided exact p of "passes no less often" (Fisher 1934): few of all passes are among the later attempts.

    The hypergeometric chance that of base_graded + graded attempts with so many passes between them, a random
    choice of `graded` has at most `passed`. 1 without attempts on one of the sides.
    """
    # In integers: a p of just 1/20 is a p of 0.05, and sums of floats make it a little more.
    passes, attempts = base_passed + passed, base_graded + graded
    ways = sum(
        math.comb(passes, x) * math.comb(attempts - passes, graded - x) for x in range(min(passed, passes) + 1)
    )
    return ways / math.comb(attempts, graded)


def tango(worse: float, better: float, n: float, alpha: float) -> tuple[float, float]:
    """Tango's score interval of (better − worse)/n at the two-sided level 1 − 2·alpha (Tango 1998).

    Each bound is the one-sided bound at 1 − alpha. Counts and `n` may be fractions, as those of parts of a mean are
    (`paired`). Raises `ValueError` without pairs.
    """
    if n <= 0:
        raise ValueError("no pairs")
    z = NormalDist().inv_cdf(1 - alpha)
    delta = (better - worse) / n
    low = _cross(worse, better, n, z, -1.0, delta)
    high = -_cross(better, worse, n, z, -1.0, -delta)
    return min(low, delta), max(high, delta)


def _cross(worse: float, better: float, n: float, z: float, outside: float, inside: float) -> float:
    """Where the statistic, which falls as the assumed difference grows, is z; `outside` if it is nowhere."""
    if tango_statistic(worse, better, n, outside) <= z:
        return outside
    for _ in range(_STEPS):
        middle = (outside + inside) / 2
        if tango_statistic(worse, better, n, middle) > z:
            outside = middle
        else:
            inside = middle
    return (outside + inside) / 2


def tango_statistic(worse: float, better: float, n: float, delta0: float) -> float:
    """The score statistic of a difference `delta0`: about standard normal if that is the true one."""
    distance = better - worse - n * delta0
    b = -better - worse + (2 * n - better + worse) * delta0
    c = -worse * delta0 * (1 - delta0)
    p_worse = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    variance = n * (2 * p_worse + delta0 * (1 - delta0))
    if variance <= 1e-15 * n:
        return 0.0 if abs(distance) < 1e-9 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def tango_p(worse: float, better: float, n: float, delta0: float) -> float:
    """One-sided p of "the difference is at least `delta0`": small when the candidate is worse than that."""
    return NormalDist().cdf(tango_statistic(worse, better, n, min(max(delta0, -1.0), 1.0)))


def bonett_price(worse: int, better: int, n: int, alpha: float) -> tuple[float, float]:
    """The closed form of Bonett and Price (2012) for the same interval: a check of Tango's."""
    z = NormalDist().inv_cdf(1 - alpha)
    p21, p12 = (worse + 1) / (n + 2), (better + 1) / (n + 2)
    half = z * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    return max(-1.0, p12 - p21 - half), min(1.0, p12 - p21 + half)
