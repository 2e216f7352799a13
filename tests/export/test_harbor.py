"""A job in Harbor's layout: what its tools read, and that a fault is never a score there."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest

from dayfly.errors import ConfigError
from dayfly.evidence import JobFolder
from dayfly.export import EXCEPTIONS, export_harbor, host_secrets
from dayfly.job import parse_job, plan_new, run_job
from dayfly.model import GRADED, Outcome, RolloutRecord

TOML = """\
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
[[artifacts]]
source = "/app/result.txt"
[[artifacts]]
source = "/app/never.txt"
destination = "elsewhere/never.txt"
[agent]
timeout_sec = 5
[dayfly]
verifier_class = "rebooted"
"""
JUDGE = """\
#!fake
write /logs/verifier/reward.json '{"reward": 0, "style": 0.5}'
expect /app/result.txt done
write /logs/verifier/reward.json '{"reward": 1, "style": 0.5}'
"""
SOLVE = "#!fake\nprint working\nwrite result.txt done\n"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobFolder]:
    def make(tasks: dict[str, str], solve: str = SOLVE, **settings: Any) -> JobFolder:
        for name, judge in tasks.items():
            folder = tmp_path / "tasks" / name
            for path, text in (("tests/test.sh", judge), ("solution/solve.sh", solve)):
                (folder / path).parent.mkdir(parents=True)
                (folder / path).write_text(text)
                (folder / path).chmod(0o755)
            (folder / "task.toml").write_text(TOML)
            (folder / "instruction.md").write_text("Write `done` into result.txt.\n")
        data = {"tasks": ["tasks"], "agents": ["oracle", "no-op"], "hypervisor": "fake", "retries": 0, **settings}
        result = anyio.run(run_job, plan_new(parse_job(data, "test"), tmp_path, tmp_path / "jobs"))
        return JobFolder.open(tmp_path / "jobs", result.job_id)

    return make


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Export, and read everything back: trials by agent and task, beside the job's own files."""

    def done(job: JobFolder, records: list[RolloutRecord] | None = None) -> dict[str, Any]:
        some = list(job.records(lambda place, error: None)) if records is None else records
        made = export_harbor(job, some, tmp_path / "out", secrets={})
        trials, count = {}, 0
        for path in made.path.glob("*/result.json"):
            trial = json.loads(path.read_bytes())
            count += 1
            trials[trial["agent_info"]["name"], trial["task_name"]] = trial | {"folder": path.parent}
        assert count == made.trials
        return {name: json.loads((made.path / f"{name}.json").read_bytes()) for name in ("config", "result")} | {
            "trials": trials,
            "folder": made.path,
        }

    return done


def test_a_trial_has_what_harbors_tools_read(job, export):
    found = export(job({"one": JUDGE}))
    trial = found["trials"]["oracle", "one"]
    folder: Path = trial["folder"]
    assert UUID(trial["id"]) and datetime.fromisoformat(trial["started_at"]).tzinfo is not None
    assert trial["trial_name"] == folder.name and folder.name.startswith("one__")
    assert trial["trial_uri"] == folder.as_uri()
    assert trial["task_id"]["path"].endswith("tasks/one") and trial["source"] == "tasks"
    assert trial["verifier_result"] == {"rewards": {"reward": 1.0, "style": 0.5}}
    assert trial["exception_info"] is None and not (folder / "exception.txt").exists()
    assert trial["agent_execution"]["started_at"] <= trial["verifier"]["started_at"]
    assert trial["agent_result"]["metadata"]["dayfly"]["outcome"] == "passed"
    assert json.loads((folder / "config.json").read_bytes()) == trial["config"]
    assert trial["config"]["job_id"] == found["result"]["id"]
    assert json.loads((folder / "verifier/reward.json").read_bytes()) == {"reward": 1, "style": 0.5}
    assert (folder / "agent/stdout.txt").read_text() == "working\n"
    assert (folder / "artifacts/app/result.txt").read_text() == "done\n"
    manifest = {e["source"]: e for e in json.loads((folder / "artifacts/manifest.json").read_bytes())}
    assert manifest["/app/result.txt"] == {
        "source": "/app/result.txt",
        "destination": "app/result.txt",
        "type": "file",
        "status": "ok",
        "service": None,
        "exclude": [],
    }
    assert manifest["/app/never.txt"]["status"] == "failed"
    assert not list(folder.rglob("*.img")) and not (folder / "verifier/logs").exists()


