"""What a person sees while a job runs: three observers of the same events.

`full` redraws a few lines on a terminal, `plain` prints a line for each thing that happened (for logs and
CI), `json` prints the events themselves, one object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
    """`full` on a terminal, else `plain`."""
    return "full" if sys.stderr.isatty() and not os.environ.get("CI") else "plain"


@contextmanager
def displayed(kind: Display) -> Iterator[list[Observer]]:
    """Observers for a job, drawn until the block ends."""
    match kind:
        case "full":
            board = _Board()
            with Live(
                get_renderable=board.draw,
                console=Console(stderr=True),
                refresh_per_second=8,
                transient=True,
            ):
                yield [board.see]
        case "plain":
            yield [_Plain().see]
        case "json":
            yield [_print_json]
        case "none":
            yield []


def _print_json(event: Event) -> None:
    print(json.dumps(event, default=str), flush=True)


class _Plain:
    """One line an event; a line when nothing has happened for a while is not needed: phases are events."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.finished = 0
        self.planned = 0

    def see(self, event: Event) -> None:
        line = self._line(event)
        if line is not None:
            print(f"[{time.monotonic() - self.started:6.1f} s] {line}", file=sys.stderr, flush=True)

    def _line(self, event: Event) -> str | None:
        match event["event"]:
            case "job_started":
                self.planned, self.finished = event["planned"], event["done"]
                return f"job {event['job']}: {event['planned']} rollouts, {event['done']} done already"
            case "rollout_finished":
                self.finished += 1
                cause = f" ({event['cause']})" if event["cause"] else ""
                name = f"{event['task']}/{event['agent']}/{event['attempt']}"
                return (
                    f"{self.finished}/{self.planned} {event['outcome']:<14} {name} {event['seconds']:.1f} s{cause}"
                )
            case "rollout_retried":
                name = f"{event['task']}/{event['agent']}/{event['attempt']}"
                return f"retry {name}: {event['outcome']}: {event['cause']}"
            case "job_stopping":
                return f"{event['signal']}: stopping, collecting, cleaning up (again: leave at once)"
            case "stalled" | "index_failed" | "job_killed":
                return json.dumps(event, default=str)
            case _:
                return None


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
                name = f"{event['task']}/{event['agent']}/{event['attempt']}"
                self.flying[event["rollout"]] = (name, event["phase"], time.monotonic())
            case "rollout_retried":
                self.flying.pop(event["rollout"], None)
                self._tell(f"retry {event['task']}/{event['agent']}: {event['cause']}", "magenta")
            case "rollout_finished":
                self.flying.pop(event["rollout"], None)
                self.finished += 1
                self.counts[event["outcome"]] += 1
                if event["outcome"] != Outcome.PASSED.value and event["cause"]:
                    name = f"{event['task']}/{event['agent']}/{event['attempt']}"
                    self._tell(f"{event['outcome']} {name}: {event['cause']}", COLOURS[event["outcome"]])
            case "job_stopping":
                self.state = "stopping: collecting and cleaning up; Ctrl-C again leaves at once"
            case "stalled":
                self._tell(f"stalled in {event['phase']}: {event['rollout']}", "bold red")

    def _tell(self, text: str, style: str) -> None:
        self.last = [*self.last, Text(text, style=style, overflow="ellipsis", no_wrap=True)][-5:]

    def draw(self) -> Group:
        seconds = time.monotonic() - self.started
        head = Table.grid(padding=(0, 1))
        counts = Text("  ").join(
            Text(f"{name} {count}", style=COLOURS[name]) for name, count in sorted(self.counts.items())
        )
        head.add_row(
            ProgressBar(total=max(1, self.planned), completed=self.finished, width=30),
            f"{self.finished}/{self.planned}",
            f"{seconds:.0f} s",
            counts,
        )
        flying = Table.grid(padding=(0, 2))
        for name, phase, since in list(self.flying.values())[:12]:
            flying.add_row(Text(f"  {phase:<8}", style="cyan"), name, f"{time.monotonic() - since:.0f} s")
        state = [Text(self.state, style="yellow")] if self.state else []
        return Group(head, flying, *self.last, *state)
