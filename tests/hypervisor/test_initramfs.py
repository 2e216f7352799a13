"""The guest kernel, its modules and the initial RAM file system, without a VM."""

from __future__ import annotations

import lzma
import re
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayfly.errors import HostError
from dayfly.hypervisors.qemu.initramfs import make_initramfs
from dayfly.hypervisors.qemu.kernel import Module, extract_elf, find_kernel, load_modules, unpack_lz4_block
from dayfly.process import run

ELF = b"\x7fELF" + b"Xen\x00" + bytes(range(256)) * 8


def pack_lz4_block(pieces: list[tuple[bytes, int, int]], last: bytes) -> tuple[bytes, bytes]:
    """An LZ4 block and what it unpacks to; pieces are (literals, offset back, length copied)."""
    packed, plain = bytearray(), bytearray()
    for literals, back, length in pieces:
        plain += literals
        offset = min(max(1, back), len(plain))
        for _ in range(length):
            plain.append(plain[-offset])
        packed += _sequence(literals, length - 4) + struct.pack("<H", offset) + _more(length - 4)
    plain += last
    return bytes(packed + _sequence(last, 0)), bytes(plain)


def _sequence(literals: bytes, copied: int) -> bytes:
    return bytes([min(15, len(literals)) << 4 | min(15, copied)]) + _more(len(literals)) + literals


def _more(length: int) -> bytes:
    if length < 15:
        return b""
    whole, rest = divmod(length - 15, 255)
    return b"\xff" * whole + bytes([rest])


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=400), st.integers(1, 600), st.integers(4, 700)), max_size=6),
    st.binary(max_size=40),
)
def test_lz4_blocks_unpack(pieces: list[tuple[bytes, int, int]], last: bytes) -> None:
    packed, plain = pack_lz4_block(pieces, last)
    assert unpack_lz4_block(packed) == plain


def bzimage(payload: bytes) -> bytes:
    image = bytearray(2 * 512 + 64)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 64, len(payload))
    return bytes(image) + payload


@pytest.mark.parametrize("pack", [lambda d: zlib.compress(d, wbits=31), lzma.compress], ids=["gzip", "xz"])
def test_the_elf_in_a_bzimage_is_found(pack: object) -> None:
    payload = pack(ELF)  # type: ignore[operator]
    assert extract_elf(bzimage(payload + struct.pack("<I", len(ELF)))) == ELF


def test_an_image_that_is_not_understood_is_used_as_it_is() -> None:
    assert extract_elf(bzimage(b"something else entirely")) is None
    assert extract_elf(b"MZ") is None
    assert extract_elf(bzimage(zlib.compress(b"\x7fELF without an entry for PVH", wbits=31))) is None


def module(depends: str, text: bytes = b"") -> bytes:
    return b"\x7fELF\x00license=GPL\x00depends=" + depends.encode() + b"\x00name=x\x00" + text


def test_modules_come_after_what_they_depend_on(tmp_path: Path) -> None:
    tree = tmp_path / "kernel/drivers"
    tree.mkdir(parents=True)
    (tree / "top-most.ko.xz").write_bytes(lzma.compress(module("middle")))
    (tree / "middle.ko").write_bytes(module("low,other-low"))
    (tree / "low.ko").write_bytes(module(""))
    (tree / "other-low.ko").write_bytes(module("low"))
    (tree / "unwanted.ko").write_bytes(module(""))
    loaded = load_modules(tmp_path, ["top_most", "built_in", "low"])
    assert [m.name for m in loaded] == ["low", "other_low", "middle", "top_most"]
    assert loaded[3].data == module("middle"), "unpacked on the host: the guest has no xz"


@pytest.mark.skipif(shutil.which("cpio") is None, reason="needs cpio")
def test_cpio_reads_the_archive() -> None:
    archive = make_initramfs(b"agent", [Module("virtio", b"abc")])
    listed = run(["cpio", "-itv"], input=archive, timeout_s=10).stdout.decode()
    assert re.search(r"^-rwxr-xr-x .* init$", listed, re.MULTILINE)
    assert re.search(r"modules/00-virtio.ko$", listed, re.MULTILINE)


def test_the_archive_depends_on_nothing_but_its_content() -> None:
    first = make_initramfs(b"agent", [Module("a", b"1"), Module("b", b"2")])
    assert first == make_initramfs(b"agent", [Module("a", b"1"), Module("b", b"2")])
    assert first != make_initramfs(b"agent", [Module("b", b"2"), Module("a", b"1")])
    assert b"modules/01-b.ko" in first
    assert len(first) % 512 == 0


def test_the_newest_fetched_kernel_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYFLY_KERNEL", raising=False)
    for version in ("6.1.0-9-cloud", "6.1.0-57-cloud"):
        boot = tmp_path / "kernels" / f"linux-image-{version}" / "boot"
        boot.mkdir(parents=True)
        (boot / f"vmlinuz-{version}").write_bytes(version.encode())
        (boot.parent / "lib/modules" / version / "kernel").mkdir(parents=True)
    kernel = find_kernel(None, tmp_path)
    assert kernel.image.name == "vmlinuz-6.1.0-57-cloud"
    assert kernel.modules is not None
    assert kernel.modules.name == "6.1.0-57-cloud"


def test_a_named_kernel_that_is_absent_is_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAYFLY_KERNEL", str(tmp_path / "nothing"))
    with pytest.raises(HostError, match="is not there") as caught:
        find_kernel(None, tmp_path)
    assert caught.value.hint
