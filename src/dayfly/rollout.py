"""One rollout, from task to sealed record.

`carry_out` is the line that the whole project is about; read it first. `run_rollout` around it turns
whatever happens into exactly one outcome and one durable folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread

import dayfly
from dayfly.errors import (
    AgentError,
    DayflyError,
    DiskFull,
    GuestLost,
    GuestRefused,
    HostError,
    ImageError,
    InfraError,
    ProviderError,
    SandboxOom,
    Tampered,
    VerifierError,
)
from dayfly.evidence import JobFolder, RolloutFolder, canonical_json, fingerprint, sha256_bytes
from dayfly.model import (
    VERIFIER_CLASS_ORDER,
    Cause,
    Change,
    Disk,
    EntryMeta,
    Fingerprint,
    GuestStats,
    Healthcheck,
    Machine,
    Options,
    Outcome,
    PhaseTime,
    RolloutRecord,
    RolloutSpec,
    StepResult,
    Task,
    Usage,
    Verdict,
    VerifierClass,
    VmInfo,
)
from dayfly.protocols import (
    Agent,
    AgentResult,
    Hypervisor,
    Record,
    Sink,
    StartOptions,
    TransferLimits,
    Verifier,
    Vm,
)
from dayfly.tasks import select
from dayfly.verifiers import combine, shortfall

Phase = Literal["image", "boot", "setup", "agent", "collect", "verify", "teardown"]

VERIFIER_FOLDERS = ("/tests", "/logs/verifier")
AGENT_STOP_GRACE_S = 60.0
"""Beyond the agent's own limit, for the guest to kill its processes and hand over the last output."""
FULL_DISK_BYTES = 1024 * 1024
"""A writable disk with less than this free counts as full."""


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
        self.failures.append((outcome, _cause(error, self.phase)))


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


async def run_rollout(spec: RolloutSpec, context: Context) -> RolloutRecord:
    """Do one rollout; returns its record once the folder is durable.

    A cancelled rollout is recorded, too, with what was seen until then; the cancellation goes on. Raises
    `HostError` when the record itself cannot be kept (a full disk): the evidence then waits for `recover`.
    """
    with context.job.rollout(spec.rollout_id, max_bytes=spec.options.max_output_bytes) as folder:
        progress = Progress(spec, context, folder)
        try:
            await carry_out(progress)
        except Exception as error:
            full_disk_is_the_agents = progress.agent_has_worked and (
                progress.phase != "verify" or progress.verifier_class is not VerifierClass.SEPARATE
            )
            progress.fail(_outcome_of(error, progress.phase, full_disk_is_the_agents), error)
        except anyio.get_cancelled_exc_class():
            progress.failures.append(
                (Outcome.CANCELLED, Cause(kind="cancelled", message="stopped", phase=progress.phase))
            )
            with anyio.CancelScope(shield=True):
                await _publish(progress)
            raise
        with anyio.CancelScope(shield=True):
            published = await _publish(progress)
    return published


async def carry_out(p: Progress) -> None:
    """The path of one rollout: load, image, VM, set-up; for each step agent, collection, verifier.

    A task without steps is its own only step. The agent's VM lives until the last step's work is collected.
    """
    p.task = task = _load(p)
    async with p.in_phase("image", task.build_timeout_s):
        p.disk = await _disk(p, task.image, task.dockerfile, task.build_timeout_s)
    writable = p.folder.scratch / "disk.img"
    async with _vm(p, "agent", p.disk, task, writable) as vm:
        async with p.in_phase("setup", setup_limit_s(p.options, task)):
            await set_up(p, vm, task)
        for step in task.all_steps:
            with p.at(step):
                carried = await _work(p, vm, step)
                if p.over:
                    break
                if p.verifier_class is VerifierClass.SHARED:
                    p.now.verdict = await _verify_shared(p, vm, step)
                elif step is not task.all_steps[-1]:
                    await _verify_separately(p, step, carried)
            if step is not task.all_steps[-1] and p.falls_short():
                break
        await vm.stop()
    if p.over:
        return
    with p.at(step):
        if p.verifier_class is VerifierClass.REBOOTED:
            async with _vm(p, "verifier", p.disk, step, writable) as vm:
                p.now.verdict = await _verify(p, vm, step)
        elif p.verifier_class is VerifierClass.SEPARATE:
            await _verify_separately(p, step, carried)


