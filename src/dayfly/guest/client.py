"""`GuestClient`: what the host can ask of one guest. The `Vm` calls of `dayfly.protocols`, and its set-up.

Four states: new (nothing but `hello` and `clone`), confirmed (`clone` was answered), ready (`setup` was), closed.
"""

from __future__ import annotations

import posixpath
import secrets
import socket
import struct
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
from anyio.abc import ByteStream

from dayfly.errors import DayflyError, GuestLost, GuestRefused, LimitError
from dayfly.guest.archive import ArchiveReceiver, ArchiveSender, raw_name, text_name
from dayfly.guest.channel import Call, Channel
from dayfly.guest.frames import WINDOW, Fields, Value, raw_value, violation
from dayfly.model import Captured, Change, EntryMeta, ExecResult, GuestStats, Space, Transfer
from dayfly.protocols import PathLike, Sink, TransferLimits

PROTOCOL_VERSION = "1"
ANSWER_TIMEOUT_S = 60.0
"""For requests that the guest answers from what it knows."""

MAX_STRING = 128 * 1024
"""The kernel's limit of one argument or `NAME=value`, its final NUL included."""
MAX_STRINGS = 2 * 1024 * 1024 - 64 * 1024
"""The kernel's limit of all of them and the pointers to them, less some room."""
MAX_STRING_COUNT = 65_000

KEEP = 64 * 1024
MAX_CHANGES_BYTES = 256 * 1024 * 1024
CHANGES_BUDGET = 256 * 1024 * 1024
"""Bytes of changed files that the guest hashes; beyond it a change has no digest."""
MAX_PLANTED_BYTES = 8 * 1024 * 1024
CLOCK_GOOD_S = 0.25

