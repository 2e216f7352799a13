"""`compare`: two or more agent versions, task by task. It only reads; deciding is the gate's work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json, command_line
from dayfly.cli.output import put, put_json, put_table, say_error
from dayfly.cli.reports import refuse_dash, write_report
from dayfly.errors import ConfigError, HostError, UsageError

if TYPE_CHECKING:
    from dayfly.compare.model import Allowed, Comparison
    from dayfly.results.side import Side

STDOUT = Path("-")
MOST_IN_MARKDOWN = 200
"""Entries of each list."""
ALLOWED: tuple[Allowed, ...] = ("attempts", "limits", "image", "isolation", "verifier class")


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="JOB[:AGENT], or @NAME of a baseline.")],
    candidates: Annotated[list[str], typer.Argument(metavar="CANDIDATE...", help="What to compare with it.")],
    alpha: Annotated[
        float, typer.Option("--alpha", min=0.0001, max=0.5, help="One-sided error; intervals hold 1 - 2 alpha.")
    ] = 0.025,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help=f"A difference that is meant: {', '.join(ALLOWED)}; can be repeated."),
    ] = None,
    cluster_by: Annotated[
        str | None, typer.Option("--cluster-by", metavar="KEY", help="Metadata that groups tasks.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="List every task that changed.")] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown; - prints it.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page.")] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Compare agent versions task by task. Exit 0 whatever changed, 4 when no task can be compared."""
    from dayfly.compare import compare_sides
    from dayfly.results import load_side, nothing_is_garbage

    meant = _allowed(allow or [])
    refuse_dash("--html", html)
    if json and markdown == STDOUT:
        raise UsageError("--json and --markdown - both print the answer", hint="name a file for one of them")
    baseline = load_side(jobs_dir, base)
    _refuse_unknown_key(baseline, cluster_by)
    with nothing_is_garbage():
        sides = [load_side(jobs_dir, c) for c in candidates]
        found = [compare_sides(baseline, side, alpha=alpha, allowed=meant, cluster_by=cluster_by) for side in sides]
        problems = _write_files(found, markdown, html, None if all else MOST_IN_MARKDOWN)
        if json:
            put_json({"schema_version": 1, "comparisons": [c.model_dump(mode="json") for c in found]})
        elif markdown == STDOUT:
            _put_markdown(found, None if all else MOST_IN_MARKDOWN)
        else:
            _put_all(found, None if all else 20, [_jobs_dir_of(side, jobs_dir) for side in sides])
    for problem in problems:
        say_error(problem.message, problem.hint)
    _leave_if_nothing_compares(found)
    if problems:
        raise typer.Exit(problems[0].exit_code)


def _allowed(names: list[str]) -> list[Allowed]:
    known: dict[str, Allowed] = {name: name for name in ALLOWED}
    for name in names:
        if name not in known:
            raise ConfigError(f"--allow {name!r} is no difference that can be meant", hint=", ".join(ALLOWED))
    return [known[name] for name in names]


def _refuse_unknown_key(side: Side, key: str | None) -> None:
    """A misspelt key would leave every task by itself, and intervals too narrow."""
    if key is None or any(key in t.metadata for t in side.tasks.values()):
        return
    known = sorted({k for t in side.tasks.values() for k in t.metadata})
    raise UsageError(
        f"no task of {side.label} has {key!r} in its metadata",
        hint=f"its tasks have: {', '.join(known[:20]) or 'none'}",
    )


def _leave_if_nothing_compares(found: list[Comparison]) -> None:
    """After everything was said: a program must not take this for "nothing changed"."""
    without = [c for c in found if not c.comparable]
    for one in without:
        say_error(
            f"no task of {one.candidate.job_id}:{one.candidate.agent} can be compared with the baseline's",
            hint="each task left out is listed with the reason; --allow names differences that are meant",
        )
    if without:
        raise typer.Exit(4)


def _jobs_dir_of(side: Side, given: Path) -> Path:
    """Where other commands find the job, which may have been named by its folder."""
    own = side.folder.parent
    return given if own.resolve() == given.resolve() else own


def _put_markdown(found: list[Comparison], most: int | None) -> None:
    from dayfly.compare.markdown import render_markdown

    for line in render_markdown(found, most).splitlines():
        put(line)


def _put_all(found: list[Comparison], most: int | None, jobs_dirs: list[Path]) -> None:
    if len(found) > 1:
        _put_overview(found)
    for one, jobs_dir in zip(found, jobs_dirs, strict=True):
        _put(one, most, jobs_dir)


def _put_overview(found: list[Comparison]) -> None:
    from dayfly.compare.text import metric_words

    rows = [(f"{c.candidate.job_id}:{c.candidate.agent}", metric_words(c.metrics["score"], c.alpha)) for c in found]
    put_table(("candidate", "score"), rows)
    put()


def _put(comparison: Comparison, most: int | None, jobs_dir: Path) -> None:
    from dayfly.compare.comparison import attempt_label
    from dayfly.compare.text import render_text
    from dayfly.results.side import FAILS

    for line in render_text(comparison, most=most):
        put(line)
    worse = next((p for p in comparison.pairs if p.transition in ("pass→fail", "worse")), None)
    if worse is not None:
        side = comparison.candidate
        rollout = attempt_label(worse.task, side.agent, worse.candidate_marks, FAILS)
        put(f"next: {command_line('logs', f'{side.job_id}/{rollout}', jobs_dir=jobs_dir)}")
    put()


def _write_files(
    found: list[Comparison], markdown: Path | None, html: Path | None, most: int | None
) -> list[HostError]:
    """Those that failed; one that does keeps neither the other nor the answer back."""
    problems: list[HostError] = []
    if markdown is not None and markdown != STDOUT:
        from dayfly.compare.markdown import render_markdown

        problems += _tried(markdown, render_markdown(found, most))
    if html is not None:
        from dayfly.compare.html import render_html

        problems += _tried(html, render_html(found))
    return problems


def _tried(path: Path, page: str) -> list[HostError]:
    try:
        write_report(path, page.encode("utf-8", "replace"))
    except HostError as error:
        return [error]
    return []
