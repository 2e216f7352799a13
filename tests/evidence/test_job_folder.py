from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import DayflyError, HostError, NotFoundError
from dayfly.evidence import (
    JobFolder,
    list_jobs,
    load_record,
    new_job_id,
    new_rollout_id,
    remove_half_made,
    safe_component,
    seal,
    verify_folder,
)
from dayfly.model import Outcome, RolloutRecord

MakeRecord = Callable[..., RolloutRecord]
PublishOne = Callable[[RolloutRecord], RolloutRecord]


# --- names ---------------------------------------------------------------------------------------


def test_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_rollout_id() for _ in range(10_000)]
    assert len(set(ids)) == 10_000
    stamps = [i.rsplit("-", 1)[0] for i in ids]
    assert stamps == sorted(stamps)
    assert new_job_id().count("-") == 2


@given(st.text(max_size=200))
def test_a_component_is_one_plain_folder_name(name: str) -> None:
    component = safe_component(name)
    assert component not in ("", ".", "..")
    assert not component.startswith((".", "-"))
    assert "/" not in component
    assert component.isascii()
    assert component.isprintable()
    assert len(component) <= 100


@given(st.lists(st.text("aA/-~.", max_size=6), unique=True, max_size=50))
def test_different_names_have_different_folders(names: list[str]) -> None:
    assert len({safe_component(n) for n in names}) == len(names)


def test_components_are_readable() -> None:
    assert safe_component("fix-test_1.0") == "fix-test_1.0"
    assert safe_component("org/fix-test").startswith("org-fix-test~")
    assert safe_component(safe_component("org/fix-test")) != safe_component("org/fix-test")


# --- the job -------------------------------------------------------------------------------------


def test_a_job_is_made_whole_and_found(tmp_path: Path) -> None:
    jobs = tmp_path / "new" / "jobs"
    assert list_jobs(jobs) == []
    job = JobFolder.create(jobs, "j1", {"a": 1}, {"b": 2})
    assert (job.job(), job.lock_data(), list_jobs(jobs)) == ({"a": 1}, {"b": 2}, ["j1"])
    assert [p.name for p in jobs.iterdir()] == ["j1"]
    with pytest.raises(HostError) as caught:
        JobFolder.create(jobs, "j1", {"a": 9}, {})
    assert caught.value.cause == "exists"
    assert JobFolder.open(jobs, "j1").job() == {"a": 1}
    assert [p.name for p in jobs.iterdir()] == ["j1"]


def test_a_half_made_job_is_invisible_and_removed_once_it_is_old(tmp_path: Path) -> None:
    half = tmp_path / ".j1.0123abcd.tmp"
    half.mkdir()
    (half / "job.json").write_text("{}")
    assert list_jobs(tmp_path) == []
    assert remove_half_made(tmp_path) == []
    os.utime(half, (0, 0))
    assert remove_half_made(tmp_path) == [half]
    assert not half.exists()


