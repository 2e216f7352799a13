"""What was understood of each field of a task.toml, for `dayfly check`: nothing is left out silently."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from dayfly.tasks.findings import Findings, table_in, without_unknown_keys
from dayfly.tasks.schema import TaskFile, modernise

State = Literal["used", "noted", "refused", "unknown"]
Judged = tuple[State, str]
Rule = Judged | Callable[[Any], Judged]

USED: Judged = ("used", "")
NETWORK: Mapping[str, Judged] = {
    "no-network": ("used", "a VM has no network"),
    "public": ("noted", "a VM has no network in this version"),
    "allowlist": ("refused", "no VM has a network"),
}


@dataclass(frozen=True)
class Field:
    """One field as it is written in task.toml."""

    key: str
    """Dotted, with the number of an entry: `steps[0].agent.timeout_sec`."""
    value: Any
    state: State
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        value = json.loads(to_json(self.value, inf_nan_mode="strings"))  # TOML has dates and infinities
        return {"key": self.key, "value": value, "state": self.state, "note": self.note}


def understood(folder: Path) -> list[Field]:
    """Every field in `folder`/task.toml, in the file's order; empty when that cannot be read as TOML.

    Used: it has its effect. Noted: it is kept or remarked on, and changes nothing. Refused: the task is not
    run because of it. Unknown: no such field; `dayfly check` refuses it.
    """
    try:
        data = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return []
    data = modernise(data)
    wrong = _invalid(data)
    return [_mended(field, wrong) for field in _fields(data, TaskFile, "")]


def _invalid(data: dict[str, Any]) -> dict[str, str]:
    """Dotted keys of values that cannot be, with what is wrong."""
    try:
        TaskFile.model_validate(without_unknown_keys(data, TaskFile, Findings(Path())))
    except ValidationError as e:
        return {_dotted(one["loc"]): one["msg"].removeprefix("Value error, ") for one in e.errors()}
    return {}


def _dotted(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _mended(field: Field, wrong: Mapping[str, str]) -> Field:
    for key, message in wrong.items():
        if key == field.key or key.startswith((f"{field.key}.", f"{field.key}[")):
            return replace(field, state="refused", note=message)
    return field


def _fields(data: Mapping[str, Any], model: type[BaseModel], table: str) -> Iterator[Field]:
    for name, value in data.items():
        key = f"{table}.{name}" if table else name
        if name not in model.model_fields:
            yield Field(key, value, "unknown", "not a field of the format")
            continue
        inner = table_in(model.model_fields[name].annotation)
        if inner is not None and isinstance(value, dict):
            yield from _fields(value, inner, key)
        elif inner is not None and isinstance(value, list) and value:
            for number, entry in enumerate(value):
                if isinstance(entry, dict):
                    yield from _fields(entry, inner, f"{key}[{number}]")
                else:
                    yield Field(f"{key}[{number}]", entry, "unknown", "not a table")
        else:
            state, note = _judge(key, value)
            yield Field(key, value, state, note)


def _judge(key: str, value: Any) -> Judged:
    found = rule_for(re.sub(r"\[\d+\]", "[]", key))
    if found is None:
        return "refused", "not a table"
    return found(value) if callable(found) else found


def rule_for(key: str) -> Rule | None:
    """The rule for a field, None for a table; entries of lists are written `[]`. Steps go by the task's rules."""
    plain = key.removeprefix("steps[].")
    for place in ("verifier.environment.", "environment."):
        if plain.startswith(place):
            name = plain.removeprefix(place)
            only_agents = place != "environment." and name in ("skills_dir", "mcp_servers")
            return JUDGES_HAVE_NONE if only_agents else RULES.get(f"environment.{name.split('[]')[0]}")
    return RULES.get(key) or RULES.get(plain)


def _network(value: Any) -> Judged:
    return NETWORK.get(value, ("refused", "not a network mode"))


def _internet(value: Any) -> Judged:
    state, note = NETWORK["public" if value else "no-network"]
    return state, f"old spelling of network_mode; {note}"


