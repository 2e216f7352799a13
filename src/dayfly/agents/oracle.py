"""The oracle applies the reference solution, and the no-op does nothing: together they test the task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from dayfly.agents.options import parse_options
from dayfly.agents.program import run_program
from dayfly.errors import AgentError
from dayfly.model import Frozen, Task
from dayfly.protocols import AgentResult, Record, Vm
from dayfly.tasks import resolve_env, script_command, select

SOLUTION = "/solution"


class NoOptions(Frozen):
    pass


class OracleAgent:
    """Puts solution/ into /solution and runs solve.sh as the task's agent user, in the working directory."""

    def __init__(self, host_env: Mapping[str, str] | None = None) -> None:
        """`host_env` fills `${VAR}` in the task's solution.env; default: this process's environment."""
        self._host_env = host_env

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base_dir: Path) -> OracleAgent:
        parse_options(NoOptions, options, "oracle")
        return cls()

    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        """See `protocols.Agent`. Raises `AgentError` when the task has no solution/solve.sh."""
        if task.solution is None:
            raise AgentError(f"task {task.name} has no solution/solve.sh", hint="add one", cause="no_solution")
        folder = task.solution
        solution = await anyio.to_thread.run_sync(lambda: select(folder, task=task.path, program="solve.sh"))
        if task.step is not None:
            await vm.remove(SOLUTION)  # the solution of the step before
        await vm.put(solution.source, SOLUTION, exclude=solution.excludes, meta=solution.meta)
        host_env = os.environ if self._host_env is None else self._host_env
        env = {"DEBIAN_FRONTEND": "noninteractive", **resolve_env(task.solution_env, host_env)}
        command = script_command(f"{SOLUTION}/solve.sh", folder / "solve.sh")
        return await run_program(vm, record, command, env=env, user=task.agent_user, timeout_s=timeout_s)


class NoOpAgent:
    """Does nothing. A task that it passes asks for no work."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base_dir: Path) -> NoOpAgent:
        parse_options(NoOptions, options, "no-op")
        return cls()

    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        return AgentResult(exit_code=0)