def _load(p: Progress) -> Task:
    task = p.context.load_task(p.spec.task_path)
    if task.digest != p.spec.key.task_digest:
        raise InfraError(
            f"task {task.name} has changed since the job was planned",
            hint="do not edit tasks during a job; `dayfly run --resume --accept-changes` runs it anew",
            cause="task_changed",
        )
    return task


async def _work(p: Progress, vm: Vm, step: Task) -> list[Carried]:
    """What comes before a verifier: the step is prepared, the agent works, its work is collected."""
    start = await _begin_step(p, vm, step)
    if p.stopped:
        return []
    p.now.agent_result = await _let_agent_work(p, vm, step)
    async with p.in_phase("collect", collect_limit_s(p.options, step)):
        return await _collect(p, vm, step, start)


async def _disk(p: Progress, image: str | None, dockerfile: Path | None, timeout_s: float) -> Disk:
    """Of the image that has a name, or else of the one that the Dockerfile describes."""
    if image is not None:
        return await p.context.make_disk(image)
    assert dockerfile is not None
    if p.context.build_disk is None:
        raise ImageError("no builder was given for this rollout", hint="name an image as docker_image")
    return await p.context.build_disk(dockerfile, timeout_s)


@asynccontextmanager
async def _vm(
    p: Progress, role: Literal["agent", "verifier"], disk: Disk, task: Task, writable: Path
) -> AsyncIterator[Vm]:
    """A fresh VM for `role`; its start is the phase boot, its end the phase teardown."""
    own = role == "verifier" and p.verifier_class is VerifierClass.SEPARATE
    env = task.env if not own or task.verifier_vm_env is None else task.verifier_vm_env
    number = len(p.vms)
    p.record.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = StartOptions(
        vm_id=f"{p.spec.rollout_id}-{role[0]}{number if number > 1 else ''}",
        writable=writable,
        env=p.context.resolve_env(env),
        workdir=verifier_workdir(task) if own else task.workdir,
        lifetime_s=vm_lifetime_s(p.options, task),
        boot_timeout_s=p.options.boot_timeout_s,
        console=p.record.folder / ("console.log" if role == "agent" else "verifier-console.log"),
    )
    machine = (task.verifier_machine or task.machine) if own else task.machine
    starting = p.context.hypervisor.start(disk, machine, options)
    async with p.in_phase("boot", p.options.boot_timeout_s + 30):
        vm = await starting.__aenter__()
    p.vms.append(vm.info)
    try:
        yield vm
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await starting.__aexit__(type(error), error, error.__traceback__)
        raise
    ending, p.phase = p.phase, "teardown"
    async with p.in_phase("teardown", p.options.teardown_timeout_s):
        await starting.__aexit__(None, None, None)
    p.phase = ending


def verifier_workdir(task: Task) -> str | None:
    """Of a separate verifier: its own, else the task's if it runs on the task's image; None: the image's."""
    return task.verifier_workdir or (None if task.verifier_has_own_image else task.workdir)


# --- limits --------------------------------------------------------------------------------------


def vm_lifetime_s(options: Options, task: Task) -> float:
    """The hard limit of a VM's life: the sum of what its phases may take, and a margin.

    For a task with steps also of the verifiers that work in VMs of their own while the agent's stands still.
    """
    beside = options.boot_timeout_s + setup_limit_s(options, task) + options.teardown_timeout_s
    return (
        options.boot_timeout_s
        + setup_limit_s(options, task)
        + agent_limit_s(options, task)
        + sum(
            AGENT_STOP_GRACE_S + collect_limit_s(options, s) + s.verifier_timeout_s + step_setup_limit_s(options, s)
            for s in task.all_steps
        )
        + beside * max(0, len(task.steps) - 1)
        + options.teardown_timeout_s
        + 120
    )


