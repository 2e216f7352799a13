"""The initial RAM file system: the guest agent as /init and the kernel modules it loads.

A cpio archive in the `newc` format, the same bytes for the same content: it is part of a template's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dayfly.hypervisors.qemu.kernel import Module


def make_initramfs(agent: bytes, modules: Sequence[Module]) -> bytes:
    """/init, /modules/NN-name.ko in load order, and the folders that the agent mounts on."""
    archive = bytearray()
    for folder in ("dev", "modules", "proc", "sys"):
        archive += _entry(folder, 0o040755, b"")
    archive += _entry("dev/console", 0o020600, b"", device=(5, 1))
    archive += _entry("init", 0o100755, agent)
    for number, module in enumerate(modules):
        archive += _entry(f"modules/{number:02d}-{module.name}.ko", 0o100644, module.data)
    archive += _entry("TRAILER!!!", 0, b"")
    return bytes(_padded(archive, 512))


def _entry(name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> bytes:
    path = name.encode() + b"\x00"
    # inode 0, owner root, one link, time 0: nothing here depends on when or where it was made
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    header = b"070701" + b"".join(b"%08X" % value for value in fields)
    return bytes(_padded(bytearray(header + path), 4) + _padded(bytearray(data), 4))


def _padded(data: bytearray, to: int) -> bytearray:
    return data + bytes(-len(data) % to)


def names(archive: bytes) -> Iterable[str]:
    """The names in an archive of ours, for tests and for showing."""
    at = 0
    while archive[at : at + 6] == b"070701":
        size, length = int(archive[at + 54 : at + 62], 16), int(archive[at + 94 : at + 102], 16)
        name = archive[at + 110 : at + 110 + length - 1].decode()
        if name == "TRAILER!!!":
            return
        yield name
        at += (110 + length + 3) // 4 * 4 + (size + 3) // 4 * 4
