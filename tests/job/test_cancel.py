"""Stopping a job in every phase, an index that hangs, and the watchdog: on the fake hypervisor."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dayfly.errors import HostError
from dayfly.evidence import JobFolder, verify_folder
from dayfly.job import Run, plan_resume, run_job
from dayfly.model import Disk, ImageConfig, Machine, Outcome
from dayfly.protocols import AgentResult, StartOptions, Vm
from dayfly.stores import SqlStore
from dayfly.testing import FakeHypervisor

PHASES = ["image", "boot", "setup", "agent", "collect", "verify", "teardown"]
RESULT = '[[artifacts]]\nsource = "/app/result.txt"\n'


class Stuck:
    """Waits for ever in the first call of one phase; `seen` is what the job says of itself."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.now = ""
        self.reached = False
        self.seen: list[dict[str, Any]] = []

    def observe(self, event: dict[str, Any]) -> None:
        self.seen.append(event)
        if event["event"] == "phase":
            self.now = event["phase"]

    async def wait(self) -> None:
        if self.now == self.phase and not self.reached:
            self.reached = True
            self.on_reached()
            await anyio.sleep_forever()

    def on_reached(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class StuckVm:
    def __init__(self, vm: Vm, stuck: Stuck) -> None:
        self.vm, self.stuck = vm, stuck

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.vm, name)
        if name in ("info", "forward"):
            return found

        async def call(*args: Any, **options: Any) -> Any:
            await self.stuck.wait()
            return await found(*args, **options)

        return call


class StuckHypervisor(FakeHypervisor):
    stuck: Stuck

    @asynccontextmanager
    async def start(self, disk: Disk, machine: Machine, options: StartOptions) -> AsyncIterator[Any]:
        await self.stuck.wait()
        async with super().start(disk, machine, options) as vm:
            yield StuckVm(vm, self.stuck)
            await self.stuck.wait()


def run_stuck(plan, stuck: Stuck) -> tuple[Any, StuckHypervisor, JobFolder]:
    hypervisor = StuckHypervisor()
    hypervisor.stuck = stuck

    async def make_disk(image: str) -> Disk:
        await stuck.wait()
        return Disk(plan.jobs_dir, "sha256:0", ImageConfig(workdir="/app"), image, image)

    async def main() -> Any:
        with anyio.fail_after(60), SqlStore.open(plan.jobs_dir) as store:
            run = Run(plan, hypervisor, make_disk, store, observers=[stuck.observe])
            run.folder = JobFolder.open(plan.jobs_dir, plan.job_id)
            return await run.go()

    return anyio.run(main), hypervisor, JobFolder.open(plan.jobs_dir, plan.job_id)


def make_folder(plan) -> None:
    """Make the job's folder with an empty run, so that `run_stuck` can bring a disk that waits."""
    nothing = plan.new
    plan.new = []
    anyio.run(lambda: run_job(plan, hypervisor=FakeHypervisor()))
    plan.new = nothing


