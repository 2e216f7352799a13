"""Baselines move on purpose only, whole, and from complete results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dayfly.errors import ConfigError, HostError, NotFoundError
from dayfly.results import load_side
from dayfly.results.baseline import get_baseline, history, set_baseline


def files(jobs_dir: Path) -> list[str]:
    return sorted(p.name for p in (jobs_dir / "baselines").iterdir() if not p.name.startswith("."))


def test_a_baseline_is_set_shown_and_moved(make_job, tmp_path):
    make_job({"coder": {"a": "PF", "b": "PP"}, "oracle": {"a": "PP", "b": "PP"}}, kinds={"oracle": "oracle"})
    make_job({"coder": {"a": "PP", "b": "PP"}}, job_id="two")
    first = set_baseline(tmp_path, "job", reason=" release 1 ")
    assert (first.label, first.tasks, first.rollouts, first.reason) == ("job:coder", 2, 4, "release 1")
    assert (first.previous, first.results_digest) == (None, load_side(tmp_path, "job").digest)
    assert "@" in first.set_by
    assert load_side(tmp_path, "@main") == load_side(tmp_path, "@") == load_side(tmp_path, "job")
    assert load_side(tmp_path, "@main", attempts=1).tasks["a"].marks == "P"
    second = set_baseline(tmp_path, "two", reason="better")
    assert (second.previous, second.previous_digest) == ("job:coder", first.results_digest)
    assert get_baseline(tmp_path) == second
    assert history(tmp_path) == [first, second]
    set_baseline(tmp_path, "job", reason="another", name="nightly")
    assert files(tmp_path) == [
        "main.baseline.json",
        "main.history.jsonl",
        "nightly.baseline.json",
        "nightly.history.jsonl",
    ]


@pytest.mark.parametrize("marks", ["P.", "Pi", "Pv", ".."])
def test_only_complete_results_can_be_one(make_job, tmp_path, marks):
    make_job({"coder": {"a": marks, "b": "PP"}})
    with pytest.raises(ConfigError, match=r"of 4 planned rollouts are graded; missing in a") as caught:
        set_baseline(tmp_path, "job", reason="x")
    assert f"dayfly run --resume job --jobs-dir {tmp_path}" in (caught.value.hint or "")
    assert not (tmp_path / "baselines").exists()


def test_a_record_that_was_changed_keeps_a_job_from_being_one(make_job, tmp_path):
    job = make_job({"coder": {"a": "P"}})
    path = job.path / "rollouts/a/coder/1/rollout.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seed": 5}))
    with pytest.raises(ConfigError, match="not as it was sealed"):
        set_baseline(tmp_path, "job", reason="x")


def test_results_that_are_no_longer_what_was_set_are_refused(make_job, tmp_path):
    job = make_job({"coder": {"a": "PF"}})
    set_baseline(tmp_path, "job", reason="x")
    (job.path / "rollouts/a/coder/2").rename(job.path / "gone")
    with pytest.raises(ConfigError, match=r"baseline main was set to results sha256:.*, job job now holds sha256:"):
        load_side(tmp_path, "@main")
    (job.path / "gone").rename(job.path / "rollouts/a/coder/2")
    assert load_side(tmp_path, "@main").graded == 2


def test_a_baseline_moves_from_what_was_expected_only(make_job, tmp_path):
    make_job({"coder": {"a": "P"}}, job_id="one")
    make_job({"coder": {"a": "F"}}, job_id="two")
    with pytest.raises(ConfigError, match="does not exist yet"):
        set_baseline(tmp_path, "one", reason="x", expect="two")
    first = set_baseline(tmp_path, "one", reason="x", expect="none")
    for wrong in ("two", "on", "none", "one:other"):
        with pytest.raises(ConfigError, match="stands for one:coder") as caught:
            set_baseline(tmp_path, "two", reason="x", expect=wrong)
        assert caught.value.cause == "moved"
    assert history(tmp_path) == [first]
    for right in ("one", "two:coder", first.results_digest):
        target = "one" if right == "two:coder" else "two"
        set_baseline(tmp_path, target, reason="x", expect=right)
    assert get_baseline(tmp_path).job_id == "two"


@pytest.mark.parametrize(
    ("name", "reason", "text", "words"),
    [
        ("../main", "x", "job", "cannot be the name"),
        ("", "x", "job", "cannot be the name"),
        (".main", "x", "job", "cannot be the name"),
        ("main", "  ", "job", "without a reason"),
        ("main", "x", "@other", "is a baseline"),
    ],
)
def test_what_cannot_be_set(make_job, tmp_path, name, reason, text, words):
    make_job({"coder": {"a": "P"}})
    with pytest.raises(ConfigError, match=words):
        set_baseline(tmp_path, text, reason=reason, name=name)


def test_a_baseline_that_is_not_there_names_those_that_are(make_job, tmp_path):
    make_job({"coder": {"a": "P"}})
    with pytest.raises(NotFoundError) as caught:
        load_side(tmp_path, "@main")
    assert "dayfly baseline set" in (caught.value.hint or "")
    set_baseline(tmp_path, "job", reason="x", name="nightly")
    with pytest.raises(NotFoundError) as caught:
        get_baseline(tmp_path, "main")
    assert "nightly" in (caught.value.hint or "")
    (tmp_path / "baselines/nightly.baseline.json").write_text("{}")
    with pytest.raises(HostError, match="is not a baseline"):
        get_baseline(tmp_path, "nightly")


KILLED = """
import os, sys
from pathlib import Path
import dayfly.results.baseline as baseline
baseline.write_durable = lambda *a: os.kill(os.getpid(), 9)
baseline.set_baseline(Path(sys.argv[1]), "two", reason="killed")
"""


def test_a_move_that_was_killed_half_way_did_not_happen(make_job, tmp_path):
    make_job({"coder": {"a": "P"}}, job_id="one")
    make_job({"coder": {"a": "F"}}, job_id="two")
    first = set_baseline(tmp_path, "one", reason="x")
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(argv, timeout=60, check=False).returncode == -9
    assert get_baseline(tmp_path) == first
    assert history(tmp_path) == [first]
    with (tmp_path / "baselines/main.history.jsonl").open("ab") as log:
        log.write(b'{"name": "ma')  # torn
    second = set_baseline(tmp_path, "two", reason="again", expect="one")
    assert history(tmp_path) == [first, second]


def test_of_two_processes_that_expect_the_same_one_moves_it(make_job, tmp_path):
    make_job({"coder": {"a": "P"}}, job_id="one")
    make_job({"coder": {"a": "F"}}, job_id="two")
    make_job({"coder": {"a": "t"}}, job_id="three")
    set_baseline(tmp_path, "one", reason="x")
    argv = [sys.executable, "-m", "dayfly.cli", "baseline", "set", "--reason", "race", "--expect", "one"]
    argv += ["--jobs-dir", str(tmp_path)]
    racing = [
        subprocess.Popen([*argv, job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
        for job in ("two", "three")
    ]
    ended = [(p.communicate(timeout=120)[1].decode(), p.returncode) for p in racing]
    assert sorted(code for _, code in ended) == [0, 2], ended
    winner = ("two", "three")[[code for _, code in ended].index(0)]
    assert get_baseline(tmp_path).job_id == winner
    assert [m.job_id for m in history(tmp_path)] == ["one", winner]


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dayfly.cli", "baseline", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_commands(make_job, tmp_path):
    job = make_job({"coder": {"a": "P"}})
    where = ("--jobs-dir", str(tmp_path))
    done = cli("set", "job", "--reason", "rel\x1b[31mease", *where, "--json")
    assert (done.returncode, json.loads(done.stdout)["baseline"]["job_id"]) == (0, "job")
    shown = cli("show", *where)
    assert shown.returncode == 0
    assert "job" in shown.stdout and "coder" in shown.stdout and "\x1b[31m" not in shown.stdout
    moves = json.loads(cli("history", *where, "--json").stdout)["moves"]
    assert [m["agent"] for m in moves] == ["coder"]
    assert "job:coder" in cli("history", *where).stdout
    (job.path / "rollouts/a/coder/1").rename(tmp_path / "gone")
    shown = cli("show", *where, "--json")
    assert (shown.returncode, json.loads(shown.stdout)["baseline"]["job_id"]) == (2, "job")
    assert "now holds" in shown.stderr
