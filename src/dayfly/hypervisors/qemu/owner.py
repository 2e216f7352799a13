"""Who owns which VMM, so that what a killed controller left behind can be found and removed.

A controller has a folder `run/<id>` in the cache with a locked file; the kernel drops the lock when the
controller dies, however it dies. Every VMM carries `dayfly:<id>:<vm id>` in its command line, and so do the
programs it was started through. VMs have no files of their own there: everything they use is an open
descriptor. A keeper process ends them when the controller is killed; `sweep` does it for one whose keeper was
killed too.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen  # noqa: TID251 - the type only; `process.spawn` starts it

from dayfly.errors import HostError
from dayfly.hypervisors.qemu import keeper
from dayfly.hypervisors.qemu.lock import try_lock
from dayfly.hypervisors.qemu.machine import NAME_PREFIX
from dayfly.process import PIPE, spawn

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
        """Every VM of this owner is gone."""
        _keeper.remove(self.id)
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
                _keeper.add(identity)
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
    while pids := keeper.kill_once(NAME_PREFIX, identity):
        if time.monotonic() > deadline:
            raise HostError(
                f"processes {sorted(pids)} of a dead dayfly process do not go away",
                hint="they may hang in the kernel, or belong to another user",
                cause="not_gone",
            )
        killed |= pids
        time.sleep(0.01)
    return killed


def processes_of(identity: str) -> dict[int, str]:
    """Processes started for the VMs of an owner: pid → VM id."""
    return keeper.processes_of(NAME_PREFIX, identity)


class _Keeper:
    """The one keeper of this process: started with the first owner, and again should somebody kill it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen: Popen[bytes] | None = None
        self._owners: list[str] = []
        atexit.register(self._end)

    def add(self, identity: str) -> None:
        with self._lock:
            self._owners.append(identity)
            if not self._tell(f"+{identity}\n"):
                self._start()

    def remove(self, identity: str) -> None:
        with self._lock:
            self._owners.remove(identity)
            self._tell(f"-{identity}\n")

    def _start(self) -> None:
        if self._popen is not None:
            self._popen.communicate()
        self._popen = spawn(
            [sys.executable, "-I", "-S", keeper.__file__, NAME_PREFIX], stdin=PIPE, env={}, cwd=Path("/")
        )
        self._tell("".join(f"+{identity}\n" for identity in self._owners))

    def _tell(self, lines: str) -> bool:
        """False when there is no keeper to tell."""
        if self._popen is None or self._popen.poll() is not None:
            return False
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(lines.encode())
            self._popen.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _end(self) -> None:
        with suppress(OSError):
            if self._popen is not None and self._popen.stdin is not None:
                self._popen.stdin.close()
                self._popen.wait(timeout=10)


_keeper = _Keeper()