@pytest.mark.parametrize("verifier_class", ["shared", "rebooted", "separate"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_each_phase_leaves_a_record_and_nothing_else(
    make_task, plan_job, run_fake, tmp_path, phase, verifier_class
):
    """Fault 36: stop in every state. Fault 50: what was seen until then is on file."""
    make_task(verifier_class=verifier_class, artifacts=RESULT if verifier_class == "separate" else "")
    plan = plan_job(["oracle"], concurrency=1)
    make_folder(plan)
    stuck = Stuck(phase)
    result, hypervisor, folder = run_stuck(plan, stuck)
    assert stuck.reached
    assert result.interrupted and result.exit_code == 130
    assert hypervisor.running == 0
    (record,) = folder.records()
    assert record.outcome is Outcome.CANCELLED
    assert not record.graded and record.reward is None and record.verdict is None
    assert record.cause is not None and record.cause.phase == phase
    assert verify_folder(folder.rollout_path(record.key)) == []
    assert list((folder.path / "work").iterdir()) == []
    told = {e["event"]: e for e in folder.events()}
    assert told["job_stopping"]["signal"] == "SIGTERM"
    assert [f["phase"] for f in told["job_stopping"]["in_flight"]] == [phase]
    assert "job_cancelled" in told
    again = plan_resume(plan.job_id, tmp_path / "jobs")
    assert len(again.to_retry) == 1 and not again.done
    (finished,) = run_fake(again).records
    assert finished.outcome is Outcome.PASSED and finished.retry == 1


def test_what_an_agent_printed_before_the_stop_is_kept(make_task, plan_job):
    make_task(solve="#!fake\nprint half of the work\nwrite result.txt half\nsleep 600\n")
    plan = plan_job(["oracle"])
    started = anyio.Event()

    def watch(event: dict[str, Any]) -> None:
        if event.get("phase") == "agent":
            started.set()

    async def main() -> None:
        async with anyio.create_task_group() as group:

            async def stop() -> None:
                await started.wait()
                printed = list((plan.jobs_dir / plan.job_id).glob("work/*/evidence/agent/stdout.txt"))
                while not (printed and printed[0].stat().st_size):
                    await anyio.sleep(0.01)
                    printed = list((plan.jobs_dir / plan.job_id).glob("work/*/evidence/agent/stdout.txt"))
                group.cancel_scope.cancel()

            group.start_soon(stop)
            await run_job(plan, hypervisor=FakeHypervisor(), observers=[watch], own_signals=False)

    anyio.run(main)
    folder = JobFolder.open(plan.jobs_dir, plan.job_id)
    (record,) = folder.records()
    assert record.outcome is Outcome.CANCELLED
    place = folder.rollout_path(record.key)
    assert (place / "agent/stdout.txt").read_bytes() == b"half of the work\n"
    assert (place / "disk.img").exists(), "the disk at the time of the stop is kept, as of any that did not pass"


# --- an index that hangs or fails -----------------------------------------------------------------


class Frozen:
    """A store that never answers."""

    def __init__(self) -> None:
        self.thaw = threading.Event()
        self.asked = 0

    def add_many(self, records) -> int:
        self.asked += 1
        self.thaw.wait(60)
        return 0

    def query(self, job_id=None):
        return []


class Failing(Frozen):
    def add_many(self, records) -> int:
        self.asked += 1
        raise HostError("the disk of the index is full", cause="index_error")


@pytest.mark.parametrize("make_store", [Frozen, Failing])
def test_a_job_goes_on_without_its_index(make_task, plan_job, make_store, monkeypatch):
    monkeypatch.setattr("dayfly.job.INDEX_GRACE_S", 0.3)
    make_task()
    plan = plan_job(attempts=20)
    make_folder(plan)
    store = make_store()

    async def make_disk(image: str) -> Disk:
        return Disk(plan.jobs_dir, "sha256:0", ImageConfig(workdir="/app"), image, image)

    async def main() -> Any:
        with anyio.fail_after(60):
            run = Run(plan, FakeHypervisor(), make_disk, store)
            run.folder = JobFolder.open(plan.jobs_dir, plan.job_id)
            try:
                return await run.go()
            finally:
                store.thaw.set()

    result = anyio.run(main)
    assert result.exit_code == 0 and len(result.records) == 40
    events = [e["event"] for e in JobFolder.open(plan.jobs_dir, plan.job_id).events()]
    assert events.count("index_failed") == 1, "said once, not for every rollout"
    assert events[-1] == "job_finished"
    assert store.asked == 1, "a store that failed is not asked again"
    with SqlStore.open(plan.jobs_dir) as index:
        index.rebuild(plan.jobs_dir)
        assert len(index.query(plan.job_id)) == 40


# --- the watchdog ---------------------------------------------------------------------------------


class Deaf:
    """An agent that neither ends at its limit nor when it is cancelled."""

    async def run(self, vm: Any, task: Any, record: Any, timeout_s: float) -> AgentResult:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1.5)
        return AgentResult()


def test_a_phase_over_its_limit_is_said_with_what_is_in_flight(make_task, plan_job, monkeypatch):
    monkeypatch.setattr("dayfly.job.WATCHDOG_INTERVAL_S", 0.05)
    monkeypatch.setattr("dayfly.job.OVERDUE_GRACE_S", 0.2)
    monkeypatch.setattr("dayfly.rollout.limits.AGENT_STOP_GRACE_S", 0.2)
    make_task(agent_timeout=0.1)
    plan = plan_job(["no-op"])
    anyio.run(lambda: run_job(plan, hypervisor=FakeHypervisor(), make_agent=lambda spec: Deaf()))
    folder = JobFolder.open(plan.jobs_dir, plan.job_id)
    (stalled,) = [e for e in folder.events() if e["event"] == "stalled"]
    assert stalled["phase"] == "agent"
    assert [(f["task"], f["agent"], f["phase"]) for f in stalled["in_flight"]] == [
        ("write-result", "no-op", "agent")
    ]
    assert [r.outcome for r in folder.records()] == [Outcome.AGENT_TIMEOUT]


def test_a_job_in_which_nothing_starts_says_so(make_task, plan_job, monkeypatch):
    """Fault 50: a scheduler that sits at 0 of n. Here nothing fits until the test lets it."""
    monkeypatch.setattr("dayfly.job.WATCHDOG_INTERVAL_S", 0.05)
    monkeypatch.setattr("dayfly.job.OVERDUE_GRACE_S", 0.2)
    make_task()
    plan = plan_job(["no-op"])
    seen = anyio.Event()

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "idle":
            seen.set()

    class Sitting:
        async def run(self, specs, run_one, done) -> None:
            with anyio.fail_after(30):
                await seen.wait()

    monkeypatch.setattr("dayfly.job.Run._engine", lambda run: Sitting())
    result = anyio.run(lambda: run_job(plan, hypervisor=FakeHypervisor(), observers=[watch]))
    assert result.exit_code == 4
    (idle,) = [e for e in JobFolder.open(plan.jobs_dir, plan.job_id).events() if e["event"] == "idle"]
    assert idle["left"] == 1
