"""Archives: what goes in comes out, and what a hostile guest makes up stays out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import GuestLost, HostError, LimitError
from dayfly.guest.archive import CHUNK, ArchiveReceiver, ArchiveSender, Entry, is_inside, raw_name
from dayfly.model import EntryMeta, Transfer
from dayfly.protocols import TransferLimits

END, FILE, DIR, LINK, SKIPPED = range(5)
ROOT = Entry(DIR, b"", 0o755, 0, 0)


def piece(offset: int, data: bytes = b"") -> bytes:
    return offset.to_bytes(8, "little") + len(data).to_bytes(4, "little") + data


def file(path: bytes, data: bytes, mode: int = 0o644) -> list[Entry | bytes]:
    return [Entry(FILE, path, mode, 0, 0), *([piece(0, data)] if data else []), piece(len(data))]


def archive(*parts: Entry | bytes) -> tuple[bytes, bytes]:
    """The bytes of an archive and its true digest."""
    out, digest = bytearray(), hashlib.sha256()
    for part in parts:
        if isinstance(part, bytes):
            out += part
            digest.update(part)
            continue
        out += part.encode()
        if part.kind not in (END, SKIPPED) and (part.path or part.kind != DIR):
            digest.update(part.hashed)
    return bytes(out) + Entry(END, b"").encode(), digest.digest()


def receive(dest: Path, parts: Iterable[Entry | bytes], step: int = 1 << 20, **caps: int) -> Transfer:
    data, digest = archive(*parts)
    receiver = ArchiveReceiver(dest, TransferLimits(**caps))
    try:
        for at in range(0, len(data), step):
            receiver.feed(data[at : at + step])
        return receiver.finish(digest)
    finally:
        receiver.close()


def send(source: Path | bytes, name: bytes = b"", **more: object) -> tuple[bytes, ArchiveSender]:
    sender = ArchiveSender(source, name, **more)  # type: ignore[arg-type]
    data = b"".join(iter(lambda: sender.next_block(50_000), b""))
    return data, sender


def relay(source: Path, dest: Path, **more: object) -> tuple[Transfer, ArchiveSender]:
    """What a guest that gives back exactly what it was given would do."""
    data, sender = send(source, **more)
    receiver = ArchiveReceiver(dest, TransferLimits())
    try:
        receiver.feed(ROOT.encode() + data)
        return receiver.finish(bytes.fromhex(sender.sent.digest)), sender
    finally:
        receiver.close()


names = st.binary(min_size=1, max_size=20).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b"..")
)
contents = st.binary(max_size=200)
folders = st.dictionaries(names, contents, max_size=3)
trees = st.dictionaries(names, st.one_of(contents, folders), max_size=5)


def make_tree(at: bytes, tree: dict[bytes, object]) -> None:
    os.makedirs(at)
    for name, content in tree.items():
        path = os.path.join(at, name)
        if isinstance(content, dict):
            make_tree(path, content)
        else:
            with open(path, "wb") as out:
                out.write(content)  # type: ignore[arg-type]


def read_tree(at: bytes) -> dict[bytes, object]:
    return {
        e.name: read_tree(e.path) if e.is_dir() else Path(os.fsdecode(e.path)).read_bytes() for e in os.scandir(at)
    }


@given(trees)
def test_names_of_any_bytes_and_contents_survive(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[bytes, object]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    make_tree(os.fsencode(folder / "a"), tree)
    transfer, sender = relay(folder / "a", folder / "b")
    assert read_tree(os.fsencode(folder / "b")) == tree
    assert transfer.files == sender.sent.files
    assert transfer.digest == "sha256:" + sender.sent.digest
    assert transfer.bytes == sender.sent.bytes


def test_a_sparse_file_stays_sparse(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "f").open("wb") as out:
        out.truncate(1 << 30)
        out.seek(600 << 20)
        out.write(b"middle")
    data, _ = send(tmp_path / "a")
    assert len(data) < 2 * CHUNK
    relay(tmp_path / "a", tmp_path / "b")
    st = (tmp_path / "b" / "f").stat()
    assert st.st_size == 1 << 30
    assert st.st_blocks * 512 < 1 << 20
    with (tmp_path / "b" / "f").open("rb") as back:
        back.seek(600 << 20)
        assert back.read(6) == b"middle"


def test_the_digest_does_not_depend_on_how_a_file_lies_on_the_disk(tmp_path: Path) -> None:
    for name in ("dense", "sparse"):
        (tmp_path / name).mkdir()
    (tmp_path / "dense" / "f").write_bytes(bytes(200_000) + b"x" + bytes(300_000))
    with (tmp_path / "sparse" / "f").open("wb") as out:
        out.seek(200_000)
        out.write(b"x")
        out.truncate(500_001)
    assert send(tmp_path / "dense")[1].sent.digest == send(tmp_path / "sparse")[1].sent.digest


def test_meta_mode_and_exclude(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("keep", "drop"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d" / "inner").write_text("x")
    asked: list[str] = []

    def exclude(name: str) -> bool:
        asked.append(name)
        return name in ("drop", "d/")

    data, sender = send(tmp_path, exclude=exclude, meta={"keep": EntryMeta(0o4750, 12, 34)})
    assert sorted(asked) == ["d/", "drop", "keep"]
    assert sorted(sender.sent.skipped) == ["d", "drop"]
    assert Entry(FILE, b"keep", 0o4750, 12, 34, (tmp_path / "keep").stat().st_mtime_ns).encode() in data


def test_a_host_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="nowhere"):
        send(tmp_path / "nowhere", b"n")


def test_host_files_are_private_and_keep_only_the_x_bit(tmp_path: Path) -> None:
    got = receive(tmp_path / "out", [ROOT, *file(b"a", b"1", 0o6777), *file(b"b", b"2", 0o444)])
    assert (tmp_path / "out" / "a").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "out" / "b").stat().st_mode & 0o7777 == 0o600
    assert (tmp_path / "out").stat().st_mode & 0o7777 == 0o700
    assert got.entries == {"": EntryMeta(0o755, 0, 0), "a": EntryMeta(0o6777, 0, 0), "b": EntryMeta(0o444, 0, 0)}


@pytest.mark.parametrize(
    "path",
    [b"/etc/x", b"../x", b"a/../../x", b"..", b".", b"", b"a//b", b"a/", b"x\0y", b"n" * 256, b"no/parent"],
)
def test_names_that_no_honest_agent_sends(tmp_path: Path, path: bytes) -> None:
    with pytest.raises(GuestLost) as caught:
        receive(tmp_path / "in" / "out", [ROOT, Entry(DIR, b"a", 0o755), *file(path, b"x")])
    assert caught.value.cause == "protocol_violation"
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == ["out"]


def test_a_link_is_no_way_out(tmp_path: Path) -> None:
    """A file 'below' a link: the link is written last, so the name has no folder."""
    with pytest.raises(GuestLost):
        receive(tmp_path / "out", [ROOT, Entry(LINK, b"l", 0o777, target=b"."), *file(b"l/x", b"x")])


def test_a_link_that_was_there_before_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(HostError):
        receive(tmp_path / "out", [ROOT, Entry(DIR, b"d", 0o755), *file(b"d/x", b"x")])
    (tmp_path / "out" / "f").symlink_to(tmp_path / "outside" / "made")
    with pytest.raises(HostError):
        receive(tmp_path / "out", [ROOT, *file(b"f", b"x")])
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        (b"l", b"a", True),
        (b"l", b"a/b", True),
        (b"d/l", b"../a", True),
        (b"l", b"..", False),
        (b"l", b"../a", False),
        (b"d/l", b"../../a", False),
        (b"l", b"/etc/passwd", False),
        (b"l", b"a/../../b", False),
        (b"d/l", b"../x/..", False),
        (b"l", b"", False),
        (b"l", b"a\0b", False),
    ],
)
def test_which_links_stay_inside(path: bytes, target: bytes, inside: bool) -> None:
    assert is_inside(path, target) == inside


def test_links_outside_and_odd_kinds_are_listed_not_written(tmp_path: Path) -> None:
    links = [Entry(LINK, b"bad", 0o777, target=b"/etc"), Entry(LINK, b"good", 0o777, target=b"f")]
    parts = [ROOT, *links, *file(b"f", b"x"), Entry(SKIPPED, b"fifo")]
    got = receive(tmp_path / "out", parts)
    assert got.skipped == ("bad", "fifo")
    assert (tmp_path / "out" / "good").readlink() == Path("f")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["f", "good"]


@pytest.mark.parametrize(
    ("parts", "caps"),
    [
        ([ROOT, *file(b"a", b""), *file(b"b", b"")], {"files": 1}),
        ([ROOT, *file(b"a", b"xyz")], {"bytes": 2}),
        ([ROOT, *file(b"a", b"xyz")], {"file_bytes": 2}),
        ([ROOT, Entry(FILE, b"a"), piece(1 << 50)], {}),
        ([ROOT, Entry(DIR, b"a", 0o755), Entry(DIR, b"a/b", 0o755)], {"depth": 1}),
    ],
)
def test_caps(tmp_path: Path, parts: list[Entry | bytes], caps: dict[str, int]) -> None:
    with pytest.raises(LimitError):
        receive(tmp_path / "out", parts, **caps)
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 10


@pytest.mark.parametrize(
    "parts",
    [
        [Entry(LINK, b"", 0o777, target=b"x")],
        [Entry(FILE, b"x"), piece(0)],
        [ROOT, *file(b"a", b"1"), *file(b"a", b"2")],
        [ROOT, Entry(9, b"a")],
        [ROOT, Entry(FILE, b"a"), piece(10, b"x"), piece(0, b"y"), piece(11)],
        [ROOT, Entry(FILE, b"a"), (0).to_bytes(8, "little") + (CHUNK + 1).to_bytes(4, "little")],
        [*file(b"", b"single"), *file(b"more", b"x")],
        [ROOT, Entry(FILE, b"a"), piece(2**63, b"x")],
    ],
)
def test_archives_that_no_honest_agent_sends(tmp_path: Path, parts: list[Entry | bytes]) -> None:
    with pytest.raises(GuestLost) as caught:
        receive(tmp_path / "out", parts)
    assert caught.value.cause == "protocol_violation"


def test_a_wrong_digest_and_bytes_after_the_end(tmp_path: Path) -> None:
    data, digest = archive(ROOT, *file(b"a", b"1"))
    receiver = ArchiveReceiver(tmp_path / "o1", TransferLimits())
    receiver.feed(data)
    with pytest.raises(GuestLost):
        receiver.finish(bytes(32))
    with pytest.raises(GuestLost):
        receiver.feed(b"x")
    receiver.close()
    short = ArchiveReceiver(tmp_path / "o2", TransferLimits())
    short.feed(data[:-1])
    with pytest.raises(GuestLost):
        short.finish(digest)
    short.close()


def test_a_single_file_that_breaks_off_is_removed(tmp_path: Path) -> None:
    data, _ = archive(*file(b"", b"hello"))
    receiver = ArchiveReceiver(tmp_path / "f", TransferLimits())
    receiver.feed(data[:-30])
    receiver.close()
    assert not (tmp_path / "f").exists()


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_are_an_archive_or_a_violation(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, step: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for start in (b"", ROOT.encode(), ROOT.encode() + Entry(FILE, b"f").encode()):
        receiver = ArchiveReceiver(folder / str(len(start)), TransferLimits(bytes=1000, file_bytes=1000))
        try:
            for at in range(0, len(start + data), step):
                receiver.feed((start + data)[at : at + step])
        except (GuestLost, LimitError):
            pass
        finally:
            receiver.close()


def test_names_are_text_with_escapes() -> None:
    assert raw_name("a\udcff") == b"a\xff"
