"""How a VMM is confined: the programs that QEMU is started through, and who it runs as.

    prlimit → setpriv → timeout → setpriv → bwrap → qemu

prlimit bounds descriptors, core files, file size and (with a uid of its own) processes. setpriv drops to a uid
that no other VM has, when started as root, and makes the chain die with the controller (`keeper` ends what that
misses). timeout ends a VM whose controller has forgotten it. bwrap gives it new user, mount, pid, net, ipc, uts
and cgroup namespaces with nothing but /usr to read. QEMU's own seccomp filter comes on top (`machine.devices`).
There is no address space limit: TCG and thread stacks reserve far more than they use. cgroup limits are left to
the host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from dayfly.errors import HostError
from dayfly.hypervisors.qemu.lock import try_lock
from dayfly.process import which

UIDS_PER_PROCESS = 4096
MAX_FILES = 256
MAX_PROCESSES = 128
"""Threads count: vCPUs, disk workers and the chain of launchers."""


@dataclass
class Uids:
    """Host user ids that nobody else has, one for each VM of this process; none unless we are root.

    A block of them is ours while we hold its lock (while a VM of ours is there), so no two processes share one.
    """

    folder: Path
    first: int = 0
    free: list[int] = field(default_factory=list)
    lock: int | None = None

    def take(self) -> int | None:
        if os.geteuid() != 0:
            return None
        if self.lock is None:
            self._claim()
        if not self.free:
            raise HostError("more VMs than user ids for them", hint=f"at most {UIDS_PER_PROCESS} in a process")
        return self.free.pop()

    def give_back(self, uid: int | None) -> None:
        if uid is not None:
            self.free.append(uid)

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
            self.free = []

    def _claim(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lowest, highest = uid_range()
        for block, first in enumerate(range(lowest, highest - UIDS_PER_PROCESS + 1, UIDS_PER_PROCESS)):
            if block >= 4096:
                break
            self.lock = try_lock(self.folder / f"uids-{block}")
            if self.lock is not None:
                self.free = list(range(first + UIDS_PER_PROCESS - 1, first - 1, -1))
                return
        raise HostError("no free block of user ids for VMs", hint="too many dayfly processes, or a small uid map")


def uid_range() -> tuple[int, int]:
    """Ids far from those of people and services; inside a container, the upper part of what is mapped."""
    lines = Path("/proc/self/uid_map").read_text().split("\n")
    mapped = max((int(a) + int(n) for a, _, n in (line.split() for line in lines if line)), default=65536)
    return (0x60000000, 0x70000000) if mapped >= 0x70000000 else (mapped * 5 // 8, mapped - 2)


@dataclass(frozen=True)
class Launchers:
    """Full paths of the programs of the chain, looked up once."""

    prlimit: str
    setpriv: str
    timeout: str
    bwrap: str


def find_launchers() -> Launchers:
    """Raises `HostError` naming the package that is missing."""
    return Launchers(
        prlimit=str(which("prlimit", "install the package util-linux")),
        setpriv=str(which("setpriv", "install the package util-linux")),
        timeout=str(which("timeout", "install the package coreutils")),
        bwrap=str(which("bwrap", "install the package bubblewrap")),
    )


def chain(
    launchers: Launchers, qemu: str, *, uid: int | None, lifetime_s: float, largest_file: int, kvm: bool
) -> list[str]:
    """The arguments before QEMU's own."""
    return [
        *_limits(launchers, uid, largest_file),
        *_identity(launchers, uid, kvm),
        *(launchers.timeout, "--signal=KILL", f"{max(1.0, lifetime_s):.0f}"),
        *(launchers.setpriv, "--pdeathsig=KILL"),
        *_namespaces(launchers, qemu, kvm),
    ]


def _limits(launchers: Launchers, uid: int | None, largest_file: int) -> list[str]:
    limits = [launchers.prlimit, "--core=0", f"--nofile={MAX_FILES}", f"--fsize={largest_file}"]
    # without a uid of its own the VMM shares the count with everything else the caller runs
    return [*limits, f"--nproc={MAX_PROCESSES}"] if uid is not None else limits


def _identity(launchers: Launchers, uid: int | None, kvm: bool) -> list[str]:
    arguments = [launchers.setpriv, "--pdeathsig=KILL", "--no-new-privs"]
    if uid is None:
        return arguments
    groups = f"--groups={Path('/dev/kvm').stat().st_gid}" if kvm else "--clear-groups"
    return [
        *arguments,
        *(f"--reuid={uid}", f"--regid={uid}", groups),
        *("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"),
    ]


def _namespaces(launchers: Launchers, qemu: str, kvm: bool) -> list[str]:
    arguments = [launchers.bwrap, "--unshare-all", "--die-with-parent", "--as-pid-1", "--clearenv"]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in ("/lib", "/lib64", "/lib32"):
        if Path(name).is_symlink():
            arguments += ["--symlink", str(Path(name).readlink()), name]
        elif Path(name).is_dir():
            arguments += ["--ro-bind", name, name]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc"]
    if not qemu.startswith("/usr/"):
        folder = str(Path(qemu).parent.parent)
        arguments += ["--ro-bind", folder, folder]
    if kvm:
        arguments += ["--dev-bind", "/dev/kvm", "/dev/kvm"]
    return [*arguments, "--chdir", "/", "--"]
