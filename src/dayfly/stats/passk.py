"""pass@k and pass^k."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean


def pass_at_k(trials: Iterable[tuple[int, int]], k: int) -> float | None:
    """Mean of 1 − C(n−c, k)/C(n, k) over tasks with (n graded, c passed) (Chen 2021); None if any n < k."""
    return _mean_over(trials, k, lambda n, c: 1 - math.comb(n - c, k) / math.comb(n, k))


def pass_all_k(trials: Iterable[tuple[int, int]], k: int) -> float | None:
    """Mean of C(c, k)/C(n, k) (pass^k of τ-bench); None if any n < k."""
    return _mean_over(trials, k, lambda n, c: math.comb(c, k) / math.comb(n, k))


def _mean_over(trials: Iterable[tuple[int, int]], k: int, chance: Callable[[int, int], float]) -> float | None:
    listed = list(trials)
    if not listed or any(n < k for n, _ in listed):
        return None
    return fmean(chance(n, c) for n, c in listed)
