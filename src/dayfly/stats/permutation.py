"""Permutation tests of paired samples: exact where the sum's distribution can be computed, else by draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWS = 100_000
FEWER_DRAWS = 10_000
"""Of more than `MANY` values: p = (1 + #)/(1 + R) holds for any number of draws."""
MANY = 50_000
ALL_SIGNS_UP_TO = 20
LARGEST_DENOMINATOR = 2520
LATTICE_UP_TO = 20_000_000
"""Frequencies times terms of the exact distribution: about half a second."""
LONG_STEP = 8
"""Values of a step from which its fast Fourier transform is quicker than adding up turns."""
_TINY = 1e-12
_LEAST = 1e-15
"""What sums of floats can tell from 0. No p is smaller, as none is 0."""

Step = tuple[tuple[int, float], ...]
"""One term of a sum: its possible values, and the chance of each."""


def flip_signs(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """P(S ≤ observed) and P(S ≥ observed) of S = Σ ± v, each sign with chance ½.

    Exact where the values are multiples of one fraction, as differences of shares of attempts are. Else over all
    2^T signs for T ≤ 20, else over draws, with p = (1 + #)/(1 + R) (Phipson and Smyth 2010).
    """
    values = [v for v in values if abs(v) > _TINY]
    if not values:
        return 1.0, 1.0
    if (whole := _on_lattice(values)) is not None:
        steps: Counter[Step] = Counter(((-abs(w), 0.5), (abs(w), 0.5)) for w in whole)
        if (tails := _exact_tails(steps, sum(whole), LATTICE_UP_TO)) is not None:
            return tails
    observed, slack = math.fsum(values), 1e-9 * math.fsum(map(abs, values))
    if len(values) <= ALL_SIGNS_UP_TO:
        sums = _all_sums(values)
        return float((sums <= observed + slack).mean()), float((sums >= observed - slack).mean())
    sums = _drawn_sums(values, DRAWS if len(values) <= MANY else FEWER_DRAWS, seed)
    worse, better = int((sums <= observed + slack).sum()), int((sums >= observed - slack).sum())
    return (1 + worse) / (1 + len(sums)), (1 + better) / (1 + len(sums))


def relabel(trials: Sequence[tuple[int, int, int, int]]) -> tuple[float, float]:
    """The same tails of Σ (c₂/n₂ − c₁/n₁), each task's attempts dealt anew to its sides: c₂ is hypergeometric.

    Exact between equal agents however the numbers of attempts differ. Terms are rounded to a common unit where the
    exact one is too fine: that changes the sum that is tested, not that its test is exact.
    """
    unit = math.lcm(*{n for n1, _, n2, _ in trials for n in (n1, n2)})
    unit = unit if unit <= 420 else 60
    steps: Counter[Step] = Counter()
    observed = 0
    for (n1, c1, n2, c2), times in Counter(trials).items():
        steps[_dealt(n1, n2, c1 + c2, unit)] += times
        observed += times * _difference(n1, c1, n2, c2, unit)
    tails = _exact_tails(steps, observed, math.inf)
    assert tails is not None  # without a limit there is always an answer
    return tails


def _difference(n1: int, c1: int, n2: int, c2: int, unit: int) -> int:
    whole, rest = divmod(unit * (c2 * n1 - c1 * n2), n1 * n2)
    half = n1 * n2 - 2 * rest  # a half goes to the even number, so that both directions are alike
    return whole + (half < 0 or (half == 0 and whole % 2 == 1))


@lru_cache(maxsize=1 << 14)
def _dealt(n1: int, n2: int, passed: int, unit: int) -> Step:
    ways = math.comb(n1 + n2, n2)
    return tuple(
        (
            _difference(n1, passed - c2, n2, c2, unit),
            math.comb(passed, c2) * math.comb(n1 + n2 - passed, n2 - c2) / ways,
        )
        for c2 in range(max(0, passed - n1), min(n2, passed) + 1)
    )


def _on_lattice(values: Sequence[float]) -> list[int] | None:
    """The values as integers in a common unit, or None if there is none of moderate size."""
    unit = 1
    for value in {round(v, 12) for v in values}:
        close = Fraction(value).limit_denominator(LARGEST_DENOMINATOR)
        if not close or abs(float(close) - value) > 1e-9:
            return None
        unit = math.lcm(unit, close.denominator)
        if unit > LARGEST_DENOMINATOR:
            return None
    whole = [round(v * unit) for v in values]
    divisor = math.gcd(*whole)
    return [w // divisor for w in whole] if divisor else None


def _exact_tails(steps: Mapping[Step, int], observed: int, limit: float) -> tuple[float, float] | None:
    """P(S ≤ observed) and P(S ≥ observed) of a sum of independent steps, each so many times; None over the limit.

    The distribution is the inverse Fourier transform of the product of the steps' transforms, on a circle that is
    wide enough for the chance beyond it to be under 2e^-72 (Hoeffding 1963): far fewer places than there are sums.
    """
    import numpy as np

    mean = sum(times * math.fsum(v * p for v, p in step) for step, times in steps.items())
    spread = math.sqrt(sum(times * (step[-1][0] - step[0][0]) ** 2 for step, times in steps.items()))
    reach = min(6 * spread, sum(times * (step[-1][0] - step[0][0]) for step, times in steps.items()))
    centre, half = round(mean), math.ceil(reach) + 2
    if half * sum(map(len, steps)) > limit:
        return None
    place = observed - centre
    if abs(place) > half:
        return (_LEAST, 1.0) if place < 0 else (1.0, _LEAST)
    half = _quick_half(half)
    size = 2 * half + 1
    frequencies = np.arange(half + 1)
    turns: NDArray[Any] = np.exp(2j * np.pi * np.arange(size) / size)
    product = turns[(frequencies * centre) % size]  # the sum is shifted to lie around 0
    for step, times in steps.items():
        product = product * _transform(step, turns) ** times
    chances = np.fft.fftshift(np.fft.irfft(product, size)).clip(0.0)
    at = place + half
    below, above = float(chances[: at + 1].sum()), float(chances[at:].sum())
    return min(1.0, max(below, _LEAST)), min(1.0, max(above, _LEAST))


def _transform(step: Step, turns: NDArray[Any]) -> NDArray[Any]:
    """Σ p·e^(−2πi·v·f/size) for the frequencies f of a real transform; `turns` holds the `size` roots of unity."""
    import numpy as np

    size = len(turns)
    if len(step) > LONG_STEP:
        placed = np.zeros(size)
        np.add.at(placed, [value % size for value, _ in step], [p for _, p in step])
        return np.fft.rfft(placed)
    frequencies, total = np.arange(size // 2 + 1), np.zeros(size // 2 + 1, complex)
    for value, p in step:
        total += p * turns[(-value * frequencies) % size]
    return total


def _quick_half(half: int) -> int:
    """At least `half`, and such that 2·half + 1 has small factors only, which Fourier transforms are quick with."""
    while True:
        rest = 2 * half + 1
        for factor in (3, 5, 7):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return half
        half += 1


def _all_sums(values: Sequence[float]) -> NDArray[Any]:
    """Σ ± v for all signs."""
    import numpy as np

    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate((sums - value, sums + value))
    return sums


def _drawn_sums(values: Sequence[float], draws: int, seed: int) -> NDArray[Any]:
    """Σ ± v for random signs; eight at a time, as one look into a table of all their sums."""
    import numpy as np

    generator, sums = np.random.default_rng(seed), np.zeros(draws)
    for start in range(0, len(values), 8):
        table = _all_sums(values[start : start + 8])
        sums += table[generator.integers(0, len(table), draws, dtype=np.uint8)]
    return sums
