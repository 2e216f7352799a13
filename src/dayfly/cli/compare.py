"""`compare`: two or more agent versions, task by task. It only reads; deciding is the gate's work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json, command_line
from dayfly.cli.output import put, put_json, put_table, say_error
from dayfly.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from dayfly.compare.model import Allowed, Comparison
    from dayfly.results.side import Side

STDOUT = Path("-")
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
    if json and markdown == STDOUT:
        raise UsageError("--json and --markdown - both print the answer", hint="name a file for one of them")
    baseline = load_side(jobs_dir, base)
    _refuse_unknown_key(baseline, cluster_by)
    with nothing_is_garbage():
        found = [
            compare_sides(baseline, load_side(jobs_dir, c), alpha=alpha, allowed=meant, cluster_by=cluster_by)
            for c in candidates
        ]
        _write_files(found, markdown, html)
        if json:
            put_json({"schema_version": 1, "comparisons": [c.model_dump(mode="json") for c in found]})
        elif markdown != STDOUT:
            _put_all(found, None if all else 20, jobs_dir)
    _leave_if_nothing_compares(found)


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


def _put_all(found: list[Comparison], most: int | None, jobs_dir: Path) -> None:
    if len(found) > 1:
        _put_overview(found)
    for one in found:
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


def _write_files(found: list[Comparison], markdown: Path | None, html: Path | None) -> None:
    from dayfly.evidence import write_durable

    if markdown is not None:
        from dayfly.compare.markdown import render_markdown

        page = render_markdown(found)
        if markdown == STDOUT:
            for line in page.splitlines():
                put(line)
        else:
            markdown.parent.mkdir(parents=True, exist_ok=True)
            write_durable(markdown, page.encode("utf-8", "replace"))
    if html is not None:
        from dayfly.compare.html import render_html

        html.parent.mkdir(parents=True, exist_ok=True)
        write_durable(html, render_html(found).encode("utf-8", "replace"))
