"""The comparison as data: everything that terminal, JSON, Markdown, HTML and the gate render or decide on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayfly.model import Frozen, Isolation, VerifierClass

Aspect = Literal[
    "agent",
    "model",
    "prompt",
    "options",
    "attempts",
    "task",
    "verifier",
    "limits",
    "image",
    "isolation",
    "verifier class",
    "host",
    "seed",
]
"""What may be the same or vary between two sides."""

Allowed = Literal["attempts", "limits", "image", "isolation", "verifier class"]
"""Differences that a person can declare to be meant; the tasks then stay comparable."""

Reason = Literal[
    "only in the baseline",
    "only in the candidate",
    "task changed",
    "verifier changed",
    "limits differ",
    "image differs",
    "isolation differs",
    "verifier class differs",
    "not graded in the baseline",
    "not graded in the candidate",
    "under the coverage floor",
    "quarantined",
]
"""Why a task is left out of the pairs."""

Transition = Literal["pass→fail", "worse", "fail→pass", "better", "pass", "fail", "mixed"]
"""pass→fail: all attempts passed, now none does. worse, better: the share of passes moved otherwise. pass, fail:
all attempts of both sides. mixed: an equal share between."""


class SideFacts(Frozen):
    """Which results one side is."""

    job_id: str
    job_name: str
    agent: str
    agent_digest: str
    results_digest: str
    planned: int
    graded: int
    faults: int
    coverage: float
    """graded ÷ planned; 0 when nothing was planned."""
    tasks: int
    attempts: int
    score: float | None
    """Over all its graded tasks, comparable or not. None: nothing graded."""
    isolation: tuple[Isolation, ...]
    verifier_classes: tuple[VerifierClass, ...]
    started_unix: float
    source: Literal["files", "index"]
    problems: tuple[str, ...] = ()
    """Records that do not count because something is wrong with them, a sentence each."""
    remarks: tuple[str, ...] = ()
    """About how the results were read; no fault of them."""


class Difference(Frozen):
    """One aspect in which the sides differ."""

    aspect: Aspect
    base: str
    candidate: str
    tasks: int | None = None
    """In how many tasks, when it is one of tasks; None when it is one of the whole side."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    task: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One comparable task. Marks as in `results.side.MARKS`."""

    task: str
    base_marks: str
    candidate_marks: str
    base: float
    """Share of graded attempts that passed."""
    candidate: float
    transition: Transition
    base_seconds: float
    """Mean over graded attempts, in seconds."""
    candidate_seconds: float
    tags: tuple[str, ...] = ()

    @property
    def delta(self) -> float:
        return self.candidate - self.base


class Metric(Frozen):
    """A difference over the comparable tasks. `known` False: nothing but `reason` holds."""

    name: str
    """score, reward, pass@K, pass^K, seconds, tokens, cost_usd."""
    relative: bool
    """True for seconds, tokens and cost: `delta` and its bounds are shares of the baseline (0.2: a fifth more)."""
    higher_is_better: bool
    known: bool
    reason: str = ""
    """Why it is not known."""
    tasks: int = 0
    base: float | None = None
    candidate: float | None = None
    delta: float | None = None
    """candidate − base, or for relative ones candidate ÷ base − 1."""
    low: float | None = None
    high: float | None = None
    """Two-sided interval at 1 − 2α of delta: `low` and `high` are also the one-sided bounds at 1 − α."""
    p_worse: float | None = None
    """One-sided exact or permutation p of "no worse" (`worse` in the direction of `higher_is_better`)."""
    p_better: float | None = None
    margin: float | None = None
    """The largest worsening that a policy lets through (≥ 0, in the unit of delta)."""
    p_beyond_margin: float | None = None
    """One-sided p of "worse by at most the margin"; small: shown to be worse by more. Never under `p_worse`."""
    method: str = ""
    """Such as `Tango score, exact McNemar`."""


class Transitions(Frozen):
    """Counts over the comparable tasks."""

    pass_to_fail: int
    worse: int
    """Including pass_to_fail."""
    fail_to_pass: int
    better: int
    """Including fail_to_pass."""
    both_pass: int
    both_fail: int
    mixed: int


class Group(Frozen):
    """The tasks that carry one tag."""

    tag: str
    tasks: int
    base: float
    candidate: float
    delta: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Flaky:
    """A task whose attempts by one agent version disagree."""

    task: str
    side: Literal["base", "candidate"]
    passed: int
    graded: int
    passing: str
    """TASK/AGENT/ATTEMPT of one that passed, for `dayfly logs JOB/…`."""
    failing: str


class Comparison(Frozen):
    """Two sides, paired. See docs/architecture.md."""

    schema_version: Literal[1] = 1
    base: SideFacts
    candidate: SideFacts
    alpha: float
    same: tuple[Aspect, ...]
    differences: tuple[Difference, ...]
    allowed: tuple[Allowed, ...] = ()
    comparable: int
    left_out: tuple[LeftOut, ...]
    transitions: Transitions
    pairs: tuple[Pair, ...]
    """Worst first: by transition, then by delta, then by name."""
    metrics: dict[str, Metric]
    groups: tuple[Group, ...] = ()
    flaky: tuple[Flaky, ...] = ()

    @property
    def comparable_share(self) -> float:
        """Comparable tasks ÷ tasks of either side, quarantined ones not counted; 0 when there is none."""
        out = sum(t.reason != "quarantined" for t in self.left_out)
        return self.comparable / (self.comparable + out) if self.comparable + out else 0.0
