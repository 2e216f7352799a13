"""The parts of the page, in the order in which they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dayfly.compare.html_grid import Versions, version_key
from dayfly.compare.html_markup import (
    NBSP,
    UNKNOWN,
    Html,
    change,
    finite,
    in_points,
    interval,
    join,
    level,
    moment,
    p_value,
    percent,
    signed,
    table,
    tag,
)
from dayfly.compare.html_pictures import TONES, Axis, Bar, draw_intervals, draw_transitions
from dayfly.compare.model import Comparison, Group, Metric, SideFacts

MOST_FLAKY = 200
MOST_GROUPS = 100
_MOST_GROUPS_DRAWN = 30
_MOST_PROBLEMS = 20

_POINTS = Axis(lambda v: signed(v * 100, "g"), "worse", "better (points)", smallest=0.01)
_REWARD = Axis(lambda v: signed(v, "g"), "worse", "better (reward)", smallest=0.01)
_RELATIVE = Axis(lambda v: signed(v * 100, "g") + " %", "less, better", "more, worse", smallest=0.01, largest=3.0)

Named = tuple[str, Comparison]
"""A comparison and its letters."""


def draw_headline(letters: str, comparison: Comparison, versions: Versions) -> Html:
    """The score's difference in a sentence, and how much of everything it rests on."""
    score = comparison.metrics.get("score")
    tone = _tone(score, comparison.alpha) if score else ""
    base, candidate = (versions[version_key(f)] for f in (comparison.base, comparison.candidate))
    everything = comparison.comparable + len(comparison.left_out)
    return tag(
        "div",
        tag("p", _names(letters, base.facts.agent, candidate.facts.agent), class_="soft"),
        tag("p", tag("em", TONES[tone]), " ", _score_sentence(score), class_="big"),
        tag("p", _verdict(score, tone, comparison.alpha)),
        tag(
            "p",
            f"{comparison.comparable:,} of {everything:,} tasks compared. "
            f"Graded: {_coverage(base.letter, base.facts)}; {_coverage(candidate.letter, candidate.facts)}.",
        ),
        class_=f"headline {tone}".strip(),
    )


def _names(letters: str, base: str, candidate: str) -> str:
    return f"{letters}: {base} → {candidate}"


def _coverage(letter: str, facts: SideFacts) -> str:
    share = percent(facts.coverage) if facts.planned else "nothing was planned"
    return f"{letter} {facts.graded:,} of {facts.planned:,} attempts ({share})"


def _score_sentence(score: Metric | None) -> str:
    if score is None or not score.known:
        return f"Score: {UNKNOWN}{_because(score)}"
    return (
        f"Score {level('score', score.base)} → {level('score', score.candidate)}: "
        f"{change('score', False, score.delta)}"
    )


def _verdict(score: Metric | None, tone: str, alpha: float) -> str:
    if score is None or not score.known:
        return "Nothing can be said about a difference."
    said = {
        "worse": "The candidate is shown to be worse",
        "better": "The candidate is shown to be better",
        "": "No difference is shown, which does not show that there is none",
    }[tone]
    return (
        f"{said}: {_confidence(alpha)} interval {interval('score', False, score.low, score.high)}; "
        f"p {p_value(score.p_worse)} for worse, {p_value(score.p_better)} for better, one-sided."
    )


def _because(metric: Metric | None) -> str:
    return f" ({metric.reason})" if metric and metric.reason else ""


def _confidence(alpha: float) -> str:
    return f"{(1 - 2 * alpha) * 100:.4g}{NBSP}%"


def _tone(metric: Metric, alpha: float) -> str:
    """worse or better when the test shows it and the interval, where there is one, agrees; otherwise neither."""
    if not metric.known:
        return ""
    low, high = finite(metric.low), finite(metric.high)
    if not metric.higher_is_better:
        low, high = (None if end is None else -end for end in (high, low))
    if metric.p_worse is not None and metric.p_worse <= alpha and (high is None or high < 0):
        return "worse"
    if metric.p_better is not None and metric.p_better <= alpha and (low is None or low > 0):
        return "better"
    return ""


