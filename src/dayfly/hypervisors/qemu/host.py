"""What this host gives to VMs, found out once per hypervisor: programs, kernel, accelerator, counter rate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dayfly.errors import ConfigError, HostError
from dayfly.guest.build import agent_binary
from dayfly.hypervisors.qemu.confine import Launchers, find_launchers
from dayfly.hypervisors.qemu.initramfs import make_initramfs
from dayfly.hypervisors.qemu.kernel import Kernel, boot_image, file_digest, find_kernel, load_modules
from dayfly.hypervisors.qemu.machine import FORMAT, Platform, command_line, cpu_model
from dayfly.hypervisors.qemu.probe import probe_kvm
from dayfly.hypervisors.qemu.settings import QemuSettings
from dayfly.hypervisors.qemu.tsc import host_tsc_khz
from dayfly.model import Machine
from dayfly.process import run, which

QEMU_HINT = "install the package qemu-system-x86 (or qemu-system-arm on aarch64)"


@dataclass(frozen=True)
class Host:
    platform: Platform
    launchers: Launchers
    kernel: Kernel
    image: Path
    """What QEMU boots: the ELF made from the kernel, or the kernel as it is."""
    image_digest: str
    initramfs: bytes
    initramfs_digest: str

    def template_parts(self, machine: Machine) -> dict[str, object]:
        """Everything that a saved guest depends on. QEMU itself checks next to nothing of this."""
        return {
            "format": FORMAT,
            "qemu": self.platform.version,
            "architecture": self.platform.architecture,
            "accelerator": self.platform.accelerator,
            "cpu": self.platform.cpu,
            "tsc_khz": self.platform.tsc_khz,
            "kernel": self.image_digest,
            "initramfs": self.initramfs_digest,
            "command_line": command_line(self.platform),
            "cpus": machine.cpus,
            "memory_mib": machine.memory_mib,
        }


def look_at_host(settings: QemuSettings, accelerator: Literal["kvm", "tcg"]) -> Host:
    """Blocking. Raises `HostError` naming what is missing and how to install it."""
    qemu = which(settings.qemu_name, QEMU_HINT).resolve()
    kernel = find_kernel(settings.kernel, settings.cache)
    image = boot_image(kernel, settings.cache)
    agent = settings.agent or agent_binary(settings.architecture)
    initramfs = make_initramfs(agent.read_bytes(), load_modules(kernel.modules))
    platform = Platform(
        qemu=str(qemu),
        version=qemu_version(qemu),
        architecture=settings.architecture,
        accelerator=accelerator,
        cpu=settings.cpu or cpu_model(settings.architecture, accelerator),
        tsc_khz=host_tsc_khz(settings.cache) if accelerator == "tcg" else 0,
    )
    return Host(
        platform=platform,
        launchers=find_launchers(),
        kernel=kernel,
        image=image,
        image_digest=kernel.digest if image == kernel.image else file_digest(image),
        initramfs=initramfs,
        initramfs_digest="sha256:" + hashlib.sha256(initramfs).hexdigest(),
    )


def choose_accelerator(settings: QemuSettings) -> Literal["kvm", "tcg"]:
    """KVM only when a guest really ran under it on this host. Blocking, bounded."""
    if settings.accelerator == "tcg":
        return "tcg"
    if settings.accelerator not in ("auto", "kvm"):
        raise ConfigError(f"the accelerator {settings.accelerator!r} is not known", hint="write auto, kvm or tcg")
    probe = probe_kvm(settings)
    if probe.works:
        return "kvm"
    if settings.accelerator == "kvm":
        raise HostError(
            f"KVM was asked for and does not work: {probe.detail}", hint="use auto or tcg", cause="no_kvm"
        )
    return "tcg"


def qemu_version(qemu: Path) -> str:
    """The version line and the digest of the program: a security update keeps the former."""
    line = run([qemu, "--version"], timeout_s=20).stdout.decode("utf-8", "replace").splitlines()[0]
    return f"{line} {file_digest(qemu)}"
