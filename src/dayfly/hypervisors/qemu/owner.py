"""Who owns which VMM, so that what a killed controller left behind can be found and removed.

A controller has a folder `run/<id>` in the cache with a locked file; the kernel drops the lock when the controller
dies, however it dies. Every VMM carries `dayfly:<id>:<vm id>` in its command line, and so do the programs it was
started through. VMs have no files of their own there: everything they use is an open descriptor.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dayfly.errors import HostError
from dayfly.hypervisors.qemu.lock import try_lock
from dayfly.hypervisors.qemu.machine import NAME_PREFIX

SWEEP_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class Owner:
    """This process's claim on its VMs."""

    id: str
    folder: Path
    lock: int

    def name(self, vm_id: str) -> str:
        """What goes into QEMU's -name."""
        return f"{NAME_PREFIX}:{self.id}:{vm_id}"

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def claim(run: Path) -> Owner:
    """Become an owner. The folder appears with its lock held: a sweep never sees one without."""
    run.mkdir(parents=True, exist_ok=True)
    for _ in range(100):
        identity = secrets.token_hex(8)
        fresh, folder = run / f".{identity}", run / identity
        fresh.mkdir(mode=0o700)
        with suppress(OSError):
            lock = try_lock(fresh / "lock")
            if lock is not None:
                fresh.rename(folder)
                return Owner(identity, folder, lock)
        # a sweep took the folder for a dead one between mkdir and lock: let it, and take another
    raise HostError(f"no folder for running VMs can be made in {run}", cause="host_error")


@dataclass(frozen=True)
class Swept:
    owners: int = 0
    """Folders of dead controllers removed."""
    processes: int = 0
    """Processes of theirs killed and seen gone."""
    vms: tuple[str, ...] = ()
    """The ids of the VMs that those belonged to."""


def sweep(run: Path) -> Swept:
    """Remove what dead controllers left. Blocking, idempotent, and blind to those that live.

    Raises `HostError` when a process does not go away.
    """
    owners, processes = 0, 0
    vms: set[str] = set()
    for folder in sorted(run.glob("*")):
        if not folder.is_dir():
            continue
        identity = folder.name.removeprefix(".")
        lock = None
        with suppress(OSError):  # another sweep has just removed it
            lock = try_lock(folder / "lock")
        if lock is None:
            continue
        try:
            killed = _kill_all(identity)
            processes += len(killed)
            vms |= set(killed.values())
            shutil.rmtree(folder, ignore_errors=True)
            owners += 1
        finally:
            os.close(lock)
    return Swept(owners, processes, tuple(sorted(vms)))


def _kill_all(identity: str) -> dict[int, str]:
    """Kill every process that carries the owner's mark, and wait until none is there; pid → VM id."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while pids := processes_of(identity):
        if time.monotonic() > deadline:
            raise HostError(
                f"processes {sorted(pids)} of a dead dayfly process do not go away",
                hint="they may hang in the kernel, or belong to another user",
                cause="not_gone",
            )
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= pids
        time.sleep(0.01)
    return killed


def processes_of(identity: str) -> dict[int, str]:
    """Processes (not zombies, which have no command line) started for the VMs of an owner: pid → VM id."""
    mark = f"{NAME_PREFIX}:{identity}:".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # as an argument of its own: an editor that shows such a name is not meant
            for argument in (folder / "cmdline").read_bytes().split(b"\x00"):
                if argument.startswith(mark):
                    found[int(folder.name)] = os.fsdecode(argument[len(mark) :])
    return found
