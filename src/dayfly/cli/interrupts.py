"""Ctrl-C while things are being prepared. Once a job runs, it listens itself (see `dayfly.job.Run`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.abc

from dayfly.cli.output import say

T = TypeVar("T")


class Interrupted(Exception):
    """A signal ended the work before a job took over."""


def run_interruptible(work: Callable[[], Awaitable[T]]) -> T:
    """`anyio.run(work)`; SIGINT, SIGTERM or SIGHUP cancels it, a second one leaves at once.

    Raises `Interrupted`. What runs in a thread (making a disk, asking whether KVM works) is waited for; each
    of these is bounded.
    """
    return anyio.run(_guarded, work)


async def _guarded(work: Callable[[], Awaitable[T]]) -> T:
    failed: list[Exception] = []
    results: list[T] = []
    async with anyio.create_task_group() as group:
        working = anyio.CancelScope()
        await group.start(_watch, working)
        with working:
            try:
                results.append(await work())
            except Exception as error:  # raised below, outside of the group that would wrap it
                failed.append(error)
        group.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not results:
        raise Interrupted
    return results[0]


async def _watch(working: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if working.cancel_called:
                os._exit(130)  # VMs die with us
            say(f"{signal.Signals(number).name}: stopping; again leaves at once")
            working.cancel()
