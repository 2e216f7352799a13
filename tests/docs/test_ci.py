"""The CI recipes: each is what its CI reads, the page shows the files, and every dayfly command in them exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from dayfly.cli import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ci"
FILES = sorted(FOLDER.iterdir())
PAGE = (ROOT / "docs" / "ci.md").read_text()


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_page_shows_the_file_as_it_is(path):
    assert f"\n{path.read_text()}```\n" in PAGE


def test_every_block_of_the_page_is_a_file():
    assert len(re.findall(r"^```\w", PAGE, re.MULTILINE)) == len(FILES)


# --- what each CI requires -------------------------------------------------------------------------


def test_github():
    flow = load("github.yml")
    assert set(flow) <= {"name", "on", "permissions", "concurrency", "jobs"}, "on: must be quoted, or it is `true`"
    assert set(flow["on"]) == {"pull_request", "push", "workflow_dispatch"}
    for job in flow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        ids = [s["id"] for s in job["steps"] if "id" in s]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w/-]+@v\d+", step.get("uses", "actions/checkout@v4"))
            # Values of events must not become part of a script.
            assert "${{" not in step.get("run", "")
            assert set(re.findall(r"steps\.(\w+)\.", str(step.get("if", "")))) <= set(ids)
    restore, save = (s for s in flow["jobs"]["gate"]["steps"] if "cache" in s.get("uses", ""))
    assert save["with"]["key"] == restore["with"]["key"] and save["with"]["path"] == restore["with"]["path"]
    assert save["with"]["key"].startswith(restore["with"]["restore-keys"])
    assert "steps.gate.outputs.code == '0'" in save["if"]


def test_gitlab():
    flow = load("gitlab-ci.yml")
    jobs = {n: flow[".dayfly"] | job for n, job in flow.items() if n not in ("stages", ".dayfly")}
    for job in jobs.values():
        assert job["stage"] in flow["stages"] and job["extends"] in flow
        assert all(isinstance(line, str) for line in [*job["script"], *job["before_script"]])
        assert job["cache"]["paths"] == ["jobs/"] and flow[".dayfly"]["variables"]["DAYFLY_JOBS_DIR"] == "jobs"
    gate = jobs["gate"]
    assert gate["artifacts"]["reports"]["junit"] == "junit.xml" and gate["artifacts"]["when"] == "always"
    assert gate["allow_failure"] == {"exit_codes": [3]}
    assert gate["retry"]["exit_codes"] == [4] and gate["retry"]["max"] in (1, 2)
    assert flow[".dayfly"]["variables"]["CACHE_POLICY"] == "pull", "a merge request must not replace the baseline"
    for name, value in (
        v for job in flow.values() if isinstance(job, dict) for v in job.get("variables", {}).items()
    ):
        assert isinstance(value, str), f"{name}: GitLab takes text"


def test_buildkite():
    steps = load("buildkite.yml")["steps"]
    for step in steps:
        assert step["command"] and all(isinstance(line, str) for line in step["command"])
        # `pipeline upload` fills in $NAME; what the shell shall see is written $$NAME.
        assert not re.search(r"(?<!\$)\$(?!\$)", " ".join(step["command"]))
        assert step.get("depends_on", steps[0]["key"]) == steps[0]["key"]
    assert steps[0]["soft_fail"] == [{"exit_status": 3}]
    assert steps[0]["retry"]["automatic"] == [{"exit_status": 4, "limit": 1}]
    assert steps[0]["concurrency"] == 1 and steps[0]["concurrency_group"]


def test_jenkins():
    text = re.sub(r"//.*", "", (FOLDER / "Jenkinsfile").read_text())
    bare = re.sub(r"'[^'\n]*'|\"[^\"\n]*\"", "''", text)
    depth, blocks = 0, []
    for word in re.findall(r"\w+(?=\s*(?:\([^()]*\))?\s*\{)|[{}]", bare):
        if word == "}":
            depth -= 1
        elif word == "{":
            depth += 1
        else:
            blocks.append((depth, word))
        assert depth >= 0
    assert depth == 0 and bare.count("(") == bare.count(")")
    assert blocks[0] == (0, "pipeline")
    assert [w for d, w in blocks if d == 1] == ["agent", "options", "environment", "stages", "post"]
    assert (2, "stage") in blocks and (3, "steps") in blocks and (2, "always") in blocks
    assert "code == 3" in text and "unstable(" in text and "junit testResults: 'junit.xml'" in text


# --- the scripts -----------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[str, str]]:
    for path in FILES:
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith(("#", "//"))]
        for found in re.finditer(r"(?<![\w./])dayfly [a-z][^\n;|&>)]*", "\n".join(lines)):
            yield path.name, found[0]


def test_command_lines_are_found():
    assert {line.split()[1] for _, line in command_lines()} == {"run", "gate", "baseline"}


@pytest.mark.parametrize(("name", "line"), [*command_lines()])
def test_every_command_line_exists(name, line):
    command, words = typer.main.get_command(app), line.split()[1:]
    while (below := getattr(command, "commands", None)) is not None:
        word = words.pop(0)
        assert word in below, f"{name}: {line}: {word}"
        command = below[word]
    known = {o for p in command.params for o in p.opts}
    assert [w for w in words if w.startswith("--") and w not in known] == [], f"{name}: {line}"


def test_options_that_recipes_pass_on_exist():
    known = {o for p in typer.main.get_command(app).commands["gate"].params for o in p.opts}
    for path in FILES:
        for words in re.findall(r"gate\.sh ([^|\n'\"]*)", path.read_text()):
            assert {w for w in words.split() if w.startswith("--")} <= known, path.name


@pytest.mark.parametrize("name", ["gate.sh", "first-baseline.sh"])
def test_scripts_parse(name):
    subprocess.run(["sh", "-n", FOLDER / name], check=True, timeout=20)


TASK = {
    "task.toml": """version = "1.0"
