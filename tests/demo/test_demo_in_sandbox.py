"""Every demo task: its solution passes in each class it supports, doing nothing fails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Bench

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
