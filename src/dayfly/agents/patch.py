"""An agent whose work is there already: a patch for each task, as a benchmark's predictions are handed in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dayfly.agents.options import parse_options
from dayfly.agents.program import run_program
from dayfly.errors import AgentError, ConfigError
from dayfly.model import Frozen, Task
from dayfly.protocols import AgentResult, Record, Vm

PLACE = "/tmp/prediction.patch"
APPLY = f"""\
git apply --whitespace=nowarn {PLACE} || git apply --whitespace=nowarn --3way {PLACE} ||
    patch --batch --forward --fuzz=5 -p1 -i {PLACE}
status=$?
rm -f {PLACE}
exit $status
"""
ANY_OWNER = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


class PatchOptions(Frozen):
    """Options of the agent `patch`."""

    folder: str
    """Folder on the host (relative to the job file) with a file TASK.patch for each task."""


class PatchAgent:
    """Applies `folder`/TASK.patch in the working directory; an empty one changes nothing."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` when the folder is not there."""
        if not folder.is_dir():
            raise ConfigError(
                f"the agent's folder {folder} does not exist", hint="paths are relative to the job file"
            )
        self._folder = folder

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base_dir: Path) -> PatchAgent:
        return cls(base_dir / Path(parse_options(PatchOptions, options, "patch").folder).expanduser())

    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        """See `protocols.Agent`. Raises `AgentError` when there is no patch for the task."""
        path = self._folder / f"{task.name.replace('/', '__')}.patch"
        if not path.is_file():
            raise AgentError(
                f"there is no patch for task {task.name}", hint=f"it would be {path.name}", cause="no_patch"
            )
        patch = path.read_bytes()
        if not patch.strip():
            return AgentResult(exit_code=0, message="the patch is empty")
        await vm.put(patch if patch.endswith(b"\n") else patch + b"\n", PLACE, mode=0o644, user=task.agent_user)
        return await run_program(
            vm, record, ["/bin/sh", "-c", APPLY], env=ANY_OWNER, user=task.agent_user, timeout_s=timeout_s
        )
