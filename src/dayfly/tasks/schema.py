"""`task.toml` as data: Harbor's schema 1.0 to 1.4, and the `[dayfly]` table.

Defaults and names are Harbor's. Values that Harbor would accept and that cannot work (a timeout of zero, an
infinite one) are refused here. Unknown keys are found before validation; see `load.py`.
"""

from __future__ import annotations

import ipaddress
import math
import re
import unicodedata
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from dayfly.model import NetworkMode, VerifierClass

SUPPORTED_SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?")
NAME_PATTERN = r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"

Seconds = Annotated[FiniteFloat, Field(gt=0)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]


def _user(value: Any) -> Any:
    """A uid may be written as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _version(value: Any) -> Any:
    """`version = 1.0` occurs, too."""
    return str(value) if isinstance(value, float) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _source(value: str) -> str:
    path = PurePosixPath(value)
    if not value or ".." in path.parts or "\0" in value:
        raise ValueError("a source is a path in the VM, without `..`")
    for place in ("/tests", "/logs/verifier", "/solution"):
        if path.is_absolute() and path.is_relative_to(place):
            raise ValueError(f"{place} belongs to the verifier; the agent's work cannot come from there")
    return value


def _step_name(value: str) -> str:
    """A name that is a folder on every host, as Harbor wants it."""
    stem = value.split(".")[0].upper()
    if (
        not value
        or len(value.encode("utf-8", "surrogatepass")) > 255
        or any(c in '<>:"/\\|?*' or ord(c) < 32 or ord(c) == 127 for c in value)
        or value != value.strip()
        or value.endswith(".")
        or stem in {"CON", "PRN", "AUX", "NUL", *(f"{d}{n}" for d in ("COM", "LPT") for n in range(1, 10))}
    ):
        raise ValueError(
            "a step's name is the name of its folder below steps/, of at most 255 bytes, on any system"
        )
    return value


def _host(value: str) -> str:
    """A host name, perhaps with a leading `*.`, an address, or a network: no scheme, port or path."""
    with suppress(ValueError):
        ipaddress.ip_network(value, strict=False)
        return value
    if _HOST.fullmatch(value) is None or len(value) > 255:
        raise ValueError(f"{value!r} is not a host name (`*.` may lead), an address or a network")
    return value


def _destination(value: str | None) -> str | None:
    if not value:
        return None
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value or not path.parts:
        raise ValueError("a destination is a relative path with forward slashes and without `..`")
    if str(path) == "manifest.json":
        raise ValueError("manifest.json is the list of what was collected; choose another destination")
    return value


User = Annotated[str | None, BeforeValidator(_user)]


class Table(BaseModel):
    """A table of task.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Author(Table):
    name: str
    email: str | None = None


class Package(Table):
    """`[task]`."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @model_validator(mode="after")
    def _no_dots(self) -> Package:
        if ".." in self.name:
            raise ValueError("a task name cannot hold `..`")
        return self


class NetworkTable(Table):
    """What the three tables with network settings have in common."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[Annotated[str, AfterValidator(_host)]] | None = None

    @model_validator(mode="after")
    def _hosts_only_with_allowlist(self) -> NetworkTable:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts needs network_mode = "allowlist"')
        return self


class AgentTable(NetworkTable):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: User = None


class HealthcheckTable(Table):
    """`[environment.healthcheck]`."""

    command: str
    interval_sec: NotNegative = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: NotNegative = 0.0
    start_interval_sec: NotNegative = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class Tpu(Table):
    type: str
    topology: str


def _transport(value: Any) -> Any:
    return "streamable-http" if value == "http" else value


_SECRET_HEADERS = ("authorization", "cookie", "token", "api-key", "apikey", "secret", "password", "credential")


class McpTable(Table):
    """`[[environment.mcp_servers]]`."""

    name: Annotated[str, Field(min_length=1)]
    transport: Annotated[Literal["sse", "streamable-http", "stdio"], BeforeValidator(_transport)] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _complete(self) -> McpTable:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport!r} needs {needed}")
        for name, value in self.headers.items():
            secret = any(word in name.lower() for word in _SECRET_HEADERS)
            if secret and re.fullmatch(r"\$\{[^}:]+\}", value) is None:
                raise ValueError(
                    f"the header {name} holds a credential: write it as ${{VARIABLE}}, without a default"
                )
        return self


