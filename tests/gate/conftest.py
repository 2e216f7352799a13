"""Sides made by hand: a task is its name and its marks, everything else is equal unless said otherwise."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from dayfly.gate.decide import decide
from dayfly.gate.policy import Policy
from dayfly.gate.verdict import GateVerdict
from dayfly.model import VerifierClass
from dayfly.results.side import Side, TaskResults

DIGEST = "sha256:" + "1" * 64
TODAY = datetime.date(2026, 6, 1)


def make_task(name: str, marks: str, **changes: Any) -> TaskResults:
    """A task with these marks: a good second and 100 tokens an attempt, a reward of 1 for each pass."""
    bare = TaskResults(task=name, task_digest=f"sha256:{name}", marks=marks)
    fields: dict[str, Any] = {
        "reward_sum": float(bare.passed),
        "seconds_sum": bare.graded * (1 + zlib.crc32(name.encode()) % 64 / 1024),
        "tokens_sum": 100 * bare.graded,
        "cost_sum": None,
        "verifier_digest": f"sha256:judge-{name}",
        "verifier_classes": (VerifierClass.REBOOTED,) if bare.graded else (),
        "isolation": ("tcg",) if bare.graded else (),
        "disk_digests": ("sha256:disk",) if bare.graded else (),
        "agent_limit_s": 600.0,
        "verifier_timeout_s": 60.0,
        "machine": (1, 1024, 4096),
    }
    return replace(bare, **{**fields, **changes})


def make_side(tasks: Mapping[str, str] | list[TaskResults], job: str = "candidate", **changes: Any) -> Side:
    """A side of these tasks (name → marks); `changes` are fields of `Side`."""
    made = tasks if isinstance(tasks, list) else [make_task(n, m) for n, m in tasks.items()]
    by_name = {t.task: t for t in sorted(made, key=lambda t: t.task)}
    fields: dict[str, Any] = {
        "job_id": job,
        "job_name": "test",
        "agent": "agent",
        "agent_digest": f"sha256:{job}",
        "agent_kind": "command",
        "agent_options": {},
        "attempts": max((t.planned for t in made), default=1),
        "tasks": by_name,
        "digest": f"sha256:results-{job}",
        "job_planned": sum(t.planned for t in made),
        "job_graded": sum(t.graded for t in made),
    }
    return Side(**{**fields, **changes})


def names(count: int) -> list[str]:
    return [f"task-{i:03}" for i in range(count)]


def marks(count: int, passed: int, attempts: int = 1) -> dict[str, str]:
    """So many tasks, of which the first `passed` pass in all their attempts."""
    return {n: ("P" if i < passed else "F") * attempts for i, n in enumerate(names(count))}


MakeTask = Callable[..., TaskResults]
MakeSide = Callable[..., Side]
Marks = Callable[..., dict[str, str]]
Judge = Callable[..., GateVerdict]


@pytest.fixture(name="make_task")
def _make_task() -> MakeTask:
    return make_task


@pytest.fixture(name="make_side")
def _make_side() -> MakeSide:
    return make_side


@pytest.fixture(name="marks")
def _marks() -> Marks:
    return marks


@pytest.fixture
def judge() -> Judge:
    """Decide on hand-made sides; `policy` as a table of gate.yaml."""

    def call(policy: dict[str, Any], candidate: Side, baseline: Side | None = None, **more: Any) -> GateVerdict:
        more = {"policy_digest": DIGEST, "today": TODAY, "now_unix": 1_780_000_000.0, **more}
        return decide(Policy.model_validate(policy), candidate, baseline, **more)

    return call
