"""What the contract tests share: fake VMs, real VMs where there are some, and small tasks for either."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

import pytest

from dayfly.model import Disk, ImageConfig, Machine, Task
from dayfly.registry import HypervisorSettings, make_hypervisor
from dayfly.tasks import load_task
from dayfly.testing import FAKE, Bench, FakeHypervisor, Programs

SMALL = Machine(memory_mib=512, storage_mib=256)
NO_DISK = Disk(Path("/dev/null"), "sha256:0", ImageConfig(workdir="/app"))


@pytest.fixture
def fake_bench(tmp_path: Path) -> Bench:
    hypervisor = FakeHypervisor(start_delay_s=0.1)
    return Bench(hypervisor, NO_DISK, SMALL, tmp_path, FAKE, lambda ids: hypervisor.running, lifetime_s=0.5)


@pytest.fixture
def qemu_bench(base_disk: Disk, tmp_path: Path) -> Bench:
    hypervisor = make_hypervisor("qemu", HypervisorSettings())
    return Bench(hypervisor, base_disk, SMALL, tmp_path, running=processes_of)


@pytest.fixture(params=["fake", pytest.param("qemu", marks=pytest.mark.vm)])
def bench(request: pytest.FixtureRequest) -> Bench:
    return request.getfixturevalue(f"{request.param}_bench")


def processes_of(ids: Set[str]) -> int:
    """Processes that have one of these ids on their command line; zombies have none."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            found += any(vm_id.encode() in words for vm_id in ids)
    return found


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    """A task whose scripts are of statements that `programs` knows."""

    def make(programs: Programs, solve: list[str], test: list[str], toml: str = "", name: str = "task") -> Task:
        folder = tmp_path / name
        files = {
            "task.toml": f"[environment]\ndocker_image = 'none'\n{toml}".encode(),
            "instruction.md": b"Write done to /contract/result.",
            "solution/solve.sh": programs.script(*solve),
            "tests/test.sh": programs.script(*test),
        }
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
            (folder / path).chmod(0o755)
        return load_task(folder, strict=True)

    return make