def agent_limit_s(options: Options, task: Task) -> float:
    """The agent's time in seconds: the job's override, else the task's, else the job's default; over all steps."""
    return sum(
        options.agent_timeout_s or s.agent_timeout_s or options.default_agent_timeout_s for s in task.all_steps
    )


def setup_limit_s(options: Options, task: Task) -> float:
    """The set-up's time, with what the task's health check may take."""
    return options.setup_timeout_s + _healthcheck_limit_s(task.healthcheck)


def step_setup_limit_s(options: Options, step: Task) -> float:
    """The same for what a step begins with; 0 for a task without steps."""
    return 0.0 if step.step is None else options.setup_timeout_s + _healthcheck_limit_s(step.step_healthcheck)


def collect_limit_s(options: Options, task: Task) -> float:
    """The collection's time, with what the collect hooks may take."""
    return options.collect_timeout_s + sum(h.timeout_s for h in task.collect)


def _healthcheck_limit_s(check: Healthcheck | None) -> float:
    if check is None:
        return 0.0
    return check.start_period_s + check.retries * (check.timeout_s + check.interval_s) + check.start_interval_s


def room_for(options: Options, task: Task) -> Machine | None:
    """What must be free on the host, if that is more than the agent's machine: two VMs at once between steps."""
    beside = [
        s.verifier_machine or s.machine
        for s in task.steps[:-1]
        if (options.verifier_class or s.verifier_class) is VerifierClass.SEPARATE
    ]
    if not beside:
        return None
    return Machine(
        cpus=max(m.cpus for m in (task.machine, *beside)),  # one of the two stands still
        memory_mib=task.machine.memory_mib + max(m.memory_mib for m in beside),
        storage_mib=task.machine.storage_mib + max(m.storage_mib for m in beside),
    )


# --- set-up --------------------------------------------------------------------------------------


async def set_up(p: Progress, vm: Vm, task: Task) -> None:
    """Bring what Harbor promises into a fresh VM: log folders, environment files, the health check."""
    await _make_log_folders(p, vm, "/logs", "agent", "artifacts")
    if task.environment_files is not None:
        files = await anyio.to_thread.run_sync(select, task.environment_files)
        await vm.put(files.source, _workdir(p, task), exclude=_not_for_the_vm, meta=files.meta)
    if task.healthcheck is not None:
        await _healthcheck(p, vm, task.healthcheck, None)


async def _set_up_verifier(p: Progress, vm: Vm, task: Task) -> None:
    """The same for a separate verifier's VM. An image of its own has nothing of the task's environment."""
    if not task.verifier_has_own_image:
        task = task.model_copy(update={"healthcheck": task.verifier_healthcheck or task.healthcheck})
    else:
        task = task.model_copy(update={"healthcheck": task.verifier_healthcheck, "environment_files": None})
    await set_up(p, vm, task)


async def _make_log_folders(p: Progress, vm: Vm, place: str, *names: str) -> None:
    """Folders below `place` that any user in the VM can write to."""
    with tempfile.TemporaryDirectory(dir=p.folder.scratch) as made:
        for name in names:
            (Path(made) / name).mkdir()
            (Path(made) / name).chmod(0o777)
        Path(made).chmod(0o755)
        await vm.put(Path(made), place)


async def _begin_step(p: Progress, vm: Vm, step: Task) -> tuple[Change, ...]:
    """Prepare a step, if the task has steps; returns the state of the writable layer that the agent starts from.

    In the first step a failure is one of the environment. Later the agent has been at work on what the step's
    set-up needs, so a failure there is counted as the agent's, and the steps end.
    """
    first = len(p.steps) == 1
    if step.step is None:
        async with p.in_phase("setup", p.options.setup_timeout_s):
            return await _take_fingerprint(p, vm, step)
    async with p.in_phase("setup", step_setup_limit_s(p.options, step)):
        if not first:
            await vm.thaw()
        try:
            await _set_up_step(p, vm, step, first=first)
        except (InfraError, GuestRefused) as error:
            if first or isinstance(error, GuestLost | HostError):
                raise
            p.stopped = f"step {step.step}: {error.message}"
            p.fail(Outcome.AGENT_ERROR, AgentError(p.stopped, hint=error.hint, cause="step_setup_failed"))
            return ()
        return await _take_fingerprint(p, vm, step)


