"""`load_side`: one agent version's results, whichever source has them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dayfly.errors import DayflyError, NotFoundError
from dayfly.evidence import JobFolder, safe_component, verify_folder
from dayfly.results.from_files import gather_from_files
from dayfly.results.plan import Planned, find_side, read_plan
from dayfly.results.side import Side
from dayfly.results.tally import Gathered, side_of

FILES_UP_TO = 5_000
"""Planned rollouts of a job that are read from its files; beyond, the index is asked."""
INDEX_NAME = "index.db"
"""As `dayfly.stores` has it, which is slow to import."""


def load_side(jobs_dir: Path, text: str, *, attempts: int | None = None) -> Side:
    """`JOB[:AGENT]` (see `evidence.find_job`) or `@NAME`, a baseline → its results.

    Without an agent the only one is taken, or the only one beside oracle and no-op. `attempts`: only the first
    so many of each task. Raises `NotFoundError`; `ConfigError` when several agents can be meant, or a baseline
    no longer is what was set; `HostError` when the job's files are broken.
    """
    if text.startswith("@"):
        from dayfly.results.baseline import load_baseline

        return load_baseline(jobs_dir, text[1:], attempts=attempts)
    return load_job_side(*find_side(jobs_dir, text), attempts=attempts)


def load_job_side(folder: JobFolder, agent: str | None, *, attempts: int | None = None) -> Side:
    """As `load_side`, of a job that is found."""
    with nothing_is_garbage():
        planned = read_plan(folder, agent, attempts)
        remarks: list[str] = []
        found = _from_index(planned, remarks)
        if found is None:
            found = gather_from_files(planned)
        found.remarks += remarks
        return side_of(planned, found)


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """Of a million objects that are made now, all stay; the search for cycles took half of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _from_index(planned: Planned, remarks: list[str]) -> Gathered | None:
    """From the index, where it is worth it: for a large job, or one whose rollouts are not on this disk."""
    path = planned.folder.path.parent / INDEX_NAME
    here = _has_rollouts(planned.folder)
    if not path.is_file() or (here and planned.job_planned <= FILES_UP_TO):
        return None
    from dayfly.results.from_index import gather_from_index
    from dayfly.stores import SqlStore

    try:
        with SqlStore.open(path.parent) as store:
            found = gather_from_index(planned, store)
    except DayflyError as error:
        if not here:
            raise
        found = error.message
    if isinstance(found, str):
        remarks.append(f"the index was not used: {found}; `dayfly gc --reindex` brings it into step")
        return None
    return found


def _has_rollouts(folder: JobFolder) -> bool:
    try:
        return any(True for _ in (folder.path / "rollouts").iterdir())
    except FileNotFoundError:
        return False


def verify_evidence(side: Side) -> list[str]:
    """Check every digest of every attempt of a side that counts; a sentence per difference.

    An attempt whose files are not on this disk is one, too.
    """
    wrong: list[str] = []
    for task in side.tasks.values():
        place = side.folder / "rollouts" / safe_component(task.task) / safe_component(side.agent)
        for number, mark in enumerate(task.marks, 1):
            if mark == ".":
                continue
            try:
                problems = verify_folder(place / str(number))
            except NotFoundError as error:
                wrong.append(f"{task.task}/{side.agent}/{number}: {error.message}")
            else:
                wrong += [f"{task.task}/{side.agent}/{number}: {p.path}: {p.message}" for p in problems]
    return wrong
