"""Pulls from a real registry on loopback, and from one that fails in every way."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dayfly.errors import ImageError, InfraError, NotFoundError
from dayfly.images import ImageStore, PullLimits, Registries, Watch
from dayfly.images.layout import digest_of
from dayfly.images.skopeo import Stopped
from dayfly.images.tar import Entry, Kind, write_tar

QUICK = PullLimits(pause_s=0.01, window_s=1.0, window_bytes=4096, answer_s=60.0)

Use = Callable[..., None]


def layer(name: str, content: bytes = b"content") -> bytes:
    return write_tar((Entry(b"", Kind.DIR), b""), (Entry(name.encode(), Kind.FILE, size=len(content)), content))


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", architecture="amd64")


@pytest.fixture
def asked(front: Any, use: Use) -> Any:
    """A front that hosts' skopeo may use without TLS."""
    use(front.host)
    return front


def pull(store: ImageStore, name: str, **options: Any) -> Any:
    return store.pull(name, Registries(QUICK), **options)


def pieces(store: ImageStore) -> list[str]:
    """What is in the cache besides empty lock files, and blobs that are whole."""
    root = store._root
    found = [p for p in root.rglob("*") if p.is_file() and p.parent.name != "locks"]
    whole = [p for p in found if p.parent.name == "sha256" and digest_of(p.read_bytes()) == f"sha256:{p.name}"]
    return sorted(str(p.relative_to(root)) for p in set(found) - set(whole))


# --- what is pulled ------------------------------------------------------------------------------


def test_a_tag_is_pulled_and_makes_a_disk(registry: Any, asked: Any, store: ImageStore) -> None:
    digest = registry.push("plain/a:1", [layer("a"), gzip.compress(layer("b"))])
    image = pull(store, f"{asked.host}/plain/a:1")
    assert image.digest == digest and image.config.workdir == "/srv" and len(image.layers) == 2
    assert store.disk(image).path.exists()
    asked.asked.clear()
    assert pull(store, f"{asked.host}/plain/a:1") == image
    assert asked.asked == []


def test_a_digest_is_pulled_and_keeps_its_name(registry: Any, asked: Any, store: ImageStore) -> None:
    digest = registry.push("plain/d:1", [layer("d")])
    name = f"{asked.host}/plain/d@{digest}"
    assert pull(store, name).digest == digest
    assert [info.name for info in store.list()] == [name]
    assert store.resolve(name).digest == digest
    store.prune(unused_s=3600)
    assert [info.name for info in store.list()] == [name]


def test_a_digest_of_an_index_is_found_again(registry: Any, asked: Any, store: ImageStore) -> None:
    digest = registry.push("plain/i:one", [layer("i")])
    index = registry.push_index("plain/i:all", [(digest, {"architecture": "amd64", "os": "linux"})])
    assert pull(store, f"{asked.host}/plain/i@{index}").digest == digest
    asked.asked.clear()
    assert pull(store, f"{asked.host}/plain/i@{index}").digest == digest
    assert asked.asked == []


def test_layers_of_any_compression_are_pulled(registry: Any, asked: Any, store: ImageStore, tmp_path: Path) -> None:
    plain = layer("z", noise(100_000))
    registry.push("plain/z:1", [zstandard.compress(plain)])
    registry.push("plain/z:2", [plain])
    one = store.disk(pull(store, f"{asked.host}/plain/z:1"))
    other = store.disk(pull(store, f"{asked.host}/plain/z:2"))
    assert one.digest == other.digest


