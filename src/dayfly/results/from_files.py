"""Results from the files of a job: every record is read, and its seal is checked."""

from __future__ import annotations

from pathlib import Path

from dayfly.errors import DayflyError
from dayfly.evidence import safe_component
from dayfly.model import RolloutRecord
from dayfly.results.plan import Planned
from dayfly.results.side import MISSING
from dayfly.results.tally import Gathered, Tally


def gather_from_files(planned: Planned) -> Gathered:
    """A record that is broken, changed, twice there or of another job does not count, and is told of."""
    found, tallies, seen = Gathered("files"), dict[str, Tally](), set[tuple[str, str, int]]()
    found.tallies = tallies
    place_of_agent = safe_component(planned.agent)

    def broken(place: Path, error: DayflyError) -> None:
        if place.parent.name == place_of_agent:
            found.problems.append(error.message)

    for record in planned.folder.records(broken, sealed=True):
        attempt, mine = (record.task, record.agent, record.attempt), record.agent == planned.agent
        if record.job_id != planned.job_id:
            wrong = f"is of another job, {record.job_id}"
        elif not _counts(planned, record):
            continue
        elif attempt in seen:
            wrong = "is there twice"
        else:
            seen.add(attempt)
            found.job_graded += record.graded
            if mine and record.attempt <= planned.attempts_taken:
                _add(planned, found, tallies, record)
            continue
        if mine:
            found.problems.append("{}/{}/{} {}".format(*attempt, wrong))
    return found


def _counts(planned: Planned, record: RolloutRecord) -> bool:
    """Whether it is of a task and an agent that the job has now, at their versions."""
    task = planned.tasks.get(record.task)
    return (
        task is not None
        and task["digest"] == record.task_digest
        and planned.agent_digests.get(record.agent) == record.agent_digest
        and 1 <= record.attempt <= planned.attempts
    )


def _add(planned: Planned, found: Gathered, tallies: dict[str, Tally], record: RolloutRecord) -> None:
    tally = tallies.get(record.task)
    if tally is None:
        tally = tallies[record.task] = Tally([MISSING] * planned.attempts_taken)
    tally.marks[record.attempt - 1] = record.mark
    found.span(record.started_unix, record.finished_unix)
    if not record.graded:
        return
    usage = record.usage
    tally.graded += 1
    tally.reward += record.reward or 0.0
    tally.seconds += record.finished_unix - record.started_unix
    if usage.tokens_in is None or usage.tokens_out is None or tally.tokens is None:
        tally.tokens = None
    else:
        tally.tokens += usage.tokens_in + usage.tokens_out
    tally.cost = None if usage.cost_usd is None or tally.cost is None else tally.cost + usage.cost_usd
    tally.verifier_classes.add(record.verifier_class)
    if record.isolation is not None:
        tally.isolation.add(record.isolation)
    if record.disk_digest:
        tally.disks.add(record.disk_digest)
