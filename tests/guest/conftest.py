"""An agent as an ordinary process, and real VMs with an image made of this host's shell and tools."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import platform
import re
import shutil
import socket
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from dayfly.errors import HostError
from dayfly.guest.build import agent_binary
from dayfly.guest.client import GuestClient
from dayfly.model import Disk, ImageConfig
from dayfly.process import PIPE, run, spawn
from dayfly.protocols import StartOptions

PROGRAMS = (
    *("sh", "cat", "ls", "sleep", "mv", "rm", "mkdir", "rmdir", "ln", "id", "dd", "head", "tail", "wc", "stat"),
    *(
        "chmod",
        "chown",
        "touch",
        "tty",
        "stty",
        "mknod",
        "mount",
        "umount",
        "unshare",
        "setsid",
        "env",
        "sha256sum",
    ),
    *("du", "mkfifo", "grep", "kill", "ps", "seq", "true", "find"),
)
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nworker:x:1500:1500::/home/worker:/bin/sh\n"
GROUP = b"root:x:0:\nworker:x:1500:\nbuilders:x:77:worker\n"

_numbers = itertools.count()


@asynccontextmanager
async def plain_agent(workdir: Path) -> AsyncIterator[GuestClient]:
    ours, theirs = socket.socketpair()
    with theirs:
        argv = [agent_binary(platform.machine()), "--test-fd", str(theirs.fileno())]
        popen = spawn(argv, pass_fds=[theirs.fileno()], stderr=PIPE)
    try:
        async with GuestClient(ours) as guest:
            await guest.hello(timeout_s=30)
            await guest.clone(hostname="task", timeout_s=30)
            await guest.setup(env={"FROM_IMAGE": "yes", "PATH": "/usr/bin:/bin"}, workdir=str(workdir), user="")
            yield guest
        with anyio.fail_after(10):
            while popen.poll() is None:  # noqa: ASYNC110 - another process
                await anyio.sleep(0.01)
        assert popen.returncode == 0, popen.stderr and popen.stderr.read()
    finally:
        popen.kill()
        popen.wait()
        assert popen.stderr is not None
        popen.stderr.close()


@pytest.fixture
def agent(tmp_path: Path) -> Callable[[], AbstractAsyncContextManager[GuestClient]]:
    """Starts an agent whose working directory is `tmp_path`/work; it must end by itself when we hang up."""
    (tmp_path / "work").mkdir()
    return lambda: plain_agent(tmp_path / "work")


# --- VMs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hypervisor() -> Iterator[object]:
    from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings
    from dayfly.hypervisors.qemu.kernel import fetch_kernel, find_kernel

    settings = QemuSettings()
    try:
        find_kernel(None, settings.cache)
    except HostError:
        fetch_kernel(settings.cache)
    made = QemuHypervisor(settings)
    yield made
    made.close()


def libraries(program: Path) -> list[Path]:
    said = run(["ldd", program], timeout_s=30, check=False).stdout.decode()
    return [Path(p) for p in re.findall(r"(/\S+)", said) if Path(p).is_file()]


@pytest.fixture(scope="session")
def tools_disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    """A small image: shell, common tools and their libraries, two users; no /proc, /dev or /tmp."""
    found = {name: shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in PROGRAMS}
    wanted: dict[str, bytes] = {"etc/passwd": PASSWD, "etc/group": GROUP}
    for name, path in found.items():
        assert path is not None, f"{name} is not on this host"
        wanted[f"bin/{name}"] = Path(path).read_bytes()
        wanted |= {str(p).lstrip("/"): p.read_bytes() for p in libraries(Path(path))}
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, data in sorted(wanted.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644 if name.startswith("etc/") else 0o755
            archive.addfile(member, io.BytesIO(data))
    path = tmp_path_factory.mktemp("image") / "tools.sqfs"
    run(["tar2sqfs", "-q", path], input=tar.getvalue(), timeout_s=120)
    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    config = ImageConfig(env={"FROM_IMAGE": "yes", "PATH": "/bin"}, workdir="/desk")
    return Disk(path, digest, config, image="tools")


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., StartOptions]:
    def make(**more: object) -> StartOptions:
        name = f"guest-{os.getpid()}-{next(_numbers)}"
        chosen = {"vm_id": name, "writable": tmp_path / f"{name}.img", "console": tmp_path / f"{name}.log"}
        return StartOptions(**(chosen | more))  # type: ignore[arg-type]

    return make