def draw_differences(named: Sequence[Named]) -> list[Html]:
    """A picture per kind of unit over all comparisons, and every figure in a table."""
    pictures = []
    for title, axis, wanted in (
        ("Difference of shares of passes, candidate − baseline", _POINTS, _is_share),
        ("Difference of mean reward, candidate − baseline", _REWARD, _is_absolute),
        ("Relative change of the mean, candidate ÷ baseline − 1", _RELATIVE, _is_relative),
    ):
        bars = [
            _bar(letters if len(named) > 1 else "", metric, comparison.alpha)
            for letters, comparison in named
            for metric in comparison.metrics.values()
            if wanted(metric)
        ]
        if bars:
            pictures.append(_figure(_with_confidence(title, named[0][1].alpha), bars, axis))
    return [*pictures, _key_of_intervals(), *(_metric_table(letters, c) for letters, c in named)]


def _with_confidence(title: str, alpha: float) -> str:
    return f"{title}, with {_confidence(alpha)} intervals"


def _figure(title: str, bars: list[Bar], axis: Axis) -> Html:
    return tag("figure", tag("figcaption", title), draw_intervals(title, bars, axis))


def _key_of_intervals() -> Html:
    return tag(
        "p",
        "▼ shown to be worse, ▲ shown to be better, ◆ neither. The solid vertical line is no difference; "
        "a dashed one is the margin that a policy lets through.",
        class_="soft",
    )


def _is_share(metric: Metric) -> bool:
    return not metric.relative and in_points(metric.name)


def _is_absolute(metric: Metric) -> bool:
    return not metric.relative and not in_points(metric.name)


def _is_relative(metric: Metric) -> bool:
    return metric.relative


def _bar(letters: str, metric: Metric, alpha: float) -> Bar:
    label = f"{letters} {metric.name}".strip()
    delta, low, high = finite(metric.delta), finite(metric.low), finite(metric.high)
    if not metric.known or delta is None:
        return Bar(label, None, None, None, UNKNOWN)
    margin = None
    if metric.margin is not None:
        margin = -metric.margin if metric.higher_is_better else metric.margin
    shown = change(metric.name, metric.relative, delta, unit=False)
    if low is not None and high is not None:
        ends = (change(metric.name, metric.relative, end, unit=False) for end in (low, high))
        shown += f" [{', '.join(ends)}]"
    else:
        shown += " [unknown]"
    return Bar(label, delta, low, high, shown, _tone(metric, alpha), margin)


def _metric_table(letters: str, comparison: Comparison) -> Html:
    head = ["metric", "tasks", "baseline", "candidate", "difference", "interval", "p worse", "p better"]
    with_margin = any(m.margin is not None for m in comparison.metrics.values())
    head += ["margin", "p beyond margin"] if with_margin else []
    rows = [
        [*_metric_row(m), *(_margin_cells(m) if with_margin else []), _method(m)]
        for m in comparison.metrics.values()
    ]
    caption = (
        f"{letters}: differences over the compared tasks, {_confidence(comparison.alpha)} intervals, one-sided p"
    )
    return table(caption, [*head, "method"], rows, class_="figures")


def _metric_row(metric: Metric) -> list[str]:
    if not metric.known:
        return [metric.name, tag("td", f"{UNKNOWN}{_because(metric)}", colspan=7, class_="soft")]
    name, relative = metric.name, metric.relative
    return [
        name,
        f"{metric.tasks:,}",
        level(name, metric.base),
        level(name, metric.candidate),
        change(name, relative, metric.delta),
        interval(name, relative, metric.low, metric.high),
        p_value(metric.p_worse),
        p_value(metric.p_better),
    ]


def _margin_cells(metric: Metric) -> list[str]:
    if metric.margin is None:
        return ["none", "none"]
    return [change(metric.name, metric.relative, metric.margin).lstrip("+"), p_value(metric.p_beyond_margin)]


