"""The agent as PID 1: what a workload sees, what it cannot do, and that it cannot take the agent with it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.errors import DiskFull, GuestRefused, LimitError
from dayfly.model import Disk, ExecResult, Machine
from dayfly.process import run_async
from dayfly.protocols import StartOptions, Vm

pytestmark = [pytest.mark.vm, pytest.mark.anyio]

SMALL = Machine(memory_mib=256, storage_mib=256)
Start = Callable[..., Any]


@pytest.fixture
def start(hypervisor: Any, tools_disk: Disk, options: Callable[..., StartOptions]) -> Start:
    return lambda **more: hypervisor.start(tools_disk, SMALL, options(**more))


async def sh(vm: Vm, script: str, **more: Any) -> ExecResult:
    return await vm.exec(["sh", "-c", script], **({"timeout_s": 60} | more))


async def said(vm: Vm, script: str, **more: Any) -> str:
    result = await sh(vm, script, **more)
    assert result.ok, result
    return result.stdout.text.strip()


async def test_what_a_program_is_given(start: Start) -> None:
    async with start(hostname="cell", env={"FROM_TASK": "1"}) as vm:
        assert await said(vm, "pwd; echo $FROM_IMAGE$FROM_TASK$HOME; cat /etc/hostname") == "/desk\nyes1/root\ncell"
        assert (
            await said(vm, "id -un; id -Gn; echo $HOME", user="worker") == "worker\nworker builders\n/home/worker"
        )
        assert await said(vm, "id -u; id -g; id -G", user="worker:builders") == "1500\n77\n77"
        assert await said(vm, "id -u; id -g", user="4242:17") == "4242\n17"
        with pytest.raises(GuestRefused) as caught:
            await sh(vm, "true", user="stranger")
        assert caught.value.cause == "unknown_user"
        shown = await vm.exec(["sh", "-c", "test -t 0 && stty size"], terminal=(20, 70))
        assert shown.stdout.text == "20 70\r\n"
        assert await said(vm, "echo x > /dev/null; head -c 3 /dev/zero | wc -c; ls /dev/shm") == "3"


FORBIDDEN = (
    "mount -t tmpfs x /desk",
    "umount /proc",
    "mknod /desk/disk b 254 0 && head -c 1 /desk/disk",
    "mknod /dev/disk b 254 16 && head -c 1 /dev/disk",
    "mknod /dev/shm/port c 241 1 && echo x > /dev/shm/port",
    "echo x > /proc/sys/kernel/core_pattern",
    "echo b > /proc/sysrq-trigger",
    "unshare -U true",
    "unshare -m true",
    "cat /proc/1/environ",
    "ls /proc/1/root/",
    "kill -9 1 && ! test -d /proc/1",
    "head -c 1 /proc/kcore | grep -q .",
    "mkdir /sys/fs/cgroup/x",
    "echo 1 > /sys/fs/cgroup/cgroup.kill",
    "echo max > /sys/fs/cgroup/memory.max",
    "rm /etc/machine-id",
    "ls /dev/vd* /dev/vport*",
)  # fmt: skip


async def test_what_even_root_cannot_do(start: Start) -> None:
    async with start() as vm:
        for script in FORBIDDEN:
            assert not (await sh(vm, script)).ok, script
        seen = await said(vm, "ps -e -o pid=,comm=")
        assert {line.split()[1] for line in seen.splitlines()} == {"init", "sh", "ps"}
        status = await said(vm, "grep -E 'Cap(Eff|Bnd)' /proc/self/status")
        assert status.split()[1::2] == ["00000000a80425fb"] * 2


async def test_the_end_of_the_main_process_and_who_stays(start: Start) -> None:
    """Fault cases 9 and 14."""
    async with start() as vm:
        result = await sh(vm, "sleep 600 & echo done")
        assert (result.stdout.data, result.writers_attached, result.killed) == (b"done\n", True, 0)
        assert "sleep" in await said(vm, "ps -e -o comm=")
        result = await sh(vm, "setsid sleep 600 & echo done", leave_children=False)
        assert (result.writers_attached, result.killed) == (False, 1)
        assert (await said(vm, "ps -e -o comm=")).split().count("sleep") == 1
        await sh(vm, "kill -9 -1")
        assert "sleep" not in await said(vm, "ps -e -o comm=")


async def test_a_timeout_kills_the_whole_tree(start: Start) -> None:
    """Fault cases 13 and 14: deaf to TERM, double-forked, in sessions of their own."""
    async with start() as vm:
        script = "trap '' TERM HUP; echo begun; (setsid sh -c 'sleep 600 & sleep 600' &); sleep 600"
        result = await sh(vm, script, timeout_s=2)
        assert result.timed_out
        assert result.stdout.data == b"begun\n"
        assert result.killed >= 3
        assert set((await said(vm, "ps -e -o comm=")).split()) == {"init", "sh", "ps"}


async def test_a_fork_bomb_and_kill_everyone_leave_the_agent_alone(start: Start) -> None:
    async with start() as vm:
        result = await sh(vm, "bomb() { bomb | bomb & }; bomb; sleep 600", timeout_s=4)
        assert result.timed_out
        assert result.killed > 10
        await sh(vm, "kill -9 -1")
        assert await said(vm, "echo alive") == "alive"


async def test_out_of_memory_is_told_and_survived(start: Start) -> None:
    """Fault case 38."""
    async with start() as vm:
        result = await sh(vm, "head -c 1000000000 /dev/zero | tail", timeout_s=120)
        assert result.oom_killed
        stats = await vm.stats()
        assert stats.oom_kills >= 1
        assert stats.memory_peak_bytes > 0.9 * stats.memory_limit_bytes
        assert await said(vm, "echo alive") == "alive"


async def test_a_full_disk_has_a_hard_limit_and_a_name(start: Start) -> None:
    async with start() as vm:
        assert not (await sh(vm, "dd if=/dev/zero of=/full bs=1M", timeout_s=120)).ok
        stats = await vm.stats()
        assert stats.disk_free_bytes < 2 << 20
        with pytest.raises(DiskFull):
            await vm.put(os.urandom(4 << 20), "/more")
        await vm.remove("/full")
        await vm.put(os.urandom(4 << 20), "/more")


async def test_frozen_means_nothing_moves(start: Start, tmp_path: Path) -> None:
    async with start() as vm:
        await sh(vm, "(while true; do echo x >> /desk/count; sleep 0.01; done) >/dev/null 2>&1 &")
        await vm.freeze()
        sizes = [(await vm.get("/desk/count", tmp_path / "count")).bytes for _ in range(3)]
        assert len(set(sizes)) == 1
        with pytest.raises(GuestRefused) as caught:
            await sh(vm, "true")
        assert caught.value.cause == "frozen"
        await vm.thaw()
        first = int(await said(vm, "wc -c < /desk/count"))
        with anyio.fail_after(60):
            while int(await said(vm, "wc -c < /desk/count")) == first:
                pass


REACHES = (
    "cat /tests/test.sh",
    "cat /logs/verifier/reward.txt",
    "echo 1 > /logs/verifier/reward.txt",
    "mv /logs /x",
    "mv /tests /x",
    "rmdir /tests",
    "umount /tests",
)


async def test_the_verifiers_place_is_new_and_out_of_reach(start: Start, tmp_path: Path) -> None:
    """Fault case 39, attacks 19, 20, 26: planted before, rewritten all the time, moved away, a link."""
    async with start() as vm:
        await sh(
            vm,
            "mkdir -p /logs/verifier /elsewhere; echo 1 > /logs/verifier/reward.txt; ln -s /elsewhere /tests;"
            "(while ! test -e /go; do sleep 0.05; done;"
            " while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /tests/test.sh;"
            " mv /logs /old; mv /tests /old2; rmdir /tests; sleep 0.01; done) >/dev/null 2>&1 &",
        )
        await vm.freeze()
        planted = await vm.open_verifier_space(["/tests", "/logs/verifier"])
        assert set(planted) == {"/tests", "/logs/verifier/reward.txt"}
        await vm.thaw()
        await sh(vm, "touch /go")
        assert await said(vm, "ls -A /tests /logs/verifier", space="verify") == "/logs/verifier:\n\n/tests:"
        await vm.put(b"echo 0.5 > /logs/verifier/reward.txt; ps -e -o args=\n", "/tests/test.sh", space="verify")
        seen = await said(vm, "sh /tests/test.sh", space="verify")
        assert "while true" in seen  # the verifier sees the workload's processes
        for script in REACHES:
            assert not (await sh(vm, script)).ok, script
        await sh(vm, "sleep 1")
        await vm.get("/logs/verifier/reward.txt", tmp_path / "reward", space="verify")
        assert (tmp_path / "reward").read_bytes() == b"0.5\n"
        script = "id -u; echo ok > /logs/verifier/log; cat /logs/verifier/log"
        assert await said(vm, script, space="verify", user="worker") == "1500\nok"
        with pytest.raises(GuestRefused) as caught:
            await vm.open_verifier_space(["/tests"])
        assert caught.value.cause == "wrong_state"


async def test_there_is_no_verifier_before_it_is_opened(start: Start) -> None:
    async with start() as vm:
        for call in (sh(vm, "true", space="verify"), vm.put(b"x", "/tests/x", space="verify")):
            with pytest.raises(GuestRefused) as caught:
                await call
            assert caught.value.cause == "no_verifier_space"


async def test_changes_are_what_differs_from_the_image(start: Start) -> None:
    async with start() as vm:
        before = {c.path for c in await vm.changes()}
        assert not {p for p in before if not p.startswith("/desk")}
        await sh(
            vm,
            "echo new > /desk/new; chmod 4755 /desk/new; rm /bin/seq; ln -s target /link; mkfifo /fifo; mkdir /d;"
            " echo x >> /etc/passwd; rm -r /etc/group; mkdir /etc/group; echo x > /etc/hosts",
        )
        changes = {c.path: c for c in await vm.changes() if c.path not in before}
    assert {p: c.kind for p, c in changes.items()} == {
        "/bin/seq": "deleted",
        "/d": "dir",
        "/etc/group": "dir",
        "/etc/passwd": "file",
        "/fifo": "other",
        "/link": "link",
        "/desk": "dir",
        "/desk/new": "file",
    }
    new = changes["/desk/new"]
    assert (new.mode, new.size) == (0o4755, 4)
    assert new.digest == "sha256:" + hashlib.sha256(b"new\n").hexdigest()
    assert changes["/link"].digest == "sha256:" + hashlib.sha256(b"target").hexdigest()


async def test_a_stopped_vms_disk_is_clean_and_starts_again(start: Start, tmp_path: Path) -> None:
    disk = tmp_path / "kept.img"
    async with start(writable=disk) as vm:
        await sh(vm, "echo kept > /desk/file; rm /bin/seq; ln -sfn /desk /dev2; (sleep 600 &) ; mkdir -p /logs")
        await vm.stop()
    await run_async(["/sbin/e2fsck", "-fn", disk], timeout_s=60)
    async with start(writable=disk) as vm:
        assert await said(vm, "cat /desk/file; ls /bin/seq 2>/dev/null || echo gone") == "kept\ngone"
        assert "sleep" not in await said(vm, "ps -e -o comm=")


async def test_owners_users_and_meta(start: Start, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "d" / "f").chmod(0o640)
    async with start() as vm:
        await vm.put(tmp_path / "d", "/data", user="worker")
        assert await said(vm, "stat -c '%u %g %a' /data/f") == "1500 1500 640"
        await sh(vm, "chown 7:8 /data/f; chmod 4751 /data/f")
        got = await vm.get("/data", tmp_path / "copy")
        await vm.put(tmp_path / "copy", "/again", meta=got.entries)
        assert await said(vm, "stat -c '%u %g %a' /again/f") == "7 8 4751"
        with pytest.raises(LimitError):
            await vm.exec(["true", "x" * 300_000])


@pytest.mark.slow
async def test_many_files_and_a_large_sparse_one(start: Start, tmp_path: Path) -> None:
    """Fault case 23, in a VM of 256 MiB."""
    source = tmp_path / "source"
    source.mkdir()
    for n in range(10_000):
        (source / f"f{n}").write_bytes(b"%d" % n * 100)
    with (source / "sparse").open("wb") as out:
        out.seek(700 << 20)
        out.write(b"x")
        out.truncate(1 << 30)
    async with start() as vm:
        put = await vm.put(source, "/there")
        got = await vm.get("/there", tmp_path / "back")
        assert (put.files, put.bytes, put.digest) == (got.files, got.bytes, got.digest)
        assert (await vm.stats()).disk_used_bytes < 100 << 20
    assert (tmp_path / "back" / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "back" / "f777").read_bytes() == b"777" * 100


async def test_a_service_in_the_guest_is_reached(hypervisor: Any, start: Start) -> None:
    async with start() as vm:
        with pytest.raises(GuestRefused) as caught:
            async with vm.forward(8000):
                pass
        assert caught.value.cause == "connection_refused"


async def test_several_vms_at_once(start: Start) -> None:
    ids: set[str] = set()

    async def one() -> None:
        async with start() as vm:
            ids.add(await said(vm, "cat /etc/machine-id /proc/sys/kernel/random/boot_id"))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(one)
    assert len(ids) == 4
