"""`dayfly run`: do the rollouts of a job file, or of tasks and agents named on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dayfly.cli.budgets import budgets, short_duration, shown
from dayfly.cli.common import DEFAULT_JOBS_DIR, ForceBuild, JobsDir, Json, Pull, command_line
from dayfly.cli.display import default_display, displayed
from dayfly.cli.interrupts import Interrupted, run_interruptible
from dayfly.cli.output import put, put_json, put_json_line, put_table, say
from dayfly.cli.show import put_summary
from dayfly.errors import ConfigError
from dayfly.evidence import find_job
from dayfly.job import (
    JobFile,
    JobResult,
    Plan,
    choose_tasks,
    load_job_file,
    parse_duration,
    parse_job,
    plan_new,
    plan_resume,
    refuse_drift,
    run_job,
    watch_with_gate,
)
from dayfly.model import RETRYABLE, RolloutRecord, VerifierClass
from dayfly.report import summarise

if TYPE_CHECKING:
    from dayfly.gate.planning import Prospect


class DisplayChoice(StrEnum):
    FULL = "full"
    PLAIN = "plain"
    JSON = "json"
    NONE = "none"


class KeepDisk(StrEnum):
    NEVER = "never"
    FAILED = "failed"
    ALWAYS = "always"


class Accelerator(StrEnum):
    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


class IsolationFloor(StrEnum):
    KVM = "kvm"
    TCG = "tcg"
    FAKE = "fake"


def register(app: typer.Typer) -> None:
    app.command()(run)


def _duration(text: str) -> float:
    seconds = parse_duration(text if text.strip()[-1:].isalpha() else f"{text}s")
    if not isinstance(seconds, float) or seconds <= 0:
        raise typer.BadParameter(f"{text!r} is not a duration; write it like 90s, 15m or 1.5h")
    return seconds


def run(
    what: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB.yaml | TASKS...]", help="A job file, or task folders.")
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            "--agent", "-a", help="Agent name; may be repeated. With a job file: only these of its agents."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", "-t", metavar="PATTERN", help="Only tasks whose name is like this; may be repeated."
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", "-d", metavar="NAME[@VERSION]", help="A data set of the registry; can be repeated."
        ),
    ] = None,
    registry_path: Annotated[
        Path | None, typer.Option("--registry-path", help="The registry.json that --dataset is in.")
    ] = None,
    attempts: Annotated[
        int | None, typer.Option("--attempts", "-k", min=1, max=1000, help="Rollouts per task and agent.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, max=10_000, help="How many rollouts at once."),
    ] = None,
    verifier_class: Annotated[VerifierClass | None, typer.Option(help="Use this class for all tasks.")] = None,
    agent_timeout: Annotated[
        float | None,
        typer.Option(
            parser=_duration, metavar="DURATION", help="Overrides each task's agent limit, like 90s or 15m."
        ),
    ] = None,
    keep_disk: Annotated[KeepDisk | None, typer.Option(help="Which final disks to keep, for `shell`.")] = None,
    hypervisor: Annotated[
        str | None, typer.Option(envvar="DAYFLY_HYPERVISOR", help="qemu, or fake (no isolation, for trials).")
    ] = None,
    accelerator: Annotated[Accelerator | None, typer.Option(help="How VMs are run.")] = None,
    require_isolation: Annotated[
        IsolationFloor | None, typer.Option(help="Refuse to run with less isolation than this.")
    ] = None,
    pull: Annotated[Pull | None, typer.Option(help="When to ask a registry for an image.")] = None,
    fork: Annotated[bool | None, typer.Option(help="Fork VMs from a template, or boot each one.")] = None,
    force_build: ForceBuild = None,
    gate: Annotated[
        Path | None,
        typer.Option(
            "--gate",
            metavar="POLICY.yaml",
            help="Stop as soon as this policy would block the agent, or nothing can decide any more.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="JOB[:AGENT] | @NAME", help="With --gate: what to compare with."),
    ] = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="With --resume: go on to the end, whatever the job's gate would say.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Go on with this job: id, its beginning, `last`, or its folder."),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="With --resume: changed tasks or settings are meant.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its budgets; run nothing.")
    ] = False,
    display: Annotated[
        DisplayChoice | None, typer.Option(help="Progress: redrawn, as lines, as JSON lines on stdout, or none.")
    ] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Run every task with every agent, each rollout in its own VM. Exit 0 when all of them are graded."""
    if json and display is DisplayChoice.JSON:
        raise ConfigError(
            "--json and --display json both want standard output",
            hint="--json prints one document at the end; --display json a line for each event and the result",
        )
    changes: dict[str, Any] = {
        "attempts": attempts,
        "concurrency": concurrency,
        "verifier_class": verifier_class,
        "agent_timeout": agent_timeout,
        "keep_disk": keep_disk,
        "hypervisor": hypervisor,
        "accelerator": accelerator,
        "require_isolation": require_isolation,
        "pull": pull,
        "fork": fork,
        "force_build": force_build,
    }
    changes = {k: v for k, v in changes.items() if v is not None}
    what = [*(what or []), *_datasets(dataset or [], registry_path)]
    plan = _plan(what, agent or [], task or [], changes, resume, jobs_dir)
    chosen_gate = _gate(gate, baseline, no_gate, resume)
    prospect = _let_gate_watch(plan, chosen_gate, no_gate, resume)
    if dry_run and json:
        put_json(_plan_answer(plan, resume))
    elif dry_run or resume or display is not DisplayChoice.NONE:
        _say_plan(plan, resume)
    if prospect is not None:
        _say_prospect(prospect)
    refuse_drift(plan, accept_changes)
    if dry_run:
        if not json:
            _put_budgets(plan)
        return
    form = _Form(display or DisplayChoice(default_display()), json)
    result = _do(plan, form, chosen_gate)
    _finish(plan, result, form, chosen_gate)
    raise typer.Exit(result.exit_code)


