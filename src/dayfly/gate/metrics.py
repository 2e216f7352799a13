"""Rules about metrics: margins against the baseline, and absolute bounds.

Each rule is a test with two ends. Its bound is *shown to be kept* when the one-sided confidence bound lies within
it, and *shown to be broken* when the opposite bound lies beyond it and the exact or permutation test agrees.
Holm corrects the second for being one of several (to fail, one is enough), not the first (to pass, all must hold).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dayfly.compare.model import Metric
from dayfly.gate.absolute import Level, Limits, level
from dayfly.gate.case import Case
from dayfly.gate.policy import MetricRule, Tier, is_share
from dayfly.gate.verdict import Answer, EarlyStopped, RuleResult
from dayfly.gate.words import percent
from dayfly.results.side import TaskResults
from dayfly.stats import holm, pairs_needed

POWER = 0.8
MOST_ROLLOUTS = 1_000_000
"""More than that is no advice."""
ROUNDING = 1e-12
RELATIVE = ("seconds", "tokens", "cost_usd")


@dataclass(frozen=True)
class Tested:
    """One bound of one metric, tested."""

    id: str
    tier: Tier
    said: str
    """The figures; or why there are none."""
    kept: bool = False
    broken: bool = False
    p: float | None = None
    """Of "it is kept"; small when it is broken. None: it cannot be shown to be broken."""
    more: int | None = None
    tasks: tuple[str, ...] = ()


def metric_rules(case: Case) -> Iterator[RuleResult]:
    tests = [t for name, rule in case.policy.metrics.items() for t in _tests(case, name, rule)]
    family = {t.id: t.p for t in tests if t.tier != "advisory" and t.p is not None}
    corrected = holm(family) if family and case.policy.multiplicity == "holm" else family
    for test in tests:
        yield _answered(test, corrected.get(test.id, test.p), case.alpha, corrected=len(family) > 1)


def _answered(test: Tested, p: float | None, alpha: float, *, corrected: bool) -> RuleResult:
    answer: Answer = "inconclusive"
    said = test.said
    if test.kept:
        answer = "pass"
    elif test.broken and p is not None and p <= alpha:
        answer = "fail"
        said += f"; p = {p:.2g}" + (" after Holm's correction" if corrected and p != test.p else "")
    more = test.more if answer == "inconclusive" else None
    if more is not None:
        said += f"; about {more} more rollouts of the candidate would probably decide"
    return RuleResult(
        id=test.id,
        kind="metric",
        tier=test.tier,
        answer=answer,
        reason=said,
        tasks=() if answer == "pass" else test.tasks,
        more_rollouts=more,
    )


def _tests(case: Case, name: str, rule: MetricRule) -> Iterator[Tested]:
    """The bounds of one metric; none of them against a baseline that is not there."""
    found = []
    if rule.margin is not None and case.comparison is not None:
        found.append(_margin(case, name, rule.margin, rule.tier))
    if rule.min is not None or rule.max is not None:
        found.extend(_absolute(case, name, rule))
    for test in found:
        yield test if case.stopped is None else _not_after_a_stop(test, case.stopped)


def _not_after_a_stop(test: Tested, stopped: EarlyStopped) -> Tested:
    """A test made at a moment that was chosen by looking at the results would not keep its error."""
    why = "evidence that blocks was found while the job ran" if stopped.complete else "the job was stopped early"
    said = f"not tested: {why}, and only the rule of the early stop is valid then"
    return Tested(test.id, test.tier, said)


# --- against the baseline ----------------------------------------------------------------------------


def _margin(case: Case, name: str, margin: float, tier: Tier) -> Tested:
    assert case.comparison is not None
    metric = case.comparison.metrics.get(name)
    id = f"metric.{name}.margin"
    if metric is None or not metric.known or metric.delta is None:
        why = metric.reason if metric is not None and metric.reason else "it was not compared"
        return Tested(id, tier, f"{name}: the difference is not known: {why}")
    if metric.low is None or metric.high is None:
        return Tested(id, tier, f"{name}: {_difference(metric, metric.delta)}, with no interval: {metric.reason}")
    least, most = (-metric.high, -metric.low) if metric.higher_is_better else (metric.low, metric.high)
    kept = most <= margin + ROUNDING
    return Tested(
        id,
        tier,
        _said(metric, margin, kept, improved=kept and most < 0),
        kept=kept,
        broken=least > margin + ROUNDING,
        p=metric.p_beyond_margin,
        more=None if kept else _more(case, metric, margin),
        tasks=tuple(p.task for p in case.comparison.pairs if p.delta < 0) if is_share(name) else (),
    )


def _said(metric: Metric, margin: float, kept: bool, improved: bool) -> str:
    assert metric.delta is not None and metric.low is not None and metric.high is not None
    low, high = _difference(metric, metric.low, unit=False), _difference(metric, metric.high, unit=False)
    word = " improved" if improved else ""
    allowed = f"a worsening of {_difference(metric, margin).lstrip('+')} is let through"
    return f"{metric.name}{word}: {_difference(metric, metric.delta)} ({low} to {high}), {allowed}"


def _difference(metric: Metric, value: float, *, unit: bool = True) -> str:
    value += 0.0  # no minus sign before a zero
    if metric.name == "reward":
        return f"{value:+.3g}"
    number, name = f"{100 * value:+.1f}", " %" if metric.relative else " points"
    return number + (name if unit else "")


def _more(case: Case, metric: Metric, margin: float) -> int | None:
    """How many more rollouts of the candidate would probably decide, if all goes on as so far."""
    assert case.comparison is not None and None not in (metric.delta, metric.low, metric.high)
    assert metric.delta is not None and metric.low is not None and metric.high is not None
    worse = -metric.delta if metric.higher_is_better else metric.delta
    distance = abs(margin - worse)
    if metric.tasks == 0 or distance < 1e-6:
        return None
    if metric.name == "score" and case.candidate.attempts == 1:
        moved = case.comparison.transitions.worse + case.comparison.transitions.better
        discordant = min(max(moved / metric.tasks, distance), 1.0)
        tasks = float(pairs_needed(min(distance, discordant), discordant, case.alpha, POWER))
    else:
        tasks = _tasks_for(metric.tasks, (metric.high - metric.low) / 2, distance, case.alpha)
    return _rollouts(tasks - metric.tasks, case.candidate.attempts)


def _tasks_for(tasks: int, reach: float, distance: float, alpha: float) -> float:
    """So many that an interval, now `reach` to each side, decides at `distance` with a chance of `POWER`."""
    from scipy.special import ndtri

    wanted = 1 + float(ndtri(POWER)) / max(float(ndtri(1 - alpha)), 0.1)
    return tasks * (reach * wanted / distance) ** 2


def _rollouts(tasks: float, attempts: int) -> int | None:
    if not math.isfinite(tasks) or tasks * attempts > MOST_ROLLOUTS:
        return None
    return max(math.ceil(tasks), 1) * max(attempts, 1)


# --- absolute bounds ---------------------------------------------------------------------------------


def _absolute(case: Case, name: str, rule: MetricRule) -> Iterator[Tested]:
    tasks = [t for t in case.counted(case.candidate) if t.graded / max(t.planned, 1) >= case.policy.coverage.task]
    tasks = [t for t in tasks if t.graded]
    found = level(name, tasks, Limits(rule.min, rule.max), case.alpha, _clusters(case, tasks))
    for end, limit in (("min", rule.min), ("max", rule.max)):
        if limit is not None:
            yield _against(case, f"metric.{name}.{end}", name, rule.tier, found, limit, upper=end == "max")


def _clusters(case: Case, tasks: list[TaskResults]) -> list[str] | None:
    """Each task's cluster; one without a value is a cluster of its own."""
    key = case.policy.cluster_by
    if key is None:
        return None
    return [f"={t.metadata[key]}" if key in t.metadata else f"@{t.task}" for t in tasks]


