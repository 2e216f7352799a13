"""A context manager that lives in a task of its own.

anyio's cancel scopes nest: a task group that is entered within a time limit cannot outlive it. A VM must, so its
whole life happens in one task, and its user only holds the two ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Life(Generic[T]):
    """Enter with `begin`, leave with `end`; both in any scope. `end` may be called whatever `begin` did."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._make = make
        self._scope = anyio.CancelScope()
        self._ready: asyncio.Future[T] | None = None
        self._finish = anyio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> T:
        """What the context manager yields; raises what entering it raises."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._task = loop.create_task(self._live(self._ready))
        return await asyncio.shield(self._ready)

    async def end(self) -> None:
        """Let the task leave the context manager (or give up entering it) and wait; not to be cancelled.

        Raises what leaving raises. The wait is bounded by the bounds of what is left.
        """
        self._finish.set()
        if self._task is None or self._ready is None:
            return
        if not self._ready.done():
            self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])
        if not self._ready.cancelled() and self._ready.exception() is None:
            self._task.result()

    async def _live(self, ready: asyncio.Future[T]) -> None:
        try:
            with self._scope:
                async with self._make() as value:
                    ready.set_result(value)
                    await self._finish.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        else:
            if not ready.done():
                ready.cancel()
