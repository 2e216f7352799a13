"""SWE-bench rows as tasks: a real repository with a real fix, judged by the script that each task carries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dayfly.errors import ConfigError, TaskError
from dayfly.importers import Imported, Settings, import_swebench, write_predictions
from dayfly.importers.swebench import COLLECT, touched_by
from dayfly.importers.swebench_grade import grade
from dayfly.job import load_job_file, plan_new
from dayfly.tasks import load_task

ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}
ENV |= {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

BUG = "def add(a, b):\n    return a - b\n\n\ndef two():\n    return 2\n"
FIX = BUG.replace("a - b", "a + b")
OLD_TESTS = "from calc import two\n\n\ndef test_two():\n    assert two() == 2\n"
NEW_TESTS = OLD_TESTS.replace("import two", "import add, two") + "\n\ndef test_add():\n    assert add(1, 2) == 3\n"


def git(folder: Path, *words: str) -> str:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["git", *words], cwd=folder, env={**ENV, "PATH": path}, check=True, capture_output=True)
    return done.stdout.decode()


@dataclass
class Project:
    folder: Path
    row: dict[str, Any]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A repository at its base commit, and the row that describes its issue."""
    folder = tmp_path / "testbed"
    (folder / "tests").mkdir(parents=True)
    (folder / "calc.py").write_text(BUG)
    (folder / "tests/test_calc.py").write_text(OLD_TESTS)
    (folder / "conftest.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    base = git(folder, "rev-parse", "HEAD").strip()

    def patch(path: str, text: str) -> str:
        before = (folder / path).read_text() if (folder / path).exists() else None
        (folder / path).write_text(text)
        git(folder, "add", "-A")
        found = git(folder, "diff", "--cached", base)
        git(folder, "reset", "-q", "--hard")
        assert before is None or (folder / path).read_text() == before
        return found

    row = {
        "instance_id": "acme__calc-1",
        "repo": "acme/calc",
        "base_commit": base,
        "problem_statement": "add() subtracts.",
        "version": "1.0",
        "patch": patch("calc.py", FIX),
        "test_patch": patch("tests/test_calc.py", NEW_TESTS)
        + patch("tests/test_more.py", "def test_more(): pass\n"),
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": ["tests/test_calc.py::test_two", "tests/test_more.py::test_more"],
        "hints_text": "not read",
    }
    return Project(folder, row)


@pytest.fixture
def imported(project: Project, tmp_path: Path) -> Callable[..., Path]:
    def make(settings: Settings = Settings(), **changes: Any) -> Path:  # noqa: B008
        source = tmp_path / "rows.jsonl"
        source.write_text(json.dumps({**project.row, **changes}) + "\n\n")
        (made,) = import_swebench(source, tmp_path / "tasks", settings, force=True)
        if isinstance(made, TaskError):
            raise made
        return made.path

    return make


def run(text: str, places: dict[str, Path | str]) -> subprocess.CompletedProcess[str]:
    """A script of a task, here, with the places of a VM moved."""
    for place, here in places.items():
        text = text.replace(place, str(here))
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "-c", text], env={**ENV, "PATH": path}, text=True, capture_output=True, check=False
    )


@pytest.fixture
def judge(project: Project, tmp_path: Path) -> Callable[..., dict[str, float] | None]:
    """What the task's verifier says after `work` has changed the repository, as in a rollout."""

    def judged(task: Path, work: Callable[[Path], None]) -> dict[str, float] | None:
        agent, fresh = tmp_path / "agent", tmp_path / "fresh"
        for copy in (agent, fresh):
            subprocess.run(["cp", "-a", project.folder, copy], check=True)
        logs, tests = tmp_path / "logs", tmp_path / "seen-tests"
        (logs / "verifier").mkdir(parents=True)
        subprocess.run(["cp", "-a", task / "tests", tests], check=True)
        grader = tests / "grade.py"
        grader.write_text(grader.read_text().replace("/logs/", f"{logs}/"))
        work(agent)
        (hook,) = load_task(task, strict=True).collect
        run(hook.command, {"/testbed": agent, "/logs/": f"{logs}/"})
        done = run(
            (tests / "test.sh").read_text(), {"/testbed": fresh, "/logs/": f"{logs}/", "/tests/": f"{tests}/"}
        )
        print(done.stdout, done.stderr)
        for name in ("reward.json", "reward.txt"):
            if (logs / "verifier" / name).exists():
                found = json.loads((logs / "verifier" / name).read_text())
                return found if isinstance(found, dict) else {"reward": found}
        return None

    return judged


