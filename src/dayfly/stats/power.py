"""How many pairs show a drop, and which drop so many pairs show."""

from __future__ import annotations

import math
from statistics import NormalDist


def pairs_needed(drop: float, discordant: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Pairs of one attempt each in which a one-sided McNemar test finds `drop` with chance `power`.

    n ≈ ((z_{1−α}·sqrt(π) + z_{1−β}·sqrt(π − δ²))/δ)² (Miettinen 1968; Connor 1987), π the share of discordant
    pairs, at least the drop itself. Raises `ValueError` unless 0 < drop ≤ discordant ≤ 1.
    """
    if not 0 < drop <= discordant <= 1:
        raise ValueError("a drop lies above 0 and is no more than the share of discordant pairs")
    z = NormalDist().inv_cdf
    spread = z(1 - alpha) * math.sqrt(discordant) + z(power) * math.sqrt(discordant - drop * drop)
    return math.ceil((spread / drop) ** 2 - 1e-9)


def power_exact(n: int, drop: float, discordant: float, alpha: float = 0.05) -> float:
    """The chance that the exact one-sided McNemar test of `n` pairs finds `drop`, summed over discordant pairs."""
    import numpy as np
    from scipy.special import bdtrc, gammaln, xlog1py, xlogy

    m = np.arange(n + 1)
    log_m = gammaln(n + 1) - gammaln(m + 1) - gammaln(n - m + 1) + xlogy(m, discordant)
    log_m = log_m + xlog1py(n - m, -discordant)
    weights = np.exp(log_m)
    worse = (discordant + drop) / (2 * discordant)
    keep = weights > 1e-14
    m, weights = m[keep], weights[keep]
    critical = np.array([_critical(int(k), alpha) for k in m])
    possible = critical <= m
    chances = np.where(critical <= 0, 1.0, bdtrc(np.maximum(critical - 1, 0), m, worse))
    return float((weights * np.where(possible, chances, 0.0)).sum())


def _critical(m: int, alpha: float) -> int:
    """The fewest regressions of m discordant pairs that are significant; m + 1 if none are."""
    from scipy.special import bdtrc

    low, high = 0, m + 1  # p falls as regressions grow
    while low < high:
        middle = (low + high) // 2
        if middle > 0 and float(bdtrc(middle - 1, m, 0.5)) <= alpha:
            high = middle
        else:
            low = middle + 1
    return low


def pairs_needed_exact(drop: float, discordant: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """The fewest pairs with `power_exact` of at least `power`. Raises `ValueError` as `pairs_needed`."""
    n = pairs_needed(drop, discordant, alpha, power)
    while n > 1 and power_exact(n - 1, drop, discordant, alpha) >= power:
        n -= 1
    while power_exact(n, drop, discordant, alpha) < power:
        n += 1
    return n


def smallest_drop(
    tasks: int, attempts: int = 1, discordant: float = 0.2, alpha: float = 0.05, power: float = 0.8
) -> float | None:
    """The smallest drop that is found with chance `power`; None: not even a drop of everything is.

    `discordant` is the share π of discordant pairs of one attempt each, the drop δ among them; a larger drop brings
    its own. By the formula of `pairs_needed`, with (π − δ)/k + δ for π: `attempts` k average out the flakes, not
    that δ of the tasks fail for good. Of a drop that is spread over all tasks, they show more.
    """
    z = NormalDist().inv_cdf

    def reach(drop: float) -> float:
        share = max(discordant - drop, 0.0) / attempts + drop
        return z(1 - alpha) * math.sqrt(share) + z(power) * math.sqrt(max(share - drop * drop, 0.0))

    low, high = 0.0, 1.0
    if tasks < 1 or reach(high) > high * math.sqrt(tasks):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        if reach(middle) <= middle * math.sqrt(tasks):
            high = middle
        else:
            low = middle
    return high
