"""`plan`: before a run, what its tasks and attempts can show, and what it would take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json
from dayfly.cli.output import put, put_json, put_table
from dayfly.errors import ConfigError

if TYPE_CHECKING:
    from dayfly.gate.planning import Figures, Needed, Prospect
    from dayfly.job import Plan


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    what: Annotated[list[str], typer.Argument(metavar="JOB.yaml | TASKS...", help="A job file, or task folders.")],
    attempts: Annotated[
        int | None, typer.Option("--attempts", "-k", min=1, max=1000, help="Rollouts per task.")
    ] = None,
    gate: Annotated[
        Path | None, typer.Option("--gate", metavar="POLICY.yaml", help="Take alpha and margin from this policy.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="JOB[:AGENT] | @NAME", help="Estimate from this how often attempts disagree."
        ),
    ] = None,
    discordant: Annotated[
        float | None,
        typer.Option(
            "--discordant", min=0.001, max=1.0, help="Share of pairs that disagree, instead of an estimate."
        ),
    ] = None,
    drop: Annotated[
        float | None,
        typer.Option("--drop", min=0.001, max=1.0, help="The drop to be found, as a share; else 0.1 or more."),
    ] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Say which drop a run can find, and how many rollouts it takes. Runs nothing."""
    seen = _prospect(_plan(what, attempts, jobs_dir), gate, baseline, discordant, drop, jobs_dir)
    if json:
        put_json(seen.model_dump(mode="json"))
        return
    _put(seen)


def _plan(what: list[str], attempts: int | None, jobs_dir: Path) -> Plan:
    from dayfly.job import load_job_file, parse_job, plan_new

    files = [w for w in what if w.endswith((".yaml", ".yml"))]
    if files and len(what) > 1:
        raise ConfigError("a job file stands alone", hint="name its tasks inside it, or name only folders here")
    if files:
        job, base_dir = load_job_file(Path(files[0])), Path(files[0]).parent
    else:
        job, base_dir = parse_job({"tasks": what, "agents": ["no-op"]}, "command line"), Path.cwd()
    if attempts is not None:
        job = job.model_copy(update={"attempts": attempts})
    return plan_new(job, base_dir, jobs_dir)


def _prospect(
    planned: Plan,
    gate: Path | None,
    baseline: str | None,
    discordant: float | None,
    drop: float | None,
    jobs_dir: Path,
) -> Prospect:
    from dayfly.gate.early_stop import comparable_tasks
    from dayfly.gate.load import load_policy
    from dayfly.gate.planning import discordance, prospect
    from dayfly.gate.policy import Policy
    from dayfly.job import planned_results
    from dayfly.results import load_side

    loaded = None if gate is None else load_policy(gate)
    policy = Policy() if loaded is None else loaded.policy
    base = None if baseline is None else load_side(jobs_dir, baseline)
    tasks = planned_results(planned)
    if loaded is not None:
        quarantined = {e.task for e in loaded.quarantine.tasks}
        tasks = {name: task for name, task in tasks.items() if name not in quarantined}
    attempts = planned.job_file.attempts
    if base is not None:
        tasks = comparable_tasks(policy, base, tasks)
        attempts = min(attempts, base.attempts)  # what only one side has pairs with nothing
    if not tasks:
        raise ConfigError(
            "no task is left to compare" + ("" if base is None else f" with {base.label}"),
            hint="the baseline must hold the same tasks, unchanged; quarantined ones do not count",
        )
    rule = policy.metrics.get("score")
    return prospect(
        len(tasks),
        attempts,
        discordance([base.tasks[name] for name in tasks] if base is not None else [], discordant),
        alpha=policy.alpha,
        margin=None if rule is None else rule.margin,
        drop=drop,
        alpha_share=None if loaded is None else policy.early_stop.alpha_share,
    )


# --- text ----------------------------------------------------------------------------------------


def _put(seen: Prospect) -> None:
    put(f"{_count(seen.tasks, 'task')} × {_count(seen.attempts, 'attempt')} = {_count(seen.rollouts, 'rollout')}")
    put(_noise(seen))
    put(f"a worsening of the score by {_points(seen.margin)} is let through")
    put()
    columns = [("when all is done", seen.at_end)]
    if seen.watched is not None:
        columns.append(("with run --gate", seen.watched))
    rows = zip(*(list(_cells(seen, f)) for _, f in columns), strict=True)
    put_table(
        ("", *(title for title, _ in columns)),
        [(first[0], *(cell for _, cell in (first, *rest))) for first, *rest in rows],
    )
    if seen.least_regressions_early is not None:
        put(f"run --gate stops after {seen.least_regressions_early} regressions in a row at the earliest")
    put("(a drop is taken as tasks that fail for good, tasks as independent, every rollout as graded)")
    for warning in seen.warnings:
        put(f"warning: {warning}")


def _noise(seen: Prospect) -> str:
    noise = seen.discordance
    share = f"{100 * noise.share:.1f} % of the pairs (one attempt of each agent) disagree"
    match noise.source:
        case "baseline":
            return f"{share}, as attempts of the baseline do on {_count(noise.tasks, 'task')}; a drop comes on top"
        case "given":
            return f"{share}: as said"
        case _:
            return f"{share}: assumed; --baseline with several attempts a task says how many it is here"


def _cells(seen: Prospect, f: Figures) -> Iterator[tuple[str, str]]:
    """Label and value of each row."""
    yield "error of the test", f"{100 * f.alpha:g} %"
    yield "smallest drop found in 80 %", "none" if f.smallest_drop is None else _points(f.smallest_drop)
    yield f"a drop of {_points(seen.drop)} is found", _chance(f.power)
    yield from _takes("  for 80 % it takes", seen, f.to_find_drop)
    yield "an identical candidate passes", _chance(f.identical_passes)
    if f.to_pass is not None:
        yield from _takes("  for 80 % it takes", seen, f.to_pass)
    least = f.least_regressions
    yield "least that blocks", "nothing" if least is None else f"{_count(least, 'regression')}, nothing better"


def _takes(label: str, seen: Prospect, needed: Needed) -> Iterator[tuple[str, str]]:
    tasks = "too many tasks" if needed.tasks is None else _count(needed.tasks, "task")
    rollouts = "" if needed.rollouts is None else f" ({_count(needed.rollouts, 'rollout')})"
    yield f"{label}, at {_count(seen.attempts, 'attempt')}", tasks + rollouts
    attempts = "no number of attempts does" if needed.attempts is None else _count(needed.attempts, "attempt")
    yield f"  or, at {_count(seen.tasks, 'task')}", attempts


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _chance(share: float) -> str:
    return f"with a chance of {100 * share:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