class EnvironmentTable(NetworkTable):
    """`[environment]` and `[verifier.environment]`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: Annotated[str, Field(min_length=1)] | None = None
    os: Annotated[Literal["linux", "windows"], BeforeValidator(_lower)] = "linux"
    cpus: Annotated[FiniteFloat, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    mcp_servers: list[McpTable] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None
    memory: str | None = None
    """Legacy: `"2G"`; see `memory_mb`."""
    storage: str | None = None
    """Legacy: `"10G"`; see `storage_mb`."""
    allow_internet: bool | None = None
    """Legacy: true → `network_mode = "public"`, false → `"no-network"`."""

    @model_validator(mode="after")
    def _workdir_is_absolute(self) -> EnvironmentTable:
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError("workdir is an absolute path in the VM")
        return self


class CollectTable(Table):
    """`[[verifier.collect]]`."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: User = None


class VerifierTable(NetworkTable):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    @model_validator(mode="after")
    def _shared_has_no_environment(self) -> VerifierTable:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" and [verifier.environment] exclude each other')
        return self


class SolutionTable(Table):
    """`[solution]`."""

    env: dict[str, str] = {}


class ArtifactTable(Table):
    """An entry of `artifacts`; a plain string is its `source`."""

    source: Annotated[str, AfterValidator(_source)]
    destination: Annotated[str | None, AfterValidator(_destination)] = None
    exclude: list[str] = []
    service: str | None = None


class StepTable(Table):
    """`[[steps]]`."""

    name: Annotated[str, AfterValidator(_step_name)]
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: FiniteFloat | Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: list[ArtifactTable] = []


class DayflyTable(Table):
    """`[dayfly]`: what Harbor has no word for."""

    verifier_class: VerifierClass | None = None
    verify: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """A program and its arguments: exit status 0 is a pass. Instead of tests/test.sh."""
    pass_reward: FiniteFloat = 1.0
    """A rollout passes when its reward is at least this."""
    reward_range: tuple[FiniteFloat, FiniteFloat] | None = None
    """Smallest and largest reward that is a valid verdict; unset: any finite number."""
    tags: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _range_in_order(self) -> DayflyTable:
        if self.reward_range is None:
            return self
        low, high = self.reward_range
        if not low < high:
            raise ValueError("reward_range is [smallest, largest]")
        if not low <= self.pass_reward <= high:
            raise ValueError("pass_reward lies outside reward_range: nothing could pass, or nothing fail")
        return self


class TaskFile(Table):
    """The whole of task.toml."""

    schema_version: Annotated[str, BeforeValidator(_version)] = "1.4"
    task: Package | None = None
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[ArtifactTable] = []
    steps: list[StepTable] | None = None
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    dayfly: DayflyTable | None = None

    @model_validator(mode="after")
    def _step_names_differ(self) -> TaskFile:
        seen: dict[str, str] = {}
        for step in self.steps or []:
            folded = unicodedata.normalize("NFC", step.name).casefold()
            if folded in seen:
                raise ValueError(
                    f"the steps {seen[folded]!r} and {step.name!r} would share a folder on some systems"
                )
            seen[folded] = step.name
        return self


def modernise(data: dict[str, Any]) -> dict[str, Any]:
    """Old spellings in today's: `version`, and artifacts that are plain strings. Changes a copy."""
    data = dict(data)
    if "version" in data:
        old = data.pop("version")
        data.setdefault("schema_version", old)
    _spell_artifacts_out(data)
    if isinstance(data.get("steps"), list):
        data["steps"] = [dict(s) if isinstance(s, dict) else s for s in data["steps"]]
        for step in data["steps"]:
            if isinstance(step, dict):
                _spell_artifacts_out(step)
    return data


def _spell_artifacts_out(table: dict[str, Any]) -> None:
    if isinstance(table.get("artifacts"), list):
        table["artifacts"] = [{"source": a} if isinstance(a, str) else a for a in table["artifacts"]]


def parse_size_mb(text: str) -> int:
    """A legacy size (`"2G"`, `"512M"`, `"4096K"`) in MB. Raises `ValueError`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*", text.upper())
    if found is None:
        raise ValueError(f'{text!r} is not a size such as "2G" or "512M"')
    factor = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}[found[2]]
    return max(1, math.floor(float(found[1]) * factor))


def task_json_schema() -> dict[str, Any]:
    """The JSON Schema of task.toml, for editors."""
    schema = TaskFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "task.toml of dayfly (Harbor's layout with an optional [dayfly] table)"
    return schema
