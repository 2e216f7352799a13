"""Which rules and tasks keep the gate shut; every rendering shows the same ones as such."""

from __future__ import annotations

from dayfly.gate.verdict import GateVerdict, RuleResult, TaskCase

_TIERS = ("critical", "supporting", "advisory")


def blocking_rules(verdict: GateVerdict) -> list[RuleResult]:
    """The rules that led to the verdict, the one that decided first. None when the candidate is let through.

    A rule that says `fail` does not block where the verdict is `invalid`: then nothing is shown about the agent.
    """
    if verdict.exit_code == 0:
        return []
    found = [rule for rule in verdict.rules if _blocks(rule, verdict)]
    return sorted(found, key=lambda rule: (rule.id != verdict.decided_by, _TIERS.index(rule.tier)))


def _blocks(rule: RuleResult, verdict: GateVerdict) -> bool:
    if rule.kind == "notice" or rule.tier == "advisory" or rule.answer != verdict.verdict:
        return False
    # A supporting rule blocks when it is shown not to hold, not for lack of evidence.
    return rule.tier == "critical" or rule.answer != "inconclusive"


def blocking_tasks(verdict: GateVerdict) -> list[TaskCase]:
    """The failing tasks that blocking rules are about. Only a verdict on the agent has any."""
    if verdict.exit_code == 0 or verdict.verdict != "fail":
        return []
    named = {task for rule in blocking_rules(verdict) for task in rule.tasks}
    return [case for case in verdict.tasks if case.task in named and case.status in ("regressed", "failed")]


def score_sentence(verdict: GateVerdict) -> str:
    """The score with its coverage, and where there is a baseline, the difference with its interval."""
    side = verdict.candidate
    graded = f"{side.graded} of {side.planned} rollouts graded ({100 * side.coverage:.1f} %)"
    if verdict.verdict == "invalid":
        return f"none, as the results are not valid; {graded}"
    score = "not known" if side.score is None else f"{100 * side.score:.1f} %"
    sentence = f"score {score}, {graded}"
    metric = verdict.comparison.metrics.get("score") if verdict.comparison else None
    if verdict.comparison is None or metric is None:
        return sentence
    if not metric.known or metric.delta is None:
        return f"{sentence}; difference from the baseline not known{': ' + metric.reason if metric.reason else ''}"
    points = f"{100 * metric.delta:+.1f} points"
    if metric.low is not None and metric.high is not None:
        level = 100 * (1 - 2 * verdict.comparison.alpha)
        points += f" ({level:g} % interval {100 * metric.low:+.1f} to {100 * metric.high:+.1f})"
    return f"{sentence}; {points} against the baseline over {metric.tasks} comparable tasks"
