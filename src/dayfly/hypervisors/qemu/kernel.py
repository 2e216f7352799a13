"""The guest kernel: the distribution's own cloud kernel, and the few modules a VM needs.

Looked for in this order: the setting (`--kernel`, DAYFLY_KERNEL), the cache (`fetch_kernel` puts one there,
without root and without installing anything), /boot.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import os
import platform
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dayfly.errors import HostError
from dayfly.hypervisors.qemu.lock import locked
from dayfly.process import run, which

MODULES = (
    "virtio_mmio",
    "virtio_console",
    "virtio_blk",
    "virtio_rng",
    "squashfs",
    "erofs",
    "overlay",
    "ext4",
)
"""What the guest agent needs; names with underscores. What is built in or absent is left out."""

PACKAGES = {
    "debian": {"x86_64": "linux-image-cloud-amd64", "aarch64": "linux-image-cloud-arm64"},
    "ubuntu": {"x86_64": "linux-image-virtual", "aarch64": "linux-image-virtual"},
}
APT_RELATIONS = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
FETCH_HINT = "run `dayfly doctor --fetch-kernel`, or name a kernel with DAYFLY_KERNEL"


@dataclass(frozen=True)
class Kernel:
    image: Path
    """bzImage or ELF, as found."""
    modules: Path | None
    """The folder lib/modules/VERSION, or None when the kernel has everything built in."""
    digest: str
    """sha256:… of `image`."""


def find_kernel(named: Path | None, cache: Path) -> Kernel:
    """The kernel to boot guests with. Raises `HostError` with a hint when there is none."""
    chosen = named or _from_environment()
    if chosen is not None:
        if not chosen.is_file():
            raise HostError(f"the kernel {chosen} is not there", hint=FETCH_HINT, cause="no_kernel")
        return _kernel(chosen)
    for folder in (*_newest_first((cache / "kernels").glob("*/boot")), Path("/boot")):
        for image in _newest_first([*folder.glob("vmlinuz-*"), *folder.glob("Image-*")]):
            if os.access(image, os.R_OK):
                return _kernel(image)
    raise HostError("there is no guest kernel on this host", hint=FETCH_HINT, cause="no_kernel")


def _from_environment() -> Path | None:
    value = os.environ.get("DAYFLY_KERNEL")
    return Path(value).expanduser() if value else None


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """By version number, not by spelling: 6.1.0-57 comes before 6.1.0-9."""
    return sorted(paths, key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))], reverse=True)


def _kernel(image: Path) -> Kernel:
    version = re.sub(r"^(vmlinuz|vmlinux|Image|bzImage)-?", "", image.name)
    roots = (
        image.parent.parent / "lib/modules",
        image.parent.parent / "usr/lib/modules",
        Path("/lib/modules"),
    )
    found = [root / version for root in roots if version and (root / version / "kernel").is_dir()]
    return Kernel(image, found[0] if found else None, file_digest(image))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


# --- fetching ------------------------------------------------------------------------------------


def fetch_kernel(cache: Path, timeout_s: float = 300.0) -> Kernel:
    """Download the distribution's cloud kernel with apt and unpack it in the cache. Blocking.

    No root: apt gets lists and caches of its own. Raises `HostError` when there is no apt or no such package.
    """
    hint = "install a cloud kernel package and name it with DAYFLY_KERNEL"
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        which(program, hint)
    kernels = cache / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    with (
        locked(kernels / ".lock", timeout_s),
        tempfile.TemporaryDirectory(dir=kernels, prefix=".fetch-") as made,
    ):
        work = Path(made)
        apt = _private_apt(work, timeout_s)
        packages = _kernel_packages(apt, _meta_package(), timeout_s)
        run(["apt-get", *apt, "download", *packages], cwd=work, timeout_s=timeout_s)
        tree = work / "tree"
        for package in sorted(work.glob("*.deb")):
            run(["dpkg-deb", "-x", package, tree], timeout_s=timeout_s)
        _keep(tree, kernels / packages[0])
    return find_kernel(None, cache)


def _private_apt(work: Path, timeout_s: float) -> list[str]:
    """Options that let any user update and download: own lists, own cache, the host's sources and keys."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    options = [
        f"Dir::State={work}/state",
        "Dir::State::status=/var/lib/dpkg/status",
        f"Dir::Cache={work}/cache",
        "APT::Sandbox::User=",
        "Acquire::Languages=none",
        "Acquire::Retries=3",
    ]
    arguments = ["-q", *(word for o in options for word in ("-o", o))]
    run(["apt-get", *arguments, "update"], timeout_s=timeout_s)
    return arguments


def _meta_package() -> str:
    release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    ids = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', release, re.MULTILINE)
    words = " ".join(ids).split()
    for name in ("ubuntu", "debian"):
        if name in words and platform.machine() in PACKAGES[name]:
            return PACKAGES[name][platform.machine()]
    raise HostError(
        "no known cloud kernel package for this distribution",
        hint="name a kernel with DAYFLY_KERNEL",
        cause="no_kernel",
    )


def _kernel_packages(apt: list[str], meta: str, timeout_s: float) -> list[str]:
    """The real image package behind a meta package, and its modules package where that is separate (Ubuntu)."""
    only = [f"--no-{kind}" for kind in APT_RELATIONS]
    found = run(["apt-cache", *apt, "depends", "--recurse", *only, meta], timeout_s=timeout_s)
    names = re.findall(r"^\s*\|?Depends: (linux-(?:image|modules)-[0-9]\S+)", found.stdout.decode(), re.MULTILINE)
    unique = list(dict.fromkeys(n for n in names if "unsigned" not in n and "extra" not in n))
    images = [n for n in unique if n.startswith("linux-image-")][:1]
    if not images:
        raise HostError(f"the package {meta} names no kernel image", cause="no_kernel")
    version = images[0].removeprefix("linux-image-")
    return [*images, *(n for n in unique if n == f"linux-modules-{version}")]


