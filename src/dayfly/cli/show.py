"""`list` and `show`: read what is on file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.cli.common import (
    DEFAULT_JOBS_DIR,
    JobsDir,
    Json,
    Rollout,
    find,
    find_rollout,
    label,
    wanted_records,
)
from dayfly.cli.display import COLOURS
from dayfly.cli.output import Cell, put, put_json, put_table, say, terminal_columns
from dayfly.errors import DayflyError
from dayfly.evidence import JobFolder, Problem, verify_folder
from dayfly.evidence import list_jobs as list_job_ids
from dayfly.model import RolloutRecord, StepResult
from dayfly.report import HEADER, JobSummary, facts, rows, summarise


def register(app: typer.Typer) -> None:
    app.command("list")(list_jobs)
    app.command()(show)


# --- list ----------------------------------------------------------------------------------------


def list_jobs(jobs_dir: JobsDir = DEFAULT_JOBS_DIR, json: Json = False) -> None:
    """List the jobs on file, newest last. A broken one is listed as such."""
    jobs = [_job_line(jobs_dir, job_id) for job_id in list_job_ids(jobs_dir)]
    if json:
        put_json({"schema_version": 1, "jobs": jobs})
        return
    if not jobs:
        say(f"no jobs in {jobs_dir}; `dayfly run` makes one")
        return
    put_table(
        ("job", "name", "state", "rollouts", "graded", "passed"),
        ([j["id"], j["name"], j["state"], _of(j), _number(j["graded"]), _number(j["passed"])] for j in jobs),
        wrap="name",
    )
    for job in jobs:
        for message in job["broken"]:
            say(f"warning: {message}")


def _of(job: dict[str, Any]) -> str:
    return "–" if job["on_file"] is None else f"{job['on_file']}/{job['planned']}"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _job_line(jobs_dir: Path, job_id: str) -> dict[str, Any]:
    line: dict[str, Any] = {"id": job_id, "name": "", "state": "broken"}
    line |= dict.fromkeys(("planned", "on_file", "graded", "passed"))
    try:
        job = JobFolder.open(jobs_dir, job_id)
        stored = job.job()
        records, broken = wanted_records(job)
        graded = sum(r.graded for r in records)
        return line | {
            "name": stored["job"]["name"],
            "state": _state(job, graded, stored["planned"]),
            "planned": stored["planned"],
            "on_file": len(records),
            "graded": graded,
            "passed": sum(r.outcome.value == "passed" for r in records),
            "broken": broken,
        }
    except DayflyError as error:
        return line | {"broken": [error.message]}
    except (KeyError, TypeError) as error:  # JSON, but not what a job writes
        return line | {"broken": [f"{jobs_dir / job_id}: job.json or lock.json lacks {error}"]}


def _state(job: JobFolder, graded: int, planned: int) -> str:
    if job.holder() is not None:
        return "running"
    return "complete" if graded >= planned else "incomplete"


# --- show ----------------------------------------------------------------------------------------


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB[/ROLLOUT]",
            help="A job: its id, the beginning of one, `last`, or its folder. "
            "A rollout in it: TASK/AGENT/ATTEMPT, or its id.",
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Check every digest of the evidence.")] = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Show a job's results, or everything known of one rollout. With --verify, exit 1 if evidence changed."""
    job, rest = find(jobs_dir, what)
    problems: dict[str, list[Problem]] = {}
    if rest:
        rollout = find_rollout(job, rest)
        places = [rollout.place]
        answer: Any = rollout.record.model_dump(mode="json") | _beside(rollout)
    else:
        places = sorted(p for p in job.path.glob("rollouts/*/*/*") if p.is_dir())
        records, broken = wanted_records(job)
        summary = summarise(job.lock_data()["planned_by_agent"], records)
        answer = _job_answer(job, summary, records, broken)
    if verify:
        problems = {p.relative_to(job.path / "rollouts").as_posix(): verify_folder(p) for p in places}
        problems = {name: found for name, found in problems.items() if found}
        answer |= {"verified": not problems, "problems": {n: _words(f) for n, f in problems.items()}}
    if json:
        put_json(answer)
    elif rest:
        _show_rollout(rollout)
    else:
        _show_job(job, summary, records, broken)
    if verify and not json:
        _say_verified(len(places), problems)
    if problems:
        raise typer.Exit(1)


def _words(problems: list[Problem]) -> list[str]:
    return [f"{p.kind}: {p.path}: {p.message}" for p in problems]


def _job_answer(
    job: JobFolder, summary: JobSummary, records: list[RolloutRecord], broken: list[str]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "id": job.job_id,
        "folder": str(job.path),
        "summary": summary.model_dump(mode="json"),
        "rollouts": [r.model_dump(mode="json") for r in records],
        "broken": broken,
    }


