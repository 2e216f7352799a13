"""Imported tasks on real VMs: the reference solution passes, doing nothing fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.importers import Settings, import_swebench, import_terminal_bench, write_predictions
from dayfly.job import load_job_file, parse_job, plan_new, run_job
from dayfly.model import RolloutRecord

pytestmark = pytest.mark.vm
IMAGE = "dayfly/demo-base:latest"
WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.example", "GIT_COMMITTER_NAME": "a"}
WHO |= {"GIT_COMMITTER_EMAIL": "a@b.example", "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin"}


@pytest.fixture
def run(tmp_path: Path, base_disk) -> Callable[..., dict[str, RolloutRecord]]:
    def done(base: Path, **job: Any) -> dict[str, RolloutRecord]:
        settings = parse_job({"retries": 0, **job}, "test")
        result = anyio.run(run_job, plan_new(settings, base, tmp_path / "jobs"))
        return {r.agent: r for r in result.records}

    return done


def outcomes(records: dict[str, RolloutRecord]) -> dict[str, str]:
    return {agent: r.outcome.value + (f": {r.cause.message}" if r.cause else "") for agent, r in records.items()}


def test_a_terminal_bench_task(run, tmp_path):
    source = tmp_path / "old/write-it"
    (source / "tests").mkdir(parents=True)
    compose = f"services:\n  client:\n    image: {IMAGE}\n    working_dir: /app\n    environment: [MODE=strict]\n"
    run_tests = (
        "echo '=== short test summary info ==='\n"
        'if [ "$MODE" = strict ] && cmp -s /app/result.txt $TEST_DIR/expected.txt; then\n'
        "  echo PASSED tests/test_outputs.py::test_it\n"
        "else\n  echo FAILED tests/test_outputs.py::test_it - AssertionError; exit 1\nfi\n"
    )
    for name, text in {
        "task.yaml": "instruction: Write it.\nmax_agent_timeout_sec: 60\nmax_test_timeout_sec: 60\n",
        "docker-compose.yaml": compose,
        "run-tests.sh": run_tests,
        "tests/expected.txt": "done\n",
        "solution.sh": "cat <<< done > result.txt\n",
    }.items():
        (source / name).write_text(text)
    made = import_terminal_bench(source, tmp_path / "tasks")
    toml = (made.path / "task.toml").read_text()  # of a size for which there is a template already
    (made.path / "task.toml").write_text(toml.replace("[environment]", "[environment]\nmemory_mb = 512"))
    records = run(tmp_path, tasks=["tasks"], agents=["oracle", "no-op"])
    assert outcomes(records) == {"oracle": "passed", "no-op": "failed"}


RUN_TESTS = """\
import sys
for path in sys.argv[1:]:
    try:
        exec(compile(open(path).read(), path, "exec"))
        print("PASSED", path)
    except Exception as error:
        print("FAILED", path, "-", error)
"""


def test_a_swebench_instance_and_predictions_for_it(run, tmp_path):
    folder = tmp_path / "testbed"
    folder.mkdir()

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=folder, env=WHO, check=True, capture_output=True, text=True
        ).stdout

    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "run_tests.py").write_text(RUN_TESTS)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "base")
    base = git("rev-parse", "HEAD").strip()
    patches = {}
    for name, path, text in (
        ("patch", "calc.py", "def add(a, b):\n    return a + b\n"),
        ("test_patch", "test_calc.py", "from calc import add\nassert add(1, 2) == 3\n"),
    ):
        (folder / path).write_text(text)
        git("add", "-A")
        patches[name] = git("diff", "--cached", base)
        git("reset", "-q", "--hard")
    row = {
        "instance_id": "acme__calc-1",
        "repo": "acme/calc",
        "base_commit": base,
        "problem_statement": "add() subtracts.",
        "FAIL_TO_PASS": ["test_calc.py"],
        "PASS_TO_PASS": [],
        **patches,
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    to = tmp_path / "tasks"
    settings = Settings(image_template=IMAGE, test_command="python3 run_tests.py", memory_mb=512, storage_mb=512)
    (made,) = import_swebench(tmp_path / "rows.jsonl", to, settings)
    # The base image has no /testbed, as SWE-bench's have: a health check makes it, for agent and judge.
    subprocess.run(["tar", "-cf", made.path / "environment.tar", "-C", folder, "."], check=True)
    (made.path / "environment").mkdir()
    (made.path / "environment.tar").rename(made.path / "environment/testbed.tar")
    unpack = "[ -e /testbed/.git ] || { cd /testbed && tar -xf testbed.tar && rm testbed.tar; }"
    toml = (made.path / "task.toml").read_text()
    check = f'[environment.healthcheck]\ncommand = "{unpack}"\n\n[dayfly]'
    (made.path / "task.toml").write_text(toml.replace("[dayfly]", check))
    predictions = [
        {"instance_id": "acme__calc-1", "model_name_or_path": "good", "model_patch": patches["patch"]},
        {"instance_id": "acme__calc-1", "model_name_or_path": "odd", "model_patch": "diff --git a/x b/x\n"},
    ]
    (tmp_path / "predictions.jsonl").write_text("\n".join(map(json.dumps, predictions)))
    job = load_job_file(write_predictions(tmp_path / "predictions.jsonl", to, [made.name]))
    agents = [{"name": "oracle"}, {"name": "no-op"}, *(a.model_dump() for a in job.agents)]
    records = run(to, tasks=job.tasks, agents=agents)
    found = outcomes(records)
    assert (found["oracle"], found["no-op"], found["good"]) == ("passed", "failed", "passed"), found
    assert records["odd"].outcome.value == "agent_error" and records["odd"].reward == 0
    assert records["good"].rewards == {"reward": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0}
    assert {r.verifier_class.value for r in records.values()} == {"separate"}
