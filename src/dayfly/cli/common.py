"""Options and finding jobs and rollouts, as several commands share them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dayfly.cli.output import say
from dayfly.errors import DayflyError, NotFoundError
from dayfly.evidence import RECORD_NAME, JobFolder, find_job, find_path, list_jobs, load_record
from dayfly.model import RolloutRecord

JobsDir = Annotated[
    Path,
    typer.Option("--jobs-dir", envvar="DAYFLY_JOBS_DIR", help="Where jobs and their evidence are kept."),
]
# Parameters are called as their options are (`json`, `all`), because the DAYFLY_… variables take the name.
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
ForceBuild = Annotated[
    bool | None,
    typer.Option(
        "--force-build/--no-force-build",
        help="Build environment/Dockerfile also where docker_image names an image made of it.",
    ),
]


class Pull(StrEnum):
    """When a registry is asked for an image; see `dayfly.images.PullPolicy`."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


DEFAULT_JOBS_DIR = Path("jobs")


@dataclass(frozen=True)
class Rollout:
    """A rollout on file, and where."""

    job: JobFolder
    record: RolloutRecord
    place: Path


def find(jobs_dir: Path, what: str) -> tuple[JobFolder, str]:
    """`JOB` or `JOB/ROLLOUT` → the job, and the part that names a rollout in it (empty for the job itself).

    JOB is an id, the unique beginning of one, `last`, or the path of a job's folder; the id of a rollout
    alone is found, too. Raises `NotFoundError`.
    """
    if (by_path := find_path(what)) is not None:
        return by_path
    name, _, rest = what.partition("/")
    try:
        return find_job(jobs_dir, name), rest.strip("/")
    except NotFoundError:
        job = None if rest else _job_of_rollout(jobs_dir, name)
        if job is None:
            raise
        return job, name


def _job_of_rollout(jobs_dir: Path, rollout_id: str) -> JobFolder | None:
    for job_id in reversed(list_jobs(jobs_dir)):
        try:
            job = JobFolder.open(jobs_dir, job_id)
            job.folder_of(rollout_id, lambda place, error: None)
        except DayflyError:
            continue
        return job
    return None


def find_rollout(job: JobFolder, wanted: str) -> Rollout:
    """A rollout of a job by its id, the end of it, `task/agent/attempt`, or its folder. Raises `NotFoundError`."""
    if not wanted:
        raise NotFoundError(
            f"{job.job_id} is a job; name a rollout of it", hint=f"`dayfly show {job.job_id}` lists them"
        )
    by_place = job.path / "rollouts" / wanted
    if (by_place / RECORD_NAME).is_file():
        return Rollout(job, load_record(by_place), by_place)
    broken: list[str] = []
    records = list(job.records(lambda place, error: broken.append(error.message)))
    exact = [r for r in records if wanted in (r.rollout_id, label(r))]
    matches = exact or [r for r in records if r.rollout_id.endswith(wanted)]
    if len(matches) == 1:
        return Rollout(job, matches[0], job.rollout_path(matches[0].key))
    if not matches:
        try:
            earlier = job.folder_of(wanted, lambda place, error: None)
            return Rollout(job, load_record(earlier), earlier)
        except NotFoundError:
            pass
    for message in broken:
        say(f"warning: {message}")
    what = "is not unique" if matches else "does not exist"
    raise NotFoundError(
        f"rollout {wanted!r} {what} in job {job.job_id}",
        hint=f"`dayfly show {job.job_id}` lists them, as TASK/AGENT/ATTEMPT",
    )


def label(record: RolloutRecord) -> str:
    """`task/agent/attempt`: how a person names a rollout within its job."""
    return f"{record.task}/{record.agent}/{record.attempt}"


def wanted_records(job: JobFolder) -> tuple[list[RolloutRecord], list[str]]:
    """The job's results, without those of tasks or agents that were removed from it since; what is broken."""
    lock = job.lock_data()
    broken: list[str] = []
    records = job.records(lambda place, error: broken.append(error.message))
    return [r for r in records if r.task in lock["tasks"] and r.agent in lock["agents"]], broken


def command_line(*words: str, jobs_dir: Path = DEFAULT_JOBS_DIR) -> str:
    """A command for the person to copy, quoted for the shell."""
    where = [] if jobs_dir == DEFAULT_JOBS_DIR else ["--jobs-dir", str(jobs_dir)]
    return shlex.join(["dayfly", *words, *where])