@dataclass(frozen=True)
class _Form:
    """How the job is shown while it runs and at its end."""

    display: DisplayChoice
    as_json: bool


def _do(plan: Plan, form: _Form, gate: _Gate | None) -> JobResult:
    try:
        with displayed(form.display.value) as observers:
            return run_interruptible(lambda: run_job(plan, observers=observers))
    except (Interrupted, KeyboardInterrupt):
        if (plan.jobs_dir / plan.job_id / "job.json").exists():
            say(f"interrupted; go on with:  {_resume_command(plan, gate)}")
        else:
            say("interrupted before the job began; nothing was run, and nothing is left to go on with")
        raise


def _resume_command(plan: Plan, gate: _Gate | None) -> str:
    watched = ["--gate", str(gate.policy), "--baseline", gate.baseline] if gate is not None else []
    return command_line("run", "--resume", plan.job_id, *watched, jobs_dir=plan.jobs_dir)


# --- the plan ------------------------------------------------------------------------------------


def _datasets(names: list[str], registry: Path | None) -> list[str]:
    """As the tasks that they are: `registry.json#NAME@VERSION`."""
    if registry is None and names:
        raise ConfigError(
            f"--dataset {names[0]!r} needs the registry that it is in",
            hint="--registry-path FILE, or write FILE#NAME@VERSION",
        )
    if registry is None:
        return []
    return [f"{registry}#{name}" for name in names] or [str(registry)]


@dataclass(frozen=True)
class _Gate:
    """As named on the command line."""

    policy: Path
    baseline: str


def _gate(policy: Path | None, baseline: str | None, no_gate: bool, resume: str | None) -> _Gate | None:
    if no_gate and (policy is not None or resume is None):
        raise ConfigError("--no-gate is for --resume of a job with a gate, instead of --gate")
    if policy is not None and baseline is not None:
        return _Gate(policy, baseline)
    if policy is not None or baseline is not None:
        raise ConfigError(
            "--gate and --baseline belong together",
            hint="--gate POLICY.yaml --baseline JOB; `dayfly gate` decides on jobs that are done",
        )
    return None


def _let_gate_watch(plan: Plan, gate: _Gate | None, no_gate: bool, resume: str | None) -> Prospect | None:
    """What the job can show, if a gate looks on. One that began with a gate does not go on unnoticed without."""
    if gate is None:
        if plan.early_stop is not None and not no_gate:
            settled = plan.early_stop
            raise ConfigError(
                f"job {plan.job_id} was started with the gate {settled.policy_name!r}",
                hint="name it again: --gate POLICY.yaml --baseline "
                f"{settled.baseline.job}:{settled.baseline.agent}; or --no-gate to go on without looking",
            )
        return None
    if resume is not None and plan.early_stop is None:
        raise ConfigError(
            f"job {plan.job_id} was started without a gate, and cannot be given one now",
            hint="how the error is shared between looking early and the last test is settled at the start",
        )
    from dayfly.gate.load import load_policy
    from dayfly.gate.planning import prospect_of_gate
    from dayfly.results import load_side

    loaded = load_policy(gate.policy)
    base = load_side(plan.jobs_dir, gate.baseline)
    watch_with_gate(plan, loaded, base)
    assert plan.watch is not None
    return prospect_of_gate(loaded.policy, base, plan.watch.order, plan.job_file.attempts)


