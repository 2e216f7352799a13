"""Figures in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float) -> str:
    """0.954 → `95.4 %`."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(items: Sequence[str], most: int, between: str = ", ") -> str:
    """The first few, and how many more there are."""
    more = len(items) - most
    return between.join(items[:most]) + (f"{between}and {more} more" if more > 0 else "")
