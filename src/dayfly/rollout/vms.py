"""The disk and the VM of a role, started and ended within their phases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio

from dayfly.errors import ImageError
from dayfly.model import Disk, Task, VerifierClass
from dayfly.protocols import StartOptions, Vm
from dayfly.rollout.limits import vm_lifetime_s
from dayfly.rollout.progress import Progress


async def disk_of(p: Progress, image: str | None, dockerfile: Path | None, timeout_s: float) -> Disk:
    """Of the image that has a name, or else of the one that the Dockerfile describes."""
    if image is not None:
        return await p.context.make_disk(image)
    assert dockerfile is not None
    if p.context.build_disk is None:
        raise ImageError("no builder was given for this rollout", hint="name an image as docker_image")
    return await p.context.build_disk(dockerfile, timeout_s)


@asynccontextmanager
async def fresh_vm(
    p: Progress, role: Literal["agent", "verifier"], disk: Disk, task: Task, writable: Path
) -> AsyncIterator[Vm]:
    """A fresh VM for `role`; its start is the phase boot, its end the phase teardown."""
    own = role == "verifier" and p.verifier_class is VerifierClass.SEPARATE
    env = task.env if not own or task.verifier_vm_env is None else task.verifier_vm_env
    number = len(p.vms)
    p.record.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = StartOptions(
        vm_id=f"{p.spec.rollout_id}-{role[0]}{number if number > 1 else ''}",
        writable=writable,
        env=p.context.resolve_env(env),
        workdir=verifier_workdir(task) if own else task.workdir,
        lifetime_s=vm_lifetime_s(p.options, task),
        boot_timeout_s=p.options.boot_timeout_s,
        console=p.record.folder / ("console.log" if role == "agent" else "verifier-console.log"),
    )
    machine = (task.verifier_machine or task.machine) if own else task.machine
    starting = p.context.hypervisor.start(disk, machine, options)
    async with p.in_phase("boot", p.options.boot_timeout_s + 30):
        vm = await starting.__aenter__()
    p.vms.append(vm.info)
    try:
        yield vm
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await starting.__aexit__(type(error), error, error.__traceback__)
        raise
    ending, p.phase = p.phase, "teardown"
    async with p.in_phase("teardown", p.options.teardown_timeout_s):
        await starting.__aexit__(None, None, None)
    p.phase = ending


def verifier_workdir(task: Task) -> str | None:
    """Of a separate verifier: its own, else the task's if it runs on the task's image; None: the image's."""
    return task.verifier_workdir or (None if task.verifier_has_own_image else task.workdir)
