"""The running VM: the guest's client, what a clone must confirm first, and its loss by name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from dayfly.errors import DayflyError, GuestLost, GuestRefused, SandboxOom
from dayfly.guest.channel import Channel
from dayfly.guest.client import GuestClient
from dayfly.hypervisors.qemu.vmm import Vmm, processes_of_group
from dayfly.model import Disk, VmInfo
from dayfly.protocols import StartOptions

CLOCK_TOLERANCE_S = 0.5
POWER_OFF_TIMEOUT_S = 20.0
SILENCE_S = 5.0
LAST_WORDS_S = 2.0
"""How long a closed channel waits for the VMM's end, which says more about the cause."""

OUT_OF_MEMORY = ("Out of memory and no killable processes", "System is deadlocked on memory")


@dataclass(frozen=True)
class VmmStatus:
    """What the host sees of a VM, for tests and for showing."""

    pids: tuple[int, ...]
    """The launchers and QEMU, parents first."""
    qemu_pid: int
    argv: tuple[str, ...]


class QemuVm(GuestClient):
    """See `dayfly.protocols.Vm`: the calls are the guest client's; this adds the machine around it."""

    def __init__(self, sock: socket.socket, vmm: Vmm) -> None:
        super().__init__(sock, silence_s=SILENCE_S)
        self._channel = _VmChannel(sock, vmm)
        self._vmm = vmm
        self._info: VmInfo | None = None

    @property
    def info(self) -> VmInfo:
        assert self._info is not None, "only a confirmed VM is given out"
        return self._info

    def begin(self, info: VmInfo) -> None:
        self._info = info

    def status(self) -> VmmStatus:
        pids = processes_of_group(self._vmm.popen.pid)
        return VmmStatus(tuple(pids), pids[-1], self._vmm.argv)

    async def stop(self) -> None:
        """See `protocols.Vm.stop`. A guest that does not power off in time is killed; its disk's journal helps."""
        with anyio.move_on_after(POWER_OFF_TIMEOUT_S):
            await self.poweroff(timeout_s=POWER_OFF_TIMEOUT_S)
            await self._vmm.exited.wait()
        await self._vmm.destroy()


class _VmChannel(Channel):
    """A channel that, when it closes, lets the VMM say why."""

    def __init__(self, sock: socket.socket, vmm: Vmm) -> None:
        super().__init__(sock, silence_s=SILENCE_S)
        self._vmm = vmm
        self._waiting: asyncio.TimerHandle | None = None
        vmm.on_exit.append(lambda: self._end_now(loss(vmm)))

    def end(self, error: DayflyError) -> None:
        if error.cause != "guest_lost" or self._loop is None or self._vmm.exited.is_set():
            self._end_now(error)
        elif self._waiting is None:
            self._loop.remove_reader(self._sock)
            self._waiting = self._loop.call_later(LAST_WORDS_S, self._end_now, error)

    def _end_now(self, error: DayflyError) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super().end(error)


def loss(vmm: Vmm) -> DayflyError:
    """Why the VMM has ended by itself, as an error to raise at whoever uses the guest."""
    status, said = vmm.popen.returncode, vmm.stderr.last_lines()
    console = vmm.console.last_lines(12)
    if vmm.host_disk_full:
        return GuestLost(
            "the host's disk is full, so the guest was ended", hint="free some disk space", cause="host_disk_full"
        )
    if any(words in console for words in OUT_OF_MEMORY):
        return SandboxOom("the guest ran out of memory", hint=console)
    if "Kernel panic" in console:
        return GuestLost("the guest's kernel panicked", hint=console, cause="guest_panic")
    if status in (-9, 137):
        hint = said or "its lifetime was over, or the host ran out of memory"
        return GuestLost("the VMM was killed", hint=hint, cause="vmm_killed")
    return GuestLost(f"the VMM ended by itself (status {status})", hint=said or console or None, cause="vmm_ended")


@asynccontextmanager
async def connect_guest(vmm: Vmm) -> AsyncIterator[QemuVm]:
    """The client of the guest in `vmm`; nothing is asked of it yet."""
    async with QemuVm(vmm.agent, vmm) as vm:
        yield vm


async def wait_until_waiting(vmm: Vmm, timeout_s: float) -> None:
    """Until the agent of a guest that boots is ready to be told who it is. Raises `BootError`."""
    async with connect_guest(vmm) as vm:
        try:
            state = await vm.hello(timeout_s=timeout_s)
        except (GuestLost, SandboxOom) as error:
            raise vmm.boot_error(f"the guest did not boot: {error.message}") from error
        if state != "waiting":
            raise vmm.boot_error(f"the guest agent is {state!r} after a boot, not 'waiting'")


async def confirm(vmm: Vmm, vm: QemuVm, disk: Disk, options: StartOptions, *, booted: bool) -> float:
    """Make a guest one of its own and mount its disks; returns how far its clock is off, in seconds.

    Fails closed: a guest that does not confirm, or whose clock is wrong, is never given to anyone. Raises
    `BootError` with the cause `clone_unconfirmed`, or `boot_failed` for what follows.
    """
    timeout_s = options.boot_timeout_s
    try:
        if booted:
            await vm.hello(timeout_s=timeout_s)
        clock = await vm.clone(hostname=options.hostname, timeout_s=timeout_s)
    except (GuestLost, GuestRefused, SandboxOom, TimeoutError) as error:
        raise vmm.boot_error(f"the guest did not confirm who it is: {error}", "clone_unconfirmed") from error
    if abs(clock.error_s) > CLOCK_TOLERANCE_S:
        raise vmm.boot_error(f"the guest's clock is {clock.error_s:+.3f} s off", "clone_unconfirmed")
    try:
        await vm.setup(
            env={**disk.config.env, **options.env},
            workdir=options.workdir or disk.config.workdir or "/",
            user=disk.config.user,
            privileged=options.privileged,
            timeout_s=timeout_s,
        )
    except (GuestLost, GuestRefused, SandboxOom) as error:
        raise vmm.boot_error(f"the guest could not be set up: {error.message}") from error
    return clock.error_s
