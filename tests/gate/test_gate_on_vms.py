"""The gate as a CI uses it: real microVMs, the demo's agent, a worse version of it, a host whose disk fills up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from dayfly.evidence import JobFolder, list_jobs

pytestmark = [pytest.mark.vm, pytest.mark.slow]

DEMO = Path(__file__).parents[2] / "examples" / "demo"
WORSE = {"csv-to-json", "find-file", "fix-config", "fix-failing-test", "parallel-checksums", "query-sqlite"}
LIMIT_S = 900
STRICT = "metrics:\n  score: {margin: 0.05}\n"


def dayfly(*words: object, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dayfly.cli", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def run(job: str, jobs_dir: Path, *more: object) -> str:
    """Run a job file of the demo with one attempt; its id."""
    words = ("--attempts", 1, "--display", "none", "--json", "--jobs-dir", jobs_dir)
    return json.loads(dayfly("run", DEMO / job, *words, *more).stdout)["id"]


@pytest.fixture(scope="module")
def jobs_dir(base_disk: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def baseline(jobs_dir: Path) -> str:
    return run("job.yaml", jobs_dir, "--agent", "scripted")


@pytest.fixture(scope="module")
def worse(jobs_dir: Path) -> str:
    return run("job-worse.yaml", jobs_dir)


@pytest.fixture(scope="module")
def again(jobs_dir: Path) -> str:
    """The baseline's agent once more."""
    return run("job.yaml", jobs_dir, "--agent", "scripted")


def gate(jobs_dir: Path, baseline: object, candidate: object, policy: Path, *more: object, code: int) -> Any:
    words = ("--baseline", baseline, "--candidate", candidate, "--policy", policy, "--jobs-dir", jobs_dir)
    return json.loads(dayfly("gate", *words, "--json", *more, code=code).stdout)


def test_a_worse_version_fails_the_gate(baseline: str, worse: str, jobs_dir: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("junit.xml", "summary.md", "badge.svg")}
    outputs = [word for name, path in files.items() for word in (f"--{path.stem}", path)]
    verdict = gate(jobs_dir, baseline, worse, DEMO / "gate.yaml", *outputs, code=1)
    assert (verdict["verdict"], verdict["exit_code"]) == ("fail", 1)
    regressed = {p["task"] for p in verdict["comparison"]["pairs"] if p["transition"] == "pass→fail"}
    assert regressed == WORSE
    assert sum(s.failures for s in JUnitXml.fromfile(str(files["junit.xml"]))) > 0
    assert "fail" in files["summary.md"].read_text() and "fail" in files["badge.svg"].read_text()
    text = dayfly("compare", baseline, worse, "--jobs-dir", jobs_dir, "--html", tmp_path / "c.html").stdout
    assert all(task in text for task in WORSE) and (tmp_path / "c.html").stat().st_size > 1000


def test_the_same_version_passes_or_is_inconclusive_as_the_policy_says(
    baseline: str, again: str, jobs_dir: Path, tmp_path: Path
) -> None:
    assert gate(jobs_dir, baseline, again, DEMO / "gate.yaml", code=0)["verdict"] == "pass"
    strict = tmp_path / "gate.yaml"
    strict.write_text(STRICT)
    verdict = gate(jobs_dir, baseline, again, strict, code=3)
    assert verdict["verdict"] == "inconclusive" and verdict["more_rollouts"] > 0
    strict.write_text(STRICT + "on_inconclusive: allow\n")
    assert gate(jobs_dir, baseline, again, strict, code=0)["verdict"] == "inconclusive"


def test_the_worse_version_is_stopped_early(baseline: str, jobs_dir: Path, tmp_path: Path) -> None:
    """Six of twelve tasks are enough for an error of 36 %: the job ends before its plan does."""
    policy = tmp_path / "gate.yaml"
    policy.write_text("alpha: 0.4\nearly_stop: {alpha_share: 0.9}\nmetrics: {score: {margin: 0.05}}\n")
    words = ("--gate", policy, "--baseline", baseline, "--jobs-dir", jobs_dir, "--attempts", 1, "--concurrency", 1)
    done = dayfly("run", DEMO / "job-worse.yaml", *words, "--display", "none", "--json", code=1)
    answer = json.loads(done.stdout)
    assert answer["stopped"] and answer["summary"]["total"]["graded"] < 12
    verdict = gate(jobs_dir, baseline, answer["id"], policy, code=1)
    assert verdict["early_stop"]["kind"] == "blocked"


@pytest.fixture
def shrinking_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for VMs, which a test can make full."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "none", folder], check=True, timeout=20)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True, timeout=20)


def test_a_disk_that_fills_up_during_the_candidate_is_no_verdict(
    baseline: str, jobs_dir: Path, shrinking_disk: Path
) -> None:
    words = ["run", DEMO / "job.yaml", "--agent", "scripted", "--jobs-dir", shrinking_disk, "--display", "none"]
    argv = [sys.executable, "-m", "dayfly.cli", *map(str, words), "--attempts", "1"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        candidate = _wait_for_results(shrinking_disk, 3)
        used_kib = (shutil.disk_usage(shrinking_disk).used >> 10) + 64
        remount = ["mount", "-o", f"remount,size={used_kib}k", shrinking_disk]
        subprocess.run(remount, check=True, timeout=20)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 4, said.decode()
    words = ("--baseline", baseline, "--candidate", candidate, "--policy", DEMO / "gate.yaml")
    done = dayfly("gate", *words, "--jobs-dir", jobs_dir, "--json", code=4)
    verdict = json.loads(done.stdout)
    assert verdict["verdict"] == "invalid" and verdict["decided_by"].startswith("coverage")
    assert 0 < verdict["candidate"]["graded"] < 12


def _wait_for_results(jobs_dir: Path, count: int) -> Path:
    """The folder of the only job in `jobs_dir`, when so many rollouts of it are on file."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        for job_id in list_jobs(jobs_dir):
            if len(list(JobFolder(jobs_dir, job_id).path.glob("rollouts/*/*/1/rollout.json"))) >= count:
                return jobs_dir / job_id
        time.sleep(0.2)
    raise AssertionError("the candidate did not get that far")
