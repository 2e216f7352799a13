"""The host's side against a guest that says anything: no crash, no hang, no memory, and only that guest ends."""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayfly.errors import DayflyError, GuestLost, GuestRefused
from dayfly.guest.client import GuestClient, parse_changes
from dayfly.guest.frames import WINDOW, Type, encode, encode_fields

pytestmark = pytest.mark.anyio

ID = 1
EXIT = encode_fields([("code", 0), ("writers", 0), ("timed_out", 0), ("killed", 0), ("oom", 0), ("ms", 1)])


@asynccontextmanager
async def connected(silence_s: float = 5.0) -> AsyncIterator[tuple[GuestClient, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        async with GuestClient(ours, silence_s=silence_s) as guest:
            yield guest, theirs


async def feed(theirs: socket.socket, data: bytes) -> None:
    """Send everything, unless the host has hung up; what the host sends is read and forgotten."""
    view = memoryview(data)
    while view:
        try:
            view = view[theirs.send(view[:65536]) :]
        except BlockingIOError:
            try:
                if not theirs.recv(1 << 20):
                    return
            except BlockingIOError:
                pass
            await anyio.lowlevel.checkpoint()
        except OSError:
            return
        await anyio.lowlevel.checkpoint()


Ask = Callable[[GuestClient, Path], Awaitable[object]]


async def ask_exec(guest: GuestClient, folder: Path) -> object:
    return await guest.exec(["x"], stdin=b"input")


async def ask_get(guest: GuestClient, folder: Path) -> object:
    return await guest.get("/x", folder / "out")


async def ask_put(guest: GuestClient, folder: Path) -> object:
    return await guest.put(b"data", "/x")


async def ask_changes(guest: GuestClient, folder: Path) -> object:
    return await guest.changes()


async def ask_stats(guest: GuestClient, folder: Path) -> object:
    return await guest.stats()


async def ask_clone(guest: GuestClient, folder: Path) -> object:
    return await guest.clone(hostname="x", timeout_s=5)


async def ask_forward(guest: GuestClient, folder: Path) -> object:
    async with guest.forward(80) as stream:
        return await stream.receive()


ASKS: list[Ask] = [ask_exec, ask_get, ask_put, ask_changes, ask_stats, ask_clone, ask_forward]


async def answered(ask: Ask, folder: Path, data: bytes) -> BaseException | object:
    """Ask, have the guest send `data` and hang up; what the asker gets."""
    async with connected() as (guest, theirs):
        result: list[object] = []

        async def asker() -> None:
            try:
                result.append(await ask(guest, folder))
            except (DayflyError, anyio.EndOfStream) as error:
                result.append(error)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asker)
                await anyio.lowlevel.checkpoint()
                await feed(theirs, data)
                theirs.close()
        return result[0]


types = st.sampled_from([2, 3, 4, 5, 6, 9, 10, 4, 4, 2])
hostile_frames = st.builds(
    lambda type, channel, id, payload: encode(Type(type), id, payload, channel),
    type=types,
    channel=st.integers(0, 3),
    id=st.sampled_from([0, 1, 1, 1, 1, 2, 2**32 - 1]),
    payload=st.one_of(
        st.binary(max_size=80),
        st.sampled_from([EXIT, b"", (1).to_bytes(4, "little"), b"\xff" * 4, encode_fields([("cause", "x")])]),
        st.lists(
            st.tuples(
                st.sampled_from(["code", "digest", "nonce", "time_ns", "ms", "cause", "message"]),
                st.binary(max_size=33),
            ),
            max_size=7,
        ).map(encode_fields),
    ),
)
streams = st.one_of(st.binary(max_size=200), st.lists(hostile_frames, max_size=6).map(b"".join))


@settings(max_examples=300)
@given(st.sampled_from(ASKS), streams)
def test_any_answer_is_a_result_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, ask: Ask, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    got = anyio.run(answered, ask, folder, data)
    assert not isinstance(got, BaseException) or isinstance(got, DayflyError | anyio.EndOfStream)


CORPUS = {
    "unknown id": encode(Type.DATA, 99, b"x", channel=1),
    "data on a channel that was not asked for": encode(Type.DATA, ID, b"x", channel=0),
    "empty data": encode(Type.DATA, ID, b"", channel=1),
    "credit from nowhere": encode(Type.CREDIT, ID, b"\xff\xff\xff\x7f"),
    "credit of a wrong size": encode(Type.CREDIT, ID, b"\x01"),
    "a pong without a ping": encode(Type.PONG, 0, b"12345678"),
    "two replies": encode(Type.REPLY, ID, EXIT) + encode(Type.REPLY, ID, EXIT),
    "started what does not start": encode(Type.STARTED, ID),
    "a reply of no fields": encode(Type.REPLY, ID, b"\xff\xff"),
    "a reply without what it needs": encode(Type.REPLY, ID),
    "exit code 256": encode(
        Type.REPLY, ID, EXIT.replace(b"\x04code\x01\x00\x00\x000", b"\x04code\x03\x00\x00\x00256")
    ),
    "an error without a cause": encode(Type.ERROR, ID, b""),
    "a request from the guest": encode(Type.REQUEST, ID, b""),
    "a giant frame": b"\xff\xff\xff\xff\x04\x01\x00\x00\x01\x00\x00\x00",
    "text": b"HTTP/1.0 200 OK\r\n\r\n" * 10,
}


@pytest.mark.parametrize("name", CORPUS)
async def test_what_breaks_the_protocol_is_called_that(tmp_path: Path, name: str) -> None:
    async with connected() as (guest, theirs):

        def sink(data: bytes) -> None: ...

        async def asker() -> None:
            with pytest.raises(GuestLost):
                await guest.exec(["x"], stdout=sink)
                await guest.wait_lost()
                raise guest.lost or AssertionError

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asker)
                await anyio.wait_all_tasks_blocked()
                await feed(theirs, CORPUS[name])
                if ("without" in name and "pong" not in name) or name in ("exit code 256",):
                    theirs.close()
        if not (("without" in name and "pong" not in name) or name in ("exit code 256",)):
            assert guest.lost is not None
            assert guest.lost.cause == "protocol_violation"


