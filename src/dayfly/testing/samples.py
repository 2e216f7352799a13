"""Small well-formed values for tests, and the two words that contract suites are written with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dayfly.evidence import new_rollout_id
from dayfly.model import (
    AgentSpec,
    Machine,
    Options,
    Outcome,
    RolloutKey,
    RolloutRecord,
    RolloutSpec,
    Verdict,
    VerifierClass,
)


def expect(holds: object, otherwise: str) -> None:
    """Raise `AssertionError` with a sentence. Not `assert`: a shipped suite must also check under `python -O`."""
    if not holds:
        raise AssertionError(otherwise)


@contextmanager
def refused(error: type[Exception], otherwise: str, *, cause: str | None = None) -> Iterator[None]:
    """What is done inside must raise `error`, with `cause` when it is given; else `AssertionError`."""
    try:
        yield
    except error as raised:
        got = getattr(raised, "cause", None)
        expect(cause is None or got == cause, f"{otherwise} with cause {cause!r}, not {got!r}")
        return
    raise AssertionError(otherwise)


def sample_spec(attempt: int = 1, *, task: str = "sample", job_id: str = "job", **changes: Any) -> RolloutSpec:
    """A rollout to do. `changes` are fields of `RolloutSpec`."""
    key = RolloutKey(task=task, task_digest="sha256:1", agent="agent", agent_digest="sha256:2", attempt=attempt)
    fields: dict[str, Any] = {
        "job_id": job_id,
        "rollout_id": new_rollout_id(),
        "key": key,
        "task_path": Path(task),
        "machine": Machine(memory_mib=128, storage_mib=64),
        "agent": AgentSpec(name="agent", kind="no-op", digest="sha256:2"),
        "options": Options(),
    }
    return RolloutSpec(**{**fields, **changes})


def sample_record(spec: RolloutSpec, **changes: Any) -> RolloutRecord:
    """A passed rollout of `spec`. `changes` are fields of `RolloutRecord`."""
    fields: dict[str, Any] = {
        "rollout_id": spec.rollout_id,
        "job_id": spec.job_id,
        **spec.key.model_dump(),
        "retry": spec.retry,
        "outcome": Outcome.PASSED,
        "reward": 1.0,
        "verdict": Verdict(reward=1.0, passed=True),
        "isolation": "fake",
        "verifier_class": VerifierClass.REBOOTED,
        "started_unix": 1_000.0,
        "finished_unix": 1_001.5,
    }
    return RolloutRecord(**{**fields, **changes})
