"""`run --task` and `run --gate` as a person calls them, on the fake hypervisor; `plan` from a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from dayfly.cli import app
from dayfly.errors import ConfigError, NotFoundError
from dayfly.evidence import JobFolder

TASKS = 24
POLICY = "name: strict\nrequire: {isolation: fake}\nmetrics: {score: {margin: 0.2}}\n"


@pytest.fixture
def dayfly(tmp_path: Path):
    def call(*words: object, code: int = 0) -> Result:
        done = CliRunner().invoke(app, [*map(str, words), "--jobs-dir", str(tmp_path / "jobs")])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done

    return call


@pytest.fixture
def job_file(tmp_path: Path, make_task):
    """A job file of an agent that does its tasks, or does nothing."""
    for number in range(TASKS):
        make_task(f"task-{number:02}")

    def write(name: str, does: str = "write result.txt done") -> Path:
        (tmp_path / f"{name}.sh").write_text(f"#!fake\n{does}\n")
        options = {"files": {f"{name}.sh": "/opt/solve.sh"}, "argv": ["sh", "/opt/solve.sh"]}
        job = {
            "name": name,
            "tasks": ["tasks"],
            "agents": [{"name": "mine", "kind": "command", "options": options}],
            "hypervisor": "fake",
            "concurrency": 1,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(job))
        (tmp_path / "gate.yaml").write_text(POLICY)
        return tmp_path / f"{name}.yaml"

    return write


@pytest.fixture
def baseline(dayfly, job_file) -> str:
    done = dayfly("run", job_file("accepted"), "--json", "--display", "none", "--concurrency", 8)
    return json.loads(done.stdout)["id"]


def test_only_the_tasks_that_are_named(dayfly, job_file, tmp_path):
    job = job_file("some")
    done = dayfly("run", job, "--task", "task-0[12]", "-t", "task-17", "--json", "--display", "none")
    job_id = json.loads(done.stdout)["id"]
    folder = JobFolder.open(tmp_path / "jobs", job_id)
    assert sorted(folder.lock_data()["tasks"]) == ["task-01", "task-02", "task-17"]
    again = dayfly("run", "--resume", job_id, "--json", "--display", "none")
    assert json.loads(again.stdout)["summary"]["total"]["planned"] == 3


def test_tasks_are_chosen_of_folders_too(dayfly, job_file, tmp_path):
    job_file("x")
    words = ("--agent", "oracle", "--hypervisor", "fake", "--dry-run", "--json")
    done = dayfly("run", tmp_path / "tasks", "--task", "task-1*", *words)
    assert json.loads(done.stdout)["planned"] == 10


def test_a_pattern_that_no_task_is_like_names_the_nearest(dayfly, job_file):
    with pytest.raises(ConfigError, match="task-200") as raised:
        dayfly("run", job_file("x"), "--task", "task-01", "--task", "task-200")
    assert "did you mean 'task-20'" in (raised.value.hint or "")
    with pytest.raises(ConfigError, match="no place here"):
        dayfly("run", "--resume", "last", "--task", "task-01")


def test_a_worse_agent_is_stopped_and_the_gate_fails(dayfly, job_file, baseline, tmp_path):
    words = ("--gate", tmp_path / "gate.yaml", "--baseline", baseline)
    done = dayfly("run", job_file("worse", "print nothing"), *words, "--display", "none", code=1)
    assert "stopped early, after 11 of 24 rollouts: gate 'strict' blocks" in done.stdout
    (next_command,) = [line for line in done.stdout.splitlines() if line.strip().startswith("dayfly gate")]
    verdict = json.loads(dayfly(*next_command.split()[1:-2], "--json", code=1).stdout)
    assert verdict["verdict"] == "fail" and verdict["early_stop"]["kind"] == "blocked"


def test_json_says_what_the_gate_saw(dayfly, job_file, baseline, tmp_path):
    words = ("--gate", tmp_path / "gate.yaml", "--baseline", baseline, "--display", "none", "--json")
    answer = json.loads(dayfly("run", job_file("worse", "print nothing"), *words, code=1).stdout)
    assert answer["gate"]["kind"] == "blocked" and answer["stopped"].startswith("gate 'strict' blocks")
    equal = json.loads(dayfly("run", job_file("equal"), *words).stdout)
    assert equal["gate"] is None and equal["summary"]["total"]["graded"] == TASKS


def test_what_can_be_shown_is_said_before_the_start(dayfly, job_file, baseline, tmp_path):
    job = job_file("equal")
    (tmp_path / "gate.yaml").write_text(POLICY.replace("0.2", "0.01"))
    words = ("--gate", tmp_path / "gate.yaml", "--baseline", baseline, "--dry-run")
    said = dayfly("run", job, *words).stderr
    assert "24 comparable tasks" in said and "is found with a chance of 80 %" in said
    assert "warning: the margin of 1.0 points is finer" in said


def test_a_job_with_a_gate_does_not_go_on_unnoticed_without(dayfly, job_file, baseline, tmp_path):
    gate = ("--gate", tmp_path / "gate.yaml", "--baseline", baseline)
    done = dayfly("run", job_file("worse", "print nothing"), *gate, "--display", "none", "--json", code=1)
    job_id = json.loads(done.stdout)["id"]
    with pytest.raises(ConfigError, match="was started with the gate 'strict'") as raised:
        dayfly("run", "--resume", job_id)
    assert "--no-gate" in (raised.value.hint or "") and baseline in (raised.value.hint or "")
    dayfly("run", "--resume", job_id, *gate, "--display", "none", code=1)
    assert len(list(JobFolder.open(tmp_path / "jobs", job_id).records(lambda *_: None))) == 11
    dayfly("run", "--resume", job_id, "--no-gate", "--display", "none")
    dayfly("gate", job_id, "--baseline", baseline, "--policy", tmp_path / "gate.yaml", code=1)


def test_a_job_without_a_gate_is_given_none_later(dayfly, job_file, baseline, tmp_path):
    with pytest.raises(ConfigError, match="without a gate"):
        dayfly("run", "--resume", baseline, "--gate", tmp_path / "gate.yaml", "--baseline", baseline)


@pytest.mark.parametrize("words", [["--gate", "gate.yaml"], ["--baseline", "last"], ["--no-gate"]])
def test_options_that_do_not_stand_alone(dayfly, job_file, words):
    with pytest.raises(ConfigError):
        dayfly("run", job_file("x"), *words)


def test_a_baseline_that_is_not_there(dayfly, job_file, baseline, tmp_path):
    with pytest.raises(NotFoundError):
        dayfly("run", job_file("x"), "--gate", tmp_path / "gate.yaml", "--baseline", "20990101-none")


def test_attempts_that_the_gate_would_not_compare(dayfly, job_file, baseline, tmp_path):
    words = ("--gate", tmp_path / "gate.yaml", "--baseline", baseline)
    with pytest.raises(ConfigError, match="no valid answer") as raised:
        dayfly("run", job_file("x"), *words, "--attempts", 2)
    assert "--attempts 1" in (raised.value.hint or "")


def test_a_plan_estimates_from_the_baseline(dayfly, job_file, tmp_path):
    """Two attempts of every task that agree: no flake seen in 24 tasks."""
    words = ("--attempts", 2, "--json", "--display", "none", "--concurrency", 8)
    baseline = json.loads(dayfly("run", job_file("accepted"), *words).stdout)["id"]
    done = dayfly("plan", job_file("x"), "--baseline", baseline, "--attempts", 2, "--json")
    seen = json.loads(done.stdout)
    assert seen["discordance"] == {"share": pytest.approx(0.5 / 24), "source": "baseline", "tasks": 24}
    assert (seen["tasks"], seen["attempts"]) == (24, 2)
    one = json.loads(dayfly("plan", job_file("x"), "--baseline", baseline, "-k", 5, "--json").stdout)
    assert one["attempts"] == 2  # the baseline has no more to pair with
