"""The comparison as Markdown, in which no name of a task can mean anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dayfly.compare.model import Comparison
from dayfly.compare.text import UNKNOWN, render_text
from dayfly.text import visible


def render_markdown(comparisons: Sequence[Comparison], most: int | None) -> str:
    """For each a table of metrics, and what the terminal would say as a block that nothing can end.

    `most`: of each list only so many entries; None: all.
    """
    total = len(comparisons)
    titles = [f"Comparison {n} of {total}" if total > 1 else "Comparison" for n in range(1, total + 1)]
    return "\n".join(line for title, c in zip(titles, comparisons, strict=True) for line in _one(title, c, most))


def _one(title: str, c: Comparison, most: int | None) -> Iterable[str]:
    yield f"## {title}"
    yield ""
    yield "| metric | baseline | candidate | Δ | low | high |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for m in c.metrics.values():
        cells = (m.base, m.candidate, m.delta, m.low, m.high)
        shown = [UNKNOWN if v is None or not m.known else f"{v:.4g}" for v in cells]
        yield f"| {m.name} | {' | '.join(shown)} |"
    yield ""
    # Indented code has no fence that a name could close; a line break in a name is made visible.
    yield from ("    " + visible(line) for line in render_text(c, most=most))
    yield ""