async def test_one_bad_guest_ends_alone_while_nine_others_finish(tmp_path: Path) -> None:
    done: list[int] = []

    async def good(n: int) -> None:
        async with connected() as (guest, theirs):

            async def serve() -> None:
                for _ in range(50):
                    await feed(theirs, encode(Type.DATA, ID, b"x" * 100, channel=1))
                await feed(theirs, encode(Type.REPLY, ID, EXIT))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                result = await guest.exec(["x"])
            assert result.stdout.total == 5000
            done.append(n)

    async def bad() -> None:
        got = await answered(ask_exec, tmp_path, CORPUS["a giant frame"])
        assert isinstance(got, GuestLost)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for n in range(9):
                tasks.start_soon(good, n)
            tasks.start_soon(bad)
    assert sorted(done) == list(range(9))


async def test_endless_output_and_endless_entries_need_no_memory(tmp_path: Path) -> None:
    """The guest keeps within its credit and never stops: memory stays flat, and the caller's time limit works."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with connected() as (guest, theirs):
        frame = encode(Type.DATA, ID, b"x" * 32768, channel=1)

        async def flood() -> None:
            credit, rest = WINDOW, b""
            while True:
                with suppress(OSError):
                    rest += theirs.recv(65536)
                while len(rest) >= 12 and len(rest) >= 12 + (length := int.from_bytes(rest[:4], "little")):
                    if rest[4] == Type.CANCEL:
                        cause = encode_fields([("cause", "cancelled"), ("message", "")])
                        return await feed(theirs, encode(Type.ERROR, ID, cause))
                    if rest[4] == Type.CREDIT:
                        credit += int.from_bytes(rest[12:16], "little")
                    rest = rest[12 + length :]
                if credit >= 32768:
                    credit -= 32768
                    await feed(theirs, frame)
                await anyio.lowlevel.checkpoint()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(flood)
                with anyio.move_on_after(2) as scope:
                    await guest._channel.finished(guest._begin_taking("exec", [], (1,), lambda channel, data: None))
                tasks.cancel_scope.cancel()
        assert scope.cancelled_caught
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


async def test_more_than_was_granted_is_a_violation() -> None:
    async with connected() as (guest, theirs):

        async def overflow() -> None:
            frame = encode(Type.DATA, ID, b"x" * 65536, channel=1)
            await feed(theirs, encode(Type.STARTED, ID) + frame * (WINDOW // 65536 + 1))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(overflow)
                with pytest.raises(GuestLost) as caught:
                    async with guest.forward(80):  # connected, and nobody reads
                        await guest.wait_lost()
                        guest._channel.check()
        assert caught.value.cause == "protocol_violation"


async def test_a_guest_that_takes_nothing_is_given_up() -> None:
    async with connected() as (guest, _):
        with pytest.raises(GuestLost) as caught:
            for _ in range(100):
                guest._channel.begin("x", [("a", b"y" * 1_000_000)])
        assert caught.value.cause == "protocol_violation"


async def test_silence_is_noticed_after_the_clone() -> None:
    async with connected(silence_s=1.5) as (guest, _):
        guest._channel.watch_silence()
        with anyio.fail_after(30):
            error = await guest.wait_lost()
        assert error.cause == "guest_silent"


async def test_a_hang_up_ends_every_call() -> None:
    async with connected() as (guest, theirs):
        errors: list[str] = []

        async def one(ask: Ask) -> None:
            try:
                await ask(guest, Path("/nowhere"))
            except GuestLost as error:
                errors.append(error.cause)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for ask in ASKS:
                    tasks.start_soon(one, ask)
                await anyio.wait_all_tasks_blocked()
                theirs.close()
        assert errors == ["guest_lost"] * len(ASKS)


async def test_a_clone_that_echoes_another_nonce_is_refused(tmp_path: Path) -> None:
    reply = encode_fields([("nonce", b"0" * 16), ("time_ns", 1)])
    got = await answered(ask_clone, tmp_path, encode(Type.REPLY, ID, reply))
    assert isinstance(got, GuestLost)
    assert got.cause == "protocol_violation"


async def test_a_refusal_is_shown_without_its_control_characters(tmp_path: Path) -> None:
    reply = encode_fields([("cause", "not_found"), ("message", b"\x1b[2J\x00evil\xff" + b"x" * 5000)])
    got = await answered(ask_exec, tmp_path, encode(Type.ERROR, ID, reply))
    assert isinstance(got, GuestRefused)
    assert "\x1b" not in got.message
    assert len(got.message) < 1100


@given(st.binary(max_size=200))
def test_any_bytes_are_changes_or_a_violation(data: bytes) -> None:
    try:
        changes = parse_changes(data)
    except GuestLost as error:
        assert error.cause == "protocol_violation"
    else:
        assert list(changes) == sorted(changes, key=lambda c: c.path)