def test_a_row_becomes_a_task_that_loads(imported, project):
    task = load_task(imported(), strict=True)
    assert (task.name, task.image) == ("acme__calc-1", "swebench/sweb.eval.x86_64.acme_1776_calc-1:latest")
    assert (task.workdir, task.verifier_class, task.verifier_declared) == ("/testbed", "separate", True)
    assert "add() subtracts." in task.instruction and "test_add" not in task.instruction
    assert task.metadata["base_commit"] == project.row["base_commit"]
    assert not any(project.row["patch"] in p.read_text() for p in (task.path / "tests").iterdir())


def solution_of(task: Path) -> Callable[[Path], None]:
    def work(agent: Path) -> None:
        script = (task / "solution/solve.sh").read_text()
        done = run(script, {"/testbed": agent, "/solution": task / "solution"})
        assert done.returncode == 0, done.stderr

    return work


def test_the_gold_patch_passes(imported, judge):
    task = imported()
    assert judge(task, solution_of(task)) == {"reward": 1, "fail_to_pass": 1.0, "pass_to_pass": 1.0}


def test_doing_nothing_fails(imported, judge):
    assert judge(imported(), lambda agent: None) == {"reward": 0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}


def write(path: str, text: str) -> Callable[[Path], None]:
    return lambda agent: (agent / path).write_text(text) and None


def test_a_commit_and_new_files_count_as_work(imported, judge):
    def work(agent: Path) -> None:
        (agent / "more.py").write_text(FIX)
        (agent / "calc.py").write_text("from more import add, two\n")
        (agent / "blob.bin").write_bytes(bytes(range(256)))
        git(agent, "add", "calc.py")
        git(agent, "commit", "-qm", "mine")

    assert judge(imported(), work)["reward"] == 1


@pytest.mark.parametrize(
    "work",
    [
        write("tests/test_calc.py", "def test_two(): pass\ndef test_add(): pass\n"),
        write("tests/test_more.py", "def test_more(): assert False\n"),
        write("calc.py", FIX.replace("return 2", "return 3")),
        write("calc.py", "this is no Python\n"),
        lambda agent: (agent / "tests/test_calc.py").unlink(),
        lambda agent: subprocess.run(["rm", "-rf", agent / ".git"], check=True),
        write(
            "conftest.py",
            "import atexit, os\n"
            "def pytest_sessionfinish():\n"
            "    print('PASSED tests/test_calc.py::test_add')\n"
            "    print('PASSED tests/test_calc.py::test_two')\n"
            "    print('PASSED tests/test_more.py::test_more', flush=True)\n"
            "    os._exit(3)\n",
        ),
    ],
    ids=["own tests", "spoilt new test", "broke another", "no syntax", "deleted tests", "no repository", "printed"],
)
def test_what_is_no_fix_scores_nothing(imported, judge, work):
    found = judge(imported(), work)
    assert found is not None and found["reward"] == 0


def test_tests_that_cannot_be_started_are_no_verdict(imported, judge):
    task = imported(Settings(test_command="no-such-program"))
    assert judge(task, solution_of(task)) is None


def test_a_test_patch_that_does_not_apply_is_no_verdict(imported, judge, project):
    other = project.row["test_patch"].replace("import two", "import three")
    task = imported(test_patch=other)
    assert judge(task, solution_of(task)) is None


