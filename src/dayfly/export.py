"""A job's results in Harbor's job layout, for people who have tools on it.

    TO/<job id>/config.json, result.json
    TO/<job id>/<trial>/config.json, result.json, exception.txt, agent/, verifier/, artifacts/
    TO/<job id>/<trial>/steps/<step>/{agent,verifier,artifacts}/     of a multi-step task

Harbor has no words for some of what a rollout says; those are in `agent_result.metadata.dayfly` of its result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dayfly.errors import ConfigError
from dayfly.evidence import JobFolder
from dayfly.model import Cause, Outcome, PhaseTime, RolloutRecord, StepResult, VerifierClass

_SPACE = uuid.UUID("5d1f6b0a-7c3e-5b8e-9f43-0d6c1f4d7a11")
ENVIRONMENT = "dayfly:microvm"
"""Stands where Harbor names the class of an environment that it does not bring itself."""

EXCEPTIONS: dict[Outcome, str] = {
    Outcome.AGENT_TIMEOUT: "AgentTimeoutError",
    Outcome.AGENT_ERROR: "NonZeroAgentExitCodeError",
    Outcome.SANDBOX_OOM: "MemoryLimitExceededError",
    Outcome.DISK_FULL: "DiskFullError",
    Outcome.TAMPERED: "TamperedVerdictError",
    Outcome.PROVIDER_ERROR: "ApiError",
    Outcome.INFRA_ERROR: "SandboxFailedError",
    Outcome.VERIFIER_ERROR: "VerifierOutputParseError",
    Outcome.CANCELLED: "CancelledError",
    Outcome.SKIPPED: "CancelledError",
}
"""Outcome → the name of Harbor's exception for it, or one of the same kind where it has none."""
CAUSES = {
    "no_reward": "RewardFileNotFoundError",
    "empty_reward": "RewardFileEmptyError",
    "verifier_timeout": "VerifierTimeoutError",
    "healthcheck": "HealthcheckError",
    "unhealthy": "HealthcheckError",
}
_PHASES = {"boot": "environment_setup", "setup": "agent_setup", "agent": "agent_execution", "verify": "verifier"}
MODES = {VerifierClass.SHARED: "shared", VerifierClass.REBOOTED: None, VerifierClass.SEPARATE: "separate"}


@dataclass(frozen=True)
class Exported:
    path: Path
    trials: int


def export_harbor(
    job: JobFolder, records: Iterable[RolloutRecord], to: Path, *, secrets: Mapping[str, str], force: bool = False
) -> Exported:
    """Write `to`/JOB. `secrets` are values, by name, that must not get out.

    Raises `ConfigError` when that folder exists without `force`, or when a file holds a secret; then nothing is
    written.
    """
    dest = to / job.job_id
    if dest.exists() and not force:
        raise ConfigError(f"{dest} exists", hint="--force replaces it; or name another folder with --to")
    to.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".exporting-", dir=to))
    try:
        results = [_trial(job, record, making / job.job_id, dest) for record in records]
        _write(making / job.job_id / "config.json", _job_config(job, to))
        _write(making / job.job_id / "result.json", _job_result(job, results))
        refuse_secrets(making, secrets)
        if dest.exists():
            dest.rename(making / "replaced")
        (making / job.job_id).rename(dest)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return Exported(dest, len(results))


# --- secrets -------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
MIN_SECRET = 8


