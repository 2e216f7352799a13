"""Evidence that may be looked at after every pair."""

from __future__ import annotations

import math


def log_e_value(worse: int, better: int) -> float:
    """Logarithm of E(b, c) = 2^(m+1) · B(b+1, c+1) · P(Beta(b+1, c+1) > ½), m = b + c.

    It is the mean over p in (½, 1) of the likelihood ratio (2p)^b (2(1−p))^c of "a discordant pair is a regression
    with probability p" against a fair coin: a martingale that starts at 1 under the coin, so that it ever reaches
    1/α with a chance ≤ α (Ville 1939; mixtures: Robbins 1970).
    """
    from scipy.special import betainc, betaln

    above = float(betainc(better + 1, worse + 1, 0.5))
    if above < 1e-250:
        return _log_of_little(worse, better)
    return (worse + better + 1) * math.log(2) + float(betaln(worse + 1, better + 1)) + math.log(above)


def _log_of_little(worse: int, better: int) -> float:
    """The same where the tail is too small for a float: E = ₂F₁(m+2, 1; c+2; ½) / (2(c+1)), c far above b.

    Each term of the series is the one before times (m+2+k)/(2(c+2+k)), which is well below 1 there.
    """
    total, term, k = 0.0, 1.0, 0
    while term > 1e-17 * total:
        total += term
        term *= (worse + better + 2 + k) / (2 * (better + 2 + k))
        k += 1
    return math.log(total) - math.log(2 * (better + 1))


def e_value(worse: int, better: int) -> float:
    """E(b, c); see `log_e_value`. At most e^600, so that it stays a finite number."""
    return math.exp(min(log_e_value(worse, better), 600.0))


def can_still_reach(worse: int, better: int, left: int, threshold: float) -> bool:
    """Whether `left` more pairs could bring E to `threshold`: it grows with every regression."""
    return log_e_value(worse + left, better) >= math.log(threshold)
