"""Ownership, locks, disks and lives: the parts around a VM, without one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from dayfly.hypervisors.qemu import keeper
from dayfly.hypervisors.qemu.confine import Uids, uid_range
from dayfly.hypervisors.qemu.disks import MIB, copy_sparse, empty_filesystem, ensure_writable
from dayfly.hypervisors.qemu.life import Life
from dayfly.hypervisors.qemu.lock import locked, try_lock
from dayfly.hypervisors.qemu.owner import claim, processes_of, sweep
from dayfly.process import PIPE, run, spawn

CONTROLLER = """
import os, subprocess, sys
from pathlib import Path
from dayfly.hypervisors.qemu import owner as module
owner = module.claim(Path(sys.argv[1]))
sleeper = "import time; time.sleep(600)"
for n in range(2):
    # like a VMM that missed the death of its parent; and one whose start is not yet to be seen then
    late = n and "sleep 1; " or ""
    subprocess.Popen(["sh", "-c", late + 'exec "$0" -c "$1" "$2:$3"', sys.executable, sleeper,
                      owner.name("vm").rpartition(":")[0], f"vm-{n}"],
                     start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
if sys.argv[2] == "die without keeper":
    os.kill(module._keeper._popen.pid, 9)
print(owner.id, flush=True)
os.kill(os.getpid(), 9) if sys.argv[2] != "live" else sys.stdin.read()
"""


def controller(run_folder: Path, fate: str) -> tuple[object, str]:
    popen = spawn([sys.executable, "-c", CONTROLLER, run_folder, fate], stdin=PIPE, stdout=PIPE, stderr=None)
    assert popen.stdout is not None
    return popen, popen.stdout.readline().decode().strip()


def wait_for(count: int, identity: str) -> None:
    deadline = time.monotonic() + 20
    while len(processes_of(identity)) != count:
        assert time.monotonic() < deadline, processes_of(identity)
        time.sleep(0.05)


def test_a_keeper_ends_what_a_killed_controller_left_also_what_appears_late(tmp_path: Path) -> None:
    popen, identity = controller(tmp_path, "die")
    popen.communicate(timeout=20)  # type: ignore[attr-defined]
    # a zombie has no command line (None, or empty)
    keepers = [p for p in psutil.process_iter(["cmdline", "ppid"]) if keeper.__file__ in (p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs([p for p in keepers if p.info["ppid"] != os.getpid()], timeout=20)
    assert alive == []
    assert processes_of(identity) == {}


def test_a_sweep_ends_what_a_killed_controller_and_keeper_left_and_may_be_repeated(tmp_path: Path) -> None:
    popen, identity = controller(tmp_path, "die without keeper")
    popen.communicate(timeout=20)  # type: ignore[attr-defined]
    wait_for(2, identity)
    swept = sweep(tmp_path)
    assert (swept.owners, swept.processes, swept.vms) == (1, 2, ("vm-0", "vm-1"))
    assert processes_of(identity) == {}
    assert list(tmp_path.iterdir()) == []
    assert sweep(tmp_path).owners == 0


def test_a_sweep_does_not_see_what_has_a_living_owner(tmp_path: Path) -> None:
    popen, identity = controller(tmp_path, "live")
    try:
        wait_for(2, identity)
        assert sweep(tmp_path).owners == 0
        assert len(processes_of(identity)) == 2
        assert (tmp_path / identity).is_dir()
    finally:
        os.kill(popen.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        popen.communicate(timeout=20)  # type: ignore[attr-defined]
    wait_for(0, identity)
    assert sweep(tmp_path).owners == 1


def test_an_owner_that_ends_leaves_nothing(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    assert sweep(tmp_path).owners == 0
    owner.close()
    assert list(tmp_path.iterdir()) == []


def test_locks_are_exclusive_bounded_and_follow_the_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, 1):
        assert try_lock(path) is None
        path.unlink()
        renewed = try_lock(path)
        assert renewed is not None, "the old lock guards a file that is gone"
        os.close(renewed)
    shared = [try_lock(path, shared=True) for _ in range(2)]
    assert None not in shared
    assert try_lock(path) is None
    for fd in shared:
        os.close(fd)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give VMs their own user ids")
def test_no_two_vms_share_a_user_id(tmp_path: Path) -> None:
    one, two = Uids(tmp_path), Uids(tmp_path)
    taken = [u.take() for u in (one, two) for _ in range(50)]
    assert len(set(taken)) == 100
    assert all(uid_range()[0] <= (uid or 0) < uid_range()[1] for uid in taken)
    one.close()
    two.close()


def test_the_writable_disk_has_its_size_is_sparse_and_sound(tmp_path: Path) -> None:
    disk = tmp_path / "rollout" / "disk.img"
    ensure_writable(disk, 512, tmp_path / "cache")
    status = disk.stat()
    assert status.st_size == 512 * MIB
    assert status.st_blocks * 512 < 8 * MIB
    assert status.st_mode & 0o777 == 0o600
    run(["e2fsck", "-fn", disk], timeout_s=60)


def test_an_existing_disk_is_used_as_it_is(tmp_path: Path) -> None:
    disk = tmp_path / "disk.img"
    disk.write_bytes(b"final disk of a rollout")
    ensure_writable(disk, 512, tmp_path / "cache")
    assert disk.read_bytes() == b"final disk of a rollout"


def test_an_empty_filesystem_is_made_once_and_always_the_same(tmp_path: Path) -> None:
    one = empty_filesystem(64, tmp_path / "a")
    made = one.stat().st_mtime_ns
    assert empty_filesystem(64, tmp_path / "a").stat().st_mtime_ns == made
    assert one.read_bytes() == empty_filesystem(64, tmp_path / "b").read_bytes()


def test_a_sparse_copy_has_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for at in (0, 5 * MIB, 9 * MIB - 7):
            file.seek(at)
            file.write(b"data at %d" % at)
    copy_sparse(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= source.stat().st_blocks


@pytest.mark.anyio
async def test_a_life_may_be_entered_within_a_time_limit_and_left_outside() -> None:
    seen = []

    @asynccontextmanager
    async def vm() -> AsyncIterator[str]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            seen.append("born")
            yield "vm"
            tasks.cancel_scope.cancel()
        seen.append("gone")

    life = Life(vm)
    with anyio.fail_after(5):
        assert await life.begin() == "vm"
    assert seen == ["born"]
    with anyio.fail_after(5):
        await life.end()
    assert seen == ["born", "gone"]


@pytest.mark.anyio
async def test_a_life_that_is_given_up_while_it_begins_is_cleaned_up() -> None:
    seen = []

    @asynccontextmanager
    async def vm() -> AsyncIterator[str]:
        try:
            await anyio.sleep_forever()
            yield "never"
        finally:
            seen.append("gone")

    life = Life(vm)
    with anyio.move_on_after(0.05) as scope:
        try:
            await life.begin()
        finally:
            await life.end()
    assert scope.cancelled_caught
    assert seen == ["gone"]


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["begin", "end"])
async def test_a_life_reports_the_error_of_its_begin_and_of_its_end(where: str) -> None:
    @asynccontextmanager
    async def vm() -> AsyncIterator[str]:
        if where == "begin":
            raise ValueError("begin")
        yield "vm"
        raise ValueError("end")

    life = Life(vm)
    with pytest.raises(ValueError, match=where):
        try:
            await life.begin()
        finally:
            await life.end()
