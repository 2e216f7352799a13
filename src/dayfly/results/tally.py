"""Adding up attempts by task, from records or from rows of the index, to one `Side`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dayfly.model import Isolation, VerifierClass
from dayfly.results.plan import Planned
from dayfly.results.side import MISSING, Side, TaskResults


@dataclass(slots=True)
class Tally:
    """One task's counted attempts. Sums are over the graded ones."""

    marks: list[str]
    reward: float = 0.0
    seconds: float = 0.0
    tokens: int | None = 0
    cost: float | None = 0.0
    graded: int = 0
    isolation: set[Isolation] = field(default_factory=set)
    verifier_classes: set[VerifierClass] = field(default_factory=set)
    disks: set[str] = field(default_factory=set)


@dataclass
class Gathered:
    """What a source found."""

    source: Literal["files", "index"]
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    job_graded: int = 0
    started_unix: float = 0.0
    finished_unix: float = 0.0

    def span(self, started: float, finished: float) -> None:
        self.started_unix = min(self.started_unix or started, started)
        self.finished_unix = max(self.finished_unix, finished)


def side_of(planned: Planned, found: Gathered) -> Side:
    """The side of what was planned and what was found."""
    missing = MISSING * planned.attempts_taken
    tasks = {
        name: _results(name, planned.tasks[name], found.tallies.get(name), missing)
        for name in sorted(planned.tasks)
    }
    return Side(
        job_id=planned.folder.job_id,
        job_name=planned.job_name,
        agent=planned.agent,
        agent_digest=planned.agent_digest,
        agent_kind=planned.agent_kind,
        agent_options=planned.agent_options,
        attempts=planned.attempts_taken,
        tasks=tasks,
        seed=planned.seed,
        started_unix=found.started_unix,
        finished_unix=found.finished_unix,
        host=planned.host,
        source=found.source,
        problems=tuple(found.problems),
        remarks=tuple(found.remarks),
        digest=results_digest(planned.agent_digest, tasks.values()),
        early_stop=planned.early_stop,
        job_planned=planned.job_planned,
        job_graded=found.job_graded,
        folder=planned.folder.path,
    )


def _results(name: str, locked: Mapping[str, Any], tally: Tally | None, missing: str) -> TaskResults:
    machine = locked.get("machine")
    known = tally is not None and tally.graded
    return TaskResults(
        task=name,
        task_digest=locked["digest"],
        marks=missing if tally is None else "".join(tally.marks),
        reward_sum=tally.reward if tally else 0.0,
        seconds_sum=tally.seconds if tally else 0.0,
        tokens_sum=tally.tokens if tally and known else None,
        cost_sum=tally.cost if tally and known else None,
        verifier_digest=locked.get("verifier_digest", ""),
        verifier_classes=_sorted(tally.verifier_classes) if tally else (),
        isolation=_sorted(tally.isolation) if tally else (),
        disk_digests=_sorted(tally.disks) if tally else (),
        agent_limit_s=locked.get("agent_limit_s"),
        verifier_timeout_s=locked.get("verifier_timeout_s"),
        machine=(machine["cpus"], machine["memory_mib"], machine["storage_mib"]) if machine else None,
        tags=tuple(locked.get("tags", ())),
        metadata=locked.get("metadata", {}),
    )


def _sorted(values: set[Any]) -> tuple[Any, ...]:
    return tuple(values) if len(values) < 2 else tuple(sorted(values))


def results_digest(agent_digest: str, tasks: Iterable[TaskResults]) -> str:
    """sha256:… over the agent's digest, and of every task, by name, the digests and marks."""
    digest = hashlib.sha256(f"{agent_digest}\n".encode())
    for task in tasks:
        # The name last and with its length, as it may hold anything.
        line = f"{task.task_digest} {task.verifier_digest} {task.marks} {len(task.task)} {task.task}\n"
        digest.update(line.encode("utf-8", "surrogatepass"))
    return "sha256:" + digest.hexdigest()
