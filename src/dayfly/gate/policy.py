"""`gate.yaml`: what must hold before an agent version is let through."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from dayfly.compare.model import Allowed
from dayfly.model import Frozen, Isolation, VerifierClass

Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
MetricName = Annotated[str, Field(pattern=r"^(score|reward|seconds|tokens|cost_usd|pass[@^][1-9][0-9]{0,2})$")]
Tier = Literal["critical", "supporting", "advisory"]
"""critical: must be shown to hold. supporting: blocks when shown not to hold; lack of evidence does not.
advisory: shown only."""


class Coverage(Frozen):
    """Floors of graded ÷ planned; under one, there is no valid answer (case of the candidate's lost rollouts)."""

    job: Share = 0.9
    """Of each whole job, all its agents."""
    side: Share = 0.95
    """Of each of the two agent versions compared."""
    task: Share = 0.5
    """Of each task on each side; a task under it is left out of the pairs."""
    comparable: Share = 0.9
    """Comparable tasks ÷ tasks of either side."""


class Require(Frozen):
    isolation: Isolation = "tcg"
    """The weakest class that any counted rollout may have."""
    verifier_class: VerifierClass = VerifierClass.SHARED
    """The weakest class that any counted rollout may have."""
    intact_evidence: bool = False
    """Check every digest of both jobs' evidence before deciding."""


class Infra(Frozen):
    """Attempts lost to infrastructure, provider or verifier, as a share of the planned ones."""

    max_rate: Share = 0.1
    max_difference: Share = 0.1
    """Between the sides."""


class MetricRule(Frozen):
    """A metric's bounds. At least one of margin, min and max.

    `margin` compares with the baseline: the largest worsening that is let through, absolute for score, reward,
    pass@K and pass^K, a share of the baseline for seconds, tokens and cost_usd. `min` and `max` are absolute.
    """

    margin: Annotated[FiniteFloat, Field(ge=0)] | None = None
    min: FiniteFloat | None = None
    max: FiniteFloat | None = None
    tier: Tier = "critical"

    @model_validator(mode="after")
    def _something(self) -> MetricRule:
        if self.margin is None and self.min is None and self.max is None:
            raise ValueError("give at least one of margin, min and max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Confirm(Frozen):
    failures: Annotated[int, Field(ge=1, le=100)] = 2
    """So many attempts must have failed before a task's failure counts as reproducible."""


class EarlyStop(Frozen):
    alpha_share: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.5
    """Of alpha: what `run --gate` spends on looking while rollouts come in; the rest is the final test's."""


class Policy(Frozen):
    """`gate.yaml`."""

    name: str = "gate"
    alpha: Annotated[FiniteFloat, Field(gt=0, le=0.5)] = 0.05
    """One-sided error of each decision."""
    coverage: Coverage = Coverage()
    require: Require = Require()
    infra: Infra = Infra()
    allow_differences: tuple[Allowed, ...] = ()
    """Differences between the sides that are meant; a task, its verifier and its digest are never among them."""
    metrics: dict[MetricName, MetricRule] = {}
    """By name: score, reward, pass@K, pass^K, seconds, tokens, cost_usd."""
    multiplicity: Literal["holm", "none"] = "holm"
    """How the p values of the metrics, and of the tasks of no_regression, are corrected for being several."""
    must_pass: tuple[str, ...] = ()
    """Tasks, by name or pattern (`db-*`) or `tag:NAME`, that the candidate must not fail reproducibly."""
    no_regression: tuple[str, ...] = ()
    """Tasks that the baseline passed, and that must not be shown to pass less often."""
    confirm: Confirm = Confirm()
    quarantine: str | None = None
    """A file beside this one with tasks that do not count for now."""
    max_quarantined: Share = 0.1
    """Of the tasks."""
    cluster_by: str | None = None
    """A key of the tasks' metadata (such as `repository`); tasks with an equal value are one cluster."""
    on_inconclusive: Literal["block", "fail", "allow"] = "block"
    """Exit code 3, 1 or 0; the verdict is called inconclusive all the same."""
    early_stop: EarlyStop = EarlyStop()

    @model_validator(mode="after")
    def _shares(self) -> Policy:
        for name, rule in self.metrics.items():
            if not is_share(name):
                continue
            for key in ("margin", "min", "max"):
                value = getattr(rule, key)
                if value is not None and not 0 <= value <= 1:
                    raise ValueError(f"metrics.{name}.{key}: {value:g} is no share; 0.05 is five points")
        return self


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 whatever happens."""
    return metric == "score" or metric.startswith("pass")


class QuarantineEntry(Frozen):
    task: str
    owner: Annotated[str, Field(min_length=1)]
    reason: Annotated[str, Field(min_length=1)]
    expires: datetime.date
    """The last day on which it holds."""


class Quarantine(Frozen):
    """The quarantine file."""

    tasks: tuple[QuarantineEntry, ...] = ()
