"""A policy applied to results: pass, fail, inconclusive or invalid."""
