"""Every agent under `check_agent`, on fake and on real VMs; and agents that break a rule."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from dayfly.agents import CommandAgent, FunctionAgent, NoOpAgent, OracleAgent
from dayfly.errors import AgentError, GuestLost
from dayfly.protocols import AgentResult
from dayfly.testing import check_agent


def command_agent(bench, *statements: str) -> CommandAgent:
    """An agent whose program is a script of `statements`."""
    (bench.folder / "program").write_bytes(bench.programs.script(*statements))
    (bench.folder / "program").chmod(0o755)
    options = {"argv": ["/agent/program", "{instruction}"], "files": {"program": "/agent/program"}}
    return CommandAgent.from_options(options, bench.folder)


async def write_result(vm, task):
    await vm.put(b"done\n", "/contract/result")


async def wait_for_ever(vm, task):
    await anyio.sleep_forever()


AGENTS = {
    "oracle": lambda bench: OracleAgent(),
    "no-op": lambda bench: NoOpAgent(),
    "command": lambda bench: command_agent(bench, bench.programs.say.format("working")),
    "command that fails": lambda bench: command_agent(bench, bench.programs.exit.format(3)),
    "function": lambda bench: FunctionAgent(write_result),
}
ENDLESS = {
    "command": lambda bench: command_agent(bench, bench.programs.sleep.format(600)),
    "function": lambda bench: FunctionAgent(wait_for_ever),
}


def solvable(make_task, bench):
    p = bench.programs
    return make_task(p, [p.write.format("/contract/result", "done")], [p.exit.format(0)])


@pytest.mark.parametrize("name", AGENTS)
def test_agent(name, bench, make_task):
    task = solvable(make_task, bench)
    anyio.run(check_agent, lambda: AGENTS[name](bench), bench, task)


@pytest.mark.parametrize("name", ENDLESS)
def test_agent_without_end(name, bench, make_task):
    task = solvable(make_task, bench)
    anyio.run(partial(check_agent, timeout_s=2.0, endless=True), lambda: ENDLESS[name](bench), bench, task)


class Broken:
    """An agent that works as one of its methods says."""

    def __init__(self, work):
        self.work = work

    async def run(self, vm, task, record, timeout_s):
        return await self.work(vm, task, record)


async def writes_elsewhere(vm, task, record):
    record.write("verifier/reward.txt", b"1")
    return AgentResult()


async def blames_itself(vm, task, record):
    try:
        await vm.put(b"", "/x")
    except GuestLost as error:
        raise AgentError("the program failed") from error
    return AgentResult()


async def goes_on(vm, task, record):
    with anyio.CancelScope(shield=True):
        await anyio.sleep(1.5)
    return AgentResult()


async def kills_its_vm(vm, task, record):
    await vm.stop()
    return AgentResult()


async def edits_the_task(vm, task, record):
    (task.path / "instruction.md").write_text("something easier")
    return AgentResult()


@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (writes_elsewhere, AssertionError, "outside of agent/"),
        (blames_itself, AssertionError, "agent's fault"),
        (goes_on, AssertionError, "after it was cancelled"),
        (kills_its_vm, GuestLost, "gone"),
        (edits_the_task, AssertionError, "task's own files"),
    ],
)
def test_a_broken_agent_fails_the_suite(work, error, words, fake_bench, make_task):
    task = solvable(make_task, fake_bench)
    with pytest.raises(error, match=words):
        anyio.run(partial(check_agent, grace_s=1.0), lambda: Broken(work), fake_bench, task)
