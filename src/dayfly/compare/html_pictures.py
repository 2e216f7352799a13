"""The pictures: intervals and transitions, as SVG.

Positions along a picture are shares of its width and heights are pixels, so that text keeps its size on a
narrow screen. Shapes and letters say whatever colours say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dayfly.compare.html_markup import Html, tag
from dayfly.compare.model import Comparison, Pair
from dayfly.text import visible

HATCH = "hatch"
TONES = {"worse": "▼", "better": "▲", "": "◆"}
_SHAPES = {"worse": "M-6-5H6L0 6z", "better": "M-6 5H6L0-6z", "": "M0-6L6 0 0 6-6 0z"}
_ROW, _AXIS = 46, 44
_LEFT, _WIDTH = 4.0, 92.0


@dataclass(frozen=True)
class Bar:
    """One line of a picture of intervals; all figures in the unit of its axis, None for unknown."""

    label: str
    value: float | None
    low: float | None
    high: float | None
    shown: str
    """The figures as text, or why there are none."""
    tone: str = ""
    """worse, better or neither."""
    margin: float | None = None
    """Where the margin is; a worsening is negative on an axis where right is better."""


@dataclass(frozen=True)
class Axis:
    """From where to where, and what an end of it means."""

    format: Callable[[float], str]
    left: str
    right: str
    smallest: float
    """At least so much is shown on either side of zero."""
    largest: float = math.inf
    """What lies further out is an arrow at the edge."""


def draw_intervals(title: str, bars: Sequence[Bar], axis: Axis) -> Html:
    """A line from low to high per bar, with the line of zero and the margins."""
    low, high = _limits(bars, axis)
    tops = [_ROW * row for row in range(len(bars))]
    known = any(bar.value is not None for bar in bars)

    def at(value: float) -> float:
        return _LEFT + _WIDTH * (min(max(value, low), high) - low) / (high - low)

    inside = [tag("title", title)]
    if known:
        inside += _draw_axis(axis, _ticks(low, high), at, tops)
    for top, bar in zip(tops, bars, strict=True):
        inside += _draw_bar(bar, top, at, low, high)
    height = _ROW * len(bars) + (_AXIS if known else 0)
    return tag("svg", *inside, role="img", aria_label=title, height=height, class_="intervals")


def _draw_axis(
    axis: Axis, ticks: Sequence[float], at: Callable[[float], float], tops: Sequence[float]
) -> list[Html]:
    drawn = []
    bottom = tops[-1] + _ROW
    for value in ticks:
        name = "zero" if value == 0 else "rule"
        # Beside the bars only, so that no line goes through a text.
        drawn += [_line(at(value), at(value), top + 20, top + 42, name) for top in tops]
        drawn.append(_text(axis.format(value), at(value), bottom + 19, "soft", "middle"))
    drawn.append(_text(f"◀ {axis.left}", 0, bottom + 40, "soft", "start"))
    drawn.append(_text(f"{axis.right} ▶", 100, bottom + 40, "soft", "end"))
    return drawn


def _draw_bar(bar: Bar, top: float, at: Callable[[float], float], low: float, high: float) -> list[Html]:
    y = top + 31
    drawn = [
        _text(_shortened(bar.label), 0, top + 16, None, "start"),
        _text(bar.shown, 100, top + 16, None if bar.value is not None else "soft", "end"),
    ]
    if bar.value is None:
        return drawn
    if bar.margin is not None and low <= bar.margin <= high:
        drawn.append(_line(at(bar.margin), at(bar.margin), y - 9, y + 10, "margin"))
    if bar.low is not None and bar.high is not None:
        drawn.append(_line(at(bar.low), at(bar.high), y, y, f"bar {bar.tone}".strip()))
        for end, outside in ((bar.low, bar.low < low), (bar.high, bar.high > high)):
            sign = 1 if end == bar.high else -1
            shape = f"M{-6 * sign}-6L0 0L{-6 * sign} 6" if outside else "M0-5V5"
            drawn.append(_shape(shape, at(end), y, f"bar {bar.tone}".strip(), fill="none"))
    drawn.append(_shape(_SHAPES[bar.tone], at(bar.value), y, f"point {bar.tone}".strip()))
    return drawn


def _limits(bars: Sequence[Bar], axis: Axis) -> tuple[float, float]:
    values = [v for b in bars for v in (b.value, b.low, b.high, b.margin) if v is not None and math.isfinite(v)]
    low = max(min([*values, -axis.smallest]), -axis.largest)
    high = min(max([*values, axis.smallest]), axis.largest)
    spare = (high - low) * 0.03
    return low - spare, high + spare


def _ticks(low: float, high: float) -> list[float]:
    """At most six round values, zero among them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


State = str
_STATES: tuple[State, ...] = ("passed", "mixed", "failed")


def draw_transitions(title: str, comparison: Comparison) -> Html:
    """Flows of tasks from what they were in the baseline to what they are in the candidate."""
    flows = Counter(_flow(pair) for pair in comparison.pairs)
    out = len(comparison.left_out)
    picture = _Flows(flows, out)
    inside = [tag("title", title)]
    inside.append(
        tag(
            "svg",
            *picture.ribbons(),
            viewBox=f"0 0 100 {picture.height:g}",
            preserveAspectRatio="none",
            x="24%",
            y=22,
            width="52%",
            height=picture.height,
        )
    )
    if out:
        inside.append(picture.left_out())
    inside += picture.labels()
    return tag("svg", *inside, role="img", aria_label=title, height=picture.height + 30, class_="flow")


