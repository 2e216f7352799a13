"""The tables of the index: typed columns for what is asked for, and the whole record as JSON."""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

from dayfly.evidence import canonical_json, sha256_bytes
from dayfly.model import RolloutRecord

METADATA = MetaData()

GROUPED = ("agent", "task", "version", "graded", "isolation", "verifier_class", "disk_digest")
COVERED = (
    "job_id",
    *GROUPED,
    "attempt",
    "mark",
    "reward",
    "started_unix",
    "finished_unix",
    "tokens",
    "cost_usd",
    "indexed_unix",
)

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
    # What a comparison adds up, so that it need not read a million records.
    Column("version", String(16)),
    Column("mark", String(1)),
    Column("tokens", BigInteger),
    Column("cost_usd", Float),
    Column("disk_digest", Text),
    Column("indexed_unix", Float),
    Index("rollouts_by_id", "rollout_id"),
    Index("rollouts_by_task", "task", "agent"),
    # Covers the list of jobs, which must not read a million records.
    Index("rollouts_by_job", "job_id", "outcome", "graded", "started_unix", "finished_unix"),
    # Covers `SqlStore.task_rows`; its order is that of the groups, so that nothing need be sorted.
    Index("rollouts_by_version", *COVERED),
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
        **compared(record),
        "indexed_unix": time.time(),
    }


def compared(record: RolloutRecord) -> dict[str, Any]:
    """The columns that the second schema added, but for when the row was made."""
    usage = record.usage
    known = usage.tokens_in is not None and usage.tokens_out is not None
    return {
        "version": version_of(record.task_digest, record.agent_digest),
        "mark": record.mark,
        "tokens": (usage.tokens_in or 0) + (usage.tokens_out or 0) if known else None,
        "cost_usd": usage.cost_usd,
        "disk_digest": record.disk_digest,
    }


def version_of(task_digest: str, agent_digest: str) -> str:
    """Short for a task version and an agent version: 64 bits that are compared, never looked up."""
    return sha256_bytes(f"{task_digest} {agent_digest}".encode()).removeprefix("sha256:")[:16]


def record_of(text: str) -> RolloutRecord:
    return RolloutRecord.model_validate(json.loads(text))
