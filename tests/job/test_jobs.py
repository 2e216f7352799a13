"""Plans, resume, admission, interruption: on the fake hypervisor and with real processes."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import anyio
import pytest

from dayfly.engines.local import Admission, Capacity, LocalEngine
from dayfly.errors import BootError, ConfigError, NeedsDecision, NotFoundError, TaskError
from dayfly.evidence import JobFolder
from dayfly.job import parse_job, plan_new, plan_resume, refuse_drift
from dayfly.model import Machine, Outcome
from dayfly.testing import FakeHypervisor


def test_plan_counts_and_prints_every_rollout_once(make_task, plan_job):
    make_task("one")
    make_task("two")
    plan = plan_job(attempts=3)
    assert plan.planned == 12
    assert len({s.key for s in plan.specs}) == 12
    assert len({s.rollout_id for s in plan.specs}) == 12
    assert [s.key.attempt for s in plan.specs] == sorted(s.key.attempt for s in plan.specs)


def test_resume_runs_exactly_what_is_missing(make_task, plan_job, run_fake, tmp_path):
    for name in ("a", "b", "c"):
        make_task(name)
    plan = plan_job(retries=0)
    starts = []

    def fault(options):
        starts.append(options.vm_id)
        return BootError("no") if len(starts) % 3 == 0 else None

    first = run_fake(plan, FakeHypervisor(fault=fault))
    assert first.exit_code == 4
    graded = {r.key: r.rollout_id for r in first.records if r.graded}
    again = plan_resume(plan.job_id, tmp_path / "jobs")
    assert len(again.done) == len(graded)
    assert len(again.to_retry) == 6 - len(graded)
    assert not again.new and not again.drifted
    second = run_fake(again)
    assert second.exit_code == 0
    for record in second.records:
        if record.key in graded:
            assert record.rollout_id == graded[record.key], "a finished rollout is not run twice"


def test_rows_that_were_never_written_are_found(make_task, plan_job, run_fake, tmp_path):
    make_task()
    plan = plan_job(["oracle"], attempts=3)
    only_two = plan_job(["oracle"], attempts=3)
    only_two.job_id = plan.job_id
    only_two.new = plan.new[:2]
    run_fake(only_two)
    again = plan_resume(plan.job_id, tmp_path / "jobs")
    assert (len(again.done), len(again.new)) == (2, 1)


def test_a_changed_task_is_refused_unless_it_is_meant(make_task, plan_job, run_fake, tmp_path):
    task = make_task()
    plan = plan_job(["oracle"])
    run_fake(plan)
    (task / "instruction.md").write_text("Do something else.\n")
    again = plan_resume(plan.job_id, tmp_path / "jobs")
    assert any("write-result" in line for line in again.drifted)
    with pytest.raises(NeedsDecision, match="write-result"):
        refuse_drift(again, accept=False)
    refuse_drift(again, accept=True)
    assert len(again.new) == 1 and not again.done
    run_fake(again)
    folder = JobFolder.open(tmp_path / "jobs", plan.job_id)
    assert [r.task_digest for r in folder.records()] == [again.tasks[0].digest]
    assert len(list(folder.path.glob("rollouts/*/*/1.changed-*"))) == 1, "the old result stays on file"


def test_a_larger_limit_and_an_added_task_are_seen(make_task, plan_job, run_fake, tmp_path):
    make_task("a")
    plan = plan_job(["oracle"])
    run_fake(plan)
    make_task("b")
    larger = parse_job(plan.job_file.model_dump(mode="json") | {"attempts": 2}, "test")
    again = plan_resume(plan.job_id, tmp_path / "jobs", larger)
    text = "; ".join(again.drifted)
    assert "attempts was 1, is 2" in text
    assert "task b was added" in text
    assert (len(again.done), len(again.new)) == (1, 3)


def test_what_changes_no_result_is_no_change(make_task, plan_job, run_fake, tmp_path):
    make_task()
    plan = plan_job(["oracle"])
    run_fake(plan)
    other = parse_job(
        plan.job_file.model_dump(mode="json")
        | {"concurrency": 3, "pull": "never", "stop_after_oracle_failures": 0},
        "test",
    )
    assert plan_resume(plan.job_id, tmp_path / "jobs", other).drifted == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"tasks": ["t"], "agents": ["oracle"], "attemps": 2}, "attempts"),
        ({"tasks": ["t"], "agents": [{"name": "oracle", "optoins": {}}]}, "options"),
        ({"tasks": ["t"], "agents": ["oracle"], "attempts": 0}, "attempts"),
        ({"tasks": ["t"], "agents": ["oracle"], "agent_timeout": "soon"}, "agent_timeout"),
        ({"agents": ["oracle"]}, "tasks"),
    ],
)
def test_a_bad_job_file_names_the_key(data, words):
    with pytest.raises(ConfigError) as caught:
        parse_job(data, "job.yaml")
    assert words in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_durations():
    job = {"tasks": ["t"], "agents": ["oracle"]}
    for text, seconds in (("90s", 90), ("15m", 900), ("1.5h", 5400), (30, 30)):
        assert parse_job(job | {"agent_timeout": text}, "x").agent_timeout == seconds


def test_unknown_agents_twins_and_missing_solutions_are_found_before_anything_starts(make_task, plan_job, tmp_path):
    folder = make_task()
    with pytest.raises(ConfigError, match="oracel"):
        plan_job(["oracel"])
    with pytest.raises(ConfigError, match="two agents"):
        plan_job(["oracle", "oracle"])
    (folder / "solution/solve.sh").unlink()
    (folder / "solution").rmdir()
    with pytest.raises(TaskError, match="solution"):
        plan_job(["oracle"])
    with pytest.raises(NotFoundError, match="nowhere"):
        plan_new(parse_job({"tasks": ["nowhere"], "agents": ["no-op"]}, "x"), tmp_path, tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists()


def test_a_variable_that_is_not_set_is_found_before_anything_starts(make_task, plan_job, monkeypatch):
    folder = make_task()
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(
        text.replace("[dayfly]", '[verifier.env]\nTOKEN = "${NOT_SET_HERE}"\n[dayfly]')
    )
    with pytest.raises(ConfigError, match="NOT_SET_HERE"):
        plan_job(["oracle"])
    monkeypatch.setenv("NOT_SET_HERE", "x")
    assert plan_job(["oracle"]).planned == 1


def test_two_hundred_at_once_queue(make_task, plan_job, run_fake):
    make_task()
    hypervisor = FakeHypervisor(start_delay_s=0.001)
    result = run_fake(plan_job(["no-op"], attempts=200, concurrency=16), hypervisor)
    assert len(result.records) == 200
    assert result.exit_code == 0
    assert 1 < hypervisor.most_running <= 16


def test_admission_holds_memory_and_lets_an_oversized_one_run_alone():
    async def scenario() -> list[str]:
        admission = Admission(Capacity(cpus=2, memory_mib=1000, disk_mib=10_000, rollouts=100))
        log: list[str] = []
        small, wide = Machine(memory_mib=256, storage_mib=64), Machine(cpus=4, memory_mib=256, storage_mib=64)

        async def one(name: str, machine: Machine) -> None:
            await admission.enter(machine)
            log.append(f"+{name} {admission.rollouts}")
            await anyio.sleep(0.01)
            await admission.leave(machine)

        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(one, f"s{number}", small)
            group.start_soon(one, "wide", wide)
        assert (admission.rollouts, admission.memory_mib, admission.disk_mib) == (0, 0, 0)
        return log

    log = anyio.run(scenario)
    assert max(int(line.split()[1]) for line in log) == 2  # two CPUs, and 2 × (256+160) MiB fit
    assert any(line == "+wide 1" for line in log)


def test_admission_refuses_what_could_never_fit():
    admission = Admission(Capacity(cpus=2, memory_mib=1000, disk_mib=1000, rollouts=4))
    with pytest.raises(ConfigError, match="memory"):
        admission.refuse_impossible(Machine(memory_mib=2000, storage_mib=64))
    with pytest.raises(ConfigError, match="write"):
        admission.refuse_impossible(Machine(memory_mib=256, storage_mib=2000))


def test_engine_leaves_nothing_taken_when_a_rollout_raises():
    admission = Admission(Capacity(cpus=8, memory_mib=10_000, disk_mib=10_000, rollouts=8))

    async def broken(spec):
        raise RuntimeError("bug")

    async def done(record):
        raise AssertionError("nothing is done")

    class Spec:
        machine = Machine()

    with pytest.raises(ExceptionGroup):
        anyio.run(lambda: LocalEngine(admission).run([Spec()] * 3, broken, done))
    assert admission.rollouts == 0


# --- real processes -------------------------------------------------------------------------------


def fake_args(tmp_path: Path, attempts: int) -> list[str]:
    tasks = str(tmp_path / "tasks")
    return [tasks, "-a", "oracle", "-a", "no-op", "-k", str(attempts), "--hypervisor", "fake", "-c", "4"]


def wait_for_job(tmp_path: Path, finished: int = 0) -> str:
    for _ in range(600):
        for path in (tmp_path / "jobs").glob("*/events.jsonl"):
            if path.read_text().count('"rollout_finished"') >= finished:
                return path.parent.name
        time.sleep(0.05)
    raise AssertionError("the job did not get that far")


SLOW = "#!fake\nwrite result.txt done\nsleep 0.15\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_collects_and_exits_130(make_task, tmp_path, start_run, number):
    make_task(solve=SLOW)
    process = start_run(*fake_args(tmp_path, 40))
    job = wait_for_job(tmp_path, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert f"dayfly run --resume {job}" in out.decode()
    records = list(JobFolder.open(tmp_path / "jobs", job).records())
    assert sum(r.graded for r in records) >= 3
    assert {r.outcome for r in records if not r.graded} <= {Outcome.CANCELLED}
    assert list((tmp_path / "jobs" / job / "work").iterdir()) == []


def test_kill_nine_at_random_moments_loses_and_doubles_nothing(make_task, tmp_path, start_run):
    """Fault 51/52 and the issue's point 4 on the fake: twenty kills, each followed by --resume."""
    make_task("a", solve=SLOW)
    make_task("b", solve="#!fake\nwrite result.txt done\nsleep 0.05\n")
    random.seed(7)
    process = start_run(*fake_args(tmp_path, 30))
    job = wait_for_job(tmp_path)
    finished: dict[str, str] = {}
    for _ in range(20):
        time.sleep(random.uniform(0.05, 0.9))
        process.kill()
        process.communicate()
        folder = JobFolder.open(tmp_path / "jobs", job)
        with folder.lock():
            folder.recover()
        now = {str(r.key): r.rollout_id for r in folder.records() if r.graded}
        for key, rollout in finished.items():
            assert now.get(key) == rollout, "a finished rollout was lost or run twice"
        finished = now
        process = start_run("--resume", job)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    records = list(JobFolder.open(tmp_path / "jobs", job).records())
    assert len(records) == 120
    assert all(r.graded for r in records)
    assert list((tmp_path / "jobs" / job / "work").iterdir()) == []
    shown = [
        json.loads(line)["rollout"]
        for line in (tmp_path / "jobs" / job / "events.jsonl").read_text().splitlines()
        if '"rollout_finished"' in line
    ]
    assert set(shown) <= {r.rollout_id for r in records}, "what was shown as done is on file"


def test_two_controllers_cannot_work_on_one_job(make_task, tmp_path, start_run):
    make_task(solve=SLOW)
    first = start_run(*fake_args(tmp_path, 40))
    job = wait_for_job(tmp_path, 1)
    second = start_run("--resume", job)
    _, err = second.communicate(timeout=60)
    assert second.returncode != 0
    assert str(first.pid) in err.decode()
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
