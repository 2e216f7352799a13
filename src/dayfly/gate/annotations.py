"""A verdict as workflow commands of GitHub Actions (`::error title=…::…`), the most important first.

GitHub shows ten annotations of a step and drops the rest without a word, so that the choice is made here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dayfly.gate.blocking import blocking_rules, blocking_tasks, score_sentence
from dayfly.gate.verdict import GateVerdict, TaskCase
from dayfly.text import visible

MOST = 10
_LONGEST_TITLE, _LONGEST_MESSAGE = 120, 1000

Level = Literal["error", "warning", "notice"]


@dataclass(frozen=True)
class _Note:
    level: Level
    title: str
    lines: tuple[str, ...]


def render_annotations(verdict: GateVerdict) -> list[str]:
    """At most ten lines, for standard output of a step."""
    notes = list(_notes(verdict))
    if len(notes) > MOST:
        left = len(notes) - MOST + 1
        notes[MOST - 1 :] = [
            _Note("notice", "gate", (f"{left} more findings are in the summary and the JUnit report",))
        ]
    return [_command(note) for note in notes]


def _notes(verdict: GateVerdict) -> Iterable[_Note]:
    """All that is worth an annotation, by importance: what decided, the tasks behind it, then what only warns."""
    level: Level = "error" if verdict.exit_code in (1, 4) else "warning" if verdict.exit_code else "notice"
    blocking = blocking_rules(verdict)
    yield _Note(level, f"gate: {verdict.verdict}", (verdict.reason, score_sentence(verdict)))
    said = {verdict.decided_by} if verdict.decided_by else set()
    for rule in blocking:
        if rule.id not in said:
            yield _Note(level, f"gate: {rule.id}", (rule.reason,))
    tasks = blocking_tasks(verdict)
    for case in tasks:
        yield _Note("error", f"{case.status}: {case.task}", (_task_message(case),))
    yield from _warnings(verdict, {rule.id for rule in blocking} | said, {case.task for case in tasks})


def _warnings(verdict: GateVerdict, rules: set[str], tasks: set[str]) -> Iterable[_Note]:
    for rule in verdict.rules:
        if rule.answer != "pass" and rule.id not in rules:
            yield _Note("warning", f"gate: {rule.id}: {rule.answer} ({rule.tier})", (rule.reason,))
    for case in verdict.tasks:
        if case.status == "regressed" and case.task not in tasks:
            yield _Note("warning", f"regressed: {case.task}", (_task_message(case),))


def _task_message(case: TaskCase) -> str:
    shares = [
        f"{name} {share}" for name, share in (("baseline", case.base), ("candidate", case.candidate)) if share
    ]
    return "; ".join(part for part in (case.reason, ", ".join(shares)) if part) or case.status


# --- workflow commands -----------------------------------------------------------------------------


def _command(note: _Note) -> str:
    title = _clip(note.title, _LONGEST_TITLE)
    # Line breaks of ours stay breaks; those within names have been written as escapes.
    message = "\n".join(_clip(line, _LONGEST_MESSAGE) for line in note.lines if line) or title
    return f"::{note.level} title={_escape_property(title)}::{_escape(message)}"


def _clip(text: str, most: int) -> str:
    """The beginning of a text, made visible."""
    shown = visible(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