[environment]
docker_image = "fake/image"
[dayfly]
verifier_class = "rebooted"
""",
    "instruction.md": "Write a file.\n",
    "solution/solve.sh": "#!fake\nwrite result.txt done\n",
    "tests/test.sh": "#!fake\nwrite /logs/verifier/reward.txt 0\nexpect /app/result.txt done\n"
    "write /logs/verifier/reward.txt 1\n",
}


class Checkout:
    """A repository with a job on the fake hypervisor, and the scripts in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(6):
            for name, text in TASK.items():
                path = folder / "tasks" / f"t{number}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        (folder / "gate.yaml").write_text(
            "metrics: {score: {margin: 0.9}}\nrequire: {isolation: fake}\nmust_pass: ['*']\n"
        )
        self.agent("oracle")
        (folder / "bin").mkdir()
        (folder / "bin" / "dayfly").write_text(f'#!/bin/sh\nexec {sys.executable} -m dayfly.cli "$@"\n')
        (folder / "bin" / "dayfly").chmod(0o755)

    def agent(self, kind: str) -> None:
        job = {
            "tasks": ["tasks"], "agents": [{"name": "agent", "kind": kind}], "attempts": 2, "hypervisor": "fake",
        }  # fmt: skip
        (self.folder / "job.yaml").write_text(json.dumps(job))

    def run(self, script: str, *words: str, **env: str) -> int:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        self.done = subprocess.run(
            ["sh", FOLDER / script, *words], cwd=self.folder, env=os.environ | {"PATH": path} | env,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return self.done.returncode

    def jobs(self) -> set[str]:
        return {p.name for p in (self.folder / "jobs").iterdir() if p.is_dir()} - {"baselines"}

    def baseline(self) -> str:
        text = (self.folder / "jobs" / "baselines" / "main.baseline.json").read_text()
        return str(json.loads(text)["job_id"])


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_scripts_work(checkout):
    assert checkout.run("gate.sh") == 2, "without a baseline nothing is let through"
    assert not (checkout.folder / "jobs").exists() or not checkout.jobs()
    assert checkout.run("first-baseline.sh") == 0, checkout.done.stderr
    first = checkout.baseline()
    assert checkout.run("first-baseline.sh") != 0 and checkout.baseline() == first

    assert checkout.run("gate.sh", "--summary", "summary.md") == 0, checkout.done.stdout + checkout.done.stderr
    assert checkout.baseline() == first, "only MOVE_BASELINE moves it"
    assert {"junit.xml", "gate.svg", "summary.md"} <= {p.name for p in checkout.folder.iterdir()}

    assert checkout.run("gate.sh", MOVE_BASELINE="yes", ONLY_BASELINE="yes") == 0, checkout.done.stderr
    second = checkout.baseline()
    assert second != first and checkout.jobs() == {second}

    checkout.agent("no-op")
    assert checkout.run("gate.sh", MOVE_BASELINE="yes") == 1, checkout.done.stdout + checkout.done.stderr
    assert checkout.baseline() == second


def test_a_candidate_that_cannot_begin_is_not_mistaken_for_the_baseline(checkout):
    assert checkout.run("first-baseline.sh") == 0, checkout.done.stderr
    (checkout.folder / "job.yaml").write_text("tasks: [nowhere]\n")
    assert checkout.run("gate.sh", MOVE_BASELINE="yes") == 2, "written wrongly, as `dayfly run` says"
    assert "Traceback" not in checkout.done.stderr
    assert not (checkout.folder / "junit.xml").exists()
