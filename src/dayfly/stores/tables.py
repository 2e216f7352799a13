"""The tables of the index: typed columns for what is asked for, and the whole record as JSON."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

from dayfly.evidence import canonical_json
from dayfly.model import RolloutRecord

METADATA = MetaData()

ROLLOUTS = Table(
    "rollouts",
    METADATA,
    # The key mirrors the folder layout: one result per attempt. It also serves questions about one job.
    Column("job_id", String(128), primary_key=True),
    Column("task", Text, primary_key=True),
    Column("agent", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("rollout_id", String(128), nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("agent_digest", Text, nullable=False),
    Column("retry", Integer, nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("graded", Boolean, nullable=False),
    Column("passed", Boolean),
    Column("reward", Float),
    Column("isolation", String(16)),
    Column("verifier_class", String(16), nullable=False),
    Column("started_unix", Float, nullable=False),
    Column("finished_unix", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("record", Text, nullable=False),
    Index("rollouts_by_id", "rollout_id"),
    Index("rollouts_by_task", "task", "agent"),
    # Covers the list of jobs, which must not read a million records.
    Index("rollouts_by_job", "job_id", "outcome", "graded", "started_unix", "finished_unix"),
)


def row_of(record: RolloutRecord) -> dict[str, Any]:
    return {
        "job_id": record.job_id,
        "task": record.task,
        "agent": record.agent,
        "attempt": record.attempt,
        "rollout_id": record.rollout_id,
        "task_digest": record.task_digest,
        "agent_digest": record.agent_digest,
        "retry": record.retry,
        "outcome": record.outcome.value,
        "graded": record.graded,
        "passed": record.verdict.passed if record.verdict else None,
        "reward": record.reward,
        "isolation": record.isolation,
        "verifier_class": record.verifier_class.value,
        "started_unix": record.started_unix,
        "finished_unix": record.finished_unix,
        "seconds": record.finished_unix - record.started_unix,
        "record": canonical_json(record).decode(),
    }


def record_of(text: str) -> RolloutRecord:
    return RolloutRecord.model_validate(json.loads(text))
