"""Jobs: what is wanted, what is there already, and doing the rest.

A job is a job file made exact: every task and agent by digest (`lock.json`), every option stated. `plan`
compares that with what is on file; `run_job` does what is missing, one durable rollout after the other.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
from pydantic import BeforeValidator, Field, ValidationError

import dayfly
from dayfly.build import DiskBuilder
from dayfly.disks import ImageDisks, locked_digests
from dayfly.engines.local import Admission, Capacity, LocalEngine
from dayfly.errors import ConfigError, DayflyError, NeedsDecision, TaskError
from dayfly.evidence import JobFolder, canonical_json, new_job_id, new_rollout_id, sha256_bytes
from dayfly.gate.early_stop import (
    EarlyStopTerms,
    EarlyStopWatch,
    clusters_of,
    comparable_tasks,
    read_terms,
    terms_of,
)
from dayfly.gate.load import LoadedPolicy
from dayfly.gate.verdict import EarlyStopped
from dayfly.images import ImageStore, PullPolicy, Registries
from dayfly.images.builder import Built, load_settings
from dayfly.model import (
    RETRYABLE,
    AgentSpec,
    Disk,
    Frozen,
    Options,
    Outcome,
    RolloutKey,
    RolloutRecord,
    RolloutSpec,
    Task,
    VerifierClass,
)
from dayfly.protocols import Agent, AgentResult, Hypervisor, Store, Vm
from dayfly.registry import HypervisorSettings, make_agent, make_hypervisor, make_verifier
from dayfly.results.host import host_facts
from dayfly.results.side import MISSING, Side, TaskResults
from dayfly.rollout import STEPS_REBOOTED, Context, agent_limit_s, room_for, run_rollout
from dayfly.settings import read_settings, refused
from dayfly.sharing import Sharing

if TYPE_CHECKING:
    from dayfly.stores import Behind  # imports SQLAlchemy, which is slow

OVERDUE_GRACE_S = 60.0
"""How long a phase may overrun its limit, or nothing may be under way, before the watchdog speaks."""
WATCHDOG_INTERVAL_S = 5.0
INDEX_GRACE_S = 30.0
"""How long a finished job waits for its index."""

Event = dict[str, Any]
Observer = Callable[[Event], None]


# --- the job file --------------------------------------------------------------------------------


def parse_duration(value: Any) -> Any:
    """`90`, `"90s"`, `"15m"`, `"1h"` → seconds; anything else is left to pydantic to refuse."""
    if isinstance(value, str):
        units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
        for unit, factor in units.items():
            number = value.removesuffix(unit)
            if number != value and number.replace(".", "", 1).isdigit():
                return float(number) * factor
    return value


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]


class AgentEntry(Frozen):
    """An agent in a job file. `name` alone means the built-in agent of that name."""

    name: str
    kind: str | None = None
    options: dict[str, Any] = {}


class JobFile(Frozen):
    """`job.yaml`. Durations are written `90s`, `15m`, `1h` or as seconds."""

    name: str = "job"
    tasks: list[str]
    """Task folders, or folders of task folders; relative to the job file."""
    agents: list[AgentEntry]
    attempts: Annotated[int, Field(ge=1, le=1000)] = 1
    concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """None: as many rollouts as the host has CPUs for."""
    seed: int = 0
    verifier_class: VerifierClass | None = None
    agent_timeout: Duration | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    keep_disk: Literal["never", "failed", "always"] = "failed"
    hypervisor: str = "qemu"
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    require_isolation: Literal["kvm", "tcg", "fake"] | None = None
    fork: bool = True
    stop_after_oracle_failures: Annotated[int, Field(ge=0)] = 3
    """Stop when the reference solutions of so many tasks fail in a row, beside other agents; 0: go on."""
    pull: PullPolicy = "missing"
    """When a registry is asked for an image: if it is not here, always once a job, or never."""
    force_build: bool = False
    """Build the Dockerfiles of tasks that also name an image made of them before."""

    def options(self) -> Options:
        return Options(
            verifier_class=self.verifier_class,
            agent_timeout_s=self.agent_timeout,
            retries=self.retries,
            keep_disk=self.keep_disk,
            hypervisor=self.hypervisor,
            require_isolation=self.require_isolation,
            fork=self.fork,
            force_build=self.force_build,
        )


def load_job_file(path: Path) -> JobFile:
    """Read a job file. Raises `ConfigError` naming file, key and, for a misspelt key, the nearest one."""
    return parse_job(read_settings(path, what="a job file", example="examples/demo/job.yaml"), str(path))


def parse_job(data: Mapping[str, Any], where: str) -> JobFile:
    data = dict(data)
    if isinstance(data.get("agents"), list):
        data["agents"] = [{"name": a} if isinstance(a, str) else a for a in data["agents"]]
    try:
        return JobFile.model_validate(data)
    except ValidationError as e:
        raise refused(e, JobFile, where) from e


def choose_tasks(job: JobFile, base_dir: Path, patterns: Sequence[str]) -> JobFile:
    """The job file with only those of its tasks whose name is like one of `patterns` (as in a shell).

    Raises `ConfigError` for a pattern that no task is like.
    """
    from dayfly.tasks import find_tasks, load_task

    folders = find_tasks([_below(base_dir, t) for t in job.tasks])
    named = [(load_task(f, strict=False, force_build=job.force_build).name, f) for f in folders]
    names = [name for name, _ in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"its tasks: {', '.join(names[:10])}"
            raise ConfigError(f"no task of this job is called {pattern!r}", hint=hint)
    chosen = [f for name, f in named if any(fnmatchcase(name, p) for p in patterns)]
    return job.model_copy(update={"tasks": [str(_seen_from(base_dir, f)) for f in chosen]})


def _seen_from(base_dir: Path, path: Path) -> Path:
    return path.relative_to(base_dir) if path.is_relative_to(base_dir) else path.absolute()


# --- the plan ------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Everything wanted, against everything on file."""

    job_id: str
    job_file: JobFile
    base_dir: Path
    jobs_dir: Path
    tasks: list[Task]
    agents: list[AgentSpec]
    done: list[RolloutRecord] = field(default_factory=list)
    to_retry: list[RolloutSpec] = field(default_factory=list)
    new: list[RolloutSpec] = field(default_factory=list)
    drifted: list[str] = field(default_factory=list)
    """What differs from the lock, one line each."""
    accepted: bool = False
    """Somebody said that what differs is meant."""
    early_stop: EarlyStopTerms | None = None
    """On what terms a gate may stop the job; settled when it starts."""
    watch: EarlyStopWatch | None = None
    """Looks at the results as they come, and may stop the job; see `watch_with_gate`."""

    @property
    def planned(self) -> int:
        return len(self.tasks) * len(self.agents) * self.job_file.attempts

    @property
    def planned_by_agent(self) -> dict[str, int]:
        """Agent → rollouts, so that one without any record is shown as such."""
        return {a.name: len(self.tasks) * self.job_file.attempts for a in self.agents}

    @property
    def specs(self) -> list[RolloutSpec]:
        """What is to do: what was not graded first; with a gate, task by task in the order of its terms."""
        specs = [*self.to_retry, *self.new]
        if self.early_stop is None:
            return specs
        place = {task: number for number, task in enumerate(self.early_stop.order)}
        return sorted(specs, key=lambda s: (place.get(s.key.task, len(place)), s.key.attempt))


