"""Reading `gate.yaml` and the quarantine file beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dayfly.errors import ConfigError
from dayfly.evidence import canonical_json, sha256_bytes
from dayfly.gate.policy import Policy, Quarantine
from dayfly.settings import nearest, read_settings, refused

EXAMPLE = "examples/gate.yaml"
METRICS = ["score", "reward", "seconds", "tokens", "cost_usd", "pass@1", "pass^1"]


@dataclass(frozen=True)
class LoadedPolicy:
    policy: Policy
    digest: str
    """sha256:… over the policy and the quarantine, whatever the layout of their files."""
    quarantine: Quarantine
    path: Path


def load_policy(path: Path) -> LoadedPolicy:
    """Read a policy and its quarantine. Raises `ConfigError` that names file, key and what is near."""
    policy = parse_policy(read_settings(path, what="a gate's policy", example=EXAMPLE), str(path))
    quarantine = Quarantine()
    if policy.quarantine is not None:
        quarantine = load_quarantine(path.parent / policy.quarantine)
    return LoadedPolicy(policy, policy_digest(policy, quarantine), quarantine, path)


def parse_policy(data: dict[str, object], where: str) -> Policy:
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise _refused_policy(error, where) from error
    if not (policy.metrics or policy.must_pass or policy.no_regression):
        raise ConfigError(
            f"{where} has neither metrics nor must_pass nor no_regression, so it would decide nothing",
            hint=f"see {EXAMPLE}",
        )
    return policy


def _refused_policy(error: ValidationError, where: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "string_pattern_mismatch" and first["loc"][0] == "metrics":
        name = str(first["loc"][1])
        hint = nearest(name, METRICS, "metrics (@ and ^ with any number of attempts)")
        return ConfigError(f"{where}: metrics.{name}: there is no such metric", hint=hint)
    return refused(error, Policy, where)


def load_quarantine(path: Path) -> Quarantine:
    """Read a quarantine file. Raises `ConfigError`, for a task that is in it twice, too."""
    data = read_settings(path, what="the quarantine that the policy names", example="docs/gate.md")
    try:
        quarantine = Quarantine.model_validate(data)
    except ValidationError as error:
        raise refused(error, Quarantine, str(path)) from error
    twice = [task for task, count in Counter(e.task for e in quarantine.tasks).items() if count > 1]
    if twice:
        raise ConfigError(f"{path}: task {twice[0]!r} is there twice", hint="keep one entry for each task")
    return quarantine


def policy_digest(policy: Policy, quarantine: Quarantine) -> str:
    content = {"policy": policy.model_dump(mode="json"), "quarantine": quarantine.model_dump(mode="json")}
    return sha256_bytes(canonical_json(content))