def _say_prospect(seen: Prospect) -> None:
    """What the job can show at all, before it costs anything."""
    figures = seen.watched or seen.at_end
    drop = "no drop" if figures.smallest_drop is None else f"a drop of {100 * figures.smallest_drop:.1f} points"
    say(f"  gate: {_count(seen.tasks, 'comparable task')}; {drop} is found with a chance of 80 %")
    for warning in seen.warnings:
        say(f"  warning: {warning}")
    if seen.warnings:
        say("  (`dayfly plan` says what it would take)")


def _plan(
    what: list[str],
    agents: list[str],
    tasks: list[str],
    changes: dict[str, Any],
    resume: str | None,
    jobs_dir: Path,
) -> Plan:
    files = [w for w in what if w.endswith((".yaml", ".yml"))]
    if files and len(what) > 1:
        raise ConfigError("a job file stands alone", hint="name its tasks inside it, or name only folders here")
    if resume is not None:
        return _plan_to_resume(what, files, agents, tasks, changes, resume, jobs_dir)
    if files:
        path = Path(files[0])
        return plan_new(
            _chosen(_changed(load_job_file(path), agents, changes), path.parent, tasks), path.parent, jobs_dir
        )
    if not what:
        raise ConfigError(
            "nothing to run",
            hint="name a job file or task folders, or --resume a job; `dayfly init` makes a first one",
        )
    name = Path(what[0]).resolve().name
    job = parse_job({"name": name, "tasks": what, "agents": agents or ["oracle"]}, "command line")
    return plan_new(_chosen(_changed(job, [], changes), Path.cwd(), tasks), Path.cwd(), jobs_dir)


def _chosen(job: JobFile, base_dir: Path, tasks: list[str]) -> JobFile:
    return choose_tasks(job, base_dir, tasks) if tasks else job


def _plan_to_resume(
    what: list[str],
    files: list[str],
    agents: list[str],
    tasks: list[str],
    changes: dict[str, Any],
    resume: str,
    jobs_dir: Path,
) -> Plan:
    if what and not files:
        raise ConfigError(
            f"--resume goes by the job's own tasks, so {what[0]!r} has no place here",
            hint="leave it out, or name a changed job file (*.yaml)",
        )
    if tasks:
        raise ConfigError("--resume goes by the job's own tasks, so --task has no place here", hint="leave it out")
    folder = find_job(jobs_dir, resume)
    if files:
        job, base_dir = load_job_file(Path(files[0])), Path(files[0]).parent
    else:
        job, base_dir = parse_job(folder.job()["job"], folder.job_id), None
    return plan_resume(folder.job_id, folder.path.parent, _changed(job, agents, changes), base_dir)


def _changed(job: JobFile, agents: list[str], changes: dict[str, Any]) -> JobFile:
    """The job file with what the command line says instead; agents named there choose among the file's."""
    if agents:
        known = {a.name: a for a in job.agents}
        changes = changes | {"agents": [known[a].model_dump() if a in known else a for a in agents]}
    return parse_job(job.model_dump(mode="json") | changes, "command line")


