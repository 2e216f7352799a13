"""Formulas of comparisons and gates: pure functions of numbers, each with its source. See docs/statistics.md."""

from dayfly.stats.multiple import holm
from dayfly.stats.paired import (
    Estimate,
    estimate_means,
    estimate_rates,
    estimate_ratio,
    interval_of_rates,
    sign_flip,
    standard_error,
)
from dayfly.stats.passk import pass_all_k, pass_at_k
from dayfly.stats.permutation import relabel
from dayfly.stats.power import pairs_needed, pairs_needed_exact, power_exact, smallest_drop
from dayfly.stats.proportions import (
    bonett_price,
    clopper_pearson,
    fisher_worse,
    mcnemar_exact,
    tango,
    tango_p,
    tango_statistic,
    upper_bound_of_never,
    wilson,
)
from dayfly.stats.sequential import can_still_reach, e_value, log_e_value

__all__ = [
    "Estimate",
    "bonett_price",
    "can_still_reach",
    "clopper_pearson",
    "e_value",
    "estimate_means",
    "estimate_rates",
    "estimate_ratio",
    "fisher_worse",
    "holm",
    "interval_of_rates",
    "log_e_value",
    "mcnemar_exact",
    "pairs_needed",
    "pairs_needed_exact",
    "pass_all_k",
    "pass_at_k",
    "power_exact",
    "relabel",
    "sign_flip",
    "smallest_drop",
    "standard_error",
    "tango",
    "tango_p",
    "tango_statistic",
    "upper_bound_of_never",
    "wilson",
]