State = Literal["new", "confirmed", "ready", "closed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """How far the guest's wall clock is from ours, in seconds, at worst: the way there and back is counted in."""

    error_s: float
    round_trip_s: float


class GuestClient:
    """Speaks with the agent of one guest over a connected socket.

    Use it as an async context manager; the socket is closed at its end. `fail` is how the owner of the VMM says
    that it has ended. Every call raises the error with which the channel ended.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float = 5.0) -> None:
        self._sock = sock
        self._channel = Channel(sock, silence_s=silence_s)
        self._state: State = "new"
        self._env: dict[str, str] = {}
        self._user = ""
        self._workdir = "/"
        self._limiter = anyio.CapacityLimiter(4)

    async def __aenter__(self) -> Self:
        self._channel.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the channel; a guest whose host end is closed powers off. Idempotent."""
        self._channel.end(GuestLost("the VM was closed", cause="closed"))
        self._sock.close()
        self._state = "closed"

    def fail(self, error: DayflyError) -> None:
        """The VM has ended for a known cause: every call, now and later, raises `error`."""
        self._channel.end(error)

    @property
    def state(self) -> State:
        return "closed" if self._channel.error is not None else self._state

    @property
    def lost(self) -> DayflyError | None:
        """Why the guest is no longer there; None while it is."""
        return self._channel.error

    async def wait_lost(self) -> DayflyError:
        await self._channel.ended.wait()
        assert self._channel.error is not None
        return self._channel.error

    # --- becoming ready

    async def hello(self, *, timeout_s: float) -> str:
        """Wait until the agent is there; returns its state (`waiting` after a boot). Raises `GuestLost`."""
        fields = await self._channel.call("hello", timeout_s=timeout_s)
        if (version := fields.text("version", 20)) != PROTOCOL_VERSION:
            raise GuestLost(
                f"the guest agent speaks version {version!r}, not {PROTOCOL_VERSION!r}",
                hint="rebuild it with `python hatch_build.py`, then `dayfly template prune`",
                cause="wrong_agent",
            )
        return fields.text("state", 20)

    async def clone(self, *, hostname: str, timeout_s: float) -> Clock:
        """Tell the guest who and when it is, with fresh entropy; it must confirm. Raises `GuestLost`."""
        nonce = secrets.token_bytes(16)
        identity: list[tuple[str, Value]] = [
            ("entropy", secrets.token_bytes(128)),
            ("hostname", hostname[:64]),
            ("machine_id", uuid.uuid4().hex),
            ("boot_id", str(uuid.uuid4())),
        ]
        with anyio.fail_after(timeout_s):
            clock = await self._set_clock("clone", [*identity, ("nonce", nonce)], nonce, timeout_s)
            for _ in range(3):
                if abs(clock.error_s) <= CLOCK_GOOD_S:
                    break
                clock = await self._set_clock("clock", [("nonce", nonce)], nonce, timeout_s)
        self._state = "confirmed"
        self._channel.watch_silence()
        return clock

    async def _set_clock(self, op: str, fields: list[tuple[str, Value]], nonce: bytes, timeout_s: float) -> Clock:
        sent = time.time_ns()
        reply = await self._channel.call(op, [*fields, ("time_ns", sent)], timeout_s=timeout_s)
        received = time.time_ns()
        if reply.raw("nonce") != nonce:
            raise violation("a clone that does not confirm its nonce")
        told = reply.number("time_ns")
        return Clock((told - received) / 1e9, (received - sent) / 1e9)

    async def setup(
        self,
        *,
        env: Mapping[str, str],
        workdir: str,
        user: str,
        privileged: bool = False,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Mount the disks and make the workload's space. The arguments are what `exec` starts from."""
        self._env, self._user = dict(env), user
        self._workdir = posixpath.normpath(posixpath.join("/", workdir))
        fields: list[tuple[str, Value]] = [("workdir", self._workdir)]
        fields += [("privileged", 1)] if privileged else []
        await self._channel.call("setup", fields, timeout_s=timeout_s)
        self._state = "ready"

    async def poweroff(self, *, timeout_s: float = 30.0) -> None:
        """Have the guest end everything, make its disk clean and power off. A guest that is gone is fine."""
        if self._channel.error is not None:
            return
        call = self._channel.begin("poweroff")
        with anyio.move_on_after(timeout_s):
            await call.done.wait()

    # --- exec

    async def exec(
        self,
        argv: Sequence[PathLike],
        *,
        env: Mapping[str, str] | None = None,
        cwd: PathLike | None = None,
        user: str | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        terminal: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        stdout: Sink | None = None,
        stderr: Sink | None = None,
        space: Space = "work",
        leave_children: bool = True,
    ) -> ExecResult:
        """See `protocols.Vm.exec`."""
        fields = self._program(argv, env or {})
        fields += [
            ("cwd", raw_name(posixpath.join(raw_name(self._workdir), raw_name(cwd or b"")))),
            ("user", self._user if user is None else user),
            ("space", space),
            ("stdin", int(stdin is not None)),
            ("leave", int(leave_children)),
        ]
        if cwd is None:
            fields = [("cwd", self._workdir) if key == "cwd" else (key, value) for key, value in fields]
        if terminal is not None:
            fields.append(("terminal", f"{terminal[0]} {terminal[1]}"))
        if timeout_s is not None:
            fields.append(("timeout_ms", max(1, int(timeout_s * 1000))))
        outputs = {1: _Output(stdout), 2: _Output(stderr)}
        call = self._begin_taking("exec", fields, (1, 2), lambda channel, data: outputs[channel].add(data))
        reply = await self._with_input(call, stdin)
        for output in outputs.values():
            if output.error is not None:
                raise output.error
        return _exec_result(reply, outputs[1].captured, outputs[2].captured)

    def _program(self, argv: Sequence[PathLike], env: Mapping[str, str]) -> list[tuple[str, Value]]:
        """The program's strings as fields. Raises `LimitError` for what the kernel would not take."""
        if not argv:
            raise ValueError("argv is empty")
        fields: list[tuple[str, Value]] = [("arg", raw_name(a)) for a in argv]
        fields += [("env", raw_value(f"{k}={v}")) for k, v in {**self._env, **env}.items()]
        total = 0
        for key, value in fields:
            raw = raw_value(value)
            total += len(raw) + 9
            if b"\0" in raw:
                raise ValueError("a NUL byte in an argument or environment value")
            if len(raw) >= MAX_STRING:
                what = "an argument" if key == "arg" else f"the environment value {raw[:40].partition(b'=')[0]!r}"
                raise LimitError(
                    f"{what} is {len(raw)} bytes long; the kernel takes at most {MAX_STRING - 1}",
                    hint="put it into a file",
                )
        if total > MAX_STRINGS or len(fields) > MAX_STRING_COUNT:
            raise LimitError(
                f"arguments and environment are {total} bytes together; the kernel takes at most {MAX_STRINGS}",
                hint="put them into a file",
            )
        return fields

    async def _with_input(self, call: Call, stdin: bytes | AsyncIterable[bytes] | None) -> Fields:
        """Feed the program while waiting for its end, which ends the feeding too."""
        if stdin is None:
            return await self._channel.finished(call)
        if isinstance(stdin, bytes) and len(stdin) <= WINDOW:
            await self._channel.send_data(call, stdin)
            self._channel.send_end(call)
            return await self._channel.finished(call)

        async def feed() -> None:
            if isinstance(stdin, bytes):
                await self._channel.send_data(call, stdin)
            else:
                async for data in stdin:
                    await self._channel.send_data(call, data)
            self._channel.send_end(call)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed)
                await call.done.wait()
                tasks.cancel_scope.cancel()
        except BaseException as error:
            await self._channel.cancel(call)
            if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                raise error.exceptions[0] from None
            raise
        return call.result()

    def _begin_taking(
        self,
        op: str,
        fields: list[tuple[str, Value]],
        channels: tuple[int, ...],
        take: Callable[[int, bytes], None],
    ) -> Call:
        """A request whose output is used up as it arrives."""
        call: Call | None = None

        def taken(channel: int, data: bytes) -> None:
            take(channel, data)
            assert call is not None
            self._channel.grant(call, channel, len(data))

        call = self._channel.begin(op, fields, channels=channels, take=taken)
        return call

    # --- files

    async def put(
        self,
        source: Path | bytes,
        dest: PathLike,
        *,
        mode: int | None = None,
        user: str | None = None,
        exclude: Callable[[str], bool] | None = None,
        space: Space = "work",
        meta: Mapping[str, EntryMeta] | None = None,
    ) -> Transfer:
        """See `protocols.Vm.put`."""
        started = time.monotonic()
        where = self._absolute(dest)
        name = b""
        root_known = meta is not None and "" in meta and posixpath.basename(where)
        if isinstance(source, bytes) or root_known or not await self._in_thread(source.is_dir):
            where, name = posixpath.split(where)
        sender = ArchiveSender(source, name, mode=mode, exclude=exclude, meta=meta)
        call = self._channel.begin("put", [("dest", where), ("user", user or ""), ("space", space)])
        try:
            while not call.done.is_set() and (block := await self._in_thread(sender.next_block, WINDOW)):
                await self._channel.send_data(call, block)
            self._channel.send_end(call)
            reply = await self._channel.finished(call)
        except BaseException:
            await self._channel.cancel(call)
            raise
        finally:
            sender.close()
        if reply.raw("digest").hex() != sender.sent.digest:
            raise violation("the digest of a transfer does not match its content")
        sent = sender.sent
        return Transfer(
            files=sent.files,
            bytes=sent.bytes,
            digest="sha256:" + sent.digest,
            skipped=tuple(sent.skipped),
            seconds=time.monotonic() - started,
        )

    async def get(
        self,
        source: PathLike,
        dest: Path,
        *,
        exclude: Callable[[str], bool] | None = None,
        limits: TransferLimits | None = None,
        space: Space = "work",
    ) -> Transfer:
        """See `protocols.Vm.get`."""
        started = time.monotonic()
        limits = limits or TransferLimits()
        fields: list[tuple[str, Value]] = [
            ("source", self._absolute(source)),
            ("space", space),
            # what is excluded here has still to be sent: only the host knows the rule
            ("max_files", limits.files if exclude is None else 10 * limits.files),
            ("max_bytes", limits.bytes if exclude is None else 2**62),
            ("max_file_bytes", limits.file_bytes if exclude is None else 2**62),
            ("max_depth", limits.depth),
        ]
        receiver = ArchiveReceiver(dest, limits, exclude)
        inbox = _Inbox()
        call = self._channel.begin("get", fields, channels=(1,), take=inbox.add)
        try:
            await self._receive(call, inbox, receiver)
            reply = await self._channel.finished(call)
            transfer = await self._in_thread(receiver.finish, reply.raw("digest"))
        except BaseException as error:
            await self._channel.cancel(call)
            if isinstance(error, GuestLost):
                self._channel.end(error)
            raise
        finally:
            receiver.close()
        return Transfer(**{**vars(transfer), "seconds": time.monotonic() - started})

    async def _receive(self, call: Call, inbox: _Inbox, receiver: ArchiveReceiver) -> None:
        """Write what arrives, in a thread; the guest may send on only as we have written."""
        while True:
            data = await inbox.take(call)
            if not data:
                return
            await self._in_thread(receiver.feed, data)
            self._channel.grant(call, 1, len(data))

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await anyio.to_thread.run_sync(lambda: function(*args), limiter=self._limiter)

    async def remove(self, path: PathLike, *, space: Space = "work") -> None:
        """See `protocols.Vm.remove`."""
        await self._channel.call("remove", [("path", self._absolute(path)), ("space", space)])

    def _absolute(self, path: PathLike) -> bytes:
        """Relative paths start at the working directory."""
        full = posixpath.normpath(posixpath.join(raw_name(self._workdir), raw_name(path)))
        if b"\0" in full:
            raise ValueError("a NUL byte in a path")
        if len(full) > 4095:
            raise LimitError("a path is longer than 4095 bytes")
        return b"/" + full.lstrip(b"/")

    # --- the rest

    @asynccontextmanager
    async def forward(self, port: int) -> AsyncIterator[ByteStream]:
        """See `protocols.Vm.forward`. Raises `GuestRefused` (connection_refused)."""
        inbox = _Inbox()
        call = self._channel.begin("forward", [("port", port)], channels=(1,), take=inbox.add, may_start=True)
        try:
            await call.started.wait()
            if call.error is not None:
                raise call.error
            yield _Forwarded(self._channel, call, inbox)
        finally:
            await self._channel.cancel(call)

    async def freeze(self) -> None:
        await self._channel.call("freeze", timeout_s=ANSWER_TIMEOUT_S)

    async def thaw(self) -> None:
        await self._channel.call("thaw", timeout_s=ANSWER_TIMEOUT_S)

    async def sync(self) -> None:
        """Write the guest's files to its disk."""
        await self._channel.call("sync")

    async def open_verifier_space(self, folders: Sequence[PathLike]) -> tuple[str, ...]:
        """See `protocols.Vm.open_verifier_space`."""
        planted = bytearray()
        call = self._begin_taking(
            "open_verifier",
            [("folder", self._absolute(f)) for f in folders],
            (1,),
            lambda _, data: planted.extend(data[: max(0, MAX_PLANTED_BYTES - len(planted))]),
        )
        await self._channel.finished(call)
        return tuple(sorted({text_name(p) for p in bytes(planted).split(b"\0") if p}))

    async def changes(self) -> tuple[Change, ...]:
        """See `protocols.Vm.changes`. Raises `LimitError` when there are too many."""
        told = bytearray()
        over = False

        def take(_: int, data: bytes) -> None:
            nonlocal over
            over = over or len(told) + len(data) > MAX_CHANGES_BYTES
            if not over:
                told.extend(data)

        call = self._begin_taking("changes", [("budget", CHANGES_BUDGET)], (1,), take)
        await self._channel.finished(call)
        if over:
            raise LimitError("the guest has too many changed paths to list")
        try:
            return await self._in_thread(parse_changes, bytes(told))
        except GuestLost as error:
            self._channel.end(error)
            raise

    async def stats(self) -> GuestStats:
        """See `protocols.Vm.stats`."""
        fields = await self._channel.call("stats", timeout_s=ANSWER_TIMEOUT_S)
        size, free = fields.number("disk_size"), fields.number("disk_free")
        return GuestStats(
            memory_peak_bytes=fields.number("memory_peak"),
            memory_limit_bytes=fields.number("memory_limit"),
            oom_kills=fields.number("oom_kills"),
            pids_now=fields.number("pids"),
            disk_used_bytes=max(0, size - free),
            disk_free_bytes=free,
            disk_size_bytes=size,
            time_unix=fields.number("time_ns") / 1e9,
        )


def _exec_result(reply: Fields, stdout: Captured, stderr: Captured) -> ExecResult:
    signalled = "signal" in reply
    return ExecResult(
        exit_code=None if signalled else reply.number("code", 255),
        signal=reply.number("signal", 64) if signalled else None,
        stdout=stdout,
        stderr=stderr,
        timed_out=reply.number("timed_out", 1) == 1,
        writers_attached=reply.number("writers", 1) == 1,
        killed=reply.number("killed", 2**31),
        oom_killed=reply.number("oom") > 0,
        duration_s=reply.number("ms") / 1000,
    )


class _Output:
    """The first and last part of a stream, and every byte to its sink."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0
        self.error: Exception | None = None

    def add(self, data: bytes) -> None:
        if self._sink is not None and self.error is None:
            try:
                self._sink(data)
            except Exception as error:  # the caller's own; raised to it at the end, not into the event loop
                self.error = error
        room = KEEP - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        if (over := len(self._tail) - KEEP) > 0:
            del self._tail[:over]
            self._dropped += over

    @property
    def captured(self) -> Captured:
        return Captured(bytes(self._head), bytes(self._tail), self._dropped)


class _Inbox:
    """Bytes that arrived and are still to be used; never more than the window."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._more = anyio.Event()

    def add(self, _: int, data: bytes) -> None:
        self._data += data
        self._more.set()

    async def take(self, call: Call, most: int = WINDOW) -> bytes:
        """What is there, at least one byte; empty when the call has ended and nothing is left."""
        while not self._data:
            if call.done.is_set():
                return b""
            self._more = anyio.Event()
            async with anyio.create_task_group() as tasks:

                async def wait(event: anyio.Event) -> None:
                    await event.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(wait, self._more)
                tasks.start_soon(wait, call.done)
        data = bytes(self._data[:most])
        del self._data[:most]
        return data


class _Forwarded(ByteStream):
    """A connection to a port in the guest."""

    def __init__(self, channel: Channel, call: Call, inbox: _Inbox) -> None:
        self._channel, self._call, self._inbox = channel, call, inbox

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._inbox.take(self._call, max_bytes)
        if not data:
            if isinstance(self._call.error, GuestLost):
                raise self._call.error
            raise anyio.EndOfStream
        self._channel.grant(self._call, 1, len(data))
        return data

    async def send(self, item: bytes) -> None:
        if self._call.done.is_set():
            raise anyio.BrokenResourceError
        await self._channel.send_data(self._call, item)

    async def send_eof(self) -> None:
        self._channel.send_end(self._call)

    async def aclose(self) -> None:
        await self._channel.cancel(self._call)


_CHANGE = struct.Struct("<BBHIIIQ32s")
_KINDS: dict[int, Literal["file", "dir", "link", "deleted", "other"]] = {
    ord("f"): "file",
    ord("d"): "dir",
    ord("l"): "link",
    ord("x"): "deleted",
    ord("o"): "other",
}


def parse_changes(data: bytes) -> tuple[Change, ...]:
    """The guest's list of changes, sorted by path. Raises `GuestLost` when it is not well formed."""
    changes: list[Change] = []
    at = 0
    while at < len(data):
        if len(data) - at < _CHANGE.size:
            raise violation("a list of changes that breaks off")
        kind, hashed, length, mode, uid, gid, size, digest = _CHANGE.unpack_from(data, at)
        at += _CHANGE.size
        path = data[at : at + length]
        at += length
        if kind not in _KINDS or hashed > 1 or len(path) != length or not path or b"\0" in path:
            raise violation("a change that is not well formed")
        changes.append(
            Change(
                path="/" + text_name(path),
                kind=_KINDS[kind],
                mode=mode,
                uid=uid,
                gid=gid,
                size=size,
                digest="sha256:" + digest.hex() if hashed else "",
            )
        )
    return tuple(sorted(changes, key=lambda c: c.path))


__all__ = ["Clock", "GuestClient", "GuestRefused", "State", "parse_changes"]