def plan_new(job_file: JobFile, base_dir: Path, jobs_dir: Path) -> Plan:
    """The plan of a job that does not exist yet; writes nothing."""
    plan = _load_plan(new_job_id(), job_file, base_dir, jobs_dir)
    plan.new = list(_wanted(plan, {}))
    return plan


def plan_resume(job_id: str, jobs_dir: Path, changed: JobFile | None = None, base_dir: Path | None = None) -> Plan:
    """The plan of what is missing in a job on file; `changed` is a job file, in `base_dir`, to go by instead."""
    folder = JobFolder.open(jobs_dir, job_id)
    with folder.lock():
        folder.recover()  # a rollout that was sealed just before a crash counts
    stored = folder.job()
    recorded = parse_job(stored["job"], f"job {job_id}")
    plan = _load_plan(job_id, changed or recorded, base_dir or Path(stored["base_dir"]), jobs_dir)
    if stored.get("early_stop") is not None:
        plan.early_stop = read_terms(stored["early_stop"])
    plan.drifted = list(_drift(folder.lock_data(), recorded, plan))
    on_file = {r.key: r for r in folder.records(lambda place, error: plan.drifted.append(error.message))}
    for spec in _wanted(plan, on_file):
        record = on_file.get(spec.key)
        if record is None:
            plan.new.append(spec)
        elif record.graded:
            plan.done.append(record)
        else:
            plan.to_retry.append(spec)
    return plan


WITHOUT_TOOLS = ("oracle", "no-op")
"""Agents that have no use for a task's tool servers, and so need none of their credentials."""


