"""One rollout, from task to sealed record.

`carry_out` is the line that the whole project is about; read it first. `run_rollout` around it turns
whatever happens into exactly one outcome and one durable folder.
"""

from __future__ import annotations

import anyio

from dayfly.errors import InfraError
from dayfly.model import Cause, Outcome, RolloutRecord, RolloutSpec, Task, VerifierClass
from dayfly.protocols import Vm
from dayfly.rollout.collect import Carried, collect
from dayfly.rollout.judge import verify, verify_separately, verify_shared
from dayfly.rollout.limits import collect_limit_s, setup_limit_s
from dayfly.rollout.outcomes import outcome_of
from dayfly.rollout.prepare import begin_step, set_up
from dayfly.rollout.progress import Context, Progress
from dayfly.rollout.publish import publish
from dayfly.rollout.vms import disk_of, fresh_vm
from dayfly.rollout.work import let_agent_work

STEPS_REBOOTED = "a multi-step task cannot be judged as rebooted: the agent's VM must live on between steps"


async def run_rollout(spec: RolloutSpec, context: Context) -> RolloutRecord:
    """Do one rollout; returns its record once the folder is durable.

    A cancelled rollout is recorded, too, with what was seen until then; the cancellation goes on. Raises
    `HostError` when the record itself cannot be kept (a full disk): the evidence then waits for `recover`.
    """
    with context.job.rollout(spec.rollout_id, max_bytes=spec.options.max_output_bytes) as folder:
        progress = Progress(spec, context, folder)
        try:
            await carry_out(progress)
        except Exception as error:
            full_disk_is_the_agents = progress.agent_has_worked and (
                progress.phase != "verify" or progress.verifier_class is not VerifierClass.SEPARATE
            )
            progress.fail(outcome_of(error, progress.phase, full_disk_is_the_agents), error)
        except anyio.get_cancelled_exc_class():
            progress.failures.append(
                (Outcome.CANCELLED, Cause(kind="cancelled", message="stopped", phase=progress.phase))
            )
            with anyio.CancelScope(shield=True):
                await publish(progress)
            raise
        with anyio.CancelScope(shield=True):
            published = await publish(progress)
    return published


async def carry_out(p: Progress) -> None:
    """The path of one rollout: load, image, VM, set-up; for each step agent, collection, verifier.

    A task without steps is its own only step. The agent's VM lives until the last step's work is collected.
    """
    p.task = task = _load(p)
    async with p.in_phase("image", task.build_timeout_s):
        p.disk = await disk_of(p, task.image, task.dockerfile, task.build_timeout_s)
    writable = p.folder.scratch / "disk.img"
    async with fresh_vm(p, "agent", p.disk, task, writable) as vm:
        async with p.in_phase("setup", setup_limit_s(p.options, task)):
            await set_up(p, vm, task)
        for step in task.all_steps:
            with p.at(step):
                carried = await _work(p, vm, step)
                if p.over:
                    break
                if p.verifier_class is VerifierClass.SHARED:
                    p.now.verdict = await verify_shared(p, vm, step)
                elif step is not task.all_steps[-1]:
                    await verify_separately(p, step, carried)
            if step is not task.all_steps[-1] and p.falls_short():
                break
        await vm.stop()
    if p.over:
        return
    with p.at(step):
        if p.verifier_class is VerifierClass.REBOOTED:
            async with fresh_vm(p, "verifier", p.disk, step, writable) as vm:
                p.now.verdict = await verify(p, vm, step)
        elif p.verifier_class is VerifierClass.SEPARATE:
            await verify_separately(p, step, carried)


def _load(p: Progress) -> Task:
    task = p.context.load_task(p.spec.task_path)
    if task.digest != p.spec.key.task_digest:
        raise InfraError(
            f"task {task.name} has changed since the job was planned",
            hint="do not edit tasks during a job; `dayfly run --resume --accept-changes` runs it anew",
            cause="task_changed",
        )
    if task.steps and p.options.verifier_class is VerifierClass.REBOOTED:
        raise InfraError(STEPS_REBOOTED, hint="leave the verifier class to the task", cause="unsupported")
    return task


async def _work(p: Progress, vm: Vm, step: Task) -> list[Carried]:
    """What comes before a verifier: the step is prepared, the agent works, its work is collected."""
    start = await begin_step(p, vm, step)
    if p.stopped:
        return []
    p.now.agent_result = await let_agent_work(p, vm, step)
    async with p.in_phase("collect", collect_limit_s(p.options, step)):
        return await collect(p, vm, step, start)