def test_the_hook_starts_nothing_that_the_agents_git_brings(imported, judge, tmp_path):
    mark = tmp_path / "mark"

    def work(agent: Path) -> None:
        (agent / ".git/hooks/post-index-change").write_text(f"#!/bin/sh\ntouch {mark}\n")
        (agent / ".git/hooks/post-index-change").chmod(0o755)
        git(agent, "config", "diff.external", f"touch {mark}")
        git(agent, "config", "core.fsmonitor", f"touch {mark}")
        (agent / "calc.py").write_text(FIX)

    assert judge(imported(), work)["reward"] == 1
    assert not mark.exists() and "--no-ext-diff" in COLLECT


# --- rows ----------------------------------------------------------------------------------------


def test_image_names(imported):
    assert load_task(imported(docker_image="x/y:1"), strict=True).image == "x/y:1"
    template = Settings(image_template="reg/{instance_id}:{version}")
    assert load_task(imported(template, docker_image="x/y:1"), strict=True).image == "reg/acme__calc-1:1.0"
    with pytest.raises(ConfigError, match=r"unknown part \{name\}"):
        imported(Settings(image_template="{name}"))


@pytest.mark.parametrize(
    ("repo", "line"),
    [
        ("django/django", "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 'test_calc'"),
        ("sympy/sympy", "bin/test -C --verbose 'tests/test_calc.py'"),
        ("psf/requests", "pytest --no-header -rA --tb=no -p no:cacheprovider 'tests/test_calc.py'"),
    ],
)
def test_each_repository_runs_its_own_way(imported, repo, line):
    assert line in (imported(repo=repo) / "tests/test.sh").read_text()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"instance_id": "../up"}, "instance_id"),
        ({"base_commit": "main; rm -rf /"}, "base_commit"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "no list"}, "FAIL_TO_PASS"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"test_patch": ""}, "test_patch touches no file"),
    ],
)
def test_a_row_that_cannot_be_carried_over_is_named(imported, tmp_path, changes, named):
    with pytest.raises(TaskError) as refused:
        imported(**changes)
    assert named in refused.value.message and "rows.jsonl:1" in refused.value.message
    assert not (tmp_path / "tasks").exists() or list((tmp_path / "tasks").iterdir()) == []


def test_a_bad_row_does_not_keep_the_others(project, tmp_path):
    source = tmp_path / "rows.jsonl"
    rows = [
        project.row,
        {"instance_id": "bad"},
        {**project.row, "instance_id": "good-2", "problem_statement": "\u2028"},
    ]
    source.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    made = list(import_swebench(source, tmp_path / "tasks", Settings()))
    assert [type(m) for m in made] == [Imported, TaskError, Imported]
    (only,) = import_swebench(source, tmp_path / "some", Settings(), only=("good-2",))
    assert only.name == "good-2"
    with pytest.raises(ConfigError, match="no instance 'other'"):
        list(import_swebench(source, tmp_path / "some", Settings(), only=("other",)))
    source.write_text(json.dumps(rows))
    assert len(list(import_swebench(source, tmp_path / "list", Settings()))) == 3
    source.write_text("{}\n{")
    with pytest.raises(TaskError, match=r"rows\.jsonl:2 is not JSON"):
        list(import_swebench(source, tmp_path / "tasks", Settings()))


def test_files_of_a_patch():
    patch = (
        "diff --git a/old.py b/old.py\n--- a/old.py\n+++ b/old.py\n@@ -1 +1 @@\n-deleted file mode 1\n+x\n"
        "diff --git a/new.py b/new.py\nnew file mode 100644\n"
        "diff --git a/gone.py b/gone.py\ndeleted file mode 100644\n"
        "diff --git a/from.py b/to.py\nrename from from.py\nrename to to.py\n"
    )
    found = touched_by(patch)
    assert found.run == ("old.py", "new.py", "to.py")
    assert found.old == ("old.py", "gone.py", "from.py")
    assert found.new == ("new.py", "to.py")