def _flow(pair: Pair) -> tuple[State, State, str]:
    tone = "worse" if pair.delta < 0 else "better" if pair.delta > 0 else ""
    return _state(pair.base), _state(pair.candidate), tone


def _state(share: float) -> State:
    return "passed" if share == 1 else "failed" if share == 0 else "mixed"


class _Flows:
    """Where nodes and ribbons of one picture lie; heights in pixels."""

    _SPACE, _GAP, _THINNEST = 200.0, 22.0, 2.0

    def __init__(self, flows: Counter[tuple[State, State, str]], left_out: int) -> None:
        self.flows = {key: flows[key] for key in sorted(flows, key=_flow_order)}
        self.out = left_out
        self.scale = self._SPACE / max(flows.total() + left_out, 1)
        self.tops = ({}, {})  # type: tuple[dict[State, float], dict[State, float]]
        self.counts = [Counter[State](), Counter[State]()]
        for (*ends, _), count in self.flows.items():
            for side, state in enumerate(ends):
                self.counts[side][state] += count
        self.bottom = max(self._stack(0), self._stack(1))
        self.height = self.bottom + (self._thick(left_out) + 4 if left_out else 0)

    def _thick(self, count: int) -> float:
        return max(count * self.scale, self._THINNEST)

    def _stack(self, side: int) -> float:
        y = 0.0
        for state in _STATES:
            if self.counts[side][state]:
                self.tops[side][state] = y
                y += self._node(side, state) + self._GAP
        return y

    def _node(self, side: int, state: State) -> float:
        return sum(self._thick(n) for key, n in self.flows.items() if key[side] == state)

    def _paths(self) -> list[tuple[str, int, float, float, float]]:
        """Tone, count, upper left end, upper right end, thickness."""
        next_y = ({**self.tops[0]}, {**self.tops[1]})
        found = []
        for (start, end, tone), count in self.flows.items():
            thick = self._thick(count)
            found.append((tone, count, next_y[0][start], next_y[1][end], thick))
            next_y[0][start] += thick
            next_y[1][end] += thick
        return found

    def ribbons(self) -> list[Html]:
        drawn = [
            tag("path", d=_ribbon(left, right, thick), class_=f"ribbon {tone}".strip())
            for tone, _, left, right, thick in sorted(self._paths(), key=lambda p: p[0] != "")
        ]
        for side, x in ((0, 0.0), (1, 98.6)):
            for state, top in self.tops[side].items():
                drawn.append(tag("rect", x=x, y=top, width=1.4, height=self._node(side, state), class_="node"))
        return drawn

    def left_out(self) -> Html:
        # Not among the ribbons, which are stretched to the width of the page: a hatch must not be.
        y, height = 22 + self.bottom, self._thick(self.out)
        return tag("rect", x="24%", y=y, width="52%", height=height, fill=f"url(#{HATCH})", class_="hatch-edge")

    def labels(self) -> list[Html]:
        made = [
            _text("baseline", 23, 12, "soft", "end"),
            _text("candidate", 77, 12, "soft", "start"),
        ]
        for side, x, anchor in ((0, 23.0, "end"), (1, 77.0, "start")):
            for state, top in self.tops[side].items():
                y = 22 + top + self._node(side, state) / 2 + 5
                made.append(_text(f"{self.counts[side][state]:,} {state}", x, y, None, anchor))
        if self.out:
            made.append(
                _text(f"{self.out:,} left out", 77, 22 + self.bottom + self._thick(self.out) / 2 + 5, None, "start")
            )
        for tone, count, left, right, thick in self._paths():
            if tone and thick >= 8:
                # Where ribbons have not crossed yet: at a third of the way.
                y = 22 + left + (right - left) * 0.216 + thick / 2 + 5
                made.append(_text(f"{TONES[tone]} {count:,}", 24 + 52 * 0.33, y, "count", "middle"))
        return made


def _flow_order(key: tuple[State, State, str]) -> tuple[int, int, int]:
    return _STATES.index(key[0]), _STATES.index(key[1]), ("better", "", "worse").index(key[2])


def _ribbon(left: float, right: float, thick: float) -> str:
    return (
        f"M0 {left:.2f}C50 {left:.2f} 50 {right:.2f} 100 {right:.2f}"
        f"V{right + thick:.2f}C50 {right + thick:.2f} 50 {left + thick:.2f} 0 {left + thick:.2f}z"
    )


def define_hatch() -> Html:
    """What the pictures of a page are hatched with; to be put into it once."""
    line = tag("path", d="M-2 8L8-2M2 12L12 2", class_="hatch-line")
    pattern = tag("pattern", line, id_=HATCH, width=8, height=8, patternUnits="userSpaceOnUse")
    return tag("svg", tag("defs", pattern), width=0, height=0, aria_hidden="true", class_="defs")


def _line(x1: float, x2: float, y1: float, y2: float, class_: str) -> Html:
    return tag("line", x1=f"{x1:.2f}%", x2=f"{x2:.2f}%", y1=y1, y2=y2, class_=class_)


def _text(shown: str, x: float, y: float, class_: str | None, anchor: str) -> Html:
    return tag("text", shown, x=f"{x:.2f}%", y=f"{y:.1f}", class_=class_, text_anchor=anchor)


def _shape(path: str, x: float, y: float, class_: str, fill: str | None = None) -> Html:
    return tag("svg", tag("path", d=path, class_=class_, fill=fill), x=f"{x:.2f}%", y=y, width=1, height=1)


def _shortened(label: str, longest: int = 28) -> str:
    label = visible(label)
    return label if len(label) <= longest else label[: longest - 1] + "…"
