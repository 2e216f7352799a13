"""The nouns of dayfly as frozen data: no I/O, no behaviour beyond derived values.

Anything that is written to a file or sent to another process is a pydantic model; anything that
only lives within a process is a dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Isolation = Literal["kvm", "tcg", "fake"]
Phase = Literal["image", "boot", "setup", "agent", "collect", "verify", "teardown"]
NetworkMode = Literal["public", "no-network", "allowlist"]
Space = Literal["work", "verify"]
"""Which mount namespace of a guest a call acts in; see `protocols.Vm`."""


class Frozen(BaseModel):
    """A value: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- machine and image -------------------------------------------------------------------------


class Machine(Frozen):
    """The size of a VM. Templates are kept per (cpus, memory_mib)."""

    cpus: Annotated[int, Field(ge=1, le=64)] = 1
    memory_mib: Annotated[int, Field(ge=128)] = 1024
    storage_mib: Annotated[int, Field(ge=64)] = 4096
    """Hard cap of what the guest can write, in MiB."""


class ImageConfig(Frozen):
    """What the guest agent needs of an OCI image's configuration."""

    env: dict[str, str] = {}
    workdir: str = "/"
    user: str = ""
    """As in the image: name, uid, name:group or uid:gid; empty means root. Resolved in the guest."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    architecture: str = "amd64"


@dataclass(frozen=True)
class Disk:
    """A read-only disk made from an image, ready to attach."""

    path: Path
    digest: str
    """sha256:… of the bytes of the disk file (without padding)."""
    config: ImageConfig
    image: str = ""
    """The image's name as the task wrote it."""
    image_digest: str = ""
    """sha256:… of the image manifest."""


# --- what a guest answers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """The first and last part of a byte stream, and how much is missing between them."""

    head: bytes = b""
    tail: bytes = b""
    dropped: int = 0

    @property
    def total(self) -> int:
        return len(self.head) + len(self.tail) + self.dropped

    @property
    def data(self) -> bytes:
        """The bytes, with a marker line where something was dropped."""
        if not self.dropped:
            return self.head + self.tail
        return self.head + f"\n[... {self.dropped} bytes dropped ...]\n".encode() + self.tail

    @property
    def text(self) -> str:
        """For showing: bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class ExecResult:
    """How a process in the guest ended. The status comes from the guest's own wait()."""

    exit_code: int | None
    """0..255, or None when a signal ended it."""
    signal: int | None = None
    stdout: Captured = field(default_factory=Captured)
    stderr: Captured = field(default_factory=Captured)
    timed_out: bool = False
    writers_attached: bool = False
    """True when the main process ended while others still held its stdout or stderr open."""
    killed: int = 0
    """How many further processes of its tree had to be killed after a timeout."""
    oom_killed: bool = False
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class EntryMeta:
    """Mode and owner that a path had in the guest; the host keeps its copies private."""

    mode: int
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Transfer:
    """What a put or get moved."""

    files: int = 0
    bytes: int = 0
    digest: str = ""
    """sha256:… over the entries (path, kind, mode, link target, content) in the order sent."""
    skipped: tuple[str, ...] = ()
    """Names left out by an exclude rule, or of a kind that is not carried (device, fifo, socket)."""
    seconds: float = 0.0
    entries: dict[str, EntryMeta] = field(default_factory=dict)
    """After a `get`: relative path ("" for a single file) → how it was in the guest."""


class Change(Frozen):
    """A path that differs from the base image, as seen in the writable layer."""

    path: str
    """Absolute; bytes that are not UTF-8 as surrogate escapes."""
    kind: Literal["file", "dir", "link", "deleted", "other"]
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    digest: str = ""
    """sha256:… of a file's content or a link's target; empty for other kinds, or when over the budget."""


class GuestStats(Frozen):
    """Figures that the guest agent reads from the workload's cgroup and disk."""

    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    oom_kills: int = 0
    pids_now: int = 0
    disk_used_bytes: int = 0
    disk_free_bytes: int = 0
    disk_size_bytes: int = 0
    time_unix: float = 0.0
    """The guest's wall clock."""


class VmInfo(Frozen):
    """How a VM came to be; kept with the rollout."""

    id: str
    isolation: Isolation
    how: Literal["fork", "boot", "fake"]
    template: str = ""
    """Digest of the template's key; empty for a cold boot."""
    template_age_s: float = 0.0
    start_s: float = 0.0
    clock_error_s: float = 0.0
    """Guest clock minus host clock right after the handshake."""
    argv: tuple[str, ...] = ()
    """The exact VMM command line; empty for the fake."""


