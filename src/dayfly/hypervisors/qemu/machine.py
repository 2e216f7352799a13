"""QEMU's command line: pure functions from a machine's shape and open descriptors to arguments.

A template and its clones must be given the same devices in the same order; QEMU does not check that itself
(a clone with another CPU model or a further disk is accepted and goes wrong later), so the parts that matter
here are parts of the template's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayfly.model import Machine

FORMAT = 1
"""Raise this when the devices below, or the way a template is saved, change."""

DISK_VIRTUAL_SIZE = 64 * 1024**3
"""What a guest made from a template believes the size of both disks to be, in bytes. The file systems on them
are smaller; a request beyond the end of the real file is refused by QEMU."""

AGENT_PORT = "dayfly.agent"
NAME_PREFIX = "dayfly"
CONSOLE = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}

# TCG: `max` boots a quarter slower; plain Nehalem lacks ARAT, so an idle microvm guest would tick at 250 Hz for
# ever (2 % of a core each); RDRAND is the host's getrandom() under TCG, one more source of fresh entropy.
TCG_CPU = {"x86_64": "Nehalem-v1,+arat,+rdrand,+aes", "aarch64": "max"}


@dataclass(frozen=True)
class Platform:
    """What is the same for all VMs of one hypervisor."""

    qemu: str
    """Full path of the program."""
    version: str
    """Its version line and the digest of the program."""
    architecture: str
    accelerator: Literal["kvm", "tcg"]
    cpu: str
    tsc_khz: int
    """Of the host; used under TCG on x86_64, else 0."""


@dataclass(frozen=True)
class Descriptors:
    """Open files that QEMU inherits, by their numbers."""

    agent: int
    qmp: int
    console: int
    ram: int
    base: int
    work_rw: int
    work_ro: int

    @property
    def all(self) -> tuple[int, ...]:
        return (self.agent, self.qmp, self.console, self.ram, self.base, self.work_rw, self.work_ro)


def cpu_model(architecture: str, accelerator: str) -> str:
    return "host" if accelerator == "kvm" else TCG_CPU[architecture]


def devices(platform: Platform, machine: Machine, fds: Descriptors, name: str, *, share_ram: bool) -> list[str]:
    """Everything but the kernel or the state to start from. `name` is how a sweep finds the process again."""
    return [
        platform.qemu,
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        *("-display", "none"),
        *("-name", name),
        *("-M", _board(platform)),
        *("-accel", "tcg,tb-size=64" if platform.accelerator == "tcg" else "kvm"),
        *("-cpu", platform.cpu),
        *("-smp", str(machine.cpus)),
        *("-m", f"{machine.memory_mib}M"),
        *("-object", f"memory-backend-file,id=ram,size={machine.memory_mib}M,mem-path=/proc/self/fd/{fds.ram}"
                     f",share={'on' if share_ram else 'off'}"),
        *("-chardev", f"socket,id=qmp,fd={fds.qmp}", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=console,fd={fds.console}", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=agent,fd={fds.agent}"),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-device", f"virtserialport,chardev=agent,nr=1,name={AGENT_PORT}"),
        *("-add-fd", f"fd={fds.base},set=1"),
        *("-drive", "if=none,id=base,file=/dev/fdset/1,format=raw,readonly=on,file.locking=off"),
        *("-device", "virtio-blk-device,drive=base,serial=base"),
        # QEMU opens a disk read-only until the incoming state is complete: the set needs both kinds
        *("-add-fd", f"fd={fds.work_rw},set=2", "-add-fd", f"fd={fds.work_ro},set=2"),
        # nobody reads a work disk after a crash of the host, so its flushes need not reach the medium
        *("-drive", "if=none,id=work,file=/dev/fdset/2,format=raw,file.locking=off,cache=unsafe,werror=enospc"),
        *("-device", "virtio-blk-device,drive=work,serial=work"),
        *("-object", "rng-builtin,id=rng", "-device", "virtio-rng-device,rng=rng"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
    ]  # fmt: skip


def _board(platform: Platform) -> str:
    if platform.architecture == "aarch64":
        return "virt,memory-backend=ram"
    # the PIT and PIC are not needed with a given TSC rate; without the RTC a boot takes 2 s more
    return "microvm,acpi=on,rtc=on,pit=off,pic=off,isa-serial=on,memory-backend=ram"


def boot_from(kernel: int, initramfs: int, platform: Platform) -> list[str]:
    """Cold boot; the files are given as descriptors, so the confined QEMU needs no path to them."""
    return [
        *("-kernel", f"/proc/self/fd/{kernel}"),
        *("-initrd", f"/proc/self/fd/{initramfs}"),
        *("-append", command_line(platform)),
    ]


RESTORE = ["-incoming", "defer"]
"""Wait for the state. Without -S, so that the guest goes on by itself when the state is complete: that saves two
QMP round trips and the polling between them."""


def command_line(platform: Platform) -> str:
    """The kernel's parameters. Nothing here is a secret or belongs to a task."""
    words = [
        f"console={CONSOLE[platform.architecture]}",
        "loglevel=4",
        "panic=-1",
        "mitigations=off",  # the guest runs one rollout; the host's own mitigations are the host's affair
        "random.trust_cpu=on",
        "audit=0",
        "lsm=capability",
        "cryptomgr.notests",
        "rcupdate.rcu_expedited=1",
        "init_on_alloc=0",  # a fresh guest has no secrets to wipe, and every touched page is one of our own
    ]
    if platform.architecture == "x86_64":
        words += ["reboot=t", "8250.nr_uarts=1", "mce=off"]
        if platform.accelerator == "tcg":
            words += [f"tsc_early_khz={platform.tsc_khz}", "no_timer_check", "tsc=reliable"]
    return " ".join(words)