def _keep(tree: Path, final: Path) -> None:
    """Move an unpacked tree to its place; one that is there already (an older fetch) is replaced."""
    merged = tree / "usr/lib/modules"
    if merged.is_dir() and not (tree / "lib").exists():
        (tree / "lib").mkdir()
        merged.rename(tree / "lib/modules")
    if final.exists():
        shutil.rmtree(final)
    tree.rename(final)


# --- the boot image ------------------------------------------------------------------------------


def boot_image(kernel: Kernel, cache: Path) -> Path:
    """What QEMU is given: the ELF inside a bzImage (boots a fifth faster through PVH), else the image as it is.

    Kept in the cache by digest. Blocking; unpacking LZ4 takes some seconds the first time.
    """
    folder = cache / "kernels" / "elf"
    ready = folder / kernel.digest.removeprefix("sha256:")
    if ready.exists():
        return ready
    elf = extract_elf(kernel.image.read_bytes())
    if elf is None:
        return kernel.image
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(elf)
        os.fchmod(file.fileno(), 0o644)
    Path(file.name).replace(ready)
    return ready


def extract_elf(image: bytes) -> bytes | None:
    """The vmlinux in a bzImage that has a PVH entry, or None."""
    if image[:4] == b"\x7fELF":
        return image
    if len(image) < 0x250 or image[0x202:0x206] != b"HdrS":
        return None
    start = (image[0x1F1] + 1) * 512
    offset, length = struct.unpack_from("<II", image, 0x248)
    elf = _decompress(image[start + offset : start + offset + length])
    return elf if elf is not None and elf[:4] == b"\x7fELF" and b"Xen\x00" in elf else None


def _decompress(payload: bytes) -> bytes | None:
    """By magic number; the kernel appends the unpacked size, which every reader has to ignore."""
    if payload[:2] == b"\x1f\x8b":
        return zlib.decompressobj(wbits=31).decompress(payload)
    if payload[:6] == b"\xfd7zXZ\x00":
        return lzma.LZMADecompressor().decompress(payload)
    if payload[:3] == b"BZh":
        return bz2.BZ2Decompressor().decompress(payload)
    if payload[:4] == b"\x02\x21\x4c\x18":
        return _unpack_lz4_legacy(payload)
    if payload[:4] == b"\x28\xb5\x2f\xfd" and shutil.which("zstd"):
        return run(["zstd", "-dcq"], input=payload[:-4], timeout_s=60).stdout
    return None


def _unpack_lz4_legacy(payload: bytes) -> bytes:
    out, at = bytearray(), 4
    while at + 4 <= len(payload):
        (size,) = struct.unpack_from("<I", payload, at)
        if at + 4 + size > len(payload):
            break  # the appended size of the whole, not a block
        out += unpack_lz4_block(payload[at + 4 : at + 4 + size])
        at += 4 + size
    return bytes(out)


def unpack_lz4_block(block: bytes) -> bytes:
    """One LZ4 block: literals, then a copy from what was written before, and so on."""
    out, at, end = bytearray(), 0, len(block)
    while at < end:
        token = block[at]
        at += 1
        literals, copied = token >> 4, token & 15
        if literals == 15:
            literals, at = _longer(block, at, literals)
        out += block[at : at + literals]
        at += literals
        if at >= end:
            break
        offset = block[at] | block[at + 1] << 8
        at += 2
        if copied == 15:
            copied, at = _longer(block, at, copied)
        copied += 4
        start = len(out) - offset
        if offset >= copied:
            out += out[start : start + copied]
        else:  # the copy overlaps itself: a repeated pattern
            pattern = out[start:]
            out += (pattern * (copied // offset + 1))[:copied]
    return bytes(out)


def _longer(block: bytes, at: int, length: int) -> tuple[int, int]:
    while True:
        more = block[at]
        at += 1
        length += more
        if more != 255:
            return length, at


# --- modules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    name: str
    data: bytes


def load_modules(folder: Path | None, wanted: Iterable[str] = MODULES) -> list[Module]:
    """The wanted modules and what they depend on, unpacked, in an order in which they can be loaded.

    Reads `depends=` of the modules themselves: modules.dep is made at installation, so an unpacked package
    has none. Crypto that a module asks for by name at run time (`softdep`) is not followed.
    """
    if folder is None:
        return []
    files = {_module_name(p): p for p in sorted((folder / "kernel").rglob("*.ko*"))}
    loaded: dict[str, Module] = {}

    def load(name: str) -> None:
        if name in loaded or name not in files:
            return
        data = _read_module(files[name])
        for dependency in _dependencies(data):
            load(dependency)
        loaded[name] = Module(name, data)

    for name in wanted:
        load(name)
    return list(loaded.values())


def _module_name(path: Path) -> str:
    return path.name.split(".ko")[0].replace("-", "_")


def _dependencies(data: bytes) -> list[str]:
    found = re.search(rb"\x00depends=([^\x00]*)\x00", data)
    return [n.replace("-", "_") for n in found.group(1).decode().split(",") if n] if found else []


def _read_module(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name.endswith(".xz"):
        return lzma.decompress(data)
    if path.name.endswith(".gz"):
        return zlib.decompress(data, wbits=31)
    if path.name.endswith(".zst"):
        which("zstd", "the kernel's modules are packed with zstd: install the package `zstd`")
        return run(["zstd", "-dcq"], input=data, timeout_s=60).stdout
    return data
