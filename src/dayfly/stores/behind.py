"""Indexing behind a job's back: an index that is slow, frozen or broken never holds up a rollout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from dayfly.errors import DayflyError, HostError
from dayfly.model import RolloutRecord
from dayfly.protocols import Store

BATCH = 500
MOST_WAITING = 5_000
"""Records that wait for the index at most; a hundred megabytes."""


@dataclass
class Behind:
    """Adds to a store in batches, in a thread. At the first failure it says so, once, and gives up.

    Nothing is lost by that: the files are the truth, and the index is rebuilt from them.
    """

    store: Store
    on_failure: Callable[[DayflyError], None]
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _given_up: bool = False

    def __post_init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[RolloutRecord](MOST_WAITING)

    def add(self, record: RolloutRecord) -> None:
        """Take a record for later; never waits."""
        if self._given_up:
            return
        try:
            self._send.send_nowait(record)
        except anyio.WouldBlock:
            self._give_up(HostError(f"{MOST_WAITING} rollouts wait for the index", cause="index_busy"))

    async def run(self) -> None:
        """Work until `finish`, a failure, or cancellation (which leaves a stuck thread to itself)."""
        try:
            async for record in self._receive:
                await anyio.to_thread.run_sync(self.store.add_many, self._batch(record), abandon_on_cancel=True)
                if self._given_up:
                    break
        except DayflyError as error:
            self._give_up(error)
        finally:
            self._receive.close()
            self._send.close()
            self._ended.set()

    def _batch(self, first: RolloutRecord) -> list[RolloutRecord]:
        batch = [first]
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while len(batch) < BATCH:
                batch.append(self._receive.receive_nowait())
        return batch

    async def finish(self, timeout_s: float) -> None:
        """Wait until everything is in the store, for at most `timeout_s` seconds."""
        self._send.close()
        with anyio.move_on_after(timeout_s) as late:
            await self._ended.wait()
        if late.cancelled_caught:
            self._give_up(HostError(f"the index did not answer within {timeout_s:g} s", cause="index_busy"))

    def _give_up(self, error: DayflyError) -> None:
        if not self._given_up:
            self._given_up = True
            self.on_failure(error)
