"""What a person can decide about the QEMU hypervisor, as one frozen value."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Accelerator = Literal["auto", "kvm", "tcg"]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/dayfly`, by default `~/.cache/dayfly`."""
    root = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "dayfly"


@dataclass(frozen=True)
class QemuSettings:
    accelerator: str = "auto"
    """auto, kvm or tcg. `auto` is KVM only when a guest really ran under it."""
    fork: bool = True
    """False: boot every VM cold."""
    max_starting: int = 4
    """How many VMs may be starting at the same time."""
    kernel: Path | None = None
    """A bzImage or vmlinux with its modules in `../lib/modules` or `/lib/modules`; None: find or fetch one."""
    cache_dir: Path | None = None
    cpu: str | None = None
    """QEMU's CPU model; None: `host` under KVM, see `machine.cpu_model` for TCG."""
    qemu: str | None = None
    """The QEMU program; None: `qemu-system-x86_64` (or `-aarch64`) on the PATH."""
    agent: Path | None = None
    """The program to boot as the guest's agent; None: the one that was built with this version."""
    boot_timeout_s: float = 120.0
    """Bound of one template boot."""
    architecture: str = field(default_factory=platform.machine)

    @property
    def cache(self) -> Path:
        return self.cache_dir or default_cache_dir()

    @property
    def run_folder(self) -> Path:
        """Where owners of running VMs are; `owner.sweep` takes it."""
        return self.cache / "run"

    @property
    def templates_folder(self) -> Path:
        """For `TemplateStore`."""
        return self.cache / "templates"

    @property
    def qemu_name(self) -> str:
        return self.qemu or f"qemu-system-{self.architecture}"
