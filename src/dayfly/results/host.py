"""On what a job runs, as texts for its lock: a difference explains much, and decides nothing."""

from __future__ import annotations

import os
import platform

import dayfly
from dayfly.protocols import Hypervisor


def host_facts(hypervisor: Hypervisor) -> dict[str, str]:
    """Facts of this machine and its software. Of QEMU only what the hypervisor found out when it was prepared."""
    facts = {
        "dayfly": dayfly.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": str(os.cpu_count() or 0),
        "isolation": hypervisor.isolation,
    }
    return facts | _qemu_facts(hypervisor)


def _qemu_facts(hypervisor: Hypervisor) -> dict[str, str]:
    from dayfly.hypervisors.qemu.hypervisor import QemuHypervisor

    if not isinstance(hypervisor, QemuHypervisor):
        return {}
    host = hypervisor.host()
    return {"qemu": host.platform.version, "cpu_model": host.platform.cpu, "guest_kernel": host.image_digest}
