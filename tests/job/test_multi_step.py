"""Multi-step tasks on the fake hypervisor: one VM for the agent, a verdict per step, one reward."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dayfly.cli import app
from dayfly.errors import TaskError
from dayfly.evidence import JobFolder, verify_folder
from dayfly.model import Machine, Options, Outcome, RolloutRecord, VerifierClass
from dayfly.rollout import room_for, vm_lifetime_s
from dayfly.rollout.limits import verifier_setup_limit_s
from dayfly.tasks import load_task

HEAD = """\
schema_version = "1.4"
{top}
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
"""
REWARD = "/logs/verifier/reward.txt"
NAMED = "/logs/verifier/reward.json"


def judge(reward: str) -> str:
    return f"#!fake\nwrite {REWARD} {reward}\n"


@pytest.fixture
def make_steps(tmp_path: Path) -> Callable[..., Path]:
    """A task of the steps named in `steps`: name → lines of its table. `files` adds to or replaces the rest."""

    def make(steps: dict[str, str], files: dict[str, str] | None = None, top: str = "", tail: str = "") -> Path:
        folder = tmp_path / "tasks" / "walk"
        toml = HEAD.format(top=top) + tail
        everything = {}
        for name, table in steps.items():
            toml += f'\n[[steps]]\nname = "{name}"\n{table}\n'
            everything[f"steps/{name}/instruction.md"] = f"Do {name}.\n"
            everything[f"steps/{name}/solution/solve.sh"] = f"#!fake\nwrite {name}.txt done\n"
            everything[f"steps/{name}/tests/test.sh"] = judge("1")
        for path, text in {"task.toml": toml, **everything, **(files or {})}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make


@pytest.fixture
def run_steps(plan_job, run_fake) -> Callable[..., RolloutRecord]:
    def run(agent: Any = "oracle", **options: Any) -> RolloutRecord:
        plan = plan_job([agent], retries=0)
        plan.new[:] = [s.model_copy(update={"options": s.options.model_copy(update=options)}) for s in plan.new]
        (record,) = run_fake(plan).records
        return record

    return run


def place(tmp_path: Path, record: RolloutRecord) -> Path:
    return JobFolder.open(tmp_path / "jobs", record.job_id).rollout_path(record.key)


def test_the_steps_share_a_vm_and_each_has_its_verdict_and_its_evidence(make_steps, run_steps, tmp_path):
    make_steps(
        {"one": "", "two": ""},
        {
            "steps/two/solution/solve.sh": "#!fake\nexpect one.txt done\nprint second\nwrite two.txt done\n",
            "steps/two/tests/test.sh": f"#!fake\nexpect /app/two.txt done\nprint judged\nwrite {REWARD} 1\n",
        },
    )
    record = run_steps()
    assert record.outcome is Outcome.PASSED and record.reward == 1.0
    assert [v.id[-2:] for v in record.vms] == ["-a"]
    assert [(s.name, s.verdict.reward, s.exit_code, s.causes) for s in record.steps] == [
        ("one", 1.0, 0, ()),
        ("two", 1.0, 0, ()),
    ]
    assert record.steps[0].finished_unix <= record.steps[1].started_unix
    folder = place(tmp_path, record)
    assert (folder / "steps/two/agent/stdout.txt").read_text() == "second\n"
    assert (folder / "steps/two/verifier/test-stdout.txt").read_text() == "judged\n"
    for name in ("changes.json", "start-files.json", "artifacts/manifest.json"):
        assert (folder / "steps/one" / name).exists() and not (folder / name).exists()
    assert verify_folder(folder) == []
    verifying = [(t.name, t.step) for t in record.phases if t.name in ("agent", "collect", "verify")]
    assert verifying == [(n, s) for s in ("one", "two") for n in ("agent", "collect", "verify")]


@pytest.mark.parametrize(
    ("strategy", "rewards", "reward", "outcome"),
    [
        ("", ("1", "0.5", "0"), 0.5, Outcome.FAILED),
        ("mean", ("1", "1", "1"), 1.0, Outcome.PASSED),
        ("final", ("0", "0.25", "1"), 1.0, Outcome.PASSED),
        ("final", ("1", "1", "0.25"), 0.25, Outcome.FAILED),
    ],
)
def test_the_strategy_makes_one_reward(make_steps, run_steps, strategy, rewards, reward, outcome):
    names = ("a", "b", "c")
    files = {f"steps/{n}/tests/test.sh": judge(r) for n, r in zip(names, rewards, strict=True)}
    make_steps(dict.fromkeys(names, ""), files, f'multi_step_reward_strategy = "{strategy}"' if strategy else "")
    record = run_steps()
    assert (record.outcome, record.reward) == (outcome, reward)


@pytest.mark.parametrize(
    ("wanted", "script", "goes_on"),
    [
        ("0.5", judge("0.5"), True),
        ("0.5", judge("0.4"), False),
        ("{ style = 0.5 }", f'#!fake\nwrite {NAMED} \'{{"reward": 1, "style": 0.5}}\'\n', True),
        ("{ style = 0.5 }", judge("1"), False),  # a missing reward is below any
    ],
)
def test_a_step_below_its_least_reward_is_the_last(make_steps, run_steps, wanted, script, goes_on):
    make_steps({"one": f"min_reward = {wanted}", "two": ""}, {"steps/one/tests/test.sh": script})
    record = run_steps()
    assert [s.name for s in record.steps] == (["one", "two"] if goes_on else ["one"])
    assert ("stopped" in record.verdict.details) is not goes_on
    if not goes_on:
        assert record.outcome is Outcome.FAILED  # whatever the number says, the task was not done
        assert "min_reward" in record.verdict.details["stopped"] or "reward" in record.verdict.details["stopped"]


def test_tests_of_a_step_lie_over_the_shared_ones(make_steps, run_steps):
    looks = f"#!fake\nexpect /tests/expected %s\nexpect /tests/shared s\nwrite {REWARD} 1\n"
    folder = make_steps(
        {"one": "", "two": ""},
        {
            "tests/test.sh": looks % "1",
            "tests/expected": "0\n",
            "tests/shared": "s\n",
            "steps/one/tests/expected": "1\n",
            "steps/two/tests/test.sh": looks % "0",
        },
    )
    (folder / "steps/one/tests/test.sh").unlink()
    assert run_steps().outcome is Outcome.PASSED


def test_shared_tests_alone_are_enough(make_steps, run_steps, tmp_path):
    folder = make_steps({"one": "", "two": ""}, {"tests/test.sh": judge("1")})
    for name in ("one", "two"):
        (folder / f"steps/{name}/tests/test.sh").unlink()
    assert run_steps().outcome is Outcome.PASSED


def test_a_steps_files_and_its_setup_come_before_the_agent(make_steps, run_steps, tmp_path):
    make_steps(
        {"one": "", "two": "[steps.healthcheck]\ncommand = '/app/ready'"},
        {
            "steps/one/workdir/data.txt": "d\n",
            "steps/two/workdir/setup.sh": "#!fake\nprint prepared\nexpect one.txt done\nwrite made.txt up\n",
            "steps/two/workdir/ready": "#!fake\nexpect /app/made.txt up\n",
            "steps/one/solution/solve.sh": "#!fake\nexpect data.txt d\nwrite one.txt done\n",
            "steps/two/solution/solve.sh": "#!fake\nexpect made.txt up\n",
        },
    )
    record = run_steps()
    assert record.outcome is Outcome.PASSED, record.cause
    assert (place(tmp_path, record) / "steps/two/setup.txt").read_text() == "prepared\n"


def test_a_first_step_that_cannot_be_prepared_is_no_fault_of_the_agent(make_steps, run_steps):
    make_steps({"one": "", "two": ""}, {"steps/one/workdir/setup.sh": "#!fake\nexit 3\n"})
    record = run_steps()
    assert record.outcome is Outcome.INFRA_ERROR and record.cause.kind == "step_setup_failed"
    assert record.reward is None and "status 3" in record.cause.message


@pytest.mark.parametrize("setup", ["exit 3", "sleep 60"])
def test_a_later_step_that_cannot_be_prepared_ends_the_task_and_is_graded(make_steps, run_steps, setup):
    """Else an agent could have every unwelcome rollout started again by breaking what a set-up needs."""
    make_steps({"one": "", "two": ""}, {"steps/two/workdir/setup.sh": f"#!fake\n{setup}\n"})
    record = run_steps(**({"setup_timeout_s": 0.3} if "sleep" in setup else {}))
    assert record.outcome is Outcome.AGENT_ERROR and record.cause.kind == "step_setup_failed"
    assert record.graded and record.reward == 1.0 and not record.verdict.passed
    assert [(s.name, s.verdict is None) for s in record.steps] == [("one", False), ("two", True)]


def test_a_timeout_in_one_step_does_not_keep_the_next_from_being_done(make_steps, run_steps):
    make_steps(
        {"one": "agent.timeout_sec = 0.2", "two": ""},
        {"steps/one/solution/solve.sh": "#!fake\nwrite one.txt done\nsleep 60\n"},
    )
    record = run_steps()
    assert record.outcome is Outcome.AGENT_TIMEOUT and record.reward == 1.0
    assert [(s.timed_out, [c.kind for c in s.causes]) for s in record.steps] == [(True, ["timeout"]), (False, [])]


def test_without_a_verdict_in_a_step_nothing_is_graded(make_steps, run_steps):
    make_steps({"one": "", "two": ""}, {"steps/one/tests/test.sh": "#!fake\nprint oops\n"})
    record = run_steps()
    assert record.outcome is Outcome.VERIFIER_ERROR and record.reward is None and record.verdict is None
    assert [s.name for s in record.steps] == ["one"]


def test_a_planted_verdict_in_any_step_is_tampering(make_steps, run_steps):
    make_steps(
        {"one": "", "two": "", "three": ""},
        {"steps/two/solution/solve.sh": f"#!fake\nwrite {REWARD} 1\n"},
        tail="[verifier]\nenvironment_mode = 'separate'\n",
    )
    record = run_steps()
    assert record.outcome is Outcome.TAMPERED and record.reward is None
    assert [s.name for s in record.steps] == ["one", "two"]


def test_a_separate_verifier_is_fresh_in_every_step(make_steps, run_steps):
    seen = f"#!fake\nwrite {REWARD} 0\nexpect /app/out.txt %s\nwrite {REWARD} 1\nwrite /app/left behind\n"
    make_steps(
        {"one": "", "two": "artifacts = ['/app/left']"},
        {
            "steps/one/solution/solve.sh": "#!fake\nwrite out.txt 1\nwrite secret.txt x\n",
            "steps/two/solution/solve.sh": "#!fake\nexpect secret.txt x\nwrite out.txt 2\n",
            "steps/one/tests/test.sh": seen % "1",
            "steps/two/tests/test.sh": seen % "2",
        },
        top='artifacts = ["/app/out.txt"]',
        tail="[verifier]\nenvironment_mode = 'separate'\n",
    )
    record = run_steps()
    assert record.outcome is Outcome.PASSED, record.cause
    assert [v.id[v.id.rindex("-") :] for v in record.vms] == ["-a", "-v", "-v2"]
    assert record.verifier_class is VerifierClass.SEPARATE


def test_steps_may_differ_in_their_verifier(make_steps, run_steps):
    make_steps(
        {"one": "verifier.environment_mode = 'separate'", "two": "verifier.env = { A = '2' }", "three": ""},
        {
            "steps/two/tests/test.sh": f"#!fake\nenv A\nenv B\nwrite {REWARD} 1\n",
            "steps/one/tests/test.sh": judge("1"),
        },
        tail="[verifier]\nenv = { A = '1', B = '1' }\n",
    )
    record = run_steps()
    assert [s.verifier_class.value for s in record.steps] == ["separate", "shared", "shared"]
    assert record.verifier_class is VerifierClass.SHARED  # the weakest


def test_what_agents_logged_is_kept_by_step(make_steps, run_steps, tmp_path):
    make_steps(
        {"one": "", "two": ""},
        {
            "steps/one/solution/solve.sh": "#!fake\nwrite /logs/agent/log.txt first\n",
            "steps/two/solution/solve.sh": "#!fake\nwrite /logs/agent/other.txt second\n",
        },
    )
    folder = place(tmp_path, run_steps())
    assert (folder / "steps/one/agent/logs/log.txt").read_text() == "first\n"
    assert [p.name for p in (folder / "steps/two/agent/logs").iterdir()] == ["other.txt"]


def test_artifacts_of_the_task_and_of_the_step_are_kept_with_it(make_steps, run_steps, tmp_path):
    make_steps({"one": "artifacts = ['one.txt']", "two": ""}, top="artifacts = ['/app/two.txt']")
    folder = place(tmp_path, run_steps())
    assert (folder / "steps/one/artifacts/app/one.txt").read_text() == "done\n"
    assert not (folder / "steps/one/artifacts/app/two.txt").exists()
    assert (folder / "steps/two/artifacts/app/two.txt").read_text() == "done\n"


def test_rebooted_is_refused_by_name_before_anything_starts(make_steps, plan_job):
    make_steps({"one": ""})
    with pytest.raises(TaskError, match="cannot be judged as rebooted"):
        plan_job(["oracle"], verifier_class="rebooted")


def test_limits_count_every_step(make_steps):
    task = load_task(
        make_steps({"a": "agent.timeout_sec = 100", "b": "agent.timeout_sec = 50\nverifier.timeout_sec = 7"}),
        strict=True,
    )
    options = Options()
    assert task.agent_timeout_s == 150 and task.verifier_timeout_s == 607
    assert vm_lifetime_s(options, task) > 150 + 607 + 2 * options.collect_timeout_s
    assert room_for(options, task) is None


def test_limits_count_the_verifiers_that_are_waited_for(make_steps):
    slow = "[verifier.environment.healthcheck]\ncommand = 'x'\ntimeout_sec = 1000\nretries = 5\n"
    judged = load_task(make_steps({"a": "", "b": "", "c": ""}, tail=slow), strict=True)
    alone = judged.model_copy(update={"steps": judged.steps[:1]})
    options = Options()
    assert verifier_setup_limit_s(options, judged.steps[0]) > 5 * 1000
    assert vm_lifetime_s(options, judged) > vm_lifetime_s(options, alone) + 2 * 5 * 1000


def test_room_is_asked_for_the_verifier_beside_the_agent(make_steps):
    judged = "[verifier.environment]\nmemory_mb = 512\nstorage_mb = 64\n"
    task = load_task(make_steps({"a": "", "b": ""}, tail=judged), strict=True)
    assert room_for(Options(), task) == Machine(memory_mib=256 + 512, storage_mib=128 + 64)
    assert task.machines == (task.machine, Machine(memory_mib=512, storage_mib=64))
    last_only = task.model_copy(update={"steps": task.steps[:1]})
    assert room_for(Options(), last_only) == Machine(memory_mib=512, storage_mib=128 + 64)


@pytest.mark.parametrize(("artifacts", "strictest"), [("", "shared"), ("/app/one.txt", "separate")])
def test_check_finds_the_strictest_class_and_leaves_rebooted_out(make_steps, tmp_path, artifacts, strictest):
    seen = f"#!fake\nwrite {REWARD} 0\nexpect /app/one.txt done\nwrite {REWARD} 1\n"
    folder = make_steps(
        {"one": "", "two": ""},
        {"steps/one/tests/test.sh": seen, "steps/two/tests/test.sh": seen},
        top=f"artifacts = ['{artifacts}']" if artifacts else "",
    )
    found = CliRunner().invoke(
        app, ["check", str(folder), "--hypervisor", "fake", "--jobs-dir", str(tmp_path / "jobs"), "--json"]
    )
    (report,) = json.loads(found.stdout)["tasks"]
    assert (found.exit_code, report["fit"], report["strictest_verifier_class"]) == (0, True, strictest), report


def test_show_lists_the_steps(make_steps, run_steps, tmp_path):
    make_steps({"one": "", "two": ""}, {"steps/two/solution/solve.sh": "#!fake\nexit 3\n"})
    record = run_steps()
    found = CliRunner().invoke(app, ["show", record.rollout_id, "--jobs-dir", str(tmp_path / "jobs")])
    assert re.search(r"^one +1 ", found.stdout, re.M) and re.search(r"^two +1 .*status 3", found.stdout, re.M)
    assert re.search(r"^verify two ", found.stdout, re.M)


def test_logs_print_what_each_step_put_out_in_order(make_steps, run_steps, tmp_path):
    names = ("b", "a", "c")
    make_steps(dict.fromkeys(names, ""), {f"steps/{n}/solution/solve.sh": f"#!fake\nprint at {n}\n" for n in names})
    record = run_steps()
    where = f"{record.job_id}/walk/oracle/1"
    found = CliRunner().invoke(app, ["logs", where, "--part", "agent", "--jobs-dir", str(tmp_path / "jobs")])
    assert found.stdout == "at b\nat a\nat c\n"
