"""Small jobs whose rollouts are published and indexed without any VM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dayfly.evidence import JobFolder
from dayfly.model import Outcome, RolloutRecord, Usage, Verdict, VerifierClass
from dayfly.stores import SqlStore

GRADES = {
    "P": (Outcome.PASSED, True),
    "F": (Outcome.FAILED, False),
    "T": (Outcome.AGENT_TIMEOUT, True),
    "t": (Outcome.AGENT_TIMEOUT, False),
    "e": (Outcome.AGENT_ERROR, None),
    "x": (Outcome.TAMPERED, True),
    "i": (Outcome.INFRA_ERROR, None),
    "v": (Outcome.VERIFIER_ERROR, None),
}
MakeJob = Callable[..., JobFolder]


def lock_entry(task: str, **fields: Any) -> dict[str, Any]:
    return {
        "digest": f"sha256:{task}",
        "path": f"/tasks/{task}",
        "image": "i",
        "machine": {"cpus": 1, "memory_mib": 256, "storage_mib": 128},
        "verifier_class": "shared",
        "agent_limit_s": 60.0,
        "verifier_timeout_s": 30.0,
        "verifier_digest": f"sha256:judge-{task}",
        "tags": ["db"],
        "metadata": {"repository": "r"},
        **fields,
    }


def record_of(job_id: str, task: str, agent: str, attempt: int, mark: str, **fields: Any) -> RolloutRecord:
    outcome, passed = GRADES[mark]
    values: dict[str, Any] = {
        "rollout_id": f"{job_id}-{task}-{agent}-{attempt}".replace("/", "-"),
        "job_id": job_id,
        "task": task,
        "task_digest": f"sha256:{task}",
        "agent": agent,
        "agent_digest": f"sha256:{agent}",
        "attempt": attempt,
        "outcome": outcome,
        "verdict": None if passed is None else Verdict(reward=float(passed), passed=passed),
        "reward": None if passed is None else float(passed),
        "verifier_class": VerifierClass.SHARED,
        "isolation": "tcg",
        "disk_digest": "sha256:disk",
        "started_unix": 1000.0 + attempt,
        "finished_unix": 1002.5 + attempt,
        "usage": Usage(tokens_in=100, tokens_out=attempt, cost_usd=0.25),
    }
    return RolloutRecord.model_validate(values | fields)


def publish(job: JobFolder, record: RolloutRecord) -> RolloutRecord:
    with job.rollout(record.rollout_id) as work:
        work.write("output.txt", b"x")
        return job.publish_rollout(record, work)


@pytest.fixture
def made() -> SimpleNamespace:
    """What `make_job` is made of."""
    return SimpleNamespace(record_of=record_of, publish=publish)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """`marks`: agent → task → a character per attempt, `.` for none; kinds: agent → kind."""

    def make(
        marks: dict[str, dict[str, str]],
        *,
        job_id: str = "job",
        kinds: dict[str, str] | None = None,
        files: bool = True,
        index: bool = True,
        **lock: Any,
    ) -> JobFolder:
        tasks = {task: len(row) for rows in marks.values() for task, row in rows.items()}
        attempts = max(tasks.values())
        planned = len(tasks) * attempts * len(marks)
        agents = {a: {"kind": (kinds or {}).get(a, "command"), "digest": f"sha256:{a}"} for a in marks}
        entries = [{"name": a, "kind": e["kind"], "options": {"model": "m-" + a}} for a, e in agents.items()]
        job = JobFolder.create(
            tmp_path,
            job_id,
            {"id": job_id, "job": {"name": "nightly", "attempts": attempts, "seed": 7, "agents": entries}},
            {"tasks": {t: lock_entry(t) for t in tasks}, "agents": agents, "planned": planned, **lock},
        )
        records = [
            record_of(job_id, task, agent, number, mark)
            for agent, rows in marks.items()
            for task, row in rows.items()
            for number, mark in enumerate(row, 1)
            if mark != "."
        ]
        if files:
            records = [publish(job, r) for r in records]
        if index:
            with SqlStore.open(tmp_path) as store:
                store.add_many(records)
        return job

    return make
