"""Multi-step tasks, as they are read; and what else of the format a single VM must be told."""

from __future__ import annotations

import pytest

from dayfly.errors import TaskError
from dayfly.model import Machine, VerifierClass
from dayfly.tasks import load_task

ENV = "\n[environment]\ndocker_image = 'x'\n"
TOML = """\
schema_version = "1.4"
multi_step_reward_strategy = "final"
artifacts = ["/app/all"]
[agent]
timeout_sec = 100
user = "dev"
[verifier]
timeout_sec = 30
user = "root"
env = { A = "1", B = "1" }
[[verifier.collect]]
command = "sync"
service = "main"
[environment]
docker_image = "x"
memory_mb = 512
[[steps]]
name = "plan"
min_reward = 0.5
artifacts = ["/app/plan"]
[steps.agent]
timeout_sec = 7
user = 1001
[steps.verifier]
timeout_sec = 9
env = { B = "2" }
[[steps.verifier.collect]]
command = "true"
[steps.healthcheck]
command = "test -e /ready"
[[steps]]
name = "build it"
min_reward = { speed = 1, "size" = 0.5 }
[steps.verifier.environment]
docker_image = "judge"
memory_mb = 1024
workdir = "/judge"
env = { C = "3" }
[steps.verifier.environment.healthcheck]
command = "true"
"""
FILES = {
    "instruction.md": None,
    "solution/solve.sh": None,
    "steps/plan/instruction.md": "<!-- canary 1 -->\nPlan.\n",
    "steps/plan/trajectory.json": "{}",
    "steps/plan/workdir/setup.sh": "true\n",
    "steps/plan/solution/solve.sh": "true\n",
    "steps/plan/tests/extra": "x",
    "steps/build it/instruction.md": "Build.\n",
    "steps/build it/solution/solve.sh": "true\n",
}


def test_each_step_is_a_task_with_what_holds_in_it(make_task):
    task = load_task(make_task(TOML, FILES), strict=True)
    plan, build = task.steps
    assert (task.step, plan.step, build.step) == (None, "plan", "build it")
    assert (plan.instruction, build.instruction) == ("Plan.\n", "Build.\n")
    assert (plan.agent_timeout_s, build.agent_timeout_s) == (7, 100)
    assert (plan.agent_user, build.agent_user) == ("1001", "dev")
    assert plan.step_files == task.path / "steps/plan/workdir" and build.step_files is None
    assert plan.step_healthcheck is not None and plan.step_healthcheck.command == "test -e /ready"
    assert plan.solution == task.path / "steps/plan/solution"
    assert plan.trajectory == task.path / "steps/plan/trajectory.json" and build.trajectory is None
    assert (plan.min_reward, build.min_reward) == ({"reward": 0.5}, {"speed": 1, "size": 0.5})
    assert [a.source for a in plan.artifacts] == ["/app/all", "/app/plan"]
    assert [a.source for a in build.artifacts] == ["/app/all"]
    assert plan.digest == build.digest == task.digest and plan.machine == task.machine


def test_how_each_step_is_judged(make_task):
    task = load_task(make_task(TOML, FILES), strict=True)
    plan, build = task.steps
    assert (plan.verifier_class, build.verifier_class) == (VerifierClass.SHARED, VerifierClass.SEPARATE)
    assert (plan.verifier_timeout_s, build.verifier_timeout_s) == (9, 600)  # a step's default wins, as in Harbor
    assert plan.verifier_env == {"A": "1", "B": "2"} and plan.verifier_user == build.verifier_user == "root"
    assert [h.command for h in plan.collect] == ["sync", "true"]
    assert (plan.tests, plan.tests_overlay) == (task.path / "tests", task.path / "steps/plan/tests")
    assert build.verifier_image == "judge" and build.tests is None and build.tests_overlay is None
    assert build.verifier_machine == Machine(memory_mib=1024) and build.verifier_workdir == "/judge"
    assert build.verifier_vm_env == {"C": "3"} and build.verifier_healthcheck is not None
    assert build.verifier_env == {"A": "1", "B": "1", "C": "3"}


