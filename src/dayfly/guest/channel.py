"""One guest's channel: frames in and out, requests with their streams, heartbeat, and how it ends.

No task runs here: the event loop calls us when the socket is readable, and a timer beats. So hundreds of VMs cost
no more than their traffic. Everything is bounded; what breaks the rules ends this channel and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import anyio

from dayfly.errors import DayflyError, DiskFull, GuestLost, GuestRefused, LimitError
from dayfly.guest.frames import (
    MAX_PAYLOAD,
    MORE,
    WINDOW,
    Fields,
    Frame,
    FrameReader,
    Type,
    Value,
    encode,
    encode_fields,
    violation,
)

READ_SIZE = 256 * 1024
MAX_UNSENT = 16 * 1024 * 1024
"""A guest that takes nothing while it makes us answer ends at this many bytes."""
BEAT_S = 1.0
CANCEL_TIMEOUT_S = 10.0

Take = Callable[[int, bytes], None]
"""Gets channel and bytes as they arrive. Credit is granted by whoever has used the bytes."""


@dataclass(eq=False)
class Call:
    """One request under way. `receive` maps the channels on which the guest may send to what it may still send."""

    id: int
    what: str
    receive: dict[int, int]
    take: Take | None
    may_start: bool = False
    send_credit: int = WINDOW
    ungranted: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    fields: Fields | None = None
    error: Exception | None = None
    abandoned: bool = False
    done: anyio.Event = field(default_factory=anyio.Event)
    started: anyio.Event = field(default_factory=anyio.Event)
    more_credit: anyio.Event = field(default_factory=anyio.Event)

    def finish(self, error: Exception | None = None) -> None:
        if self.error is None:
            self.error = error
        for event in (self.done, self.started, self.more_credit):
            event.set()

    def result(self) -> Fields:
        if self.error is not None:
            raise self.error
        assert self.fields is not None
        return self.fields


class Channel:
    """Frames over one connected, non-blocking stream socket."""

    def __init__(self, sock: socket.socket, *, silence_s: float = 5.0) -> None:
        """`silence_s`: after so many seconds without a byte, while this process itself was running, the guest is
        given up."""
        self._sock = sock
        self._silence_s = silence_s
        self._reader = FrameReader()
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._unsent = bytearray()
        self._all_sent = anyio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._silent_s = 0.0
        self._ping: bytes | None = None
        self._watching = False
        self.error: DayflyError | None = None
        """Why the channel ended; None while it lives."""
        self.ended = anyio.Event()

    # --- life

    def open(self) -> None:
        """Start to listen; must be called within the event loop."""
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._readable)

    def watch_silence(self) -> None:
        """From now on the guest has to answer. Not before: a booting guest is silent for long."""
        if self._loop is not None and not self._watching and self.error is None:
            self._watching = True
            self._schedule_beat()

    def end(self, error: DayflyError) -> None:
        """The channel is over: every call fails with `error` (the first one counts). Idempotent."""
        if self.error is not None:
            return
        self.error = error
        if self._beat is not None:
            self._beat.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._unsent.clear()
        self._all_sent.set()
        for call in list(self._calls.values()):
            call.finish(error)
        self._calls.clear()
        self.ended.set()

    # --- calls

    async def call(
        self, op: str, fields: Iterable[tuple[str, Value]] = (), *, timeout_s: float | None = None
    ) -> Fields:
        """A request without streams. After `timeout_s` the guest is given up: it owes an answer."""
        call = self.begin(op, fields)
        with anyio.move_on_after(timeout_s) as scope:
            return await self.finished(call)
        if scope.cancelled_caught:
            self.end(GuestLost(f"the guest did not answer {op!r} within {timeout_s:g} s", cause="timeout"))
        return call.result()

    def begin(
        self,
        op: str,
        fields: Iterable[tuple[str, Value]] = (),
        *,
        channels: Iterable[int] = (),
        take: Take | None = None,
        may_start: bool = False,
    ) -> Call:
        """Send a request. The caller must await `finished` whatever happens."""
        self.check()
        call = Call(self._next_id, op, dict.fromkeys(channels, WINDOW), take, may_start)
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        self._calls[call.id] = call
        payload = encode_fields([("op", op), *fields])
        for at in range(0, len(payload), MAX_PAYLOAD):
            more = MORE if at + MAX_PAYLOAD < len(payload) else 0
            self._send(encode(Type.REQUEST, call.id, payload[at : at + MAX_PAYLOAD], flags=more))
        return call

    async def finished(self, call: Call) -> Fields:
        """Wait for the answer. When the waiting is cancelled the request is cancelled, and its end awaited."""
        try:
            await call.done.wait()
        except BaseException:
            await self.cancel(call)
            raise
        return call.result()

    async def cancel(self, call: Call) -> None:
        """Have the guest stop the request, and wait (shielded, bounded) until it says that it has."""
        call.take = None
        if call.done.is_set():
            return
        self._send(encode(Type.CANCEL, call.id))
        with anyio.move_on_after(CANCEL_TIMEOUT_S, shield=True) as scope:
            await call.done.wait()
        if scope.cancelled_caught:
            self.end(GuestLost(f"the guest did not stop {call.what!r}", cause="timeout"))

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    # --- streams

    async def send_data(self, call: Call, data: bytes) -> None:
        """Send bytes on the call's input as the guest grants them; returns early when the call has ended."""
        view = memoryview(data)
        while view and not call.done.is_set():
            if call.send_credit == 0 or self._unsent:
                await self._room(call)
                continue
            part = bytes(view[: min(call.send_credit, MAX_PAYLOAD)])
            call.send_credit -= len(part)
            view = view[len(part) :]
            self._send(encode(Type.DATA, call.id, part))

    async def _room(self, call: Call) -> None:
        if call.send_credit == 0:
            call.more_credit = anyio.Event()
            if not call.done.is_set():
                await call.more_credit.wait()
        elif self._unsent:
            await self._all_sent.wait()

    def send_end(self, call: Call) -> None:
        if not call.done.is_set():
            self._send(encode(Type.END, call.id))

    def grant(self, call: Call, channel: int, used: int) -> None:
        """The bytes are used up: let the guest send as many more, in batches."""
        if call.done.is_set() or self.error is not None:
            return
        call.ungranted[channel] = call.ungranted.get(channel, 0) + used
        if (amount := call.ungranted[channel]) >= WINDOW // 4:
            call.ungranted[channel] = 0
            call.receive[channel] += amount
            self._send(encode(Type.CREDIT, call.id, amount.to_bytes(4, "little"), channel=channel))

    # --- socket

    def _send(self, data: bytes) -> None:
        if self.error is not None or self._loop is None:
            return
        if len(self._unsent) + len(data) > MAX_UNSENT:
            self.end(violation("it takes nothing"))
            return
        was_empty = not self._unsent
        self._unsent += data
        if was_empty:
            self._write()

    def _write(self) -> None:
        assert self._loop is not None
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[:READ_SIZE])
                del self._unsent[:sent]
        except BlockingIOError:
            if self._all_sent.is_set() or not self._watching_writes:
                self._all_sent = anyio.Event()
                self._watching_writes = True
                self._loop.add_writer(self._sock, self._write)
            return
        except OSError as error:
            self.end(_gone(error))
            return
        if self._watching_writes:
            self._watching_writes = False
            self._loop.remove_writer(self._sock)
        self._all_sent.set()

    _watching_writes = False

    def _readable(self) -> None:
        try:
            data = self._sock.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(_gone(error))
            return
        if not data:
            self.end(_gone(None))
            return
        self._silent_s = 0.0
        try:
            for frame in self._reader.feed(data):
                self._dispatch(frame)
        except GuestLost as error:
            self.end(error)

    # --- frames

    def _dispatch(self, frame: Frame) -> None:
        if self.error is not None:
            return
        if frame.type == Type.PONG:
            if self._ping is None or frame.payload != self._ping or frame.id != 0:
                raise violation("an answer to no ping")
            self._ping = None
            return
        call = self._calls.get(frame.id)
        if call is None:
            raise violation(f"a frame for request {frame.id}, which is not under way")
        match frame.type:
            case Type.DATA:
                self._data(call, frame)
            case Type.REPLY:
                self._end_call(call, fields=Fields.decode(frame.payload))
            case Type.ERROR:
                self._end_call(call, error=refusal(Fields.decode(frame.payload)))
            case Type.CREDIT:
                self._credit(call, frame)
            case Type.END:
                if frame.channel not in call.receive or frame.channel in call.ended:
                    raise violation("an end of no stream")
                call.ended.add(frame.channel)
            case Type.STARTED:
                if not call.may_start or call.started.is_set():
                    raise violation("a start that was not asked for")
                call.started.set()

    def _data(self, call: Call, frame: Frame) -> None:
        length = len(frame.payload)
        left = call.receive.get(frame.channel, 0)
        if not length or length > left or frame.channel in call.ended:
            raise violation(f"data on channel {frame.channel} of {call.what!r} that was not granted")
        call.receive[frame.channel] = left - length
        if call.take is None:  # cancelled: what is under way is dropped, and may go on so that the end comes
            self.grant(call, frame.channel, length)
            return
        call.take(frame.channel, frame.payload)

    def _credit(self, call: Call, frame: Frame) -> None:
        amount = int.from_bytes(frame.payload, "little")
        if len(frame.payload) != 4 or call.send_credit + amount > WINDOW:
            raise violation("more credit than was used")
        call.send_credit += amount
        call.more_credit.set()

    def _end_call(self, call: Call, fields: Fields | None = None, error: Exception | None = None) -> None:
        del self._calls[call.id]
        call.fields = fields
        call.finish(error)

    # --- heartbeat

    def _schedule_beat(self) -> None:
        assert self._loop is not None
        self._beat_due = self._loop.time() + BEAT_S
        self._beat = self._loop.call_later(BEAT_S, self._on_beat)

    _beat_due = 0.0

    def _on_beat(self) -> None:
        """Count silence as far as we ourselves were running: a stopped or starved host proves little, but a host
        that is late for ever must give up at some time, too."""
        assert self._loop is not None
        late_s = self._loop.time() - self._beat_due
        self._silent_s += BEAT_S if late_s < BEAT_S / 2 else BEAT_S / 4
        if self._silent_s > self._silence_s:
            self.end(GuestLost(f"the guest has been silent for {self._silent_s:g} s", cause="guest_silent"))
            return
        if self._ping is None:
            self._ping = secrets.token_bytes(8)
            self._send(encode(Type.PING, 0, self._ping))
        self._schedule_beat()


def refusal(fields: Fields) -> DayflyError:
    """The guest's error as ours."""
    cause, message = fields.text("cause", 40), fields.text("message")
    kind: type[DayflyError] = {"limit": LimitError, "disk_full": DiskFull}.get(cause, GuestRefused)
    return kind(f"in the guest: {message}", cause=cause)


def _gone(error: OSError | None) -> GuestLost:
    why = "closed the channel" if error is None else os.strerror(error.errno or 0)
    return GuestLost(f"the guest is gone: {why}", cause="guest_lost")
