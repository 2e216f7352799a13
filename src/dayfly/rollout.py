"""One rollout, from task to sealed record.

`carry_out` is the line that the whole project is about; read it first. `run_rollout` around it turns
whatever happens into exactly one outcome and one durable folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
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
    GuestRefused,
    ImageError,
    InfraError,
    ProviderError,
    SandboxOom,
    Tampered,
    VerifierError,
)
from dayfly.evidence import JobFolder, RolloutFolder, canonical_json, fingerprint, sha256_bytes
from dayfly.model import (
    Cause,
    Change,
    Disk,
    EntryMeta,
    Fingerprint,
    GuestStats,
    Machine,
    Options,
    Outcome,
    PhaseTime,
    RolloutRecord,
    RolloutSpec,
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
    StartOptions,
    TransferLimits,
    Verifier,
    Vm,
)
from dayfly.tasks import select

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
class Progress:
    """What is known of a rollout while it goes on."""

    spec: RolloutSpec
    context: Context
    record: RolloutFolder
    started_unix: float = field(default_factory=time.time)
    task: Task | None = None
    verifier_class: VerifierClass = VerifierClass.SHARED
    disk: Disk | None = None
    phase: Phase = "image"
    phases: list[PhaseTime] = field(default_factory=list)
    vms: list[VmInfo] = field(default_factory=list)
    fingerprint: Fingerprint | None = None
    agent_result: AgentResult | None = None
    stats: GuestStats | None = None
    verdict: Verdict | None = None
    failures: list[tuple[Outcome, Cause]] = field(default_factory=list)

    @property
    def options(self) -> Options:
        return self.spec.options

    @property
    def tampered(self) -> bool:
        return any(outcome is Outcome.TAMPERED for outcome, _ in self.failures)

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
                PhaseTime(name=name, started_unix=started, seconds=round(time.monotonic() - clock, 4))
            )

    def fail(self, outcome: Outcome, error: BaseException) -> None:
        self.failures.append((outcome, _cause(error, self.phase)))


async def run_rollout(spec: RolloutSpec, context: Context) -> RolloutRecord:
    """Do one rollout; returns its record once the folder is durable.

    A cancelled rollout is recorded, too, with what was seen until then; the cancellation goes on. Raises
    `HostError` when the record itself cannot be kept (a full disk): the evidence then waits for `recover`.
    """
    with context.job.rollout(spec.rollout_id, max_bytes=spec.options.max_output_bytes) as record:
        progress = Progress(spec, context, record)
        try:
            await carry_out(progress)
        except Exception as error:
            full_disk_is_the_agents = progress.agent_result is not None and (
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
    """The path of one rollout: load, image, VM, set-up, agent, collection, verifier."""
    p.task = task = p.context.load_task(p.spec.task_path)
    if task.digest != p.spec.key.task_digest:
        raise InfraError(
            f"task {task.name} has changed since the job was planned",
            hint="do not edit tasks during a job; `dayfly run --resume --accept-changes` runs it anew",
            cause="task_changed",
        )
    p.verifier_class = p.options.verifier_class or task.verifier_class
    async with p.in_phase("image", task.build_timeout_s):
        p.disk = await _disk(p, task.image, task.dockerfile)
    writable = p.record.scratch / "disk.img"
    async with _vm(p, "agent", p.disk, task.machine, writable) as vm:
        async with p.in_phase("setup", p.options.setup_timeout_s):
            await set_up(p, vm, task)
            start = await _take_fingerprint(p, vm, task)
        p.agent_result = await _let_agent_work(p, vm, task)
        async with p.in_phase("collect", p.options.collect_timeout_s):
            carried = await _collect(p, vm, task, start)
        if p.tampered:
            return
        if p.verifier_class is VerifierClass.SHARED:
            await _verify_shared(p, vm, task)
        else:
            await vm.stop()
    if p.verifier_class is VerifierClass.REBOOTED:
        async with _vm(p, "verifier", p.disk, task.machine, writable) as vm:
            p.verdict = await _verify(p, vm, task)
    elif p.verifier_class is VerifierClass.SEPARATE:
        await _verify_separately(p, task, carried)


async def _disk(p: Progress, image: str | None, dockerfile: Path | None = None) -> Disk:
    """Of the image that has a name, or else of the one that the Dockerfile describes."""
    if image is not None:
        return await p.context.make_disk(image)
    assert p.task is not None and dockerfile is not None
    if p.context.build_disk is None:
        raise ImageError("no builder was given for this rollout", hint="name an image as docker_image")
    return await p.context.build_disk(dockerfile, p.task.build_timeout_s)


@asynccontextmanager
async def _vm(p: Progress, role: str, disk: Disk, machine: Machine, writable: Path) -> AsyncIterator[Vm]:
    """A fresh VM for `role`; its start is the phase boot, its end the phase teardown."""
    assert p.task is not None
    options = StartOptions(
        vm_id=f"{p.spec.rollout_id}-{role[0]}",
        writable=writable,
        env=p.context.resolve_env(p.task.env),
        workdir=p.task.workdir,
        lifetime_s=vm_lifetime_s(p.options, p.task),
        boot_timeout_s=p.options.boot_timeout_s,
        console=p.record.folder / ("console.log" if role == "agent" else "verifier-console.log"),
    )
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


def vm_lifetime_s(options: Options, task: Task) -> float:
    """The hard limit of a VM's life: the sum of what its phases may take, and a margin."""
    return (
        options.boot_timeout_s
        + options.setup_timeout_s
        + agent_limit_s(options, task)
        + AGENT_STOP_GRACE_S
        + options.collect_timeout_s
        + task.verifier_timeout_s
        + options.teardown_timeout_s
        + 120
    )


