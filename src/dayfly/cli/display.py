"""What a person sees while a job runs: three observers of the same events.

`full` redraws a few lines on a terminal, `plain` prints a line for each thing that happened (for logs and
CI), `json` prints the events themselves, one object a line. No display can end a job.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dayfly.cli.output import error_console, put_json_line, say, styled
from dayfly.job import Event, Observer
from dayfly.model import Outcome

Display = Literal["full", "plain", "json", "none"]

COLOURS = {
    "passed": "green",
    "failed": "red",
    "agent_timeout": "yellow",
    "agent_error": "yellow",
    "sandbox_oom": "yellow",
    "disk_full": "yellow",
    "tampered": "bold red",
    "provider_error": "magenta",
    "infra_error": "magenta",
    "verifier_error": "magenta",
    "cancelled": "dim",
    "skipped": "dim",
}


def default_display() -> Display:
    """`full` on a terminal that can be redrawn, else `plain`."""
    able = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return "full" if able and not os.environ.get("CI") else "plain"


@contextmanager
def displayed(kind: Display) -> Iterator[list[Observer]]:
    """Observers for a job, drawn until the block ends."""
    match kind:
        case "full":
            board = _Board()
            with Live(get_renderable=board.draw, console=error_console(), refresh_per_second=8, transient=True):
                yield [board.see]
        case "plain":
            yield [_Plain().see]
        case "json":
            yield [put_json_line]
        case "none":
            yield []


def event_name(event: Event) -> str:
    """`task/agent/attempt` of an event about a rollout."""
    return f"{event['task']}/{event['agent']}/{event['attempt']}"


class EventLines:
    """Events → lines for a person. Phases get none: what is slow shows in the times."""

    def __init__(self) -> None:
        self.finished = 0
        self.planned = 0

    def line(self, event: Event) -> str | None:
        match event["event"]:
            case "job_started":
                self.planned, self.finished = event["planned"], event["done"]
                done = f", {event['done']} of them done already" if event["done"] else ""
                return f"job {event['job']}: {event['planned']} planned{done}"
            case "rollout_finished":
                self.finished += 1
                width = len(str(self.planned))
                cause = f" ({event['cause']})" if event["cause"] else ""
                return (
                    f"{self.finished:>{width}}/{self.planned} {event['outcome']:<14} {event_name(event)} "
                    f"{event['seconds']:.1f} s{cause}"
                )
            case "image_building":
                return f"image {event['number']} of {event['of']}: {event['dockerfile']}"
            case "image_built":
                return f"built in {event['seconds']:.0f} s; the log is {event['log']}"
            case "image_failed":
                hint = " · ".join(str(event["hint"]).splitlines())  # one event, one line
                return f"error: {event['message']}" + (f" (hint: {hint})" if hint else "")
            case "image_pulled":
                return f"pulled {event['image']} in {event['seconds']:.1f} s, {event['bytes'] >> 20} MiB"
            case "image_retried":
                return str(event["message"])
            case "rollout_retried":
                return f"retry {event_name(event)} after {event['outcome']}: {event['cause']}"
            case "job_stopping":
                return f"{event['signal']}: stopping, collecting, cleaning up (again: leave at once)"
            case "oracle_fails":
                return f"stopping: {event['message']} ({', '.join(event['tasks'])})"
            case "job_killed":
                return f"left at once; {len(event['in_flight'])} rollouts were going on"
            case "stalled":
                return f"stalled: {event['rollout']} is over its limit in the phase {event['phase']}"
            case "index_failed":
                return f"the index could not be written: {event['message']} ({event['hint']})"
            case "plan_replaced":
                return "the plan was changed"
            case "job_cancelled":
                return f"job {event['job']} was interrupted"
            case "job_finished":
                return f"job {event['job']} ended"
            case _:
                return None


class _Plain:
    def __init__(self) -> None:
        self.started = time.monotonic()
        self.lines = EventLines()

    def see(self, event: Event) -> None:
        line = self.lines.line(event)
        if line is not None and event["event"] not in ("job_finished", "job_cancelled"):
            say(f"[{time.monotonic() - self.started:6.1f} s] {line}")


class _Board:
    """Counts by outcome, a bar, and what is in flight."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.planned = 0
        self.finished = 0
        self.counts: Counter[str] = Counter()
        self.flying: dict[str, tuple[str, str, float]] = {}
        self.last: list[Text] = []
        self.state = ""

    def see(self, event: Event) -> None:
        match event["event"]:
            case "job_started":
                self.planned, self.finished = event["planned"], event["done"]
            case "phase":
                self.flying[event["rollout"]] = (event_name(event), event["phase"], time.monotonic())
            case "rollout_retried":
                self.flying.pop(event["rollout"], None)
                self._tell(f"retry {event_name(event)}: {event['cause']}", "magenta")
            case "rollout_finished":
                self.flying.pop(event["rollout"], None)
                self.finished += 1
                self.counts[event["outcome"]] += 1
                if event["outcome"] != Outcome.PASSED.value and event["cause"]:
                    text = f"{event['outcome']} {event_name(event)}: {event['cause']}"
                    self._tell(text, COLOURS[event["outcome"]])
            case "job_stopping":
                self.state = "stopping: collecting and cleaning up; Ctrl-C again leaves at once"
            case "stalled" | "index_failed":
                self._tell(EventLines().line(event) or "", "bold red")

    def _tell(self, text: str, style: str) -> None:
        self.last = [*self.last, _one_line(text, style)][-5:]

    def draw(self) -> Group:
        counts = Text("  ").join(
            styled(f"{name} {count}", COLOURS[name]) for name, count in sorted(self.counts.items())
        )
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=max(1, self.planned), completed=self.finished, width=20),
            Text(f"{self.finished}/{self.planned}", no_wrap=True),
            Text(f"{time.monotonic() - self.started:.0f} s", no_wrap=True),
            counts,
        )
        state = [styled(self.state, "yellow")] if self.state else []
        return Group(head, self._in_flight(), *self.last, *state)

    def _in_flight(self) -> Table:
        table = Table.grid(padding=(0, 2))
        flying = list(self.flying.values())
        for name, phase, since in flying[:12]:
            table.add_row(
                _one_line(f"  {phase}", "cyan"), _one_line(name), Text(f"{time.monotonic() - since:.0f} s")
            )
        if len(flying) > 12:
            table.add_row("", _one_line(f"and {len(flying) - 12} more"), "")
        return table


def _one_line(text: str, style: str = "") -> Text:
    line = styled(text, style)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