def _load_plan(job_id: str, job_file: JobFile, base_dir: Path, jobs_dir: Path) -> Plan:
    from dayfly.agents import agent_digest
    from dayfly.tasks import find_tasks, load_task, resolve_env

    folders = find_tasks([_below(base_dir, t) for t in job_file.tasks])
    tasks = [load_task(folder, strict=False, force_build=job_file.force_build) for folder in folders]
    _refuse_twins([t.name for t in tasks], "task")
    for task in tasks:
        _refuse_unrunnable(task, job_file.verifier_class)
        if any((a.kind or a.name) not in WITHOUT_TOOLS for a in job_file.agents):
            resolve_env({h: v for m in task.mcp_servers for h, v in m.headers.items()}, os.environ)
    agents = []
    for entry in job_file.agents:
        spec = AgentSpec(name=entry.name, kind=entry.kind or entry.name, options=entry.options)
        make_agent(spec, base_dir)  # an unknown name or option is found before anything starts
        agents.append(spec.model_copy(update={"digest": agent_digest(spec, base_dir)}))
    _refuse_twins([a.name for a in agents], "agent")
    if any(a.kind == "oracle" for a in agents):
        for task in tasks:
            if task.solution is None:
                raise TaskError(
                    f"task {task.name} has no solution/solve.sh, which the oracle agent applies",
                    hint="add one, or leave the oracle out for this task",
                )
    return Plan(job_id, job_file, base_dir, jobs_dir, tasks, agents)


def _refuse_unrunnable(task: Task, verifier_class: VerifierClass | None) -> None:
    """Raise `TaskError`, or `ConfigError` for a variable that is not set, before anything starts."""
    from dayfly.tasks import resolve_env

    for env in (task.env, *(s.verifier_env for s in task.all_steps)):
        resolve_env(env, os.environ)
    if task.steps and verifier_class is VerifierClass.REBOOTED:
        raise TaskError(f"task {task.name}: {STEPS_REBOOTED}", hint="leave the verifier class to the task")
    if any(s.verifier_has_own_image for s in task.all_steps) and verifier_class not in (
        None,
        VerifierClass.SEPARATE,
    ):
        raise TaskError(
            f"task {task.name} has a verifier image of its own and cannot be judged as {verifier_class}",
            hint="leave the verifier class to the task",
        )


def _below(base_dir: Path, path: str) -> Path:
    return base_dir / Path(path).expanduser()


def _refuse_twins(names: list[str], what: str) -> None:
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"two {what}s are called {twice[0]!r}", hint="names identify results; make them differ")


def _wanted(plan: Plan, on_file: Mapping[RolloutKey, RolloutRecord]) -> Iterator[RolloutSpec]:
    """All rollouts of the job, first attempts first, so that an early stop leaves a broad picture."""
    options = plan.job_file.options()
    for attempt in range(1, plan.job_file.attempts + 1):
        for task in plan.tasks:
            for agent in plan.agents:
                key = RolloutKey(
                    task=task.name,
                    task_digest=task.digest,
                    agent=agent.name,
                    agent_digest=agent.digest,
                    attempt=attempt,
                )
                known = on_file.get(key)
                yield RolloutSpec(
                    job_id=plan.job_id,
                    rollout_id=new_rollout_id(),
                    key=key,
                    task_path=task.path,
                    machine=task.machine,
                    agent=agent,
                    options=options,
                    seed=_seed(plan.job_file.seed, key),
                    retry=known.retry + 1 if known else 0,
                    jobs_dir=plan.jobs_dir,
                    room=room_for(options, task),
                )


def _seed(job_seed: int, key: RolloutKey) -> int:
    digest = hashlib.sha256(f"{job_seed}".encode() + canonical_json(key.model_dump())).digest()
    return int.from_bytes(digest[:6], "big")


# --- a gate that may stop the job ----------------------------------------------------------------


def watch_with_gate(plan: Plan, loaded: LoadedPolicy, base: Side) -> None:
    """Let a policy stop the job as soon as it would block the candidate against `base`, or nothing can decide.

    Sets the order of the rollouts. Raises `ConfigError` for a policy without a margin of the score, for a job in
    which it is not clear who the candidate is, and for one on file that was started on other terms.
    """
    policy = loaded.policy
    agent = _candidate(plan, base)
    if base.attempts != plan.job_file.attempts and "attempts" not in policy.allow_differences:
        raise ConfigError(
            f"the baseline has {base.attempts} attempts a task and this job {plan.job_file.attempts}, "
            "so its gate would give no valid answer",
            hint=f"--attempts {base.attempts}, or allow_differences: [attempts] in the policy",
        )
    terms = terms_of(policy, loaded.digest, base, agent, plan.job_file.seed)
    if plan.early_stop is not None:
        _refuse_other_terms(plan.job_id, plan.early_stop, terms)
        terms = terms.model_copy(update={"seed": plan.early_stop.seed})
    quarantined = {e.task for e in loaded.quarantine.tasks}
    comparable = comparable_tasks(policy, base, planned_results(plan), quarantined)
    if not comparable:
        raise ConfigError(
            f"no task of this job can be compared with {base.label}",
            hint="the baseline must hold the same tasks, unchanged; `dayfly compare` says why they are not",
        )
    if not any(base.tasks[name].graded for name in comparable):
        raise ConfigError(
            f"no rollout of {base.label} that could be compared with is graded",
            hint="finish the baseline's job first: `dayfly run --resume`",
        )
    plan.watch = EarlyStopWatch(terms, policy, base, comparable, clusters_of(base, policy.cluster_by))
    order = plan.watch.order
    plan.early_stop = terms.model_copy(
        update={"order": (*order, *sorted({t.name for t in plan.tasks} - set(order)))}
    )
    for record in plan.done:
        if record.agent == agent:
            plan.watch.add(record.task, record.attempt, record.mark)


