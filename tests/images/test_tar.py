"""The tar reader and writer against GNU tar, Python's tarfile, and arbitrary bytes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayfly import process
from dayfly.errors import ImageError
from dayfly.images.tar import BLOCK, Entry, Kind, clean_name, read_entries, write_header, write_tar

FILES: list[tuple[Entry, bytes]] = [
    (Entry(b"d", Kind.DIR, 0o1777, 1, 2, 3), b""),
    (Entry(b"d/plain", Kind.FILE, 0o4755, 3_000_000, 4_000_000_000, 1_700_000_000, 3), b"abc"),
    (Entry(b"d/" + b"long" * 60, Kind.FILE, 0o600, size=512), b"x" * 512),
    (Entry("d/ünï\udcff".encode("utf-8", "surrogateescape"), Kind.FILE, size=0), b""),
    (Entry(b"d/link", Kind.SYMLINK, 0o777, target=b"../" * 60), b""),
    (Entry(b"d/hard", Kind.HARDLINK, target=b"d/" + b"long" * 60), b""),
    (Entry(b"c", Kind.CHAR, 0o666, device=(1, 3)), b""),
    (Entry(b"b", Kind.BLOCK, 0o660, device=(259, 70000)), b""),
    (Entry(b"f", Kind.FIFO, 0o644), b""),
    (
        Entry(
            b"x",
            Kind.FILE,
            0o755,
            size=1,
            xattrs=((b"security.capability", b"\x01\0\0\x02\0\x20\n\0=\0"), (b"user.a", b"1\n2")),
        ),
        b"x",
    ),
]


@contextmanager
def opened(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("tar")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


def read(data: bytes, *, need_end: bool = True) -> list[Entry]:
    with opened(data) as fd:
        return list(read_entries(fd, len(data), need_end=need_end))


def without_offset(entry: Entry) -> tuple[object, ...]:
    return tuple(getattr(entry, key) for key in Entry.__slots__ if key != "offset")


def made(tar_format: int, *members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"z" * member.size))
    return out.getvalue()


def member(name: str, **values: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    return info


def test_what_is_written_is_read_again() -> None:
    data = write_tar(*FILES)
    found = read(data)
    assert [without_offset(e) for e in found] == [without_offset(e) for e, _ in FILES]
    for entry, (_, content) in zip(found, FILES, strict=True):
        assert data[entry.offset : entry.offset + entry.size] == content


def test_gnu_tar_lists_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(write_tar(*FILES))
    listed = process.run(
        ["tar", "--numeric-owner", "--quoting-style=escape", "-tvf", tmp_path / "a.tar"],
        timeout_s=30,
        env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
    ).stdout.decode()
    assert "-rwsr-xr-x 3000000/4000000000 3" in listed
    assert "d/" + "long" * 60 in listed
    assert "259,70000" in listed
    assert "d/\\303\\274n\\303\\257\\377" in listed


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_dialect_is_read(tar_format: int) -> None:
    deep = "dir" * 30 + "/" + "file" * 20
    found = read(
        made(
            tar_format,
            member("./", type=tarfile.DIRTYPE, mode=0o755),
            member("/abs/./" + deep, size=5, uid=70000, mtime=12),
            member("link", type=tarfile.SYMTYPE, linkname="t" * 99),
        )
    )
    assert [e.name for e in found] == [b"", b"abs/" + deep.encode(), b"link"]
    assert (found[1].size, found[1].uid, found[1].mtime) == (5, 70000, 12)
    assert found[2].target == b"t" * 99


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_big_numbers_and_long_links(tar_format: int) -> None:
    found = read(
        made(
            tar_format,
            member("n" * 200, uid=3_000_000_000, gid=2**31, mtime=2**33 + 5),
            member("l" * 200, type=tarfile.SYMTYPE, linkname="t" * 300, mtime=-5),
        )
    )
    assert (found[0].uid, found[0].gid, found[0].mtime) == (3_000_000_000, 2**31, 2**32 - 1)
    assert (found[1].name, found[1].target, found[1].mtime) == (b"l" * 200, b"t" * 300, 0)


def test_a_global_pax_header_counts_for_all_that_follow() -> None:
    out = io.BytesIO()
    headers = {"SCHILY.xattr.user.k": "v"}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
        tar.addfile(member("a"))
        tar.addfile(member("b"))
    assert [e.xattrs for e in read(out.getvalue())] == [((b"user.k", b"v"),)] * 2


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/.."])
def test_names_that_leave_are_refused(name: str) -> None:
    with pytest.raises(ImageError) as caught:
        read(made(tarfile.PAX_FORMAT, member(name)))
    assert caught.value.cause == "unsafe_name"


@pytest.mark.parametrize(("raw", "name"), [(b"/a//b/", b"a/b"), (b"./a/./b", b"a/b"), (b"a/../b", b"b")])
def test_names_are_taken_below_the_root(raw: bytes, name: bytes) -> None:
    assert clean_name(raw) == name


def test_a_hard_link_that_leaves_is_refused() -> None:
    with pytest.raises(ImageError, match=r"\.\."):
        read(made(tarfile.PAX_FORMAT, member("a", type=tarfile.LNKTYPE, linkname="../../etc/shadow")))


def test_a_component_too_long_for_linux_is_refused() -> None:
    assert clean_name(b"a" * 255) == b"a" * 255
    with pytest.raises(ImageError, match="too long"):
        clean_name(b"a" * 256)


SPARSE_FORMATS = {
    "old GNU": ("--format=gnu",),
    "PAX 0.1": ("--format=posix", "--sparse-version=0.1"),
    "PAX 1.0": ("--format=posix",),
}


def sparse_tar(tmp_path: Path, options: tuple[str, ...], places: range) -> bytes:
    """What GNU tar makes of a file with one written byte at each of `places`, and of a plain file after it."""
    with (tmp_path / "holes").open("wb") as file:
        for place in places:
            file.seek(place)
            file.write(b"x")
        file.truncate(places[-1] + 123_456)
    (tmp_path / "after").write_bytes(b"after")
    process.run(["tar", *options, "-S", "-cf", tmp_path / "s.tar", "-C", tmp_path, "holes", "after"], timeout_s=30)
    return (tmp_path / "s.tar").read_bytes()


@pytest.mark.parametrize("options", SPARSE_FORMATS.values(), ids=SPARSE_FORMATS)
@pytest.mark.parametrize("places", [range(1 << 21, 1 << 22, 1 << 22), range(0, 1 << 24, 1 << 17)], ids=["1", "128"])
def test_sparse_files_are_read(tmp_path: Path, options: tuple[str, ...], places: range) -> None:
    data = sparse_tar(tmp_path, options, places)
    holes, after = read(data)
    assert (holes.name, holes.size) == (b"holes", (tmp_path / "holes").stat().st_size)
    assert holes.pieces is not None and len(holes.pieces) == len(places)
    content, at = bytearray(holes.size), holes.offset
    for start, length in holes.pieces:
        content[start : start + length] = data[at : at + length]
        at += length
    assert content == (tmp_path / "holes").read_bytes()
    assert (after.name, data[after.offset : after.offset + after.size]) == (b"after", b"after")


@pytest.mark.parametrize(
    ("pax", "says"),
    [
        ({"GNU.sparse.numblocks": "1", "GNU.sparse.size": "9"}, "unknown format"),
        ({"GNU.sparse.map": "0,1,0,1", "GNU.sparse.size": "9"}, "overlap"),
        ({"GNU.sparse.map": "8,2", "GNU.sparse.size": "9"}, "leave the file"),
        ({"GNU.sparse.map": "0,3", "GNU.sparse.size": "9"}, "does not fit"),
        ({"GNU.sparse.map": "0,2,5", "GNU.sparse.size": "9"}, "no pairs"),
        ({"GNU.sparse.map": "0,2"}, "number is missing"),
        ({"GNU.sparse.map": "-1,2", "GNU.sparse.size": "9"}, "number is missing"),
        ({"GNU.sparse.map": "0,2", "GNU.sparse.size": str(1 << 50)}, "over the limit"),
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}, "longer than the member"),
    ],
)
def test_a_broken_sparse_map_is_refused_by_name(pax: dict[str, str], says: str) -> None:
    data = made(tarfile.PAX_FORMAT, member("holes", size=2, pax_headers=pax))
    with pytest.raises(ImageError, match=rf"holes.*{says}"):
        read(data)


@pytest.mark.parametrize("flag", [b"M", b"V", b"Z", b"A"])
def test_unknown_types_are_refused_by_name(flag: bytes) -> None:
    with pytest.raises(ImageError, match="unknown type"):
        read(made(tarfile.GNU_FORMAT, member("odd", type=flag)))


def test_every_cut_is_noticed() -> None:
    data = write_tar(*FILES)
    end = len(data) - 2 * BLOCK
    for cut in range(0, end + 1, 128):
        with pytest.raises(ImageError):
            read(data[:cut])
    assert read(data[: end + BLOCK])


def test_a_layer_may_end_without_a_mark_but_not_in_an_entry() -> None:
    data = write_header(Entry(b"a", Kind.FILE, size=600)) + bytes([1]) * 1024
    assert read(data, need_end=False)[0].size == 600
    with pytest.raises(ImageError, match="ends early"):
        read(data[:1024], need_end=False)
    assert read(b"", need_end=False) == []


def test_a_changed_header_byte_is_noticed() -> None:
    data = bytearray(write_tar((Entry(b"name", Kind.FILE), b"")))
    data[0] ^= 1
    with pytest.raises(ImageError, match="broken tar header at byte 0"):
        read(bytes(data))


def test_an_extended_header_has_a_bound() -> None:
    block = bytearray(write_header(Entry(b"pax", Kind.FILE, size=1 << 30)))
    block[156:157] = b"x"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(ImageError, match="over the limit"):
        read(bytes(block))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2048))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with opened(data) as fd:
        try:
            list(read_entries(fd, len(data), need_end=True))
        except ImageError:
            return


SAMPLE = write_tar(*FILES)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.binary(min_size=1, max_size=12)), max_size=4),
    st.booleans(),
)
def test_a_damaged_tar_is_read_or_refused(changes: list[tuple[int, bytes]], fix: bool) -> None:
    data = bytearray(SAMPLE)
    for at, new in changes:
        data[at : at + len(new)] = new
        start = at - at % BLOCK
        if fix and len(data) >= start + BLOCK:  # with a right checksum the damage gets further in
            block = data[start : start + BLOCK]
            block[148:156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    with opened(bytes(data)) as fd:
        try:
            for entry in read_entries(fd, len(data)):
                assert entry.offset + entry.size <= len(data)
                assert b".." not in entry.name.split(b"/") and not entry.name.startswith(b"/")
                assert 0 <= entry.uid < 2**32 and 0 <= entry.mtime < 2**32
                write_header(entry)
        except ImageError:
            return
