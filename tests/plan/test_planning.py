"""What a comparison can show before it is run, against second computations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.stats import binom
from statsmodels.stats.power import TTestPower

from dayfly.gate.planning import (
    ASSUMED,
    POWER,
    RESERVE,
    Design,
    Discordance,
    Needed,
    discordance,
    figures,
    prospect,
    prospect_of_gate,
    smallest_drop,
)
from dayfly.gate.policy import MetricRule, Policy
from dayfly.results.side import Side, TaskResults
from dayfly.stats import e_value, estimate_rates, pairs_needed_exact, power_exact

TWENTY = Discordance(share=0.2, source="given")


def design(attempts: int = 1, margin: float = 0.0, alpha: float = 0.05, noise: Discordance = TWENTY) -> Design:
    return Design(attempts, noise, alpha, margin)


def by_all_cases(n: int, worse: float, better: float, holds) -> float:
    """Through every number of regressions and improvements, with the estimate that the gate is given."""
    total = 0.0
    for b in range(n + 1):
        for c in range(n - b + 1):
            chance = binom.pmf(b, n, worse) * binom.pmf(c, n - b, better / (1 - worse))
            trials = [(1, 1, 1, 0)] * b + [(1, 0, 1, 1)] * c + [(1, 1, 1, 1)] * (n - b - c)
            total += chance * holds(trials)
    return total


def gate_fails(trials: list[tuple[int, int, int, int]], margin: float) -> bool:
    estimate = estimate_rates(trials, alpha=0.05, margin=margin)
    assert estimate.p_beyond_margin is not None
    return estimate.p_beyond_margin <= 0.05 and estimate.high < -margin


def graded(needed: Needed) -> int:
    """The tasks asked for, without the reserve."""
    assert needed.tasks is not None
    return math.floor(needed.tasks * (1 - RESERVE) + 1e-9)


@pytest.mark.parametrize(("drop", "tasks"), [(0.03, 1438), (0.05, 528), (0.1, 134)])
def test_published_numbers_of_pairs_are_asked_for(drop, tasks):
    asked = graded(figures(design(), 100, drop).to_find_drop)
    assert asked == pytest.approx(tasks, rel=0.004)  # the exact power goes up in a saw's teeth
    assert asked == pytest.approx(pairs_needed_exact(drop, 0.2), rel=0.004)


@pytest.mark.parametrize("tasks", [20, 77, 134, 500])
def test_power_with_one_attempt_is_that_of_the_exact_test(tasks):
    assert design().power(tasks, 0.1) == pytest.approx(power_exact(tasks, 0.1, 0.2, 0.05), abs=1e-6)


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("drop", [0.15, 0.3])
def test_power_with_a_margin_is_that_of_all_cases(margin, drop):
    noise = Discordance(share=0.35, source="given")
    expected = by_all_cases(24, (0.35 + drop) / 2, (0.35 - drop) / 2, lambda t: gate_fails(t, margin))
    assert design(margin=margin, noise=noise).power(24, drop) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("margin", [0.05, 0.15, 0.3])
def test_passing_is_that_of_all_cases(margin):
    expected = by_all_cases(22, 0.1, 0.1, lambda t: estimate_rates(t, alpha=0.05).low >= -margin)
    assert design(margin=margin).passes(22) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("tasks", [10, 78, 300])
@pytest.mark.parametrize("margin", [0.0, 0.02])
def test_power_with_several_attempts_is_that_of_the_t_test(tasks, margin):
    variance = 0.1 / 3 + 0.1 * 0.9
    expected = TTestPower().power((0.1 - margin) / variance**0.5, tasks, 0.05, alternative="larger")
    assert design(3, margin).power(tasks, 0.1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("attempts", "margin"), [(1, 0.0), (3, 0.0), (1, 0.05), (3, 0.05)])
def test_what_is_asked_for_is_enough_and_hardly_more(attempts, margin):
    made = design(attempts, margin)
    wanted = figures(made, 50, 0.15)
    tasks = graded(wanted.to_find_drop)
    assert made.power(tasks, 0.15) >= POWER > made.power(tasks - 5, 0.15)
    if wanted.to_pass is not None:
        tasks = graded(wanted.to_pass)
        assert made.passes(tasks) >= POWER > made.passes(int(tasks * 0.9) - 2)


def test_the_smallest_drop_is_found_and_no_smaller_one():
    made = design()
    least = smallest_drop(made, 134)
    assert least == pytest.approx(0.1, abs=0.002)
    assert least is not None and made.power(134, least) >= POWER > made.power(134, least - 0.003)
    assert smallest_drop(made, 3) is None


@pytest.mark.parametrize(("alpha", "least"), [(0.05, 5), (0.01, 7)])
def test_least_evidence_that_blocks(alpha, least):
    assert figures(design(alpha=alpha), 50, 0.1).least_regressions == least
    assert figures(design(alpha=alpha), least - 1, 0.1).least_regressions is None


def test_least_evidence_to_stop_early():
    seen = prospect(100, 1, TWENTY, margin=0.0, alpha_share=0.5)
    least = seen.least_regressions_early
    assert least is not None and e_value(least, 0) >= 40 > e_value(least - 1, 0)
    assert prospect(5, 1, TWENTY, margin=0.0, alpha_share=0.5).least_regressions_early is None


def test_more_attempts_average_flakes_out_but_not_a_drop():
    """Where all that is discordant is the drop, more attempts show nothing more."""
    flaky = figures(design(1, noise=Discordance(share=0.5, source="given")), 60, 0.15)
    assert flaky.to_find_drop.attempts is not None and flaky.to_find_drop.attempts > 1
    steady = figures(design(1, noise=Discordance(share=0.01, source="given")), 20, 0.1)
    assert steady.to_find_drop.attempts is None and steady.to_find_drop.tasks is not None


# --- noise ---------------------------------------------------------------------------------------


def task(marks: str) -> TaskResults:
    return TaskResults(task=marks, task_digest="sha256:t", marks=marks)


def test_discordance_is_how_often_two_attempts_of_the_baseline_disagree():
    found = discordance([task("PPP"), task("PPF"), task("FF"), task("PF"), task("P"), task("Pi")])
    assert (found.source, found.tasks) == ("baseline", 4)
    assert found.share == pytest.approx((0 + 2 / 3 + 0 + 1) / 4)


def test_none_seen_is_not_none_there():
    assert discordance([task("PP")] * 50).share == pytest.approx(0.01)


@pytest.mark.parametrize("tasks", [[], [task("P"), task("F")], [task("i.")]])
def test_without_repeated_attempts_it_is_assumed(tasks):
    assert discordance(tasks) == Discordance(share=ASSUMED, source="assumed")


def test_what_was_said_holds():
    assert discordance([task("PF")] * 9, 0.3) == Discordance(share=0.3, source="given")


def test_a_drop_comes_on_top_of_what_the_baseline_shows():
    assert Discordance(share=0.1, source="baseline", tasks=9).at(0.05) == pytest.approx(0.15)
    assert TWENTY.at(0.05) == 0.2 and TWENTY.at(0.3) == 0.3


# --- the answer ----------------------------------------------------------------------------------


def test_looking_early_leaves_less_for_the_final_test():
    seen = prospect(134, 1, TWENTY, alpha=0.05, margin=0.0, alpha_share=0.4)
    assert seen.watched is not None and seen.watched.alpha == pytest.approx(0.03)
    assert seen.watched.power < seen.at_end.power
    assert prospect(134, 1, TWENTY).watched is None


def test_a_margin_that_cannot_be_shown_is_warned_about():
    warnings = prospect(50, 1, TWENTY, margin=0.02).warnings
    assert any("2.0 points" in w and "identical candidate passes" in w for w in warnings)
    assert prospect(2000, 1, TWENTY, margin=0.1).warnings == ()
    assert any("too few" in w for w in prospect(3, 1, TWENTY).warnings)


def test_the_default_drop_lies_beyond_the_margin():
    assert prospect(50, 1, TWENTY, margin=0.02).drop == 0.1
    assert prospect(50, 1, TWENTY, margin=0.2).drop == pytest.approx(0.4)
    assert prospect(50, 1, TWENTY, margin=0.2, drop=0.3).drop == 0.3


@pytest.mark.parametrize("tasks", [1, 2, 7, 100_000])
@pytest.mark.parametrize("attempts", [1, 3, 1000])
@pytest.mark.parametrize("share", [0.001, 1.0])
def test_every_figure_is_a_number_at_any_size(tasks, attempts, share):
    seen = prospect(tasks, attempts, Discordance(share=share, source="given"), margin=0.05, alpha_share=0.5)
    for figure in (seen.at_end, seen.watched):
        assert figure is not None
        assert 0 <= figure.power <= 1 and 0 <= figure.identical_passes <= 1


def test_a_gates_prospect_counts_what_pairs():
    tasks = {f"t{i}": task("PF") for i in range(10)}
    fields: dict[str, Any] = {"job_name": "j", "agent_digest": "", "agent_kind": "command", "agent_options": {}}
    base = Side(job_id="b", agent="a", attempts=2, tasks=tasks, **fields)
    policy = Policy(metrics={"score": MetricRule(margin=0.1)})
    seen = prospect_of_gate(policy, base, ["t1", "t2", "t3"], attempts=5)
    assert (seen.tasks, seen.attempts, seen.margin) == (3, 2, 0.1)
    assert seen.discordance.source == "baseline" and seen.watched is not None