def _candidate(plan: Plan, base: Side) -> str:
    judged = [a.name for a in plan.agents if a.kind not in WITHOUT_TOOLS]
    if len(judged) == 1:
        return judged[0]
    if any(a.name == base.agent for a in plan.agents):
        return base.agent
    raise ConfigError(
        f"a gate needs one candidate, and this job has {', '.join(judged) or 'only oracle and no-op'}",
        hint=f"choose with --agent, or call the candidate {base.agent!r} as in the baseline",
    )


def _refuse_other_terms(job_id: str, settled: EarlyStopTerms, now: EarlyStopTerms) -> None:
    ours = now.model_copy(update={"seed": settled.seed, "order": settled.order})
    if ours != settled:
        raise ConfigError(
            f"job {job_id} was started with another gate: policy {settled.policy_name!r}, "
            f"baseline {settled.baseline.job}:{settled.baseline.agent}, or what is in them, was different",
            hint="--no-gate goes on to the end without looking; the gate then decides on all of it",
        )


def planned_results(plan: Plan) -> dict[str, TaskResults]:
    """Each task as the candidate will show it, without any result yet."""
    lock = lock_of(plan)["tasks"]
    return {
        task.name: TaskResults(
            task=task.name,
            task_digest=task.digest,
            marks=MISSING * plan.job_file.attempts,
            verifier_digest=lock[task.name]["verifier_digest"],
            verifier_classes=(VerifierClass(lock[task.name]["verifier_class"]),),
            agent_limit_s=lock[task.name]["agent_limit_s"],
            verifier_timeout_s=lock[task.name]["verifier_timeout_s"],
            machine=(task.machine.cpus, task.machine.memory_mib, task.machine.storage_mib),
        )
        for task in plan.tasks
    }


def lock_of(plan: Plan) -> dict[str, Any]:
    """`lock.json`: the exact versions of everything that the job uses."""
    from dayfly.tasks import plain_metadata, verifier_digest

    return {
        "schema_version": 1,
        "dayfly_version": dayfly.__version__,
        "tasks": {
            t.name: {
                "digest": t.digest,
                "path": str(t.path),
                "image": t.image,
                "machine": t.machine.model_dump(),
                "verifier_class": (plan.job_file.verifier_class or t.verifier_class).value,
                "agent_limit_s": agent_limit_s(plan.job_file.options(), t),
                "verifier_timeout_s": t.verifier_timeout_s,
                "verifier_digest": verifier_digest(t),
                "tags": list(t.tags),
                "metadata": plain_metadata(t),
            }
            for t in plan.tasks
        },
        "agents": {a.name: {"kind": a.kind, "digest": a.digest} for a in plan.agents},
        "planned": plan.planned,
        "planned_by_agent": plan.planned_by_agent,
    }


CHANGES_NO_RESULT = ("concurrency", "pull", "stop_after_oracle_failures")
"""Keys of a job file that a resume may change freely: how much is done, and when; images go by their digests."""


def _drift(lock: Mapping[str, Any], recorded: JobFile, plan: Plan) -> Iterator[str]:
    """What is different from when the job was started, in words."""
    before, now = recorded.model_dump(mode="json"), plan.job_file.model_dump(mode="json")
    for key in before:
        if before[key] != now[key] and key not in CHANGES_NO_RESULT:
            yield f"job file: {key} was {before[key]!r}, is {now[key]!r}"
    new = lock_of(plan)
    for kind in ("tasks", "agents"):
        for name in sorted({*lock[kind], *new[kind]}):
            one, other = lock[kind].get(name), new[kind].get(name)
            label = f"{kind[:-1]} {name}"
            if other is None:
                yield f"{label} was removed"
            elif one is None:
                yield f"{label} was added"
            elif one["digest"] != other["digest"]:
                yield f"{label} changed: {one['digest'][:19]}… is now {other['digest'][:19]}…"


