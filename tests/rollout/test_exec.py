"""Commands in a real VM: the public fault cases about exec, streams and limits (numbers as in the docs)."""

from __future__ import annotations

import anyio
import pytest

from dayfly.errors import GuestLost, GuestRefused, LimitError, SandboxOom
from dayfly.model import Machine

pytestmark = pytest.mark.vm


def test_output_is_bytes_and_the_status_is_the_guests(in_vm):
    """Fault 7: one byte that is no UTF-8."""

    async def work(vm):
        return await vm.exec(["/bin/sh", "-c", r"printf 'a\377b'; printf 'e\376' >&2; exit 7"])

    result = in_vm(work)
    assert (result.exit_code, result.stdout.data, result.stderr.data) == (7, b"a\xffb", b"e\xfe")
    assert result.stdout.text == "a\ufffdb"


@pytest.mark.parametrize(
    "script",
    [
        "sleep 600 & echo done",
        "setsid sleep 600 & echo done",
        "(setsid sh -c 'sleep 600 & exec sleep 600' &); echo done",
    ],
)
def test_a_background_child_does_not_hold_the_call(in_vm, script):
    """Fault 9: the call returns when the main process ends, and says that writers are attached."""

    async def work(vm):
        with anyio.fail_after(60):
            result = await vm.exec(["/bin/sh", "-c", script], timeout_s=300)
        alive = await vm.exec(["/usr/bin/pgrep", "-c", "sleep"])
        return result, alive

    result, alive = in_vm(work)
    assert (result.exit_code, result.stdout.data) == (0, b"done\n")
    assert result.writers_attached and not result.timed_out
    assert int(alive.stdout.data) >= 1, "the child survives for a verifier that wants it"


def test_children_can_be_taken_down_with_the_main_process(in_vm):
    async def work(vm):
        await vm.exec(["/bin/sh", "-c", "setsid sleep 600 & echo done"], leave_children=False)
        return await vm.exec(["/usr/bin/pgrep", "-c", "sleep"])

    assert in_vm(work).stdout.data.strip() == b"0"


def test_much_output_is_kept_at_both_ends_and_whole_in_the_sink(in_vm):
    """Fault 10: 20 MB without a newline."""
    size = 20_000_000
    seen = bytearray()

    async def work(vm):
        return await vm.exec(
            ["/bin/sh", "-c", f"printf start; head -c {size} /dev/zero | tr '\\0' x; printf end"],
            stdout=seen.extend,
        )

    result = in_vm(work)
    assert result.exit_code == 0
    assert len(seen) == result.stdout.total == size + 8
    assert result.stdout.data.startswith(b"startx") and result.stdout.data.endswith(b"xend")
    assert 0 < result.stdout.dropped < size
    assert str(result.stdout.dropped).encode() in result.stdout.data


@pytest.mark.parametrize(
    "tail",
    [
        "sleep 600",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "(setsid sh -c \"trap '' TERM; sleep 600\" &) ; sleep 600",
    ],
)
def test_a_timeout_keeps_the_output_and_leaves_no_process(in_vm, tail):
    """Faults 13 and 14."""

    async def work(vm):
        result = await vm.exec(["/bin/sh", "-c", f"echo one; echo two; {tail}"], timeout_s=2)
        left = await vm.exec(["/usr/bin/pgrep", "-c", "sleep"])
        return result, left

    result, left = in_vm(work)
    assert result.timed_out
    assert result.stdout.data == b"one\ntwo\n"
    assert left.stdout.data.strip() == b"0"


def test_a_silent_command_is_not_lost(in_vm):
    """Fault 16: silence longer than several heartbeats; the status comes from the guest."""

    async def work(vm):
        return await vm.exec(["/bin/sh", "-c", "sleep 12; exit 7"])

    assert in_vm(work).exit_code == 7


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_too_long_an_argument_is_refused_before_the_start(in_vm, where):
    """Fault 17."""
    long = "x" * 300_000

    async def work(vm):
        await vm.exec(
            ["/bin/echo", long if where == "argument" else "short"],
            env={"LONG": long} if where != "argument" else {},
        )

    with pytest.raises(LimitError) as caught:
        in_vm(work)
    assert any(ch.isdigit() for ch in str(caught.value)), "the limit is named"


def test_what_cannot_be_started_is_refused_by_name(in_vm):
    async def work(vm):
        for argv, options in (
            (["/no/such/program"], {}),
            (["/etc/passwd"], {}),
            (["/bin/true"], {"user": "nobody-here"}),
            (["/bin/true"], {"cwd": "/no/such/folder"}),
        ):
            with pytest.raises(GuestRefused):
                await vm.exec(argv, **options)
        return await vm.exec(["/bin/true"])

    assert in_vm(work).ok


def test_users_by_name_and_number(in_vm):
    async def work(vm):
        script = ["/bin/sh", "-c", "id -u; id -g; echo $HOME; touch /tmp/mine && stat -c %u /tmp/mine"]
        return [(await vm.exec(script, user=u)).stdout.text.split() for u in ("dev", "1000", "12345:54321", "root")]

    named, by_uid, unknown, root = in_vm(work)
    assert named == by_uid == ["1000", "1000", "/home/dev", "1000"]
    assert unknown[:2] == ["12345", "54321"]
    assert root[0] == "0"


