"""`kill -9`: nothing that was acknowledged is lost, nothing half-made is visible, nothing counts twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from dayfly.evidence import JobFolder, verify_folder

HERE = Path(__file__).parent
ROUNDS = 15


def test_killed_before_every_file_operation_of_publication_and_recovery(tmp_path: Path) -> None:
    argv = [sys.executable, str(HERE / "crash_points.py"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    assert sum(states.values()) > 50
    assert set(states) == {"rolled back", "rolled forward", "complete", "recovered"}


def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    job = JobFolder.create(tmp_path, "job", {}, {})
    acknowledged: list[str] = []
    chance = random.Random(7)
    for _ in range(ROUNDS):
        acknowledged += _work_until_killed(job, chance)
    with job.lock():
        job.recover()
    starts = [r for key in {r.key for r in job.records()} for r in job.history(key)]
    on_file = Counter(r.rollout_id for r in starts)
    assert set(acknowledged) <= set(on_file)
    assert set(on_file.values()) == {1}
    graded = Counter(r.attempt for r in starts if r.graded)
    assert set(graded.values()) == {1}
    assert sorted(graded) == list(range(1, len(graded) + 1))
    for folder in (job.path / "rollouts").glob("*/*/*"):
        assert verify_folder(folder) == [], folder
    assert list((job.path / "work").iterdir()) == []
    finished = [e["rollout"] for e in job.events()]
    assert set(finished) <= set(on_file)


def _work_until_killed(job: JobFolder, chance: random.Random) -> list[str]:
    argv = [sys.executable, str(HERE / "publish_loop.py"), str(job.path.parent), job.job_id]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "recovered\n"
            lines = [child.stdout.readline().strip() for _ in range(chance.randrange(4))]
            time.sleep(chance.random() * 0.02)  # anywhere within a publication
        finally:
            child.send_signal(signal.SIGKILL)
        # A last line may be torn; it was then not acknowledged in full.
        rest = child.stdout.read()
    return lines + [line.strip() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