def refuse_drift(plan: Plan, accept: bool) -> None:
    """Raise `NeedsDecision` when something changed and nobody said that this is meant."""
    plan.accepted = accept
    if plan.drifted and not accept:
        raise NeedsDecision(
            f"job {plan.job_id} cannot simply go on: " + "; ".join(plan.drifted),
            hint="undo the change, start a new job, or pass --accept-changes: then changed tasks and agents "
            "run anew and old results stay on file",
        )


# --- running -------------------------------------------------------------------------------------


@dataclass
class InFlight:
    spec: RolloutSpec
    phase: str = "waiting"
    since: float = field(default_factory=time.monotonic)
    limit_s: float = float("inf")


@dataclass
class JobResult:
    job_id: str
    records: list[RolloutRecord]
    planned: int
    interrupted: bool = False
    seconds: float = 0.0
    stopped: str = ""
    """Why the job ended itself before its plan was done."""
    gate: EarlyStopped | None = None
    """What its gate saw, when it was that which stopped the job."""

    @property
    def exit_code(self) -> int:
        """0 when every planned rollout is graded; 130 when interrupted; 1 or 3 when its gate stopped it; else 4."""
        if self.interrupted:
            return 130
        if self.gate is not None:
            return 1 if self.gate.kind == "blocked" else 3
        return 0 if sum(r.graded for r in self.records) >= self.planned else 4


