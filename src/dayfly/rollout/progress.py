"""What is known of a rollout, and of its steps, while it goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from dayfly.errors import InfraError
from dayfly.evidence import JobFolder, RolloutFolder
from dayfly.model import (
    Cause,
    Disk,
    Fingerprint,
    GuestStats,
    Options,
    Outcome,
    Phase,
    PhaseTime,
    RolloutSpec,
    Task,
    Verdict,
    VerifierClass,
    VmInfo,
)
from dayfly.protocols import Agent, AgentResult, Hypervisor, Record, Sink, Verifier
from dayfly.rollout.outcomes import cause_of
from dayfly.verifiers import shortfall


@dataclass(frozen=True)
class Context:
    """What a rollout needs of its surroundings; the same for all rollouts of a job."""

    hypervisor: Hypervisor
    job: JobFolder
    load_task: Callable[[Path], Task]
    make_disk: Callable[[str], Awaitable[Disk]]
    """Image name → disk. Raises `ImageError`."""
    make_agent: Callable[[RolloutSpec], Agent]
    make_verifier: Callable[[Task], Verifier]
    resolve_env: Callable[[Mapping[str, str]], dict[str, str]]
    """Fills `${VAR}` templates from the host's environment. Raises `ConfigError`."""
    on_phase: Callable[[RolloutSpec, str, float], None] = lambda spec, phase, limit_s: None
    """Called when a phase begins, with the seconds it may take."""
    build_disk: Callable[[Path, float], Awaitable[Disk]] | None = None
    """Dockerfile (its folder is the context), and seconds it may take → disk. Raises `ImageError`."""


@dataclass
class StepProgress:
    """What is known of a step; a task without steps is its own only step."""

    task: Task
    record: Record
    """Where the step's evidence goes."""
    verifier_class: VerifierClass
    failures_before: int
    started_unix: float = field(default_factory=time.time)
    finished_unix: float = 0.0
    agent_result: AgentResult | None = None
    verdict: Verdict | None = None


@dataclass
class Progress:
    """What is known of a rollout while it goes on."""

    spec: RolloutSpec
    context: Context
    folder: RolloutFolder
    started_unix: float = field(default_factory=time.time)
    task: Task | None = None
    agent: Agent | None = None
    disk: Disk | None = None
    phase: Phase = "image"
    phases: list[PhaseTime] = field(default_factory=list)
    vms: list[VmInfo] = field(default_factory=list)
    fingerprint: Fingerprint | None = None
    stats: GuestStats | None = None
    steps: list[StepProgress] = field(default_factory=list)
    stopped: str | None = None
    """Why the steps after the last of `steps` were not begun."""
    judged_before: bool = False
    """Whether the agent's VM has a verifier's space from an earlier step."""
    failures: list[tuple[Outcome, Cause]] = field(default_factory=list)

    @property
    def options(self) -> Options:
        return self.spec.options

    @property
    def now(self) -> StepProgress:
        """The step that is under way."""
        return self.steps[-1]

    @property
    def record(self) -> Record:
        return self.now.record if self.steps else self.folder

    @property
    def verifier_class(self) -> VerifierClass:
        return self.now.verifier_class

    @property
    def agent_has_worked(self) -> bool:
        return any(s.agent_result is not None for s in self.steps)

    @property
    def tampered(self) -> bool:
        return any(outcome is Outcome.TAMPERED for outcome, _ in self.failures)

    @property
    def over(self) -> bool:
        """Whether nothing of the rollout is left to do."""
        return self.tampered or self.stopped is not None

    def falls_short(self) -> bool:
        """Whether the step's rewards end the rollout; then says why in `stopped`."""
        self.stopped = shortfall(self.now.task, self.now.verdict)
        return self.stopped is not None

    @contextmanager
    def at(self, step: Task) -> Iterator[None]:
        """Take up a step, or take it up again when its verifier's turn comes after the agent's VM."""
        if not self.steps or self.now.task is not step:
            record = self.folder if step.step is None else StepFolder(self.folder, f"steps/{step.step}")
            chosen = self.options.verifier_class or step.verifier_class
            self.steps.append(StepProgress(step, record, chosen, len(self.failures)))
        try:
            yield
        finally:
            self.now.finished_unix = time.time()

    @asynccontextmanager
    async def in_phase(self, name: Phase, limit_s: float) -> AsyncIterator[None]:
        """Time a phase and bound it; over the limit it is an infrastructure fault, named after the phase."""
        self.phase = name
        self.context.on_phase(self.spec, name, limit_s)
        started, clock = time.time(), time.monotonic()
        try:
            with anyio.fail_after(limit_s):
                yield
        except TimeoutError as e:
            raise InfraError(
                f"the phase {name!r} did not end within {limit_s:g} s",
                hint="look at the console and the timings in this rollout's folder",
                cause=f"{name}_timeout",
            ) from e
        finally:
            self.phases.append(
                PhaseTime(
                    name=name,
                    started_unix=started,
                    seconds=round(time.monotonic() - clock, 4),
                    step=self.now.task.step if self.steps else None,
                )
            )

    def fail(self, outcome: Outcome, error: BaseException) -> None:
        self.failures.append((outcome, cause_of(error, self.phase)))


@dataclass(frozen=True)
class StepFolder:
    """The part of a rollout's folder that belongs to one step; see `protocols.Record`."""

    whole: RolloutFolder
    name: str

    @property
    def folder(self) -> Path:
        return self.whole.folder / self.name

    def sink(self, name: str) -> AbstractAsyncContextManager[Sink]:
        return self.whole.sink(f"{self.name}/{name}")

    def write(self, name: str, data: bytes) -> None:
        self.whole.write(f"{self.name}/{name}", data)

    def note(self, text: str) -> None:
        self.whole.note(f"{self.name}: {text}")
