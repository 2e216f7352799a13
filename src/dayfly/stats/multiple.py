"""Several tests at once."""

from __future__ import annotations

from collections.abc import Mapping


def holm(p: Mapping[str, float], of: int | None = None) -> dict[str, float]:
    """Holm's adjusted p values (Holm 1979): with each compared to α, any false rejection has a chance ≤ α.

    `of`: so many tests, where those that are not in `p` have a p of 1.
    """
    tests = len(p) if of is None else max(of, len(p))
    adjusted, highest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (tests - rank) * value))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p}