def _linux(value: Any) -> Judged:
    return USED if str(value).lower() == "linux" else ("refused", "Windows tasks are not run")


def _main(value: Any) -> Judged:
    return USED if value in (None, "main") else ("refused", "the only service is `main`")


def _none(what: str) -> Callable[[Any], Judged]:
    return lambda value: ("refused", f"a VM has no {what}") if value else ("used", f"a VM has no {what}")


def _whole(value: Any) -> Judged:
    whole = isinstance(value, int) or not isinstance(value, float) or value.is_integer()
    return USED if whole else ("used", "rounded up: a VM has whole CPUs")


NAMES: Judged = ("noted", "for people and registries; changes nothing of a rollout")
JUDGES_HAVE_NONE: Judged = ("noted", "for agents; a verifier's VM has none")

RULES: Mapping[str, Rule] = {
    "schema_version": USED,
    "source": NAMES,
    "multi_step_reward_strategy": USED,
    "artifacts": USED,
    "artifacts[].source": USED,
    "artifacts[].destination": USED,
    "artifacts[].exclude": USED,
    "artifacts[].service": _main,
    "steps": USED,
    "name": USED,
    "min_reward": USED,
    "metadata": ("noted", "free data, kept with the task"),
    "task.name": USED,
    "task.version": NAMES,
    "task.description": NAMES,
    "task.keywords": NAMES,
    "task.authors": NAMES,
    "task.authors[].name": NAMES,
    "task.authors[].email": NAMES,
    "agent.timeout_sec": USED,
    "agent.user": USED,
    "agent.network_mode": _network,
    "agent.allowed_hosts": ("refused", "no VM has a network"),
    "verifier.timeout_sec": USED,
    "verifier.env": USED,
    "verifier.user": USED,
    "verifier.environment_mode": USED,
    "verifier.network_mode": _network,
    "verifier.allowed_hosts": ("refused", "no VM has a network"),
    "verifier.collect": USED,
    "verifier.collect[].command": USED,
    "verifier.collect[].service": _main,
    "verifier.collect[].timeout_sec": USED,
    "verifier.collect[].user": USED,
    "environment.build_timeout_sec": USED,
    "environment.docker_image": USED,
    "environment.os": _linux,
    "environment.cpus": _whole,
    "environment.memory_mb": USED,
    "environment.storage_mb": USED,
    "environment.memory": ("used", "old spelling of memory_mb"),
    "environment.storage": ("used", "old spelling of storage_mb"),
    "environment.gpus": _none("GPU"),
    "environment.gpu_types": _none("GPU"),
    "environment.tpu.type": _none("TPU"),
    "environment.tpu.topology": _none("TPU"),
    "environment.network_mode": _network,
    "environment.allow_internet": _internet,
    "environment.allowed_hosts": ("refused", "no VM has a network"),
    "environment.env": USED,
    "environment.workdir": USED,
    "environment.skills_dir": ("used", "passed on to agents"),
    "environment.mcp_servers": ("used", "passed on to agents"),
    "environment.healthcheck.command": USED,
    "environment.healthcheck.interval_sec": USED,
    "environment.healthcheck.timeout_sec": USED,
    "environment.healthcheck.start_period_sec": USED,
    "environment.healthcheck.start_interval_sec": USED,
    "environment.healthcheck.retries": USED,
    "healthcheck.command": USED,
    "healthcheck.interval_sec": USED,
    "healthcheck.timeout_sec": USED,
    "healthcheck.start_period_sec": USED,
    "healthcheck.start_interval_sec": USED,
    "healthcheck.retries": USED,
    "solution.env": ("used", "for the oracle"),
    "dayfly.verifier_class": USED,
    "dayfly.verify": USED,
    "dayfly.pass_reward": USED,
    "dayfly.reward_range": USED,
    "dayfly.tags": ("noted", "kept with the task"),
}
"""Every field of the format, once; a test compares them with the schema."""
