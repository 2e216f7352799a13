"""The store: names, caching, several processes at once, a full disk, pruning."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dayfly import process
from dayfly.errors import ConfigError, HostError, ImageError, NotFoundError
from dayfly.images.layout import make_oci_layout
from dayfly.images.names import parse_reference
from dayfly.images.squashfs import DISK_VIRTUAL_BYTES
from dayfly.images.store import ImageStore
from dayfly.images.tar import Entry, Kind, write_tar


def layer(name: str, content: bytes = b"content") -> bytes:
    return write_tar((Entry(b"", Kind.DIR), b""), (Entry(name.encode(), Kind.FILE, size=len(content)), content))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", architecture="amd64")


def take_in(store: ImageStore, tmp_path: Path, name: str, *layers: bytes) -> str:
    folder = tmp_path / f"oci-{len(list(tmp_path.iterdir()))}"
    make_oci_layout(folder, layers or [layer(name)])
    return store.import_image(folder, name).digest


def left_over(root: Path) -> list[str]:
    """What a store holds besides its lock files."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.parent.name != "locks")


def start_python(code: str, *args: str | Path) -> subprocess.Popen[bytes]:
    return process.spawn(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=process.PIPE,
        stderr=process.PIPE,
    )


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo", "demo:latest"),
        ("dayfly/demo:1.2_x", "dayfly/demo:1.2_x"),
        ("docker.io/library/ubuntu:24.04", "ubuntu:24.04"),
        ("library/python", "python:latest"),
        ("ghcr.io/a/b", "ghcr.io/a/b:latest"),
        ("localhost:5000/a/b:t", "localhost:5000/a/b:t"),
        ("a--b/c__d", "a--b/c__d:latest"),
    ],
)
def test_names_are_normalised(text: str, name: str) -> None:
    assert parse_reference(text).name == name


@pytest.mark.parametrize("text", ["", "UPPER", "a b", "../x", "a//b", "-a", "a:", "a:b:c", "/a", "a" * 600])
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not an image name"):
        parse_reference(text)


def test_an_image_is_found_by_name_and_digest(store: ImageStore, tmp_path: Path) -> None:
    digest = take_in(store, tmp_path, "team/demo:1")
    assert store.resolve("docker.io/team/demo:1").digest == digest
    assert store.resolve(digest).digest == digest
    assert store.resolve(digest[:20]).digest == digest
    assert store.resolve(f"team/demo:1@{digest}").digest == digest
    for absent in ("team/demo", f"team/demo:1@sha256:{'0' * 64}", f"sha256:{'0' * 64}"):
        with pytest.raises(NotFoundError):
            store.resolve(absent)


def test_what_is_not_there_names_what_is_near(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "dayfly/demo-base")
    with pytest.raises(NotFoundError) as caught:
        store.resolve("dayfly/demobase")
    assert "dayfly/demo-base:latest" in str(caught.value)
    assert "dayfly image import" in str(caught.value)


def test_an_empty_store_is_empty_and_makes_nothing(store: ImageStore, tmp_path: Path) -> None:
    assert store.list() == ()
    assert list(tmp_path.iterdir()) == []


# --- disks ---------------------------------------------------------------------------------------