async def _set_up_step(p: Progress, vm: Vm, step: Task, *, first: bool) -> None:
    """As Harbor does it, as the agent's user: empty log folder, workdir/, its setup.sh, the health check."""
    if not first:
        await vm.remove("/logs/agent")
        await _make_log_folders(p, vm, "/logs", "agent")
    workdir = _workdir(p, step)
    if step.step_files is not None:
        files = await anyio.to_thread.run_sync(select, step.step_files)
        await vm.put(files.source, workdir, meta=files.meta)
        if (step.step_files / "setup.sh").is_file():
            await _run_setup_script(p, vm, step, f"{workdir.rstrip('/')}/setup.sh")
    if step.step_healthcheck is not None:
        await _healthcheck(p, vm, step.step_healthcheck, step.agent_user)


async def _run_setup_script(p: Progress, vm: Vm, step: Task, script: str) -> None:
    result = await vm.exec(["/bin/bash", script], user=step.agent_user)
    p.record.write("setup.txt", result.stdout.data + result.stderr.data)
    if not result.ok:
        raise InfraError(
            f"the setup.sh of step {step.step} ended with status {result.exit_code}",
            hint=result.stderr.text[-500:] or result.stdout.text[-500:] or None,
            cause="step_setup_failed",
        )


def _workdir(p: Progress, task: Task) -> str:
    assert p.disk is not None
    return task.workdir or p.disk.config.workdir or "/"


def _not_for_the_vm(name: str) -> bool:
    return name in ("Dockerfile", "docker-compose.yaml", ".dockerignore")


async def _healthcheck(p: Progress, vm: Vm, check: Healthcheck, user: str | None) -> None:
    """Docker's rule: failures within the start period do not count; then `retries` in a row are fatal.

    `user` None is the image's: the task's check comes before the agent's user is taken.
    """
    begun, failures = time.monotonic(), 0
    while True:
        result = await vm.exec(["/bin/sh", "-c", check.command], user=user, timeout_s=check.timeout_s)
        if result.ok:
            return
        starting = time.monotonic() - begun < check.start_period_s
        failures += 0 if starting else 1
        if failures >= max(1, check.retries):
            p.record.write("healthcheck.txt", result.stdout.data + result.stderr.data)
            raise InfraError(
                f"the health check failed {failures} times; last exit status {result.exit_code}",
                hint=result.stderr.text[-500:] or result.stdout.text[-500:] or None,
                cause="healthcheck_failed",
            )
        await anyio.sleep(check.start_interval_s if starting else check.interval_s)


async def _take_fingerprint(p: Progress, vm: Vm, step: Task) -> tuple[Change, ...]:
    """Record the context that the agent starts from (invariant 5); returns the state of the writable layer.

    The start of later steps holds the agent's own work, so only the first one's is a rollout's fingerprint.
    """
    assert p.disk is not None and p.task is not None
    start = await vm.changes()
    listed = [c.model_dump() for c in start]
    p.record.write("start-files.json", canonical_json(listed))
    if p.fingerprint is not None:
        return start
    environment = {k: sha256_bytes(v.encode()) for k, v in sorted(p.context.resolve_env(step.env).items())}
    p.fingerprint = fingerprint(
        {
            "disk": p.disk.digest,
            "template": vm.info.template,
            "machine": step.machine.model_dump(),
            "environment": environment,
            "workdir": _workdir(p, step),
            "user": step.agent_user or p.disk.config.user,
            "instruction": sha256_bytes(p.task.instruction.encode()),
            "files": sha256_bytes(canonical_json(listed)),
            "network": {"given": "none", "asked": dict(p.task.network)},
        }
    )
    return start


