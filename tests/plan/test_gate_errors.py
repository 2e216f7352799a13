"""How often the gate is wrong: the simulation of `benchmarks/gate_errors.py`, with fewer pairs of large jobs.

Its numbers are drawn from fixed seeds, so shares are the same in every run, and are compared with what is stated as
they are. The whole table, 1,000 pairs everywhere, is in SPECIFICATION.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # child processes import it by its name
    import gate_errors

    yield gate_errors
    sys.modules.pop("gate_errors", None)


def test_an_identical_agent_is_failed_in_at_most_the_stated_share(simulation):
    cells = [
        simulation.Cell(tasks, attempts, "margin 0", watched, pairs)
        for tasks, pairs in ((20, 1000), (100, 1000), (500, 120))
        for attempts in simulation.ATTEMPTS
        for watched in (False, True)
    ]
    for result in simulation.run(cells):
        assert sum(result.answers.values()) == result.cell.pairs
        assert result.failed <= simulation.ALPHA, result
        assert "invalid" not in result.answers, result


def test_a_drop_of_ten_points_is_found_with_the_tasks_that_the_plan_asks_for(simulation):
    cells = [
        simulation.Cell(
            simulation.planned_tasks(simulation.POLICIES[policy], attempts, watched),
            attempts,
            policy,
            watched,
            250,
            "broken",
        )
        for policy in ("margin 0", "margin 2")
        for attempts in simulation.ATTEMPTS
        for watched in (False, True)
    ]
    for result in simulation.run(cells):
        assert result.failed >= simulation.POWER, result
        assert ("fail early" in result.answers) == result.cell.watched, result
