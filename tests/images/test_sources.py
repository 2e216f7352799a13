"""Every kind of local source, whole and damaged."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dayfly import process
from dayfly.errors import ConfigError, HostError, ImageError, NotFoundError
from dayfly.images.layout import digest_of, encode, make_oci_layout
from dayfly.images.store import ImageStore
from dayfly.images.tar import Entry, Kind, write_tar
from dayfly.model import ImageConfig

CONFIG = {
    "Env": ["PATH=/bin", "EMPTY=", "EQUALS=a=b"],
    "WorkingDir": "/srv",
    "User": "7:8",
    "Entrypoint": ["/init"],
    "Cmd": ["-x"],
    "Volumes": {"/data": {}},
    "Healthcheck": {"Test": ["CMD", "/check"]},
}
ROOT = (Entry(b"", Kind.DIR), b"")
LOWER = write_tar(ROOT, (Entry(b"a", Kind.FILE, size=3), b"one"))
UPPER = write_tar((Entry(b"b", Kind.FILE, size=3), b"two"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", architecture="amd64")


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    make_oci_layout(tmp_path / "oci", [LOWER, gzip.compress(UPPER, mtime=0)], CONFIG)
    return tmp_path / "oci"


def tar_of(files: Mapping[str, bytes]) -> bytes:
    return write_tar(*((Entry(n.encode(), Kind.FILE, size=len(d)), d) for n, d in files.items()))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def disk_digest(store: ImageStore, name: str = "t") -> str:
    return store.disk(store.resolve(name)).digest


def test_a_layout_folder(store: ImageStore, layout: Path) -> None:
    image = store.import_image(layout, "team/demo")
    index = json.loads((layout / "index.json").read_text())
    assert image.name == "team/demo:latest"
    assert image.digest == index["manifests"][0]["digest"]
    assert image.config == ImageConfig(
        env={"PATH": "/bin", "EMPTY": "", "EQUALS": "a=b"},
        workdir="/srv",
        user="7:8",
        entrypoint=("/init",),
        cmd=("-x",),
        architecture="amd64",
    )
    assert image.volumes == ("/data",)
    assert image.healthcheck == ("CMD", "/check")
    disk = store.disk(image)
    assert (disk.config, disk.image, disk.image_digest) == (image.config, image.name, image.digest)
    listed = process.run(["rdsquashfs", "-l", "/", disk.path], timeout_s=30).stdout.decode()
    assert listed.split()[-1] == "b" and " a\n" in listed


def test_a_user_unset_and_a_workdir_unset(store: ImageStore, tmp_path: Path) -> None:
    make_oci_layout(tmp_path / "o", [LOWER], {"Env": None, "Cmd": None, "User": "", "WorkingDir": ""})
    assert store.import_image(tmp_path / "o", "t").config == ImageConfig()


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_an_oci_archive_is_the_same_image(store: ImageStore, layout: Path, compress: Any) -> None:
    from_folder = store.import_image(layout, "folder")
    archive = io.BytesIO(compress(tar_of(files_of(layout))))
    assert store.import_image(archive, "archive").digest == from_folder.digest


def docker_archive(layers: Mapping[str, bytes], architecture: str = "amd64") -> dict[str, bytes]:
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": CONFIG,
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers.values()]},
    }
    manifest = [{"Config": "c.json", "RepoTags": ["x:1"], "Layers": list(layers)}]
    return {**layers, "c.json": encode(config), "manifest.json": json.dumps(manifest).encode()}


def test_an_old_docker_archive(store: ImageStore, layout: Path) -> None:
    image = store.import_image(
        io.BytesIO(tar_of(docker_archive({"1/layer.tar": LOWER, "2/layer.tar": UPPER}))), "t"
    )
    assert image.config.workdir == "/srv"
    store.import_image(layout, "same")
    assert disk_digest(store) == disk_digest(store, "same")


def test_a_docker_archive_with_links_between_layers(store: ImageStore) -> None:
    files = docker_archive({"1/layer.tar": LOWER, "2/layer.tar": LOWER})
    del files["2/layer.tar"]
    link = (Entry(b"2/layer.tar", Kind.SYMLINK, target=b"../1/layer.tar"), b"")
    members = [(Entry(n.encode(), Kind.FILE, size=len(d)), d) for n, d in files.items()]
    image = store.import_image(io.BytesIO(write_tar(*members, link)), "t")
    assert image.layers == (digest_of(LOWER),) * 2
    assert disk_digest(store)


def test_a_docker_archive_with_a_changed_layer_is_refused(store: ImageStore) -> None:
    files = docker_archive({"1/layer.tar": LOWER})
    files["1/layer.tar"] = UPPER
    with pytest.raises(ImageError, match="damaged"):
        store.import_image(io.BytesIO(tar_of(files)), "t")


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
def test_what_skopeo_writes(store: ImageStore, layout: Path, tmp_path: Path, kind: str) -> None:
    process.run(
        ["skopeo", "--insecure-policy", "copy", f"oci:{layout}:latest", f"{kind}:{tmp_path / 'a.tar'}:x:1"],
        timeout_s=60,
    )
    assert store.import_image(tmp_path / "a.tar", "t").config.user == "7:8"
    store.import_image(layout, "same")
    assert disk_digest(store) == disk_digest(store, "same")


def test_a_root_filesystem_tar(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(LOWER)
    image = store.import_image(tmp_path / "root.tar", "t", env={"A": "1"}, workdir="/app", user="dev")
    assert image.config == ImageConfig(env={"A": "1"}, workdir="/app", user="dev")
    assert image.layers == (digest_of(LOWER),)
    again = store.import_image(io.BytesIO(LOWER), "u", env={"A": "1"}, workdir="/app", user="dev")
    assert again.digest == image.digest
    assert store.import_image(io.BytesIO(LOWER), "v").digest != image.digest


def test_a_tar_that_gnu_tar_wrote_from_a_folder(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / ("n" * 200)).write_text("x")
    process.run(["tar", "-czf", tmp_path / "r.tgz", "-C", tmp_path / "root", "."], timeout_s=30)
    store.import_image(tmp_path / "r.tgz", "t")
    assert disk_digest(store)


def test_overrides_are_for_plain_tars_only(store: ImageStore, layout: Path) -> None:
    with pytest.raises(ConfigError, match="configuration of its own"):
        store.import_image(layout, "t", workdir="/app")


def test_a_missing_source(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        store.import_image(tmp_path / "absent", "t")


@pytest.mark.parametrize("which", ["manifest", "config", "layer"])
@pytest.mark.parametrize("how", ["changed", "cut", "missing"])
def test_a_damaged_blob_is_refused(store: ImageStore, layout: Path, which: str, how: str) -> None:
    index = json.loads((layout / "index.json").read_text())
    digest = index["manifests"][0]["digest"]
    if which != "manifest":
        manifest = json.loads((layout / "blobs/sha256" / digest[7:]).read_text())
        digest = (manifest["config"] if which == "config" else manifest["layers"][1])["digest"]
    blob = layout / "blobs/sha256" / digest[7:]
    data = blob.read_bytes()
    if how == "missing":
        blob.unlink()
    else:
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if how == "changed" else data[:-1])
    with pytest.raises(ImageError, match=f"(damaged|missing|manifest says).*|{digest}"):
        store.import_image(layout, "t")
    assert store.list() == ()


def test_a_cut_root_filesystem_tar_is_refused(store: ImageStore) -> None:
    for cut in (len(LOWER) - 1024, 512, 513, 1024):
        with pytest.raises(ImageError, match="ends early"):
            store.import_image(io.BytesIO(LOWER[:cut]), "t")
    for cut in (20, len(gzip.compress(LOWER)) - 4):
        with pytest.raises(ImageError):
            store.import_image(io.BytesIO(gzip.compress(LOWER)[:cut]), "t")
    assert store.list() == ()


def test_what_is_no_image_at_all(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for source in (io.BytesIO(b""), io.BytesIO(b"hello"), io.BytesIO(bytes(10240)), tmp_path / "folder"):
        with pytest.raises(ImageError):
            store.import_image(source, "t")


def test_another_architecture_is_refused_by_name(store: ImageStore, tmp_path: Path) -> None:
    make_oci_layout(tmp_path / "o", [LOWER], architecture="arm64")
    for source in (tmp_path / "o", io.BytesIO(tar_of(docker_archive({"l.tar": LOWER}, "arm64")))):
        with pytest.raises(ImageError, match=r"linux/arm64.*linux/amd64") as caught:
            store.import_image(source, "t")
        assert caught.value.cause == "wrong_architecture"


def test_the_host_architecture_is_taken_from_several(store: ImageStore, tmp_path: Path) -> None:
    layout = tmp_path / "o"
    wanted = make_oci_layout(layout, [LOWER])
    other = make_oci_layout(layout, [UPPER], architecture="arm64")

    def described(digest: str, **platform: str) -> dict[str, Any]:
        size = (layout / "blobs/sha256" / digest[7:]).stat().st_size
        media = "application/vnd.oci.image.manifest.v1+json"
        return {"mediaType": media, "digest": digest, "size": size, "platform": platform}

    nested = encode(
        {
            "schemaVersion": 2,
            "manifests": [
                described(other, os="linux", architecture="arm64"),
                described(wanted, os="linux", architecture="amd64"),
                described(other, os="unknown", architecture="unknown"),
            ],
        }
    )
    (layout / "blobs/sha256" / digest_of(nested)[7:]).write_bytes(nested)
    top = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": digest_of(nested), "size": 1}
    (layout / "index.json").write_bytes(encode({"schemaVersion": 2, "manifests": [top]}))
    assert store.import_image(layout, "t").digest == wanted
    with pytest.raises(ImageError, match="no image for riscv64; it has amd64, arm64"):
        ImageStore(tmp_path / "s2", architecture="riscv64").import_image(layout, "t")


def test_several_images_in_one_source_are_named(store: ImageStore, tmp_path: Path) -> None:
    layout = tmp_path / "o"
    make_oci_layout(layout, [LOWER], name="one")
    first = json.loads((layout / "index.json").read_text())["manifests"]
    make_oci_layout(layout, [UPPER], name="two")
    second = json.loads((layout / "index.json").read_text())["manifests"]
    (layout / "index.json").write_bytes(encode({"schemaVersion": 2, "manifests": first + second}))
    with pytest.raises(ImageError, match="2 images: one, two"):
        store.import_image(layout, "t")


@pytest.mark.parametrize(
    "document",
    [b"[]", b"{", b"null", b'{"manifests": 3}', b'{"manifests": [1]}', b'{"manifests": [{"digest": "x"}]}'],
)
def test_a_nonsense_index_is_refused(store: ImageStore, layout: Path, document: bytes) -> None:
    (layout / "index.json").write_bytes(document)
    with pytest.raises(ImageError):
        store.import_image(layout, "t")


@pytest.mark.parametrize(
    "config",
    [
        {"Env": "A=1"},
        {"Env": [1]},
        {"Env": 7},
        {"WorkingDir": ["/"]},
        {"User": 0.5},
        {"Entrypoint": "/bin/sh"},
        {"Cmd": [[]]},
    ],
)
def test_a_configuration_of_wrong_types_is_refused(
    store: ImageStore, tmp_path: Path, config: dict[str, Any]
) -> None:
    make_oci_layout(tmp_path / "o", [LOWER], config)
    with pytest.raises(ImageError, match="wrong type"):
        store.import_image(tmp_path / "o", "t")
    assert store.list() == ()


def test_what_is_only_noted_may_be_odd(store: ImageStore, tmp_path: Path) -> None:
    make_oci_layout(tmp_path / "o", [LOWER], {"Volumes": 5, "Healthcheck": ["x"], "Labels": 1})
    image = store.import_image(tmp_path / "o", "t")
    assert (image.volumes, image.healthcheck) == ((), ())


def test_a_layer_that_inflates_without_end_is_refused(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dayfly.images.store.MAX_IMAGE", 1 << 20)
    bomb = gzip.compress(write_tar((Entry(b"f", Kind.FILE, size=1 << 22), bytes(1 << 22))))
    make_oci_layout(tmp_path / "o", [bomb])
    image = store.import_image(tmp_path / "o", "t")
    with pytest.raises(ImageError) as caught:
        store.disk(image)
    assert caught.value.cause == "image_too_big"


def test_a_path_out_of_the_layout_is_no_blob(store: ImageStore, layout: Path) -> None:
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0]["digest"] = "sha256:../../../../etc/passwd"
    (layout / "index.json").write_bytes(encode(index))
    with pytest.raises(ImageError, match="not a sha256 digest"):
        store.import_image(layout, "t")


def test_without_tar2sqfs_the_hint_says_how_to_get_it(
    store: ImageStore, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dayfly.images.squashfs import tool_version

    image = store.import_image(layout, "t")
    tool_version.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(HostError, match="apt-get install squashfs-tools-ng"):
        store.disk(image)
