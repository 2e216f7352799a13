"""Every demo task: its solution passes in each class it supports, doing nothing fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Bench

DEMO = Path(__file__).parents[2] / "examples" / "demo"
ALL = ("shared", "rebooted", "separate")
CLASSES = {
    "csv-to-json": ALL,
    "find-file": ALL,
    "fix-config": ALL,
    "fix-failing-test": ALL,
    "log-analysis": ALL,
    "merge-patch": ALL,
    "migrate-sqlite": ALL,
    "parallel-checksums": ALL,
    "query-sqlite": ALL,
    "repair-git-history": ALL,
    "serve-sums": ("shared",),
    "write-shell-tool": ALL,
}
PAIRS = [(task, name) for task, names in CLASSES.items() for name in names]


def need_cpus(task: str) -> None:
    if task == "parallel-checksums" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this task needs 2 CPUs")


@pytest.mark.parametrize(("task", "verifier_class"), PAIRS)
def test_the_solution_passes(bench: Bench, task: str, verifier_class: str) -> None:
    need_cpus(task)
    reward, output = bench.rollout(task, "/solution/solve.sh", verifier_class)
    assert reward == 1, output


@pytest.mark.parametrize("task", CLASSES)
def test_doing_nothing_fails(bench: Bench, task: str) -> None:
    need_cpus(task)
    reward, output = bench.rollout(task, "true")
    assert reward == 0, output


SCRIPTED = {
    "csv-to-json": 1,
    "find-file": 1,
    "fix-config": 1,
    "fix-failing-test": 1,
    "log-analysis": 0.6667,
    "merge-patch": 0,
    "migrate-sqlite": 0.3333,
    "parallel-checksums": 1,
    "query-sqlite": 1,
    "repair-git-history": 0,
    "serve-sums": 1,
    "write-shell-tool": 0.75,
}
WORSE = dict.fromkeys(
    ("csv-to-json", "find-file", "fix-config", "fix-failing-test", "parallel-checksums", "query-sqlite"), 0
)


def run_scripted(bench: Bench, task: str, plan: str) -> float | None:
    need_cpus(task)
    folder = DEMO / "agents/scripted"
    files = {name: (folder / name).read_bytes() for name in ("solve.sh", plan)}
    return bench.rollout(task, f"/bin/sh /opt/solve.sh /opt/{plan}", files=files)[0]


@pytest.mark.parametrize(("task", "reward"), SCRIPTED.items())
def test_the_scripted_agent_gets_what_its_plan_says(bench: Bench, task: str, reward: float) -> None:
    assert run_scripted(bench, task, "plan") == reward


@pytest.mark.parametrize(("task", "reward"), WORSE.items())
def test_the_worse_plan_is_worse(bench: Bench, task: str, reward: float) -> None:
    assert run_scripted(bench, task, "plan-worse") == reward
