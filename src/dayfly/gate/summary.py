"""A verdict as Markdown for the summary page of a CI job (`$GITHUB_STEP_SUMMARY`) or a merge request.

Names come from agents and tasks. A word is written as it is only when it is made of harmless characters; any
other becomes code, within which Markdown, HTML, links, @mentions and #references mean nothing, and the two
characters that could end code or a cell of a table are written as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dayfly.gate.blocking import blocking_rules, score_sentence
from dayfly.gate.verdict import Answer, GateVerdict, RuleResult, TaskCase
from dayfly.text import visible

LIMIT_BYTES = 900 * 1024 - 1
"""GitHub drops a summary over 1 MiB whole; all steps of a job may add to one."""
_LONGEST_NAME, _LONGEST_SENTENCE = 160, 1200
_TASKS_PER_RULE = 5
_RESERVED = 1024
"""Bytes for each section's title, head and remark, generously."""
_TASK_SECTIONS = (
    ("regressed", "Regressions", False),
    ("failed", "Failed", False),
    ("flaky", "Flaky", False),
    ("left out", "Left out", False),
    ("quarantined", "Not counted, quarantined", True),
    ("improved", "Improved", True),
    ("passed", "Passed", True),
)

_MARKS: dict[Answer, str] = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "invalid": "⚠️"}
_NOTICE = "ℹ️"
_WORDS: dict[Answer, str] = {
    "pass": "passed",
    "fail": "failed",
    "inconclusive": "is inconclusive",
    "invalid": "is invalid",
}
_HARMLESS = re.compile(r"(?:[^\W_]|[.,;()%/+=≥≤±×–—…’'-])+:?")
_LINK = re.compile(r"//|www\.|GH-\d|%\w|(?<!\w)[0-9a-f]{7,}", re.IGNORECASE)
"""What GitHub or GitLab makes a link of wherever it stands: addresses, issues, milestones, commits."""
_SPAN = re.compile(r"(`[^`]+`)")


@dataclass(frozen=True)
class _Section:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    counted: bool = True


def render_summary(verdict: GateVerdict) -> str:
    """Markdown of less than 900 KiB: what decided first, and a remark wherever rows found no room."""
    top, end = _headline(verdict), _digests(verdict)
    sections = list(_sections(verdict))
    room = LIMIT_BYTES - _size(top) - _size(end) - len(sections) * _RESERVED
    parts = [top]
    for section in sections:
        parts.append(_table(section, room))
        room -= _size(parts[-1])
    return "\n".join([*parts, end])


# --- what is said ----------------------------------------------------------------------------------


def _headline(verdict: GateVerdict) -> str:
    mark, word = _MARKS[verdict.verdict], _WORDS[verdict.verdict]
    lines = [
        f"## {mark} Gate {word}",
        f"**Reason:** {prose(verdict.reason)}",
        f"**Score:** {prose(score_sentence(verdict))}",
    ]
    if verdict.verdict == "inconclusive" and verdict.more_rollouts is not None:
        lines.append(f"About {verdict.more_rollouts} more rollouts of the candidate would probably decide.")
    if verdict.early_stop is not None:
        stop = verdict.early_stop
        lines.append(
            f"The candidate's job was stopped early ({stop.kind}) after {stop.pairs} pairs: "
            f"{stop.regressions} regressions, {stop.improvements} improvements."
        )
    lines.append(f"Exit code {verdict.exit_code}.")
    return "\n\n".join(lines) + "\n"


def _sections(verdict: GateVerdict) -> Iterable[_Section]:
    """Failing first; what passed last and folded."""
    yield _rules(verdict)
    by_status: dict[str, list[TaskCase]] = {}
    for case in verdict.tasks:
        by_status.setdefault(case.status, []).append(case)
    for status, title, folded in _TASK_SECTIONS:
        rows = [_task_row(case) for case in by_status.get(status, [])]
        yield _Section(title, ("Task", "Baseline", "Candidate", "Remark"), rows, folded)
        if status == "flaky":
            yield _quarantine(verdict)