def host_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of the host whose names say that they hold a secret."""
    return {name: value for name, value in env.items() if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET}


def refuse_secrets(folder: Path, secrets: Mapping[str, str]) -> None:
    """Raise `ConfigError` naming file and variable when a file below `folder` holds one of the values."""
    known = {name: value.encode("utf-8", "surrogateescape") for name, value in secrets.items()}
    overlap = max(map(len, known.values()), default=0)
    for path in _regular(folder) if known else ():
        with path.open("rb") as file:
            before = b""
            while chunk := file.read(1 << 20):
                window = before + chunk
                found = next((name for name, value in known.items() if value in window), None)
                if found is not None:
                    raise ConfigError(
                        f"{path.relative_to(folder)} would hold the value of {found}",
                        hint="nothing was exported; look at that file, or unset the variable if it is no secret",
                        cause="secret_found",
                    )
                before = window[-overlap:]


def _regular(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (p for p in (Path(root) / name for name in sorted(names)) if p.is_file() and not p.is_symlink())


# --- one trial -----------------------------------------------------------------------------------


def trial_name(record: RolloutRecord) -> str:
    """Harbor's `task__suffix`; the suffix says agent and attempt, so that names are unique and stay the same."""
    task = re.sub(r"[^A-Za-z0-9._-]", "-", record.task.split("/")[-1])[:32].rstrip("_-")
    return f"{task}__{_uuid(record.rollout_id).hex[:7]}"


def _uuid(text: str) -> uuid.UUID:
    return uuid.uuid5(_SPACE, text)


def _trial(job: JobFolder, record: RolloutRecord, folder: Path, dest: Path) -> dict[str, Any]:
    name = trial_name(record)
    source, trial = job.rollout_path(record.key), folder / name
    trial.mkdir(parents=True)
    if record.steps:
        for step in record.steps:
            _copy_evidence(source / "steps" / step.name, trial / "steps" / step.name, step.verdict is not None)
    else:
        _copy_evidence(source, trial, record.verdict is not None)
    task_path = job.lock_data()["tasks"].get(record.task, {}).get("path", record.task)
    config = _trial_config(job, record, task_path, dest)
    result = _trial_result(record, config, dest)
    _write(trial / "config.json", config)
    _write(trial / "result.json", result)
    if result["exception_info"] is not None:
        (trial / "exception.txt").write_text(result["exception_info"]["exception_message"] + "\n", "utf-8")
    return result


def _copy_evidence(source: Path, trial: Path, judged: bool) -> None:
    """agent/, verifier/ and artifacts/; what the verifier wrote lies in verifier/ itself, as in Harbor."""
    for name in ("agent", "artifacts"):
        _copy(source / name, trial / name)
    _copy(source / "verifier", trial / "verifier", leave_out={"logs"})
    _copy(source / "verifier/logs", trial / "verifier")
    if not judged:  # a file that was no verdict must not be read as one
        for name in ("reward.txt", "reward.json"):
            if (trial / "verifier" / name).exists():
                (trial / "verifier" / name).rename(trial / "verifier" / f"rejected-{name}")
    manifest = trial / "artifacts/manifest.json"
    if manifest.is_file():
        entries = json.loads(manifest.read_bytes())
        _write(manifest, [_artifact(e, manifest.parent) for e in entries])


def _copy(source: Path, dest: Path, leave_out: frozenset[str] | set[str] = frozenset()) -> None:
    """Copy what is there. Links stay links: they were checked when they came out of the guest."""
    dest.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns(*leave_out) if leave_out else None
        shutil.copytree(source, dest, symlinks=True, ignore=ignore, dirs_exist_ok=True)


