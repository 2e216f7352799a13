"""Which job a person means."""

from __future__ import annotations

from pathlib import Path

from dayfly.errors import NotFoundError
from dayfly.evidence.job_folder import JobFolder, list_jobs


def find_job(jobs_dir: Path, wanted: str) -> JobFolder:
    """A job by its id, the unique beginning of one, `last`, or its folder's path. Raises `NotFoundError`."""
    if (by_path := find_path(wanted)) is not None and not by_path[1]:
        return by_path[0]
    known = list_jobs(jobs_dir)
    matches = known[-1:] if wanted == "last" else [j for j in known if wanted and j.startswith(wanted)]
    if wanted in known:
        matches = [wanted]
    if not known:
        raise NotFoundError(
            f"there is no job in {jobs_dir}, so none called {wanted!r}",
            hint="`dayfly run` makes one; --jobs-dir names another folder",
        )
    if len(matches) != 1:
        what = f"is not unique: {', '.join(matches[:5])}" if matches else "does not exist"
        raise NotFoundError(
            f"job {wanted!r} in {jobs_dir} {what}",
            hint=f"`dayfly list` shows the jobs; the last one is {known[-1]}",
        )
    return JobFolder.open(jobs_dir, matches[0])


def find_path(what: str) -> tuple[JobFolder, str] | None:
    """A job's folder by its path, and what follows it."""
    path = Path(what).expanduser()
    for folder in (path, *path.parents):
        if folder == Path() and not what.startswith("."):
            continue  # `last/…` inside a job's folder means the last job
        if (folder / "job.json").is_file():
            real = folder.resolve()
            rest = path.relative_to(folder).as_posix().removeprefix("rollouts/")
            # By `.`, or a link, the folder has another name than its own.
            parent = folder.parent if folder.name == real.name else real.parent
            return JobFolder.open(parent, real.name), rest.strip(".")
    return None
