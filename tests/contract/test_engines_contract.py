"""The local engine under `check_engine`; and engines that break a rule."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import anyio
import pytest

from dayfly.engines.local import Admission, Capacity, LocalEngine
from dayfly.testing import check_engine

AT_ONCE = 6


def local_engine(rollouts: int = AT_ONCE) -> LocalEngine:
    return LocalEngine(
        Admission(Capacity(cpus=float("inf"), memory_mib=100_000, disk_mib=100_000, rollouts=rollouts))
    )


def test_local_engine():
    anyio.run(partial(check_engine, at_once=AT_ONCE), local_engine)


def test_local_engine_bounded_by_memory_alone():
    room = Capacity(cpus=float("inf"), memory_mib=4 * (128 + 160) + 100, disk_mib=100_000, rollouts=100)
    anyio.run(partial(check_engine, at_once=4), lambda: LocalEngine(Admission(room)))


class OneByOne:
    async def run(self, specs, run_one, done):
        for spec in specs:
            await done(await run_one(spec))


class AllAtOnce:
    async def run(self, specs, run_one, done):
        async with anyio.create_task_group() as group:
            for spec in specs:
                group.start_soon(self.one, spec, run_one, done)

    async def one(self, spec, run_one, done):
        await done(await run_one(spec))


class Twice:
    async def run(self, specs, run_one, done):
        for spec in specs:
            await run_one(spec)
            await done(await run_one(spec))


class Forgiving(LocalEngine):
    """Hides errors."""

    async def run(self, specs, run_one, done):
        async def quietly(record):
            with suppress(ZeroDivisionError):
                await done(record)

        await super().run(specs, run_one, quietly)


def forgiving() -> Forgiving:
    return Forgiving(local_engine().admission)


@pytest.mark.parametrize(
    ("engine", "words"),
    [(OneByOne, "ran at once"), (AllAtOnce, "ran at once"), (Twice, "exactly once"), (forgiving, "come out")],
)
def test_a_broken_engine_fails_the_suite(engine, words):
    with pytest.raises(AssertionError, match=words):
        anyio.run(partial(check_engine, at_once=AT_ONCE), engine)
