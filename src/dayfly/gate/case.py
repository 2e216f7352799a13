"""All that a verdict is decided on, and what several rules count."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dayfly.compare.model import Comparison
from dayfly.gate.policy import Policy, Quarantine
from dayfly.gate.verdict import EarlyStopped
from dayfly.results.side import MISSING, Side, TaskResults

NOT_DONE = MISSING + "cs"
"""Marks of attempts that nobody began, or that were broken off with the job."""


@dataclass(frozen=True)
class Counts:
    """Of one side's attempts, quarantined tasks not counted."""

    planned: int
    graded: int
    faults: int

    @property
    def coverage(self) -> float:
        return self.graded / self.planned if self.planned else 0.0

    @property
    def fault_rate(self) -> float:
        return self.faults / self.planned if self.planned else 0.0


@dataclass(frozen=True)
class Case:
    """A policy and what it is applied to."""

    policy: Policy
    candidate: Side
    baseline: Side | None
    confirm: tuple[Side, ...]
    quarantine: Quarantine
    comparison: Comparison | None
    """None without a baseline."""
    stopped: EarlyStopped | None
    """When the candidate's job was ended early, for good reason."""
    alpha: float
    """One-sided error of each final test; less than the policy's when a part was spent on early looks."""
    today: datetime.date

    @property
    def sides(self) -> Iterator[tuple[str, Side]]:
        """The sides by the word that ids of rules end with."""
        if self.baseline is not None:
            yield "baseline", self.baseline
        yield "candidate", self.candidate

    @cached_property
    def quarantined(self) -> frozenset[str]:
        return frozenset(e.task for e in self.quarantine.tasks)

    def counted(self, side: Side) -> list[TaskResults]:
        return [t for t in side.tasks.values() if t.task not in self.quarantined]

    def counts(self, side: Side) -> Counts:
        tasks = self.counted(side)
        spared = sum(self.spared(side, t) for t in tasks)
        planned = sum(t.planned for t in tasks) - spared
        return Counts(planned, sum(t.graded for t in tasks), sum(t.faults for t in tasks))

    def spared(self, side: Side, task: TaskResults) -> int:
        """Attempts that an early stop made needless; they are not missing."""
        if self.stopped is None or side is not self.candidate:
            return 0
        return sum(map(task.marks.count, NOT_DONE))
