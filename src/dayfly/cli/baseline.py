"""`baseline set`, `show` and `history`: the results that others are compared with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json
from dayfly.cli.output import put_json, put_table, say

if TYPE_CHECKING:
    from dayfly.results.baseline import Baseline

baseline_app = typer.Typer(no_args_is_help=True, help="Keep the results that others are compared with.")

Name = Annotated[str, typer.Option("--name", help="Which baseline; `@NAME` stands for it in other commands.")]


def register(app: typer.Typer) -> None:
    app.add_typer(baseline_app, name="baseline")


@baseline_app.command("set")
def baseline_set(
    job: Annotated[str, typer.Argument(metavar="JOB[:AGENT]", help="Complete results; see `dayfly show`.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it moves; kept in its history.")],
    name: Name = "main",
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="JOB",
            help="Move it only from this: a job, JOB:AGENT or results digest in full, or `none` for a new one.",
        ),
    ] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Make the results of a job the baseline. Every planned rollout of the agent must be graded."""
    from dayfly.results.baseline import set_baseline

    made = set_baseline(jobs_dir, job, reason=reason, name=name, expect=expect)
    if json:
        put_json({"schema_version": 1, "baseline": made.model_dump(mode="json")})
        return
    before = f"; before, it was {made.previous}" if made.previous else ""
    say(f"baseline {made.name} is {made.label}, {made.rollouts} rollouts of {made.tasks} tasks{before}")


@baseline_app.command("show")
def baseline_show(name: Name = "main", jobs_dir: JobsDir = DEFAULT_JOBS_DIR, json: Json = False) -> None:
    """Show what a baseline stands for. Exit 2 when its job no longer holds the results that were set."""
    from dayfly.results import load_side
    from dayfly.results.baseline import get_baseline

    found = get_baseline(jobs_dir, name)
    if json:
        put_json({"schema_version": 1, "baseline": found.model_dump(mode="json")})
    else:
        put_table(
            ("", ""),
            [
                ("baseline", found.name),
                ("job", found.job_id),
                ("agent", found.agent),
                ("agent digest", found.agent_digest),
                ("results digest", found.results_digest),
                ("rollouts", f"{found.rollouts} of {found.tasks} tasks, all graded"),
                ("set", f"{_when(found)} by {found.set_by}"),
                ("reason", found.reason),
                ("before", found.previous or "none"),
            ],
        )
    load_side(jobs_dir, f"@{name}")


@baseline_app.command("history")
def baseline_history(name: Name = "main", jobs_dir: JobsDir = DEFAULT_JOBS_DIR, json: Json = False) -> None:
    """List every move of a baseline, oldest first."""
    from dayfly.results.baseline import history

    moves = history(jobs_dir, name)
    if json:
        put_json({"schema_version": 1, "moves": [m.model_dump(mode="json") for m in moves]})
        return
    put_table(
        ("set", "by", "job", "results", "reason"),
        ((_when(m), m.set_by, m.label, m.results_digest[:19], m.reason) for m in moves),
        wrap="reason",
    )


def _when(baseline: Baseline) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(baseline.set_unix)) + " UTC"
