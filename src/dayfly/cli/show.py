"""`list`, `show` and `logs`: read what is on file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dayfly.cli.common import (
    DEFAULT_JOBS_DIR,
    JobsDir,
    Json,
    find_job,
    find_rollout,
    label,
    put_json,
    say,
    wanted_records,
)
from dayfly.cli.display import COLOURS
from dayfly.errors import NotFoundError
from dayfly.evidence import JobFolder, verify_folder
from dayfly.evidence import list_jobs as list_job_ids
from dayfly.model import RolloutRecord
from dayfly.report import render_text, summarise


def register(app: typer.Typer) -> None:
    app.command("list")(list_jobs)
    app.command()(show)
    app.command()(logs)


def list_jobs(jobs_dir: JobsDir = DEFAULT_JOBS_DIR, as_json: Json = False) -> None:
    """List the jobs on file, newest last."""
    jobs = [_job_line(JobFolder.open(jobs_dir, job_id)) for job_id in list_job_ids(jobs_dir)]
    if as_json:
        put_json({"schema_version": 1, "jobs": jobs})
        return
    if not jobs:
        say(f"no jobs in {jobs_dir}; `dayfly run` makes one")
        return
    table = Table("job", "name", "rollouts", "graded", "passed")
    for job in jobs:
        table.add_row(
            job["id"],
            job["name"],
            f"{job['on_file']}/{job['planned']}",
            str(job["graded"]),
            str(job["passed"]),
        )
    Console().print(table)


def _job_line(folder: JobFolder) -> dict[str, Any]:
    stored = folder.job()
    records = wanted_records(folder)
    return {
        "id": folder.job_id,
        "name": stored["job"]["name"],
        "planned": stored["planned"],
        "on_file": len(records),
        "graded": sum(r.graded for r in records),
        "passed": sum(r.outcome.value == "passed" for r in records),
    }


def show(
    what: Annotated[str, typer.Argument(metavar="JOB[/ROLLOUT]", help="A job (or `last`), or one rollout.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every digest of the evidence.")] = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    as_json: Json = False,
) -> None:
    """Show a job's results, or everything known of one rollout. With --verify, exit 1 if evidence changed."""
    if "/" in what:
        folder, record = find_rollout(jobs_dir, what)
        records = [record]
    else:
        folder = find_job(jobs_dir, what)
        records = wanted_records(folder)
    problems = {label(r): verify_folder(folder.rollout_path(r.key)) for r in records} if verify else {}
    problems = {name: found for name, found in problems.items() if found}
    if as_json:
        put_json(_as_json(folder, records, what, verify, problems))
    elif "/" in what:
        _show_rollout(folder, records[0])
    else:
        _show_job(folder, records)
    if verify and not as_json:
        _say_verified(len(records), problems)
    if problems:
        raise typer.Exit(1)


def _as_json(
    folder: JobFolder, records: list[RolloutRecord], what: str, verify: bool, problems: dict[str, Any]
) -> dict[str, Any]:
    checked = {"verified": not problems, "problems": {k: [str(p) for p in v] for k, v in problems.items()}}
    if "/" in what:
        return records[0].model_dump(mode="json") | (checked if verify else {})
    return {
        "schema_version": 1,
        "id": folder.job_id,
        "summary": summarise(folder.lock_data()["planned_by_agent"], records).model_dump(mode="json"),
        "rollouts": [r.model_dump(mode="json") for r in records],
        **(checked if verify else {}),
    }


def _say_verified(count: int, problems: dict[str, Any]) -> None:
    if not problems:
        say(f"verified: the evidence of {count} rollout(s) is as it was sealed")
    for name, found in problems.items():
        for problem in found:
            say(f"changed: {name}: {problem}")


def _show_job(folder: JobFolder, records: list[RolloutRecord]) -> None:
    table = Table("rollout", "outcome", "reward", "class", "seconds", "cause")
    for r in sorted(records, key=lambda r: (r.task, r.agent, r.attempt)):
        table.add_row(
            label(r),
            f"[{COLOURS[r.outcome.value]}]{r.outcome.value}[/]",
            "" if r.reward is None else f"{r.reward:g}",
            r.verifier_class.value,
            f"{r.finished_unix - r.started_unix:.1f}",
            r.cause.message if r.cause else "",
        )
    Console().print(table)
    print(render_text(summarise(folder.lock_data()["planned_by_agent"], records)))