def test_a_disk_is_padded_sparse_and_read_only(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t")
    disk = store.disk(store.resolve("t"))
    found = disk.path.stat()
    assert found.st_size == DISK_VIRTUAL_BYTES
    assert found.st_blocks * 512 < 1 << 20
    assert found.st_mode & 0o222 == 0


def test_a_disk_is_made_once(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t")
    first = store.disk(store.resolve("t"))
    inode = first.path.stat().st_ino
    again = ImageStore(tmp_path / "store", architecture="amd64")
    assert again.disk(again.resolve("t")) == first
    assert first.path.stat().st_ino == inode


def test_two_stores_make_equal_bytes(tmp_path: Path) -> None:
    layers = [layer("a", random.Random(1).randbytes(300_000)), layer("b")]
    digests = set()
    for name in ("one", "two"):
        store = ImageStore(tmp_path / name, architecture="amd64")
        take_in(store, tmp_path, "t", *layers)
        digests.add(store.disk(store.resolve("t")).digest)
    assert len(digests) == 1


def test_a_cut_disk_is_made_again(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t")
    disk = store.disk(store.resolve("t"))
    disk.path.chmod(0o600)
    os.truncate(disk.path, 1000)
    assert store.disk(store.resolve("t")) == disk
    assert disk.path.stat().st_size == DISK_VIRTUAL_BYTES


@pytest.mark.parametrize("which", ["layer", "manifest"])
def test_damage_in_the_store_is_noticed_and_repaired_by_importing(
    store: ImageStore, tmp_path: Path, which: str
) -> None:
    take_in(store, tmp_path, "t")
    image = store.resolve("t")
    digest = image.layers[0] if which == "layer" else image.digest
    blob = tmp_path / "store/blobs/sha256" / digest.removeprefix("sha256:")
    blob.write_bytes(blob.read_bytes().replace(b"content", b"CONTENT").replace(b"tar", b"TAR"))
    with pytest.raises(ImageError) as caught:
        store.disk(store.resolve("t"))
    assert caught.value.cause == "digest_mismatch"
    assert not list((tmp_path / "store").glob("disks/*"))
    take_in(store, tmp_path, "t")
    assert store.disk(store.resolve("t"))


MAKE = """
import sys, pathlib
from dayfly.images.store import ImageStore
store = ImageStore(pathlib.Path(sys.argv[1]), architecture="amd64")
sys.stdout.write("ready\\n"); sys.stdout.flush()
disk = store.disk(store.resolve("t"))
print(disk.digest, disk.path.stat().st_ino)
"""


def test_two_processes_make_a_disk_once(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t", layer("big", random.Random(2).randbytes(20_000_000)))
    popens = [start_python(MAKE, tmp_path / "store") for _ in range(3)]
    answers = {p.communicate(timeout=120)[0] for p in popens}
    assert [p.returncode for p in popens] == [0, 0, 0]
    assert len(answers) == 1, "one digest and one inode"
    assert len(list((tmp_path / "store/disks").glob("*.squashfs"))) == 1


def test_a_killed_maker_leaves_nothing_that_counts(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t", layer("big", random.Random(3).randbytes(40_000_000)))
    popen = start_python(MAKE, tmp_path / "store")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "store/staging").glob("*/disk")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(popen.pid, signal.SIGKILL)
    popen.communicate(timeout=60)
    assert not list((tmp_path / "store").glob("disks/*.json"))
    store.prune()
    assert not list((tmp_path / "store/staging").iterdir())
    assert store.disk(store.resolve("t")).path.exists()


# --- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if process.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "small", folder], timeout_s=30, check=False
    ).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    process.run(["umount", folder], timeout_s=30)


@pytest.mark.parametrize(("size", "where"), [(20_000_000, "import"), (5_000_000, "disk")])
def test_a_full_disk_leaves_nothing(tmp_path: Path, small_disk: Path, size: int, where: str) -> None:
    store = ImageStore(small_disk / "store", architecture="amd64")
    make_oci_layout(tmp_path / "o", [layer("big", random.Random(4).randbytes(size))])
    with pytest.raises(HostError) as caught:
        store.disk(store.import_image(tmp_path / "o", "t"))
    assert caught.value.cause == "host_disk_full"
    kept = left_over(small_disk / "store")
    assert not [name for name in kept if name.startswith(("disks", "staging"))]
    assert kept == [] if where == "import" else len(store.list()) == 1


LIMITED = """
import resource, sys, pathlib
from dayfly.errors import HostError
from dayfly.images.store import ImageStore
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
store = ImageStore(pathlib.Path(sys.argv[1]), architecture="amd64")
try:
    store.disk(store.import_image(pathlib.Path(sys.argv[2]), "t"))
except HostError as e:
    print(e.cause)
"""


@pytest.mark.parametrize("limit", [100_000, 3_000_000])
def test_a_file_size_limit_is_reported(tmp_path: Path, limit: int) -> None:
    make_oci_layout(tmp_path / "o", [layer("big", random.Random(5).randbytes(1_000_000))])
    popen = start_python(LIMITED, tmp_path / "store", tmp_path / "o", str(limit))
    out, err = popen.communicate(timeout=60)
    assert (out.decode().strip(), err.decode()) == ("host_disk_full", "")
    assert not [n for n in left_over(tmp_path / "store") if n.startswith(("disks", "staging"))]


# --- listing and pruning -------------------------------------------------------------------------


def test_the_list_shows_what_is_shared(store: ImageStore, tmp_path: Path) -> None:
    common = layer("common", b"c" * 10_000)
    take_in(store, tmp_path, "a", common, layer("a"))
    take_in(store, tmp_path, "b:2", common)
    store.disk(store.resolve("a"))
    a, b = store.list()
    assert (a.name, a.layers, b.name, b.layers) == ("a:latest", 2, "b:2", 1)
    assert a.shared_bytes == b.shared_bytes == b.blob_bytes == len(common)
    assert a.disk_bytes > 0 and b.disk_bytes == 0
    assert a.as_dict()["digest"] == a.digest


def test_prune_takes_images_whose_name_has_moved(store: ImageStore, tmp_path: Path) -> None:
    old = take_in(store, tmp_path, "t", layer("old"))
    disk = store.disk(store.resolve("t"))
    new = take_in(store, tmp_path, "t", layer("new"))
    assert [(i.name, i.digest) for i in store.list()] == [("t:latest", new), ("", old)]
    assert store.prune() == (old,)
    assert not disk.path.exists()
    assert store.disk(store.resolve("t"))
    with pytest.raises(NotFoundError):
        store.resolve(old)


def test_prune_of_everything_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "a")
    take_in(store, tmp_path, "b")
    store.disk(store.resolve("a"))
    assert store.prune(unused_s=0) == ("a:latest", "b:latest")
    assert left_over(tmp_path / "store") == []


def test_prune_by_age_keeps_what_was_used(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "old")
    take_in(store, tmp_path, "used")
    disk = store.disk(store.resolve("used"))
    for path in (tmp_path / "store").rglob("*.json"):
        os.utime(path, (1, 1))
    with store.using(disk):
        pass
    assert store.prune(unused_s=3600) == ("old:latest",)
    assert [i.name for i in store.list()] == ["used:latest"]


def test_prune_by_name_takes_only_that(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "a")
    take_in(store, tmp_path, "b")
    assert store.prune(["a"]) == ("a:latest",)
    assert [i.name for i in store.list()] == ["b:latest"]
    with pytest.raises(NotFoundError):
        store.prune(["a"])


HOLD = """
import sys, pathlib, time
from dayfly.images.store import ImageStore
store = ImageStore(pathlib.Path(sys.argv[1]), architecture="amd64")
with store.using(store.disk(store.resolve("t"))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_disk_in_use_stays_until_its_user_dies(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t")
    popen = start_python(HOLD, tmp_path / "store")
    try:
        assert popen.stdout is not None and popen.stdout.readline() == b"held\n"
        assert store.list()[0].in_use
        assert store.prune(unused_s=0) == ()
        with pytest.raises(ImageError, match="in use"):
            store.remove("t")
        assert store.resolve("t")
    finally:
        popen.kill()
        popen.communicate(timeout=60)
    assert not store.list()[0].in_use
    store.remove("t")
    assert store.list() == ()


def test_two_names_of_one_image(store: ImageStore, tmp_path: Path) -> None:
    digest = take_in(store, tmp_path, "a", layer("x"))
    assert take_in(store, tmp_path, "b", layer("x")) == digest
    store.remove("a")
    assert [i.name for i in store.list()] == ["b:latest"]
    assert store.disk(store.resolve("b"))


def test_using_a_disk_that_is_gone(store: ImageStore, tmp_path: Path) -> None:
    take_in(store, tmp_path, "t")
    disk = store.disk(store.resolve("t"))
    store.remove("t")
    with pytest.raises(NotFoundError, match="gone"), store.using(disk):
        pass
