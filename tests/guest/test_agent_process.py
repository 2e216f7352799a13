"""The real agent as an ordinary process: exec, streams, files, forward, cancelling."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import pytest

from dayfly.errors import GuestLost, GuestRefused, HostError, LimitError
from dayfly.guest.client import GuestClient
from dayfly.protocols import TransferLimits

pytestmark = pytest.mark.anyio

Agent = Callable[[], AbstractAsyncContextManager[GuestClient]]


async def test_streams_status_environment_and_folder(agent: Agent, tmp_path: Path) -> None:
    async with agent() as guest:
        assert guest.state == "ready"
        script = 'echo "$FROM_IMAGE $EXTRA"; pwd; cat; echo wrong >&2; exit 7'
        result = await guest.exec(["sh", "-c", script], env={"EXTRA": "more"}, stdin=b"given")
        assert result.exit_code == 7
        assert result.stdout.data == f"yes more\n{tmp_path}/work\ngiven".encode()
        assert result.stderr.data == b"wrong\n"
        assert not result.writers_attached
        assert (await guest.exec(["pwd"], cwd=str(tmp_path))).stdout.text == f"{tmp_path}\n"


async def test_a_byte_that_is_no_text_changes_nothing(agent: Agent) -> None:
    """Fault case 7."""
    async with agent() as guest:
        result = await guest.exec(["printf", "\\377"])
        assert result.exit_code == 0
        assert result.stdout.data == b"\xff"
        assert result.stdout.text == "\ufffd"


async def test_the_main_process_counts_not_the_end_of_output(agent: Agent) -> None:
    """Fault case 9."""
    async with agent() as guest:
        with anyio.fail_after(20):
            result = await guest.exec(["sh", "-c", "sleep 20 & echo done"])
        assert result.stdout.data == b"done\n"
        assert result.writers_attached
        # the child says when it has let go of the output: only then does the main process end
        script = "(exec >/dev/null 2>&1; touch free; sleep 5) & until test -e free; do sleep 0.01; done"
        assert not (await guest.exec(["sh", "-c", script])).writers_attached


async def test_much_output_keeps_both_ends_and_every_byte_reaches_the_sink(agent: Agent) -> None:
    """Fault case 10."""
    got = 0

    def sink(data: bytes) -> None:
        nonlocal got
        got += len(data)

    async with agent() as guest:
        result = await guest.exec(["sh", "-c", "printf start; head -c 20000000 /dev/zero; printf end"], stdout=sink)
    assert result.exit_code == 0
    assert got == 20_000_008 == result.stdout.total
    assert result.stdout.head.startswith(b"start")
    assert result.stdout.tail.endswith(b"end")
    assert len(result.stdout.head) == len(result.stdout.tail) == 65536


async def test_a_timeout_keeps_what_was_printed(agent: Agent) -> None:
    """Fault case 13."""
    async with agent() as guest:
        result = await guest.exec(["sh", "-c", "echo one; echo two >&2; exec sleep 60"], timeout_s=1)
    assert result.timed_out
    assert (result.exit_code, result.signal) == (None, 9)
    assert result.stdout.data == b"one\n"
    assert result.stderr.data == b"two\n"
    assert not result.ok


async def test_long_input_and_input_that_nobody_reads(agent: Agent) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    async with agent() as guest:
        assert (await guest.exec(["wc", "-c"], stdin=b"y" * 3_000_000)).stdout.text.strip() == "3000000"
        assert (await guest.exec(["wc", "-c"], stdin=pieces())).stdout.text.strip() == "1000000"
        assert (await guest.exec(["true"], stdin=b"y" * 3_000_000)).ok
        assert (await guest.exec(["cat"], stdin=b"")).stdout.data == b""
        assert (await guest.exec(["cat"])).stdout.data == b""


async def test_too_long_is_said_before_anything_starts(agent: Agent) -> None:
    """Fault case 17."""
    async with agent() as guest:
        with pytest.raises(LimitError, match="131071"):
            await guest.exec(["echo", "x" * 300_000])
        with pytest.raises(LimitError, match="BIG"):
            await guest.exec(["true"], env={"BIG": "x" * 300_000})
        with pytest.raises(LimitError, match="together"):
            await guest.exec(["true", *["x" * 100_000] * 30])
        assert (await guest.exec(["echo", "x" * 131_000])).stdout.total == 131_001
        assert (await guest.exec(["true", *["x" * 100_000] * 15])).ok


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (["no-such-program"], "not_found"),
        (["/no/such/program"], "not_found"),
        (["/etc/passwd"], "not_executable"),
        (["/etc"], "not_executable"),
        ([""], "not_found"),
    ],
)
async def test_what_cannot_start_is_refused_not_a_status(agent: Agent, argv: list[str], cause: str) -> None:
    async with agent() as guest:
        with pytest.raises(GuestRefused) as caught:
            await guest.exec(argv)
        assert caught.value.cause == cause
        assert (await guest.exec(["true"])).ok


async def test_a_missing_folder_is_refused_but_the_default_one_is_made(agent: Agent, tmp_path: Path) -> None:
    async with agent() as guest:
        with pytest.raises(GuestRefused) as caught:
            await guest.exec(["true"], cwd="/no/such/folder")
        assert caught.value.cause == "no_cwd"
        (tmp_path / "work").rmdir()
        assert (await guest.exec(["pwd"])).stdout.text == f"{tmp_path}/work\n"


async def test_a_terminal(agent: Agent) -> None:
    async with agent() as guest:
        result = await guest.exec(
            ["sh", "-c", "test -t 0 && test -t 1 && test -t 2 && stty size"], terminal=(33, 99)
        )
        assert result.stdout.data == b"33 99\r\n"
        assert result.stderr.data == b""
        assert (await guest.exec(["cat"], terminal=(24, 80), stdin=b"typed\n")).stdout.text.endswith("typed\r\n")


async def test_cancelling_ends_the_program_and_nothing_else(agent: Agent, tmp_path: Path) -> None:
    async with agent() as guest:
        with anyio.move_on_after(1):
            await guest.exec(["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"])
        pid = int((tmp_path / "pid").read_text())
        assert not Path(f"/proc/{pid}").exists()
        assert (await guest.exec(["echo", "on"])).stdout.data == b"on\n"


async def test_an_error_of_a_sink_reaches_the_caller_only(agent: Agent) -> None:
    def sink(data: bytes) -> None:
        raise RuntimeError("the caller's own")

    async with agent() as guest:
        with pytest.raises(RuntimeError, match="own"):
            await guest.exec(["echo", "x"], stdout=sink)
        assert (await guest.exec(["true"])).ok


async def test_many_at_once(agent: Agent) -> None:
    results: dict[int, bytes] = {}

    async def one(guest: GuestClient, n: int) -> None:
        result = await guest.exec(["sh", "-c", f"head -c 200000 /dev/zero; echo {n}; cat"], stdin=b"z" * 150_000)
        results[n] = result.stdout.tail[-150_000:][:10] + result.stdout.tail[-10:]
        assert result.stdout.total == 350_000 + len(f"{n}\n")

    async with agent() as guest, anyio.create_task_group() as tasks:
        for n in range(40):
            tasks.start_soon(one, guest, n)
    assert len(results) == 40


async def test_a_service_is_reached_with_half_close(agent: Agent) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, listener:
            data = b"".join(iter(lambda: peer.recv(65536), b""))
            peer.sendall(b"%d " % len(data) + data[:500_000])

    server = threading.Thread(target=serve)
    server.start()
    async with agent() as guest:
        async with guest.forward(listener.getsockname()[1]) as stream:
            await stream.send(b"a" * 700_000)
            await stream.send_eof()
            got = bytearray()
            with pytest.raises(anyio.EndOfStream):
                while True:
                    got += await stream.receive()
        assert bytes(got) == b"700000 " + b"a" * 500_000
        with pytest.raises(GuestRefused) as caught:
            async with guest.forward(1):
                pass
        assert caught.value.cause == "connection_refused"
    server.join()


# --- files -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_ten_thousand_files_with_names_of_any_byte(agent: Agent, tmp_path: Path) -> None:
    """Fault case 23. The names hold every byte but NUL and the slash."""
    source = tmp_path / "source"
    source.mkdir()
    for n in range(10_000):
        (source / f"f{n}").write_bytes(b"%d" % n * 100)
    for byte in (b for b in range(1, 256) if b != ord("/")):
        Path(os.fsdecode(os.fsencode(source) + b"/x" + bytes([byte]))).write_bytes(bytes([byte]))
    async with agent() as guest:
        put = await guest.put(source, str(tmp_path / "there"))
        got = await guest.get(str(tmp_path / "there"), tmp_path / "back")
    assert put.files == got.files == 10_254
    assert put.bytes == got.bytes
    assert put.digest == got.digest
    assert {p.name: p.read_bytes() for p in source.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()
    }


async def test_a_large_sparse_file_needs_little_memory(agent: Agent, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as out:
        out.seek(700 << 20)
        out.write(os.urandom(20 << 20))
        out.truncate(1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with agent() as guest:
        put = await guest.put(tmp_path / "big", str(tmp_path / "there"))
        got = await guest.get(str(tmp_path / "there"), tmp_path / "back")
    assert put.bytes == got.bytes == 1 << 30
    assert (tmp_path / "back").stat().st_blocks * 512 < 25 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


async def test_put_replaces_merges_and_keeps_time_and_mode(agent: Agent, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "sub").mkdir(parents=True)
    (there / "old").write_text("old")
    (there / "file").symlink_to(there / "old")
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "file").write_text("new")
    (source / "file").chmod(0o750)
    os.utime(source / "file", ns=(1, 1_234_567_890_123_456_789))
    (source / "sub" / "link").symlink_to("../file")
    async with agent() as guest:
        await guest.put(source, str(there))
        assert (there / "old").read_text() == "old"
        assert not (there / "file").is_symlink()
        assert (there / "file").read_text() == "new"
        assert (there / "file").stat().st_mtime_ns == 1_234_567_890_123_456_789
        assert (there / "file").stat().st_mode & 0o7777 == 0o750
        assert (there / "sub" / "link").readlink() == Path("../file")
        await guest.put(b"bytes", str(there / "deep" / "er" / "x"), mode=0o700)
        assert (there / "deep" / "er" / "x").read_bytes() == b"bytes"
        assert (there / "deep" / "er" / "x").stat().st_mode & 0o777 == 0o700
        with pytest.raises(GuestRefused) as caught:
            await guest.put(b"x", str(there / "deep"))
        assert caught.value.cause == "is_a_folder"


async def test_put_goes_through_no_link_below_its_destination(agent: Agent, tmp_path: Path) -> None:
    there, outside, source = tmp_path / "there", tmp_path / "outside", tmp_path / "source"
    there.mkdir()
    outside.mkdir()
    (there / "d").symlink_to(outside)
    (source / "d").mkdir(parents=True)
    (source / "d" / "x").write_text("x")
    async with agent() as guest:
        await guest.put(source, str(there))
    assert list(outside.iterdir()) == []
    assert (there / "d" / "x").read_text() == "x"


async def test_get_of_what_is_not_there_or_not_a_file(agent: Agent, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    async with agent() as guest:
        with pytest.raises(GuestRefused) as caught:
            await guest.get(str(tmp_path / "nothing"), tmp_path / "out")
        assert caught.value.cause == "not_found"
        with pytest.raises(GuestRefused) as caught:
            await guest.get(str(tmp_path / "fifo"), tmp_path / "out")
        assert caught.value.cause == "not_a_file"
        assert not (tmp_path / "out").exists()


async def test_get_holds_its_limits_and_lists_what_it_leaves_out(agent: Agent, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "skip").mkdir(parents=True)
    (there / "skip" / "inner").write_text("x")
    (there / "a").write_text("aaaa")
    (there / "abs").symlink_to("/etc/passwd")
    os.mkfifo(there / "fifo")
    async with agent() as guest:
        got = await guest.get(str(there), tmp_path / "out", exclude=lambda n: n == "skip/")
        assert sorted(got.skipped) == ["abs", "fifo", "skip", "skip/inner"]
        assert sorted(got.entries) == ["", "a"]
        for caps in ({"files": 2}, {"bytes": 3}, {"file_bytes": 3}, {"depth": 1}):
            limits = TransferLimits(**caps)
            with pytest.raises(LimitError):
                await guest.get(str(there), tmp_path / "out2", limits=limits)
        assert (await guest.exec(["true"])).ok


async def test_what_came_out_goes_back_as_it_was(agent: Agent, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "d").mkdir(parents=True)
    (there / "d" / "run").write_text("x")
    (there / "d" / "run").chmod(0o4711)
    (there / "d").chmod(0o751)
    async with agent() as guest:
        got = await guest.get(str(there), tmp_path / "copy")
        await guest.put(tmp_path / "copy", str(tmp_path / "again"), meta=got.entries)
    assert (tmp_path / "again" / "d").stat().st_mode & 0o7777 == 0o751
    assert (tmp_path / "again" / "d" / "run").stat().st_mode & 0o7777 == 0o4711


async def test_remove(agent: Agent, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "a" / "b").mkdir(parents=True)
    (there / "a" / "b" / "f").write_text("x")
    (tmp_path / "kept").mkdir()
    (there / "l").symlink_to(tmp_path / "kept")
    async with agent() as guest:
        await guest.remove(str(there))
        await guest.remove(str(there))
    assert not there.exists()
    assert (tmp_path / "kept").is_dir()


async def test_a_host_file_that_is_not_there_ends_only_the_transfer(agent: Agent, tmp_path: Path) -> None:
    async with agent() as guest:
        with pytest.raises(HostError):
            await guest.put(tmp_path / "nowhere", str(tmp_path / "there"))
        assert (await guest.exec(["true"])).ok


async def test_cancelling_a_transfer(agent: Agent, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as out:
        out.write(os.urandom(1 << 20) * 100)
    async with agent() as guest:
        with anyio.move_on_after(0.05):
            await guest.put(tmp_path / "big", str(tmp_path / "there"))
        with anyio.move_on_after(0.05):
            await guest.get(str(tmp_path / "big"), tmp_path / "back")
        assert (await guest.exec(["true"])).ok


# --- states and ends -----------------------------------------------------------------------------------


async def test_a_second_clone_and_an_early_verifier_are_refused(agent: Agent) -> None:
    async with agent() as guest:
        with pytest.raises(GuestRefused) as caught:
            await guest.clone(hostname="other", timeout_s=10)
        assert caught.value.cause == "wrong_state"


async def test_every_call_fails_with_the_given_cause(agent: Agent) -> None:
    async with agent() as guest:
        error = GuestLost("the VMM ended", cause="vmm_ended")
        caught: list[BaseException] = []

        async def wait() -> None:
            try:
                await guest.exec(["sleep", "60"])
            except GuestLost as lost:
                caught.append(lost)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            guest.fail(error)
        assert caught == [error]
        assert guest.state == "closed"
        assert await guest.wait_lost() is error
        with pytest.raises(GuestLost):
            await guest.exec(["true"])
        await guest.poweroff()