@dataclass
class Run:
    """One process working on one job."""

    plan: Plan
    hypervisor: Hypervisor
    make_disk: Callable[[str], Any]
    store: Store | None = None
    observers: list[Observer] = field(default_factory=list)
    make_agent: Callable[[RolloutSpec], Agent] | None = None
    """Overrides the registry, for an agent that is a Python object of this process."""
    build_disk: Callable[[Path, float], Awaitable[Disk]] | None = None
    """For tasks whose image is a Dockerfile; see `dayfly.build`."""
    own_signals: bool = True
    """Stop the job on SIGINT, SIGTERM and SIGHUP; False inside another program."""
    folder: JobFolder = field(init=False)
    in_flight: dict[str, InFlight] = field(default_factory=dict)
    records: list[RolloutRecord] = field(default_factory=list)
    interrupted: bool = False
    building: bool = False
    """A Dockerfile is being built, before the first rollout."""
    stopped: str = ""
    _oracle_failed: dict[str, None] = field(default_factory=dict)
    """Tasks whose reference solution failed since one last passed."""
    _work: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _index: Behind | None = field(init=False, default=None)
    _sharing: Sharing = field(init=False, default_factory=Sharing)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl, and tell the display."""
        event = {"time": time.time(), "event": kind, **fields}
        self.folder.event(event)
        for observer in self.observers:
            observer(event)

    async def go(self) -> JobResult:
        """Do what the plan lists as missing. Returns when all of it is durable, or the job was interrupted."""
        started = time.monotonic()
        plan = self.plan
        self.records = [self._sharing.share(r) for r in plan.done]
        with self.folder.lock():
            self.folder.recover()
            self.emit("job_started", job=plan.job_id, planned=plan.planned, done=len(plan.done))
            async with anyio.create_task_group() as group:
                if self.own_signals:
                    await group.start(self._watch_signals)
                group.start_soon(self._watchdog)
                if self.store is not None:
                    from dayfly.stores import Behind

                    self._index = Behind(self.store, self.index_failed)
                    group.start_soon(self._index.run)
                with self._work:
                    self._stop_if_the_gate_is_sure()  # a job that goes on may have been stopped before
                    await self._build_images()
                    await self._engine().run(plan.specs, self._run_one, self._done)
                if self._index is not None:
                    await self._index.finish(INDEX_GRACE_S)
                group.cancel_scope.cancel()
            state = "cancelled" if self.interrupted or self.stopped else "finished"
            self.emit("job_" + state, job=plan.job_id, records=len(self.records))
        seconds = time.monotonic() - started
        gate = plan.watch.stopped if plan.watch is not None else None
        return JobResult(plan.job_id, self.records, plan.planned, self.interrupted, seconds, self.stopped, gate)

    async def _build_images(self) -> None:
        """Build the Dockerfiles of the rollouts to come, while no rollout needs the memory.

        One that fails is no fault of the others: its rollouts meet the error again, at once.
        """
        if self.build_disk is None or self.hypervisor.isolation == "fake":
            return
        wanted = {spec.key.task_digest for spec in self.plan.specs}
        limits = {
            path: step.verifier_build_timeout_s if path == step.verifier_dockerfile else task.build_timeout_s
            for task in self.plan.tasks
            if task.digest in wanted
            for step in task.all_steps
            for path in (task.dockerfile, step.verifier_dockerfile)
            if path is not None
        }
        for number, (dockerfile, timeout_s) in enumerate(limits.items(), 1):
            self.emit("image_building", dockerfile=str(dockerfile), number=number, of=len(limits))
            self.building = True
            try:
                await self.build_disk(dockerfile, timeout_s)
            except DayflyError as error:
                self.emit("image_failed", dockerfile=str(dockerfile), message=error.message, hint=error.hint or "")
            finally:
                self.building = False

    def _engine(self) -> LocalEngine:
        capacity = Capacity.of_host(self.plan.jobs_dir, self.plan.job_file.concurrency)
        admission = Admission(capacity, self.plan.jobs_dir)
        options = self.plan.job_file.options()
        for machine in {room_for(options, t) or t.machine for t in self.plan.tasks}:
            admission.refuse_impossible(machine)
        return LocalEngine(admission)

    async def _run_one(self, spec: RolloutSpec) -> RolloutRecord:
        """One attempt, with its bounded retries; every start is kept on file."""
        first = spec.retry
        while True:
            self.in_flight[spec.rollout_id] = InFlight(spec)
            self.emit("rollout_started", rollout=spec.rollout_id, retry=spec.retry, **_names(spec))
            try:
                record = await run_rollout(spec, self._context())
            finally:
                del self.in_flight[spec.rollout_id]
            limit = min(spec.options.retries, RETRYABLE.get(record.outcome, 0))
            if spec.retry - first >= limit:
                return record
            self.emit(
                "rollout_retried",
                rollout=spec.rollout_id,
                outcome=record.outcome.value,
                cause=record.cause.message if record.cause else "",
                **_names(spec),
            )
            await anyio.sleep(min(30.0, 0.5 * 2 ** (spec.retry - first)))
            spec = spec.model_copy(update={"retry": spec.retry + 1, "rollout_id": new_rollout_id()})

    def _context(self) -> Context:
        from dayfly.tasks import load_task, resolve_env

        return Context(
            hypervisor=self.hypervisor,
            job=self.folder,
            load_task=partial(load_task, strict=False, force_build=self.plan.job_file.force_build),
            make_disk=self.make_disk,
            make_agent=self.make_agent or (lambda spec: make_agent(spec.agent, self.plan.base_dir)),
            make_verifier=make_verifier,
            resolve_env=lambda env: resolve_env(env, os.environ),
            on_phase=self._on_phase,
            build_disk=self.build_disk,
        )

    def _on_phase(self, spec: RolloutSpec, phase: str, limit_s: float) -> None:
        flight = self.in_flight[spec.rollout_id]
        flight.phase, flight.since, flight.limit_s = phase, time.monotonic(), limit_s
        for observer in self.observers:
            observer({"event": "phase", "rollout": spec.rollout_id, "phase": phase, **_names(spec)})

    def index_failed(self, error: DayflyError) -> None:
        """The files are the truth and the index can be rebuilt, so this stops no job."""
        self.emit("index_failed", message=error.message, hint="run `dayfly gc --reindex`")

    def image_built(self, dockerfile: Path, built: Built) -> None:
        self.emit(
            "image_built",
            dockerfile=str(dockerfile),
            image=built.image.digest,
            seconds=round(built.seconds, 1),
            log=str(built.log),
        )

    async def _done(self, record: RolloutRecord) -> None:
        self.records.append(self._sharing.share(record))
        if self._index is not None:
            self._index.add(record)
        self.emit(
            "rollout_finished",
            rollout=record.rollout_id,
            task=record.task,
            agent=record.agent,
            attempt=record.attempt,
            outcome=record.outcome.value,
            reward=record.reward,
            cause=record.cause.message if record.cause else None,
            seconds=round(record.finished_unix - record.started_unix, 3),
        )
        self._stop_if_the_oracle_fails(record)
        watch = self.plan.watch
        if watch is not None and record.agent == watch.terms.agent:
            watch.add(record.task, record.attempt, record.mark)
            self._stop_if_the_gate_is_sure()

    def _stop_if_the_gate_is_sure(self) -> None:
        """What is under way is cancelled, like all that was not begun: it was not needed."""
        watch = self.plan.watch
        if watch is None or watch.stopped is None or self.stopped:
            return
        self.stopped = watch.reason
        self.emit(
            "gate_stopped",
            message=self.stopped,
            policy=watch.terms.policy_name,
            policy_digest=watch.terms.policy_digest,
            baseline=watch.terms.baseline.model_dump(),
            records=len(self.records),
            planned=self.plan.planned,
            stop=watch.stopped.kind,
            **watch.stopped.model_dump(exclude={"kind"}),
        )
        self._work.cancel()

    def _stop_if_the_oracle_fails(self, record: RolloutRecord) -> None:
        """Where reference solutions fail in a row it is not the agents that got worse: a mirror, a base image.

        Only in a job with an agent to be judged; one of oracle and no-op alone is a trial of the tasks.
        """
        most, kinds = self.plan.job_file.stop_after_oracle_failures, {a.name: a.kind for a in self.plan.agents}
        judged = record.graded or record.outcome is Outcome.VERIFIER_ERROR
        if not most or kinds[record.agent] != "oracle" or not judged or set(kinds.values()) <= set(WITHOUT_TOOLS):
            return
        if record.outcome is Outcome.PASSED:
            self._oracle_failed.clear()
            return
        self._oracle_failed[record.task] = None
        if len(self._oracle_failed) >= most and not self.stopped:
            self.stopped = f"the reference solutions of {len(self._oracle_failed)} tasks failed in a row"
            self.emit("oracle_fails", tasks=list(self._oracle_failed), message=self.stopped)
            self._work.cancel()

    async def _watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """First signal: stop starting, collect, clean up. Second: leave at once; VMs die with us."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if self.interrupted:
                    self.emit("job_killed", job=self.plan.job_id, in_flight=self._dump())
                    os._exit(130)
                self.interrupted = True
                self.emit("job_stopping", signal=signal.Signals(number).name, in_flight=self._dump())
                self._work.cancel()

    async def _watchdog(self) -> None:
        """Say what is in flight when a phase is over its limit: every wait has a bound, so this is a fault."""
        told: set[tuple[str, str]] = set()
        busy_at, idle_told = time.monotonic(), False
        while True:
            await anyio.sleep(WATCHDOG_INTERVAL_S)
            now = time.monotonic()
            busy_at = now if self.in_flight or self.building else busy_at
            if now - busy_at > OVERDUE_GRACE_S and not idle_told:
                idle_told = True
                self.emit("idle", seconds=round(now - busy_at, 1), left=self.plan.planned - len(self.records))
            for rollout_id, flight in self.in_flight.items():
                overdue = now - flight.since > flight.limit_s + OVERDUE_GRACE_S
                if overdue and (rollout_id, flight.phase) not in told:
                    told.add((rollout_id, flight.phase))
                    self.emit("stalled", rollout=rollout_id, phase=flight.phase, in_flight=self._dump())

    def _dump(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {"rollout": r, "phase": f.phase, "seconds": round(now - f.since, 1), **_names(f.spec)}
            for r, f in self.in_flight.items()
        ]


