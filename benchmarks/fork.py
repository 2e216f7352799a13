"""How fast a VM is there, and what an idle one costs.

    python benchmarks/fork.py [--samples 15] [--idle 8] [--json]

(a) fork → first command result ÷ cold boot → first command result: `fork_over_cold`
(b) the same fork ÷ a bare `qemu -incoming` restore that answers the same request: `fork_over_bare_restore`
(c) private memory of an idle VM's processes: `private_mib_per_vm`
(d) a whole no-op rollout ÷ two bare fork-exec-kill cycles: `rollout_over_two_restores`

The kinds of sample alternate, so that a busy minute of the host meets all of them. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parent))
from bare import bare_fork_s
from dayfly.agents import NoOpAgent
from dayfly.errors import HostError
from dayfly.evidence import JobFolder, new_job_id, new_rollout_id
from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings
from dayfly.hypervisors.qemu.disks import ensure_writable
from dayfly.hypervisors.qemu.kernel import fetch_kernel, find_kernel
from dayfly.model import (
    AgentSpec,
    Disk,
    ImageConfig,
    Machine,
    Options,
    Outcome,
    RolloutKey,
    RolloutSpec,
)
from dayfly.protocols import StartOptions
from dayfly.rollout import Context, run_rollout
from dayfly.tasks import load_task
from dayfly.verifiers import CommandVerifier

MACHINE = Machine(memory_mib=512, storage_mib=1024)
COMMAND = ["/true"]
_numbers = count()


def make_disk(folder: Path) -> Disk:
    """An image with one static program that does nothing."""
    root = folder / "root"
    root.mkdir()
    (folder / "true.c").write_text("int main(void) { return 0; }\n")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-musl", "-static", "-Os"]
    subprocess.run([*compiler, "-o", str(root / "true"), str(folder / "true.c")], check=True, timeout=300)
    tar = subprocess.run(["tar", "-C", str(root), "-c", "."], check=True, capture_output=True).stdout
    path = folder / "disk.sqfs"
    subprocess.run(["tar2sqfs", "-q", str(path)], input=tar, check=True, timeout=60)
    return Disk(path, "sha256:0", ImageConfig())


def options(folder: Path) -> StartOptions:
    name = f"bench-{next(_numbers)}"
    return StartOptions(name, folder / f"{name}.img")


async def first_result_s(hypervisor: QemuHypervisor, disk: Disk, folder: Path, how: str) -> tuple[float, float]:
    """Seconds to the result of the first command, and to the VM seen gone."""
    chosen, started = options(folder), time.perf_counter()
    async with hypervisor.start(disk, MACHINE, chosen) as vm:
        result = await vm.exec(COMMAND)
        answered = time.perf_counter()
        assert result.ok, result
        assert vm.info.how == how, vm.info
    chosen.writable.unlink()
    return answered - started, time.perf_counter() - started


async def private_mib(hypervisor: QemuHypervisor, disk: Disk, folder: Path, idle: int) -> list[float]:
    """What each of `idle` VMs that have run one command holds for itself, its launchers included."""
    async with AsyncExitStack() as stack:
        vms: list[Any] = []
        for _ in range(idle):
            vm: Any = await stack.enter_async_context(hypervisor.start(disk, MACHINE, options(folder)))
            await vm.exec(COMMAND)
            vms.append(vm)
        await anyio.sleep(2)
        return [sum(_private_kib(pid) for pid in vm.status().pids) / 1024 for vm in vms]


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


TASK = """\
schema_version = "1.4"
[environment]
docker_image = "benchmark"
workdir = "/"
memory_mb = 512
storage_mb = 1024
[dayfly]
verifier_class = "rebooted"
verify = ["/true"]
"""


class NoOpRollouts:
    """Whole rollouts: agent VM, nothing done, collection, verifier VM, sealed and durable evidence."""

    def __init__(self, hypervisor: QemuHypervisor, disk: Disk, folder: Path) -> None:
        task = folder / "task"
        (task / "environment").mkdir(parents=True)
        (task / "task.toml").write_text(TASK)
        (task / "instruction.md").write_text("Do nothing.\n")
        self.task = load_task(task, strict=True)
        self.job = JobFolder.create(folder, new_job_id(), {}, {})

        async def make_disk(image: str) -> Disk:
            return disk

        self.context = Context(
            hypervisor=hypervisor,
            job=self.job,
            load_task=lambda path: load_task(path, strict=False),
            make_disk=make_disk,
            make_agent=lambda spec: NoOpAgent(),
            make_verifier=lambda task: CommandVerifier(),
            resolve_env=dict,
        )

    async def one_s(self, attempt: int) -> float:
        """Seconds of one rollout, from its spec to its durable record."""
        key = RolloutKey(
            task=self.task.name, task_digest=self.task.digest, agent="no-op", agent_digest="", attempt=attempt
        )
        spec = RolloutSpec(
            job_id=self.job.job_id,
            rollout_id=new_rollout_id(),
            key=key,
            task_path=self.task.path,
            machine=self.task.machine,
            agent=AgentSpec(name="no-op", kind="no-op"),
            options=Options(keep_disk="never"),
        )
        started = time.perf_counter()
        record = await run_rollout(spec, self.context)
        assert record.outcome is Outcome.PASSED, record.cause
        return time.perf_counter() - started


async def measure(samples: int, idle: int, folder: Path) -> dict[str, Any]:
    settings = QemuSettings()
    try:
        find_kernel(None, settings.cache)
    except HostError:
        await anyio.to_thread.run_sync(fetch_kernel, settings.cache)
    disk = await anyio.to_thread.run_sync(make_disk, folder)
    forking, cold = QemuHypervisor(settings), QemuHypervisor(replace(settings, fork=False))
    await forking.prepare(MACHINE)
    host = forking.host()
    template = forking.ready_template(MACHINE)
    rollouts = NoOpRollouts(forking, disk, folder)
    kinds = ("fork_s", "fork_cycle_s", "cold_s", "bare_s", "bare_cycle_s", "rollout_s")
    raw: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(samples + 1):
        writable = folder / "bare.img"
        ensure_writable(writable, MACHINE.storage_mib, settings.cache)
        fork = await first_result_s(forking, disk, folder, "fork") if number % 2 else None
        bare = await bare_fork_s(host, MACHINE, template, disk, writable, COMMAND)
        fork = fork or await first_result_s(forking, disk, folder, "fork")
        writable.unlink()
        booted = await first_result_s(cold, disk, folder, "boot") if number % 3 == 0 else None
        whole_s = await rollouts.one_s(number + 1)
        if number == 0:
            continue  # warms the caches of the host
        raw["bare_s"].append(bare[0])
        raw["bare_cycle_s"].append(bare[1])
        raw["rollout_s"].append(whole_s)
        raw["fork_s"].append(fork[0])
        raw["fork_cycle_s"].append(fork[1])
        if booted is not None:
            raw["cold_s"].append(booted[0])
    raw["private_mib"] = await private_mib(forking, disk, folder, idle)
    forking.close()
    cold.close()
    median = {name: statistics.median(values) for name, values in raw.items()}
    return {
        "schema_version": 1,
        "isolation": host.platform.accelerator,
        "machine": MACHINE.model_dump(),
        "fork_over_cold": median["fork_s"] / median["cold_s"],
        "fork_over_bare_restore": median["fork_s"] / median["bare_s"],
        "private_mib_per_vm": median["private_mib"],
        "rollout_over_two_restores": median["rollout_s"] / (2 * median["bare_cycle_s"]),
        "medians": median,
        "samples": raw,
    }


def show(result: dict[str, Any]) -> None:
    aims = {
        "fork_over_cold": 0.15,
        "fork_over_bare_restore": 1.25,
        "private_mib_per_vm": 24,
        "rollout_over_two_restores": 1.5,
    }
    print(f"isolation {result['isolation']}")
    for name, aim in aims.items():
        print(f"{name:26} {result[name]:8.3f}   aim ≤ {aim}")
    for name, values in result["samples"].items():
        unit, scale = ("MiB", 1.0) if name.endswith("_mib") else ("ms", 1000.0)
        low, high = min(values) * scale, max(values) * scale
        print(f"{name:24} {statistics.median(values) * scale:8.1f} {unit} ({low:.1f}–{high:.1f}, n={len(values)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--idle", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = anyio.run(measure, arguments.samples, arguments.idle, Path(folder))
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
