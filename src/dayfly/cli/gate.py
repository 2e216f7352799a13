"""`gate`: apply a policy to results, and answer with an exit code that a CI can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json
from dayfly.cli.output import put, put_command, put_json, say_command, say_error
from dayfly.cli.reports import refuse_dash, write_report
from dayfly.errors import DayflyError, UsageError

if TYPE_CHECKING:
    from dayfly.gate.verdict import GateVerdict
    from dayfly.results.side import Side

SIDE = "JOB[:AGENT], or @NAME of a baseline."


class Annotations(StrEnum):
    GITHUB = "github"


def register(app: typer.Typer) -> None:
    app.command()(gate)


def gate(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="The candidate, as --candidate names it.")
    ] = None,
    policy: Annotated[Path, typer.Option("--policy", "-p", help="The policy; see docs/gate.md.")] = Path(
        "gate.yaml"
    ),
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="SIDE", help=f"What to compare with: {SIDE}")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option("--candidate", metavar="SIDE", help=f"What is to be let through: {SIDE}")
    ] = None,
    confirm: Annotated[
        list[str] | None,
        typer.Option(
            "--confirm",
            metavar="SIDE",
            help="A job that did tasks of the candidate again, to confirm failures; can be repeated.",
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", metavar="FILE", help="Write Markdown; added to the end of $GITHUB_STEP_SUMMARY."),
    ] = None,
    annotations: Annotated[
        Annotations | None, typer.Option("--annotations", help="Print the most important lines for a CI.")
    ] = None,
    badge: Annotated[Path | None, typer.Option("--badge", metavar="FILE", help="Write an SVG badge.")] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Let a candidate through or not. Exit 0 pass, 1 fail, 3 inconclusive, 4 no valid answer."""
    wanted = _only(job, candidate)
    files = {"junit": junit, "summary": summary, "badge": badge}
    for kind, path in files.items():
        refuse_dash(f"--{kind}", path)
    from dayfly.results import nothing_is_garbage

    with nothing_is_garbage():
        verdict = _decide(jobs_dir, policy, baseline, wanted, confirm or [])
        # Before anything is printed: a reader that is gone must not cost the files.
        problems = list(_write_files(verdict, files))
        if json:
            put_json(verdict.model_dump(mode="json"))
        else:
            _put_text(verdict)
    if annotations is not None:
        _put_annotations(verdict, say_command if json else put_command)
    for problem in problems:
        say_error(problem.message, problem.hint)
    raise typer.Exit(verdict.exit_code or (problems[0].exit_code if problems else 0))


def _only(job: str | None, candidate: str | None) -> str:
    if job is not None and candidate is not None:
        raise UsageError(f"the candidate is named twice, {job!r} and {candidate!r}", hint="leave one out")
    wanted = candidate if job is None else job
    if wanted is None:
        raise UsageError("no candidate is named", hint="`dayfly gate JOB`, or --candidate JOB[:AGENT]")
    return wanted


def _decide(jobs_dir: Path, path: Path, baseline: str | None, candidate: str, confirm: list[str]) -> GateVerdict:
    from dayfly.gate.decide import decide
    from dayfly.gate.load import load_policy

    loaded = load_policy(path)
    intact = loaded.policy.require.intact_evidence
    return decide(
        loaded.policy,
        _load(jobs_dir, candidate, intact),
        None if baseline is None else _load(jobs_dir, baseline, intact),
        policy_digest=loaded.digest,
        quarantine=loaded.quarantine,
        confirm=[_load(jobs_dir, c, intact) for c in confirm],
    )


def _load(jobs_dir: Path, text: str, intact: bool) -> Side:
    from dayfly.results import load_side, verify_evidence

    side = load_side(jobs_dir, text)
    if not intact:
        return side
    return replace(side, problems=(*side.problems, *verify_evidence(side)))


# --- what is printed and written ---------------------------------------------------------------------


def _put_text(verdict: GateVerdict) -> None:
    from dayfly.gate.text import render_text

    for line in render_text(verdict):
        put(line)


def _put_annotations(verdict: GateVerdict, write: Callable[[str], None]) -> None:
    """Among the lines of the answer; beside it when the answer is one JSON document."""
    from dayfly.gate.annotations import render_annotations

    for line in render_annotations(verdict):
        write(line)


def _write_files(verdict: GateVerdict, files: dict[str, Path | None]) -> Iterator[DayflyError]:
    """Write what is wanted, whatever the verdict; one that fails keeps none of the others back."""
    for kind, path in files.items():
        if path is None:
            continue
        try:
            write_report(path, _rendered(kind, verdict))
        except DayflyError as error:
            yield error


def _rendered(kind: str, verdict: GateVerdict) -> bytes:
    match kind:
        case "junit":
            from dayfly.gate.junit import render_junit

            return render_junit(verdict)
        case "summary":
            from dayfly.gate.summary import render_summary

            return render_summary(verdict).encode()
        case _:
            from dayfly.gate.badge import render_badge

            return render_badge(verdict).encode()
