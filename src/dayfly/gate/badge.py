"""A verdict as a badge: one self-contained SVG."""

from __future__ import annotations

from dayfly.gate.verdict import Answer, GateVerdict

_COLOURS: dict[Answer, str] = {
    "pass": "#1a7f37",
    "fail": "#cf222e",
    "inconclusive": "#855800",
    "invalid": "#57606a",
}
"""With white text on them at a contrast of at least 4.5."""
_PX_PER_CHARACTER = 7
_LABEL = "gate"


def render_badge(verdict: GateVerdict) -> str:
    """`gate | pass`. Nothing in it comes from agents, tasks or policies, and it loads nothing."""
    answer = verdict.verdict
    left, right = _width(_LABEL), _width(answer)
    title = f"{_LABEL}: {answer}"
    half = f"M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" '
        f'viewBox="0 0 {left + right} 20" role="img" aria-label="{title}">\n'
        f"  <title>{title}</title>\n"
        f'  <rect width="{left + right}" height="20" rx="3" fill="#24292f"/>\n'
        f'  <path d="{half}" fill="{_COLOURS[answer]}"/>\n'
        '  <g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">\n'
        f"    {_text(_LABEL, left / 2)}\n"
        f"    {_text(answer, left + right / 2)}\n"
        "  </g>\n"
        "</svg>\n"
    )


def _width(word: str) -> int:
    return len(word) * _PX_PER_CHARACTER + 12


def _text(word: str, middle: float) -> str:
    # textLength keeps the word inside its box whatever font there is.
    return f'<text x="{middle:g}" y="14" textLength="{len(word) * _PX_PER_CHARACTER}">{word}</text>'
