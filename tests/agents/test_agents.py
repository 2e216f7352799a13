"""The built-in agents on the fake VM, and what makes an agent version."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.agents import CommandAgent, FunctionAgent, NoOpAgent, OracleAgent, agent_digest
from dayfly.errors import AgentError, ConfigError, GuestLost, GuestRefused, ProviderError
from dayfly.evidence import RolloutFolder
from dayfly.model import AgentSpec, Disk, ExecResult, ImageConfig, Machine, Task
from dayfly.protocols import AgentResult, StartOptions
from dayfly.registry import make_agent
from dayfly.tasks import load_task
from dayfly.testing import FakeHypervisor

pytestmark = pytest.mark.anyio

TOML = """\
[environment]
docker_image = "none"
[agent]
user = "dev"
[solution]
env = { ANSWER = "${ANSWER:-42}" }
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    folder = tmp_path / "task"
    for name, text in {
        "task.toml": TOML,
        "instruction.md": "Write {x} to it.\n",
        "solution/solve.sh": "#!fake\nprint working\nwrite /app/out done\n",
        "solution/notes": "n",
        "tests/test.sh": "#!fake\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_task(folder, strict=True)


@pytest.fixture
def record(tmp_path: Path) -> RolloutFolder:
    return RolloutFolder(tmp_path / "work")


class Recording:
    """A VM that passes calls on and remembers how programs were run."""

    def __init__(self, vm: Any) -> None:
        self.vm, self.calls = vm, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vm, name)

    async def exec(self, argv: Any, **options: Any) -> ExecResult:
        self.calls.append((list(argv), options))
        return await self.vm.exec(argv, **options)


@pytest.fixture
def vm_of(tmp_path: Path) -> Callable[[], Any]:
    @asynccontextmanager
    async def start():
        disk = Disk(tmp_path / "none", "sha256:0", ImageConfig(workdir="/app"))
        async with FakeHypervisor().start(
            disk, Machine(), StartOptions(vm_id="v", writable=tmp_path / "disk.json")
        ) as vm:
            yield Recording(vm)

    return start


async def content(vm: Any, path: str, tmp_path: Path) -> bytes:
    await vm.get(path, tmp_path / "got")
    return (tmp_path / "got").read_bytes()


# --- oracle and no-op ----------------------------------------------------------------------------


async def test_the_oracle_applies_the_solution_as_the_agents_user(task, record, vm_of, tmp_path):
    async with vm_of() as vm:
        result = await OracleAgent({"ANSWER": "7"}).run(vm, task, record, 30)
        assert await content(vm, "/app/out", tmp_path) == b"done\n"
        assert await content(vm, "/solution/notes", tmp_path) == b"n"
    assert result == AgentResult(exit_code=0)
    ((argv, options),) = vm.calls
    assert argv == ["/solution/solve.sh"] and options["user"] == "dev" and options["timeout_s"] == 30
    assert options["env"]["ANSWER"] == "7"
    assert (record.folder / "agent/stdout.txt").read_bytes() == b"working\n"
    assert (record.folder / "agent/stderr.txt").read_bytes() == b""


async def test_an_oracle_without_a_solution_is_an_agent_error(task, record, vm_of):
    async with vm_of() as vm:
        with pytest.raises(AgentError, match="solve"):
            await OracleAgent().run(vm, task.model_copy(update={"solution": None}), record, 30)


async def test_the_no_op_touches_nothing(task, record, vm_of):
    async with vm_of() as vm:
        before = await vm.changes()
        assert await NoOpAgent().run(vm, task, record, 30) == AgentResult(exit_code=0)
        assert await vm.changes() == before and vm.calls == []


# --- command -------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., CommandAgent]:
    def make(script: str, **options: Any) -> CommandAgent:
        (tmp_path / "agent.fake").write_text(f"#!fake\n{script}\n")
        given = {"argv": ["/opt/agent"], "files": {"agent.fake": "/opt/agent"}, **options}
        return CommandAgent.from_options(given, tmp_path)

    return make


async def test_a_command_brings_its_files_and_gets_the_instruction(program, task, record, vm_of, tmp_path):
    agent = program("write out x\nexit 4", argv=["/opt/agent", "-i={instruction}", "{instruction_file}", "{other}"])
    async with vm_of() as vm:
        result = await agent.run(vm, task, record, 30)
        assert await content(vm, "/logs/agent/instruction.md", tmp_path) == b"Write {x} to it.\n"
    ((argv, options),) = vm.calls
    assert argv == ["/opt/agent", "-i=Write {x} to it.\n", "/logs/agent/instruction.md", "{other}"]
    assert options["env"] == {"DAYFLY_INSTRUCTION_FILE": "/logs/agent/instruction.md"}
    assert options["user"] == "dev" and options["timeout_s"] == 30 and options["leave_children"]
    assert result.exit_code == 4


