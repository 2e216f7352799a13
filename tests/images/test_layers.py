"""Layers to a disk: what ends up on it, also compared with `umoci unpack` as root."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import zstandard

from dayfly import process
from dayfly.errors import ImageError
from dayfly.evidence import new_rollout_id
from dayfly.images import squashfs
from dayfly.images.layout import make_oci_layout
from dayfly.images.store import ImageStore
from dayfly.images.tar import Entry, Kind, read_entries, write_tar
from dayfly.images.tree import Tree
from dayfly.model import Machine
from dayfly.protocols import StartOptions
from dayfly.registry import HypervisorSettings, make_hypervisor

CAPABILITY = (b"security.capability", b"\x01\0\0\x02\0\x04\0\0" + bytes(12))
Member = tuple[Entry, bytes]


def file(name: str | bytes, content: bytes = b"", **values: Any) -> Member:
    values = {"mode": 0o644, "mtime": 1000} | values
    raw = name.encode() if isinstance(name, str) else name
    return Entry(raw, Kind.FILE, size=len(content), **values), content


def folder(name: str, **values: Any) -> Member:
    return Entry(name.encode(), Kind.DIR, **({"mode": 0o755, "mtime": 1000} | values)), b""


def link(name: str, target: str) -> Member:
    return Entry(name.encode(), Kind.SYMLINK, 0o777, mtime=1000, target=target.encode()), b""


def hard(name: str, target: str) -> Member:
    return Entry(name.encode(), Kind.HARDLINK, mtime=1000, target=target.encode()), b""


def special(name: str, kind: Kind, device: tuple[int, int] = (0, 0)) -> Member:
    return Entry(name.encode(), kind, 0o640, mtime=1000, device=device), b""


ROOT = folder("", mode=0o755, uid=0)

LAYERS: dict[str, list[list[Member]]] = {
    "kinds": [
        [
            ROOT,
            folder("d", mode=0o1777, uid=3_000_000, gid=3_000_001, mtime=5),
            file("d/suid", b"x" * 5000, mode=0o6755, uid=7),
            file("d/caps", b"c", mode=0o755, xattrs=(CAPABILITY, (b"user.note", b"a\n\0b"))),
            special("null", Kind.CHAR, (1, 3)),
            special("disk", Kind.BLOCK, (259, 300)),
            special("pipe", Kind.FIFO),
            link("d/link", "suid"),
            link("dangling", "/nowhere/" + "n" * 150),
            file("l" * 255, b"long"),
            file("deep/" * 40 + "f", b"deep"),
            file("ünï-日本", b"name"),
            file(b"raw-\xff\xfe", b"name"),
            file("new\nline", b"name"),
            file("empty"),
            file("d/big", bytes(range(256)) * 4096),
        ]
    ],
    "whiteouts": [
        [
            ROOT,
            folder("a"),
            file("a/1"),
            file("a/2"),
            folder("a/sub"),
            file("a/sub/x"),
            folder("b"),
            file("b/1"),
            file("c"),
        ],
        [folder("a"), file("a/.wh.1"), file("a/.wh.sub"), file(".wh.b"), file(".wh.absent"), file("d/.wh.e")],
    ],
    "opaque": [
        [
            ROOT,
            folder("a"),
            file("a/old"),
            folder("a/both"),
            file("a/both/old"),
            folder("z"),
            file("z/old"),
        ],
        [
            folder("a", mode=0o700),
            file("a/new"),
            file("a/both/new"),
            file("a/.wh..wh..opq"),
            folder("z"),
            file("z/.wh..wh..opq"),
            file("z/new"),
        ],
    ],
    "opaque folder that is not below": [[ROOT], [folder("n"), file("n/.wh..wh..opq"), file("n/f")]],
    "whiteout and new file of one name": [
        [ROOT, folder("a"), file("a/f", b"old"), file("g", b"old")],
        [file(".wh.g"), file("g", b"new"), file("a/f", b"new"), file("a/.wh.f")],
    ],
    "replacements": [
        [
            ROOT,
            file("file-dir"),
            folder("dir-file"),
            file("dir-file/x"),
            link("link-dir", "dir-link"),
            folder("dir-link"),
            file("dir-link/x"),
            link("link-file", "file-dir"),
            file("same", b"one", mode=0o600),
        ],
        [
            folder("file-dir"),
            file("file-dir/y"),
            file("dir-file", b"now a file"),
            folder("link-dir"),
            file("link-dir/y"),
            link("dir-link", "file-dir"),
            file("link-file", b"now a file"),
            file("same", b"two", mode=0o755),
        ],
    ],
    "hard links": [
        [ROOT, folder("a"), file("a/1", b"shared"), hard("a/2", "a/1"), hard("b", "a/2"), link("s", "a/1")],
        [file("a/.wh.1"), hard("c", "a/2"), file("d", b"own"), hard("e", "d")],
        [file(".wh.a"), file("d", b"changed")],
    ],
    "parents that are links": [
        [
            ROOT,
            folder("usr"),
            folder("usr/lib"),
            link("lib", "usr/lib"),
            link("abs", "/usr"),
            link("up", "../../usr"),
        ],
        [file("lib/one"), file("abs/two"), file("up/lib/three")],
        [file("lib/.wh.one"), hard("hard", "abs/lib/three")],
    ],
    "folder above its children": [
        [ROOT, folder("p"), file("p/a", b"1"), folder("p/q", uid=5), file("p/q/b", b"2")],
        [folder("p", mode=0o711, uid=9, mtime=77)],
    ],
    "parents without an entry": [[ROOT, file("x/y/z", b"1")]],
    "last of several entries of one name": [[ROOT, file("f", b"one"), file("f", b"two", uid=4)]],
    "absolute names and those with dots": [
        [ROOT, file("/abs", b"1"), folder("./dot"), file("./dot/x"), folder("e"), file("e/../up", b"2")],
        [file("/dot/.wh.x"), hard("/again", "/e/../up")],
    ],
    "names of gzip": [[ROOT, file("\\back\\slash"), file("*"), file("-rf"), file(" ")]],
}


SPARSE_FORMATS = (["--format=gnu"], ["--format=posix"], ["--format=posix", "--sparse-version=0.1"])


def sparse_blobs(folder: Path) -> list[bytes]:
    """A layer from GNU tar for each format of sparse files."""
    blobs = []
    for number, options in enumerate(SPARSE_FORMATS):
        with (folder / f"holes-{number}").open("wb") as out:
            for place in range(1 << 16, 1 << 22, 1 << 19):
                out.seek(place)
                out.write(b"x" * 3)
            out.truncate((1 << 22) + number)
        tar = folder / f"{number}.tar"
        process.run(["tar", *options, "-S", "-cf", tar, "-C", folder, f"holes-{number}"], timeout_s=30)
        blobs.append(tar.read_bytes())
    return blobs


def as_blobs(layers: list[list[Member]]) -> list[bytes]:
    return [write_tar(*members) for members in layers]


def make_disk(tmp_path: Path, layers: list[bytes]) -> Path:
    make_oci_layout(tmp_path / "oci", layers)
    store = ImageStore(tmp_path / "store", architecture="amd64")
    return store.disk(store.import_image(tmp_path / "oci", "t")).path


def unsquash(disk: Path, dest: Path) -> None:
    process.run(["unsquashfs", "-quiet", "-no-progress", "-dest", dest, disk], timeout_s=60)


def listing(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Everything that can be seen of a tree, but the times of folders that no layer names."""
    found: dict[bytes, tuple[object, ...]] = {}
    inodes: dict[int, bytes] = {}
    top = os.fsencode(root)
    for where, dirs, files in os.walk(top):
        for name in [*sorted(dirs), *sorted(files)]:
            path = os.path.join(where, name)
            st = os.lstat(path)
            short = os.path.relpath(path, top)
            is_dir = stat.S_ISDIR(st.st_mode)
            content: object = b""
            if stat.S_ISREG(st.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            elif stat.S_ISLNK(st.st_mode):
                content = os.readlink(path)
            xattrs = {key: os.getxattr(path, key, follow_symlinks=False) for key in _xattr_names(path)}
            first = short if is_dir else inodes.setdefault(st.st_ino, short)
            rdev = st.st_rdev if stat.S_ISBLK(st.st_mode) or stat.S_ISCHR(st.st_mode) else 0
            mtime = 0 if is_dir else int(st.st_mtime)
            found[short] = (st.st_mode, st.st_uid, st.st_gid, mtime, rdev, xattrs, content, first)
    return found


def _xattr_names(path: bytes) -> list[str]:
    return [name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("system.")]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices can only be unpacked by root")


needs_umoci = pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bytes]], int]:
    """Compare the disk of layers with what umoci unpacks as root; returns how many paths were equal."""
    # unsquashfs 4.5.1 cannot read tar2sqfs's lz4 (the kernel can); the compressor is not the point here.
    monkeypatch.setattr(squashfs, "COMPRESSION", ("zstd", "level=1"))

    def run(blobs: list[bytes]) -> int:
        disk = make_disk(tmp_path, blobs)
        unsquash(disk, tmp_path / "ours")
        image = f"{tmp_path / 'oci'}:latest"
        process.run(["umoci", "unpack", "--image", image, tmp_path / "theirs"], timeout_s=300)
        ours, theirs = listing(tmp_path / "ours"), listing(tmp_path / "theirs" / "rootfs")
        assert ours == theirs
        return len(ours)

    return run


