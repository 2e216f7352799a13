"""The local engine: many rollouts in one process, admitted by what the host has left.

A rollout waits until its VM fits beside those that run: CPUs (over-committed by a stated factor), memory and
free disk. Two hundred rollouts at once queue; none fails for want of room. One that could never fit is
refused before anything starts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil

from dayfly.errors import ConfigError, HostError
from dayfly.model import Machine, RolloutSpec
from dayfly.protocols import Done, RunOne

VMM_OVERHEAD_MIB = 160
"""What a VMM may use beside the guest's RAM: translated code under TCG (64 MiB), buffers, our own process."""
DISK_RESERVE_MIB = 1024
"""Free disk that admission never plans with: evidence, caches and other people's files."""


@dataclass(frozen=True)
class Capacity:
    """What VMs may use in total."""

    cpus: float
    memory_mib: int
    disk_mib: int
    rollouts: int
    """How many at once at most, whatever their size."""

    @classmethod
    def of_host(cls, folder: Path, concurrency: int | None = None) -> Capacity:
        """Measure this host; `folder` is on the disk that VMs write to.

        Without `concurrency`: one VM's CPU for each of the host's, which keeps emulated guests fast.
        With it: that many rollouts, as long as memory and disk allow.
        """
        cpus = len(os.sched_getaffinity(0))
        return cls(
            cpus=float(cpus) if concurrency is None else float("inf"),
            memory_mib=int(psutil.virtual_memory().available / 2**20 * 0.85),
            disk_mib=int(shutil.disk_usage(folder).free / 2**20) - DISK_RESERVE_MIB,
            rollouts=concurrency or max(cpus, 1),
        )


@dataclass
class Admission:
    """Counts what is in use; `enter` waits for room, first come, first served."""

    capacity: Capacity
    folder: Path | None = None
    cpus: float = 0.0
    memory_mib: int = 0
    disk_mib: int = 0
    rollouts: int = 0
    _changed: anyio.Condition = field(default_factory=anyio.Condition)
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    def refuse_impossible(self, machine: Machine) -> None:
        """Raise `ConfigError` for a machine that could never be admitted."""
        capacity = self.capacity
        if machine.memory_mib + VMM_OVERHEAD_MIB > capacity.memory_mib:
            raise ConfigError(
                f"a task needs {machine.memory_mib} MiB of memory; this host can give {capacity.memory_mib} MiB",
                hint="lower memory_mb in its task.toml, or free memory here",
            )
        if machine.storage_mib > capacity.disk_mib:
            raise ConfigError(
                f"a task may write {machine.storage_mib} MiB; this host has {capacity.disk_mib} MiB to give",
                hint="lower storage_mb in its task.toml, free disk, or put --jobs-dir on a larger disk",
            )

    def _fits(self, machine: Machine) -> bool:
        capacity = self.capacity
        if self.rollouts == 0:
            return True  # alone, a VM with more CPUs than the host has still runs, only slower
        return (
            self.rollouts < capacity.rollouts
            and self.cpus + machine.cpus <= capacity.cpus
            and self.memory_mib + machine.memory_mib + VMM_OVERHEAD_MIB <= capacity.memory_mib
            and self.disk_mib + machine.storage_mib <= capacity.disk_mib
        )

    def _take(self, machine: Machine, sign: int) -> None:
        self.rollouts += sign
        self.cpus += sign * machine.cpus
        self.memory_mib += sign * (machine.memory_mib + VMM_OVERHEAD_MIB)
        self.disk_mib += sign * machine.storage_mib

    async def enter(self, machine: Machine) -> None:
        """Wait until `machine` fits, and take its share; every `enter` needs its `leave`."""
        async with self._turn:  # a large machine at the head is not overtaken for ever by small ones
            async with self._changed:
                while not self._fits(machine):
                    await self._changed.wait()
                self._check_disk()
                self._take(machine, +1)

    async def leave(self, machine: Machine) -> None:
        with anyio.CancelScope(shield=True):
            async with self._changed:
                self._take(machine, -1)
                self._changed.notify_all()

    def _check_disk(self) -> None:
        """The plan counts caps; someone else may have filled the disk meanwhile."""
        if self.folder is not None and shutil.disk_usage(self.folder).free < DISK_RESERVE_MIB / 4 * 2**20:
            raise HostError(
                f"less than {DISK_RESERVE_MIB // 4} MiB are free below {self.folder}",
                hint="free disk, then `dayfly run --resume` goes on where this job stopped",
                cause="host_disk_full",
            )


@dataclass(frozen=True)
class LocalEngine:
    """See `dayfly.protocols.Engine`."""

    admission: Admission

    async def run(self, specs: Iterable[RolloutSpec], run_one: RunOne, done: Done) -> None:
        """Start each rollout when there is room for it; an exception of `run_one` stops all of them."""
        async with anyio.create_task_group() as group:
            for spec in specs:
                await self.admission.enter(spec.room or spec.machine)
                group.start_soon(self._one, spec, run_one, done)

    async def _one(self, spec: RolloutSpec, run_one: RunOne, done: Done) -> None:
        try:
            await done(await run_one(spec))
        finally:
            await self.admission.leave(spec.room or spec.machine)