def _method(metric: Metric) -> str:
    """How it was estimated, and why it has no interval, if it has none."""
    return "; ".join(filter(None, (metric.method, metric.reason))) if metric.known else ""


def draw_flow(comparison: Comparison) -> list[Html]:
    """The picture, and the counts."""
    t = comparison.transitions
    rows = [
        ["▼ passed → fails", f"{t.pass_to_fail:,}", "all attempts passed, now none does"],
        ["▽ otherwise worse", f"{t.worse - t.pass_to_fail:,}", "a smaller share of attempts passes"],
        ["▲ failed → passes", f"{t.fail_to_pass:,}", "no attempt passed, now all do"],
        ["△ otherwise better", f"{t.better - t.fail_to_pass:,}", "a larger share of attempts passes"],
        ["= both pass", f"{t.both_pass:,}", "all attempts of both versions"],
        ["= both fail", f"{t.both_fail:,}", "all attempts of both versions"],
        ["= mixed", f"{t.mixed:,}", "an equal share of attempts between none and all"],
    ]
    counts = table("Compared tasks by what became of them", ["transition", "tasks", "meaning"], rows)
    if not comparison.pairs:
        return [tag("p", "No task could be compared."), counts]
    title = (
        f"Of {comparison.comparable:,} compared tasks {t.pass_to_fail:,} went from passed to failed and "
        f"{t.fail_to_pass:,} from failed to passed; {t.worse:,} got worse and {t.better:,} better in all"
    )
    return [tag("figure", tag("figcaption", title + "."), draw_transitions(title, comparison)), counts]


def list_left_out(comparison: Comparison) -> list[Html]:
    """Counts by reason; the tasks themselves are in the grid."""
    counts = Counter(left.reason for left in comparison.left_out)
    if not counts:
        return [tag("p", "Every task was compared.")]
    rows = [[reason, f"{count:,}"] for reason, count in counts.most_common()]
    return [table("Tasks left out, by reason", ["reason", "tasks"], rows)]


def list_flaky(comparison: Comparison) -> list[Html]:
    """Tasks whose attempts disagree, with an attempt of each kind to look at."""
    flaky = comparison.flaky
    if not flaky:
        several = max(comparison.base.attempts, comparison.candidate.attempts) > 1
        return [tag("p", "No task is flaky." if several else "Unknown: with one attempt per task none can show.")]
    rows = [
        [f.task, _letter_of_side(f.side), f"{f.passed}/{f.graded}", tag("code", f.passing), tag("code", f.failing)]
        for f in flaky[:MOST_FLAKY]
    ]
    head = ["task", "version", "passed", "an attempt that passed", "one that did not"]
    note = _not_shown(len(flaky) - MOST_FLAKY)
    return [table(f"Tasks whose attempts by one version disagree ({len(flaky):,})", head, rows), *note]


def _letter_of_side(side: str) -> str:
    return "baseline" if side == "base" else side


def _not_shown(count: int) -> list[Html]:
    return [tag("p", f"{count:,} more are not shown: there are too many.")] if count > 0 else []


def draw_groups(comparison: Comparison) -> list[Html]:
    """A picture and a table of the score by tag."""
    groups = comparison.groups
    if not groups:
        return [tag("p", "The compared tasks carry no tags.")]
    title = _with_confidence("Difference of the score by tag, candidate − baseline", comparison.alpha)
    bars = [_group_bar(group) for group in groups[:_MOST_GROUPS_DRAWN]]
    rows = [
        [
            g.tag,
            f"{g.tasks:,}",
            percent(g.base),
            percent(g.candidate),
            change("score", False, g.delta),
            interval("score", False, g.low, g.high),
        ]
        for g in groups[:MOST_GROUPS]
    ]
    return [
        tag(
            "p",
            "Each group is looked at by itself: the intervals are not widened for how many there are.",
            class_="soft",
        ),
        _figure(title, bars, _POINTS),
        table("Score by tag", ["tag", "tasks", "baseline", "candidate", "difference", "interval"], rows),
        *_not_shown(len(groups) - MOST_GROUPS),
    ]