def test_the_jobs_figures(job, export):
    found = export(job({"one": JUDGE, "two": JUDGE}, attempts=2, concurrency=3))
    config, result = found["config"], found["result"]
    assert (config["n_attempts"], config["n_concurrent_trials"]) == (2, 3)
    assert [a["name"] for a in config["agents"]] == ["oracle", "no-op"]
    assert result["n_total_trials"] == 8 and len(result["trial_results"]) == 8
    assert result["finished_at"] is not None
    stats = result["stats"]
    assert (stats["n_completed_trials"], stats["n_errored_trials"], stats["n_pending_trials"]) == (8, 0, 0)
    assert set(stats["evals"]) == {"oracle__tasks", "no-op__tasks"}
    oracle, idle = stats["evals"]["oracle__tasks"], stats["evals"]["no-op__tasks"]
    assert oracle["metrics"] == [{"reward": 1.0, "style": 0.5}] and idle["metrics"][0]["reward"] == 0.0
    assert len(oracle["reward_stats"]["reward"]["1"]) == 4
    assert stats["cost_usd"] is None, "unknown is not 0"


def test_a_fault_is_never_a_score_there(job, export):
    found = export(
        job({"none": "#!fake\nprint nothing\n", "words": "#!fake\nwrite /logs/verifier/reward.txt yes\n"})
    )
    for (_, task), trial in found["trials"].items():
        assert trial["verifier_result"] is None
        kind = "RewardFileNotFoundError" if task == "none" else "VerifierOutputParseError"
        assert trial["exception_info"]["exception_type"] == kind
        assert (trial["folder"] / "exception.txt").read_text().strip()
        assert not (trial["folder"] / "verifier/reward.txt").exists(), "a tool must not read it as a verdict"
    stats = found["result"]["stats"]["evals"]["oracle__tasks"]
    assert (stats["n_trials"], stats["n_errors"], stats["metrics"]) == (0, 2, [])


def test_an_agent_that_ran_out_of_time_keeps_its_verdict(job, export):
    found = export(job({"one": JUDGE}, solve=SOLVE + "sleep 600\n", agents=["oracle"], agent_timeout="1s"))
    (trial,) = found["trials"].values()
    assert trial["exception_info"]["exception_type"] == "AgentTimeoutError"
    assert trial["verifier_result"]["rewards"]["reward"] == 1.0


def test_a_part_of_a_job_is_not_finished(job, export):
    folder = job({"one": JUDGE})
    found = export(folder, list(folder.records(lambda place, error: None))[:1])
    assert found["result"]["finished_at"] is None
    assert found["result"]["stats"]["n_pending_trials"] == 1


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_says_what_it_is(job, export, outcome):
    folder = job({"one": JUDGE}, agents=["oracle"])
    (record,) = folder.records(lambda place, error: None)
    (trial,) = export(folder, [record.model_copy(update={"outcome": outcome})])["trials"].values()
    assert (trial["verifier_result"] is not None) is (outcome in GRADED)
    assert (trial["exception_info"] is None) is (outcome in (Outcome.PASSED, Outcome.FAILED))
    assert trial["agent_result"]["metadata"]["dayfly"]["outcome"] == outcome.value
    if outcome is Outcome.TAMPERED:
        assert set(trial["verifier_result"]["rewards"].values()) == {0.0}
    assert len(EXCEPTIONS) == len(Outcome) - 2


def test_nothing_is_overwritten_and_names_stay_the_same(job, tmp_path):
    folder = job({"one": JUDGE})
    records = list(folder.records(lambda place, error: None))
    made = export_harbor(folder, records, tmp_path / "out", secrets={})
    before = sorted(p.name for p in made.path.iterdir())
    with pytest.raises(ConfigError, match="exists"):
        export_harbor(folder, records, tmp_path / "out", secrets={})
    export_harbor(folder, records, tmp_path / "out", secrets={}, force=True)
    assert sorted(p.name for p in made.path.iterdir()) == before
    assert [p.name for p in (tmp_path / "out").iterdir()] == [folder.job_id]


def test_secrets_do_not_get_out(job, tmp_path):
    """Fault 54: also where the value lies across two reads of a large file."""
    value = "sk-0123456789abcdef"
    assert host_secrets({"X_API_KEY": value, "GH_TOKEN": value, "HOME": "/root/home", "A_KEY": "short"}) == {
        "X_API_KEY": value,
        "GH_TOKEN": value,
    }
    folder = job({"one": JUDGE}, solve=SOLVE + f"print {value}\n", agents=["oracle"])
    (record,) = folder.records(lambda place, error: None)
    with pytest.raises(ConfigError, match=r"agent/stdout\.txt would hold the value of X_API_KEY"):
        export_harbor(folder, [record], tmp_path / "out", secrets={"X_API_KEY": value})
    assert list((tmp_path / "out").iterdir()) == []
    stdout = folder.rollout_path(record.key) / "agent/stdout.txt"
    stdout.chmod(0o600)
    stdout.write_bytes(b"x" * ((1 << 20) - 5) + value.encode())
    with pytest.raises(ConfigError, match="would hold"):
        export_harbor(folder, [record], tmp_path / "out", secrets={"X_API_KEY": value})
    stdout.write_bytes(b"x" * (1 << 21))
    export_harbor(folder, [record], tmp_path / "out", secrets={"X_API_KEY": value})