def test_the_whole_tasks_fields_fit_all_its_steps(make_task):
    task = load_task(make_task(TOML, FILES), strict=True)
    assert task.reward_strategy == "final" and task.verifier_class is VerifierClass.SHARED
    assert task.agent_timeout_s == 107 and task.verifier_timeout_s == 609
    assert task.solution is not None and "Plan." in task.instruction and "Build." in task.instruction
    assert task.images == ("x", "judge") and task.all_steps == task.steps
    assert task.machines == (Machine(memory_mib=512), Machine(memory_mib=1024))
    alone = load_task(make_task(name="alone"), strict=True)
    assert alone.all_steps == (alone,) and alone.steps == ()


def test_the_oracle_needs_a_solution_of_every_step(make_task):
    task = load_task(make_task(TOML, {**FILES, "steps/build it/solution/solve.sh": None}), strict=True)
    assert task.solution is None


@pytest.mark.parametrize(
    ("tables", "files", "words"),
    [
        ("[[steps]]\nname = 'a'", {}, "step 'a' has no folder"),
        ("[[steps]]\nname = 'a'", {"steps/a/x": ""}, r"steps/a/instruction\.md"),
        (
            "[[steps]]\nname = 'a'",
            {"steps/a/instruction.md": "Do.", "tests/test.sh": None},
            r"no tests/test\.sh",
        ),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", {}, "share a folder"),
        ("[[steps]]\nname = '\u00e9'\n[[steps]]\nname = 'e\u0301'", {}, "share a folder"),
        ("[[steps]]\nname = '../up'", {}, "step's name"),
        ("[[steps]]\nname = 'nul.txt'", {}, "step's name"),
        (f"[[steps]]\nname = '{'x' * 256}'", {}, "step's name"),
        ("[[steps]]\nname = 'a'\nmin_reward = nan", {}, "min_reward"),
        ("[[steps]]\nname = 'a'\nmin_reward = {}", {}, "min_reward"),
        (
            "[[steps]]\nname = 'a'\n[[steps.verifier.collect]]\ncommand = 'x'\nservice = 'db'",
            {"steps/a/instruction.md": "Do."},
            "other services than `main`",
        ),
    ],
)
def test_a_step_that_cannot_work_is_refused_by_name(make_task, tables, files, words):
    with pytest.raises(TaskError, match=words):
        load_task(make_task(ENV + tables, files), strict=False)


def test_what_is_without_effect_is_remarked(make_task):
    files = {
        "steps/a/instruction.md": "Do.",
        "steps/b/instruction.md": "Do.",
        "steps/c/instruction.md": "Do.",
        "steps/b/trajectory.json": "{}",
    }
    task = load_task(make_task(ENV + "[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'", files), strict=True)
    for words in ("instruction.md is not used", "b/trajectory.json is not used", "does not name: c"):
        assert any(words in w for w in task.warnings), task.warnings
    single = load_task(make_task("multi_step_reward_strategy = 'mean'" + ENV, name="single"), strict=True)
    assert any("multi_step_reward_strategy" in w for w in single.warnings)


