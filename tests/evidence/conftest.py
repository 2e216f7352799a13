from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dayfly.evidence import JobFolder, new_job_id, new_rollout_id
from dayfly.model import Outcome, RolloutRecord, VerifierClass

MakeRecord = Callable[..., RolloutRecord]


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    return JobFolder.create(tmp_path / "jobs", new_job_id(), {"name": "j"}, {"tasks": {}})


@pytest.fixture
def make_record(job: JobFolder) -> MakeRecord:
    clock = iter(range(1_000_000))

    def make(outcome: Outcome = Outcome.PASSED, attempt: int = 1, **fields: object) -> RolloutRecord:
        now = float(next(clock))
        values: dict[str, object] = {
            "rollout_id": new_rollout_id(),
            "job_id": job.job_id,
            "task": "org/task",
            "task_digest": "sha256:t",
            "agent": "oracle",
            "agent_digest": "sha256:a",
            "attempt": attempt,
            "outcome": outcome,
            "verifier_class": VerifierClass.SHARED,
            "started_unix": now,
            "finished_unix": now + 0.5,
        }
        return RolloutRecord.model_validate(values | fields)

    return make


@pytest.fixture
def publish_one(job: JobFolder) -> Callable[[RolloutRecord], RolloutRecord]:
    def publish_one(record: RolloutRecord) -> RolloutRecord:
        with job.rollout(record.rollout_id) as work:
            work.write("agent/stdout.txt", record.rollout_id.encode())
            return job.publish_rollout(record, work)

    return publish_one
