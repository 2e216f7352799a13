"""A hundred VMs one after the other, and eight at a time: all must succeed, and nothing may be left.

    python benchmarks/churn.py [--count 100] [--at-once 8] [--json]

Each VM is forked, runs /bin/true and is destroyed. Prints seconds per VM for both ways, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import anyio
import psutil

from dayfly.evidence import new_rollout_id
from dayfly.images import ImageStore
from dayfly.model import Disk, Machine
from dayfly.protocols import Hypervisor, StartOptions
from dayfly.registry import HypervisorSettings, make_hypervisor

MACHINE = Machine(memory_mib=512, storage_mib=256)


async def one(hypervisor: Hypervisor, disk: Disk, folder: Path) -> None:
    vm_id = new_rollout_id()
    options = StartOptions(vm_id=vm_id, writable=folder / f"{vm_id}.img")
    async with hypervisor.start(disk, MACHINE, options) as vm:
        assert (await vm.exec(["/bin/true"])).ok
    options.writable.unlink()


async def many(hypervisor: Hypervisor, disk: Disk, folder: Path, count: int, at_once: int) -> float:
    """Seconds per VM."""
    room = anyio.CapacityLimiter(at_once)

    async def admitted() -> None:
        async with room:
            await one(hypervisor, disk, folder)

    started = time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(admitted)
    return (time.monotonic() - started) / count


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


async def measure(count: int, at_once: int) -> dict[str, object]:
    store = ImageStore()
    hypervisor = make_hypervisor("qemu", HypervisorSettings())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with store.using(store.disk(store.resolve("dayfly/demo-base:latest"))) as disk:
            await hypervisor.prepare(MACHINE)
            await one(hypervisor, disk, folder)
            before = children()
            single = await many(hypervisor, disk, folder, count, 1)
            parallel = await many(hypervisor, disk, folder, count, at_once)
        left = [str(p) for p in folder.iterdir()]
    return {
        "isolation": hypervisor.isolation,
        "count": count,
        "seconds_per_vm_one_by_one": single,
        f"seconds_per_vm_{at_once}_at_once": parallel,
        "at_once_over_one_by_one": parallel / single,
        "processes_left": len(children() - before),
        "files_left": len(left),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    answer = anyio.run(measure, args.count, args.at_once)
    assert answer["processes_left"] == answer["files_left"] == 0, answer
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        for name, value in answer.items():
            print(f"{name:<32} {value:.4f}" if isinstance(value, float) else f"{name:<32} {value}")


if __name__ == "__main__":
    main()
