"""What every verifier must do: `check_verifier`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from dayfly.errors import InfraError, VerifierError
from dayfly.evidence import RolloutFolder
from dayfly.model import Task, Verdict
from dayfly.protocols import Verifier, Vm
from dayfly.testing.samples import expect
from dayfly.testing.vms import CHECK_TIMEOUT_S, VERIFIER_FOLDERS, Bench

STOP_GRACE_S = 30.0
Work = Callable[[Vm], Awaitable[object]]


async def check_verifier(
    make_verifier: Callable[[], Verifier],
    bench: Bench,
    task: Task,
    *,
    right: Work,
    wrong: Work,
    endless: Task | None = None,
) -> None:
    """Raises `AssertionError` with a sentence for the first rule that does not hold.

    `right` does the task's work in a VM, `wrong` does something else. `endless` is a task whose judge does not
    end, with a short `verifier_timeout_s`.
    """
    try:
        with anyio.fail_after(CHECK_TIMEOUT_S):
            await _tells_right_from_wrong(make_verifier, bench, task, right, wrong)
            await _gives_no_verdict_without_a_judgement(make_verifier, bench, task, right)
            await _can_be_cancelled(make_verifier(), bench, task if endless is None else endless)
            if endless is not None:
                await _is_bounded(make_verifier(), bench, endless)
    except TimeoutError as error:
        raise AssertionError(f"the verifier did not end within {CHECK_TIMEOUT_S:g} s") from error
    bench.expect_nothing_left("after the checks of a verifier")


@asynccontextmanager
async def _judged_vm(bench: Bench, work: Work | None = None) -> AsyncIterator[tuple[Vm, RolloutFolder]]:
    """A VM with the work done and the verifier's space open, as a rollout hands it over."""
    async with bench.vm() as vm:
        if work is not None:
            await work(vm)
        await vm.freeze()
        await vm.open_verifier_space(VERIFIER_FOLDERS)
        yield vm, RolloutFolder(bench.folder / f"judged-{len(bench.ids)}")


async def _tells_right_from_wrong(
    make_verifier: Callable[[], Verifier], bench: Bench, task: Task, right: Work, wrong: Work
) -> None:
    verdicts = []
    for work in (right, wrong, right):
        async with _judged_vm(bench, work) as (vm, record):
            verdicts.append(await make_verifier().verify(vm, task, record))
            strays = [p for p in _files_below(record.folder) if not p.startswith("verifier/")]
            expect(not strays, f"the verifier keeps evidence outside of verifier/: {strays}")
    for verdict in verdicts:
        _check_verdict(verdict)
    first, other, again = verdicts
    expect(first.passed, f"the right work does not pass: {first}")
    expect(not other.passed, f"the wrong work passes: {other}")
    expect((again.reward, again.passed) == (first.reward, first.passed), "the same work gets different verdicts")


def _check_verdict(verdict: Verdict) -> None:
    expect(isinstance(verdict, Verdict), f"verify() returned a {type(verdict).__name__}, not a Verdict")
    for reward in (verdict.reward, *verdict.rewards.values()):
        expect(math.isfinite(reward), f"a reward is {reward}")


def _files_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())


async def _gives_no_verdict_without_a_judgement(
    make_verifier: Callable[[], Verifier], bench: Bench, task: Task, right: Work
) -> None:
    """Invariant 3: a fault of the machine or of the verifier is never a score."""
    async with _judged_vm(bench, right) as (vm, record):
        await vm.stop()
        await _expect_no_verdict(make_verifier(), vm, task, record, "in a VM that is lost")


async def _is_bounded(verifier: Verifier, bench: Bench, endless: Task) -> None:
    async with _judged_vm(bench) as (vm, record):
        await _expect_no_verdict(verifier, vm, endless, record, "when the judge does not end")


async def _expect_no_verdict(verifier: Verifier, vm: Vm, task: Task, record: RolloutFolder, when: str) -> None:
    try:
        verdict = await verifier.verify(vm, task, record)
    except (VerifierError, InfraError):
        return
    raise AssertionError(f"{when} there is a verdict: {verdict}")


async def _can_be_cancelled(verifier: Verifier, bench: Bench, task: Task) -> None:
    async with _judged_vm(bench) as (vm, record):
        with anyio.move_on_after(0.2) as scope, suppress(VerifierError):
            await verifier.verify(vm, task, record)
        late_s = anyio.current_time() - scope.deadline
        expect(late_s < STOP_GRACE_S, f"the verifier went on for {late_s:.0f} s after it was cancelled")