def _artifact(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    destination = str(entry["destination"]).lstrip("/")
    place = folder / destination
    return {
        "source": entry["source"],
        "destination": destination,
        "type": "file" if place.is_file() else "directory",
        "status": "ok" if entry["status"] == "ok" else "failed",
        "service": None,
        "exclude": list(entry.get("exclude", [])),
    }


def _trial_config(job: JobFolder, record: RolloutRecord, task_path: str, dest: Path) -> dict[str, Any]:
    return {
        "task": {"path": task_path, "source": _dataset(task_path)},
        "trial_name": trial_name(record),
        "trials_dir": str(dest),
        "agent": {"name": record.agent},
        "environment": {"import_path": ENVIRONMENT},
        "verifier": {},
        "job_id": str(_uuid(job.job_id)),
    }


def _dataset(task_path: str) -> str | None:
    return Path(task_path).parent.name or None


def _trial_result(record: RolloutRecord, config: dict[str, Any], dest: Path) -> dict[str, Any]:
    name = config["trial_name"]
    return {
        "id": str(_uuid(record.rollout_id)),
        "task_name": record.task,
        "trial_name": name,
        "trial_uri": (dest.resolve() / name).as_uri(),
        "task_id": {"path": config["task"]["path"]},
        "source": config["task"]["source"],
        "task_checksum": record.task_digest.removeprefix("sha256:"),
        "config": config,
        "agent_info": {"name": record.agent, "version": record.agent_digest.removeprefix("sha256:")[:12]},
        "agent_result": {
            "n_input_tokens": record.usage.tokens_in,
            "n_output_tokens": record.usage.tokens_out,
            "cost_usd": record.usage.cost_usd,
            "metadata": {"dayfly": _metadata(record)},
        },
        "verifier_result": _verifier_result(record),
        "verifier_environment_mode": None if record.steps else MODES[record.verifier_class],
        "exception_info": _exception(record),
        "started_at": _time(record.started_unix),
        "finished_at": _time(record.finished_unix),
        **{key: _timing(record.phases, phase) for phase, key in _PHASES.items()},
        "step_results": [_step(record, step) for step in record.steps] or None,
    }


def _metadata(record: RolloutRecord) -> dict[str, Any]:
    """What Harbor has no word for."""
    return {
        "rollout_id": record.rollout_id,
        "job_id": record.job_id,
        "attempt": record.attempt,
        "retry": record.retry,
        "outcome": record.outcome.value,
        "passed": None if record.verdict is None else record.verdict.passed,
        "graded": record.graded,
        "isolation": record.isolation,
        "verifier_class": record.verifier_class.value,
        "start_fingerprint": None if record.start_fingerprint is None else record.start_fingerprint.digest,
        "image_digest": record.image_digest,
        "seal": record.seal,
    }


def _verifier_result(record: RolloutRecord) -> dict[str, Any] | None:
    """Only a rollout that is graded has rewards: an infrastructure or verifier fault is never a score."""
    if not record.graded:
        return None
    rewards = dict(record.rewards) or {"reward": record.reward or 0.0}
    if record.outcome is Outcome.TAMPERED:  # whatever was written there, it failed
        rewards = dict.fromkeys(rewards, 0.0)
    return {"rewards": rewards}


def _exception(record: RolloutRecord) -> dict[str, Any] | None:
    kind = EXCEPTIONS.get(record.outcome)
    if kind is None:
        return None
    return _exception_info(kind, record.cause, record.outcome.value, record.finished_unix)


def _exception_info(kind: str, cause: Cause | None, otherwise: str, when: float) -> dict[str, Any]:
    return {
        "exception_type": CAUSES.get(cause.kind, kind) if cause is not None else kind,
        "exception_message": otherwise if cause is None else cause.message,
        "exception_traceback": "" if cause is None or cause.hint is None else cause.hint,
        "occurred_at": _time(when),
    }


def _step(record: RolloutRecord, step: StepResult) -> dict[str, Any]:
    verdict = step.verdict
    cause = step.causes[0] if step.causes else None
    kind = "AgentTimeoutError" if step.timed_out else "StepError"
    phases = [p for p in record.phases if p.step == step.name]
    return {
        "step_name": step.name,
        "verifier_result": {"rewards": dict(verdict.rewards) or {"reward": verdict.reward}} if verdict else None,
        "exception_info": _exception_info(kind, cause, "", step.finished_unix) if cause is not None else None,
        "agent_execution": _timing(phases, "agent"),
        "verifier": _timing(phases, "verify"),
    }


def _timing(phases: Iterable[PhaseTime], name: str) -> dict[str, Any] | None:
    mine = [p for p in phases if p.name == name]
    if not mine:
        return None
    return {
        "started_at": _time(mine[0].started_unix),
        "finished_at": _time(mine[-1].started_unix + mine[-1].seconds),
    }


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat()


# --- the job -------------------------------------------------------------------------------------


def _job_config(job: JobFolder, to: Path) -> dict[str, Any]:
    stored = job.job()["job"]
    lock = job.lock_data()
    return {
        "job_name": job.job_id,
        "jobs_dir": str(to),
        "n_attempts": stored.get("attempts", 1),
        "n_concurrent_trials": stored.get("concurrency") or 1,
        "environment": {"import_path": ENVIRONMENT},
        "agents": [{"name": name} for name in lock["agents"]],
        "tasks": [{"path": task["path"], "source": _dataset(task["path"])} for task in lock["tasks"].values()],
    }


def _job_result(job: JobFolder, trials: list[dict[str, Any]]) -> dict[str, Any]:
    planned = int(job.job().get("planned", len(trials)))
    finished = max((t["finished_at"] for t in trials), default=None)
    started = min((t["started_at"] for t in trials), default=None)
    return {
        "id": str(_uuid(job.job_id)),
        "started_at": started or _time(job.path.stat().st_mtime),
        "updated_at": finished,
        "finished_at": finished if len(trials) >= planned else None,
        "n_total_trials": planned,
        "stats": _stats(trials, planned),
        "trial_results": trials,
    }


def _stats(trials: list[dict[str, Any]], planned: int) -> dict[str, Any]:
    errors = [t for t in trials if t["exception_info"] is not None]
    return {
        "n_completed_trials": len(trials),
        "n_errored_trials": len(errors),
        "n_running_trials": 0,
        "n_pending_trials": max(0, planned - len(trials)),
        "n_cancelled_trials": sum(e["exception_info"]["exception_type"] == "CancelledError" for e in errors),
        "n_retries": sum(t["agent_result"]["metadata"]["dayfly"]["retry"] for t in trials),
        "evals": {key: _evaluation(some) for key, some in sorted(_by_evaluation(trials).items())},
        "n_input_tokens": _sum(t["agent_result"]["n_input_tokens"] for t in trials),
        "n_output_tokens": _sum(t["agent_result"]["n_output_tokens"] for t in trials),
        "cost_usd": _sum(t["agent_result"]["cost_usd"] for t in trials),
    }


def _sum(values: Iterable[Any]) -> Any:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _by_evaluation(trials: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        found.setdefault(f"{trial['agent_info']['name']}__{trial['source'] or 'adhoc'}", []).append(trial)
    return found


def _evaluation(trials: list[dict[str, Any]]) -> dict[str, Any]:
    judged = [t for t in trials if t["verifier_result"] is not None]
    rewards: dict[str, dict[str, list[str]]] = {}
    exceptions: dict[str, list[str]] = {}
    for trial in judged:
        for name, value in trial["verifier_result"]["rewards"].items():
            rewards.setdefault(name, {}).setdefault(f"{value:g}", []).append(trial["trial_name"])
    for trial in trials:
        if trial["exception_info"] is not None:
            exceptions.setdefault(trial["exception_info"]["exception_type"], []).append(trial["trial_name"])
    return {
        "n_trials": len(judged),
        "n_errors": sum(len(names) for names in exceptions.values()),
        "metrics": _metrics(judged),
        "reward_stats": rewards,
        "exception_stats": exceptions,
    }


def _metrics(judged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean over what was graded; how much that is stands beside it, as `n_trials` of `n_total_trials`."""
    values = [t["verifier_result"]["rewards"] for t in judged]
    names = sorted({name for rewards in values for name in rewards})
    means = {n: sum(r.get(n, 0.0) for r in values) / len(values) for n in names}
    return [{"mean": next(iter(means.values()))} if len(means) == 1 else means] if means else []


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=4, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
