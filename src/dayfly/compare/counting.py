"""What a row of marks says, worked out once per distinct row."""

from __future__ import annotations

from functools import lru_cache

from dayfly.results.side import FAILS, PASSES


@lru_cache(maxsize=1 << 16)
def count(marks: str) -> tuple[int, int]:
    """(graded, passed). Cached, since of many tasks most have the same few rows."""
    passed = sum(map(marks.count, PASSES))
    return passed + sum(map(marks.count, FAILS)), passed


@lru_cache(maxsize=1 << 16)
def first_attempt(marks: str, wanted: str) -> int | None:
    """The number, from 1, of the first attempt with one of the marks in `wanted`; None when there is none."""
    return next((number for number, mark in enumerate(marks, 1) if mark in wanted), None)
