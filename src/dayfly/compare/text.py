"""The comparison in words: figures that terminal and Markdown share. Names are as given: the writer guards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dayfly.compare.model import Comparison, Metric, Pair, SideFacts

UNKNOWN = "unknown"
_MOST_PROBLEMS = 5


def render_text(comparison: Comparison, *, most: int | None = 20) -> list[str]:
    """Lines for a terminal; of each list the first `most` (None: all)."""
    return [
        *_sides(comparison),
        *_varied(comparison),
        "",
        *comparable_lines(comparison, most),
        "",
        *(f"{metric.name}: {metric_words(metric, comparison.alpha)}" for metric in comparison.metrics.values()),
        "",
        *_changes(comparison, most),
        *_groups(comparison),
        *_flaky(comparison, most),
    ]


def _sides(c: Comparison) -> Iterator[str]:
    for name, side in (("baseline", c.base), ("candidate", c.candidate)):
        yield f"{name:<9} {side_words(side)}"
        yield from (f"  not as sealed: {problem}" for problem in side.problems[:_MOST_PROBLEMS])
        if len(side.problems) > _MOST_PROBLEMS:
            yield f"  and {len(side.problems) - _MOST_PROBLEMS} more records with problems"
        yield from (f"  {remark}" for remark in side.remarks)


def side_words(side: SideFacts) -> str:
    score = UNKNOWN if side.score is None else f"{side.score:.3f}"
    classes = f"{', '.join(side.isolation) or UNKNOWN}, {', '.join(side.verifier_classes) or UNKNOWN}"
    return (
        f"{side.job_id}:{side.agent}  score {score} of {side.graded}/{side.planned} graded"
        f" ({100 * side.coverage:.0f} %)  {classes}"
    )


def _varied(c: Comparison) -> Iterator[str]:
    yield f"same: {', '.join(c.same) or 'nothing'}"
    for d in c.differences:
        where = "" if d.tasks is None else f" in {d.tasks} tasks"
        yield f"varied: {d.aspect}{where}: {d.base or UNKNOWN} → {d.candidate or UNKNOWN}"


def comparable_lines(c: Comparison, most: int | None) -> Iterator[str]:
    yield f"{c.comparable} of {c.comparable + len(c.left_out)} tasks can be compared"
    for reason, count in Counter(str(t.reason) for t in c.left_out).most_common():
        names = [t.task for t in c.left_out if t.reason == reason]
        yield f"  left out: {count} {reason}: {_some(names, most)}"


def _some(names: list[str], most: int | None) -> str:
    shown = names if most is None else names[:most]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


def metric_words(metric: Metric, alpha: float) -> str:
    if not metric.known or metric.base is None or metric.candidate is None or metric.delta is None:
        return f"{UNKNOWN} ({metric.reason})" if metric.reason else UNKNOWN
    words = f"{_level(metric, metric.base)} → {_level(metric, metric.candidate)}, Δ {_change(metric, metric.delta)}"
    if metric.low is None or metric.high is None:
        return f"{words}, no interval ({metric.reason})"
    level = f"{100 * (1 - 2 * alpha):.4g} %"
    words += f" ({level}: {_change(metric, metric.low)} to {_change(metric, metric.high)})"
    return words if metric.p_worse is None else f"{words}, p of no worse {metric.p_worse:.3g}"


def _level(metric: Metric, value: float) -> str:
    return f"{value:.1f} s" if metric.name == "seconds" else f"{value:.4g}"


def _change(metric: Metric, value: float) -> str:
    value += 0.0
    return f"{100 * value:+.1f} %" if metric.relative else f"{value:+.3f}"


def _changes(c: Comparison, most: int | None) -> Iterator[str]:
    t = c.transitions
    yield (
        f"pass→fail {t.pass_to_fail}, worse {t.worse}, fail→pass {t.fail_to_pass}, better {t.better}, "
        f"both pass {t.both_pass}, both fail {t.both_fail}, mixed {t.mixed}"
    )
    for title, wanted in (("worse", ("pass→fail", "worse")), ("better", ("fail→pass", "better"))):
        pairs = [p for p in c.pairs if p.transition in wanted]
        shown = pairs if most is None else pairs[:most]
        for pair in shown:
            yield f"  {title}: {pair_words(pair)}"
        if len(shown) < len(pairs):
            yield f"  and {len(pairs) - len(shown)} more that got {title}; --all lists them"


def pair_words(pair: Pair) -> str:
    return f"{pair.task}  {pair.transition}  {pair.base_marks} → {pair.candidate_marks}"


def _groups(c: Comparison) -> Iterator[str]:
    for g in c.groups:
        interval = "no interval" if g.low is None or g.high is None else f"{g.low:+.3f} to {g.high:+.3f}"
        yield f"tag {g.tag} ({g.tasks} tasks): {g.base:.3f} → {g.candidate:.3f}, Δ {g.delta:+.3f} ({interval})"


def _flaky(c: Comparison, most: int | None) -> Iterator[str]:
    shown = c.flaky if most is None else c.flaky[:most]
    for f in shown:
        yield (
            f"flaky in the {'baseline' if f.side == 'base' else 'candidate'}: {f.task} {f.passed}/{f.graded}: "
            f"{f.passing} passed, {f.failing} did not"
        )
    if len(shown) < len(c.flaky):
        yield f"and {len(c.flaky) - len(shown)} more flaky tasks; --all lists them"
