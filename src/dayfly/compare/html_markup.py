"""Markup that cannot be broken out of, and figures in words. None and what is not finite is "unknown"."""

from __future__ import annotations

import datetime
import html
import math

from dayfly.text import visible

UNKNOWN = "unknown"
NBSP = "\u00a0"
"""A space at which no line is broken: between a figure and its unit."""
_LONGEST = 300


class Html(str):
    """Markup. Any other string is text, and is escaped when it becomes part of markup."""

    __slots__ = ()


def text(value: str) -> Html:
    """Text as markup, on one line; very long text is cut and says so."""
    shown = visible(value)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}… ({len(shown) - _LONGEST:,} more characters)"
    return Html(html.escape(shown))


def join(parts: list[Html] | list[str], between: str = "") -> Html:
    return Html(text(between).join(p if isinstance(p, Html) else text(p) for p in parts))


def tag(name: str, *inside: str, **attributes: str | float | None) -> Html:
    """An element. `class_` is written as class, `text_anchor` as text-anchor; an attribute of None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value if isinstance(value, str) else f"{value:g}")}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(list(inside))}</{name}>")


def table(caption: str, head: list[str], rows: list[list[str]], class_: str | None = None) -> Html:
    """A table whose first column names its rows."""
    columns = tag("tr", *(tag("th", h, scope="col") for h in head))
    body = [tag("tr", tag("th", first, scope="row"), *(cell(c) for c in rest)) for first, *rest in rows]
    made = tag("table", tag("caption", caption), tag("thead", columns), tag("tbody", *body), class_=class_)
    # It scrolls by itself on a narrow screen, so it must be reachable by keyboard.
    return tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def cell(inside: str) -> Html:
    return Html(inside) if isinstance(inside, Html) and inside.startswith("<td") else tag("td", inside)


def section(title: str, *inside: str, id_: str) -> Html:
    return tag("section", tag("h2", title), *inside, id_=id_)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def percent(value: float | None) -> str:
    known = finite(value)
    return UNKNOWN if known is None else f"{known * 100:.1f}{NBSP}%"


def signed(value: float, form: str) -> str:
    """With its sign, a real minus, and no sign for what is shown as zero."""
    shown = format(value, "+" + form)
    return shown.replace("-", "−") if any(c in "123456789" for c in shown) else shown.lstrip("+-")


def p_value(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return "< 0.0001" if value < 0.0001 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def moment(unix: float) -> str:
    """UTC, to the minute; 0 is not recorded."""
    try:
        when = datetime.datetime.fromtimestamp(unix, datetime.UTC) if unix > 0 else None
    except (ValueError, OverflowError, OSError):
        when = None
    return f"{when:%Y-%m-%d %H:%M} UTC" if when else UNKNOWN


def level(name: str, value: float | None) -> str:
    """A metric's value on one side, in its unit."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if name == "seconds":
        return f"{value:,.1f}{NBSP}s"
    if name == "tokens":
        return f"{value:,.0f}"
    if name == "cost_usd":
        return f"${value:,.4f}"
    return percent(value) if in_points(name) else f"{value:.3f}"


def in_points(name: str) -> bool:
    """Whether a metric is a share, so that differences of it are percentage points."""
    return name == "score" or name.startswith(("pass@", "pass^"))


def change(name: str, relative: bool, value: float | None, unit: bool = True) -> str:
    """A difference, or a bound of one, in its unit."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if relative:
        return signed(value * 100, ".1f") + (f"{NBSP}%" if unit else "")
    if in_points(name):
        return signed(value * 100, ".1f") + (f"{NBSP}points" if unit else "")
    return signed(value, ".3f")


def interval(name: str, relative: bool, low: float | None, high: float | None) -> str:
    if finite(low) is None or finite(high) is None:
        return UNKNOWN
    return f"{change(name, relative, low, unit=False)} to {change(name, relative, high)}"