async def test_an_instruction_that_looks_like_a_placeholder_stays_as_it_is(program, task, record, vm_of):
    odd = task.model_copy(update={"instruction": "say {instruction_file} and {instruction}"})
    async with vm_of() as vm:
        await program("", argv=["/opt/agent", "<{instruction}>"]).run(vm, odd, record, 30)
    assert vm.calls[0][0][1] == "<say {instruction_file} and {instruction}>"


async def test_secrets_reach_the_program_and_no_file(task, record, vm_of, tmp_path):
    (tmp_path / "a").write_text("#!fake\n")
    agent = CommandAgent.from_options(
        {"argv": ["/a"], "files": {"a": "/a"}, "env": {"KEY": "${KEY}"}, "user": "root", "timeout_s": 5}, tmp_path
    )
    agent._host_env = {"KEY": "s3cret"}
    async with vm_of() as vm:
        await agent.run(vm, task, record, 30)
    options = vm.calls[0][1]
    assert options["env"]["KEY"] == "s3cret" and options["user"] == "root" and options["timeout_s"] == 5
    assert b"s3cret" not in b"".join(p.read_bytes() for p in record.folder.rglob("*") if p.is_file())


async def test_an_agents_own_limit_never_exceeds_the_tasks(program, task, record, vm_of):
    async with vm_of() as vm:
        await program("", timeout_s=100).run(vm, task, record, 30)
    assert vm.calls[0][1]["timeout_s"] == 30


async def test_out_of_time_keeps_what_was_printed(program, task, record, vm_of):
    async with vm_of() as vm:
        result = await program("print so far\nsleep 60").run(vm, task, record, 0.05)
    assert result.timed_out and result.exit_code is None
    assert (record.folder / "agent/stdout.txt").read_bytes() == b"so far\n"


async def test_a_killed_agent_did_not_end_well(program, task, record, vm_of):
    async with vm_of() as vm:
        result = await program("oom").run(vm, task, record, 30)
    assert result.exit_code == 137 and result.oom_killed and "signal 9" in result.message


@pytest.mark.parametrize(
    ("argv", "cause"),
    [(["/opt/absent"], "agent_not_startable"), (["/opt/agent", "x" * 200_000], "argument_too_long")],
)
async def test_a_program_that_cannot_start_is_an_agent_error(program, task, record, vm_of, argv, cause):
    async with vm_of() as vm:
        with pytest.raises(AgentError) as caught:
            await program("", argv=argv).run(vm, task, record, 30)
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "argv"),
        ({"argv": []}, "argv"),
        ({"argv": "ls -l"}, "argv"),
        ({"argv": ["a"], "enviroment": {}}, "enviroment"),
        ({"argv": ["a"], "env": {"A": 1}}, "env.A"),
        ({"argv": ["a"], "files": {"absent": "/a"}}, "absent"),
        ({"argv": ["a"], "files": {"x": "relative"}}, "absolute"),
        ({"argv": ["a"], "timeout_s": 0}, "timeout_s"),
        ({"argv": ["a"], "instruction_file": "/a/../b"}, "instruction_file"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        CommandAgent.from_options(options, tmp_path)


def test_a_misspelt_option_gets_a_suggestion(tmp_path):
    with pytest.raises(ConfigError) as caught:
        CommandAgent.from_options({"argv": ["a"], "file": {}}, tmp_path)
    assert caught.value.hint == "did you mean 'files'?"
    for kind in (OracleAgent, NoOpAgent):
        with pytest.raises(ConfigError, match="no option"):
            kind.from_options({"argv": []}, tmp_path)


# --- function ------------------------------------------------------------------------------------


async def test_a_function_works_on_the_vm(task, record, vm_of, tmp_path):
    async def agent(vm: Any, task: Task) -> None:
        await vm.put(task.instruction.encode(), "/app/out")

    async with vm_of() as vm:
        assert await FunctionAgent(agent).run(vm, task, record, 30) == AgentResult()
        assert await content(vm, "/app/out", tmp_path) == b"Write {x} to it.\n"


async def test_a_function_may_say_how_it_ended(task, record, vm_of):
    async def agent(vm: Any, task: Task) -> AgentResult:
        return AgentResult(exit_code=2, tokens_in=10)

    async with vm_of() as vm:
        assert await FunctionAgent(agent).run(vm, task, record, 30) == AgentResult(exit_code=2, tokens_in=10)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("broken"), AgentError),
        (SystemExit(0), AgentError),
        (GuestRefused("no such program"), AgentError),
        (GuestLost("gone"), GuestLost),
        (ProviderError("429"), ProviderError),
        (ExceptionGroup("two", [ValueError("x"), GuestLost("gone")]), GuestLost),
        (ExceptionGroup("two", [ValueError("x"), KeyError("y")]), AgentError),
    ],
)
async def test_what_a_function_raises_is_kept_and_named(task, record, vm_of, raised, seen):
    async def agent(vm: Any, task: Task) -> None:
        raise raised

    async with vm_of() as vm:
        with pytest.raises(seen):
            await FunctionAgent(agent).run(vm, task, record, 30)
    assert type(raised).__name__.encode() in (record.folder / "agent/traceback.txt").read_bytes()


