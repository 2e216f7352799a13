"""Results from the index: a large job within a second, when the index is in step with the files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dayfly.evidence import safe_component
from dayfly.model import VerifierClass
from dayfly.results.plan import Planned
from dayfly.results.side import MISSING
from dayfly.results.tally import Gathered, Tally

if TYPE_CHECKING:
    from dayfly.stores import SqlStore, TaskRow  # imports SQLAlchemy, which is slow

_ATTEMPTS = re.compile(r"(\d+)(\D)")
_CLASSES: dict[str, VerifierClass] = {c.value: c for c in VerifierClass}


def gather_from_index(planned: Planned, store: SqlStore) -> Gathered | str:
    """What the index has, or why it cannot be used. Raises `HostError` when it fails."""
    rows = store.task_rows(planned.job_id, planned.agent, planned.attempts_taken)
    on_file, changed_unix = attempts_on_file(planned.folder.path, planned.agent, planned.attempts_taken)
    if sum(row.count for row in rows) < on_file:
        return "it lacks rollouts that are on file"
    if on_file and changed_unix > max(row.indexed_unix or 0.0 for row in rows):
        return "the files changed after it was written"
    found = _gather(planned, rows)
    found.job_graded = _job_graded(planned, store)
    return found


def attempts_on_file(job: Path, agent: str, attempts: int) -> tuple[int, float]:
    """How many of an agent's first `attempts` have a result on file, and when their folders changed last (Unix)."""
    count, newest = 0, 0.0
    names = {str(n) for n in range(1, attempts + 1)}
    place = safe_component(agent)
    if not (job / "rollouts").is_dir():
        return 0, 0.0
    with os.scandir(job / "rollouts") as tasks:
        for task in tasks:
            try:
                with os.scandir(f"{task.path}/{place}") as found:
                    count += sum(a.name in names for a in found)
                newest = max(newest, os.stat(f"{task.path}/{place}").st_mtime)  # noqa: PTH116 - of many
            except (FileNotFoundError, NotADirectoryError):
                continue
    return count, newest


def _gather(planned: Planned, rows: list[TaskRow]) -> Gathered:
    from dayfly.stores import version_of

    found, tallies = Gathered("index"), dict[str, Tally]()
    found.tallies = tallies
    taken = planned.attempts_taken
    for row in rows:
        locked = planned.tasks.get(row.task)
        if locked is None or row.version != version_of(locked["digest"], planned.agent_digest):
            continue
        tally = tallies.get(row.task)
        if tally is None:
            tally = tallies[row.task] = Tally([MISSING] * taken)
        for number, mark in _ATTEMPTS.findall(row.attempts):
            tally.marks[int(number) - 1] = mark
        found.span(row.started_unix, row.finished_unix)
        if row.graded:
            _add(tally, row)
    return found


def _add(tally: Tally, row: TaskRow) -> None:
    tally.graded += row.count
    tally.reward += row.reward_sum
    tally.seconds += row.seconds_sum
    known = row.tokens_known == row.count
    tally.tokens = tally.tokens + int(row.tokens_sum) if known and tally.tokens is not None else None
    known = row.cost_known == row.count
    tally.cost = tally.cost + row.cost_sum if known and tally.cost is not None else None
    tally.verifier_classes.add(_CLASSES[row.verifier_class])
    if row.isolation is not None:
        tally.isolation.add(row.isolation)
    if row.disk_digest:
        tally.disks.add(row.disk_digest)


def _job_graded(planned: Planned, store: SqlStore) -> int:
    from dayfly.stores import version_of

    wanted = {
        (agent, task, version_of(locked["digest"], digest))
        for agent, digest in planned.agent_digests.items()
        for task, locked in planned.tasks.items()
    }
    counted = store.graded_versions(planned.job_id, planned.attempts)
    return sum(count for key, count in counted.items() if key in wanted)
