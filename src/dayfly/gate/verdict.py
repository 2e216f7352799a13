"""The verdict as data: text, JSON, JUnit, Markdown, annotations, badge and exit code are renderings of it."""

from __future__ import annotations

from typing import Literal

from dayfly.compare.model import Comparison, SideFacts
from dayfly.gate.policy import QuarantineEntry, Tier
from dayfly.model import Frozen

Answer = Literal["pass", "fail", "inconclusive", "invalid"]
EXIT_CODES: dict[Answer, int] = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid": 4}
Kind = Literal["validity", "metric", "tasks", "notice"]
Status = Literal["passed", "regressed", "failed", "flaky", "quarantined", "left out", "improved"]

NOT_ANSWERED = "not answered: the results are not valid"


class RuleResult(Frozen):
    """One rule of the policy, answered."""

    id: str
    """Stable, like `coverage.side.candidate`, `metric.score.margin`, `must_pass`."""
    kind: Kind
    tier: Tier
    answer: Answer
    reason: str
    """One sentence with the figures that decided."""
    tasks: tuple[str, ...] = ()
    """Tasks that it is about, most important first."""
    more_rollouts: int | None = None
    """When inconclusive: how many more of the candidate would probably decide; None: not known, or none can."""


class TaskCase(Frozen):
    """A task as the gate sees it; the test cases of JUnit and the rows of the summary."""

    task: str
    status: Status
    reason: str = ""
    base: str = ""
    """Such as `2/3`; empty: none."""
    candidate: str = ""
    seconds: float | None = None
    """Mean of the candidate's graded attempts."""


class EarlyStopped(Frozen):
    """What a job that was stopped early amounts to, computed anew from its records."""

    kind: Literal["blocked", "futile"]
    regressions: int
    improvements: int
    pairs: int
    """Looked at, in the order fixed by the seed."""
    evidence: float
    """The value of the bet; see `early_stop`."""
    threshold: float
    complete: bool = False
    """The job was done to its end all the same; nothing of it is missing for that reason."""


class GateVerdict(Frozen):
    schema_version: Literal[1] = 1
    verdict: Answer
    exit_code: int
    reason: str
    """One sentence."""
    rules: tuple[RuleResult, ...]
    """In the order in which they are checked; the one that decided is named by `decided_by`."""
    decided_by: str = ""
    more_rollouts: int | None = None
    policy_name: str
    policy_digest: str
    baseline: SideFacts | None
    candidate: SideFacts
    tasks: tuple[TaskCase, ...] = ()
    """Failing first."""
    quarantined: tuple[QuarantineEntry, ...] = ()
    early_stop: EarlyStopped | None = None
    comparison: Comparison | None = None
    dayfly_version: str
    decided_unix: float
