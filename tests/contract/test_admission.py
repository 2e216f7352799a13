"""Room on a host: who waits, who goes first, and that a share is always given back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import anyio
import pytest

from dayfly.engines.local import Admission, Capacity, LocalEngine
from dayfly.errors import HostError
from dayfly.model import Machine
from dayfly.testing import sample_record, sample_spec

SMALL = Machine(memory_mib=128, storage_mib=64)
LARGE = Machine(memory_mib=1200, storage_mib=64)


def capacity(**changes: float) -> Capacity:
    return Capacity(**{"cpus": 100, "memory_mib": 1500, "disk_mib": 10_000, "rollouts": 100, **changes})


def test_a_large_machine_is_not_overtaken_for_ever():
    """Small ones come without end; the large one gets in once those before it are done."""

    async def main() -> list[str]:
        admission, order = Admission(capacity()), []

        async def one(name: str, machine: Machine) -> None:
            await admission.enter(machine)
            order.append(name)
            await anyio.sleep(0.01)
            await admission.leave(machine)

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(one, f"before-{number}", SMALL)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(one, "large", LARGE)
            await anyio.wait_all_tasks_blocked()
            for number in range(50):
                group.start_soon(one, f"after-{number}", SMALL)
        assert (admission.rollouts, admission.memory_mib, admission.disk_mib, admission.cpus) == (0, 0, 0, 0)
        return order

    order = anyio.run(main)
    assert order.index("large") == 5
    assert len(order) == 56


@pytest.mark.parametrize(
    ("changes", "most"),
    [({"rollouts": 3}, 3), ({"cpus": 4}, 4), ({"memory_mib": 5 * (128 + 160)}, 5), ({"disk_mib": 2 * 64}, 2)],
)
def test_each_kind_of_room_is_a_bound_of_its_own(changes, most):
    async def main() -> int:
        admission, seen = Admission(capacity(**{"memory_mib": 100_000, **changes})), []

        async def run_one(spec):
            seen.append(admission.rollouts)
            await anyio.sleep(0.005)
            return sample_record(spec)

        async def done(record):
            pass

        specs = (sample_spec(n, machine=SMALL) for n in range(1, 40))
        await LocalEngine(admission).run(specs, run_one, done)
        assert admission.rollouts == 0
        return max(seen)

    assert anyio.run(main) == most


def test_one_that_stops_waiting_takes_nothing_and_blocks_nobody():
    async def main() -> None:
        admission = Admission(capacity(rollouts=1))
        await admission.enter(SMALL)
        with anyio.move_on_after(0.05) as waited:
            await admission.enter(SMALL)
        assert waited.cancelled_caught
        assert admission.rollouts == 1
        await admission.leave(SMALL)
        with anyio.fail_after(5):
            await admission.enter(SMALL)
        assert admission.rollouts == 1

    anyio.run(main)


def test_a_disk_that_others_filled_stops_the_job_with_a_hint(tmp_path, monkeypatch):
    """The plan counted with the disk as it was at the start."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    ran = []

    async def run_one(spec):
        ran.append(spec)

    async def main() -> None:
        await LocalEngine(Admission(capacity(), tmp_path)).run([sample_spec()], run_one, run_one)

    with pytest.raises(ExceptionGroup) as caught:
        anyio.run(main)
    (error,) = caught.value.exceptions
    assert isinstance(error, HostError) and error.cause == "host_disk_full"
    assert error.hint is not None and "--resume" in error.hint
    assert not ran


def test_capacity_of_this_host(tmp_path: Path):
    cpus = len(os.sched_getaffinity(0))
    plain, wide = Capacity.of_host(tmp_path), Capacity.of_host(tmp_path, concurrency=200)
    assert (plain.cpus, plain.rollouts) == (cpus, cpus)
    assert (wide.cpus, wide.rollouts) == (float("inf"), 200)
    assert plain.memory_mib > 0 and plain.disk_mib < shutil.disk_usage(tmp_path).total >> 20
