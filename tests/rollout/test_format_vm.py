"""The parts of the task format that only a real VM can show: steps in one VM, users, sizes, a judge's own VM."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayfly.evidence import JobFolder, verify_folder
from dayfly.model import Outcome

pytestmark = pytest.mark.vm

REWARD = "/logs/verifier/reward.txt"
HEAD = 'schema_version = "1.4"\n'
IMAGE = 'docker_image = "dayfly/demo-base:latest"\nworkdir = "/app"\ncpus = 1\nmemory_mb = 512\n'


@pytest.fixture
def write_task(tmp_path, base_disk):
    def write(toml: str, files: dict[str, str]) -> Path:
        folder = tmp_path / "tasks" / "one"
        for name, text in {"task.toml": toml, **files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return write


def evidence(tmp_path, record):
    return JobFolder.open(tmp_path / "jobs", record.job_id).rollout_path(record.key)


STEPS = """\
artifacts = ["/app/given"]
[environment]
storage_mb = 256
[environment.healthcheck]
command = "test $(id -u) = 0 && chmod 777 /app"   # as root, before the agent's user is taken
[agent]
timeout_sec = 60
user = "nobody"
[[steps]]
name = "start"
[steps.verifier]
timeout_sec = 60
user = "daemon"
[[steps]]
name = "apart"
[steps.agent]
user = 65534
[steps.verifier]
timeout_sec = 60
environment_mode = "separate"
env = { GIVEN = "${DAYFLY_TEST_GIVEN:-yes}" }
[[steps]]
name = "end"
min_reward = 1
[steps.verifier]
timeout_sec = 60
"""
LOOK = (
    "id -un; pwd; find /tests /logs/verifier /logs/agent -type f 2>/dev/null; cat setup-by 2>/dev/null; "
    "pgrep -x sleep >/dev/null && echo alive; "
    "[ -e /app/given ] || { setsid sleep 1000 >/dev/null 2>&1 & echo 1 > /app/given; echo 2 > /app/kept; }; "
    "mkdir /tests/mine /logs/verifier/mine 2>/dev/null; echo trace > /logs/agent/trace; exit 0"
)
RUNNING = (
    f"#!/bin/sh\nid -un\nls /tests | sort\npgrep -x sleep >/dev/null && [ -e /app/kept ] && echo 1 > {REWARD}\n"
    "touch /tests/left /logs/verifier/left 2>/dev/null; true\n"
)
APART = (
    "# a canary comes first, so nothing names the interpreter\n#!/bin/bash\n"
    f"[[ -n $BASH_VERSION ]] || exit\nid -un; pwd\nls /app\npgrep -x sleep >/dev/null && exit 0\n"
    f'[ "$(cat /app/given)" = 1 ] && [ ! -e /app/kept ] && [ "$GIVEN" = yes ] && echo 1 > {REWARD}\n'
)


def test_steps_share_a_vm_and_see_nothing_of_a_judge_before(write_task, run_job_on_vms, tmp_path):
    files = {f"steps/{n}/instruction.md": f"Do {n}.\n" for n in ("start", "apart", "end")} | {
        "tests/common": "c",
        "steps/start/tests/test.sh": RUNNING,
        "steps/start/tests/first": "1",
        "steps/apart/tests/test.sh": APART,
        "steps/apart/workdir/setup.sh": "id -un > setup-by\n",
        "steps/end/tests/test.sh": RUNNING,
    }
    write_task(HEAD + STEPS.replace("[environment]\n", f"[environment]\n{IMAGE}"), files)
    agent = {"name": "look", "kind": "command", "options": {"argv": ["/bin/sh", "-c", LOOK]}}
    (record,) = run_job_on_vms([agent]).records
    folder = evidence(tmp_path, record)
    outputs = {
        n: (folder / "steps" / n / "agent/stdout.txt").read_text().split() for n in ("start", "apart", "end")
    }
    log = "/logs/agent/instruction.md"
    assert outputs["start"] == ["nobody", "/app", log]
    assert outputs["apart"] == ["nobody", "/app", log, "nobody", "alive"]
    assert outputs["end"] == ["nobody", "/app", log, "nobody", "alive"]
    judged = {n: (folder / "steps" / n / "verifier/test-stdout.txt").read_text().split() for n in outputs}
    assert judged["start"] == ["daemon", "common", "first", "test.sh"]
    assert judged["apart"] == ["root", "/app", "given"]
    assert judged["end"] == ["root", "common", "test.sh"]
    assert record.outcome is Outcome.PASSED, record.cause
    assert [v.id[v.id.rindex("-") :] for v in record.vms] == ["-a", "-v"]
    assert [s.verifier_class.value for s in record.steps] == ["shared", "separate", "shared"]
    assert verify_folder(folder) == []


JUDGE = """\
[environment]
storage_mb = 128
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
user = "daemon"
environment_mode = "separate"
[verifier.environment]
docker_image = "dayfly/demo-base:latest"
cpus = 2
memory_mb = 768
storage_mb = 64
workdir = "/srv"
env = { ONLY = "here" }
[verifier.environment.healthcheck]
command = "id -un > /srv/checked-by; chmod 777 /srv"
[[verifier.collect]]
command = "echo collected > /app/by-hook"
service = "main"
[dayfly]
verify = ["/bin/sh", "-c", "id -un; pwd; nproc; cat checked-by /app/by-hook; echo $ONLY$WORK"]
"""


def test_a_judges_own_vm_and_a_disk_that_ends_where_the_task_says(write_task, run_job_on_vms, tmp_path):
    toml = f'artifacts = ["/app/by-hook"]\n{JUDGE}'.replace("[environment]\n", f"[environment]\n{IMAGE}", 1)
    toml = toml.replace("storage_mb = 128", 'storage_mb = 128\nenv = { WORK = "only" }')
    write_task(HEAD + toml, {"instruction.md": "Fill it.\n"})
    fill = "dd if=/dev/zero of=/app/fill bs=1M count=300 2>/dev/null; stat -c %s /app/fill; rm /app/fill"
    agent = {"name": "fill", "kind": "command", "options": {"argv": ["/bin/sh", "-c", fill]}}
    (record,) = run_job_on_vms([agent]).records
    folder = evidence(tmp_path, record)
    written = int((folder / "agent/stdout.txt").read_text())
    assert 64 << 20 < written < 128 << 20
    assert (folder / "verifier/test-stdout.txt").read_text().split() == [
        "daemon", "/srv", "2", "root", "collected", "here",
    ]  # fmt: skip
    assert record.outcome is Outcome.PASSED, record.cause
