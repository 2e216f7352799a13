"""A verdict as JUnit XML, in the form that GitLab, Jenkins, Buildkite and Ant's schema all read.

What a CI counts agrees with the exit code: `failure` elements exist when it is 1, `error` elements when it is
3 or 4, and neither when it is 0. Everything else that did not pass is `skipped`, with the reason as its message:
then it is neither lost nor counted against the candidate.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from dayfly.gate.blocking import blocking_rules, blocking_tasks, score_sentence
from dayfly.gate.verdict import GateVerdict, RuleResult, TaskCase
from dayfly.text import visible

_LISTED_TASKS = 50


@dataclass(frozen=True)
class _Case:
    name: str
    kind: Literal["passed", "failure", "error", "skipped"]
    message: str = ""
    details: str = ""
    seconds: float = 0.0


def render_junit(verdict: GateVerdict) -> bytes:
    """One document with the suites `gate rules` and `tasks`; UTF-8."""
    root = ElementTree.Element("testsuites")
    suites = [("gate rules", _rule_cases(verdict), _notes(verdict)), ("tasks", _task_cases(verdict), "")]
    for number, (name, cases, notes) in enumerate(suites):
        root.append(_suite(number, name, cases, notes, verdict))
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


# --- cases -----------------------------------------------------------------------------------------


def _rule_cases(verdict: GateVerdict) -> list[_Case]:
    blocking = {rule.id for rule in blocking_rules(verdict)}
    cases = [_rule_case(rule, rule.id in blocking, verdict) for rule in verdict.rules]
    if verdict.exit_code and not blocking:  # no rule stands for it, such as after an early stop
        cases.insert(0, _Case("verdict", _kind_of(verdict), verdict.reason))
    return cases


def _rule_case(rule: RuleResult, blocks: bool, verdict: GateVerdict) -> _Case:
    if blocks:
        return _Case(rule.id, _kind_of(verdict), rule.reason, _rule_details(rule))
    if rule.answer == "pass":
        return _Case(rule.id, "passed")
    return _Case(rule.id, "skipped", f"{rule.answer} ({rule.tier}), which does not block here: {rule.reason}")


def _kind_of(verdict: GateVerdict) -> Literal["failure", "error"]:
    return "failure" if verdict.exit_code == 1 else "error"


def _rule_details(rule: RuleResult) -> str:
    lines = [rule.reason, f"answer: {rule.answer}", f"tier: {rule.tier}"]
    if rule.more_rollouts is not None:
        lines.append(f"about {rule.more_rollouts} more rollouts would decide")
    lines += [f"task: {task}" for task in rule.tasks[:_LISTED_TASKS]]
    if len(rule.tasks) > _LISTED_TASKS:
        lines.append(f"and {len(rule.tasks) - _LISTED_TASKS} more tasks")
    return _lines(lines)


def _task_cases(verdict: GateVerdict) -> list[_Case]:
    blocking = {case.task for case in blocking_tasks(verdict)}
    return [_task_case(case, case.task in blocking) for case in verdict.tasks]


def _task_case(case: TaskCase, blocks: bool) -> _Case:
    seconds = case.seconds if case.seconds is not None and math.isfinite(case.seconds) else 0.0
    shares = ", ".join(f"{name} {share}" for name, share in _shares(case))
    message = ": ".join(part for part in (case.status, case.reason or shares) if part)
    if case.status in ("passed", "improved"):
        return _Case(case.task, "passed", seconds=seconds)
    if blocks:
        return _Case(case.task, "failure", message, _lines([message, shares]), seconds)
    if case.status in ("regressed", "failed"):
        message = f"{message} (no rule fails for it)"
    return _Case(case.task, "skipped", message, seconds=seconds)


def _shares(case: TaskCase) -> Iterable[tuple[str, str]]:
    if case.base:
        yield "baseline", case.base
    if case.candidate:
        yield "candidate", case.candidate


def _notes(verdict: GateVerdict) -> str:
    """What the suite prints: the verdict, and every rule's sentence, also of those that hold."""
    head = [f"{verdict.verdict} (exit code {verdict.exit_code}): {verdict.reason}", score_sentence(verdict)]
    return _lines([*head, *(f"{rule.answer}: {rule.id}: {rule.reason}" for rule in verdict.rules)])


# --- XML -------------------------------------------------------------------------------------------


def _suite(number: int, name: str, cases: list[_Case], notes: str, verdict: GateVerdict) -> ElementTree.Element:
    counts = {kind: sum(c.kind == kind for c in cases) for kind in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        {
            "name": name,
            "package": "dayfly.gate",
            "id": str(number),
            "timestamp": _utc(verdict.decided_unix),
            "hostname": "localhost",
            "tests": str(len(cases)),
            "failures": str(counts["failure"]),
            "errors": str(counts["error"]),
            "skipped": str(counts["skipped"]),
            "time": f"{math.fsum(c.seconds for c in cases):.3f}",
        },
    )
    suite.append(_properties(verdict))
    suite.extend(_testcase(case, f"dayfly.{name.replace(' ', '-')}") for case in cases)
    ElementTree.SubElement(suite, "system-out").text = notes
    ElementTree.SubElement(suite, "system-err")
    return suite


def _utc(seconds: float) -> str:
    """The schema allows no time zone; this is UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _properties(verdict: GateVerdict) -> ElementTree.Element:
    values = {
        "verdict": verdict.verdict,
        "exit_code": str(verdict.exit_code),
        "decided_by": verdict.decided_by,
        "policy": verdict.policy_name,
        "policy_digest": verdict.policy_digest,
        "candidate": f"{verdict.candidate.job_id}:{verdict.candidate.agent}",
        "candidate_digest": verdict.candidate.results_digest,
        "dayfly": verdict.dayfly_version,
    }
    if verdict.baseline is not None:
        values["baseline"] = f"{verdict.baseline.job_id}:{verdict.baseline.agent}"
        values["baseline_digest"] = verdict.baseline.results_digest
    properties = ElementTree.Element("properties")
    for name, value in values.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": visible(value)})
    return properties


def _testcase(case: _Case, classname: str) -> ElementTree.Element:
    attributes = {
        "classname": classname,
        "name": visible(case.name).strip() or "(no name)",
        "time": f"{case.seconds:.3f}",
    }
    element = ElementTree.Element("testcase", attributes)
    if case.kind == "passed":
        return element
    message = visible(case.message)
    if case.kind == "skipped":
        ElementTree.SubElement(element, "skipped", {"message": message})
    else:
        inside = ElementTree.SubElement(element, case.kind, {"message": message, "type": "dayfly.gate"})
        inside.text = case.details or message
    return element


def _lines(parts: Iterable[str]) -> str:
    """Lines of ours only: a line break within a part is written as an escape."""
    return "\n".join(visible(part) for part in parts if part)