@pytest.mark.parametrize(
    ("own", "step", "chosen"),
    [
        ("", "", "shared"),
        ("[verifier]\nenvironment_mode = 'separate'", "", "separate"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode = 'shared'", "shared"),
        ("", "verifier.environment = { cpus = 1 }", "separate"),
        ("[dayfly]", "", "shared"),  # a task would be rebooted; between steps the agent's VM must live on
        ("[dayfly]", "artifacts = ['/app/x']", "separate"),
        ("[dayfly]\nverifier_class = 'separate'", "verifier.environment_mode = 'shared'", "separate"),
    ],
)
def test_the_verifier_class_of_a_step(make_task, own, step, chosen):
    files = {"steps/a/instruction.md": "Do."}
    task = load_task(make_task(f"{ENV}\n{own}\n[[steps]]\nname = 'a'\n{step}", files), strict=True)
    assert task.steps[0].verifier_class.value == chosen


def test_ignore_files_of_steps_count(make_task):
    files = {
        "steps/a/instruction.md": "Do.",
        "steps/a/tests/.harborignore": "draft\n",
        "steps/a/tests/draft": "1",
    }
    task = load_task(make_task(ENV + "[[steps]]\nname = 'a'", files), strict=True)
    assert any(".harborignore leaves out 1 file(s): steps/a/tests/draft" in w for w in task.warnings)


# --- beside steps --------------------------------------------------------------------------------


def test_offers_to_agents_arrive(make_task):
    toml = ENV + (
        "skills_dir = 'skills'\n[[environment.mcp_servers]]\nname = 'a'\ntransport = 'http'\nurl = 'http://x/'\n"
        "headers = { Authorization = '${TOKEN}' }\n[[environment.mcp_servers]]\nname = 'b'\ncommand = 'run'\n"
        "transport = 'stdio'\nargs = ['-v']"
    )
    task = load_task(make_task(toml, {"trajectory.json": "{}"}), strict=True)
    http, stdio = task.mcp_servers
    assert (http.transport, http.url, http.headers) == (
        "streamable-http",
        "http://x/",
        {"Authorization": "${TOKEN}"},
    )
    assert (stdio.command, stdio.args) == ("run", ("-v",))
    assert task.skills_dir == "skills" and task.trajectory == task.path / "trajectory.json"
    assert task.warnings == ()


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("transport = 'sse'", "needs url"),
        ("transport = 'stdio'", "needs command"),
        ("url = 'http://x/'\nheaders = { Authorization = 'Bearer abc' }", "credential"),
        ("url = 'http://x/'\nheaders = { X-Api-Key = '${K:-abc}' }", "credential"),
    ],
)
def test_tool_servers_that_cannot_work_or_hold_a_credential_are_refused(make_task, server, words):
    with pytest.raises(TaskError, match=words):
        load_task(make_task(f"{ENV}[[environment.mcp_servers]]\nname = 'a'\n{server}"), strict=False)


def test_what_was_asked_of_networks_is_recorded(make_task):
    toml = ENV + "allow_internet = true\n[agent]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'"
    assert load_task(make_task(toml), strict=True).network == {
        "environment": "public",
        "agent": "no-network",
        "verifier": "public",
    }


@pytest.mark.parametrize("host", ["a.example", "*.example", "10.0.0.0/8", "::1", "a.example."])
def test_hosts_of_an_allowlist_are_parsed_before_it_is_refused(make_task, host):
    toml = ENV + f"network_mode = 'allowlist'\nallowed_hosts = ['{host}']"
    with pytest.raises(TaskError, match="no VM has a network"):
        load_task(make_task(toml), strict=False)


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "a.example/x", "a.*", ""])
def test_what_is_no_host_is_refused_as_such(make_task, host):
    toml = ENV + f"network_mode = 'allowlist'\nallowed_hosts = ['{host}']"
    with pytest.raises(TaskError, match="is not a host name"):
        load_task(make_task(toml), strict=False)


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("curl -LsSf https://example.org/install.sh | sh", "curl"),
        ("apt-get -y -qq install git", "apt-get -y -qq install"),
        ("python3 -m pip install pytest", "pip install"),
        ("cd /x && uvx pytest", "uvx"),
        ("git \\\n  clone https://example.org/x", "git"),
        ("npm ci", "npm ci"),
        ("curl -f http://localhost:8080/", None),
        ("pip install --no-index /wheels/x.whl", None),
        ("# curl https://example.org", None),
        ("echo done  # then wget it", None),
        ("/opt/curl-check x; grep curl= file", None),
        ("git diff", None),
    ],
)
def test_downloads_in_tests_are_remarked_under_check(make_task, line, seen):
    """Fault 41: a mirror that fails while the judge runs gives good work a 0."""
    folder = make_task(ENV, {"tests/test.sh": f"#!/bin/sh\ntrue\n{line}\n"})
    remarks = [w for w in load_task(folder, strict=True).warnings if "fetches from a network" in w]
    assert len(remarks) == (seen is not None)
    if seen is not None:
        assert remarks[0].startswith("tests/test.sh:3 ") and seen.split()[0] in remarks[0]
    assert load_task(folder, strict=False).warnings == ()
