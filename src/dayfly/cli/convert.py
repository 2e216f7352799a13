"""`import` and `export`: tasks and results of other formats."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json, find, wanted_records
from dayfly.cli.output import put, put_json, say, say_error
from dayfly.errors import NotFoundError, TaskError

import_app = typer.Typer(no_args_is_help=True, help="Tasks of other formats as task folders.")
export_app = typer.Typer(no_args_is_help=True, help="Results in other layouts.")

To = Annotated[Path, typer.Option("--to", help="Where to put what is made.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def register(app: typer.Typer) -> None:
    app.add_typer(import_app, name="import")
    app.add_typer(export_app, name="export")
    import_app.command("terminal-bench")(import_terminal_bench)
    import_app.command("swebench")(import_swebench)
    export_app.command("harbor")(export_harbor)


def import_terminal_bench(
    sources: Annotated[list[Path], typer.Argument(help="Terminal-Bench task folders, or folders of them.")],
    to: To,
    force: Force = False,
    json: Json = False,
) -> None:
    """Terminal-Bench 1 folders (task.yaml) as tasks. Exit 1 when one cannot be carried over; it is named."""
    from dayfly import importers

    def made() -> Iterator[Any]:
        for source in importers.find_terminal_bench(sources):
            try:
                yield importers.import_terminal_bench(source, to, force=force)
            except TaskError as error:
                yield error

    _finish(made(), json)


def import_swebench(
    source: Annotated[Path, typer.Argument(metavar="INSTANCES", help="A JSONL file with a row for each instance.")],
    to: To,
    instance: Annotated[
        list[str] | None, typer.Option("--instance", help="Only this one; can be repeated.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="JSONL of model patches: a job.yaml that grades them.")
    ] = None,
    image_template: Annotated[
        str, typer.Option("--image-template", help="With {instance_id}, {image_id}, {repo}, {version}.")
    ] = "",
    test_command: Annotated[
        str, typer.Option("--test-command", help="Runs the test files that follow it; default: by repository.")
    ] = "",
    parser: Annotated[
        str, typer.Option("--parser", help="What --test-command prints: pytest, unittest or sympy.")
    ] = "pytest",
    force: Force = False,
    json: Json = False,
) -> None:
    """SWE-bench instances as tasks. Exit 1 when a row cannot be carried over; it is named."""
    from dayfly import importers

    settings = importers.settings(image_template or None, test_command or None, parser)
    made = importers.import_swebench(source, to, settings, only=tuple(instance or ()), force=force)
    names = _report(made, json)
    if predictions is not None and names.imported:
        job = importers.write_predictions(predictions, to, [i.name for i in names.imported], force=force)
        say(f"grade the predictions with:  dayfly run {job}")
    _exit(names.refused)


class _Made:
    def __init__(self) -> None:
        self.imported: list[Any] = []
        self.refused: list[TaskError] = []


def _finish(made: Iterable[Any], json: bool) -> None:
    _exit(_report(made, json).refused)


def _exit(refused: list[TaskError]) -> None:
    if refused:
        raise typer.Exit(1)


def _report(made: Iterable[Any], json: bool) -> _Made:
    found = _Made()
    for one in made:
        if isinstance(one, TaskError):
            found.refused.append(one)
            say_error(one.message, one.hint)
            continue
        found.imported.append(one)
        if not json:
            put(f"{one.name}  {one.path}")
            for remark in one.remarks:
                put(f"    remark: {remark}")
    if json:
        put_json(
            {
                "schema_version": 1,
                "imported": [
                    {"task": i.name, "path": str(i.path), "remarks": list(i.remarks)} for i in found.imported
                ],
                "refused": [{"problem": e.message, "hint": e.hint} for e in found.refused],
            }
        )
    return found


def export_harbor(
    job: Annotated[str, typer.Argument(help="A job's id, its beginning, `last`, or its folder.")],
    to: To,
    force: Force = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """A job's results in Harbor's layout: TO/JOB/TRIAL/result.json and so on. Refuses to write out secrets."""
    from dayfly.export import export_harbor as export
    from dayfly.export import host_secrets

    folder, rest = find(jobs_dir, job)
    if rest:
        raise NotFoundError(f"{job} is a rollout", hint=f"export the whole job {folder.job_id}")
    records, broken = wanted_records(folder)
    for message in broken:
        say(f"warning: {message}")
    done = export(folder, records, to, secrets=host_secrets(os.environ), force=force)
    if json:
        put_json({"schema_version": 1, "path": str(done.path), "trials": done.trials})
    else:
        put(f"{done.path}  {done.trials} trials")