def test_standard_input_and_end_of_file(in_vm):
    async def work(vm):
        return await vm.exec(["/usr/bin/wc", "-c"], stdin=b"\0" * 300_000)

    assert in_vm(work).stdout.data.strip() == b"300000"


def test_a_terminal_when_one_is_wanted(in_vm):
    async def keys():
        yield b"stty size\n"
        yield b"exit 5\n"

    async def work(vm):
        return await vm.exec(["/bin/sh", "-i"], stdin=keys(), terminal=(33, 77), timeout_s=60)

    result = in_vm(work)
    assert result.exit_code == 5
    assert "33 77" in result.stdout.text


def test_the_workload_cannot_hurt_the_agent(in_vm):
    """kill -9 -1, a fork bomb, and out of memory: each is survived, or its loss has a typed cause."""

    async def work(vm):
        await vm.exec(["/bin/sh", "-c", "kill -9 -1"], timeout_s=20)
        assert (await vm.exec(["/bin/echo", "alive"])).stdout.data == b"alive\n"
        bomb = await vm.exec(["/bin/sh", "-c", ":(){ :|:& };:"], timeout_s=5, leave_children=False)
        assert bomb.exit_code is not None or bomb.timed_out or bomb.signal
        assert (await vm.exec(["/bin/echo", "alive"])).stdout.data == b"alive\n"
        return (await vm.stats()).oom_kills

    assert in_vm(work) == 0


def test_out_of_memory_is_reported(in_vm):
    """Fault 38."""

    async def work(vm):
        code = "x = []\nwhile True: x.append(bytearray(10_000_000))"
        try:
            result = await vm.exec(["/usr/bin/python3", "-c", code], timeout_s=120)
            stats = await vm.stats()
        except SandboxOom:
            return True
        return (result.oom_killed or result.signal == 9 or result.exit_code != 0) and stats.oom_kills > 0

    assert in_vm(work)


def test_the_disk_has_a_hard_cap_and_a_full_one_is_survived(in_vm):
    async def work(vm):
        full = await vm.exec(["/bin/sh", "-c", "head -c 400000000 /dev/zero > /big"], timeout_s=120)
        assert full.exit_code != 0 and b"space" in full.stderr.data
        stats = await vm.stats()
        assert stats.disk_free_bytes < 2**20
        assert stats.disk_size_bytes <= 256 * 2**20
        assert (await vm.exec(["/bin/rm", "/big"])).ok

    in_vm(work, Machine(memory_mib=512, storage_mib=256))


def test_the_guest_is_closed_off(in_vm):
    """No network but loopback, no PCI, no control port, no disks, no dangerous capabilities: root is not root."""

    async def work(vm):
        async def out(script: str) -> str:
            result = await vm.exec(["/bin/sh", "-c", "exec 2>&1; " + script + "; true"])
            return result.stdout.text

        assert (await out("ls /sys/class/net")).split() == ["lo"]
        assert (await out("ls /sys/bus/pci/devices 2>/dev/null | wc -l")).strip() == "0"
        assert "vport" not in await out("ls /dev")
        assert "vd" not in (await out("ls /dev")).split()
        made = await out("mknod /tmp/d b 254 0 && cat /tmp/d | head -c 1 | wc -c")
        assert "not permitted" in made.lower() or "denied" in made.lower() or "cannot" in made.lower()
        port = await out("mknod /tmp/p c 251 1; echo x > /tmp/p")
        assert "denied" in port.lower() or "not permitted" in port.lower()
        assert "denied" in (await out("mount -t tmpfs none /mnt")).lower()
        assert "read-only" in (await out("echo x > /proc/sys/kernel/core_pattern")).lower()
        listening = await out("cat /proc/net/tcp | wc -l")
        assert listening.strip() == "1"

    in_vm(work)


def test_a_command_that_is_cancelled_is_gone(in_vm):
    async def work(vm):
        with anyio.move_on_after(1):
            await vm.exec(["/bin/sleep", "600"])
        for _ in range(50):
            count = (await vm.exec(["/usr/bin/pgrep", "-c", "sleep"])).stdout.data.strip()
            if count == b"0":
                return True
            await anyio.sleep(0.1)
        return False

    assert in_vm(work)


def test_a_forwarded_port_carries_bytes_both_ways(in_vm):
    server = (
        "import socket\ns = socket.create_server(('127.0.0.1', 8123))\nprint('up', flush=True)\n"
        "c, _ = s.accept()\nd = c.recv(100)\nc.sendall(d[::-1])\nc.close()\n"
    )

    async def work(vm):
        async with anyio.create_task_group() as group:
            up = anyio.Event()
            group.start_soon(
                lambda: vm.exec(["/usr/bin/python3", "-c", server], stdout=lambda chunk: up.set(), timeout_s=60)
            )
            with anyio.fail_after(60):
                await up.wait()
                async with vm.forward(8123) as stream:
                    await stream.send(b"stressed")
                    return await stream.receive(100)

    assert in_vm(work) == b"desserts"


def test_a_vm_that_dies_says_so_soon(in_vm):
    """The guest agent is lost while a command runs: a typed error, not a hang."""

    async def work(vm):
        async def stop_soon() -> None:
            await anyio.sleep(0.5)
            await vm.stop()

        async with anyio.create_task_group() as group:
            group.start_soon(stop_soon)
            with pytest.raises(GuestLost), anyio.fail_after(60):
                await vm.exec(["/bin/sleep", "600"])

    in_vm(work)