def _rules(verdict: GateVerdict) -> _Section:
    blocking = {rule.id for rule in blocking_rules(verdict)}
    rows = [_rule_row(rule, rule.id in blocking) for rule in verdict.rules]
    return _Section("Rules", ("", "Rule", "Tier", "What was found"), rows, counted=False)


def _rule_row(rule: RuleResult, blocks: bool) -> tuple[str, ...]:
    found = prose(rule.reason)
    if blocks and rule.tasks:
        named = " ".join(code(task) for task in rule.tasks[:_TASKS_PER_RULE])
        more = len(rule.tasks) - _TASKS_PER_RULE
        found += f"<br>{named}" + (f" and {more} more" if more > 0 else "")
    tier = rule.tier if blocks or rule.answer == "pass" else f"{rule.tier}, does not block"
    mark = _NOTICE if rule.kind == "notice" else _MARKS[rule.answer]
    return mark, code(rule.id), "" if rule.kind == "notice" else tier, found


def _task_row(case: TaskCase) -> tuple[str, ...]:
    return code(case.task), prose(case.base or "–"), prose(case.candidate or "–"), prose(case.reason)


def _quarantine(verdict: GateVerdict) -> _Section:
    rows = [(code(q.task), prose(q.owner), prose(q.reason), q.expires.isoformat()) for q in verdict.quarantined]
    return _Section("Quarantine", ("Task", "Owner", "Reason", "Expires after"), rows)


def _digests(verdict: GateVerdict) -> str:
    rows = [("Policy", prose(verdict.policy_name), code(verdict.policy_digest))]
    for name, side in (("Baseline", verdict.baseline), ("Candidate", verdict.candidate)):
        if side is not None:
            rows.append((name, f"{code(side.job_id)} {code(side.agent)}", code(side.results_digest)))
    section = _Section("What was decided on", ("", "Which", "Digest"), rows, counted=False)
    return _table(section, LIMIT_BYTES) + f"\ndayfly {prose(verdict.dayfly_version)}\n"


# --- Markdown --------------------------------------------------------------------------------------


def _table(section: _Section, room: int) -> str:
    """As many rows as have room, in bytes; empty when there is nothing to show."""
    if not section.rows:
        return ""
    title = f"{section.title} ({len(section.rows)})" if section.counted else section.title
    opening = f"<details><summary>{title}</summary>\n" if section.folded else f"### {title}\n"
    closing = "\n</details>\n" if section.folded else ""
    lines = [opening, _row(section.head), _row(["---"] * len(section.head))]
    left, shown = room, 0
    for row in map(_row, section.rows):
        left -= _size(row)
        if left < 0:
            break
        lines.append(row)
        shown += 1
    if shown < len(section.rows):
        lines.append(f"\n{len(section.rows) - shown} rows left out for their size; the JUnit report has them all.")
    return "\n".join(lines) + "\n" + closing


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _size(text: str) -> int:
    """Bytes, with the line break that follows."""
    return len(text.encode()) + 1


def code(name: str, most: int = _LONGEST_NAME) -> str:
    """A name as a code span that it cannot end."""
    shown = _clip(name, most).replace("`", "\\x60").replace("|", "\\x7c")
    return f"`{shown}`" if shown.strip() else "(no name)"


def prose(sentence: str) -> str:
    """A sentence in which every word that could mean something in Markdown is code; a command stays whole."""
    parts = _SPAN.split(_clip(sentence, _LONGEST_SENTENCE))
    return "".join(
        code(part[1:-1], _LONGEST_SENTENCE) if number % 2 else _words(part) for number, part in enumerate(parts)
    )


def _words(text: str) -> str:
    """Spaces at the ends stay, as there may be a command beside them."""
    words = [w if not w or (_HARMLESS.fullmatch(w) and not _LINK.search(w)) else code(w) for w in text.split(" ")]
    return re.sub(" +", " ", " ".join(words))


def _clip(text: str, most: int) -> str:
    """The beginning of a text, made visible."""
    shown = visible(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"