def _against(case: Case, id: str, name: str, tier: Tier, found: Level, limit: float, *, upper: bool) -> Tested:
    bound = f"{'at most' if upper else 'at least'} {_amount(name, limit)} is asked for"
    if found.value is None:
        return Tested(id, tier, f"{name} is not known: {found.reason}; {bound}")
    if found.low is None or found.high is None:
        return Tested(id, tier, f"{name} {_amount(name, found.value)}, with no interval: {found.reason}; {bound}")
    said = f"{name} {_amount(name, found.value)} ({_amount(name, found.low)} to {_amount(name, found.high)})"
    kept = found.high <= limit + ROUNDING if upper else found.low >= limit - ROUNDING
    broken = found.low > limit + ROUNDING if upper else found.high < limit - ROUNDING
    tested = Tested(id, tier, f"{said}, {bound}", kept, broken, found.p_over if upper else found.p_under)
    distance = abs(found.value - limit)
    if kept or distance < 1e-6:
        return tested
    units = _tasks_for(found.units, (found.high - found.low) / 2, distance, case.alpha)
    return replace(tested, more=_rollouts(units - found.units, case.candidate.attempts))


def _amount(name: str, value: float) -> str:
    value += 0.0
    match name:
        case "reward" | "tokens":
            return f"{value:.4g}"
        case "seconds":
            return f"{value:.1f} s"
        case "cost_usd":
            return f"${value:.4g}"
        case _:
            return percent(value)
