"""Whole rollouts on real VMs: equal starts, nothing left, hostile agents."""

from __future__ import annotations

import json
import os
import stat

import anyio
import pytest

from dayfly.check import check_tasks
from dayfly.evidence import JobFolder, verify_folder
from dayfly.job import parse_job, run_job
from dayfly.model import Outcome
from dayfly.tasks import load_task

pytestmark = pytest.mark.vm


def shell_agent(name, script, **options):
    """A command agent that is one shell script."""
    return {"name": name, "kind": "command", "options": {"argv": ["/bin/sh", "-c", script], **options}}


LOOK = (
    "echo processes; ps -eo comm= | sort -u; echo ports; tail -n +2 /proc/net/tcp | awk '{print $2}'; "
    "echo files; ls -A /tmp /var/spool/cron 2>/dev/null; echo etc; cat /etc/motd 2>/dev/null; "
    "echo free; df --output=avail /app | tail -1"
)
MESS = (
    "echo mine > /tmp/left; echo changed > /etc/motd; echo done > /app/result.txt; mkdir -p /var/spool/cron; "
    "echo '* * * * * root touch /tmp/cron' > /var/spool/cron/root; "
    "setsid python3 -m http.server 9999 >/dev/null 2>&1 & "
    "head -c 900000000 /dev/zero > /tmp/fill 2>/dev/null; true"
)


def evidence(tmp_path, result, agent, attempt=1):
    folder = JobFolder.open(tmp_path / "jobs", result.job_id)
    record = next(r for r in result.records if r.agent == agent and r.attempt == attempt)
    return record, folder.rollout_path(record.key)


def test_a_rollout_sees_nothing_of_another_and_all_start_equal(make_task, run_job_on_vms, tmp_path):
    """The issue's point 2, fault 6: files, a daemon, a cron entry, a changed /etc, a filled disk."""
    make_task()
    before = run_job_on_vms([shell_agent("look", LOOK)])
    messy = run_job_on_vms([shell_agent("mess", MESS)])
    after = run_job_on_vms([shell_agent("look", LOOK)], attempts=2, concurrency=2)
    mess_record, _ = evidence(tmp_path, messy, "mess")
    assert mess_record.outcome is Outcome.DISK_FULL
    _, first = evidence(tmp_path, before, "look")
    wanted = (first / "agent/stdout.txt").read_bytes()
    assert b"http" not in wanted and b"mine" not in wanted
    for attempt in (1, 2):
        _, place = evidence(tmp_path, after, "look", attempt)
        assert (place / "agent/stdout.txt").read_bytes() == wanted
    records = [*before.records, *messy.records, *after.records]
    assert len({r.start_fingerprint.digest for r in records}) == 1
    ids = [v.id for r in records for v in r.vms]
    assert len(ids) == len(set(ids))


def test_a_start_that_differs_is_reported_by_check(make_task, tmp_path):
    make_task(
        environment='[environment.healthcheck]\ncommand = "head -c 8 /dev/urandom | od -An -tx1 > /app/token"\n'
    )
    task = load_task(tmp_path / "tasks/write-result", strict=True)
    settings = parse_job({"tasks": ["."], "agents": ["no-op"]}, "test")
    (report,) = anyio.run(lambda: check_tasks([task], settings, 2, tmp_path / "jobs", run_job))
    assert not report.fit
    assert any("do not start equal" in p and "files" in p for p in report.problems)