def _show_rollout(folder: JobFolder, record: RolloutRecord) -> None:
    place = folder.rollout_path(record.key)
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(record):
        table.add_row(f"[bold]{name}[/]", value)
    console = Console()
    console.print(table)
    console.print("\n[bold]phases[/]")
    for phase in record.phases:
        console.print(f"  {phase.name:<9} {phase.seconds:8.2f} s")
    for vm in record.vms:
        console.print(f"[bold]vm[/] {vm.id}: {vm.how} in {vm.start_s * 1000:.0f} ms, {vm.isolation}")
    for note in record.notes:
        console.print(f"[bold]note[/] {note}", markup=True, highlight=False)
    for earlier in folder.history(record.key):
        if earlier.rollout_id != record.rollout_id:
            console.print(f"[bold]earlier start[/] {earlier.rollout_id}: {earlier.outcome.value}")
    console.print(f"\n{len(record.files)} files of evidence in {place}")


def _facts(record: RolloutRecord) -> list[tuple[str, str]]:
    facts = [
        ("rollout", f"{record.rollout_id} (job {record.job_id})"),
        ("task", f"{record.task}  {record.task_digest}"),
        ("agent", f"{record.agent}  {record.agent_digest}  attempt {record.attempt}, retry {record.retry}"),
        ("outcome", f"[{COLOURS[record.outcome.value]}]{record.outcome.value}[/]"),
        ("reward", "none" if record.reward is None else f"{record.reward:g}"),
        ("isolation", f"{record.isolation}; verifier class {record.verifier_class.value}"),
    ]
    if record.start_fingerprint is not None:
        facts.append(("start", record.start_fingerprint.digest))
    for cause in filter(None, [record.cause, *record.further_causes]):
        facts.append(("cause", f"{cause.message} (in {cause.phase})"))
        if cause.hint:
            facts.append(("", cause.hint))
    peak = record.usage.memory_peak_bytes
    facts.append(("memory", "unknown" if peak is None else f"peak {peak / 2**20:.0f} MiB"))
    return facts


STREAMS = {
    "agent": ("agent/stdout.txt", "agent/stderr.txt"),
    "verifier": ("verifier/test-stdout.txt",),
    "console": ("console.log", "verifier-console.log"),
}


def logs(
    what: Annotated[str, typer.Argument(metavar="JOB/ROLLOUT", help="A rollout, or a job with --follow.")],
    part: Annotated[str, typer.Option("--part", help="agent, verifier, console or all.")] = "all",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the rollout or job ends.")] = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
) -> None:
    """Print the output of a rollout: agent, verifier and console, byte for byte. `-f JOB` follows a job."""
    if part not in (*STREAMS, "all"):
        raise NotFoundError(f"there is no part {part!r}", hint=f"one of: {', '.join(STREAMS)}, all")
    if "/" not in what:
        _follow_events(find_job(jobs_dir, what), follow)
        return
    if follow and _follow_rollout(jobs_dir, what, part):
        return
    folder, record = find_rollout(jobs_dir, what)
    _print_streams(folder.rollout_path(record.key), part)


def _print_streams(place: Path, part: str) -> None:
    for name, files in STREAMS.items():
        for file in files if part in (name, "all") else ():
            path = place / file
            if path.exists() and path.stat().st_size:
                say(f"--- {file}")
                sys.stdout.flush()
                sys.stdout.buffer.write(path.read_bytes())
                sys.stdout.buffer.flush()


def _follow_events(folder: JobFolder, follow: bool) -> None:
    """Print the job's events; with `follow`, until the controller that works on it is gone."""
    path = folder.path / "events.jsonl"
    with path.open("rb") as events:
        while True:
            live = folder.holder() is not None
            data = events.read()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            if not follow or (not live and not data):
                return
            time.sleep(0.2)


def _follow_rollout(jobs_dir: Path, what: str, part: str) -> bool:
    """Follow the files of a rollout that is in progress; False when it is not (or no longer)."""
    job, _, rest = what.partition("/")
    folder = find_job(jobs_dir, job)
    work = _in_progress(folder, rest)
    if work is None:
        return False
    seen: dict[Path, int] = {}
    while True:
        over = not work.exists()
        for name, files in STREAMS.items():
            for file in files if part in (name, "all") else ():
                _print_new(work / file, seen)
        if over:
            return True
        time.sleep(0.2)


def _in_progress(folder: JobFolder, wanted: str) -> Path | None:
    """The evidence of a rollout that is being made, by its id or `task/agent/attempt`; None if there is none."""
    for event in reversed(list(folder.events())):
        if event["event"] == "rollout_started":
            name = f"{event['task']}/{event['agent']}/{event['attempt']}"
            if wanted == name or event["rollout"].endswith(wanted):
                place = folder.path / "work" / event["rollout"] / "evidence"
                return place if place.exists() else None
    return None


def _print_new(path: Path, seen: dict[Path, int]) -> None:
    try:
        with path.open("rb") as file:
            file.seek(seen.get(path, 0), os.SEEK_SET)
            data = file.read(1 << 20)
    except FileNotFoundError:
        return
    seen[path] = seen.get(path, 0) + len(data)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
