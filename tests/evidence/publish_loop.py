"""Driven by test_crash.py: work on a job until killed, saying each rollout's id once it is durable."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from dayfly.evidence import JobFolder, new_rollout_id
from dayfly.model import Outcome, RolloutRecord, VerifierClass


def main(jobs: Path, job_id: str) -> None:
    job = JobFolder.open(jobs, job_id)
    with job.lock():
        job.recover()
        print("recovered", flush=True)
        done = {r.attempt for r in job.records() if r.graded}
        for attempt in itertools.count(1):
            if attempt in done:
                continue
            for retry, outcome in enumerate((Outcome.INFRA_ERROR, Outcome.PASSED)):
                result = RolloutRecord(
                    rollout_id=new_rollout_id(),
                    job_id=job_id,
                    task="org/task",
                    task_digest="sha256:t",
                    agent="oracle",
                    agent_digest="sha256:a",
                    attempt=attempt,
                    retry=retry,
                    outcome=outcome,
                    verifier_class=VerifierClass.SHARED,
                    started_unix=0.0,
                    finished_unix=1.0,
                )
                with job.rollout(result.rollout_id) as work:
                    work.write("agent/stdout.txt", b"x" * 10_000)
                    job.publish_rollout(result, work)
                job.event({"event": "rollout_finished", "rollout": result.rollout_id})
                print(result.rollout_id, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