def _beside(rollout: Rollout) -> dict[str, Any]:
    """What `rollout.json` itself cannot say: where it is, and other starts of the same attempt."""
    others = [
        {"rollout_id": r.rollout_id, "outcome": r.outcome.value, "cause": r.cause and r.cause.model_dump()}
        for r in _other_starts(rollout)
    ]
    return {"folder": str(rollout.place), "other_starts": others}


def _other_starts(rollout: Rollout) -> list[RolloutRecord]:
    try:
        starts = rollout.job.history(rollout.record.key)
    except DayflyError as error:  # a broken one hides the others, not this rollout
        say(f"warning: {error.message}")
        return []
    return [r for r in starts if r.rollout_id != rollout.record.rollout_id]


def _say_verified(count: int, problems: dict[str, list[Problem]]) -> None:
    if not problems:
        say(f"verified: the evidence of {count} rollout(s), earlier starts included, is as it was sealed")
    for name, found in problems.items():
        for problem in _words(found):
            say(f"not as sealed: {name}: {problem}")


def _show_job(job: JobFolder, summary: JobSummary, records: list[RolloutRecord], broken: list[str]) -> None:
    records = sorted(records, key=lambda r: (r.task, r.agent, r.attempt))
    put_table(
        ("rollout", "outcome", "reward", "class", "seconds"),
        (
            (
                label(r),
                (r.outcome.value, COLOURS[r.outcome.value]),
                "–" if r.reward is None else f"{r.reward:g}",
                r.verifier_class.value,
                f"{r.finished_unix - r.started_unix:.1f}",
            )
            for r in records
        ),
    )
    explained = [r for r in records if r.cause]
    if explained:
        put()
    for r in explained:
        assert r.cause is not None
        put(f"{label(r)}: {r.outcome.value}: {r.cause.message}")
    put()
    put_summary(summary)
    put(f"folder: {job.path}")
    for message in broken:
        say(f"warning: {message}")


def put_summary(summary: JobSummary) -> None:
    """The figures of a job: a row per agent, and what holds for all."""
    columns = len(HEADER) if terminal_columns() >= 110 else HEADER.index("median")  # times matter least
    put_table(HEADER[:columns], (row[:columns] for row in rows(summary)), wrap="outcomes")
    for fact in facts(summary):
        put(fact)


def _show_rollout(rollout: Rollout) -> None:
    record = rollout.record
    put_table(("", ""), _facts(rollout), wrap="")
    put()
    if record.steps:
        put_table(("step", "reward", "seconds", ""), map(_step_line, record.steps))
        put()
    put_table(
        ("phase", "seconds"),
        ((p.name if p.step is None else f"{p.name} {p.step}", f"{p.seconds:8.2f}") for p in record.phases),
    )
    put()
    for vm in record.vms:
        put(f"vm {vm.id}: {vm.how} in {vm.start_s * 1000:.0f} ms, {vm.isolation}")
    for note in record.notes:
        put(f"note: {note}")
    put(f"{len(record.files)} files of evidence in {rollout.place}")


def _step_line(step: StepResult) -> tuple[Cell, ...]:
    reward = f"{step.verdict.reward:g}" if step.verdict else "none"
    causes = "; ".join(c.message for c in step.causes)
    return step.name, reward, f"{step.finished_unix - step.started_unix:8.2f}", causes


def _facts(rollout: Rollout) -> Iterator[tuple[Cell, Cell]]:
    record = rollout.record
    yield _fact("rollout", f"{record.rollout_id} (job {record.job_id})")
    yield _fact("task", record.task)
    yield _fact("", record.task_digest)
    yield _fact("agent", record.agent)
    yield _fact("", record.agent_digest)
    yield _fact("attempt", f"{record.attempt}" + (f", start number {record.retry + 1}" if record.retry else ""))
    yield _fact("started", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(record.started_unix)))
    yield _fact("outcome", record.outcome.value, COLOURS[record.outcome.value])
    yield _fact("reward", "none" if record.reward is None else f"{record.reward:g}")
    for name, value in record.rewards.items():
        yield _fact("", f"{name} {value:g}")
    for number, cause in enumerate(filter(None, [record.cause, *record.further_causes])):
        yield _fact(
            "further" if number else "cause", cause.message + (f" (in {cause.phase})" if cause.phase else "")
        )
        for line in (cause.hint or "").splitlines():
            yield _fact("", line)
    yield _fact("isolation", f"{record.isolation or 'none'}; verifier class {record.verifier_class.value}")
    if record.start_fingerprint is not None:
        yield _fact("start", record.start_fingerprint.digest)
    peak = record.usage.memory_peak_bytes
    yield _fact("memory", "unknown" if peak is None else f"peak {peak / 2**20:.0f} MiB")
    for other in _other_starts(rollout):
        why = f": {other.cause.message}" if other.cause else ""
        yield _fact("other start", f"{other.rollout_id} {other.outcome.value}{why}")


def _fact(name: str, value: str, style: str = "") -> tuple[Cell, Cell]:
    return (name, "bold"), (value, style)
