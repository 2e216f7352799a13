"""What the README shows, run as a user would."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm
ROOT = Path(__file__).parents[2]


def run(*argv, cwd, timeout=240, status=0):
    done = subprocess.run(argv, cwd=cwd, capture_output=True, timeout=timeout, check=False)
    assert done.returncode == status, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def test_hello(base_disk, tmp_path):
    shutil.copytree(ROOT / "examples/hello-task", tmp_path / "examples/hello-task")
    shutil.copy(ROOT / "examples/hello.py", tmp_path)
    out = run(sys.executable, "hello.py", cwd=tmp_path)
    assert "passed 1.0" in out
    assert "separate" in out


def test_a_newcomers_first_hour(base_disk, tmp_path):
    """init, check, run, list, show --verify, logs, shell, gc: in an empty folder."""
    dayfly = (sys.executable, "-m", "dayfly.cli")
    run(*dayfly, "init", "mine", cwd=tmp_path)
    report = json.loads(run(*dayfly, "check", "mine/tasks", "--json", cwd=tmp_path))
    (task,) = report["tasks"]
    assert task["fit"] and task["strictest_verifier_class"] == "separate"
    answer = json.loads(run(*dayfly, "run", "mine/job.yaml", "--json", cwd=tmp_path))
    jobs = json.loads(run(*dayfly, "list", "--json", cwd=tmp_path))
    assert jobs["schema_version"] == 1
    assert answer["id"] in {j["id"] for j in jobs["jobs"]}
    assert json.loads(run(*dayfly, "show", "last", "--verify", "--json", cwd=tmp_path))["verified"]
    failed = f"{answer['id']}/hello/no-op/1"
    shown = json.loads(run(*dayfly, "show", failed, "--json", cwd=tmp_path))
    for key in (
        "schema_version",
        "task",
        "agent",
        "attempt",
        "outcome",
        "reward",
        "isolation",
        "verifier_class",
        "start_fingerprint",
    ):
        assert key in shown
    run(*dayfly, "logs", failed, cwd=tmp_path)
    out = run(
        *dayfly, "shell", failed, "--", "/bin/sh", "-c", "ls -d /app /logs; ls /tests", cwd=tmp_path, status=2
    )
    assert out == "/app\n/logs\n"
    assert json.loads(run(*dayfly, "show", "last", "--verify", "--json", cwd=tmp_path))["verified"]
    run(*dayfly, "gc", "--reindex", cwd=tmp_path)
