"""What counts of a job, and that files and index say the same."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from dayfly.errors import ConfigError, HostError, NotFoundError
from dayfly.evidence import JobFolder
from dayfly.model import Outcome, Usage, Verdict, VerifierClass
from dayfly.results import Side, load_side, verify_evidence
from dayfly.stores import SqlStore

MARKS = {
    "coder": {"b": "PFTt", "a": "exiv", "org/c d": "PP..", "e": "...."},
    "oracle": {"a": "PPPP", "b": "PPPi", "org/c d": "PPPP", "e": "PPPP"},
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job counts as large, so that the index is asked."""
    monkeypatch.setattr("dayfly.results.load.FILES_UP_TO", 0)


def without_source(side: Side) -> Side:
    return dataclasses.replace(side, source="files", remarks=())


def test_a_side_holds_every_planned_task_and_attempt(make_job, tmp_path):
    make_job(MARKS, kinds={"oracle": "oracle"}, host={"cpus": "2"})
    side = load_side(tmp_path, "job")
    assert (side.agent, side.agent_digest, side.agent_kind) == ("coder", "sha256:coder", "command")
    assert (side.job_name, side.seed, side.attempts, side.source) == ("nightly", 7, 4, "files")
    assert side.agent_options == {"model": "m-coder"}
    assert side.host == {"cpus": "2"}
    assert {name: t.marks for name, t in side.tasks.items()} == {
        "a": "exiv",
        "b": "PFTt",
        "e": "....",
        "org/c d": "PP..",
    }
    assert list(side.tasks) == sorted(side.tasks)
    assert (side.planned, side.graded, side.faults, side.problems) == (16, 8, 2, ())
    assert (side.job_planned, side.job_graded) == (32, 8 + 15)
    b = side.tasks["b"]
    assert (b.reward_sum, b.seconds_sum, b.tokens_sum, b.cost_sum) == (2.0, 10.0, 410, 1.0)
    assert (b.verifier_digest, b.agent_limit_s, b.verifier_timeout_s) == ("sha256:judge-b", 60.0, 30.0)
    assert (b.machine, b.tags, b.metadata) == ((1, 256, 128), ("db",), {"repository": "r"})
    assert (b.isolation, b.verifier_classes, b.disk_digests) == (
        ("tcg",),
        (VerifierClass.SHARED,),
        ("sha256:disk",),
    )
    e = side.tasks["e"]
    assert (e.tokens_sum, e.cost_sum, e.isolation, e.verifier_classes) == (None, None, (), ())


def test_files_and_index_give_the_same_side(make_job, tmp_path, large, made):
    job = make_job(MARKS, kinds={"oracle": "oracle"}, index=False)
    odd = made.publish(
        job,
        made.record_of(
            "job", "org/c d", "coder", 3, "P", isolation="kvm", disk_digest="sha256:2", usage=Usage(tokens_in=1)
        ),
    )
    from_files = load_side(tmp_path, "job")
    assert from_files.source == "files"
    with SqlStore.open(tmp_path) as store:
        store.rebuild(tmp_path)
        assert odd.rollout_id in {r.rollout_id for r in store.iterate("job")}
    for attempts in (None, 1, 3, 9):
        from_index = load_side(tmp_path, "job", attempts=attempts)
        assert (from_index.source, from_index.remarks) == ("index", ())
        shutil.move(tmp_path / "index.db", tmp_path / "aside")
        from_files = load_side(tmp_path, "job", attempts=attempts)
        shutil.move(tmp_path / "aside", tmp_path / "index.db")
        assert from_files.source == "files"
        assert without_source(from_index) == without_source(from_files)
    c = load_side(tmp_path, "job").tasks["org/c d"]
    assert (c.isolation, c.disk_digests, c.tokens_sum) == (("kvm", "tcg"), ("sha256:2", "sha256:disk"), None)
    assert c.cost_sum is None


