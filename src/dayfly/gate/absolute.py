"""A metric of one side alone, with one-sided bounds and exact or t tests: for `min` and `max` of a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dayfly.gate.policy import is_share
from dayfly.results.side import TaskResults
from dayfly.stats import clopper_pearson, pass_all_k, pass_at_k, standard_error, wilson


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
        return _exact(sum(t.passed for t in tasks), sum(t.graded for t in tasks), limits, alpha, len(tasks))
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


def _exact(passed: int, n: int, limits: Limits, alpha: float, tasks: int) -> Level:
    """Clopper and Pearson: each attempt is a toss of its own (of one task's attempts, or of one in each task)."""
    from scipy.special import bdtr, bdtrc

    low, high = clopper_pearson(passed, n, confidence=1 - 2 * alpha)
    return Level(
        value=passed / n,
        low=low,
        high=high,
        units=n,
        p_under=None if limits.min is None else float(bdtr(passed, n, limits.min)),
        p_over=None if limits.max is None else float(bdtrc(passed - 1, n, limits.max)) if passed else 1.0,
        method="Clopper–Pearson" + (" over the attempts of one task" if tasks == 1 else ""),
    )


def _mean(
    values: Sequence[float], limits: Limits, alpha: float, clusters: Sequence[str] | None, *, bounded: bool
) -> Level:
    """Student's t over tasks or clusters; where all are equal, which says nothing of their spread, Wilson."""
    from scipy.special import stdtr, stdtrit

    n = len(set(clusters)) if clusters else len(values)
    mean = math.fsum(values) / len(values)
    error = standard_error(values, clusters) if n > 1 else None
    if error:
        reach = float(stdtrit(n - 1, 1 - alpha)) * error
        p_under = None if limits.min is None else float(stdtr(n - 1, (mean - limits.min) / error))
        p_over = None if limits.max is None else float(stdtr(n - 1, (limits.max - mean) / error))
        return Level(mean, mean - reach, mean + reach, n, p_under, p_over, f"t over {n}")
    if bounded:
        rate = min(max(mean, 0.0), 1.0)
        low, high = wilson(rate, n, confidence=1 - 2 * alpha)
        p_under, p_over = _score_test(rate, limits.min, n), _score_test(1 - rate, _complement(limits.max), n)
        return Level(mean, low, high, n, p_under, p_over, f"Wilson over {n}")
    return Level(mean, units=n, reason=f"{n} equal values say nothing about their spread")


def _complement(value: float | None) -> float | None:
    return None if value is None else 1 - value


def _score_test(rate: float, floor: float | None, n: int) -> float | None:
    """One-sided p of "the rate is at least `floor`"; the test that Wilson's interval inverts."""
    from scipy.special import ndtr

    if floor is None:
        return None
    spread = math.sqrt(floor * (1 - floor) / n)
    if not spread:
        return 1.0 if rate >= floor else 0.0
    return float(ndtr((rate - floor) / spread))
