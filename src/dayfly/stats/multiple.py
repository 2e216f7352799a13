"""Several tests at once."""

from __future__ import annotations

from collections.abc import Mapping


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values (Holm 1979): with each compared to α, any false rejection has a chance ≤ α."""
    adjusted, highest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p) - rank) * value))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p}