async def _let_agent_work(p: Progress, vm: Vm, task: Task) -> AgentResult:
    """The agent phase. Its failures are kept and the verifier still runs, unless the VM is lost."""
    limit_s = agent_limit_s(p.options, task)
    killed_before = p.stats.oom_kills if p.stats else 0
    result = AgentResult(exit_code=None)
    p.agent = agent = p.agent or p.context.make_agent(p.spec)  # one agent for all steps: it may remember
    try:
        async with p.in_phase("agent", limit_s + AGENT_STOP_GRACE_S):
            with anyio.move_on_after(limit_s + AGENT_STOP_GRACE_S / 2) as overrun:
                result = await agent.run(vm, task, p.record, limit_s)
            if overrun.cancel_called:  # also when it went on all the same, and then returned
                result = replace(result, timed_out=True, message="did not stop at its limit")
    except AgentError as error:
        p.fail(Outcome.AGENT_ERROR, error)
    await vm.freeze()
    p.stats = await vm.stats()
    if result.timed_out:
        p.fail(Outcome.AGENT_TIMEOUT, DayflyError(f"the agent used up its {limit_s:g} s", cause="timeout"))
    killed = p.stats.oom_kills - killed_before
    if result.oom_killed or killed > 0:
        p.fail(
            Outcome.SANDBOX_OOM,
            SandboxOom(
                f"the kernel killed {max(1, killed)} process(es) at the memory limit, "
                f"peak {p.stats.memory_peak_bytes >> 20} of {p.stats.memory_limit_bytes >> 20} MiB",
                hint="give the task more memory_mb if honest work needs it",
            ),
        )
    if p.stats.disk_size_bytes and p.stats.disk_free_bytes < FULL_DISK_BYTES:
        p.fail(
            Outcome.DISK_FULL,
            DiskFull(
                f"the agent filled the {task.machine.storage_mib} MiB disk",
                hint="give the task more storage_mb if honest work needs it",
            ),
        )
    if result.exit_code not in (0, None) and len(p.failures) == p.now.failures_before:
        p.fail(
            Outcome.AGENT_ERROR,
            AgentError(
                f"the agent ended with status {result.exit_code}",
                hint="see agent/stderr.txt in this rollout's folder",
            ),
        )
    return result


@dataclass(frozen=True)
class Carried:
    """What crosses into a separate verifier: for each declared artifact its copy on the host, or its absence."""

    source: str
    copy: Path | None
    meta: Mapping[str, EntryMeta] = field(default_factory=dict)


async def _collect(p: Progress, vm: Vm, task: Task, start: tuple[Change, ...]) -> list[Carried]:
    """Run collect hooks, then keep what the agent changed, its logs and the declared artifacts."""
    if task.collect:
        await vm.thaw()
        await _collect_hooks(p, vm, task)
        await vm.freeze()
    changed = _difference(start, await vm.changes())
    p.record.write("changes.json", canonical_json([c.model_dump() for c in changed]))
    planted = [c.path for c in changed if _is_verdict_place(c) and c.kind != "deleted"]
    if planted:  # noted first: what breaks below must not turn it into a fault of ours
        error = Tampered(
            f"the agent made {planted[0]} where the verdict belongs",
            hint=f"{len(planted)} path(s) there: {', '.join(planted[:5])}",
            cause="planted_verdict",
        )
        p.fail(Outcome.TAMPERED, error)
    limits = TransferLimits(bytes=p.options.max_artifact_bytes)
    await _fetch(p, vm, "/logs/agent", p.record.folder / "agent" / "logs", limits)
    manifest: list[dict[str, Any]] = []
    carried: list[Carried] = []
    for source, destination, exclude in _artifacts(p, task):
        copy = p.record.folder / "artifacts" / destination.lstrip("/")
        got = await _fetch(p, vm, source, copy, limits, exclude)
        carried.append(Carried(source, copy if got else None, got[1] if got else {}))
        manifest.append({"source": source, "destination": destination, "status": "ok" if got else "missing"})
    p.record.write("artifacts/manifest.json", json.dumps(manifest, indent=2).encode())
    return carried


