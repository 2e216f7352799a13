"""What an agent finds when it begins: log folders, files, health checks; and the fingerprint of that."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread

from dayfly.errors import AgentError, GuestLost, GuestRefused, HostError, InfraError
from dayfly.evidence import canonical_json, fingerprint, sha256_bytes
from dayfly.model import Change, Healthcheck, Outcome, Task
from dayfly.protocols import Vm
from dayfly.rollout.limits import step_setup_limit_s, verifier_healthcheck
from dayfly.rollout.progress import Progress
from dayfly.tasks import select
from dayfly.tasks.compose import COMPOSE_NAMES


async def set_up(p: Progress, vm: Vm, task: Task) -> None:
    """Bring what Harbor promises into a fresh VM: log folders, environment files, the health check."""
    await _make_log_folders(p, vm, "/logs", "agent", "artifacts")
    if task.environment_files is not None:
        files = await anyio.to_thread.run_sync(select, task.environment_files)
        await vm.put(files.source, workdir_of(p, task), exclude=_not_for_the_vm, meta=files.meta)
    if task.healthcheck is not None:
        await _healthcheck(p, vm, task.healthcheck, None)


async def set_up_verifier(p: Progress, vm: Vm, task: Task) -> None:
    """The same for a separate verifier's VM. An image of its own has nothing of the task's environment."""
    files = None if task.verifier_has_own_image else task.environment_files
    of_it = {"healthcheck": verifier_healthcheck(task), "environment_files": files}
    await set_up(p, vm, task.model_copy(update=of_it))


async def begin_step(p: Progress, vm: Vm, step: Task) -> tuple[Change, ...]:
    """Prepare a step, if the task has steps; returns the state of the writable layer that the agent starts from.

    In the first step a failure is one of the environment. Later the agent has been at work on what the step's
    set-up needs, so a failure there is counted as the agent's, and the steps end.
    """
    first = len(p.steps) == 1
    if step.step is None:
        async with p.in_phase("setup", p.options.setup_timeout_s):
            return await _take_fingerprint(p, vm, step)
    async with p.in_phase("setup", step_setup_limit_s(p.options, step)):
        if not first:
            await vm.thaw()
        try:
            await _set_up_step(p, vm, step, first=first)
        except (InfraError, GuestRefused) as error:
            if first or isinstance(error, GuestLost | HostError):
                raise
            p.stopped = f"step {step.step}: {error.message}"
            p.fail(Outcome.AGENT_ERROR, AgentError(p.stopped, hint=error.hint, cause="step_setup_failed"))
            return ()
        return await _take_fingerprint(p, vm, step)


async def _set_up_step(p: Progress, vm: Vm, step: Task, *, first: bool) -> None:
    """As Harbor does it, as the agent's user: empty log folder, workdir/, its setup.sh, the health check."""
    if not first:
        await vm.remove("/logs/agent")
        await _make_log_folders(p, vm, "/logs", "agent")
    workdir = workdir_of(p, step)
    if step.step_files is not None:
        files = await anyio.to_thread.run_sync(select, step.step_files)
        await vm.put(files.source, workdir, meta=files.meta)
        if (step.step_files / "setup.sh").is_file():
            await _run_setup_script(p, vm, step, f"{workdir.rstrip('/')}/setup.sh")
    if step.step_healthcheck is not None:
        await _healthcheck(p, vm, step.step_healthcheck, step.agent_user)


async def _run_setup_script(p: Progress, vm: Vm, step: Task, script: str) -> None:
    result = await vm.exec(["/bin/bash", script], user=step.agent_user, timeout_s=p.options.setup_timeout_s)
    p.record.write("setup.txt", result.stdout.data + result.stderr.data)
    if not result.ok:
        raise InfraError(
            f"the setup.sh of step {step.step} "
            + ("was out of time" if result.timed_out else f"ended with status {result.exit_code}"),
            hint=result.stderr.text[-500:] or result.stdout.text[-500:] or None,
            cause="step_setup_failed",
        )


async def _make_log_folders(p: Progress, vm: Vm, place: str, *names: str) -> None:
    """Folders below `place` that any user in the VM can write to."""
    with tempfile.TemporaryDirectory(dir=p.folder.scratch) as made:
        for name in names:
            (Path(made) / name).mkdir()
            (Path(made) / name).chmod(0o777)
        Path(made).chmod(0o755)
        await vm.put(Path(made), place)


def workdir_of(p: Progress, task: Task) -> str:
    assert p.disk is not None
    return task.workdir or p.disk.config.workdir or "/"


def _not_for_the_vm(name: str) -> bool:
    return name in ("Dockerfile", ".dockerignore", *COMPOSE_NAMES)


async def _healthcheck(p: Progress, vm: Vm, check: Healthcheck, user: str | None) -> None:
    """Docker's rule: failures within the start period do not count; then `retries` in a row are fatal.

    `user` None is the image's: the task's check comes before the agent's user is taken.
    """
    begun, failures = time.monotonic(), 0
    while True:
        result = await vm.exec(["/bin/sh", "-c", check.command], user=user, timeout_s=check.timeout_s)
        if result.ok:
            return
        starting = time.monotonic() - begun < check.start_period_s
        failures += 0 if starting else 1
        if failures >= max(1, check.retries):
            p.record.write("healthcheck.txt", result.stdout.data + result.stderr.data)
            raise InfraError(
                f"the health check failed {failures} times; last exit status {result.exit_code}",
                hint=result.stderr.text[-500:] or result.stdout.text[-500:] or None,
                cause="healthcheck_failed",
            )
        await anyio.sleep(check.start_interval_s if starting else check.interval_s)


async def _take_fingerprint(p: Progress, vm: Vm, step: Task) -> tuple[Change, ...]:
    """Record the context that the agent starts from (invariant 5); returns the state of the writable layer.

    The start of later steps holds the agent's own work, so only the first one's is a rollout's fingerprint.
    """
    assert p.disk is not None and p.task is not None
    start = await vm.changes()
    listed = [c.model_dump() for c in start]
    p.record.write("start-files.json", canonical_json(listed))
    if p.fingerprint is not None:
        return start
    environment = {k: sha256_bytes(v.encode()) for k, v in sorted(p.context.resolve_env(step.env).items())}
    p.fingerprint = fingerprint(
        {
            "disk": p.disk.digest,
            "template": vm.info.template,
            "machine": step.machine.model_dump(),
            "environment": environment,
            "workdir": workdir_of(p, step),
            "user": step.agent_user or p.disk.config.user,
            "instruction": sha256_bytes(p.task.instruction.encode()),
            "files": sha256_bytes(canonical_json(listed)),
            "network": {"given": "none", "asked": dict(p.task.network)},
        }
    )
    return start
