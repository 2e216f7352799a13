"""Signals, and following what goes on: real processes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from dayfly.process import PIPE, spawn

SLOW = "#!fake\nprint first\nsleep 1.5\nprint second\nwrite result.txt done\n"
SLOW_START = """\
import sys, threading
from dayfly.testing import FakeHypervisor

def make(settings):
    print("preparing", file=sys.stderr, flush=True)
    threading.Event().wait({seconds})
    return FakeHypervisor()
"""


def run_args(*more: str) -> tuple[str, ...]:
    return ("run", "tasks", "-a", "oracle", "--hypervisor", "fake", "--display", "plain", *more)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_preparing(make_task, start, tmp_path, number):
    make_task()
    (tmp_path / "slow_start.py").write_text(SLOW_START.format(seconds=1.5))
    process = start("run", "tasks", "-a", "oracle", "--hypervisor", "slow_start:make")
    assert b"job 'tasks'" in process.stderr.readline()
    assert process.stderr.readline() == b"preparing\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"nothing was run" in err and b"Traceback" not in err
    assert not Path("jobs").exists()


def test_ctrl_c_twice_while_preparing_waits_for_nothing(make_task, start, tmp_path):
    make_task()
    (tmp_path / "slow_start.py").write_text(SLOW_START.format(seconds=600))
    process = start("run", "tasks", "-a", "oracle", "--hypervisor", "slow_start:make", "--json")
    process.stderr.readline()
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert b"again leaves at once" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")


def test_ctrl_c_in_a_job_with_json_leaves_one_document(make_task, start, events_of, dayfly):
    make_task(solve=SLOW)
    process = start(*run_args("-k", "3", "-c", "1", "--json"))
    events_of("rollout_started")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    answer = json.loads(out)
    assert answer["interrupted"] is True
    assert f"dayfly run --resume {answer['id']}" in err.decode()
    assert dayfly("list", "--json").json["jobs"][0]["state"] == "incomplete"


def test_ctrl_c_in_check_says_nothing_of_the_task(make_task, start, events_of):
    make_task(solve=SLOW)
    process = start("check", "tasks", "--hypervisor", "fake", "-c", "1")
    events_of("rollout_started")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"nothing is said about these tasks" in err and b"Traceback" not in err


def test_following_a_job_and_one_of_its_rollouts(make_task, start, events_of, dayfly):
    """What is followed is complete, though the folder moves when the rollout ends; both followers end."""
    make_task("a", solve=SLOW)
    make_task("b", solve=SLOW)
    running = start(*run_args("-c", "1"))
    events_of("rollout_started")
    job = start("logs", "-f", "last")
    first = start("logs", "-f", "last/a/oracle/1", "--part", "agent")
    later = start("logs", "-f", "last/b/oracle/1")
    assert dayfly("list", "--json").json["jobs"][0]["state"] == "running"
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert b"1/2 passed" in out and b"2/2 passed" in out and b"ended" in out
    assert first.communicate(timeout=60)[0] == b"first\nsecond\n"
    assert later.communicate(timeout=60)[0] == b"first\nsecond\njudging\n"
    running.communicate(timeout=60)
    assert running.returncode == 0


def test_following_goes_over_to_the_next_start(make_task, start, events_of):
    make_task("warm", solve="#!fake\nsleep 1\nwrite result.txt done\n")
    make_task("x", solve="#!fake\nprint here\nsleep 0.4\ndie\n")
    start(*run_args("-c", "1"))
    events_of("rollout_started")
    follower = start("logs", "-f", "last/x/oracle/1", "--part", "agent")
    out, err = follower.communicate(timeout=60)
    assert out == b"here\n" * 3, "one line of each start"
    assert err.count(b"started again as") == 2


def test_what_a_running_rollout_has_said_so_far(make_task, start, events_of, dayfly):
    make_task(solve=SLOW.replace("1.5", "20"))
    process = start(*run_args())
    log = events_of("rollout_started")
    work = log.parent / "work"
    seen = dayfly("logs", "last/one/oracle/1", "--part", "agent")
    assert seen.code == 0 and seen.out in ("", "first\n")
    assert list(work.iterdir())
    done = dayfly("logs", "-f", "last/one/oracle/99")
    assert done.code == 2 and "one/oracle/99" in done.err
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_ctrl_c_in_a_follower(make_task, start, events_of):
    make_task(solve=SLOW.replace("1.5", "20"))
    start(*run_args())
    events_of("rollout_started")
    follower = start("logs", "-f", "last")
    assert b"job 2" in follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=60)
    assert (follower.returncode, err) == (130, b"")


INTERRUPTED = """\
from dayfly.cli import app, main

@app.command()
def late():
    raise KeyboardInterrupt  # as Python does when the signal comes after a job has stopped listening

main()
"""


def test_ctrl_c_that_nobody_listens_for_exits_130_too(tmp_path):
    process = spawn([sys.executable, "-c", INTERRUPTED, "late"], stdout=PIPE, stderr=PIPE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
