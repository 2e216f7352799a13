"""VMs on QEMU's `microvm` machine: templates, forks, confinement. See README.md in the folder above."""

from dayfly.hypervisors.qemu.hypervisor import QemuHypervisor
from dayfly.hypervisors.qemu.settings import QemuSettings

__all__ = ["QemuHypervisor", "QemuSettings"]
