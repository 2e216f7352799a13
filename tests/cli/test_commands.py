"""Each command as a user of it would expect: what it finds, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import anyio
import pytest
import typer.main

from dayfly.cli import app
from dayfly.cli.budgets import budgets, short_duration
from dayfly.cli.run import _duration
from dayfly.engines.local import LocalEngine
from dayfly.job import parse_job, plan_new
from dayfly.protocols import StartOptions
from dayfly.registry import make_agent, make_verifier
from dayfly.rollout import Context, run_rollout
from dayfly.tasks import load_task
from dayfly.testing import FakeHypervisor

DIES = "#!fake\nprint so far\ndie\n"


# --- list and show -------------------------------------------------------------------------------


def test_without_jobs(dayfly):
    done = dayfly("list")
    assert (done.code, done.out) == (0, "") and "no jobs in jobs" in done.err
    assert dayfly("list", "--json").json == {"schema_version": 1, "jobs": []}
    for command in (["show", "last"], ["logs", "last"], ["run", "--resume", "last"], ["shell", "last/a/b/1"]):
        done = dayfly(*command)
        assert (done.code, done.out) == (2, "")
        assert "no job in jobs" in done.err and "dayfly run" in done.err


def test_list_and_show_agree(make_task, run_job, dayfly):
    make_task()
    first, second = run_job("-a", "oracle"), run_job("-a", "no-op", "-k", "2")
    jobs = dayfly("list", "--json").json["jobs"]
    assert [j["id"] for j in jobs] == sorted([first, second])
    mine = next(j for j in jobs if j["id"] == second)
    assert (mine["planned"], mine["graded"], mine["passed"], mine["state"]) == (2, 2, 0, "complete")
    shown = dayfly("show", second, "--json").json
    assert shown["summary"]["total"]["graded"] == 2
    assert [r["outcome"] for r in shown["rollouts"]] == ["failed", "failed"]
    assert second in dayfly("list").out


@pytest.mark.parametrize("form", ["last", "{job}", "{prefix}", "jobs/{job}", "jobs/{job}/", "{absolute}"])
def test_ways_to_name_a_job(make_task, run_job, dayfly, form, tmp_path):
    make_task()
    job = run_job("-a", "oracle")
    name = form.format(job=job, prefix=job[:-2], absolute=tmp_path / "jobs" / job)
    assert dayfly("show", name, "--json").json["id"] == job
    done = dayfly("run", "--resume", name)
    assert done.code == 0, done.err
    assert "1 done, 0 to retry, 0 new, 0 changed" in done.err


def test_inside_a_jobs_folder(make_task, run_job, dayfly, monkeypatch, tmp_path):
    make_task()
    job = run_job("-a", "oracle")
    monkeypatch.chdir(tmp_path / "jobs" / job)
    assert dayfly("show", ".", "--json").json["id"] == job
    assert dayfly("show", "./rollouts/one/oracle/1", "--json").json["job_id"] == job


def test_ways_to_name_a_rollout(make_task, run_job, dayfly):
    make_task()
    job = run_job("-a", "oracle", "-k", "2")
    wanted = dayfly("show", "last/one/oracle/2", "--json").json["rollout_id"]
    names = (f"{job}/{wanted}", f"last/{wanted[-6:]}", wanted, f"jobs/{job}/rollouts/one/oracle/2")
    for name in names:
        assert dayfly("show", name, "--json").json["rollout_id"] == wanted
    assert f"{job}/rollouts/one/oracle/2" in dayfly("show", wanted).out
    done = dayfly("show", "last/one/oracle/3")
    assert done.code == 2 and "one/oracle/3" in done.err and f"dayfly show {job}" in done.err


def test_earlier_starts_are_shown_and_can_be_read(make_task, run_job, dayfly):
    make_task(solve=DIES)
    run_job("-a", "oracle")
    shown = dayfly("show", "last/one/oracle/1", "--json").json
    assert shown["retry"] == 2 and len(shown["other_starts"]) == 2
    text = dayfly("show", "last/one/oracle/1").out
    for other in shown["other_starts"]:
        assert other["rollout_id"] in text and other["outcome"] == "infra_error"
        assert dayfly("show", f"last/{other['rollout_id']}", "--json").json["rollout_id"] == other["rollout_id"]
        assert dayfly("logs", f"last/{other['rollout_id']}", "--part", "agent").out == "so far\n"


def test_a_broken_record_hides_nothing_else(make_task, run_job, dayfly):
    make_task()
    make_task("two")
    job = run_job("-a", "oracle")
    broken = Path("jobs") / job / "rollouts/two/oracle/1/rollout.json"
    broken.write_text("{")
    listed = dayfly("list")
    assert listed.code == 0 and job in listed.out and "two/oracle/1" in listed.err
    shown = dayfly("show", "last")
    assert "one/oracle/1" in shown.out and "two/oracle/1" in shown.err
    assert len(dayfly("show", "last", "--json").json["broken"]) == 1
    assert dayfly("show", "last/one/oracle/1").code == 0
    done = dayfly("show", "last", "--verify")
    assert done.code == 1 and "two/oracle/1" in done.err


@pytest.mark.parametrize("text", ["{", "[]", "{}", ""])
def test_a_broken_job_hides_no_other(make_task, run_job, dayfly, text):
    make_task()
    good, bad = run_job("-a", "oracle"), run_job("-a", "oracle")
    (Path("jobs") / bad / "job.json").write_text(text)
    (Path("jobs") / "not a job id").mkdir()
    (Path("jobs") / "not a job id" / "job.json").write_text("{}")
    done = dayfly("list", "--json")
    assert done.code == 0, done.err
    assert {j["id"]: j["state"] for j in done.json["jobs"]} == {
        good: "complete",
        bad: "broken",
        "not a job id": "broken",
    }
    assert good in dayfly("list").out
    assert dayfly("show", good).code == 0


def test_verify_finds_what_was_changed_in_any_start(make_task, run_job, dayfly):
    make_task(solve=DIES)
    job = run_job("-a", "oracle")
    assert dayfly("show", "last", "--verify").code == 0
    earlier = next((Path("jobs") / job).glob("rollouts/one/oracle/1.retry-*"))
    (earlier / "agent/stdout.txt").write_text("something else")
    done = dayfly("show", "last", "--verify")
    assert done.code == 1 and earlier.name in done.err
    answer = dayfly("show", "last", "--verify", "--json")
    assert answer.code == 1 and answer.json["verified"] is False
    assert list(answer.json["problems"]) == [f"one/oracle/{earlier.name}"]
    assert dayfly("show", "last/one/oracle/1", "--verify", "--json").json["verified"] is True


# --- run -----------------------------------------------------------------------------------------


def test_dry_run_prints_every_budget_and_writes_nothing(make_task, dayfly):
    make_task()
    make_task("limitless", agent="")
    args = ("run", "tasks", "-a", "oracle", "-a", "no-op", "-k", "3", "--hypervisor", "fake", "--dry-run")
    done = dayfly(*args)
    assert done.code == 0
    assert "2 tasks × 2 agents × 3 attempts = 12 rollouts" in done.err
    assert "1 task without an agent limit of its own: 1h hold" in done.err
    header, limitless, one, starts, _ = done.out.splitlines()
    assert header.split() == ["task", "image", "boot", "setup", "agent", "collect", "verify", "teardown", "vm"]
    assert limitless.split()[4] == "1h+60s" and one.split()[4] == "40s+60s" and one.split()[1] == "77s"
    assert "3 (after verifier_error 2)" in starts
    plan = dayfly(*args, "--json").json
    assert (plan["planned"], plan["new"], plan["id"]) == (12, 12, None)
    assert plan["budgets"]["one"]["verify"] == {"work_s": 25.0, "limit_s": 85.0}
    assert not Path("jobs").exists()


def test_the_printed_budgets_are_those_that_hold(make_task, tmp_path):
    """Fault 33: no limit that the plan does not show. The figures of a real rollout, phase by phase."""
    folder = make_task()
    task = load_task(folder, strict=True)
    plan = plan_new(
        parse_job({"tasks": [str(folder)], "agents": ["oracle"], "hypervisor": "fake"}, "test"),
        tmp_path,
        tmp_path / "jobs",
    )
    given: dict[str, set[float]] = {}
    lifetimes: set[float] = set()

    def look(options: StartOptions) -> None:
        lifetimes.add(options.lifetime_s)

    async def go() -> None:
        from dayfly.evidence import JobFolder
        from dayfly.model import Disk, ImageConfig

        async def disk(image: str) -> Disk:
            return Disk(Path("/dev/null"), "sha256:0", ImageConfig(workdir="/app"))

        context = Context(
            hypervisor=FakeHypervisor(fault=look),
            job=JobFolder.create(tmp_path / "jobs", plan.job_id, {}, {}),
            load_task=lambda path: task,
            make_disk=disk,
            make_agent=lambda spec: make_agent(spec.agent, tmp_path),
            make_verifier=make_verifier,
            resolve_env=dict,
            on_phase=lambda spec, phase, limit_s: given.setdefault(phase, set()).add(limit_s),
        )
        record = await run_rollout(plan.new[0], context)
        assert record.outcome.value == "passed"

    anyio.run(go)
    shown = {phase: {budget.limit_s} for phase, budget in budgets(plan.job_file.options(), task).items()}
    assert shown.pop("vm") == lifetimes
    assert shown == given


def test_short_durations_are_exact():
    texts = {
        0.5: "0.5s",
        30: "30s",
        90: "90s",
        120: "2m",
        125: "2m5s",
        3600: "1h",
        5400: "1h30m",
        3661.5: "3661.5s",
    }
    assert {seconds: short_duration(seconds) for seconds in texts} == texts
    assert [_duration(t) for t in ("90", "90s", "15m", "1.5h")] == [90, 90, 900, 5400]


def test_resume_prints_its_plan_first_and_refuses_changes(make_task, run_job, dayfly):
    folder = make_task()
    job = run_job("-a", "oracle", "-k", "2")
    (folder / "instruction.md").write_text("Something else.\n")
    done = dayfly("run", "--resume", job)
    assert done.code == 2 and done.out == ""
    plan, error = done.err.index("0 done, 0 to retry, 2 new, 1 changed"), done.err.index("error:")
    assert plan < error and "changed: task one changed" in done.err and "--accept-changes" in done.err
    done = dayfly("run", "--resume", job, "--accept-changes")
    assert done.code == 0, done.err
    assert "0 done, 0 to retry, 0 new" not in done.err


def test_resume_goes_by_a_changed_job_file_in_its_own_folder(make_task, dayfly, tmp_path):
    make_task()
    shutil.copytree("tasks", "elsewhere/tasks")
    text = "name: mine\ntasks: [tasks]\nagents: [oracle]\nhypervisor: fake\n"
    Path("job.yaml").write_text(text)
    Path("elsewhere/job.yaml").write_text(text + "attempts: 3\n")
    assert dayfly("run", "job.yaml").code == 0
    shutil.rmtree("tasks")  # the new file's tasks are beside the new file
    done = dayfly("run", "elsewhere/job.yaml", "--resume", "last")
    assert done.code == 2 and "attempts was 1, is 3" in done.err
    done = dayfly("run", "elsewhere/job.yaml", "--resume", "last", "--accept-changes", "--json")
    assert done.code == 0, done.err
    assert "1 done, 0 to retry, 2 new" in done.err
    assert done.json["summary"]["total"]["graded"] == 3


def test_an_incomplete_job_says_so_and_how_to_go_on(make_task, dayfly):
    make_task(test="#!fake\nprint no verdict\n")
    done = dayfly("run", "tasks", "-a", "oracle", "--hypervisor", "fake")
    assert done.code == 4
    assert "1 of 1 rollout without a verdict" in done.out and "dayfly run --resume 2" in done.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["nothing to run", "job file", "--resume"]),
        (["nowhere"], ["nowhere", "no such folder"]),
        (["nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["bad.yaml"], ["bad.yaml", "attemps", "did you mean 'attempts'"]),
        (["broken.yaml"], ["broken.yaml", "not YAML"]),
        (["a.yaml", "tasks"], ["stands alone"]),
        (["tasks", "-a", "oracel"], ["oracel", "did you mean 'oracle'"]),
        (["tasks", "--hypervisor", "quemu"], ["quemu", "did you mean 'qemu'"]),
        (["tasks", "--agent-timeout", "soon"], ["--agent-timeout", "soon", "90s"]),
        (["tasks", "--keep-disk", "some"], ["--keep-disk", "never"]),
        (["tasks", "--display", "loud"], ["--display", "plain"]),
        (["tasks", "-k", "0"], ["--attempts"]),
        (["tasks", "--resume", "last"], ["--resume", "'tasks'"]),
        (["tasks", "--no-such-option"], ["--no-such-option"]),
    ],
)
def test_bad_input_names_what_and_where_and_runs_nothing(make_task, dayfly, args, words):
    make_task()
    Path("bad.yaml").write_text("tasks: [tasks]\nagents: [oracle]\nattemps: 2\n")
    Path("broken.yaml").write_text("tasks: [\n")
    done = dayfly("run", *args)
    assert (done.code, done.out) == (2, ""), done.err
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert not Path("jobs").exists()


# --- logs ----------------------------------------------------------------------------------------


def test_parts_of_a_log(make_task, run_job, dayfly):
    make_task()
    run_job("-a", "oracle")
    assert dayfly("logs", "last/one/oracle/1", "--part", "agent").out == "working\n"
    assert dayfly("logs", "last/one/oracle/1", "--part", "verifier").out == "judging\n"
    whole = dayfly("logs", "last/one/oracle/1")
    assert whole.out == "working\njudging\n" and "--- agent/stdout.txt" in whole.err
    assert dayfly("logs", "last/one/oracle/1", "-f").out == whole.out
    done = dayfly("logs", "last/one/oracle/1", "--part", "all of it")
    assert done.code == 2 and "verifier" in done.err


def test_a_jobs_log_for_people_and_for_programs(make_task, run_job, dayfly):
    make_task()
    job = run_job("-a", "oracle")
    text = dayfly("logs", job).out
    assert "1/1 passed" in text and f"job {job} ended" in text
    lines = [json.loads(line) for line in dayfly("logs", job, "--json").out.splitlines()]
    assert lines == [json.loads(line) for line in (Path("jobs") / job / "events.jsonl").read_text().splitlines()]
    for args in ([job, "--part", "agent"], [f"{job}/one/oracle/1", "--json"]):
        assert dayfly("logs", *args).code == 2


# --- check, init, shell, doctor ------------------------------------------------------------------


def test_check(make_task, dayfly):
    make_task()
    make_task("given-away", test="#!fake\nwrite /logs/verifier/reward.txt 1\n")
    done = dayfly("check", "tasks", "--hypervisor", "fake")
    assert done.code == 1
    assert "fit  one" in done.out and "NOT FIT  given-away" in done.out and "dayfly show 2" in done.out
    done = dayfly("check", "tasks", "--hypervisor", "fake", "--json")
    assert done.code == 1 and done.err == ""
    assert {t["task"]: t["fit"] for t in done.json["tasks"]} == {"one": True, "given-away": False}
    assert dayfly("check", "tasks/one", "--hypervisor", "fake").code == 0


def test_check_static_starts_nothing_and_is_strict(make_task, dayfly):
    folder = make_task()
    done = dayfly("check", "tasks", "--static", "--no-fields")
    assert (done.code, done.out) == (0, "reads  one\n")
    (folder / "task.toml").write_text((folder / "task.toml").read_text().replace("cpus", "cpu") + "\n[agnet]\n")
    done = dayfly("check", "tasks", "--static", "--json")
    assert done.code == 1 and "agnet" in done.json["tasks"][0]["problems"][0]
    assert not Path("jobs").exists()
    done = dayfly("check", "nowhere")
    assert done.code == 2 and "nowhere" in done.err


def test_init_makes_a_task_that_reads_and_overwrites_nothing(dayfly):
    done = dayfly("init", "my evals")
    assert done.code == 0 and "dayfly check 'my evals/tasks'" in done.err
    assert all(Path(line).is_file() for line in done.out.splitlines())
    assert dayfly("check", "my evals/tasks", "--static").code == 0
    assert dayfly("run", "my evals/job.yaml", "--dry-run").code == 0
    Path("my evals/job.yaml").write_text("mine")
    done = dayfly("init", "my evals")
    assert done.code == 2 and "exists" in done.err
    assert Path("my evals/job.yaml").read_text() == "mine"
    Path("file").write_text("")
    done = dayfly("init", "file/below")
    assert done.code == 4 and "file/below" in done.err and "Traceback" not in done.err


def test_shell_says_why_not(make_task, run_job, dayfly):
    make_task()
    run_job("-a", "no-op")
    done = dayfly("shell", "last/one/no-op/1")
    assert done.code == 2 and "fake" in done.err
    done = dayfly("shell", "last")
    assert done.code == 2 and "name a rollout" in done.err


def test_gc_goes_on_past_a_broken_job_and_one_half_made(make_task, run_job, dayfly, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_task()
    bad, good = run_job("-a", "oracle"), run_job("-a", "oracle")
    result = Path("jobs") / good / "rollouts/one/oracle/1"
    (Path("jobs") / good / "work/x").mkdir()
    result.rename(Path("jobs") / good / "work/x/evidence")  # as after kill -9 before the last rename
    shutil.rmtree(Path("jobs") / bad / "work")
    (Path("jobs") / bad / "work").write_text("no folder")
    half_made = Path("jobs") / ".20260101-000000-aaaaaa.0000.tmp"
    half_made.mkdir()
    (half_made / "job.json").write_text("{}")
    done = dayfly("gc", "--reindex", "--json")
    assert done.code == 0, done.err
    assert len(done.json["jobs"][good]["published"]) == 1 and result.is_dir()
    assert done.json["indexed"] == 2
    assert "0 VM(s) of dead processes removed" in dayfly("gc").out


def test_image_variables_must_be_variables(dayfly):
    done = dayfly("image", "import", "x.tar", "--name", "x", "--env", "NOTHING")
    assert done.code == 2 and "NAME=VALUE" in done.err


# --- the command tree ----------------------------------------------------------------------------


def every_option() -> list[tuple[list[str], str]]:
    """(words of the command, option) for everything that can be set."""
    found: list[tuple[list[str], str]] = []

    def walk(command: object, words: list[str]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            walk(below, [*words, name])
        if words and not hasattr(command, "commands"):
            found.extend((words, p.name) for p in command.params if p.param_type_name == "option")

    walk(typer.main.get_command(app), [])
    return [(w, n) for w, n in found if n != "help"]


@pytest.mark.parametrize(
    ("words", "option"), every_option(), ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_every_option_can_be_set_by_a_variable(words, option, monkeypatch):
    command, context = typer.main.get_command(app), None
    context = command.make_context("dayfly", [], resilient_parsing=True)
    for word in words:
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    parameter = next(p for p in command.params if p.name == option)
    assert parameter.help, f"{words} {option} has no help"
    flag = max(parameter.opts, key=len).removeprefix("--")
    shared = flag in ("jobs-dir", "hypervisor")
    name = "_".join(["dayfly", *([] if shared else words), flag]).upper().replace("-", "_")
    monkeypatch.setenv(name, "7")
    assert parameter.resolve_envvar_value(context) == "7", name


def test_a_variable_is_used(make_task, dayfly, monkeypatch):
    make_task()
    for name, value in (("HYPERVISOR", "fake"), ("JOBS_DIR", "other"), ("RUN_ATTEMPTS", "3"), ("RUN_JSON", "1")):
        monkeypatch.setenv(f"DAYFLY_{name}", value)
    monkeypatch.setenv("DAYFLY_RUN_AGENT", "oracle no-op")
    monkeypatch.setenv("DAYFLY_VERSION", "1.2.3")
    done = dayfly("run", "tasks")
    assert done.code == 0, done.err
    assert done.json["summary"]["total"]["planned"] == 6
    assert (Path("other") / done.json["id"]).is_dir()


# --- what nobody foresaw -------------------------------------------------------------------------


def test_errors_of_several_rollouts_are_said_without_a_traceback(make_task, dayfly, monkeypatch):
    """A DayflyError that arrives in a group (a task group makes one) is said like any other."""
    from dayfly.errors import ConfigError, HostError

    async def several(*args: object) -> None:
        raise ExceptionGroup(
            "", [HostError("disk full", hint="free some"), ExceptionGroup("", [ConfigError("odd")])]
        )

    monkeypatch.setattr(LocalEngine, "run", several)
    make_task()
    done = dayfly("run", "tasks", "-a", "oracle", "--hypervisor", "fake")
    assert done.code == 4
    assert "error: disk full\n  hint: free some" in done.err and "Traceback" not in done.err


def test_a_fault_of_ours_is_no_answer(make_task, dayfly, monkeypatch):
    async def broken(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LocalEngine, "run", broken)
    make_task()
    done = dayfly("run", "tasks", "-a", "oracle", "--hypervisor", "fake", "--json")
    assert done.code == 4 and done.out == ""
    assert "a bug" in done.err and "please report it" in done.err
