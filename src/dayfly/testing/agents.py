"""What every agent must do: `check_agent`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio

from dayfly.errors import AgentError, GuestLost, ProviderError
from dayfly.evidence import RolloutFolder
from dayfly.model import Task
from dayfly.protocols import Agent, AgentResult, Vm
from dayfly.tasks import read_task_files
from dayfly.testing.samples import expect
from dayfly.testing.vms import CHECK_TIMEOUT_S, PLACE, Bench

STOP_GRACE_S = 30.0
"""As in a rollout: how long after its limit an agent is waited for."""


async def check_agent(
    make_agent: Callable[[], Agent],
    bench: Bench,
    task: Task,
    *,
    timeout_s: float = 60.0,
    grace_s: float = STOP_GRACE_S,
    endless: bool = False,
) -> None:
    """Raises `AssertionError` with a sentence for the first rule that does not hold.

    The agent works on `task` in VMs of `bench`, for at most `timeout_s` seconds, and ends within `grace_s` more
    or after it is cancelled. `endless` says that it would go on for ever, so that its limit is what ends it.
    """
    try:
        with anyio.fail_after(CHECK_TIMEOUT_S):
            await _works_within_its_bounds(make_agent(), bench, task, (timeout_s, grace_s), endless)
            await _is_not_an_agent_error_when_the_vm_is_lost(make_agent(), bench, task, timeout_s)
            await _can_be_cancelled(make_agent(), bench, task, (timeout_s, grace_s))
    except TimeoutError as error:
        raise AssertionError(f"the agent did not end within {CHECK_TIMEOUT_S:g} s") from error
    bench.expect_nothing_left("after the checks of an agent")


def _record(bench: Bench, name: str) -> RolloutFolder:
    return RolloutFolder(bench.folder / f"{name}-{len(bench.ids)}")


async def _works_within_its_bounds(
    agent: Agent, bench: Bench, task: Task, bounds: tuple[float, float], endless: bool
) -> None:
    record, (limit_s, grace_s) = _record(bench, "work"), bounds
    async with bench.vm() as vm:
        result: AgentResult | None = None
        with anyio.move_on_after(limit_s + grace_s) as overrun, suppress(AgentError, ProviderError):
            result = await agent.run(vm, task, record, limit_s)
        expect(
            not overrun.cancelled_caught, f"the agent did not end within its {limit_s:g} s and {grace_s:g} s more"
        )
        if result is not None:
            _check_result(result, endless)
        script = await bench.bring(vm, "alive", bench.programs.say.format("alive"))
        expect((await vm.exec([script])).ok, "after the agent the VM cannot be judged")
    strays = [p for p in _files_below(record.folder) if not p.startswith("agent/")]
    expect(not strays, f"the agent keeps evidence outside of agent/: {strays}")
    expect(read_task_files(task.path).digest == task.digest, "the agent changed the task's own files")


def _check_result(result: AgentResult, endless: bool) -> None:
    expect(isinstance(result, AgentResult), f"run() returned a {type(result).__name__}, not an AgentResult")
    expect(result.timed_out == endless, f"timed_out is {result.timed_out} for an agent that is endless: {endless}")
    for name in ("tokens_in", "tokens_out", "cost_usd"):
        used = getattr(result, name)
        expect(used is None or used >= 0, f"{name} is {used}; unknown is None")


def _files_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())


async def _is_not_an_agent_error_when_the_vm_is_lost(
    agent: Agent, bench: Bench, task: Task, limit_s: float
) -> None:
    """A lost VM is an infrastructure fault, and must never be counted against the agent."""
    async with bench.vm() as vm:
        await vm.stop()
        try:
            await agent.run(vm, task, _record(bench, "lost"), limit_s)
        except GuestLost:
            return
        except AgentError as error:
            raise AssertionError(f"the loss of the VM is reported as the agent's fault: {error}") from error
    # Returning is right for an agent that does not use the VM, as the no-op.


async def _can_be_cancelled(agent: Agent, bench: Bench, task: Task, bounds: tuple[float, float]) -> None:
    limit_s, grace_s = bounds
    async with bench.vm() as vm:
        with anyio.move_on_after(0.2) as scope, suppress(AgentError, ProviderError):
            await agent.run(vm, task, _record(bench, "cancelled"), limit_s)
        late_s = anyio.current_time() - scope.deadline
        expect(late_s < grace_s, f"the agent went on for {late_s:.0f} s after it was cancelled")
        await _still_works(bench, vm)


async def _still_works(bench: Bench, vm: Vm) -> None:
    await vm.put(b"", f"{PLACE}/after")
    expect(await bench.read(vm, f"{PLACE}/after") == b"", "after a cancelled agent the VM is of no use")
