"""Formulas of comparisons and gates: pure functions of numbers, each with its source."""
