"""Driven by test_crash.py: publish a rollout and die by SIGKILL at every point where the kernel is asked.

For n = 1, 2, … a forked child publishes and kills itself just before its n-th file operation (Python's audit
events); then this process recovers and checks. Ends when a child gets through. Prints a JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from dayfly.evidence import JobFolder, new_rollout_id, seal, verify_folder
from dayfly.model import Outcome, RolloutRecord, VerifierClass

WATCHED = ("open", "os.", "shutil.")


def record(job: JobFolder, attempt: int, outcome: Outcome) -> RolloutRecord:
    return RolloutRecord(
        rollout_id=new_rollout_id(),
        job_id=job.job_id,
        task="org/task",
        task_digest="sha256:t",
        agent="oracle",
        agent_digest="sha256:a",
        attempt=attempt,
        outcome=outcome,
        verifier_class=VerifierClass.SHARED,
        started_unix=float(outcome is Outcome.PASSED),
        finished_unix=2.0,
    )


def publish(job: JobFolder, result: RolloutRecord) -> None:
    with job.rollout(result.rollout_id) as work:
        work.write("agent/stdout.txt", b"output")
        (work.scratch / "disk.img").write_bytes(b"disk")
        work.keep_disk()
        job.publish_rollout(result, work)


def die_at(point: int) -> None:
    seen = 0

    def hook(event: str, args: object) -> None:
        nonlocal seen
        if event.startswith(WATCHED) and event != "os.kill":
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def one_round(jobs: Path, point: int) -> tuple[bool, str]:
    """Whether the child got through, and the state that recovery ended in."""
    job = JobFolder.create(jobs, f"job-{point}", {}, {})
    first, second = record(job, 1, Outcome.INFRA_ERROR), record(job, 1, Outcome.PASSED)
    publish(job, first)
    pid = os.fork()
    if pid == 0:
        die_at(point)
        publish(job, second)
        os._exit(0)
    through = os.waitpid(pid, 0)[1] == 0
    job = JobFolder.open(jobs, job.job_id)
    with job.lock():
        again = job.recover()
        assert job.recover().published == ()
    results = [r.rollout_id for r in job.records()]
    history = [r.rollout_id for r in job.history(first.key)]
    assert first.rollout_id in history, "a published rollout was lost"
    assert results in ([first.rollout_id], [second.rollout_id]), results
    assert not through or results == [second.rollout_id], "an acknowledged rollout was lost"
    for folder in (job.path / "rollouts").glob("*/*/*"):
        assert verify_folder(folder) == [], folder
    assert list((job.path / "work").iterdir()) == []
    assert not list(job.path.rglob(".*.tmp"))
    assert not list((job.path / "interrupted").glob("**/disk.img"))
    if results == [first.rollout_id]:
        publish(job, record(job, 1, Outcome.PASSED))  # what resume does
        assert len(job.history(first.key)) == 2
        return through, "rolled back"
    return through, "rolled forward" if again.published else "complete"


def recovery_round(jobs: Path, point: int) -> tuple[bool, str]:
    """As `one_round`, for a kill while recovering from a kill."""
    job = JobFolder.create(jobs, f"recover-{point}", {}, {})
    first, second = record(job, 1, Outcome.INFRA_ERROR), record(job, 1, Outcome.PASSED)
    publish(job, first)
    with job.rollout(second.rollout_id) as work:
        work.write("agent/stdout.txt", b"output")
        seal(second, work.folder)
    with job.rollout("lost") as work:
        work.write("agent/stdout.txt", b"partial")
    (work.work / "scratch").mkdir()
    pid = os.fork()
    if pid == 0:
        die_at(point)
        with job.lock():
            job.recover()
        os._exit(0)
    through = os.waitpid(pid, 0)[1] == 0
    with job.lock():
        job.recover()
    assert [r.rollout_id for r in job.records()] == [second.rollout_id]
    assert len(job.history(first.key)) == 2
    assert list((job.path / "work").iterdir()) == []
    assert (job.path / "interrupted" / "lost" / "agent" / "stdout.txt").read_bytes() == b"partial"
    return through, "recovered"


def main(jobs: Path) -> None:
    states: dict[str, int] = {}
    for attempt in (one_round, recovery_round):
        point, through = 0, False
        while not through:
            point += 1
            through, state = attempt(jobs, point)
            states[state] = states.get(state, 0) + 1
    print(json.dumps(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