def test_a_docker_manifest_keeps_its_digest(registry: Any, asked: Any, store: ImageStore) -> None:
    registry.push("plain/v2:1", [gzip.compress(layer("v"))], docker=True)
    image = pull(store, f"{asked.host}/plain/v2:1")
    manifest = (store._root / "blobs/sha256" / image.digest[7:]).read_bytes()
    assert json.loads(manifest)["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    assert digest_of(manifest) == image.digest


def test_the_hosts_platform_is_taken_of_an_index(registry: Any, asked: Any, store: ImageStore) -> None:
    mine = registry.push("plain/p:amd", [layer("p")])
    newer = registry.push("plain/p:v3", [layer("p3")])
    other = registry.push("plain/p:arm", [layer("q")], architecture="arm64")
    amd = {"architecture": "amd64", "os": "linux"}
    platforms = [
        (newer, {**amd, "variant": "v3"}),
        (other, {"architecture": "arm64", "os": "linux", "variant": "v8"}),
        (mine, amd),
        (newer, {"architecture": "amd64", "os": "windows"}),
    ]
    registry.push_index("plain/p:all", platforms)
    assert pull(store, f"{asked.host}/plain/p:all").digest == mine


@pytest.mark.parametrize("index", [True, False])
def test_another_architecture_is_refused_by_name(registry: Any, asked: Any, store: ImageStore, index: bool) -> None:
    tag = f"arm{index}".lower()
    digest = registry.push(f"plain/w:{tag}", [layer("w")], architecture="arm64")
    if index:
        registry.push_index(f"plain/w:{tag}", [(digest, {"architecture": "arm64", "os": "linux"})])
    with pytest.raises(ImageError) as caught:
        pull(store, f"{asked.host}/plain/w:{tag}")
    assert caught.value.cause == "wrong_architecture"
    for word in (f"{asked.host}/plain/w:{tag}", "arm64", "amd64"):
        assert word in caught.value.message
    assert pieces(store) == []


# --- layers are downloaded once ------------------------------------------------------------------


def test_a_shared_layer_is_downloaded_once(registry: Any, asked: Any, store: ImageStore) -> None:
    shared = layer("base", noise(50_000))
    for name in ("one", "two"):
        registry.push(f"shared/{name}:1", [shared, layer(name)])
        pull(store, f"{asked.host}/shared/{name}:1")
    assert asked.blobs_asked().count(digest_of(shared)) == 1
    assert sum(info.shared_bytes for info in store.list()) == 2 * len(shared)


def test_a_layer_of_an_import_is_not_downloaded(
    registry: Any, asked: Any, store: ImageStore, tmp_path: Path
) -> None:
    shared = layer("base", noise(50_000, 2))
    registry.push("shared/here:1", [shared])
    layout = registry.folder / f"layout-{registry.count}"
    store.import_image(layout, "local")
    registry.push("shared/more:1", [shared, layer("more")])
    pull(store, f"{asked.host}/shared/more:1")
    assert digest_of(shared) not in asked.blobs_asked()


PULL = """
import sys
from pathlib import Path
from dayfly.images import ImageStore
store = ImageStore(Path(sys.argv[1]), architecture="amd64")
store.disk(store.pull(sys.argv[2]))
"""


def test_processes_that_want_one_image_pull_it_once(
    registry: Any, asked: Any, store: ImageStore, tmp_path: Path
) -> None:
    shared = layer("base", noise(300_000, 3))
    for number in range(2):
        registry.push(f"once/{number}:1", [shared, layer(f"own{number}")])
    command = [sys.executable, "-c", PULL, str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    names = [f"{asked.host}/once/{number % 2}:1" for number in range(6)]
    started = [subprocess.Popen([*command, name], env=environment) for name in names]
    assert [process.wait(120) for process in started] == [0] * 6
    assert asked.blobs_asked().count(digest_of(shared)) == 1
    assert all(asked.blobs_asked().count(digest) == 1 for digest in asked.blobs_asked())
    assert len(store.list()) == 2 and len(list((tmp_path / "store/disks").glob("*.squashfs"))) == 2


# --- tags, policies, names -----------------------------------------------------------------------


def test_a_moved_tag_is_seen_only_when_asked_for(registry: Any, asked: Any, store: ImageStore) -> None:
    name = f"{asked.host}/tag/moves:1"
    old = registry.push("tag/moves:1", [layer("old")])
    assert pull(store, name).digest == old
    new = registry.push("tag/moves:1", [layer("new")])
    assert pull(store, name).digest == old
    assert pull(store, name, policy="always").digest == new
    assert store.resolve(name).digest == new
    assert pull(store, f"{asked.host}/tag/moves@{old}").digest == old  # still here, without a name


def test_never_asks_nobody(registry: Any, asked: Any, store: ImageStore) -> None:
    registry.push("never/n:1", [layer("n")])
    with pytest.raises(NotFoundError, match="never/n"):
        pull(store, f"{asked.host}/never/n:1", policy="never")
    assert asked.asked == []


def test_what_is_here_needs_no_registry(store: ImageStore, registry: Any, use: Use) -> None:
    use(registry.host)
    registry.push("offline/o:1", [layer("o")])
    image = pull(store, f"{registry.host}/offline/o:1")
    use("127.0.0.1:1")
    assert pull(store, f"{registry.host}/offline/o:1") == image
    assert pull(store, f"{registry.host}/offline/o@{image.digest}").digest == image.digest


def test_registries_conf_sends_a_name_elsewhere(
    registry: Any, store: ImageStore, registries_conf: Callable[[str], None]
) -> None:
    digest = registry.push("mirror/python:3.13", [layer("python")])
    registries_conf(
        f'[[registry]]\nprefix = "docker.io/library"\nlocation = "{registry.host}/mirror"\ninsecure = true\n'
    )
    assert pull(store, "python:3.13").digest == digest
    use_again = pull(store, "docker.io/library/python:3.13", policy="never")
    assert use_again.digest == digest and use_again.name == "python:3.13"


def test_a_blocked_registry_is_said(store: ImageStore, registries_conf: Callable[[str], None]) -> None:
    registries_conf('[[registry]]\nlocation = "blocked.example"\nblocked = true\n')
    with pytest.raises(ImageError) as caught:
        pull(store, "blocked.example/a:1")
    assert caught.value.cause == "registry_blocked"


# --- credentials ---------------------------------------------------------------------------------


def test_credentials_come_from_the_auth_file(
    private_registry: Any, use: Use, store: ImageStore, tmp_path: Path
) -> None:
    host = private_registry.host
    use(host)
    digest = private_registry.push("closed/c:1", [layer("c")])
    for credentials in (None, "tester:wrong"):
        if credentials:
            _log_in(tmp_path, host, credentials)
        with pytest.raises(ImageError) as caught:
            pull(store, f"{host}/closed/c:1")
        assert caught.value.cause == "registry_auth" and "skopeo login" in str(caught.value)
        assert "wrong" not in str(caught.value).replace("no or wrong credentials", "")
    _log_in(tmp_path, host, "tester:secret")
    assert pull(store, f"{host}/closed/c:1").digest == digest


def _log_in(folder: Path, host: str, credentials: str) -> None:
    auth = base64.b64encode(credentials.encode()).decode()
    (folder / "auth.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


# --- faults --------------------------------------------------------------------------------------


def test_what_a_registry_does_not_have(asked: Any, store: ImageStore) -> None:
    with pytest.raises(ImageError) as caught:
        pull(store, f"{asked.host}/no/such:1")
    assert caught.value.cause == "image_not_found"
    assert sum("/manifests/" in line for line in asked.asked) == 1  # a name does not get better by waiting


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"status": 503}, "registry_unavailable"),
        ({"status": 500}, "registry_unavailable"),
        ({"damage": "flip"}, "digest_mismatch"),
        ({"damage": "cut"}, "image_truncated"),
        ({"damage": "drip"}, "registry_slow"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("passing", [True, False], ids=["passing", "lasting"])
def test_a_fault_is_tried_again_and_then_named(
    registry: Any, asked: Any, store: ImageStore, fault: dict[str, Any], cause: str, passing: bool
) -> None:
    content = layer("f", noise(20_000, 4))
    digest = registry.push("fault/f:1", [layer("first"), content])
    asked.fault(f"/blobs/{digest_of(content)}", times=2 if passing else 99, **fault)
    if passing:
        assert pull(store, f"{asked.host}/fault/f:1").digest == digest
        assert asked.blobs_asked().count(digest_of(content)) == 3
        return
    with pytest.raises(ImageError) as caught:
        pull(store, f"{asked.host}/fault/f:1")
    assert caught.value.cause == cause and caught.value.hint
    assert pieces(store) == [] and store.list() == ()
    assert asked.blobs_asked().count(digest_of(layer("first"))) == 1  # what was whole is not loaded again


@pytest.mark.parametrize("headers", [{"Retry-After": "1"}, {}], ids=["retry-after", "without"])
def test_too_many_requests_are_waited_out(
    registry: Any, asked: Any, store: ImageStore, headers: dict[str, str]
) -> None:
    digest = registry.push("many/m:1", [layer("m")])
    asked.fault("/manifests/", status=429, headers=headers, times=1)
    assert pull(store, f"{asked.host}/many/m:1").digest == digest


def test_too_many_requests_for_good_are_named(asked: Any, store: ImageStore) -> None:
    asked.fault("/manifests/", status=429, headers={"Retry-After": "1"})
    with pytest.raises(ImageError) as caught:
        store.pull(f"{asked.host}/many/n:1", Registries(PullLimits(attempts=1)))
    assert caught.value.cause == "registry_rate_limited"
    assert pieces(store) == []


def test_a_registry_that_says_nothing_is_left(asked: Any, store: ImageStore) -> None:
    asked.fault("/v2/", damage="stall")
    with pytest.raises(ImageError) as caught:
        store.pull(f"{asked.host}/silent/s:1", Registries(PullLimits(attempts=1, answer_s=1.0)))
    assert caught.value.cause == "registry_slow"


def test_a_manifest_of_another_digest_is_refused(registry: Any, asked: Any, store: ImageStore) -> None:
    digest = registry.push("lie/l:1", [layer("l")])
    asked.fault(f"/manifests/{digest}", damage="flip")
    with pytest.raises(ImageError) as caught:
        pull(store, f"{asked.host}/lie/l@{digest}")
    assert caught.value.cause == "digest_mismatch"
    assert pieces(store) == []


def test_a_registry_that_fails_is_not_asked_again(asked: Any, store: ImageStore) -> None:
    asked.fault("/v2/", status=503)
    registries = Registries(PullLimits(pause_s=0.01, attempts=2, breaker_failures=4))
    causes = []
    for number in range(6):
        with pytest.raises(ImageError) as caught:
            store.pull(f"{asked.host}/broken/{number}:1", registries)
        causes.append(caught.value)
        if number == 1:
            asked.asked.clear()
    assert asked.asked == []
    assert {error.cause for error in causes} == {"registry_unavailable"}
    assert "broken/0" in causes[5].message  # the first failure


def test_a_registry_that_recovers_is_asked_again(registry: Any, asked: Any, store: ImageStore) -> None:
    digest = registry.push("again/a:1", [layer("again")])
    asked.fault("/v2/", status=503)
    registries = Registries(PullLimits(pause_s=0.01, attempts=2, breaker_failures=2, breaker_pause_s=0.0))
    with pytest.raises(ImageError):
        store.pull(f"{asked.host}/again/a:1", registries)
    asked.faults.clear()
    assert store.pull(f"{asked.host}/again/a:1", registries).digest == digest


def test_a_missing_image_does_not_close_a_registry(registry: Any, asked: Any, store: ImageStore) -> None:
    digest = registry.push("open/o:1", [layer("open")])
    registries = Registries(PullLimits(breaker_failures=1))
    for _ in range(3):
        with pytest.raises(ImageError):
            store.pull(f"{asked.host}/open/absent:1", registries)
    assert store.pull(f"{asked.host}/open/o:1", registries).digest == digest


def test_a_pull_can_be_stopped(registry: Any, asked: Any, store: ImageStore) -> None:
    content = layer("s", noise(200_000, 5))
    registry.push("stop/s:1", [content])
    asked.fault("/blobs/", damage="drip")
    watch = Watch()
    caught: list[BaseException] = []

    def go() -> None:
        try:
            store.pull(f"{asked.host}/stop/s:1", watch=watch)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    while not watch.fetched_bytes and thread.is_alive():
        pass
    watch.stop.set()
    thread.join(20)
    assert isinstance(caught[0], Stopped)
    assert pieces(store) == []


def test_a_damaged_layer_is_pulled_anew(registry: Any, asked: Any, store: ImageStore) -> None:
    content = layer("d", noise(10_000, 6))
    registry.push("heal/h:1", [content])
    image = pull(store, f"{asked.host}/heal/h:1")
    blob = store._root / "blobs/sha256" / digest_of(content)[7:]
    blob.write_bytes(bytes(len(content)))
    with pytest.raises(ImageError) as caught:
        store.disk(image)
    assert caught.value.cause == "digest_mismatch"
    store.disk(pull(store, f"{asked.host}/heal/h:1", policy="always"))


# --- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], check=True, timeout=20)
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=20)


def test_a_full_disk_half_way_leaves_no_layer(registry: Any, asked: Any, small_disk: Path) -> None:
    registry.push("full/f:1", [layer("one", noise(1_000_000, 7)), layer("two", noise(2_000_000, 8))])
    store = ImageStore(small_disk / "store", architecture="amd64")
    with pytest.raises(InfraError) as caught:
        pull(store, f"{asked.host}/full/f:1")
    assert caught.value.cause == "host_disk_full" and "image prune" in str(caught.value)
    left = [p for p in (small_disk / "store").rglob("*") if p.is_file() and p.parent.name != "locks"]
    assert left == []
    registry.push("full/g:1", [layer("three", noise(500_000, 9))])
    pull(store, f"{asked.host}/full/g:1")
