"""Real VMs: fork and boot, what must differ between clones, confinement, loss, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest

from dayfly.errors import BootError, GuestLost
from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings, keeper
from dayfly.hypervisors.qemu.owner import processes_of, sweep
from dayfly.model import Disk, Machine
from dayfly.process import PIPE, run, run_async, spawn
from dayfly.protocols import StartOptions, Vm

pytestmark = [pytest.mark.vm, pytest.mark.anyio]

SMALL = Machine(memory_mib=256, storage_mib=256)
LIAR = Path(__file__).with_name("liar.c")
Options = Callable[..., StartOptions]


def compile_program(source: Path, program: Path, *flags: str) -> Path:
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{os.uname().machine}-linux-musl"]
    run([*compiler, "-static", "-Os", *flags, "-o", program, source], timeout_s=300)
    return program


async def said(vm: Vm, *argv: str) -> str:
    result = await vm.exec(["/box", *argv])
    assert result.exit_code == 0, result
    return result.stdout.text.strip()


async def identity(vm: Vm) -> dict[str, str]:
    return {
        "random": await said(vm, "random"),
        "uuid": await said(vm, "cat", "/proc/sys/kernel/random/uuid"),
        "boot_id": await said(vm, "cat", "/proc/sys/kernel/random/boot_id"),
        "machine_id": await said(vm, "cat", "/etc/machine-id"),
    }


async def clock_error_s(vm: Vm) -> float:
    """Guest minus host; the guest's answer lies somewhere between the two readings of the host."""
    before = time.time()
    guest = float(await said(vm, "now"))
    after = time.time()
    return max(guest - after, 0.0) or min(guest - before, 0.0)