def agent_limit_s(options: Options, task: Task) -> float:
    """The agent's time in seconds: the job's override, else the task's, else the job's stated default."""
    return options.agent_timeout_s or task.agent_timeout_s or options.default_agent_timeout_s


async def set_up(p: Progress, vm: Vm, task: Task) -> None:
    """Bring what Harbor promises into a fresh VM: log folders, environment files, the health check."""
    with tempfile.TemporaryDirectory(dir=p.record.scratch) as made:
        for name in ("agent", "artifacts"):
            (Path(made) / name).mkdir()
            (Path(made) / name).chmod(0o777)
        Path(made).chmod(0o755)
        await vm.put(Path(made), "/logs")
    if task.environment_files is not None:
        files = await anyio.to_thread.run_sync(select, task.environment_files)
        await vm.put(files.source, _workdir(p, task), exclude=_not_for_the_vm, meta=files.meta)
    if task.healthcheck is not None:
        await _healthcheck(p, vm, task)


def _workdir(p: Progress, task: Task) -> str:
    assert p.disk is not None
    return task.workdir or p.disk.config.workdir or "/"


def _not_for_the_vm(name: str) -> bool:
    return name in ("Dockerfile", "docker-compose.yaml", ".dockerignore")


async def _healthcheck(p: Progress, vm: Vm, task: Task) -> None:
    """Docker's rule: failures within the start period do not count; then `retries` in a row are fatal."""
    check = task.healthcheck
    assert check is not None
    begun, failures = time.monotonic(), 0
    while True:
        result = await vm.exec(["/bin/sh", "-c", check.command], user="root", timeout_s=check.timeout_s)
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


async def _take_fingerprint(p: Progress, vm: Vm, task: Task) -> tuple[Change, ...]:
    """Record the context that the agent starts from (invariant 5); returns the state of the writable layer."""
    assert p.disk is not None
    start = await vm.changes()
    listed = [c.model_dump() for c in start]
    p.record.write("start-files.json", canonical_json(listed))
    environment = {k: sha256_bytes(v.encode()) for k, v in sorted(p.context.resolve_env(task.env).items())}
    p.fingerprint = fingerprint(
        {
            "disk": p.disk.digest,
            "template": vm.info.template,
            "machine": task.machine.model_dump(),
            "environment": environment,
            "workdir": _workdir(p, task),
            "user": task.agent_user or p.disk.config.user,
            "instruction": sha256_bytes(task.instruction.encode()),
            "files": sha256_bytes(canonical_json(listed)),
        }
    )
    return start


