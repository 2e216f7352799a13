"""An agent that is a program in the VM, with the files it needs brought along."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
from pydantic import AfterValidator, Field, FiniteFloat

from dayfly.agents.offers import TRAJECTORY_FILE, offers_env
from dayfly.agents.options import parse_options
from dayfly.agents.program import run_program
from dayfly.errors import ConfigError
from dayfly.model import Frozen, McpServer, Task
from dayfly.protocols import AgentResult, Record, Vm
from dayfly.tasks import resolve_env, select

INSTRUCTION_VARIABLE = "DAYFLY_INSTRUCTION_FILE"
DEFAULT_INSTRUCTION_FILE = "/logs/agent/instruction.md"


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not an absolute path in the VM without `..`")
    return path


GuestPath = Annotated[str, AfterValidator(_absolute)]


class CommandOptions(Frozen):
    """Options of the agent `command`."""

    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments. `{instruction}` becomes the text, `{instruction_file}` its path in the VM."""
    files: dict[str, GuestPath] = {}
    """File or folder on the host (relative to the job file) → its path in the VM."""
    env: dict[str, str] = {}
    """Added to the environment; a value `${VAR}` or `${VAR:-default}` is taken from the host, and never stored."""
    user: str | None = None
    """User in the VM; default: the task's agent user."""
    timeout_s: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Seconds; never more than the task and the job allow."""
    instruction_file: GuestPath = DEFAULT_INSTRUCTION_FILE
    """Where the instruction is put; the program finds the path in DAYFLY_INSTRUCTION_FILE."""
    skills_dir: str | None = None
    """Folder in the VM that DAYFLY_SKILLS_DIR names; default: the task's."""
    mcp_servers: tuple[McpServer, ...] | None = None
    """Tool servers that DAYFLY_MCP_SERVERS describes, as JSON; default: the task's. An empty list: none."""


class CommandAgent:
    """Puts files and the instruction into the VM and runs a program there."""

    def __init__(self, options: CommandOptions, base_dir: Path, host_env: Mapping[str, str] | None = None) -> None:
        """Host paths are relative to `base_dir`. Raises `ConfigError` for a file that is not there."""
        self.options = options
        self._files = {host: base_dir / Path(host).expanduser() for host in options.files}
        self._host_env = host_env
        for host, path in self._files.items():
            if not path.exists():
                raise ConfigError(
                    f"the agent's file {host!r} does not exist ({path})",
                    hint="paths are relative to the job file",
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base_dir: Path) -> CommandAgent:
        return cls(parse_options(CommandOptions, options, "command"), base_dir)

    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        """See `protocols.Agent`."""
        options = self.options
        for host, guest in options.files.items():
            path = self._files[host]
            chosen = await anyio.to_thread.run_sync(select, path)
            await vm.put(chosen.source, guest, exclude=chosen.excludes, meta=chosen.meta)
        await vm.put(task.instruction.encode(), options.instruction_file, mode=0o644)
        if task.trajectory is not None:
            await vm.put(task.trajectory, TRAJECTORY_FILE, mode=0o644)
        return await run_program(
            vm,
            record,
            [self._filled(word, task) for word in options.argv],
            env=self._env(task),
            user=options.user or task.agent_user,
            timeout_s=min(timeout_s, options.timeout_s or timeout_s),
        )

    def _env(self, task: Task) -> dict[str, str]:
        options = self.options
        host_env = os.environ if self._host_env is None else self._host_env
        servers = task.mcp_servers if options.mcp_servers is None else options.mcp_servers
        offered = offers_env(options.skills_dir or task.skills_dir, servers, task.trajectory, host_env)
        return {
            INSTRUCTION_VARIABLE: options.instruction_file,
            **offered,
            **resolve_env(options.env, host_env),
        }

    def _filled(self, word: str, task: Task) -> str:
        # One pass each and no str.format: an argument may hold other braces, and so may an instruction.
        before, found, after = word.partition("{instruction}")
        parts = (before, after) if found else (word,)
        return task.instruction.join(p.replace("{instruction_file}", self.options.instruction_file) for p in parts)