@pytest.mark.parametrize("job_id", ["absent", "../jobs", "", ".", "a/b"])
def test_a_job_that_is_not_there_is_not_found(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(NotFoundError):
        JobFolder.open(tmp_path, job_id)


def test_a_replaced_plan_stays_in_the_log(job: JobFolder) -> None:
    job.replace_plan({"name": "new"}, {"tasks": {"t": 1}})
    assert (job.job(), job.lock_data()) == ({"name": "new"}, {"tasks": {"t": 1}})
    (event,) = job.events()
    assert (event["event"], event["job"], event["lock"]) == ("plan_replaced", {"name": "j"}, {"tasks": {}})


def test_only_one_works_on_a_job_and_a_killed_one_lets_go(job: JobFolder) -> None:
    script = (
        "import sys, time; from pathlib import Path; from dayfly.evidence import JobFolder\n"
        "with JobFolder.open(Path(sys.argv[1]), sys.argv[2]).lock():\n"
        "    print('locked', flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", script, str(job.path.parent), job.job_id]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "locked\n"
            assert job.holder() == child.pid
            with pytest.raises(DayflyError, match=f"process {child.pid}") as caught, job.lock():
                pytest.fail("two at once")
            assert caught.value.cause == "locked"
        finally:
            child.send_signal(signal.SIGKILL)
    with job.lock():
        assert job.holder() == os.getpid()
    assert job.holder() is None


# --- publication ---------------------------------------------------------------------------------


def test_a_published_rollout_is_intact_and_nothing_else_is_left(job: JobFolder, make_record: MakeRecord) -> None:
    record = make_record(notes=("before",))
    with job.rollout(record.rollout_id) as work:
        work.write("agent/out.txt", b"x")
        (work.scratch / "disk.img").write_bytes(b"disk")
        work.note("during")
        sealed = job.publish_rollout(record, work)
    assert sealed.notes == ("before", "during")
    assert verify_folder(job.rollout_path(record.key)) == []
    assert list(job.records()) == [sealed]
    assert list((job.path / "work").iterdir()) == []
    assert job.folder_of(record.rollout_id) == job.rollout_path(record.key)
    assert {p.stat().st_mode & 0o077 for p in job.path.rglob("*")} == {0}


def test_an_ungraded_start_is_kept_as_a_retry(
    job: JobFolder, make_record: MakeRecord, publish_one: PublishOne
) -> None:
    first = publish_one(make_record(Outcome.INFRA_ERROR))
    second = publish_one(make_record(Outcome.CANCELLED, retry=1))
    third = publish_one(make_record(Outcome.PASSED, retry=2))
    assert list(job.records()) == [third]
    assert job.history(third.key) == [first, second, third]
    place = job.rollout_path(third.key)
    assert sorted(p.name for p in place.parent.iterdir()) == ["1", "1.retry-1", "1.retry-2"]
    assert job.folder_of(first.rollout_id).name == "1.retry-1"


def test_a_graded_attempt_is_recorded_once(
    job: JobFolder, make_record: MakeRecord, publish_one: PublishOne
) -> None:
    first = publish_one(make_record(Outcome.FAILED))
    for outcome in (Outcome.PASSED, Outcome.INFRA_ERROR):
        with pytest.raises(HostError) as caught:
            publish_one(make_record(outcome))
        assert caught.value.cause == "already_recorded"
    assert job.history(first.key) == [first]
    with job.lock():
        assert len(job.recover().interrupted) == 2
    assert list(job.records()) == [first]


def test_a_result_from_before_a_change_makes_room(
    job: JobFolder, make_record: MakeRecord, publish_one: PublishOne
) -> None:
    old = publish_one(make_record())
    new = publish_one(make_record(task_digest="sha256:changed"))
    assert list(job.records()) == [new]
    assert job.folder_of(old.rollout_id).name == "1.changed-1"
    assert (job.history(old.key), job.history(new.key)) == ([old], [new])


def test_records_come_in_order_and_a_broken_one_is_named(
    job: JobFolder, make_record: MakeRecord, publish_one: PublishOne
) -> None:
    for attempt in (10, 2, 1):
        publish_one(make_record(attempt=attempt))
    assert [r.attempt for r in job.records()] == [1, 2, 10]
    broken = job.rollout_path(make_record(attempt=2).key) / "rollout.json"
    broken.write_bytes(b"{")
    with pytest.raises(HostError, match=str(broken)):
        list(job.records())
    seen: list[Path] = []
    assert [r.attempt for r in job.records(lambda path, error: seen.append(path))] == [1, 10]
    assert seen == [broken.parent]
    publish_one(make_record(attempt=2))
    assert [r.attempt for r in job.records()] == [1, 2, 10]
    assert broken.parent.with_name("2.broken-1").is_dir()


def test_a_rollout_that_is_not_there_is_not_found(job: JobFolder) -> None:
    with pytest.raises(NotFoundError):
        job.folder_of("nothing")


# --- recovery ------------------------------------------------------------------------------------


def test_what_a_killed_rollout_had_written_is_kept_without_its_disks(job: JobFolder) -> None:
    work = job.path / "work"
    with job.rollout("r1") as record:  # its block ends without publication, as after an error
        record.write("agent/out.txt", b"said so far")
        (record.scratch / "disk.img").write_bytes(b"disk")
        record.keep_disk()
    with job.rollout("r2"):
        pass
    (work / "r3" / "scratch").mkdir(parents=True)
    (work / "r3" / "scratch" / "disk.img").write_bytes(b"disk")
    (job.path / ".job.json.1234.tmp").write_bytes(b"half")
    with job.lock():
        assert job.recover().interrupted == ("r1",)
        assert job.recover() == type(job.recover())()
    assert list(work.iterdir()) == []
    assert (job.path / "interrupted" / "r1" / "agent" / "out.txt").read_bytes() == b"said so far"
    assert not (job.path / "interrupted" / "r1" / "disk.img").exists()
    assert not list(job.path.glob(".*.tmp"))


def test_a_sealed_rollout_is_rolled_forward(
    job: JobFolder, make_record: MakeRecord, publish_one: PublishOne
) -> None:
    earlier = publish_one(make_record(Outcome.INFRA_ERROR))
    record = make_record()
    with job.rollout(record.rollout_id) as work:
        work.write("f", b"x")
        sealed = seal(record, work.folder)  # and killed before the rename
    with job.lock():
        assert job.recover().published == (sealed,)
    assert job.history(record.key) == [earlier, sealed]


def test_a_sealed_rollout_that_was_damaged_does_not_count(job: JobFolder, make_record: MakeRecord) -> None:
    record = make_record()
    with job.rollout(record.rollout_id) as work:
        work.write("f", b"x")
        seal(record, work.folder)
        (work.folder / "f").write_bytes(b"")
    with job.lock():
        assert job.recover().interrupted == (record.rollout_id,)
    assert list(job.records()) == []


def test_records_are_loaded_from_where_they_are(
    job: JobFolder, make_record: MakeRecord, publish_one: PublishOne
) -> None:
    sealed = publish_one(make_record())
    moved = job.path.parent.rename(job.path.parent.with_name("moved"))
    assert list(JobFolder.open(moved, job.job_id).records()) == [sealed]
    assert load_record(JobFolder.open(moved, job.job_id).rollout_path(sealed.key)) == sealed