# --- reading what tests printed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parser", "printed", "status", "reward"),
    [
        ("pytest", "PASSED a.py::x\nPASSED a.py::y[1 2]\n", 0, 1),
        ("pytest", "\x1b[32mPASSED\x1b[0m a.py::x\na.py::y[1 PASSED [ 50%]\n", 0, 1),
        ("pytest", "PASSED a.py::x\nFAILED a.py::y[1 2] - boom\n", 1, 0),
        ("pytest", "PASSED a.py::x\nPASSED a.py::y[1\n", 1, 0),
        ("pytest", "PASSED a.py::x\nPASSED a.py::y[1\nFAILED a.py::z - other\n", 1, 1),
        ("pytest", "PASSED a.py::x\nSKIPPED a.py::y[1\n", 0, 1),
        ("pytest", "SKIPPED a.py::x\nPASSED a.py::y[1\n", 0, 0),
        ("pytest", "", 0, 0),
        ("unittest", "a.py::x ... ok\na.py::y[1 ... skipped 'why'\n", 0, 1),
        ("unittest", "a.py::x ... printed\nok\na.py::y[1 ... ok", 0, 1),
        ("unittest", "a.py::x ... ok\na.py::y[1 ... ok\nFAIL: a.py::x\n", 1, 0),
        ("sympy", "test_x ok\n", 0, 0),
    ],
)
def test_reading_what_tests_printed(capsys, parser, printed, status, reward):
    expected = {"parser": parser, "fail_to_pass": ["a.py::x"], "pass_to_pass": ["a.py::y[1"]}
    assert grade(expected, printed.split("\n"), status)["reward"] == reward


def test_sympys_own_runner(capsys):
    expected = {"parser": "sympy", "fail_to_pass": ["test_a"], "pass_to_pass": ["test_b", "test_c"]}
    printed = "sympy/a.py[3] \ntest_a ok\ntest_b f\ntest_c ok   [OK]\n"
    assert grade(expected, printed.split("\n"), 0)["reward"] == 1
    printed += "____ sympy/a.py:test_c ____\n"
    assert grade(expected, printed.split("\n"), 1)["reward"] == 0


# --- predictions ---------------------------------------------------------------------------------


def test_predictions_become_a_job_with_an_agent_for_each_model(imported, project, tmp_path):
    imported()
    rows = [
        {"instance_id": "acme__calc-1", "model_name_or_path": "a/b", "model_patch": project.row["patch"]},
        {"instance_id": "acme__calc-1", "model_name_or_path": "empty", "model_patch": None},
        {"instance_id": "elsewhere", "model_name_or_path": "empty", "model_patch": "x"},
    ]
    source = tmp_path / "predictions.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    job = write_predictions(source, tmp_path / "tasks", ["acme__calc-1"])
    plan = plan_new(load_job_file(job), job.parent, tmp_path / "jobs")
    assert [(a.name, a.kind) for a in plan.agents] == [("a/b", "patch"), ("empty", "patch")]
    assert [t.name for t in plan.tasks] == ["acme__calc-1"]
    assert plan.agents[0].digest != plan.agents[1].digest
    assert (tmp_path / "tasks/predictions/a_b/acme__calc-1.patch").read_text() == project.row["patch"]
    with pytest.raises(ConfigError, match="exists"):
        write_predictions(source, tmp_path / "tasks", ["acme__calc-1"])
    source.write_text(source.read_text() + "\n" + json.dumps(rows[0]))
    with pytest.raises(TaskError, match="second prediction"):
        write_predictions(source, tmp_path / "tasks", ["acme__calc-1"], force=True)
    assert yaml.safe_load(job.read_text())["name"] == "predictions"