def test_rollouts_that_are_not_on_this_disk_come_from_the_index(make_job, tmp_path):
    make_job({"coder": {"a": "PF"}}, files=False)
    side = load_side(tmp_path, "job")
    assert (side.source, side.tasks["a"].marks) == ("index", "PF")
    assert side.remarks == ()
    (wrong, _) = verify_evidence(side)
    assert wrong.startswith("a/coder/1: ")


def test_an_index_out_of_step_is_not_believed(make_job, tmp_path, large, made):
    job = make_job({"coder": {"a": "Pi."}})
    assert load_side(tmp_path, "job").source == "index"
    made.publish(job, made.record_of("job", "a", "coder", 3, "F"))
    side = load_side(tmp_path, "job")
    assert (side.source, side.tasks["a"].marks) == ("files", "PiF")
    assert "lacks rollouts" in side.remarks[0] and "gc --reindex" in side.remarks[0]
    SqlStore.reindex(tmp_path)
    assert load_side(tmp_path, "job").source == "index"
    # A retry takes the place of what is there: the count is the same.
    made.publish(job, made.record_of("job", "a", "coder", 2, "P"))
    later = time.time() + 5
    os.utime(job.rollout_path(made.record_of("job", "a", "coder", 2, "P").key).parent, (later, later))
    side = load_side(tmp_path, "job")
    assert (side.source, side.tasks["a"].marks) == ("files", "PPF")
    assert "changed after" in side.remarks[0]


def test_a_damaged_index_is_passed_over_where_there_are_files(make_job, tmp_path, large):
    make_job({"coder": {"a": "P"}})
    (tmp_path / "index.db").write_bytes(b"no database" * 500)
    side = load_side(tmp_path, "job")
    assert (side.source, side.tasks["a"].marks) == ("files", "P")
    assert "was not used" in side.remarks[0]


def edit(path: Path, **fields: object) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | fields))


def test_a_changed_broken_or_foreign_record_does_not_count_and_is_told(make_job, tmp_path):
    job = make_job({"coder": {"a": "FFFF"}, "oracle": {"a": "PPPP"}}, kinds={"oracle": "oracle"})
    places = {n: job.path / f"rollouts/a/coder/{n}" for n in range(1, 5)}
    edit(places[1] / "rollout.json", outcome="passed", verdict={"reward": 1.0, "passed": True})
    (places[2] / "rollout.json").write_text("{")
    shutil.rmtree(places[3])
    shutil.copytree(places[4], places[3])
    (job.path / "rollouts/a/oracle/1/rollout.json").write_text("{")
    side = load_side(tmp_path, "job")
    assert side.tasks["a"].marks == "...F"
    assert len(side.problems) == 3
    assert "not as it was sealed" in side.problems[0]
    assert "JSON" in side.problems[1]
    assert "twice" in side.problems[2]
    assert side.job_graded == 1 + 3
    other = make_job({"coder": {"a": "P"}}, job_id="other")
    shutil.rmtree(places[1])
    shutil.copytree(other.path / "rollouts/a/coder/1", places[1])
    side = load_side(tmp_path, "job")
    assert side.tasks["a"].marks == "...F"
    assert any("of another job, other" in p for p in side.problems)


def test_only_what_the_lock_names_counts(make_job, tmp_path, large, made):
    job = make_job({"coder": {"a": "P", "b": "P"}}, index=False)
    made.publish(job, made.record_of("job", "removed", "coder", 1, "P"))
    made.publish(job, made.record_of("job", "a", "gone", 1, "P"))
    made.publish(job, made.record_of("job", "a", "coder", 2, "P"))
    lock = job.lock_data()
    lock["tasks"]["b"]["digest"] = "sha256:new"
    (job.path / "lock.json").write_text(json.dumps(lock))
    for source in ("files", "index"):
        side = load_side(tmp_path, "job")
        assert side.source == source
        assert {n: t.marks for n, t in side.tasks.items()} == {"a": "P", "b": "."}
        assert (side.job_graded, side.problems) == (1, ())
        SqlStore.reindex(tmp_path)


