"""`QemuHypervisor`: fresh VMs by fork of a template, or by cold boot."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from dayfly.errors import BootError
from dayfly.hypervisors.qemu.confine import Uids, chain
from dayfly.hypervisors.qemu.disks import MIB, ensure_writable, memory_file, open_blank, open_in
from dayfly.hypervisors.qemu.host import Host, choose_accelerator, look_at_host
from dayfly.hypervisors.qemu.life import Life
from dayfly.hypervisors.qemu.machine import DISK_VIRTUAL_SIZE, RESTORE, Descriptors, boot_from, devices
from dayfly.hypervisors.qemu.owner import Owner, claim, sweep
from dayfly.hypervisors.qemu.settings import QemuSettings
from dayfly.hypervisors.qemu.tap import Tap
from dayfly.hypervisors.qemu.template import Template, TemplateStore, key_digest
from dayfly.hypervisors.qemu.vm import QemuVm, confirm, connect_guest, wait_until_waiting
from dayfly.hypervisors.qemu.vmm import Sockets, running_vmm
from dayfly.model import Disk, Isolation, Machine, VmInfo
from dayfly.protocols import StartOptions, Vm


class QemuHypervisor:
    """See `dayfly.protocols.Hypervisor`. One per process is enough; one event loop at a time may use it."""

    def __init__(self, settings: QemuSettings | None = None) -> None:
        self.settings = settings or QemuSettings()
        self.templates = TemplateStore(self.settings.templates_folder)
        self._run = self.settings.run_folder
        self._looking = threading.Lock()
        self._accelerator: Literal["kvm", "tcg"] | None = None
        self._host: Host | None = None
        self._ready: dict[str, Template] = {}
        self._building = anyio.Lock()
        self._starting = anyio.Semaphore(self.settings.max_starting)
        self._uids = Uids(self._run)
        self._owner: Owner | None = None
        self._running = 0

    @property
    def isolation(self) -> Isolation:
        """Blocks for some seconds the first time on a host where /dev/kvm opens: it starts a guest."""
        with self._looking:
            if self._accelerator is None:
                self._accelerator = choose_accelerator(self.settings)
            return self._accelerator

    def host(self) -> Host:
        """Blocking the first time."""
        accelerator: Literal["kvm", "tcg"] = "kvm" if self.isolation == "kvm" else "tcg"
        with self._looking:
            if self._host is None:
                self._host = look_at_host(self.settings, accelerator)
            return self._host

    async def _known_host(self) -> Host:
        if self._host is None:
            return await anyio.to_thread.run_sync(self.host)
        return self._host

    async def prepare(self, machine: Machine) -> str:
        host = await self._known_host()
        if not self.settings.fork:
            return key_digest(host.template_parts(machine))
        return (await self._template(host, machine)).digest

    async def _template(self, host: Host, machine: Machine) -> Template:
        digest = key_digest(host.template_parts(machine))
        async with self._building:
            if digest not in self._ready:
                self._ready[digest] = await self.templates.get(
                    host.template_parts(machine),
                    machine.memory_mib * MIB,
                    partial(self._build_template, host, machine),
                    self.settings.boot_timeout_s,
                )
            return self._ready[digest]

    def ready_template(self, machine: Machine) -> Template:
        """The template that `prepare` made or loaded, for the benchmark's reference; it stays ours."""
        return self._ready[key_digest(self.host().template_parts(machine))]

    def close(self) -> None:
        """Give back the memory of the templates. The hypervisor can be used again."""
        for template in self._ready.values():
            template.close()
        self._ready.clear()
        self._uids.close()

    # --- one VM ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def start(self, disk: Disk, machine: Machine, options: StartOptions) -> AsyncIterator[Vm]:
        """A fresh VM; on exit it is destroyed and seen gone.

        The VM lives in a task of its own, so a caller may enter this within a time limit and leave it outside.
        """
        life = Life(partial(self._live, disk, machine, options))
        try:
            yield await life.begin()
        finally:
            await life.end()

    @asynccontextmanager
    async def _live(self, disk: Disk, machine: Machine, options: StartOptions) -> AsyncIterator[QemuVm]:
        """From nothing to a confirmed guest with its disks mounted, and back to nothing."""
        async with AsyncExitStack() as stack:
            async with self._starting:
                host = await self._known_host()
                vm = await self._fork_or_boot(stack, host, disk, machine, options)
            yield vm

    async def _fork_or_boot(
        self, stack: AsyncExitStack, host: Host, disk: Disk, machine: Machine, options: StartOptions
    ) -> QemuVm:
        if not self.settings.fork:
            return await stack.enter_async_context(self._machine(host, disk, machine, options, None))
        ours = not options.writable.exists()
        try:
            template = await self._template(host, machine)
            return await stack.enter_async_context(self._machine(host, disk, machine, options, template))
        except BootError:
            # once, and on the record: VmInfo.how says `boot`
            if ours:
                options.writable.unlink(missing_ok=True)
            return await stack.enter_async_context(self._machine(host, disk, machine, options, None))

    @asynccontextmanager
    async def _machine(
        self, host: Host, disk: Disk, machine: Machine, options: StartOptions, template: Template | None
    ) -> AsyncIterator[QemuVm]:
        """One try at a VM: a QEMU process, the clone handshake, the set-up."""
        started = time.monotonic()
        async with self._ownership() as owner:
            with ExitStack() as stack:
                given = await anyio.to_thread.run_sync(
                    _open_for_vm, stack, self.settings.cache, host, disk, machine, options, template
                )
                argv = self._command(stack, host, machine, given, owner.name(options.vm_id), options.lifetime_s)
                console = stack.enter_context(_kept_console(options.console))
                async with (
                    running_vmm(argv, given.sockets, given.inherit, timeout_s=options.boot_timeout_s) as vmm,
                    connect_guest(vmm) as vm,
                ):
                    console.append(vmm.console)
                    if given.state is not None:
                        await vmm.restore(given.state)
                    clock_error_s = await confirm(vmm, vm, disk, options, booted=template is None)
                    vm.begin(
                        VmInfo(
                            id=options.vm_id,
                            isolation=host.platform.accelerator,
                            how="boot" if template is None else "fork",
                            template="" if template is None else template.digest,
                            template_age_s=0.0 if template is None else time.time() - template.created_unix,
                            start_s=time.monotonic() - started,
                            clock_error_s=clock_error_s,
                            argv=tuple(argv),
                        )
                    )
                    yield vm

    def _command(
        self, stack: ExitStack, host: Host, machine: Machine, given: Given, name: str, lifetime_s: float
    ) -> list[str]:
        """The whole command line; the uid in it is given back when `stack` closes."""
        uid = self._uids.take()
        stack.callback(self._uids.give_back, uid)
        platform = host.platform
        confined = chain(
            host.launchers,
            platform.qemu,
            uid=uid,
            lifetime_s=lifetime_s,
            largest_file=given.largest_file,
            kvm=platform.accelerator == "kvm",
        )
        return [
            *confined,
            *devices(platform, machine, given.fds, name, share_ram=given.share_ram),
            *given.start_from,
        ]

    @asynccontextmanager
    async def _ownership(self) -> AsyncIterator[Owner]:
        """This process's mark in the cache, there as long as a VM of ours is; the first sweeps what others left."""
        if self._owner is None:
            await anyio.to_thread.run_sync(sweep, self._run)
        if self._owner is None:
            self._owner = claim(self._run)
        owner = self._owner
        self._running += 1
        try:
            yield owner
        finally:
            self._running -= 1
            if self._running == 0:
                self._owner.close()
                self._owner = None
                self._uids.close()

    async def _build_template(self, host: Host, machine: Machine, ram: int, state: int) -> None:
        """Boot to the waiting agent with blank disks, save, and end. Nothing of a task is in here."""
        timeout_s = self.settings.boot_timeout_s
        async with self._ownership() as owner:
            with ExitStack() as stack:
                given = _open_for_template(stack, host, ram)
                argv = self._command(stack, host, machine, given, owner.name("template"), 2 * timeout_s + 10)
                async with running_vmm(argv, given.sockets, given.inherit, timeout_s=timeout_s) as vmm:
                    await wait_until_waiting(vmm, timeout_s)
                    await vmm.save(state)


