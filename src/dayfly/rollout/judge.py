"""The verify phase in each verifier class, in a space that the agent cannot have reached."""

from __future__ import annotations

from dayfly.errors import Tampered
from dayfly.model import Task, Verdict, VerifierClass
from dayfly.protocols import Vm
from dayfly.rollout.collect import Carried, is_verdict_place
from dayfly.rollout.limits import verifier_setup_limit_s
from dayfly.rollout.prepare import set_up_verifier
from dayfly.rollout.progress import Progress
from dayfly.rollout.vms import disk_of, fresh_vm

VERIFIER_FOLDERS = ("/tests", "/logs/verifier")


async def verify(p: Progress, vm: Vm, task: Task) -> Verdict:
    """Judge in a space that is made now, so that nothing of the agent can have reached it."""
    async with p.in_phase("verify", task.verifier_timeout_s + 60):
        await _open_verifier_space(p, vm, task)
        return await p.context.make_verifier(task).verify(vm, task, p.record)


async def verify_shared(p: Progress, vm: Vm, task: Task) -> Verdict:
    """Verify beside the agent's processes, and look afterwards for one that tried to write a verdict.

    Then the tests and what the verifier wrote are taken away; between steps the agent finds nothing of them.
    """
    async with p.in_phase("verify", task.verifier_timeout_s + 60):
        if not p.judged_before:
            await _open_verifier_space(p, vm, task)
            p.judged_before = True
        await vm.thaw()
        verdict = await p.context.make_verifier(task).verify(vm, task, p.record)
        await vm.freeze()
        late = [c.path for c in await vm.changes() if is_verdict_place(c) and c.kind not in ("dir", "deleted")]
        for folder in VERIFIER_FOLDERS:
            await vm.remove(folder, space="verify")
    if late:
        raise Tampered(f"a process of the agent wrote {late[0]} while the verifier ran", cause="late_verdict")
    return verdict


async def verify_separately(p: Progress, task: Task, carried: list[Carried]) -> None:
    """A fresh VM on the verifier's image, set up like the agent's, with the declared artifacts put back."""
    assert p.disk is not None
    disk = p.disk
    if task.verifier_has_own_image:
        async with p.in_phase("image", task.verifier_build_timeout_s):
            disk = await disk_of(p, task.verifier_image, task.verifier_dockerfile, task.verifier_build_timeout_s)
    writable = p.folder.scratch / "verifier.img"
    async with fresh_vm(p, "verifier", disk, task, writable) as vm:
        async with p.in_phase("setup", verifier_setup_limit_s(p.options, task)):
            await set_up_verifier(p, vm, task)
            for item in carried:
                # Removed first: a file that the agent deleted must not come back from the start context.
                await vm.remove(item.source)
                if item.copy is not None:
                    await vm.put(item.copy, item.source, meta=item.meta)
        p.now.verdict = await verify(p, vm, task)
    writable.unlink(missing_ok=True)  # the next step's verifier starts from nothing


async def _open_verifier_space(p: Progress, vm: Vm, task: Task) -> None:
    # A verifier image that brings its own tests has them in /tests; they must not be hidden.
    own_tests = p.verifier_class is VerifierClass.SEPARATE and task.verifier_has_own_image
    for path in await vm.open_verifier_space(VERIFIER_FOLDERS[1:] if own_tests else VERIFIER_FOLDERS):
        p.record.note(f"found at the verifier's place and hidden from it: {path}")