async def test_a_function_is_out_of_time(task, record, vm_of):
    async def agent(vm: Any, task: Task) -> None:
        await anyio.sleep_forever()

    async with vm_of() as vm:
        assert (await FunctionAgent(agent).run(vm, task, record, 0.05)).timed_out


async def test_a_cancelled_rollout_cancels_the_function(task, record, vm_of):
    started = anyio.Event()

    async def agent(vm: Any, task: Task) -> None:
        started.set()
        await anyio.sleep_forever()

    async with vm_of() as vm:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(FunctionAgent(agent).run, vm, task, record, 3600.0)
                await started.wait()
                group.cancel_scope.cancel()
    assert not (record.folder / "agent/traceback.txt").exists()


async def test_a_function_that_returns_something_odd_is_an_agent_error(task, record, vm_of):
    async def agent(vm: Any, task: Task) -> Any:
        return "done"

    async with vm_of() as vm:
        with pytest.raises(AgentError, match="returned str"):
            await FunctionAgent(agent).run(vm, task, record, 30)


def test_functions_by_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def agent(vm, task): ...\n"
        "class Caller:\n    async def __call__(self, vm, task): ...\n"
        "caller = Caller()\n"
        "def blocking(vm, task): ...\n"
    )
    assert FunctionAgent.from_options({"function": "mine.py:agent"}, tmp_path)
    assert FunctionAgent.from_options({"function": "mine.py:caller"}, tmp_path)
    for where, words in {
        "mine.py:blocking": "not async",
        "mine.py:absent": "no function",
        "other.py:agent": "no file",
        "no.such.module:agent": "cannot be imported",
        "mine": "names no function",
    }.items():
        with pytest.raises(ConfigError, match=words):
            FunctionAgent.from_options({"function": where}, tmp_path)


# --- the digest ----------------------------------------------------------------------------------


def command_digest(base: Path, **options: Any) -> str:
    given = {"argv": ["/a"], "files": {"a": "/a"}, **options}
    return agent_digest(AgentSpec(name="n", kind="command", options=given), base)


def test_an_agent_version_is_its_options_and_the_content_of_its_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "x").write_text("content")
    first = command_digest(tmp_path / "one")
    assert first.startswith("sha256:") and first == command_digest(tmp_path / "two")
    assert first == command_digest(tmp_path, files={"one/a": "/a"})  # where it lies on the host is no part of it
    assert first != command_digest(tmp_path / "one", env={"A": "1"})
    assert first != command_digest(tmp_path / "one", files={"a": "/b"})
    (tmp_path / "two" / "a" / "x").write_text("other")
    assert first != command_digest(tmp_path / "two")
    (tmp_path / "one" / "a" / "x").chmod(0o755)
    assert first != command_digest(tmp_path / "one")


def test_the_name_is_no_part_of_a_version_and_the_kind_is(tmp_path):
    digests = {
        agent_digest(AgentSpec(name=name, kind=kind), tmp_path)
        for name, kind in (("a", "oracle"), ("b", "oracle"), ("a", "no-op"))
    }
    assert len(digests) == 2


def test_a_functions_source_is_a_part_of_it(tmp_path):
    spec = AgentSpec(name="f", kind="function", options={"function": "mine.py:agent"})
    digests = set()
    for body in ("...", "pass", "..."):
        (tmp_path / "mine.py").write_text(f"async def agent(vm, task): {body}\n")
        digests.add(agent_digest(spec, tmp_path))
    assert len(digests) == 2


def test_a_secret_is_a_part_by_reference_only(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("")
    monkeypatch.setenv("KEY", "one")
    first = command_digest(tmp_path, env={"KEY": "${KEY}"})
    monkeypatch.setenv("KEY", "two")
    assert first == command_digest(tmp_path, env={"KEY": "${KEY}"})


def test_missing_files_and_odd_options_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        command_digest(tmp_path)
    odd = AgentSpec(name="o", kind="some.plugin:Agent", options={"x": object()})
    with pytest.raises(ConfigError, match="plain data"):
        agent_digest(odd, tmp_path)


def test_the_registry_finds_every_built_in_agent(tmp_path):
    (tmp_path / "mine.py").write_text("async def agent(vm, task): ...\n")
    for kind, options in {
        "oracle": {},
        "no-op": {},
        "command": {"argv": ["a"]},
        "function": {"function": "mine.py:agent"},
    }.items():
        spec = AgentSpec(name=kind, kind=kind, options=options)
        assert make_agent(spec, tmp_path)
        json.dumps(spec.model_dump())
        assert agent_digest(spec, tmp_path)
