"""The agent phase: whatever goes wrong in it is kept, and the verifier still runs."""

from __future__ import annotations

import posixpath
from dataclasses import replace

import anyio

from dayfly.errors import AgentError, DayflyError, DiskFull, SandboxOom
from dayfly.model import Outcome, Task
from dayfly.protocols import AgentResult, Vm
from dayfly.rollout import limits
from dayfly.rollout.prepare import workdir_of
from dayfly.rollout.progress import Progress

FULL_DISK_BYTES = 1024 * 1024
"""A writable disk with less than this free counts as full."""


async def let_agent_work(p: Progress, vm: Vm, task: Task) -> AgentResult:
    """The agent phase. Its failures are kept and the verifier still runs, unless the VM is lost."""
    limit_s, grace_s = limits.agent_limit_s(p.options, task), limits.AGENT_STOP_GRACE_S
    killed_before = p.stats.oom_kills if p.stats else 0
    result = AgentResult(exit_code=None)
    p.agent = agent = p.agent or p.context.make_agent(p.spec)  # one agent for all steps: it may remember
    try:
        async with p.in_phase("agent", limit_s + grace_s):
            with anyio.move_on_after(limit_s + grace_s / 2) as overrun:
                result = await agent.run(vm, _as_offered(p, task), p.record, limit_s)
            if overrun.cancel_called:  # also when it went on all the same, and then returned
                result = replace(result, timed_out=True, message="did not stop at its limit")
    except AgentError as error:
        p.fail(Outcome.AGENT_ERROR, error)
    await vm.freeze()
    p.stats = await vm.stats()
    if result.timed_out:
        p.fail(Outcome.AGENT_TIMEOUT, DayflyError(f"the agent used up its {limit_s:g} s", cause="timeout"))
    killed = p.stats.oom_kills - killed_before
    if result.oom_killed or killed > 0:
        p.fail(
            Outcome.SANDBOX_OOM,
            SandboxOom(
                f"the kernel killed {max(1, killed)} process(es) at the memory limit, "
                f"peak {p.stats.memory_peak_bytes >> 20} of {p.stats.memory_limit_bytes >> 20} MiB",
                hint="give the task more memory_mb if honest work needs it",
            ),
        )
    if p.stats.disk_size_bytes and p.stats.disk_free_bytes < FULL_DISK_BYTES:
        p.fail(
            Outcome.DISK_FULL,
            DiskFull(
                f"the agent filled the {task.machine.storage_mib} MiB disk",
                hint="give the task more storage_mb if honest work needs it",
            ),
        )
    if result.exit_code not in (0, None) and len(p.failures) == p.now.failures_before:
        p.fail(
            Outcome.AGENT_ERROR,
            AgentError(
                f"the agent ended with status {result.exit_code}",
                hint="see agent/stderr.txt in this rollout's folder",
            ),
        )
    return result


def _as_offered(p: Progress, task: Task) -> Task:
    """The task with its skills folder as an absolute path, which an agent cannot know otherwise."""
    if task.skills_dir is None:
        return task
    return task.model_copy(update={"skills_dir": posixpath.join(workdir_of(p, task), task.skills_dir)})
