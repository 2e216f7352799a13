"""What a builder VM hands over is not trusted."""

from __future__ import annotations

import gzip
import hashlib
import json

import pytest

from dayfly.errors import ImageError
from dayfly.images.builder.log import BuildLog
from dayfly.images.builder.results import make_layout

SECRET = {"token": b"correct-horse-battery\n"}


class Layout:
    """An OCI layout as a guest may write it."""

    def __init__(self, folder):
        self.folder = folder
        self.blobs = folder / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)

    def add(self, data: bytes, **changes) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (self.blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": "x", **changes}

    def finish(self, config: object = None, layers: object = ()) -> None:
        document = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {}, "history": []}
        top = {"config": self.add(json.dumps(config or document).encode()), "layers": layers}
        self.index([self.add(json.dumps(top).encode())])

    def index(self, manifests: object) -> None:
        (self.folder / "index.json").write_text(json.dumps({"manifests": manifests}))


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "out")


def read(layout, tmp_path, most=1 << 20, **options):
    make_layout(layout.folder, tmp_path / "made", [], SECRET, most=most, **options)
    made = tmp_path / "made" / "blobs" / "sha256"
    top = json.loads((tmp_path / "made" / "index.json").read_text())["manifests"][0]
    manifest = json.loads((made / top["digest"][7:]).read_text())
    return manifest, json.loads((made / manifest["config"]["digest"][7:]).read_text())


def test_a_good_one_is_taken_with_the_digests_that_its_layers_really_have(layout, tmp_path):
    plain = b"layer" * 1000
    layout.finish(layers=[layout.add(gzip.compress(plain))])
    manifest, config = read(layout, tmp_path)
    assert manifest["layers"][0]["mediaType"].endswith("tar+gzip")
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(plain).hexdigest()]


def test_what_was_set_for_run_only_is_not_in_the_history(layout, tmp_path):
    steps = [
        {"created_by": '/bin/sh -c #(nop) ENV "TOKEN_FILE"="/dev/dayfly/t" "B"="1"', "empty_layer": True},
        {"created_by": "/bin/sh -c true"},
    ]
    layout.finish({"config": {}, "history": steps}, [layout.add(b"layer")])
    _, config = read(layout, tmp_path, env=("TOKEN_FILE", "B"))
    assert [h["created_by"] for h in config["history"]] == ["/bin/sh -c true"]


@pytest.mark.parametrize(
    "hurt",
    [
        lambda o: o.finish(layers=[{"digest": "sha256:../../../etc/passwd"}]),
        lambda o: o.finish(layers=[{"digest": "sha256:" + "0" * 64}]),
        lambda o: o.finish(layers=["text"]),
        lambda o: o.finish(layers={"a": 1}),
        lambda o: o.finish(layers=[o.add(b"x")] * 501),
        lambda o: o.finish(layers=[o.add(b"x", digest=o.add(b"y")["digest"].replace("a", "b"))]),
        lambda o: o.finish(config=["text"]),
        lambda o: o.finish(layers=[o.add(gzip.compress(bytes(2 << 20)))]),
        lambda o: (o.finish(), o.index([])),
        lambda o: (o.finish(), o.index([{}, {}])),
        lambda o: (o.finish(), o.index([{"digest": "sha256:" + "0" * 64}])),
        lambda o: o.index("["),
        lambda o: (o.finish(), (o.folder / "index.json").write_text("[" * 100_000)),
        lambda o: (o.finish(), (o.folder / "index.json").write_bytes(bytes(5 << 20))),
        lambda o: None,
        lambda o: (o.finish(), (o.folder / "link").symlink_to("/etc/passwd")),
        lambda o: (o.finish(), o.blobs.rename(o.folder / "b"), o.blobs.symlink_to(o.folder / "b")),
    ],
)
def test_a_bad_one_is_an_image_error(layout, tmp_path, hurt):
    hurt(layout)
    with pytest.raises(ImageError):
        read(layout, tmp_path)


def test_a_layer_that_is_not_what_its_digest_says_is_refused(layout, tmp_path):
    layer = layout.add(b"layer")
    (layout.blobs / layer["digest"][7:]).write_bytes(b"other")
    layout.finish(layers=[layer])
    with pytest.raises(ImageError) as caught:
        read(layout, tmp_path)
    assert caught.value.cause == "digest_mismatch"


@pytest.mark.parametrize("place", ["plain layer", "packed layer", "configuration"])
def test_a_secret_in_an_image_ends_the_build(layout, tmp_path, place):
    data = bytes(65530) + b"a correct-horse-battery b" + bytes(100)  # across the chunks that are read
    config = {"config": {"Env": ["T=correct-horse-battery"]}} if place == "configuration" else None
    layers = {"plain layer": [data], "packed layer": [gzip.compress(data)], "configuration": []}[place]
    layout.finish(config, [layout.add(layer) for layer in layers])
    with pytest.raises(ImageError) as caught:
        read(layout, tmp_path)
    assert caught.value.cause == "secret_leaked" and "'token'" in caught.value.message
    assert "correct-horse" not in str(caught.value)


def test_a_log_has_no_secret_wherever_its_chunks_are_cut(tmp_path):
    text = b"STEP 1/2: FROM x\nbefore correct-horse-battery after\nSTEP 2/2: RUN y\nend"
    for cut in range(1, len(text)):
        shown = bytearray()
        with BuildLog(tmp_path / "log", SECRET, shown.extend) as log:
            log.add(text[:cut])
            log.add(text[cut:])
        assert (tmp_path / "log").read_bytes() == shown == text.replace(b"correct-horse-battery", b"***")
        assert log.step == (None, 2)
