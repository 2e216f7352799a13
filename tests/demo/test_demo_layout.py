"""What can be said of the demo tasks without running them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dayfly.job import load_job_file
from dayfly.model import Machine, Task, VerifierClass
from dayfly.tasks import load_task

DEMO = Path(__file__).parents[2] / "examples" / "demo"
NAMES = sorted(path.name for path in (DEMO / "tasks").iterdir())


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {name: load_task(DEMO / "tasks" / name, strict=True) for name in NAMES}


def test_every_task_loads_strictly_and_leaves_nothing_to_remark(tasks: dict[str, Task]) -> None:
    assert len(tasks) == 12
    assert {task.name for task in tasks.values()} == set(NAMES)
    assert [task.warnings for task in tasks.values() if task.warnings] == []


def test_two_machine_shapes_are_enough(tasks: dict[str, Task]) -> None:
    small = Machine(cpus=1, memory_mib=512, storage_mib=1024)
    assert {task.machine for task in tasks.values()} == {small, small.model_copy(update={"cpus": 2})}


def test_kinds_that_the_demo_promises(tasks: dict[str, Task]) -> None:
    assert {task.verifier_class for task in tasks.values()} == set(VerifierClass)
    assert any(task.agent_user == "dev" for task in tasks.values())
    assert any(task.verifier_command for task in tasks.values())
    assert all(task.solution is not None and task.image for task in tasks.values())


@pytest.mark.parametrize("name", NAMES)
def test_programs_can_be_started(name: str) -> None:
    task = DEMO / "tasks" / name
    for path in [task / "solution/solve.sh", *task.glob("tests/test.sh"), *task.glob("environment/*.sh")]:
        assert path.read_text().startswith("#!/bin/")
        assert path.stat().st_mode & 0o100 or path.name == "setup.sh"


@pytest.mark.parametrize("name", NAMES)
def test_artifacts_are_single_files_that_no_tool_reads_by_itself(name: str, tasks: dict[str, Task]) -> None:
    for artifact in tasks[name].artifacts:
        assert re.fullmatch(r"/app/[\w.-]+", artifact.source)
        assert not re.search(r"conftest|\.ini|\.cfg|\.pth|sitecustomize|/\.", artifact.source)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_answer_is_in_the_agents_files(name: str) -> None:
    task = DEMO / "tasks" / name
    given = {path.read_bytes() for path in task.glob("environment/**/*") if path.is_file()}
    solution = {path.read_bytes() for path in task.glob("solution/**/*") if path.is_file()}
    assert not given & solution
    sealed = {path.name for path in task.glob("tests/*") if path.read_bytes() in given}
    assert sealed <= {"orders.csv", "access.log", "gateway.py"}, "only inputs may be on both sides"


def test_the_grading_module_is_the_same_everywhere() -> None:
    copies = list(DEMO.glob("tasks/*/tests/grading.py"))
    assert len(copies) == 10
    assert len({copy.read_bytes() for copy in copies}) == 1


def test_everything_is_text_of_moderate_size() -> None:
    for path in DEMO.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            assert len(data) < 64 * 1024
            assert b"\0" not in data and data.decode()


@pytest.mark.parametrize("name", ["job.yaml", "job-worse.yaml"])
def test_job_files_name_tasks_and_files_that_exist(name: str) -> None:
    job = load_job_file(DEMO / name)
    assert all((DEMO / path).is_dir() for path in job.tasks)
    brought = [file for agent in job.agents for file in agent.options.get("files", {})]
    assert brought and all((DEMO / file).is_file() for file in brought)


@pytest.mark.parametrize("plan", ["plan", "plan-worse"])
def test_plans_name_every_task_and_only_functions_that_exist(plan: str) -> None:
    folder = DEMO / "agents/scripted"
    lines = [line.split() for line in (folder / plan).read_text().splitlines() if not line.startswith("#")]
    functions = set(re.findall(r"^(\w+)\(\) \{", (folder / "solve.sh").read_text(), re.MULTILINE))
    assert sorted(task.replace("_", "-") for task, _ in lines) == NAMES
    assert {f"{mode}_{task}" for task, mode in lines} <= functions
