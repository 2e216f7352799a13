"""VMs on QEMU's `microvm` machine: templates, forks, confinement. See README.md in this folder."""

from dayfly.hypervisors.qemu.hypervisor import QemuHypervisor
from dayfly.hypervisors.qemu.settings import QemuSettings
from dayfly.hypervisors.qemu.upkeep import list_templates, prune_templates, sweep

__all__ = ["QemuHypervisor", "QemuSettings", "list_templates", "prune_templates", "sweep"]
