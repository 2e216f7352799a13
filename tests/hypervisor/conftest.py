"""One hypervisor and one small image for all VM tests, so that each template is made once."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dayfly.errors import HostError
from dayfly.hypervisors.qemu.kernel import fetch_kernel, find_kernel
from dayfly.hypervisors.qemu.settings import QemuSettings, default_cache_dir
from dayfly.model import Disk, ImageConfig, Machine
from dayfly.process import run
from dayfly.protocols import StartOptions

SMALL = Machine(memory_mib=256, storage_mib=256)
BOX = Path(__file__).with_name("box.c")
_numbers = itertools.count()


@pytest.fixture(scope="session")
def cache() -> Path:
    """The cache of this user, with a kernel in it: fetching one for every run of the tests would be rude."""
    folder = default_cache_dir()
    try:
        find_kernel(None, folder)
    except HostError:
        fetch_kernel(folder)
    return folder


@pytest.fixture(scope="session")
def settings(cache: Path) -> QemuSettings:
    return QemuSettings(cache_dir=cache)


@pytest.fixture
def own_settings(cache: Path, tmp_path: Path) -> QemuSettings:
    """With templates of its own; the kernel is shared."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache / "kernels")
    return QemuSettings(cache_dir=tmp_path / "cache")


@pytest.fixture(scope="session")
def hypervisor(settings: QemuSettings) -> Iterator[object]:
    from dayfly.hypervisors.qemu import QemuHypervisor

    made = QemuHypervisor(settings)
    yield made
    made.close()


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    """An image with one static program, /box, and nothing else: no shell, no libc, no /proc, no /etc."""
    folder = tmp_path_factory.mktemp("image")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{os.uname().machine}-linux-musl"]
    run([*compiler, "-static", "-Os", "-o", folder / "box", BOX], timeout_s=300)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        member = archive.gettarinfo(folder / "box", "box")
        member.mode, member.uid, member.gid, member.uname, member.gname = 0o755, 0, 0, "", ""
        with (folder / "box").open("rb") as file:
            archive.addfile(member, file)
    path = folder / "disk.sqfs"
    run(["tar2sqfs", "-q", path], input=tar.getvalue(), timeout_s=60)
    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    return Disk(path, digest, ImageConfig(env={"FROM_IMAGE": "yes"}), image="box")


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., StartOptions]:
    """Options for a further VM of this test."""

    def make(**more: object) -> StartOptions:
        name = f"test-{os.getpid()}-{next(_numbers)}"
        chosen = {"vm_id": name, "writable": tmp_path / f"{name}.img", "console": tmp_path / f"{name}.log"}
        return StartOptions(**(chosen | more))  # type: ignore[arg-type]

    return make