def _say_plan(plan: Plan, resume: str | None) -> None:
    name = f"job {plan.job_id}" if resume else f"job {plan.job_file.name!r}"
    say(
        f"{name}: {_count(len(plan.tasks), 'task')} × {_count(len(plan.agents), 'agent')} × "
        f"{_count(plan.job_file.attempts, 'attempt')} = {_count(plan.planned, 'rollout')}"
    )
    if resume:
        say(
            f"  {len(plan.done)} done, {len(plan.to_retry)} to retry, {len(plan.new)} new, "
            f"{len(plan.drifted)} changed"
        )
    for line in plan.drifted:
        say(f"  changed: {line}")
    options = plan.job_file.options()
    unlimited = [t.name for t in plan.tasks if t.agent_timeout_s is None and options.agent_timeout_s is None]
    if unlimited:
        say(
            f"  {_count(len(unlimited), 'task')} without an agent limit of its own: "
            f"{short_duration(options.default_agent_timeout_s)} hold (--agent-timeout changes it)"
        )
    for task in plan.tasks:
        for warning in task.warnings:
            say(f"  {task.name}: {warning}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _put_budgets(plan: Plan) -> None:
    """What each phase of each task may take; a phase's own clean-up is after the plus sign."""
    options = plan.job_file.options()
    table = [(t.name, *(shown(b) for b in budgets(options, t).values())) for t in plan.tasks]
    header = ("task", *budgets(options, plan.tasks[0]))
    put_table(header, table, wrap="task")
    starts = 1 + options.retries
    fewer = [f"{o.value} {1 + min(n, options.retries)}" for o, n in RETRYABLE.items() if n < options.retries]
    put(f"starts of an attempt at most: {starts}" + (f" (after {', '.join(fewer)})" if fewer else ""))
    put(f"rollouts at once: {plan.job_file.concurrency or 'as many as this host has CPUs and memory for'}")


def _plan_answer(plan: Plan, resume: str | None) -> dict[str, Any]:
    options = plan.job_file.options()
    return {
        "schema_version": 1,
        "id": plan.job_id if resume else None,
        "job": plan.job_file.model_dump(mode="json"),
        "planned": plan.planned,
        "done": len(plan.done),
        "to_retry": len(plan.to_retry),
        "new": len(plan.new),
        "changed": plan.drifted,
        "budgets": {t.name: {phase: vars(b) for phase, b in budgets(options, t).items()} for t in plan.tasks},
        "starts_at_most": 1 + options.retries,
    }


# --- the end -------------------------------------------------------------------------------------


def _finish(plan: Plan, result: JobResult, form: _Form, gate: _Gate | None) -> None:
    summary = summarise(plan.planned_by_agent, result.records)
    if form.as_json or form.display is DisplayChoice.JSON:
        answer = {
            "schema_version": 1,
            "id": result.job_id,
            "interrupted": result.interrupted,
            "stopped": result.stopped or None,
            "gate": result.gate.model_dump(mode="json") if result.gate is not None else None,
            "seconds": round(result.seconds, 3),
            "summary": summary.model_dump(mode="json"),
        }
        if form.as_json:
            put_json(answer)
        else:
            put_json_line({"event": "result", **answer})
        if result.interrupted:
            say(f"interrupted; go on with:  {_resume_command(plan, gate)}")
        return
    put_summary(summary)
    if "tcg" in summary.isolation:
        put("(emulated: QEMU gives no security promise under TCG; see docs/security.md)")
    put()
    put(f"job {result.job_id} took {result.seconds:.0f} s")
    if result.interrupted:
        put(f"interrupted; go on with:  {_resume_command(plan, gate)}")
        return
    if result.gate is not None and gate is not None:
        _put_gate_stop(plan, result, gate)
        return
    if result.stopped:
        put(f"stopped: {result.stopped}; a base image, a mirror or the host may be at fault: see an oracle's logs")
        put("(stop_after_oracle_failures in the job file says after how many; 0: never)")
    missing = result.planned - sum(r.graded for r in result.records)
    if missing:
        again = _resume_command(plan, gate)
        put(f"{missing} of {_count(result.planned, 'rollout')} without a verdict; again:  {again}")
    put("next:")
    for line in _next_commands(plan, result.records):
        put(f"  {line}")


def _put_gate_stop(plan: Plan, result: JobResult, gate: _Gate) -> None:
    done = sum(r.graded for r in result.records)
    early = "stopped early, " if done < result.planned else ""
    put(f"{early}after {done} of {_count(result.planned, 'rollout')}: {result.stopped}")
    if result.exit_code == 3:
        put("(it would take more tasks or attempts; `dayfly plan` says how many)")
    put("next:")
    words = ("gate", "--baseline", gate.baseline, "--candidate", plan.job_id, "--policy", str(gate.policy))
    put(f"  {command_line(*words, jobs_dir=plan.jobs_dir)}")


def _next_commands(plan: Plan, records: list[RolloutRecord]) -> Iterator[str]:
    """What to look at: the job, and the most telling rollout that did not pass."""

    def command(*words: str) -> str:
        return command_line(*words, jobs_dir=plan.jobs_dir)

    yield command("show", plan.job_id)
    telling = next((r for r in sorted(records, key=_rank) if r.outcome.value != "passed"), None)
    if telling is None:
        yield command("show", plan.job_id, "--verify")
        yield command("list")
        return
    name = f"{plan.job_id}/{telling.task}/{telling.agent}/{telling.attempt}"
    yield command("logs", name)
    if telling.isolation != "fake" and plan.job_file.keep_disk != "never":
        yield command("shell", name)
    else:
        yield command("show", name)


def _rank(record: RolloutRecord) -> tuple[bool, bool]:
    """Doing nothing fails as it should, and left no output; a missing verdict says more than a failure."""
    return record.agent == "no-op", record.graded