@dataclass(frozen=True)
class Given:
    """What one QEMU process is given: its channels, open files for RAM and disks, and what to start from."""

    sockets: Sockets
    fds: Descriptors
    start_from: list[str]
    more_fds: tuple[int, ...]
    share_ram: bool
    largest_file: int
    state: int | None = None

    @property
    def inherit(self) -> tuple[int, ...]:
        return (*self.fds.all, *self.more_fds)


def _open_for_vm(
    stack: ExitStack,
    cache: Path,
    host: Host,
    disk: Disk,
    machine: Machine,
    options: StartOptions,
    template: Template | None,
) -> Given:
    """Blocking; makes the writable disk if it is not there."""
    ensure_writable(options.writable, machine.storage_mib, cache)
    base = open_in(stack, disk.path, os.O_RDONLY)
    work = open_in(stack, options.writable, os.O_RDWR), open_in(stack, options.writable, os.O_RDONLY)
    sockets = Sockets.make(stack)
    size = os.fstat(work[0]).st_size
    if template is None:
        ram = _blank_ram(stack, machine)
        start_from, more = _boot_files(stack, host)
        return Given(sockets, _fds(sockets, ram, base, work), start_from, more, True, size)
    state = stack.enter_context(template.open_state())
    fds = _fds(sockets, template.ram, base, work)
    return Given(sockets, fds, RESTORE, (state,), False, size, state)


def _open_for_template(stack: ExitStack, host: Host, ram: int) -> Given:
    blank_rw, blank_ro = open_blank(stack)
    sockets = Sockets.make(stack)
    start_from, more = _boot_files(stack, host)
    fds = _fds(sockets, ram, blank_ro, (blank_rw, blank_ro))
    return Given(sockets, fds, start_from, more, True, DISK_VIRTUAL_SIZE)


def _fds(sockets: Sockets, ram: int, base: int, work: tuple[int, int]) -> Descriptors:
    agent, qmp, console = (end.fileno() for end in sockets.theirs)
    return Descriptors(agent, qmp, console, ram, base, *work)


def _boot_files(stack: ExitStack, host: Host) -> tuple[list[str], tuple[int, int]]:
    """Kernel and initramfs as open files, and the arguments that name them."""
    kernel = open_in(stack, host.image, os.O_RDONLY)
    initramfs = memory_file(stack, "dayfly-initramfs")
    with open(initramfs, "wb", closefd=False) as file:
        file.write(host.initramfs)
    return boot_from(kernel, initramfs, host.platform), (kernel, initramfs)


def _blank_ram(stack: ExitStack, machine: Machine) -> int:
    ram = memory_file(stack, "dayfly-ram")
    os.ftruncate(ram, machine.memory_mib * MIB)
    return ram


@contextmanager
def _kept_console(path: Path | None) -> Iterator[list[Tap]]:
    """Write the console of the VMM that is put in the list to `path`, when that has ended."""
    taps: list[Tap] = []
    try:
        yield taps
    finally:
        if path is not None:
            path.write_bytes(b"".join(tap.data for tap in taps))