async def _collect_hooks(p: Progress, vm: Vm, task: Task) -> None:
    """Best effort, as in Harbor: a hook that fails is noted."""
    for number, hook in enumerate(task.collect, 1):
        try:
            result = await vm.exec(["/bin/sh", "-c", hook.command], user=hook.user, timeout_s=hook.timeout_s)
        except GuestRefused as error:
            p.record.note(f"collect hook {number} could not be run: {error.message}")
            continue
        p.record.write(f"collect-{number}.txt", result.stdout.data + result.stderr.data)
        if not result.ok:
            p.record.note(f"collect hook {number} ended with status {result.exit_code}")


def _artifacts(p: Progress, task: Task) -> list[tuple[str, str, Callable[[str], bool] | None]]:
    """Declared artifacts and Harbor's convention folder, with where they go and what is left out."""
    listed: list[tuple[str, str, Callable[[str], bool] | None]] = [("/logs/artifacts", "logs/artifacts", None)]
    for artifact in task.artifacts:
        source = artifact.source if artifact.source.startswith("/") else f"{_workdir(p, task)}/{artifact.source}"
        patterns = artifact.exclude
        exclude = _excluder(patterns) if patterns else None
        listed.append((source, artifact.destination or source, exclude))
    return listed


def _excluder(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    import pathspec  # slow to import, and few tasks exclude anything

    return pathspec.GitIgnoreSpec.from_lines(patterns).match_file


async def _fetch(
    p: Progress,
    vm: Vm,
    source: str,
    dest: Path,
    limits: TransferLimits,
    exclude: Callable[[str], bool] | None = None,
) -> tuple[int, Mapping[str, EntryMeta]] | None:
    """Copy out of the guest; None when the source is not there. A transfer that breaks is an error."""
    dest.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        moved = await vm.get(source, dest, exclude=exclude, limits=limits)
    except GuestRefused as error:
        if error.cause == "not_found":
            return None
        raise InfraError(
            f"{source} could not be collected: {error.message}", hint=error.hint, cause="collect_failed"
        ) from error
    if moved.skipped:
        p.record.note(f"{source}: {len(moved.skipped)} path(s) not carried: {', '.join(moved.skipped[:5])}")
    return moved.files, moved.entries


def _difference(before: tuple[Change, ...], after: tuple[Change, ...]) -> list[Change]:
    """Entries of `after` that are new or different, and those that went away."""
    old = {c.path: c for c in before}
    new = {c.path for c in after}
    gone = [c.model_copy(update={"kind": "deleted", "digest": ""}) for c in before if c.path not in new]
    return sorted([c for c in after if old.get(c.path) != c] + gone, key=lambda c: c.path)


def _is_verdict_place(change: Change) -> bool:
    """True for anything at or below /logs/verifier, and for /logs itself turned into something else."""
    place = change.path == "/logs/verifier" or change.path.startswith("/logs/verifier/")
    return place or (change.path == "/logs" and change.kind != "dir")


async def _verify(p: Progress, vm: Vm, task: Task) -> Verdict:
    """Judge in a space that is made now, so that nothing of the agent can have reached it."""
    async with p.in_phase("verify", task.verifier_timeout_s + 60):
        await _open_verifier_space(p, vm, task)
        return await p.context.make_verifier(task).verify(vm, task, p.record)


async def _open_verifier_space(p: Progress, vm: Vm, task: Task) -> None:
    # A verifier image that brings its own tests has them in /tests; they must not be hidden.
    own_tests = p.verifier_class is VerifierClass.SEPARATE and task.verifier_has_own_image
    for path in await vm.open_verifier_space(VERIFIER_FOLDERS[1:] if own_tests else VERIFIER_FOLDERS):
        p.record.note(f"found at the verifier's place and hidden from it: {path}")


async def _verify_shared(p: Progress, vm: Vm, task: Task) -> Verdict:
    """Verify beside the agent's processes, and look afterwards for one that tried to write a verdict.

    Then the tests and what the verifier wrote are taken away; between steps the agent finds nothing of them.
    """
    async with p.in_phase("verify", task.verifier_timeout_s + 60):
        if not p.judged_before:
            await _open_verifier_space(p, vm, task)
            p.judged_before = True
        await vm.thaw()
        verdict = await p.context.make_verifier(task).verify(vm, task, p.record)
        await vm.freeze()
        late = [c.path for c in await vm.changes() if _is_verdict_place(c) and c.kind not in ("dir", "deleted")]
        for folder in VERIFIER_FOLDERS:
            await vm.remove(folder, space="verify")
    if late:
        raise Tampered(f"a process of the agent wrote {late[0]} while the verifier ran", cause="late_verdict")
    return verdict


async def _verify_separately(p: Progress, task: Task, carried: list[Carried]) -> None:
    """A fresh VM on the verifier's image, set up like the agent's, with the declared artifacts put back."""
    assert p.disk is not None
    disk = p.disk
    if task.verifier_has_own_image:
        async with p.in_phase("image", task.verifier_build_timeout_s):
            disk = await _disk(p, task.verifier_image, task.verifier_dockerfile, task.verifier_build_timeout_s)
    writable = p.folder.scratch / "verifier.img"
    async with _vm(p, "verifier", disk, task, writable) as vm:
        async with p.in_phase("setup", setup_limit_s(p.options, task)):
            await _set_up_verifier(p, vm, task)
            for item in carried:
                # Removed first: a file that the agent deleted must not come back from the start context.
                await vm.remove(item.source)
                if item.copy is not None:
                    await vm.put(item.copy, item.source, meta=item.meta)
        p.now.verdict = await _verify(p, vm, task)
    writable.unlink(missing_ok=True)  # the next step's verifier starts from nothing


# --- what happened → outcome → record ------------------------------------------------------------


def _outcome_of(error: Exception, phase: Phase, on_agents_disk: bool) -> Outcome:
    """Where an exception leads. Whatever is not known to be someone else's fault is infra_error.

    A verifier that works on the agent's disk and finds it full has met the agent's work, not a fault of ours.
    """
    match error:
        case Tampered():
            return Outcome.TAMPERED
        case SandboxOom():
            return Outcome.SANDBOX_OOM if phase in ("agent", "collect") else Outcome.INFRA_ERROR
        case DiskFull() if phase in ("agent", "collect"):
            return Outcome.DISK_FULL
        case GuestRefused(cause="disk_full") if on_agents_disk:
            return Outcome.DISK_FULL
        case VerifierError():
            return Outcome.VERIFIER_ERROR
        case ProviderError():
            return Outcome.PROVIDER_ERROR
        case InfraError(cause="verify_timeout"):
            return Outcome.VERIFIER_ERROR
        case GuestRefused() if phase == "verify":
            return Outcome.VERIFIER_ERROR
        case GuestRefused() if phase == "agent":
            return Outcome.AGENT_ERROR
        case _:
            return Outcome.INFRA_ERROR


_UNGRADED = (
    Outcome.CANCELLED,
    Outcome.INFRA_ERROR,
    Outcome.PROVIDER_ERROR,
    Outcome.VERIFIER_ERROR,
)


def decide(
    verdict: Verdict | None, failures: list[tuple[Outcome, Cause]]
) -> tuple[Outcome, Cause | None, tuple[Cause, ...]]:
    """The one outcome of a rollout, the cause that decided it, and the other causes in order of time.

    Tampering outweighs everything. Then a fault that is not the agent's: without a trustworthy verdict
    nothing is graded. Else the first of the agent's own faults; else the verdict.
    """
    ranked = sorted(failures, key=lambda f: 0 if f[0] is Outcome.TAMPERED else 1 if f[0] in _UNGRADED else 2)
    if ranked:
        outcome, cause = ranked[0]
        return outcome, cause, tuple(c for _, c in failures if c is not cause)
    if verdict is None:
        cause = Cause(kind="no_verdict", message="the rollout ended without a verdict", phase="verify")
        return Outcome.VERIFIER_ERROR, cause, ()
    return (Outcome.PASSED if verdict.passed else Outcome.FAILED), None, ()


def _cause(error: BaseException, phase: str) -> Cause:
    if isinstance(error, DayflyError):
        return Cause(kind=error.cause, message=error.message, hint=error.hint, phase=phase)
    return Cause(
        kind="unknown",
        message=f"{type(error).__name__}: {error}",
        hint="this is a fault in dayfly or in a plug-in; please report it with this rollout's folder",
        phase=phase,
    )


async def _publish(p: Progress) -> RolloutRecord:
    """Seal the evidence and make the folder durable under its final name."""
    verdict = _final_verdict(p)
    outcome, cause, further = decide(verdict, p.failures)
    trusted = verdict if outcome is not Outcome.TAMPERED and outcome not in _UNGRADED else None
    keep = p.options.keep_disk
    if keep == "always" or (keep == "failed" and outcome is not Outcome.PASSED):
        p.folder.keep_disk()
    key = p.spec.key
    record = RolloutRecord(
        rollout_id=p.spec.rollout_id,
        job_id=p.spec.job_id,
        task=key.task,
        task_digest=key.task_digest,
        agent=key.agent,
        agent_digest=key.agent_digest,
        attempt=key.attempt,
        retry=p.spec.retry,
        outcome=outcome,
        reward=trusted.reward if trusted else None,
        rewards=trusted.rewards if trusted else {},
        verdict=trusted,
        cause=cause,
        further_causes=further,
        isolation=p.context.hypervisor.isolation,
        verifier_class=_weakest_class(p),
        start_fingerprint=p.fingerprint,
        started_unix=p.started_unix,
        finished_unix=time.time(),
        phases=tuple(p.phases),
        steps=tuple(_step_results(p)),
        usage=_usage(p),
        machine=p.spec.machine,
        vms=tuple(p.vms),
        seed=p.spec.seed,
        dayfly_version=dayfly.__version__,
        image_digest=p.disk.image_digest if p.disk else "",
        disk_digest=p.disk.digest if p.disk else "",
    )
    return await anyio.to_thread.run_sync(p.context.job.publish_rollout, record, p.folder)


def _final_verdict(p: Progress) -> Verdict | None:
    """The only step's, or what the task's strategy makes of the steps'."""
    if p.task is None or not p.task.steps:
        return p.now.verdict if p.steps else None
    try:
        return combine(p.task, [s.verdict for s in p.steps], p.stopped)
    except VerifierError as error:
        p.fail(Outcome.VERIFIER_ERROR, error)
        return None


def _weakest_class(p: Progress) -> VerifierClass:
    """The record's class: the weakest of the steps that were begun, or what was to be."""
    planned = p.options.verifier_class or (p.task.verifier_class if p.task else VerifierClass.SHARED)
    return min((s.verifier_class for s in p.steps), key=VERIFIER_CLASS_ORDER.index, default=planned)


def _step_results(p: Progress) -> Iterator[StepResult]:
    ends = [*(s.failures_before for s in p.steps), len(p.failures)][1:]
    for step, end in zip(p.steps, ends, strict=False):
        if step.task.step is not None:
            result = step.agent_result or AgentResult(exit_code=None)
            yield StepResult(
                name=step.task.step,
                verdict=step.verdict,
                verifier_class=step.verifier_class,
                causes=tuple(cause for _, cause in p.failures[step.failures_before : end]),
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                started_unix=step.started_unix,
                finished_unix=step.finished_unix,
            )


def _usage(p: Progress) -> Usage:
    """Over all steps; what an agent did not say of one step is not known of the whole."""
    results = [s.agent_result for s in p.steps if s.agent_result is not None]

    def total(name: str) -> Any:
        values = [getattr(r, name) for r in results]
        return None if not values or None in values else sum(values)

    return Usage(
        memory_peak_bytes=p.stats.memory_peak_bytes if p.stats else None,
        disk_used_bytes=p.stats.disk_used_bytes if p.stats else None,
        tokens_in=total("tokens_in"),
        tokens_out=total("tokens_out"),
        cost_usd=total("cost_usd"),
    )
