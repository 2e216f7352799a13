"""What a comparison compares: one agent version's rollouts in one job, gathered by task. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dayfly.model import MARKS, Isolation, VerifierClass

MISSING = "."
"""The mark of an attempt without a record."""
PASSES = "PTEMD"
FAILS = "Ftemdx"
FAULTS = "piv"
"""Not graded, for a cause that is not the agent's."""

__all__ = ["FAILS", "FAULTS", "MARKS", "MISSING", "PASSES", "Side", "TaskResults"]


@lru_cache(maxsize=1 << 16)
def _count(marks: str, wanted: str) -> int:
    """Cached, since most of very many tasks have the same few rows of marks."""
    return sum(map(marks.count, wanted))


@dataclass(frozen=True, slots=True)
class TaskResults:
    """One task's attempts by one agent version. Sums are over its graded attempts; None means unknown."""

    task: str
    task_digest: str
    marks: str
    """A character of `MARKS` per planned attempt, in order, or `MISSING`: everything counted comes from here."""
    reward_sum: float = 0.0
    """A graded attempt without a verdict has reward 0."""
    seconds_sum: float = 0.0
    tokens_sum: int | None = None
    """In and out together; None unless known for every graded attempt."""
    cost_sum: float | None = None
    """US dollars; None unless known for every graded attempt."""
    verifier_digest: str = ""
    """sha256:… of what judges (tests, command, image and settings of the verifier); empty: not recorded."""
    verifier_classes: tuple[VerifierClass, ...] = ()
    isolation: tuple[Isolation, ...] = ()
    disk_digests: tuple[str, ...] = ()
    agent_limit_s: float | None = None
    verifier_timeout_s: float | None = None
    machine: tuple[int, int, int] | None = None
    """CPUs, memory in MiB, storage in MiB."""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The plain values of the task's metadata, as text."""

    @property
    def planned(self) -> int:
        return len(self.marks)

    @property
    def passed(self) -> int:
        return _count(self.marks, PASSES)

    @property
    def graded(self) -> int:
        return self.passed + _count(self.marks, FAILS)

    @property
    def faults(self) -> int:
        """Attempts lost to infrastructure, provider or verifier."""
        return _count(self.marks, FAULTS)

    @property
    def rate(self) -> float | None:
        """Share of the graded attempts that passed; None without any."""
        return self.passed / self.graded if self.graded else None

    @property
    def flaky(self) -> bool:
        return 0 < self.passed < self.graded


@dataclass(frozen=True)
class Side:
    """One agent version in one job."""

    job_id: str
    job_name: str
    agent: str
    agent_digest: str
    agent_kind: str
    agent_options: Mapping[str, Any]
    """As in the job file: model, prompt and the like are among them, if anywhere."""
    attempts: int
    """Planned per task."""
    tasks: Mapping[str, TaskResults]
    """Every planned task by name, in order of name; also one without any record."""
    seed: int = 0
    started_unix: float = 0.0
    finished_unix: float = 0.0
    host: Mapping[str, str] = field(default_factory=dict)
    """Facts of the machine and its software (`dayfly`, `qemu`, `kernel`, `cpus`…); empty when not recorded."""
    source: Literal["files", "index"] = "files"
    problems: tuple[str, ...] = ()
    """Records that cannot be read or are not as they were sealed, a sentence each."""
    remarks: tuple[str, ...] = ()
    """What is no fault of the results, such as an index that could not be used."""
    digest: str = ""
    """sha256:… over tasks, digests and marks: names exactly these results."""
    early_stop: Mapping[str, Any] | None = None
    """What `run --gate` wrote into job.json, or None."""
    job_planned: int = 0
    """Of the whole job, all agents."""
    job_graded: int = 0
    folder: Path = Path()
    """Of the job."""

    @property
    def planned(self) -> int:
        return sum(t.planned for t in self.tasks.values())

    @property
    def graded(self) -> int:
        return sum(t.graded for t in self.tasks.values())

    @property
    def faults(self) -> int:
        return sum(t.faults for t in self.tasks.values())

    @property
    def label(self) -> str:
        """`JOB:AGENT`, as a person names it."""
        return f"{self.job_id}:{self.agent}"