def _group_bar(group: Group) -> Bar:
    metric = Metric(
        name="score",
        relative=False,
        higher_is_better=True,
        known=True,
        delta=group.delta,
        low=group.low,
        high=group.high,
    )
    bar = _bar("", metric, 0)
    return Bar(f"{group.tag} ({group.tasks:,})", bar.value, bar.low, bar.high, bar.shown)


def list_varied(comparison: Comparison) -> list[Html]:
    """Aspects that are the same as a list, those that differ as a table."""
    same = (
        tag("ul", *(tag("li", aspect) for aspect in comparison.same), class_="chips")
        if comparison.same
        else "nothing"
    )
    made = [tag("p", "The same in both:"), same if isinstance(same, Html) else tag("p", same)]
    rows = [
        [
            d.aspect,
            d.base,
            d.candidate,
            f"{d.tasks:,}" if d.tasks is not None else "whole side",
            "meant" if d.aspect in comparison.allowed else "",
        ]
        for d in comparison.differences
    ]
    if not rows:
        return [*made, tag("p", "No difference was found.")]
    return [*made, table("What differs", ["aspect", "baseline", "candidate", "tasks", "declared"], rows)]


def list_versions(versions: Versions) -> Html:
    """Which results each side is, a column per version."""
    facts = [v.facts for v in versions.values()]
    rows = [
        ["job", *(tag("code", f.job_id) for f in facts)],
        ["name of the job", *(f.job_name for f in facts)],
        ["agent", *(f.agent for f in facts)],
        ["digest of the agent", *(tag("code", f.agent_digest or UNKNOWN) for f in facts)],
        ["digest of the results", *(tag("code", f.results_digest or UNKNOWN) for f in facts)],
        ["score over all its graded tasks", *(percent(f.score) for f in facts)],
        ["coverage", *(_coverage("", f).strip() for f in facts)],
        ["lost to faults", *(f"{f.faults:,}" for f in facts)],
        ["tasks × attempts", *(f"{f.tasks:,} × {f.attempts:,}" for f in facts)],
        ["isolation", *(", ".join(f.isolation) or UNKNOWN for f in facts)],
        ["verifier class", *(", ".join(f.verifier_classes) or UNKNOWN for f in facts)],
        ["started", *(moment(f.started_unix) for f in facts)],
        ["read from", *(_source(f) for f in facts)],
        ["records with problems", *(_problems(f) for f in facts)],
    ]
    return table("The versions compared", ["", *(v.letter for v in versions.values())], rows)


def _source(facts: SideFacts) -> str:
    return "; ".join(["the files of the job" if facts.source == "files" else "the index", *facts.remarks])


def _problems(facts: SideFacts) -> Html:
    if not facts.problems:
        return tag("span", "none")
    shown = [tag("li", p) for p in facts.problems[:_MOST_PROBLEMS]]
    rest = len(facts.problems) - _MOST_PROBLEMS
    return tag("ul", *shown, *([tag("li", f"and {rest:,} more")] if rest > 0 else []))


def explain(alpha: float) -> Html:
    said = [
        "Compared are only tasks that are the same on both sides, judged by the same verifier and graded on both. "
        "Each counts once, however many attempts it has.",
        f"Each end of an interval of {_confidence(alpha)} lies beyond the true difference in about "
        f"{alpha * 100:.4g} % of such comparisons, if the tasks are taken as drawn at random.",
        "p worse is how often a difference at least as bad would come about if the versions were equal; p better "
        "likewise. Small means shown; large shows nothing.",
        "An attempt that ran out of time or broke the agent is graded. One that was lost to infrastructure, "
        "provider or verifier is not: it is hatched, and counts neither as passed nor as failed.",
        "Unknown means that the results do not carry it. It is never 0.",
    ]
    return join([tag("ul", *(tag("li", s) for s in said))])