async def _let_agent_work(p: Progress, vm: Vm, task: Task) -> AgentResult:
    """The agent phase. Its failures are kept and the verifier still runs, unless the VM is lost."""
    limit_s = agent_limit_s(p.options, task)
    result = AgentResult(exit_code=None)
    try:
        async with p.in_phase("agent", limit_s + AGENT_STOP_GRACE_S):
            with anyio.move_on_after(limit_s + AGENT_STOP_GRACE_S / 2) as overrun:
                result = await p.context.make_agent(p.spec).run(vm, task, p.record, limit_s)
            if overrun.cancel_called:  # also when it went on all the same, and then returned
                result = replace(result, timed_out=True, message="did not stop at its limit")
    except AgentError as error:
        p.fail(Outcome.AGENT_ERROR, error)
    await vm.freeze()
    p.stats = await vm.stats()
    if result.timed_out:
        p.fail(Outcome.AGENT_TIMEOUT, DayflyError(f"the agent used up its {limit_s:g} s", cause="timeout"))
    if result.oom_killed or p.stats.oom_kills:
        p.fail(
            Outcome.SANDBOX_OOM,
            SandboxOom(
                f"the kernel killed {max(1, p.stats.oom_kills)} process(es) at the memory limit, "
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
    if result.exit_code not in (0, None) and not p.failures:
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
        result = await vm.exec(["/bin/sh", "-c", hook.command], user=hook.user, timeout_s=hook.timeout_s)
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
    own_tests = task.tests is None and task.verifier_image is not None
    for path in await vm.open_verifier_space(VERIFIER_FOLDERS[1:] if own_tests else VERIFIER_FOLDERS):
        p.record.note(f"found at the verifier's place and hidden from it: {path}")


async def _verify_shared(p: Progress, vm: Vm, task: Task) -> None:
    """Verify beside the agent's processes, and look afterwards for one that tried to write a verdict."""
    async with p.in_phase("verify", task.verifier_timeout_s + 60):
        await _open_verifier_space(p, vm, task)
        await vm.thaw()
        verdict = await p.context.make_verifier(task).verify(vm, task, p.record)
        await vm.freeze()
        late = [c.path for c in await vm.changes() if _is_verdict_place(c) and c.kind not in ("dir", "deleted")]
    if late:
        raise Tampered(f"a process of the agent wrote {late[0]} while the verifier ran", cause="late_verdict")
    p.verdict = verdict
    await vm.stop()


async def _verify_separately(p: Progress, task: Task, carried: list[Carried]) -> None:
    """A fresh VM on the verifier's image, set up like the agent's, with the declared artifacts put back."""
    assert p.disk is not None
    disk = p.disk if task.verifier_image is None else await _disk(p, task.verifier_image)
    machine = task.verifier_machine or task.machine
    async with _vm(p, "verifier", disk, machine, p.record.scratch / "verifier.img") as vm:
        async with p.in_phase("setup", p.options.setup_timeout_s):
            await set_up(p, vm, task)
            for item in carried:
                # Removed first: a file that the agent deleted must not come back from the start context.
                await vm.remove(item.source)
                if item.copy is not None:
                    await vm.put(item.copy, item.source, meta=item.meta)
        p.verdict = await _verify(p, vm, task)


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
    outcome, cause, further = decide(p.verdict, p.failures)
    trusted = p.verdict if outcome is not Outcome.TAMPERED and outcome not in _UNGRADED else None
    keep = p.options.keep_disk
    if keep == "always" or (keep == "failed" and outcome is not Outcome.PASSED):
        p.record.keep_disk()
    key = p.spec.key
    result = p.agent_result or AgentResult()
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
        verifier_class=p.verifier_class,
        start_fingerprint=p.fingerprint,
        started_unix=p.started_unix,
        finished_unix=time.time(),
        phases=tuple(p.phases),
        usage=Usage(
            memory_peak_bytes=p.stats.memory_peak_bytes if p.stats else None,
            disk_used_bytes=p.stats.disk_used_bytes if p.stats else None,
            tokens_in=result.tokens_in,
            tokens_out=result.tokens_out,
            cost_usd=result.cost_usd,
        ),
        machine=p.spec.machine,
        vms=tuple(p.vms),
        seed=p.spec.seed,
        dayfly_version=dayfly.__version__,
        image_digest=p.disk.image_digest if p.disk else "",
        disk_digest=p.disk.digest if p.disk else "",
    )
    return await anyio.to_thread.run_sync(p.context.job.publish_rollout, record, p.record)