def _names(spec: RolloutSpec) -> dict[str, Any]:
    return {"task": spec.key.task, "agent": spec.key.agent, "attempt": spec.key.attempt}


async def run_job(
    plan: Plan,
    *,
    settings: HypervisorSettings | None = None,
    hypervisor: Hypervisor | None = None,
    observers: list[Observer] | None = None,
    make_agent: Callable[[RolloutSpec], Agent] | None = None,
    own_signals: bool = True,
    image_store: ImageStore | None = None,
    registries: Registries | None = None,
) -> JobResult:
    """Do a plan on this host. `hypervisor` overrides the one that the job file names; see also `Run`.

    `image_store`: default the user's; the fake hypervisor needs none, and has its images only when one is given.
    """
    if hypervisor is None:
        settings = settings or HypervisorSettings(accelerator=plan.job_file.accelerator, fork=plan.job_file.fork)
        hypervisor = await anyio.to_thread.run_sync(make_hypervisor, plan.job_file.hypervisor, settings)
    _require_isolation(plan, hypervisor)
    from dayfly.stores import SqlStore

    with ExitStack() as in_use:
        told: list[Event] = []

        def tell(kind: str, **fields: Any) -> None:
            told.append({"time": time.time(), "event": kind, **fields})
            for observer in observers or []:
                observer(told[-1])

        if image_store is None and hypervisor.isolation != "fake":
            image_store = ImageStore()
        disks = ImageDisks(image_store, in_use, plan.job_file.pull, registries or Registries(), tell=tell)
        disks.digests |= _locked_images(plan)
        await _prepare(plan, hypervisor, disks)
        build_disk = DiskBuilder(hypervisor, in_use, load_settings(), disks.resolve)
        await anyio.lowlevel.checkpoint()  # a job that was interrupted until here leaves no folder
        plan.jobs_dir.mkdir(parents=True, exist_ok=True)
        run = Run(
            plan,
            hypervisor,
            disks,
            observers=observers or [],
            make_agent=make_agent,
            build_disk=build_disk,
            own_signals=own_signals,
        )
        build_disk.on_built = run.image_built
        run.folder = _open_folder(plan, disks.digests, host_facts(hypervisor))
        for event in told:
            run.folder.event(event)
        disks.tell = run.emit
        disks.on_resolved = lambda: run.folder.add_images(disks.digests)
        try:
            run.store = in_use.enter_context(await anyio.to_thread.run_sync(SqlStore.open, plan.jobs_dir))
        except DayflyError as error:
            run.index_failed(error)
        try:
            return await run.go()
        except* DayflyError as group:
            raise _first(group) from group