# --- task ----------------------------------------------------------------------------------------


class VerifierClass(StrEnum):
    SHARED = "shared"
    REBOOTED = "rebooted"
    SEPARATE = "separate"


VERIFIER_CLASS_ORDER: tuple[VerifierClass, ...] = (
    VerifierClass.SHARED,
    VerifierClass.REBOOTED,
    VerifierClass.SEPARATE,
)
"""From the weakest to the strictest."""


class Artifact(Frozen):
    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()


class Healthcheck(Frozen):
    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


class CollectHook(Frozen):
    """A command run after the agent's work and before artifacts are collected."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None


class McpServer(Frozen):
    """A tool server that a task offers to agents; `url` for the two HTTP transports, `command` for stdio."""

    name: str
    transport: Literal["sse", "streamable-http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    """A credential is a `${VAR}` template, filled on the host when a rollout starts."""


class Task(Frozen):
    """One problem, as loaded from a folder. Paths are on the host.

    A multi-step task has `steps`, each a `Task` with what holds in that step; agents and verifiers are given
    the step. Of the fields that steps have of their own, the whole task's hold what fits all of them: the
    timeouts are sums, the verifier class is the weakest, the solution is there if each step has one.
    """

    name: str
    digest: str
    """sha256:… over the task's files, equal to Harbor's content digest."""
    path: Path
    instruction: str
    image: str | None
    """`docker_image`; None when the environment is a Dockerfile."""
    dockerfile: Path | None = None
    environment_files: Path | None = None
    """Folder whose files go to the working directory before the agent starts (Dockerfile left out)."""
    machine: Machine = Machine()
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: Healthcheck | None = None
    agent_timeout_s: float | None = None
    agent_user: str | None = None
    build_timeout_s: float = 600.0
    solution: Path | None = None
    """Folder of the reference solution, or None."""
    solution_env: dict[str, str] = {}
    tests: Path | None = None
    verifier_class: VerifierClass = VerifierClass.SHARED
    verifier_declared: bool = False
    """True when the task itself names its verifier class."""
    verifier_timeout_s: float = 600.0
    verifier_env: dict[str, str] = {}
    verifier_user: str | None = None
    verifier_command: tuple[str, ...] | None = None
    """`[dayfly] verify = [...]`: exit status 0 is a pass; None means tests/test.sh by Harbor's contract."""
    verifier_image: str | None = None
    verifier_machine: Machine | None = None
    verifier_dockerfile: Path | None = None
    """tests/Dockerfile of a separate verifier; its folder is the context, and the image owns /tests."""
    verifier_build_timeout_s: float = 600.0
    verifier_vm_env: dict[str, str] | None = None
    """Environment of a separate verifier's VM; None: the task's."""
    verifier_workdir: str | None = None
    """Working directory in a separate verifier's VM; None: its image's, or the task's on the task's image."""
    verifier_healthcheck: Healthcheck | None = None
    collect: tuple[CollectHook, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    skills_dir: str | None = None
    """Folder in the VM with skills for agents; relative to the working directory, or absolute."""
    mcp_servers: tuple[McpServer, ...] = ()
    trajectory: Path | None = None
    """trajectory.json: what was said before, for agents that can take it up."""
    network: dict[str, NetworkMode] = {}
    """What was asked for, of those of `environment`, `agent`, `verifier` and `verifier.environment` that say so."""
    steps: tuple[Task, ...] = ()
    reward_strategy: Literal["mean", "final"] = "mean"
    """How the rewards of the steps become one."""
    step: str | None = None
    """Name of the step that this is; None for a whole task."""
    step_files: Path | None = None
    """Folder whose files go to the working directory when the step begins; its setup.sh is then run."""
    step_healthcheck: Healthcheck | None = None
    tests_overlay: Path | None = None
    """The step's tests, put over `tests`."""
    min_reward: dict[str, float] = {}
    """Named rewards that the step must reach for the next one to be done."""
    pass_reward: float = 1.0
    """A rollout passes when its reward is at least this."""
    reward_range: tuple[float, float] | None = None
    """Smallest and largest reward that is a valid verdict; None: any finite number."""
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    """What the loader understood only in part, for `dayfly check`."""

    @property
    def all_steps(self) -> tuple[Task, ...]:
        """The steps; a task without is its own only step."""
        return self.steps or (self,)

    @property
    def verifier_has_own_image(self) -> bool:
        """Then the image brings /tests, and nothing of the task's environment is put there."""
        return self.verifier_image is not None or self.verifier_dockerfile is not None

    @property
    def images(self) -> tuple[str, ...]:
        """Names of all images that a rollout of this task may need, each once."""
        names = (self.image, *(s.verifier_image for s in self.all_steps))
        return tuple(dict.fromkeys(n for n in names if n is not None))

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The sizes of all VMs that a rollout of this task may need, each once."""
        return tuple(dict.fromkeys((self.machine, *(s.verifier_machine or s.machine for s in self.all_steps))))

    @property
    def dockerfiles(self) -> tuple[Path, ...]:
        """All Dockerfiles whose images a rollout of this task may need, each once."""
        paths = (self.dockerfile, *(s.verifier_dockerfile for s in self.all_steps))
        return tuple(dict.fromkeys(p for p in paths if p is not None))


# --- job -----------------------------------------------------------------------------------------


class AgentSpec(Frozen):
    """One agent version, as names and data."""

    name: str
    kind: str
    """Short name in the registry (`oracle`, `no-op`, `command`, `function`) or a dotted path."""
    options: dict[str, Any] = {}
    digest: str = ""
    """sha256:… of kind, options and the files the agent brings."""


class Options(Frozen):
    """What a job decides for all its rollouts."""

    verifier_class: VerifierClass | None = None
    """None: as the task says."""
    agent_timeout_s: float | None = None
    """Overrides the task's limit; None: as the task says."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often an attempt is started again after a cause that is not the agent's."""
    keep_disk: Literal["never", "failed", "always"] = "failed"
    hypervisor: str = "qemu"
    require_isolation: Literal["kvm", "tcg", "fake"] | None = None
    fork: bool = True
    """False: boot each VM cold instead of forking a template."""
    force_build: bool = False
    """Build the Dockerfiles of tasks that also name an image made of them before."""
    boot_timeout_s: float = 120.0
    setup_timeout_s: float = 300.0
    collect_timeout_s: float = 120.0
    teardown_timeout_s: float = 30.0
    default_agent_timeout_s: float = 3600.0
    """For tasks that name no agent limit; printed before the job starts."""
    max_output_bytes: int = 64 * 1024 * 1024
    """Cap of each output stream kept on disk."""
    max_artifact_bytes: int = 2 * 1024 * 1024 * 1024


class RolloutKey(Frozen):
    """What makes a rollout unique within a job (invariant 7)."""

    task: str
    task_digest: str
    agent: str
    agent_digest: str
    attempt: int


class RolloutSpec(Frozen):
    """One rollout to do: names and data only, so an engine can send it anywhere."""

    job_id: str
    rollout_id: str
    key: RolloutKey
    task_path: Path
    machine: Machine
    agent: AgentSpec
    options: Options
    seed: int = 0
    retry: int = 0
    jobs_dir: Path = Path("jobs")
    room: Machine | None = None
    """What must be free on the host, when that is more than `machine`: two VMs side by side."""


# --- result --------------------------------------------------------------------------------------


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    AGENT_TIMEOUT = "agent_timeout"
    AGENT_ERROR = "agent_error"
    SANDBOX_OOM = "sandbox_oom"
    DISK_FULL = "disk_full"
    TAMPERED = "tampered"
    PROVIDER_ERROR = "provider_error"
    INFRA_ERROR = "infra_error"
    VERIFIER_ERROR = "verifier_error"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


GRADED: frozenset[Outcome] = frozenset(
    {
        Outcome.PASSED,
        Outcome.FAILED,
        Outcome.AGENT_TIMEOUT,
        Outcome.AGENT_ERROR,
        Outcome.SANDBOX_OOM,
        Outcome.DISK_FULL,
        Outcome.TAMPERED,
    }
)
"""Outcomes that carry a verdict that counts."""

RETRYABLE: dict[Outcome, int] = {
    Outcome.PROVIDER_ERROR: 10,
    Outcome.INFRA_ERROR: 10,
    Outcome.VERIFIER_ERROR: 1,
}
"""Outcomes that are started again, with their own upper bound beside `Options.retries`."""


MARKS: dict[tuple[Outcome, bool], str] = {
    (Outcome.PASSED, True): "P",
    (Outcome.FAILED, False): "F",
    (Outcome.AGENT_TIMEOUT, True): "T",
    (Outcome.AGENT_TIMEOUT, False): "t",
    (Outcome.AGENT_ERROR, True): "E",
    (Outcome.AGENT_ERROR, False): "e",
    (Outcome.SANDBOX_OOM, True): "M",
    (Outcome.SANDBOX_OOM, False): "m",
    (Outcome.DISK_FULL, True): "D",
    (Outcome.DISK_FULL, False): "d",
    (Outcome.TAMPERED, False): "x",
    (Outcome.PROVIDER_ERROR, False): "p",
    (Outcome.INFRA_ERROR, False): "i",
    (Outcome.VERIFIER_ERROR, False): "v",
    (Outcome.CANCELLED, False): "c",
    (Outcome.SKIPPED, False): "s",
}
"""One character for how an attempt ended, and whether it counts as passed (`RolloutRecord.passes`)."""


class Verdict(Frozen):
    """What a verifier decided. Only a delivered, well-formed reward makes one."""

    reward: FiniteFloat
    rewards: dict[str, FiniteFloat] = {}
    passed: bool
    exit_code: int | None = None
    """Exit status of the verifier's program, recorded beside the reward."""
    details: dict[str, Any] = {}


class Cause(Frozen):
    """Why a rollout ended otherwise than with a clean verdict."""

    kind: str
    message: str
    hint: str | None = None
    phase: str = ""


class PhaseTime(Frozen):
    name: Phase
    started_unix: float
    seconds: float
    step: str | None = None
    """The step of a multi-step task that it belongs to."""


class StepResult(Frozen):
    """One step of a multi-step task that was begun. Its evidence is in `steps/<name>/`."""

    name: str
    verdict: Verdict | None = None
    verifier_class: VerifierClass
    causes: tuple[Cause, ...] = ()
    """What went wrong in this step, in order of time."""
    exit_code: int | None = None
    """The agent's, if it has one."""
    timed_out: bool = False
    started_unix: float
    finished_unix: float


class Fingerprint(Frozen):
    """The context that a rollout started from; equal for all rollouts of one task (invariant 5)."""

    digest: str
    """sha256:… over the canonical JSON of `parts`."""
    parts: dict[str, Any]


class Usage(Frozen):
    """Resources. None means unknown, never 0."""

    memory_peak_bytes: int | None = None
    disk_used_bytes: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: FiniteFloat | None = None


class RolloutRecord(Frozen):
    """`rollout.json`: one rollout's result and the digests of its evidence."""

    schema_version: Literal[1] = 1
    rollout_id: str
    job_id: str
    task: str
    task_digest: str
    agent: str
    agent_digest: str
    attempt: int
    retry: int = 0
    outcome: Outcome
    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] = {}
    verdict: Verdict | None = None
    cause: Cause | None = None
    further_causes: tuple[Cause, ...] = ()
    isolation: Isolation | None = None
    verifier_class: VerifierClass
    start_fingerprint: Fingerprint | None = None
    started_unix: float
    finished_unix: float
    phases: tuple[PhaseTime, ...] = ()
    steps: tuple[StepResult, ...] = ()
    """Steps that were begun, of a multi-step task; empty for any other."""
    usage: Usage = Usage()
    machine: Machine = Machine()
    vms: tuple[VmInfo, ...] = ()
    notes: tuple[str, ...] = ()
    seed: int = 0
    dayfly_version: str = ""
    image_digest: str = ""
    disk_digest: str = ""
    files: dict[str, str] = {}
    """Relative path → sha256:… of every other file of the rollout's folder."""
    seal: str = ""
    """sha256:… over the canonical JSON of this record with an empty `seal`."""

    @property
    def key(self) -> RolloutKey:
        return RolloutKey(
            task=self.task,
            task_digest=self.task_digest,
            agent=self.agent,
            agent_digest=self.agent_digest,
            attempt=self.attempt,
        )

    @property
    def graded(self) -> bool:
        return self.outcome in GRADED

    @property
    def passes(self) -> bool:
        """Whether it is graded and counts as passed: its verdict decides, but for tampering."""
        if self.outcome is Outcome.TAMPERED or not self.graded:
            return False
        if self.verdict is not None:
            return self.verdict.passed
        return self.outcome is Outcome.PASSED

    @property
    def mark(self) -> str:
        """Its character of `MARKS`; a record that contradicts itself counts as failed."""
        return MARKS.get((self.outcome, self.passes), MARKS[Outcome.FAILED, False])
