"""Whatever is killed, nothing is lost and nothing is left: with real VMs (faults 35-37, 51, 52, 55)."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dayfly.evidence import JobFolder
from dayfly.model import Outcome

pytestmark = pytest.mark.vm

ROUNDS = 20


def vmms(tmp_path: Path) -> list[int]:
    """Processes that have a VM of this test's jobs in their command line."""
    ids: set[str] = set()
    for path in (tmp_path / "jobs").glob("*/events.jsonl"):
        ids.update(re.findall(r'"rollout": ?"([^"]+)"', path.read_text()))
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if "qemu" in line and any(i in line for i in ids) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def finished(tmp_path: Path) -> tuple[str, int]:
    for path in (tmp_path / "jobs").glob("*/events.jsonl"):
        return path.parent.name, path.read_text().count('"rollout_finished"')
    return "", -1


def nothing_left(tmp_path: Path, job: str) -> None:
    wait_until(lambda: not vmms(tmp_path), 10, "VMMs are left 10 s after the kill")
    mounts = Path("/proc/self/mountinfo").read_text()
    assert job not in mounts


def gc(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "dayfly.cli", "gc", "--jobs-dir", str(tmp_path / "jobs")],
        check=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.slow
def test_kill_nine_at_twenty_random_moments(make_task, start_run, tmp_path):
    """Each kill is followed by --resume: no finished rollout lost, none run twice, none missing, nothing left."""
    for name in ("a", "b"):
        make_task(name)
    process = start_run(str(tmp_path / "tasks"), "-a", "oracle", "-a", "no-op", "-k", "4", "-c", "2")
    wait_until(lambda: finished(tmp_path)[1] >= 0, 240, "the job did not start")
    job = finished(tmp_path)[0]
    random.seed(11)
    known: dict[str, str] = {}
    for _ in range(ROUNDS):
        time.sleep(random.uniform(0.2, 3.0))
        process.kill()
        process.communicate()
        nothing_left(tmp_path, job)
        folder = JobFolder.open(tmp_path / "jobs", job)
        with folder.lock():
            folder.recover()
        now = {str(r.key): r.rollout_id for r in folder.records() if r.graded}
        for key, rollout in known.items():
            assert now.get(key) == rollout, "a finished rollout was lost or run twice"
        known = now
        process = start_run("--resume", job)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err.decode()
    records = list(JobFolder.open(tmp_path / "jobs", job).records())
    assert len(records) == 16 and all(r.graded for r in records)
    gc(tmp_path)
    nothing_left(tmp_path, job)
    assert list((tmp_path / "jobs" / job / "work").iterdir()) == []
    kept = {r.rollout_id for r in records if (folder.rollout_path(r.key) / "disk.img").exists()}
    assert kept == {r.rollout_id for r in records if r.outcome is not Outcome.PASSED}


@pytest.mark.parametrize("phase", ["boot", "setup", "agent", "collect", "verify"])
def test_one_interrupt_in_each_phase(make_task, start_run, tmp_path, phase):
    """Fault 55: stop, collect, clean up, 130; the rollout is cancelled and resume is offered."""
    make_task(
        environment='[environment.healthcheck]\ncommand = "sleep 2"\n',
        collect="sleep 2",
        solve="#!/bin/sh\necho partial output\nsleep 3\necho done > /app/result.txt\n",
        test="#!/bin/sh\nsleep 3\necho 1 > /logs/verifier/reward.txt\n",
    )
    process = start_run(str(tmp_path / "tasks"), "-a", "oracle", "--display", "json", "-c", "1")
    assert process.stdout is not None
    for line in process.stdout:
        if b'"phase": "%s"' % phase.encode() in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    job = finished(tmp_path)[0]
    nothing_left(tmp_path, job)
    (record,) = JobFolder.open(tmp_path / "jobs", job).records()
    assert record.outcome is Outcome.CANCELLED
    assert list((tmp_path / "jobs" / job / "work").iterdir()) == []
    if phase in ("collect", "verify"):
        place = JobFolder.open(tmp_path / "jobs", job).rollout_path(record.key)
        assert (place / "agent/stdout.txt").read_bytes() == b"partial output\n"


def test_two_interrupts_leave_at_once_and_the_vms_with_them(make_task, start_run, tmp_path):
    make_task(solve="#!/bin/sh\nsleep 300\n", agent_timeout=600)
    process = start_run(str(tmp_path / "tasks"), "-a", "oracle", "-k", "2", "-c", "2")
    wait_until(lambda: vmms(tmp_path), 240, "no VM started")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    job = finished(tmp_path)[0]
    nothing_left(tmp_path, job)
    gc(tmp_path)
    assert list((tmp_path / "jobs" / job / "work").iterdir()) == []