def _first(group: BaseExceptionGroup[DayflyError]) -> DayflyError:
    """The first error of concurrent rollouts: a person reads one, the job's events hold them all."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, DayflyError)
    return error


async def evaluate(
    task: str | Path,
    agent: Callable[[Vm, Task], Awaitable[AgentResult | None]],
    *,
    jobs_dir: str | Path = "jobs",
    hypervisor: str = "qemu",
    verifier_class: VerifierClass | None = None,
) -> RolloutRecord:
    """One rollout of a Python function on one task; its evidence is kept as a job of its own.

    The function runs on the host and works in the VM (`vm.exec`, `vm.put`, `vm.get`). Raises `DayflyError`
    when there is no host, image or task to work with; how the rollout itself ended is in the record.
    """
    from dayfly.agents import FunctionAgent

    entry = AgentEntry(name=agent.__name__, kind="function", options={"function": agent.__qualname__})
    job = JobFile(
        name=agent.__name__,
        tasks=[str(Path(task).resolve())],
        agents=[AgentEntry(name="no-op")],
        hypervisor=hypervisor,
        verifier_class=verifier_class,
    )
    plan = plan_new(job, Path.cwd(), Path(jobs_dir))
    digest = sha256_bytes(inspect.getsource(agent).encode())
    plan.job_file = job.model_copy(update={"agents": [entry]})
    plan.agents = [AgentSpec(name=entry.name, kind="function", options=entry.options, digest=digest)]
    plan.new = list(_wanted(plan, {}))
    result = await run_job(plan, make_agent=lambda spec: FunctionAgent(agent), own_signals=False)
    return result.records[0]


def _open_folder(plan: Plan, images: dict[str, str], host: dict[str, str]) -> JobFolder:
    """The job's folder, made now for a new job; with accepted changes, its plan is replaced."""
    lock = lock_of(plan) | {"images": images, "host": host}
    job = {
        "schema_version": 1,
        "id": plan.job_id,
        "base_dir": str(plan.base_dir.resolve()),
        "job": plan.job_file.model_dump(mode="json"),
        "planned": plan.planned,
        "planned_by_agent": plan.planned_by_agent,
    }
    if plan.early_stop is not None:
        job["early_stop"] = plan.early_stop.model_dump(mode="json")
    if (plan.jobs_dir / plan.job_id / "job.json").exists():
        folder = JobFolder.open(plan.jobs_dir, plan.job_id)
        if plan.drifted or any(images.get(n, d) != d for n, d in locked_digests(folder.lock_data()).items()):
            folder.replace_plan(job, lock)
        else:
            folder.add_images(images)
        return folder
    return JobFolder.create(plan.jobs_dir, plan.job_id, job, lock)


def _locked_images(plan: Plan) -> dict[str, str]:
    """What a job that goes on must use, unless somebody said that what differs is meant."""
    if plan.accepted or not (plan.jobs_dir / plan.job_id / "lock.json").exists():
        return {}
    return locked_digests(JobFolder.open(plan.jobs_dir, plan.job_id).lock_data())


def _require_isolation_of_the_baseline(plan: Plan, got: str) -> None:
    """Before the first rollout: against another isolation class a gate has no valid answer."""
    wanted = plan.watch.isolation if plan.watch is not None else frozenset()
    if wanted and got not in wanted:
        raise ConfigError(
            f"the baseline was run with isolation {', '.join(sorted(wanted))}, and this host gives "
            f"{got}, so its gate would give no valid answer",
            hint="run on a host like the baseline's, or allow_differences: [isolation] in the policy",
        )


def _require_isolation(plan: Plan, hypervisor: Hypervisor) -> None:
    order = ("fake", "tcg", "kvm")
    wanted, got = plan.job_file.require_isolation, hypervisor.isolation
    if wanted is not None and order.index(got) < order.index(wanted):
        raise DayflyError(
            f"isolation class {wanted!r} is required, and this host gives {got!r}",
            hint="run on a host with working KVM (`dayfly doctor` says why not), or lower the requirement",
            cause="isolation",
        )
    _require_isolation_of_the_baseline(plan, got)


async def _prepare(plan: Plan, hypervisor: Hypervisor, disks: ImageDisks) -> None:
    """Make every disk and template before the first rollout, so that faults show at once."""
    await disks.prepare(i for t in plan.tasks for i in t.images)
    for machine in sorted({m for t in plan.tasks for m in t.machines}, key=repr):
        await hypervisor.prepare(machine)
