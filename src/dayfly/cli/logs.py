"""`logs`: what agent, verifier and console of a rollout said, or what happened in a job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, find, find_rollout
from dayfly.cli.display import EventLines, event_name
from dayfly.cli.output import put, put_bytes, put_json_line, say
from dayfly.errors import ConfigError, NotFoundError
from dayfly.evidence import JobFolder, safe_component

POLL_S = 0.1
CHUNK = 1 << 20


class Part(StrEnum):
    AGENT = "agent"
    VERIFIER = "verifier"
    CONSOLE = "console"
    ALL = "all"


STREAMS = {
    Part.AGENT: ("agent/stdout.txt", "agent/stderr.txt"),
    Part.VERIFIER: ("verifier/test-stdout.txt",),
    Part.CONSOLE: ("console.log", "verifier-console.log"),
}


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    what: Annotated[
        str, typer.Argument(metavar="JOB[/ROLLOUT]", help="A rollout for its output, or a job for its events.")
    ],
    part: Annotated[Part, typer.Option("--part", help="Which output of a rollout.")] = Part.ALL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the rollout or job ends.")] = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Annotated[bool, typer.Option("--json", help="The events of a job as JSON, one a line.")] = False,
) -> None:
    """Print the output of a rollout, byte for byte, also while it goes on; or the events of a job.

    On a terminal, control sequences other than colours are made visible; a pipe gets every byte as it was.
    """
    job, rest = find(jobs_dir, what)
    if not rest:
        if part is not Part.ALL:
            raise ConfigError("--part is for a rollout", hint="name one: JOB/TASK/AGENT/ATTEMPT")
        _job_log(job, follow, json)
        return
    if json:
        raise ConfigError("--json is for the events of a job", hint=f"`dayfly show {what} --json` for a rollout")
    files = [f for p, names in STREAMS.items() if part in (p, Part.ALL) for f in names]
    _RolloutLog(job, rest, files).put_all(follow)


# --- a job ---------------------------------------------------------------------------------------


class _Events:
    """The events of a job, as they are written."""

    def __init__(self, job: JobFolder) -> None:
        self._path = job.path / "events.jsonl"
        self._offset = 0
        self._torn = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """What was added since the last call; a line that is not complete yet waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    *lines, self._torn = (self._torn + chunk).split(b"\n")
                    yield from filter(None, map(_event, lines))
        except FileNotFoundError:  # a job that has just been made
            return


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # torn by a crash
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _job_log(job: JobFolder, follow: bool, as_json: bool) -> None:
    events, lines = _Events(job), EventLines()
    for _ in _while_worked_on(job, follow):
        for event in events.new():
            line = lines.line(event)
            if as_json:
                put_json_line(event)
            elif line is not None:
                put(f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} {line}")


def _while_worked_on(job: JobFolder, follow: bool) -> Iterator[bool]:
    """Yields until nobody works on the job any more, and once after that (with False); once if not `follow`."""
    while follow and _held(job):
        yield True
        time.sleep(POLL_S)
    yield False


def _held(job: JobFolder) -> bool:
    """Whether a controller holds the job; one that has just started gets a moment to take it."""
    return job.holder() is not None or (not (job.path / "events.jsonl").exists() and _young(job))


def _young(job: JobFolder) -> bool:
    return time.time() - (job.path / "job.json").stat().st_mtime < 10


# --- a rollout -----------------------------------------------------------------------------------


class _RolloutLog:
    """The output of one attempt; while it goes on, of each of its starts in turn."""

    def __init__(self, job: JobFolder, wanted: str, files: list[str]) -> None:
        self.job = job
        self.wanted = wanted
        self.files = files
        self.events = _Events(job)
        self.starts: dict[str, bool] = {}
        """Rollout id → whether it ended, in the order of their starts."""
        self.attempt_over = False
        self.printed: dict[tuple[str, str], int] = {}

    def put_all(self, follow: bool) -> None:
        self._look()
        if self._going_on() is None and not (follow and self._to_come()):
            rollout = find_rollout(self.job, self.wanted)
            self._print_from(rollout.place, rollout.record.rollout_id, headings=True)
            return
        for _ in _while_worked_on(self.job, follow):
            self._look()
            for rollout_id, ended in list(self.starts.items()):
                if (place := self._place(rollout_id)) is not None:
                    self._print_from(place, rollout_id)
                if ended:
                    del self.starts[rollout_id]
            if self.attempt_over:
                return

    def _look(self) -> None:
        for event in self.events.new():
            match event["event"]:
                case "rollout_started" if self._is_wanted(event):
                    if event["rollout"] not in self.starts and self.printed:
                        say(f"--- started again as {event['rollout']}")
                    self.starts[event["rollout"]] = False
                    self.attempt_over = False
                case "rollout_retried" | "rollout_finished" if event["rollout"] in self.starts:
                    self.starts[event["rollout"]] = True
                    by_id = event_name(event) != self.wanted
                    self.attempt_over = by_id or event["event"] == "rollout_finished"

    def _is_wanted(self, event: dict[str, Any]) -> bool:
        return event_name(event) == self.wanted or str(event["rollout"]).endswith(self.wanted)

    def _going_on(self) -> str | None:
        """The start that is being worked on. Earlier ones are on file and are not printed again."""
        open_starts = [r for r, ended in self.starts.items() if not ended and self._work(r).is_dir()]
        self.starts = {r: e for r, e in self.starts.items() if r in open_starts}
        return open_starts[-1] if open_starts else None

    def _to_come(self) -> bool:
        """Whether the job is running and has this attempt still to do."""
        if self.attempt_over or self.job.holder() is None:
            return False
        name, _, number = self.wanted.rpartition("/")
        lock, attempts = self.job.lock_data(), self.job.job()["job"]["attempts"]
        known = any(f"{task}/{agent}" == name for task in lock["tasks"] for agent in lock["agents"])
        return known and number.isdecimal() and 1 <= int(number) <= attempts

    def _work(self, rollout_id: str) -> Path:
        return self.job.path / "work" / safe_component(rollout_id)

    def _place(self, rollout_id: str) -> Path | None:
        """Where the files of a start are now: in progress, on file, or left by a killed controller."""
        if (working := self._work(rollout_id) / "evidence").is_dir():
            return working
        try:
            return self.job.folder_of(rollout_id, lambda place, error: None)
        except NotFoundError:
            left = self.job.path / "interrupted" / safe_component(rollout_id)
            return left if left.is_dir() else None

    def _print_from(self, place: Path, rollout_id: str, headings: bool = False) -> None:
        """Print what was not printed yet. The folder may move away under us: the next turn finds it."""
        for name in _of_steps_too(place, self.files):
            try:
                fd = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            with os.fdopen(fd, "rb") as file:
                seen = self.printed.get((rollout_id, name), 0)
                if headings and os.fstat(file.fileno()).st_size > seen:
                    say(f"--- {name}")
                file.seek(seen)
                while chunk := file.read(CHUNK):
                    put_bytes(chunk)
                    seen += len(chunk)
                self.printed[rollout_id, name] = seen


def _of_steps_too(place: Path, files: list[str]) -> list[str]:
    """The same files of every step of a multi-step task, in the order in which the steps were begun."""
    try:
        begun = sorted(place.glob("steps/*/start-files.json"), key=lambda p: p.stat().st_mtime)
    except FileNotFoundError:  # it moved away under us
        return files
    return [*files, *(f"steps/{path.parent.name}/{name}" for path in begun for name in files)]
