"""What every engine must do: `check_engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from dayfly.model import RolloutRecord, RolloutSpec
from dayfly.protocols import Engine
from dayfly.testing.samples import expect, sample_record, sample_spec

CHECK_TIMEOUT_S = 60.0
COUNT = 200


@dataclass
class _Work:
    """Rollouts that do nothing, and what was seen of them."""

    failing: int | None = None
    """The attempt whose rollout raises."""
    refused: int | None = None
    """The attempt whose `done` raises."""
    gate: anyio.Event | None = None
    """When given, no rollout ends before it is set."""
    full_at: int = 0
    full: anyio.Event = field(default_factory=anyio.Event)
    """Set when `full_at` rollouts run at once."""
    pulled: int = 0
    running: int = 0
    most: int = 0
    ran: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def specs(self, count: int) -> Iterator[RolloutSpec]:
        for attempt in range(1, count + 1):
            self.pulled += 1
            yield sample_spec(attempt)

    async def run_one(self, spec: RolloutSpec) -> RolloutRecord:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == self.full_at:
            self.full.set()
        try:
            self.ran.append(spec.rollout_id)
            await anyio.sleep(0.002)  # long enough to overlap
            if self.gate is not None:
                await self.gate.wait()
            if spec.key.attempt == self.failing:
                raise ZeroDivisionError("a bug in run_one")
            return sample_record(spec)
        finally:
            self.running -= 1

    async def done(self, record: RolloutRecord) -> None:
        expect(record.rollout_id in self.ran, "done() was called for a rollout that never ran")
        await anyio.lowlevel.checkpoint()
        if record.attempt == self.refused:
            raise ZeroDivisionError("a bug in done")
        self.finished.append(record.rollout_id)


async def check_engine(make_engine: Callable[[], Engine], *, at_once: int) -> None:
    """Raises `AssertionError` with a sentence for the first rule that does not hold.

    The engine must have room for `at_once` rollouts of 128 MiB and no more, and fewer than 200.
    """
    try:
        with anyio.fail_after(CHECK_TIMEOUT_S):
            await _does_each_once(make_engine(), at_once)
            await _queues_without_pulling_everything(make_engine(), at_once)
            for work in (_Work(failing=30), _Work(refused=30)):
                await _stops_at_an_error(make_engine(), work)
            await _leaves_nothing_when_cancelled(make_engine(), at_once)
    except TimeoutError as error:
        raise AssertionError(f"the engine did not end within {CHECK_TIMEOUT_S:g} s") from error


async def _does_each_once(engine: Engine, at_once: int) -> None:
    nothing = _Work()
    await engine.run(nothing.specs(0), nothing.run_one, nothing.done)
    expect(not nothing.ran, "an engine without rollouts ran one")
    work = _Work()
    await engine.run(work.specs(COUNT), work.run_one, work.done)
    expect(len(work.ran) == len(set(work.ran)) == COUNT, "not every rollout was run exactly once")
    expect(sorted(work.finished) == sorted(work.ran), "done() had not ended for every rollout when run() returned")
    expect(1 < work.most <= at_once, f"{work.most} rollouts ran at once where {at_once} have room")


async def _queues_without_pulling_everything(engine: Engine, at_once: int) -> None:
    work = _Work(gate=anyio.Event(), full_at=at_once)
    assert work.gate is not None
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run, work.specs(COUNT), work.run_one, work.done)
        await work.full.wait()
        await anyio.sleep(0.05)  # time to overdo it
        expect(work.running == at_once, f"{work.running} rollouts run where {at_once} have room")
        expect(work.pulled <= 2 * at_once + 1, f"with {at_once} running, {work.pulled} of {COUNT} specs were taken")
        work.gate.set()
    expect(len(work.finished) == COUNT, "rollouts that had to wait for room were forgotten")


async def _stops_at_an_error(engine: Engine, work: _Work) -> None:
    """An exception is a fault of dayfly itself; going on would hide it and use up the host."""
    try:
        await engine.run(work.specs(COUNT), work.run_one, work.done)
    except* ZeroDivisionError:
        pass
    else:
        raise AssertionError("an exception of run_one or done does not come out of run()")
    expect(work.running == 0, "after an exception rollouts go on running")
    expect(len(work.ran) < COUNT, "after an exception the rest of the rollouts is started all the same")


async def _leaves_nothing_when_cancelled(engine: Engine, at_once: int) -> None:
    work = _Work(gate=anyio.Event(), full_at=at_once)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run, work.specs(COUNT), work.run_one, work.done)
            await work.full.wait()
            scope.cancel()
    expect(work.running == 0, "rollouts outlive an engine that was cancelled")
    free = _Work()
    await engine.run(free.specs(at_once), free.run_one, free.done)
    expect(len(free.finished) == at_once, "a cancelled engine has kept the room that its rollouts took")
