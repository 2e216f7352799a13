"""Two agent versions side by side: which tasks can be compared, and what changed."""

from dayfly.compare.comparison import compare_sides, side_facts

__all__ = ["compare_sides", "side_facts"]
