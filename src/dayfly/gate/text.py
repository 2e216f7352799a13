"""The verdict as lines for a terminal. Names in them are as given: the writer makes them harmless."""

from __future__ import annotations

from collections.abc import Iterator

from dayfly.gate.verdict import Answer, GateVerdict, RuleResult

MARKS: dict[Answer, str] = {"pass": "✓", "fail": "✗", "inconclusive": "?", "invalid": "✗"}
NEXT: dict[Answer, str] = {
    "pass": "let it through",
    "fail": "see what changed with `dayfly compare` and `dayfly logs`",
    "inconclusive": "run more tasks or attempts (`dayfly plan` says how many), or confirm what is not known",
    "invalid": "mend what the first ✗ names and run again; nothing is said about the candidate",
}


def render_text(verdict: GateVerdict) -> list[str]:
    """Sides, a line for each rule, the verdict, why, and what to do next."""
    return [*_sides(verdict), "", *map(_rule, verdict.rules), "", *_verdict(verdict)]


def _sides(verdict: GateVerdict) -> Iterator[str]:
    for name, side in (("baseline", verdict.baseline), ("candidate", verdict.candidate)):
        if side is not None:
            yield f"{name:<9} {side.job_id}:{side.agent}  {side.graded} of {side.planned} rollouts graded"
    yield f"policy    {verdict.policy_name} {verdict.policy_digest[:19]}…"


def _rule(rule: RuleResult) -> str:
    reason = rule.reason.removeprefix(f"{rule.id}: ")
    if rule.kind == "notice":
        return f"· {rule.id}: {reason}"
    tier = "" if rule.tier == "critical" else f" ({rule.tier})"
    return f"{MARKS[rule.answer]} {rule.id}{tier}: {reason}"


def _verdict(verdict: GateVerdict) -> Iterator[str]:
    yield f"{verdict.verdict.upper()}: {verdict.reason}"
    if verdict.more_rollouts is not None:
        yield f"about {verdict.more_rollouts} more rollouts of the candidate would probably decide all of it"
    if verdict.verdict == "inconclusive" and verdict.exit_code == 0:
        yield "the policy lets an inconclusive candidate through"
    yield f"next: {_next(verdict)}"


def _next(verdict: GateVerdict) -> str:
    """What to do; a policy can make an inconclusive candidate one that is let through."""
    return NEXT["pass" if verdict.exit_code == 0 else verdict.verdict]