def test_evidence_that_changed_is_found(make_job, tmp_path):
    job = make_job({"coder": {"a": "PF"}})
    side = load_side(tmp_path, "job")
    assert verify_evidence(side) == []
    (job.path / "rollouts/a/coder/2/output.txt").write_bytes(b"other")
    (line,) = verify_evidence(side)
    assert line.startswith("a/coder/2: output.txt: recorded as")


@pytest.mark.parametrize(
    ("text", "agent"),
    [("job", "coder"), ("jo:coder", "coder"), ("last:oracle", "oracle"), ("job:a:b", "a:b")],
)
def test_the_agent_is_named_or_the_only_one(make_job, tmp_path, text, agent):
    marks = {"coder": {"a": "P"}, "oracle": {"a": "P"}}
    kinds = {"oracle": "oracle"}
    if agent == "a:b":
        marks["a:b"] = {"a": "F"}
        kinds["a:b"] = "no-op"
    make_job(marks, kinds=kinds)
    assert load_side(tmp_path, text).agent == agent


def test_a_job_by_its_folder(make_job, tmp_path):
    job = make_job({"coder": {"a": "P"}})
    elsewhere = tmp_path / "artifact:1" / "renamed"
    shutil.copytree(job.path, elsewhere)
    for text in (str(elsewhere), f"{elsewhere}:coder"):
        side = load_side(tmp_path / "nowhere", text)
        assert (side.job_id, side.tasks["a"].marks, side.problems) == ("renamed", "P", ())


def test_several_agents_and_none_are_errors_that_list_them(make_job, tmp_path):
    make_job({"one": {"a": "P"}, "two": {"a": "P"}})
    with pytest.raises(ConfigError, match="one, two"):
        load_side(tmp_path, "job")
    with pytest.raises(NotFoundError) as caught:
        load_side(tmp_path, "job:three")
    assert "one, two" in (caught.value.hint or "")
    with pytest.raises(NotFoundError, match="absent"):
        load_side(tmp_path, "absent:one")


def test_an_older_lock_has_empty_fields(make_job, tmp_path):
    job = make_job({"coder": {"a": "P"}})
    lock = job.lock_data()
    for key in ("verifier_digest", "tags", "metadata"):
        del lock["tasks"]["a"][key]
    (job.path / "lock.json").write_text(json.dumps(lock))
    task = load_side(tmp_path, "job").tasks["a"]
    assert (task.verifier_digest, task.tags, task.metadata) == ("", (), {})


def test_broken_job_files_are_named(make_job, tmp_path):
    job = make_job({"coder": {"a": "P"}})
    (job.path / "lock.json").write_text("{}")
    with pytest.raises(HostError, match="lacks"):
        load_side(tmp_path, "job")


def test_the_digest_names_the_results(make_job, tmp_path):
    make_job({"coder": {"a": "PF", "b": "PP"}}, job_id="one")
    make_job({"coder": {"b": "PP", "a": "PF"}}, job_id="two")
    make_job({"coder": {"a": "FP", "b": "PP"}}, job_id="three")
    one, two, three = (load_side(tmp_path, j).digest for j in ("one", "two", "three"))
    assert one == two != three
    assert one.startswith("sha256:")


def test_every_mark_is_of_one_outcome_and_contradictions_fail(made):
    record = made.record_of("job", "a", "coder", 1, "P")
    assert record.mark == "P"
    assert made.record_of("job", "a", "coder", 1, "x").mark == "x"
    wrong = record.model_copy(update={"verdict": Verdict(reward=0.0, passed=False)})
    assert wrong.mark == "F"
    assert record.model_copy(update={"outcome": Outcome.FAILED}).mark == "F"


def test_the_folder_of_baselines_is_no_job(make_job, tmp_path):
    make_job({"coder": {"a": "P"}})
    from dayfly.results.baseline import set_baseline

    set_baseline(tmp_path, "job", reason="first", name="job")
    assert load_side(tmp_path, "last").job_id == "job"
    assert isinstance(JobFolder.open(tmp_path, "job"), JobFolder)