REPOSITORY = (
    "git init -q -b main /app/r; cd /app/r; git config user.email a@b.example; git config user.name a; "
    "export GIT_AUTHOR_DATE=2020-01-01T00:00:00Z GIT_COMMITTER_DATE=2020-01-01T00:00:00Z; "
    "echo bug > f; git add f; git commit -qm broken; echo good > f; git commit -qam 'the fix'; "
)
LEAKS = {
    "tag": "git tag v2; git reset -q --hard HEAD~1; git reflog expire --expire=now --all",
    "reflog": "git reset -q --hard HEAD~1",
    "unreachable": "git reset -q --hard HEAD~1; git reflog expire --expire=now --all",
    "no git in the image": "git tag v2; git reset -q --hard HEAD~1; rm /usr/bin/git",
    "none": "git reset -q --hard HEAD~1; git reflog expire --expire=now --all; git gc -q --prune=now",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_check_finds_the_answer_in_a_repository(make_task, tmp_path, leak):
    """Fault 1: the fixing commit by a tag, by the reflog, as an unreachable object."""
    folder = make_task()
    (folder / "environment/setup.sh").write_text(REPOSITORY + LEAKS[leak] + "\n")
    text = (folder / "task.toml").read_text()
    hook = '[environment.healthcheck]\ncommand = "[ -d /app/r ] || sh /app/setup.sh"\ntimeout_sec = 120\n[dayfly]'
    (folder / "task.toml").write_text(text.replace("[dayfly]", hook))
    task = load_task(folder, strict=True)
    settings = parse_job({"tasks": ["."], "agents": ["no-op"], "retries": 0}, "test")
    (report,) = anyio.run(lambda: check_tasks([task], settings, 2, tmp_path / "jobs", run_job))
    found = [p for p in report.problems if "commit" in p]
    assert bool(found) is (leak != "none"), report.problems
    assert all("/app/r" in p and "the fix" in p for p in found)


def test_check_finds_a_task_fit_and_its_strictest_class(make_task, tmp_path):
    make_task(top='[[artifacts]]\nsource = "/app/result.txt"\n')
    task = load_task(tmp_path / "tasks/write-result", strict=True)
    settings = parse_job({"tasks": ["."], "agents": ["no-op"]}, "test")
    (report,) = anyio.run(lambda: check_tasks([task], settings, 2, tmp_path / "jobs", run_job))
    assert report.fit, report.problems
    assert report.strictest == "separate"


@pytest.mark.parametrize("verifier_class", ["shared", "rebooted", "separate"])
def test_evidence_of_a_real_rollout(make_task, run_job_on_vms, tmp_path, verifier_class):
    make_task(verifier_class=verifier_class, top='[[artifacts]]\nsource = "/app/result.txt"\n')
    result = run_job_on_vms(["oracle"])
    record, place = evidence(tmp_path, result, "oracle")
    assert record.outcome is Outcome.PASSED, record.cause
    assert verify_folder(place) == []
    changed = {c["path"]: c for c in json.loads((place / "changes.json").read_bytes())}
    assert changed["/app/result.txt"]["digest"].startswith("sha256:")
    assert (place / "artifacts/app/result.txt").read_bytes() == b"done\n"
    assert record.isolation in ("kvm", "tcg")
    assert record.verifier_class == verifier_class
    assert record.usage.memory_peak_bytes > 0
    assert len(record.vms) == (1 if verifier_class == "shared" else 2)
    for vm in record.vms:
        assert vm.argv and any("qemu" in word for word in vm.argv)
        assert abs(vm.clock_error_s) < 0.5
        if vm.how == "fork":
            assert vm.template
    for path in place.rglob("*"):
        info = path.lstat()
        assert info.st_uid == os.getuid()
        assert not stat.S_IMODE(info.st_mode) & 0o077 or path.is_symlink(), path


def test_a_user_of_the_task_can_write_its_logs(make_task, run_job_on_vms, tmp_path):
    """Fault 22."""
    make_task(agent='user = "12345"\n', solve="#!/bin/sh\nid -u > /logs/agent/who.txt; exit 0\n")
    result = run_job_on_vms(["oracle"])
    record, place = evidence(tmp_path, result, "oracle")
    assert record.outcome is Outcome.FAILED
    assert (place / "agent/logs/who.txt").read_text() == "12345\n"


@pytest.mark.parametrize("verifier_class", ["shared", "rebooted", "separate"])
def test_after_the_deadline_nothing_is_written(make_task, run_job_on_vms, tmp_path, verifier_class):
    """Fault 32: an agent that ignores TERM, forks, and rewrites the answer for ever."""
    make_task(
        verifier_class=verifier_class,
        agent_timeout=4,
        top='[[artifacts]]\nsource = "/app/result.txt"\n',
        test="#!/bin/sh\na=$(cat /app/result.txt); sleep 3; b=$(cat /app/result.txt)\n"
        '[ -n "$a" ] && [ "$a" = "$b" ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    )
    script = (
        "trap '' TERM INT HUP; "
        "cd /app; (setsid sh -c 'trap \"\" TERM; while :; do date +%s%N > n; mv n result.txt; sleep 0.2; done' &); "
        "while :; do date +%s%N > m; mv m result.txt; sleep 0.2; done"
    )
    result = run_job_on_vms([shell_agent("stubborn", script)])
    record, _ = evidence(tmp_path, result, "stubborn")
    assert record.outcome is Outcome.AGENT_TIMEOUT
    assert record.reward == 1.0, "the answer did not change while the verifier looked at it"


def test_out_of_memory_ends_the_rollout_as_such(make_task, run_job_on_vms, tmp_path):
    """Fault 38: killed for memory, and the agent goes on."""
    make_task()
    hog = "python3 -c 'x=[]\nwhile True: x.append(bytearray(10000000))'; echo done > /app/result.txt"
    result = run_job_on_vms([shell_agent("hog", hog)])
    record, _ = evidence(tmp_path, result, "hog")
    assert record.outcome is Outcome.SANDBOX_OOM
    assert record.usage.memory_peak_bytes > 200 * 2**20
    assert len({v.id for v in record.vms}) == len(record.vms)


PLANT = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
SYMLINK = (
    "mkdir -p /tmp/mine; echo 1 > /tmp/mine/reward.txt; rm -rf /logs/verifier; ln -s /tmp/mine /logs/verifier; "
)
LOOP = (
    "(setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' "
    ">/dev/null 2>&1 &) ; sleep 0.3"
)


@pytest.mark.parametrize("verifier_class", ["shared", "rebooted", "separate"])
@pytest.mark.parametrize("script", [PLANT, SYMLINK, LOOP], ids=["file", "symlink", "loop"])
def test_a_planted_verdict_is_tampered(make_task, run_job_on_vms, tmp_path, verifier_class, script):
    """Fault 39."""
    make_task(verifier_class=verifier_class, top='[[artifacts]]\nsource = "/app/result.txt"\n')
    result = run_job_on_vms([shell_agent("planter", script)])
    record, _ = evidence(tmp_path, result, "planter")
    assert record.outcome is Outcome.TAMPERED
    assert record.reward is None


def test_a_process_left_behind_cannot_see_or_reach_the_verifier(make_task, run_job_on_vms, tmp_path):
    """In `shared`, the agent's processes live on; they look for tests and verdict everywhere they can."""
    spy = (
        "(setsid sh -c 'while :; do for p in /proc/[0-9]*; do "
        "ls $p/root/tests/test.sh >> /app/seen 2>/dev/null; echo 1 2>/dev/null > $p/root/logs/verifier/reward.txt; "
        "grep -l test.sh $p/cmdline >> /app/seen 2>/dev/null; done; ls /tests >> /app/seen 2>/dev/null; done' "
        ">/dev/null 2>&1 &) ; sleep 0.2"
    )
    make_task(
        verifier_class="shared",
        test="#!/bin/sh\nsleep 3\necho 0 > /logs/verifier/reward.txt\n"
        "grep -v '^/proc/[0-9]*/cmdline' /app/seen > /logs/verifier/seen; true\n",
    )
    result = run_job_on_vms([shell_agent("spy", spy)])
    record, place = evidence(tmp_path, result, "spy")
    assert record.outcome is Outcome.FAILED
    assert (place / "verifier/logs/seen").read_bytes() == b""


def test_a_running_server_is_graded_in_shared(make_task, run_job_on_vms, tmp_path):
    make_task(
        verifier_class="shared",
        solve="#!/bin/sh\ncd /app && echo hello > index.html\n"
        "setsid python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &\n"
        "until grep -q :1F40 /proc/net/tcp; do sleep 0.2; done\n",
        test='#!/bin/sh\npython3 -c "import urllib.request as u; '
        "print(u.urlopen('http://127.0.0.1:8000/index.html').read())\" | grep -q hello && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
    )
    result = run_job_on_vms(["oracle", "no-op"])
    assert {r.agent: r.outcome for r in result.records} == {
        "oracle": Outcome.PASSED,
        "no-op": Outcome.FAILED,
    }


def test_permissions_cross_into_a_separate_verifier(make_task, run_job_on_vms):
    make_task(
        verifier_class="separate",
        top='[[artifacts]]\nsource = "/app/keys"\n',
        solve="#!/bin/sh\nmkdir -m 750 /app/keys; cd /app/keys; echo k > id; chmod 640 id; chown 1000:1000 id\n",
        test="#!/bin/sh\ncd /app/keys\n"
        "[ \"$(stat -c '%a %u' id) $(stat -c %a .)\" = '640 1000 750' ] && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
    )
    (record,) = run_job_on_vms(["oracle"]).records
    assert record.outcome is Outcome.PASSED
