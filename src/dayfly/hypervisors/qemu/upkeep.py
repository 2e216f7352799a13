"""What the command line does with the cache: list and prune templates, sweep leftovers. Blocking."""

from __future__ import annotations

from dataclasses import dataclass

from dayfly.hypervisors.qemu import owner
from dayfly.hypervisors.qemu.settings import QemuSettings
from dayfly.hypervisors.qemu.template import TemplateInfo, TemplateStore


@dataclass(frozen=True)
class TemplateRow:
    """One template, ready to be shown."""

    key: str
    machine: str
    accelerator: str
    bytes: int
    created: float
    last_used: float
    in_use: bool


def list_templates(settings: QemuSettings | None = None) -> list[TemplateRow]:
    """Most recently used first."""
    store = TemplateStore((settings or QemuSettings()).templates_folder)
    return [_row(info) for info in store.listing()]


def _row(info: TemplateInfo) -> TemplateRow:
    parts = info.parts
    return TemplateRow(
        key=info.digest,
        machine=f"{parts.get('cpus')} CPU, {parts.get('memory_mib')} MiB",
        accelerator=str(parts.get("accelerator")),
        bytes=info.bytes,
        created=info.created_unix,
        last_used=info.used_unix,
        in_use=info.in_use,
    )


def prune_templates(*, unused_s: float = 0.0, settings: QemuSettings | None = None) -> list[str]:
    """Remove templates that were not used for so long and are not in use; returns their digests."""
    return TemplateStore((settings or QemuSettings()).templates_folder).prune(unused_s)


def sweep(settings: QemuSettings | None = None) -> list[str]:
    """End the VMs of dead controllers; returns the ids of those that were still there. Safe to repeat."""
    return list(owner.sweep((settings or QemuSettings()).run_folder).vms)
