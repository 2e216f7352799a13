"""Options and output that several commands share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.errors import NotFoundError
from dayfly.evidence import JobFolder, list_jobs
from dayfly.model import RolloutRecord

JobsDir = Annotated[
    Path,
    typer.Option("--jobs-dir", envvar="DAYFLY_JOBS_DIR", help="Where jobs and their evidence are kept."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
DEFAULT_JOBS_DIR = Path("jobs")


def say(text: str = "") -> None:
    """A remark for the person, on standard error."""
    print(text, file=sys.stderr, flush=True)


def put_json(value: Any) -> None:
    """The answer for a program, on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def find_job(jobs_dir: Path, wanted: str) -> JobFolder:
    """A job by its id, the unique beginning of one, or `last`. Raises `NotFoundError`."""
    known = list_jobs(jobs_dir)
    matches = known[-1:] if wanted == "last" else [j for j in known if j.startswith(wanted)]
    if wanted in known:
        matches = [wanted]
    if len(matches) != 1:
        what = "is not unique" if matches else "does not exist"
        raise NotFoundError(
            f"job {wanted!r} {what} in {jobs_dir}",
            hint=f"`dayfly list` shows them; the last one is {known[-1]}" if known else "no job was run yet",
        )
    return JobFolder.open(jobs_dir, matches[0])


def find_rollout(jobs_dir: Path, wanted: str) -> tuple[JobFolder, RolloutRecord]:
    """A rollout by `JOB/ROLLOUT`, where ROLLOUT is its id, the end of it, or `task/agent/attempt`."""
    job_part, _, rest = wanted.partition("/")
    if not rest:
        for job_id in reversed(list_jobs(jobs_dir)):
            folder = JobFolder.open(jobs_dir, job_id)
            for record in folder.records():
                if record.rollout_id == wanted:
                    return folder, record
        raise NotFoundError(
            f"there is no rollout {wanted!r} in {jobs_dir}",
            hint="name it as JOB/ROLLOUT or JOB/TASK/AGENT/ATTEMPT; `dayfly show JOB` lists them",
        )
    folder = find_job(jobs_dir, job_part)
    matches = [r for r in folder.records() if rest in (r.rollout_id, label(r)) or r.rollout_id.endswith(rest)]
    if len(matches) != 1:
        what = "is not unique" if matches else "does not exist"
        raise NotFoundError(
            f"rollout {rest!r} {what} in job {folder.job_id}",
            hint=f"`dayfly show {folder.job_id}` lists them",
        )
    return folder, matches[0]


def label(record: RolloutRecord) -> str:
    """`task/agent/attempt`: how a person names a rollout within its job."""
    return f"{record.task}/{record.agent}/{record.attempt}"


def wanted_records(folder: JobFolder) -> list[RolloutRecord]:
    """The job's results, without those of tasks or agents that were removed from it since."""
    lock = folder.lock_data()
    return [r for r in folder.records() if r.task in lock["tasks"] and r.agent in lock["agents"]]