@needs_root
@needs_umoci
@pytest.mark.parametrize("case", LAYERS)
def test_a_disk_is_what_umoci_unpacks(compare: Callable[[list[bytes]], int], case: str) -> None:
    assert compare(as_blobs(LAYERS[case]))


@needs_root
def test_sparse_files_are_what_gnu_tar_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squashfs, "COMPRESSION", ("zstd", "level=1"))
    blobs = sparse_blobs(tmp_path)  # umoci reads no sparse files
    unsquash(make_disk(tmp_path, blobs), tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    for blob in blobs:
        process.run(["tar", "-x", "-C", tmp_path / "theirs"], input=blob, timeout_s=30)
    assert listing(tmp_path / "ours") == listing(tmp_path / "theirs")
    assert len(listing(tmp_path / "ours")) == len(SPARSE_FORMATS)


@needs_root
@needs_umoci
@pytest.mark.skipif("DAYFLY_TEST_BASE_TAR" not in os.environ, reason="scripts/run-tests builds the base image")
def test_a_real_image_is_what_umoci_unpacks(
    compare: Callable[[list[bytes]], int],
) -> None:
    """The demo's image of Debian packages, with a layer above it that deletes and changes some of it."""
    above = [
        file("usr/bin/.wh.jq"),
        file("etc/.wh..wh..opq"),
        file("etc/hosts", b"new"),
        hard("sh2", "usr/bin/dash"),
    ]
    assert compare([Path(os.environ["DAYFLY_TEST_BASE_TAR"]).read_bytes(), write_tar(*above)]) > 5000


def expected_in_guest(blobs: list[bytes], folder: Path) -> dict[bytes, tuple[object, ...]]:
    """Path → (type, mode, owner, group, and for files size, time, link target) by the layers themselves."""
    tree = Tree()
    for blob in blobs:
        (folder / "layer").write_bytes(blob)
        with (folder / "layer").open("rb") as file:
            tree.apply(read_entries(file.fileno(), len(blob)))
    inodes: dict[bytes, Entry] = {}
    found = {}
    for entry, _ in tree.walk():
        inode = inodes[entry.name] = inodes[entry.target] if entry.kind is Kind.HARDLINK else entry
        letter = {Kind.FILE: b"f", Kind.SYMLINK: b"l", Kind.DIR: b"d", Kind.CHAR: b"c", Kind.BLOCK: b"b"}
        size = len(inode.target) if inode.kind is Kind.SYMLINK else inode.size
        rest = () if inode.kind is Kind.DIR else (size, inode.mtime, inode.target if inode is entry else b"")
        found[entry.name] = (letter.get(inode.kind, b"p"), inode.mode, inode.uid, inode.gid, *rest)
    return found


def seen_in_guest(output: bytes) -> dict[bytes, tuple[object, ...]]:
    found = {}
    fields = output.split(b"\0")
    for path, kind, mode, uid, gid, size, time, target in zip(*[iter(fields[:-1])] * 8, strict=True):
        rest = () if kind == b"d" else (int(size), int(float(time)), target)
        found[path] = (kind, int(mode, 8), int(uid), int(gid), *rest)
    return found


@pytest.mark.vm
@pytest.mark.skipif("DAYFLY_TEST_BASE_TAR" not in os.environ, reason="scripts/run-tests builds the base image")
def test_the_guest_sees_the_tree_of_the_layers(tmp_path: Path) -> None:
    """All hand-made cases, one above the other, on the image that has `find`."""
    blobs = [Path(os.environ["DAYFLY_TEST_BASE_TAR"]).read_bytes(), *sparse_blobs(tmp_path)]
    blobs += [blob for case in LAYERS.values() for blob in as_blobs(case)]
    make_oci_layout(tmp_path / "oci", blobs)
    store = ImageStore(tmp_path / "store")
    disk = store.disk(store.import_image(tmp_path / "oci", "t"))
    hypervisor = make_hypervisor("qemu", HypervisorSettings())
    machine = Machine(memory_mib=512, storage_mib=1024)

    async def find() -> bytes:
        start = StartOptions(vm_id=f"{new_rollout_id()}-t", writable=tmp_path / "upper.img")
        argv = ["find", "/", "-xdev", "-printf", r"%P\0%y\0%m\0%U\0%G\0%s\0%T@\0%l\0"]
        with anyio.fail_after(240):
            async with hypervisor.start(disk, machine, start) as vm:
                done = await vm.exec(["sh", "-c", '"$@" >/tmp/found', "-", *argv], user="root", timeout_s=120)
                assert done.exit_code == 0, done.stderr.text
                await vm.get("/tmp/found", tmp_path / "found")
        return (tmp_path / "found").read_bytes()

    ours, theirs = expected_in_guest(blobs, tmp_path), seen_in_guest(anyio.run(find))
    own = re.compile(rb"|proc|sys|dev(/.*)?|etc/(hosts|hostname|resolv\.conf|machine-id)|tmp/found")
    different = {
        p: (ours.get(p), theirs.get(p)) for p in ours.keys() | theirs.keys() if ours.get(p) != theirs.get(p)
    }
    assert not {path: both for path, both in different.items() if not own.fullmatch(path)}
    assert len(ours) > 5000


def tree_of(*layers: list[Member]) -> dict[bytes, Entry]:
    tree = Tree()
    for members in layers:
        tree.apply(entry for entry, _ in members)
    return {entry.name: entry for entry, _ in tree.walk()}


def test_a_hard_link_outlives_what_it_was_made_from() -> None:
    found = tree_of(*LAYERS["hard links"])
    assert set(found) == {b"", b"b", b"c", b"d", b"e", b"s"}
    assert found[b"b"].kind is Kind.FILE
    assert (found[b"c"].kind, found[b"c"].target) == (Kind.HARDLINK, b"b")
    assert found[b"d"].kind is Kind.FILE and found[b"e"].kind is Kind.FILE


def test_xattrs_that_would_command_overlayfs_are_left_out() -> None:
    xattrs = (
        (b"security.capability", b"1"),
        (b"system.posix_acl_access", b"2"),
        (b"trusted.overlay.opaque", b"y"),
        (b"user.mine", b"3"),
        (b"user.overlay.whiteout", b"y"),
    )
    found = tree_of([folder("d", xattrs=xattrs), file("f", xattrs=xattrs)])
    for name in (b"d", b"f"):
        assert found[name].xattrs == ((b"security.capability", b"1"), (b"user.mine", b"3"))


def test_a_deletion_as_overlayfs_writes_it_deletes() -> None:
    found = tree_of([file("f"), file("g")], [special("f", Kind.CHAR, (0, 0))])
    assert set(found) == {b"", b"g"}


def test_a_loop_of_links_ends() -> None:
    with pytest.raises(ImageError, match=r"layer 1: too many symbolic links"):
        tree_of([link("a", "b"), link("b", "a"), file("a/x")])


def test_a_file_is_no_parent() -> None:
    with pytest.raises(ImageError, match=r"layer 2: b'f' is no folder"):
        tree_of([file("f")], [file("f/x")])


@pytest.mark.parametrize(("target", "says"), [("absent", "not there"), ("d", "a folder")])
def test_a_hard_link_needs_a_file(target: str, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        tree_of([folder("d"), hard("h", target)])


def test_links_cannot_lead_out_of_the_image() -> None:
    found = tree_of([link("out", "../../../../etc"), file("out/x"), link("etc2", "/etc"), file("etc2/y")])
    assert {b"etc/x", b"etc/y"} <= set(found)


def test_the_same_layers_give_the_same_bytes_in_any_compression(tmp_path: Path) -> None:
    plain = as_blobs(LAYERS["kinds"] + LAYERS["hard links"])
    digests = set()
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "plain": bytes,
        "gzip": gzip.compress,
        "zstd": zstandard.ZstdCompressor().compress,
        "xz": lzma.compress,
        "bzip2": bz2.compress,
    }
    for name, compress in compressors.items():
        (tmp_path / name).mkdir()
        path = make_disk(tmp_path / name, [compress(layer) for layer in plain])
        meta = path.with_suffix(".json").read_text()
        digests.add(meta.split('"digest": ')[1].split(",")[0])
    assert len(digests) == 1


def test_the_order_within_a_layer_does_not_change_the_bytes(tmp_path: Path) -> None:
    members = LAYERS["kinds"][0]
    disks = []
    for name, layer in (("a", members), ("b", [ROOT, *reversed(members[1:])])):
        (tmp_path / name).mkdir()
        disks.append(make_disk(tmp_path / name, as_blobs([list(layer)])))
    first, second = (disk.with_suffix(".json").read_text().split('"digest": ')[1][:80] for disk in disks)
    assert first == second
