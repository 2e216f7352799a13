"""A metric of one side alone, with one-sided bounds and exact or t tests: for `min` and `max` of a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dayfly.gate.policy import is_share
from dayfly.results.side import TaskResults
from dayfly.stats import clopper_pearson, pass_all_k, pass_at_k, standard_error


@dataclass(frozen=True)
class Level:
    """What a metric came to. `low` and `high` are one-sided bounds at 1 − α; None: not known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    units: int = 0
    """Tasks, clusters or attempts that vary independently."""
    p_under: float | None = None
    """Of "at least min": small when it is under."""
    p_over: float | None = None
    """Of "at most max": small when it is over."""
    method: str = ""
    reason: str = ""
    """Why nothing is known."""


@dataclass(frozen=True)
class Limits:
    min: float | None = None
    max: float | None = None


def level(
    name: str, tasks: Sequence[TaskResults], limits: Limits, alpha: float, clusters: list[str] | None
) -> Level:
    """Metric `name` over the graded attempts of `tasks`; `clusters` holds a value for each of them."""
    values = [value_of(name, t) for t in tasks]
    known = [v for v in values if v is not None]
    if not values:
        return Level(reason="nothing is graded")
    if len(known) < len(values):
        return Level(reason=f"not known for {len(values) - len(known)} of {len(values)} tasks")
    single = all(t.graded == 1 for t in tasks) or len(tasks) == 1
    if name == "score" and single and (clusters is None or len(tasks) == 1):
        method = "Clopper–Pearson" + (" over the attempts of one task" if len(tasks) == 1 else "")
        return _exact(sum(t.passed for t in tasks), sum(t.graded for t in tasks), limits, alpha, method)
    bounded = is_share(name) or (name == "reward" and all(0 <= v <= 1 for v in known))
    return _mean(known, limits, alpha, clusters, bounded=bounded)


def value_of(name: str, task: TaskResults) -> float | None:
    """The metric of one task; None when it is not known. `task` has a graded attempt."""
    k = int(name[5:]) if name.startswith("pass") else 0
    match name:
        case "score":
            return task.rate
        case "reward":
            return task.reward_sum / task.graded
        case "seconds":
            return task.seconds_sum / task.graded
        case "tokens":
            return None if task.tokens_sum is None else task.tokens_sum / task.graded
        case "cost_usd":
            return None if task.cost_sum is None else task.cost_sum / task.graded
        case _ if name.startswith("pass@"):
            return pass_at_k([(task.graded, task.passed)], k)
        case _:
            return pass_all_k([(task.graded, task.passed)], k)


def _exact(passed: float, n: int, limits: Limits, alpha: float, method: str) -> Level:
    """Clopper and Pearson: of `n` tosses `passed` did; a part of one counts as such, between its two neighbours."""
    low, high = clopper_pearson(passed, n, confidence=1 - 2 * alpha)
    return Level(
        value=passed / n,
        low=low,
        high=high,
        units=n,
        p_under=None if limits.min is None else _at_most(passed, n, limits.min),
        p_over=None if limits.max is None else _at_most(n - passed, n, 1 - limits.max),
        method=method,
    )


def _at_most(passed: float, n: int, chance: float) -> float:
    """P(X ≤ passed) of X binomial(n, chance), by the beta distribution, which goes on between whole numbers."""
    from scipy.special import betainc

    return 1.0 if passed >= n else float(betainc(n - passed, passed + 1, 1 - chance))


def _mean(
    values: Sequence[float], limits: Limits, alpha: float, clusters: Sequence[str] | None, *, bounded: bool
) -> Level:
    """Student's t over tasks or clusters; of shares, the wider of that and of the exact interval of so many tosses.

    t alone claims too much where nearly all are equal: 49 of 50 tasks that always pass.
    """
    n = len(set(clusters)) if clusters else len(values)
    mean = math.fsum(values) / len(values)
    error = standard_error(values, clusters) if n > 1 else 0.0
    by_t = _by_t(mean, error, n, limits, alpha) if error else None
    if not bounded:
        return by_t or Level(mean, units=n, reason=f"{n} equal values say nothing about their spread")
    exact = _exact(min(max(mean, 0.0), 1.0) * n, n, limits, alpha, f"Clopper–Pearson over {n}")
    return exact if by_t is None else _wider(by_t, exact)


def _by_t(mean: float, error: float, n: int, limits: Limits, alpha: float) -> Level:
    from scipy.special import stdtr, stdtrit

    reach = float(stdtrit(n - 1, 1 - alpha)) * error
    p_under = None if limits.min is None else float(stdtr(n - 1, (mean - limits.min) / error))
    p_over = None if limits.max is None else float(stdtr(n - 1, (limits.max - mean) / error))
    return Level(mean, mean - reach, mean + reach, n, p_under, p_over, f"t over {n}")


def _wider(a: Level, b: Level) -> Level:
    """Of two intervals of a share; within 0 and 1."""
    assert a.low is not None and a.high is not None and b.low is not None and b.high is not None
    return Level(
        value=a.value,
        low=max(min(a.low, b.low), 0.0),
        high=min(max(a.high, b.high), 1.0),
        units=a.units,
        p_under=None if a.p_under is None or b.p_under is None else max(a.p_under, b.p_under),
        p_over=None if a.p_over is None or b.p_over is None else max(a.p_over, b.p_over),
        method=f"wider of {a.method} and {b.method}",
    )