async def test_a_fork_runs_a_program(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    async with hypervisor.start(disk, SMALL, options(env={"FROM_TASK": "1"})) as vm:
        assert vm.info.how == "fork"
        assert vm.info.isolation == hypervisor.isolation
        assert vm.info.template == await hypervisor.prepare(SMALL)
        assert (await vm.exec(["/box"])).exit_code == 0
        assert (await vm.exec(["/box", "unknown"])).exit_code == 2
        assert await said(vm, "processors") == "1"


async def test_a_cold_boot_runs_a_program(settings: QemuSettings, disk: Disk, options: Options) -> None:
    cold = QemuHypervisor(replace(settings, fork=False))
    chosen = options()
    async with cold.start(disk, SMALL, chosen) as vm:
        assert vm.info.how == "boot"
        assert abs(await clock_error_s(vm)) < 0.5
        assert len(await said(vm, "random")) == 64
    cold.close()
    assert chosen.console is not None
    assert chosen.console.exists()


async def test_clones_differ_and_know_the_time(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    await hypervisor.prepare(SMALL)
    await anyio.sleep(2)  # so that a clock that was not set would be seen
    async with hypervisor.start(disk, SMALL, options()) as one, hypervisor.start(disk, SMALL, options()) as two:
        first, second = await identity(one), await identity(two)
        assert [key for key in first if first[key] == second[key]] == []
        for vm in (one, two):
            assert vm.info.template_age_s > 2
            assert abs(vm.info.clock_error_s) < 0.5
            assert abs(await clock_error_s(vm)) < 0.5


@pytest.mark.slow
async def test_the_clock_is_right_after_a_minute(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    """A wrong counter rate shows only with time."""
    await hypervisor.prepare(SMALL)
    await anyio.sleep(30)
    async with hypervisor.start(disk, SMALL, options()) as vm:
        assert vm.info.template_age_s > 30
        await anyio.sleep(30)
        assert abs(await clock_error_s(vm)) < 0.5


async def test_two_processors(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    machine = SMALL.model_copy(update={"cpus": 2})
    assert await hypervisor.prepare(machine) != await hypervisor.prepare(SMALL)
    async with hypervisor.start(disk, machine, options()) as vm:
        assert vm.info.how == "fork"
        assert await said(vm, "processors") == "2"


async def test_what_a_vm_writes_stays_in_its_own_disk(
    hypervisor: QemuHypervisor, disk: Disk, options: Options
) -> None:
    before = disk.path.read_bytes()
    first = options()
    async with hypervisor.start(disk, SMALL, first) as vm:
        assert (await vm.exec(["/box", "fill", "/kept", "3"])).exit_code == 0
        await vm.stop()
        await vm.stop()
    async with hypervisor.start(disk, SMALL, options()) as vm:
        assert "kept" not in await said(vm, "list", "/")
    async with hypervisor.start(disk, SMALL, options(writable=first.writable)) as vm:
        assert len((await vm.exec(["/box", "cat", "/kept"], stdout=lambda _: None)).stdout.tail) == 64 * 1024
    assert disk.path.read_bytes() == before


async def test_the_disk_has_a_hard_cap(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    chosen = options()
    async with hypervisor.start(disk, SMALL, chosen) as vm:
        result = await vm.exec(["/box", "fill", "/big", "400"])
        assert result.exit_code == 1
        assert "No space left" in result.stderr.text
        assert (await vm.exec(["/box"])).exit_code == 0
    assert chosen.writable.stat().st_size == SMALL.storage_mib * 1024 * 1024


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def limits_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {line[:26].strip(): line[26:].split()[0] for line in lines}


async def test_the_vmm_is_confined(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    """As the kernel tells it, of the process that runs the guest."""
    async with hypervisor.start(disk, SMALL, options()) as one, hypervisor.start(disk, SMALL, options()) as two:
        qemu, other = one.status().qemu_pid, two.status().qemu_pid
        status, limits = status_of(qemu), limits_of(qemu)
        assert status["Name"].startswith("qemu-system")
        assert status["Seccomp"] == "2"
        assert status["NoNewPrivs"] == "1"
        for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
            assert int(status[kind], 16) == 0, kind
        if os.geteuid() == 0:
            uids = {int(u) for p in (qemu, other) for u in status_of(p)["Uid"].split()}
            assert len(uids) == 2, "one each, real, effective and saved"
            assert min(uids) > 1000
            assert status["Groups"] == ""
            assert int(limits["Max processes"]) <= 256
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            ours, theirs = (os.readlink(f"/proc/{p}/ns/{kind}") for p in ("self", qemu))
            assert ours != theirs, kind
        interfaces = re.findall(r"^\s*(\S+):", Path(f"/proc/{qemu}/net/dev").read_text(), re.MULTILINE)
        assert interfaces == ["lo"]
        assert limits["Max core file size"] == "0"
        assert int(limits["Max open files"]) <= 256
        assert int(limits["Max file size"]) <= SMALL.storage_mib * 1024 * 1024
        seen = {line.split()[4] for line in Path(f"/proc/{qemu}/mountinfo").read_text().splitlines()}
        assert not {"/home", "/root", "/tmp", "/etc", "/var", "/sys", "/dev"} & seen


async def test_the_guest_has_neither_network_nor_pci(
    hypervisor: QemuHypervisor, disk: Disk, options: Options
) -> None:
    async with hypervisor.start(disk, SMALL, options()) as vm:
        assert await said(vm, "list", "/sys/class/net") == "lo"
        pci = await vm.exec(["/box", "list", "/sys/bus/pci/devices"])
        assert pci.stdout.data == b""
        argv = " ".join(vm.info.argv)
        assert not re.search(r"-net|-nic|pci|usb|vga|virtfs|-monitor", argv)


async def test_a_vmm_that_dies_while_it_is_asked_is_a_boot_error(
    hypervisor: QemuHypervisor, disk: Disk, options: Options
) -> None:
    async with hypervisor.start(disk, SMALL, options()) as vm:
        pid = vm.status().qemu_pid
        os.kill(pid, signal.SIGSTOP)  # so that the question waits for its answer
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def kill_soon() -> None:
                    await anyio.sleep(0.3)
                    os.kill(pid, signal.SIGKILL)

                tasks.start_soon(kill_soon)
                error = None
                try:
                    await vm._vmm.command("query-status")
                except BootError as e:
                    error = e
        assert error is not None and "query-status" in error.message


async def test_a_vmm_that_is_killed_is_noticed_at_once(
    hypervisor: QemuHypervisor, disk: Disk, options: Options
) -> None:
    async with hypervisor.start(disk, SMALL, options()) as vm:
        with pytest.raises(GuestLost) as caught, anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:

                async def kill_soon() -> None:
                    await anyio.sleep(0.3)
                    os.kill(vm.status().qemu_pid, signal.SIGKILL)

                tasks.start_soon(kill_soon)
                error = None
                try:
                    await vm.exec(["/box", "sleep", "60"])
                except GuestLost as e:
                    error = e
            assert error is not None
            raise error
        assert caught.value.cause == "vmm_killed"
        with pytest.raises(GuestLost):
            await vm.exec(["/box"])


async def test_nothing_is_left_of_a_vm(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        async with hypervisor.start(disk, SMALL, options()) as vm:
            group = vm.status().pids
            assert len(group) >= 3
            owner = re.search(r"dayfly:(\w+):", " ".join(vm.info.argv))
            assert owner
            assert set(processes_of(owner[1])) == set(group)
        assert [pid for pid in group if _alive(pid)] == []
        assert processes_of(owner[1]) == {}
        assert not (hypervisor.settings.cache / "run" / owner[1]).exists()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.06, 0.2])
async def test_a_start_that_is_cancelled_leaves_nothing(
    hypervisor: QemuHypervisor, disk: Disk, options: Options, after_s: float
) -> None:
    await hypervisor.prepare(SMALL)
    with anyio.move_on_after(after_s):
        async with hypervisor.start(disk, SMALL, options()) as vm:
            await vm.exec(["/box", "sleep", "60"])
    left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert [line for line in left if keeper.__file__ not in line] == []


async def test_a_vm_does_not_outlive_its_lifetime(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    """Enforced by a process that is not ours: this test only waits for the news."""
    async with hypervisor.start(disk, SMALL, options(lifetime_s=4)) as vm:
        with pytest.raises(GuestLost), anyio.fail_after(15):
            await vm.exec(["/box", "sleep", "60"])


CONTROLLER = """
import sys
from pathlib import Path
import anyio
from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings
from dayfly.model import Disk, ImageConfig, Machine
from dayfly.protocols import StartOptions

cache, image, work = (Path(a) for a in sys.argv[1:4])

async def main():
    hypervisor = QemuHypervisor(QemuSettings(cache_dir=cache))
    disk = Disk(image, "sha256:0", ImageConfig())
    machine = Machine(memory_mib=256, storage_mib=256)
    async with hypervisor.start(disk, machine, StartOptions("one", work / "1.img")) as one:
        async with hypervisor.start(disk, machine, StartOptions("two", work / "2.img")) as two:
            print(*one.status().pids, *two.status().pids, flush=True)
            await one.exec(["/box", "sleep", "600"])

anyio.run(main)
"""


async def test_nothing_is_left_after_the_controller_was_killed(
    hypervisor: QemuHypervisor, disk: Disk, tmp_path: Path
) -> None:
    await hypervisor.prepare(SMALL)
    cache = hypervisor.settings.cache
    controller = spawn([sys.executable, "-c", CONTROLLER, cache, disk.path, tmp_path], stdout=PIPE, stderr=None)
    assert controller.stdout is not None
    pids = [int(p) for p in controller.stdout.readline().split()]
    assert len(pids) >= 6
    os.kill(controller.pid, signal.SIGKILL)
    controller.communicate(timeout=10)
    with anyio.fail_after(10):
        while [p for p in pids if _alive(p)]:  # noqa: ASYNC110 - other processes cannot tell us
            await anyio.sleep(0.05)
    await anyio.to_thread.run_sync(sweep, cache / "run")
    assert (await anyio.to_thread.run_sync(sweep, cache / "run")).owners == 0


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


PREPARE = """
import json, sys
from pathlib import Path
import anyio
from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings
from dayfly.model import Machine

async def main():
    digest = await QemuHypervisor(QemuSettings(cache_dir=Path(sys.argv[1]))).prepare(Machine(memory_mib=256))
    print(json.dumps(digest))

anyio.run(main)
"""


async def test_two_processes_share_one_template(own_settings: QemuSettings) -> None:
    answers: list[str] = []

    async def prepare() -> None:
        done = await run_async([sys.executable, "-c", PREPARE, own_settings.cache], timeout_s=120)
        answers.append(json.loads(done.stdout))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepare)
        tasks.start_soon(prepare)
    listing = QemuHypervisor(own_settings).templates.listing()
    assert answers == [listing[0].digest] * 2
    assert len(listing) == 1


async def test_another_cpu_is_another_template(hypervisor: QemuHypervisor) -> None:
    other = QemuHypervisor(replace(hypervisor.settings, accelerator="tcg", cpu="max"))
    assert await other.prepare(SMALL) != await hypervisor.prepare(SMALL)
    other.close()


@pytest.mark.parametrize("lie", ["OTHER_NONCE", "OTHER_TIME", "SILENT"])
async def test_a_clone_that_does_not_confirm_never_runs_anything(
    own_settings: QemuSettings, disk: Disk, options: Options, tmp_path: Path, lie: str
) -> None:
    """Guests that really boot and fork, with an agent that lies; the cold boot that follows is treated alike."""
    agent = await anyio.to_thread.run_sync(compile_program, LIAR, tmp_path / "liar", f"-D{lie}")
    hypervisor = QemuHypervisor(replace(own_settings, agent=agent))
    started = False
    with pytest.raises(BootError) as caught:
        async with hypervisor.start(disk, SMALL, options(boot_timeout_s=4)):
            started = True
    hypervisor.close()
    assert not started
    assert caught.value.cause == "clone_unconfirmed"


async def test_many_at_once_queue(hypervisor: QemuHypervisor, disk: Disk, options: Options) -> None:
    async with AsyncExitStack() as stack:
        vms: list[Vm] = []

        async def start() -> None:
            vms.append(await stack.enter_async_context(hypervisor.start(disk, SMALL, options())))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(start)
        assert len({(await identity(vm))["random"] for vm in vms}) == 8
