"""`dayfly run`: do the rollouts of a job file, or of tasks and agents named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json, find_job, put_json, say
from dayfly.cli.display import Display, default_display, displayed
from dayfly.errors import ConfigError
from dayfly.job import (
    JobFile,
    JobResult,
    Plan,
    load_job_file,
    parse_job,
    plan_new,
    plan_resume,
    refuse_drift,
    run_job,
)
from dayfly.model import VerifierClass
from dayfly.report import render_text, summarise


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    what: Annotated[list[str] | None, typer.Argument(help="A job file (*.yaml), or task folders.")] = None,
    agent: Annotated[list[str] | None, typer.Option("--agent", "-a", help="Agent name; may be repeated.")] = None,
    attempts: Annotated[int | None, typer.Option("--attempts", "-k", min=1)] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="How many rollouts at once.")
    ] = None,
    verifier_class: Annotated[VerifierClass | None, typer.Option(help="Use this class for all tasks.")] = None,
    agent_timeout: Annotated[
        str | None, typer.Option(help="Overrides each task's agent limit, like 90s or 15m.")
    ] = None,
    keep_disk: Annotated[str | None, typer.Option(help="Final disks to keep: never, failed or always.")] = None,
    hypervisor: Annotated[
        str | None, typer.Option(envvar="DAYFLY_HYPERVISOR", help="qemu, or fake (no isolation, for trials).")
    ] = None,
    accelerator: Annotated[str | None, typer.Option(help="auto, kvm or tcg.")] = None,
    require_isolation: Annotated[str | None, typer.Option(help="Refuse to run below this: kvm or tcg.")] = None,
    fork: Annotated[bool | None, typer.Option(help="Fork VMs from a template, or boot each one.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this job (id, its beginning, or `last`).")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="With --resume: changed tasks or settings are meant.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its budgets; run nothing.")
    ] = False,
    display: Annotated[str | None, typer.Option(help="full, plain, json or none.")] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    as_json: Json = False,
) -> None:
    """Run every task with every agent, each rollout in its own VM. Exit 0 when all of them are graded."""
    changes: dict[str, Any] = {
        "attempts": attempts,
        "concurrency": concurrency,
        "verifier_class": verifier_class,
        "agent_timeout": agent_timeout,
        "keep_disk": keep_disk,
        "hypervisor": hypervisor,
        "accelerator": accelerator,
        "require_isolation": require_isolation,
        "fork": fork,
    }
    changes = {k: v for k, v in changes.items() if v is not None}
    plan = _plan(what or [], agent or [], changes, resume, accept_changes, jobs_dir)
    _print_plan(plan)
    if dry_run:
        return
    shown = _display(display)
    with displayed(shown) as observers:
        result = anyio.run(lambda: run_job(plan, observers=observers))
    _finish(plan, result, jobs_dir, as_json or shown == "json")
    raise typer.Exit(result.exit_code)


def _display(wanted: str | None) -> Display:
    match wanted:
        case None:
            return default_display()
        case "full" | "plain" | "json" | "none":
            return wanted
        case _:
            raise ConfigError(f"--display {wanted!r} is not known", hint="one of: full, plain, json, none")


def _plan(
    what: list[str],
    agents: list[str],
    changes: dict[str, Any],
    resume: str | None,
    accept_changes: bool,
    jobs_dir: Path,
) -> Plan:
    files = [w for w in what if w.endswith((".yaml", ".yml"))]
    if resume is not None:
        folder = find_job(jobs_dir, resume)
        job = load_job_file(Path(files[0])) if files else parse_job(folder.job()["job"], folder.job_id)
        changed = _changed(job, agents, changes)
        plan = plan_resume(folder.job_id, jobs_dir, changed)
        refuse_drift(plan, accept_changes)
        return plan
    if files:
        if len(what) > 1:
            raise ConfigError("a job file stands alone", hint="name its tasks inside it, or name only folders here")
        path = Path(files[0])
        return plan_new(_changed(load_job_file(path), agents, changes), path.parent, jobs_dir)
    if not what:
        raise ConfigError("nothing to run", hint="name a job file or task folders, or --resume a job")
    job = parse_job({"name": Path(what[0]).name, "tasks": what, "agents": agents or ["oracle"]}, "command line")
    return plan_new(_changed(job, [], changes), Path.cwd(), jobs_dir)


def _changed(job: JobFile, agents: list[str], changes: dict[str, Any]) -> JobFile:
    """The job file with what the command line says instead; agents named there choose among the file's."""
    if agents:
        known = {a.name: a for a in job.agents}
        changes = changes | {"agents": [known[a].model_dump() if a in known else a for a in agents]}
    return parse_job(job.model_dump(mode="json") | changes, "command line")


def _print_plan(plan: Plan) -> None:
    say(
        f"job {plan.job_id}: {len(plan.tasks)} tasks × {len(plan.agents)} agents × "
        f"{plan.job_file.attempts} attempts = {plan.planned} rollouts"
    )
    say(f"  {len(plan.done)} done, {len(plan.to_retry)} to retry, {len(plan.new)} new, {len(plan.drifted)} changed")
    for line in plan.drifted:
        say(f"  changed: {line}")
    options = plan.job_file.options()
    unlimited = [t.name for t in plan.tasks if t.agent_timeout_s is None and options.agent_timeout_s is None]
    if unlimited:
        say(
            f"  {len(unlimited)} task(s) name no agent limit: {options.default_agent_timeout_s:g} s hold "
            "(--agent-timeout changes it)"
        )
    for task in plan.tasks:
        for warning in task.warnings:
            say(f"  {task.name}: {warning}")


def _finish(plan: Plan, result: JobResult, jobs_dir: Path, as_json: bool) -> None:
    summary = summarise(plan.planned_by_agent, result.records)
    if as_json:
        put_json(
            {
                "schema_version": 1,
                "id": result.job_id,
                "interrupted": result.interrupted,
                "seconds": round(result.seconds, 3),
                "summary": summary.model_dump(mode="json"),
            }
        )
        return
    print(render_text(summary))
    isolation = ", ".join(sorted({r.isolation or "unknown" for r in result.records})) or "none"
    print(f"\njob {result.job_id} · {result.seconds:.0f} s · isolation {isolation}")
    if isolation == "tcg":
        print("(emulated: QEMU gives no security promise under TCG; see docs/security.md)")
    where = "" if jobs_dir == DEFAULT_JOBS_DIR else f" --jobs-dir {jobs_dir}"
    if result.interrupted:
        print(f"\ninterrupted; go on with:  dayfly run --resume {result.job_id}{where}")
        return
    worst = next((r for r in result.records if r.outcome.value != "passed"), None)
    print("\nnext:")
    print(f"  dayfly show {result.job_id}{where}")
    if worst is not None:
        name = f"{result.job_id}/{worst.task}/{worst.agent}/{worst.attempt}"
        print(f"  dayfly logs {name}{where}")
        print(f"  dayfly shell {name}{where}")
    else:
        print(f"  dayfly show {result.job_id} --verify{where}")
        print(f"  dayfly list{where}")
