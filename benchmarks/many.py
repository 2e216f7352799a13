"""Many VMs: one after the other, and several at a time. All must succeed, and nothing may be left.

python benchmarks/many.py [--count 100] [--at-once 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import psutil

from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings
from fork import COMMAND, MACHINE, first_result_s, make_disk


def left() -> dict[str, int]:
    """What a VM could leave behind in or around this process."""
    me = psutil.Process()
    return {"processes": len(me.children(recursive=True)), "descriptors": me.num_fds()}


async def measure(count: int, at_once: int, folder: Path) -> dict[str, Any]:
    hypervisor = QemuHypervisor(QemuSettings(max_starting=4))
    disk = await anyio.to_thread.run_sync(make_disk, folder)
    await hypervisor.prepare(MACHINE)
    await first_result_s(hypervisor, disk, folder, "fork")
    before = left()
    result: dict[str, Any] = {"schema_version": 1, "isolation": hypervisor.isolation, "command": COMMAND}
    for name, parallel in (("one_after_the_other", 1), ("at_once", at_once)):
        started, seconds = time.perf_counter(), await cycles(hypervisor, disk, folder, count, parallel)
        result[name] = {
            "vms": len(seconds),
            "parallel": parallel,
            "wall_s": time.perf_counter() - started,
            "median_s": statistics.median(seconds),
            "range_s": [min(seconds), max(seconds)],
        }
    result["left"] = {name: now - before[name] for name, now in left().items()}
    result["files_left"] = sorted(p.name for p in folder.glob("*.img"))
    hypervisor.close()
    return result


async def cycles(hypervisor: QemuHypervisor, disk: Any, folder: Path, count: int, parallel: int) -> list[float]:
    """Seconds of each whole fork-exec-kill cycle; the first failure ends everything."""
    seconds: list[float] = []
    remaining = iter(range(count))

    async def worker() -> None:
        for _ in remaining:
            seconds.append((await first_result_s(hypervisor, disk, folder, "fork"))[1])

    async with anyio.create_task_group() as tasks:
        for _ in range(parallel):
            tasks.start_soon(worker)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = anyio.run(measure, arguments.count, arguments.at_once, Path(folder))
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name in ("one_after_the_other", "at_once"):
        row = result[name]
        low, high = row["range_s"]
        print(
            f"{row['vms']} VMs, {row['parallel']} at a time: {row['wall_s']:.1f} s, "
            f"each {row['median_s']:.3f} s ({low:.3f}–{high:.3f})"
        )
    print(f"left: {result['left']}, files: {result['files_left']}")


if __name__ == "__main__":
    main()
