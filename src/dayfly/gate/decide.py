"""The verdict: is there a valid answer at all, and if there is, which.

    any rule of validity does not hold        → invalid
    any critical or supporting rule fails     → fail
    every critical rule passes                → pass
    otherwise                                 → inconclusive

A pure function of recorded results: the same records, policy and day give the same verdict.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Iterator, Sequence

import dayfly
from dayfly.compare import compare_sides, side_facts
from dayfly.compare.model import Comparison
from dayfly.errors import ConfigError
from dayfly.gate.case import Case
from dayfly.gate.cases import task_cases, unjudged_cases
from dayfly.gate.early_stop import recheck
from dayfly.gate.metrics import metric_rules
from dayfly.gate.notices import notices
from dayfly.gate.policy import Policy, Quarantine
from dayfly.gate.tasks import pattern_rules, refuse_foreign_confirmations, task_rules
from dayfly.gate.validity import validity_rules
from dayfly.gate.verdict import EXIT_CODES, NOT_ANSWERED, Answer, GateVerdict, RuleResult
from dayfly.gate.words import plural
from dayfly.results.side import Side

NOTHING_QUARANTINED = Quarantine()


def decide(
    policy: Policy,
    candidate: Side,
    baseline: Side | None = None,
    *,
    policy_digest: str,
    quarantine: Quarantine = NOTHING_QUARANTINED,
    confirm: Sequence[Side] = (),
    today: datetime.date | None = None,
    now_unix: float | None = None,
) -> GateVerdict:
    """Apply a policy to results. `today` (default: now) is what quarantines expire by.

    Raises `ConfigError` for a policy that needs a baseline, and for confirming jobs that confirm something else.
    """
    now = time.time() if now_unix is None else now_unix
    _refuse_without_baseline(policy, baseline)
    refuse_foreign_confirmations(policy, candidate, confirm)
    alpha = final_alpha(policy, candidate)
    quarantined = {e.task for e in quarantine.tasks}
    case = Case(
        policy=policy,
        candidate=candidate,
        baseline=baseline,
        confirm=tuple(confirm),
        quarantine=quarantine,
        comparison=_compare(policy, candidate, baseline, alpha, quarantined),
        stopped=recheck(policy, policy_digest, candidate, baseline, quarantined=quarantined),
        alpha=alpha,
        today=today or datetime.datetime.fromtimestamp(now, datetime.UTC).date(),
    )
    rules = tuple(_rules(case))
    answer, decisive = _combine(rules)
    return GateVerdict(
        verdict=answer,
        exit_code=_exit_code(policy, answer),
        reason=_reason(answer, decisive, rules),
        rules=rules,
        decided_by="" if decisive is None else decisive.id,
        more_rollouts=_more(rules) if answer == "inconclusive" else None,
        policy_name=policy.name,
        policy_digest=policy_digest,
        baseline=None if baseline is None else side_facts(baseline, case.quarantined),
        candidate=side_facts(candidate, case.quarantined),
        tasks=unjudged_cases(case) if answer == "invalid" else task_cases(case, rules),
        quarantined=quarantine.tasks,
        early_stop=case.stopped,
        comparison=case.comparison,
        dayfly_version=dayfly.__version__,
        decided_unix=now,
    )


def final_alpha(policy: Policy, candidate: Side) -> float:
    """A job that was looked at while it ran has spent a part of α on that, whether it stopped or not."""
    return policy.alpha * (1 - policy.early_stop.alpha_share) if candidate.early_stop is not None else policy.alpha


def _refuse_without_baseline(policy: Policy, baseline: Side | None) -> None:
    """A forgotten --baseline must let nothing through: something critical has to be left to decide."""
    rules = policy.metrics.values()
    alone = policy.must_pass or any(
        (r.min is not None or r.max is not None) and r.tier == "critical" for r in rules
    )
    compares = policy.no_regression or any(r.margin is not None and r.tier == "critical" for r in rules)
    if baseline is None and compares and not alone:
        raise ConfigError(
            f"policy {policy.name!r} only compares with a baseline in all that is critical, and none was given",
            hint="name one with --baseline, or give a critical metric a min or max",
        )


def _compare(
    policy: Policy, candidate: Side, baseline: Side | None, alpha: float, quarantined: Iterable[str]
) -> Comparison | None:
    if baseline is None:
        return None
    return compare_sides(
        baseline,
        candidate,
        alpha=alpha,
        margins={name: r.margin for name, r in policy.metrics.items() if r.margin is not None},
        metrics=tuple(policy.metrics),
        allowed=policy.allow_differences,
        cluster_by=policy.cluster_by,
        min_task_coverage=policy.coverage.task,
        quarantined=frozenset(quarantined),
    )


# --- the rules ---------------------------------------------------------------------------------------


def _rules(case: Case) -> Iterator[RuleResult]:
    validity = [*validity_rules(case), *pattern_rules(case)]
    yield from validity
    valid = all(r.answer == "pass" for r in validity)
    for rule in (*_early_stop(case), *metric_rules(case), *task_rules(case)):
        yield rule if valid else _unanswered(rule)
    yield from notices(case)


def _unanswered(rule: RuleResult) -> RuleResult:
    """Of results that are not valid, no figure is named."""
    return RuleResult(id=rule.id, kind=rule.kind, tier=rule.tier, answer="inconclusive", reason=NOT_ANSWERED)


def _early_stop(case: Case) -> Iterator[RuleResult]:
    if (stopped := case.stopped) is None:
        return
    looked = (
        f"{plural(stopped.regressions, 'regression')} and {plural(stopped.improvements, 'improvement')} in the "
        f"first {plural(stopped.pairs, 'task')} of the job's random order"
    )
    if stopped.kind == "blocked":
        answer: Answer = "fail"
        reason = f"worse: {looked}: evidence {stopped.evidence:.3g}, {stopped.threshold:.3g} blocks"
    else:
        answer = "inconclusive"
        reason = f"stopped, as nothing could be decided any more: {looked}"
    tier = case.policy.metrics["score"].tier
    yield RuleResult(id="early_stop", kind="metric", tier=tier, answer=answer, reason=reason)


# --- from rules to one answer ------------------------------------------------------------------------


def _combine(rules: Sequence[RuleResult]) -> tuple[Answer, RuleResult | None]:
    """The answer, and the rule that decided it (None: every critical rule passes)."""
    invalid = [r for r in rules if r.answer == "invalid"]
    if invalid:
        return "invalid", invalid[0]
    failed = [r for r in rules if r.answer == "fail" and r.tier != "advisory"]
    if failed:
        return "fail", min(failed, key=lambda r: r.tier != "critical")
    undecided = [r for r in rules if r.answer == "inconclusive" and r.tier == "critical"]
    if undecided:
        return "inconclusive", undecided[0]
    return "pass", None


def _exit_code(policy: Policy, answer: Answer) -> int:
    if answer != "inconclusive":
        return EXIT_CODES[answer]
    meant: dict[str, Answer] = {"block": "inconclusive", "fail": "fail", "allow": "pass"}
    return EXIT_CODES[meant[policy.on_inconclusive]]


def _reason(answer: Answer, decisive: RuleResult | None, rules: Sequence[RuleResult]) -> str:
    if decisive is not None:
        others = sum(r.answer == answer and r.tier != "advisory" and r is not decisive for r in rules)
        return decisive.reason + (f" (and {plural(others, 'other rule')})" if others else "")
    shown = [r for r in rules if r.kind in ("metric", "tasks") and r.tier == "critical"]
    if not shown:
        return "no critical rule is in the policy, and no supporting one fails"
    return shown[0].reason + (f"; all {len(shown)} critical rules hold" if len(shown) > 1 else "")


def _more(rules: Iterable[RuleResult]) -> int | None:
    """What the rule that needs most of them needs; None when that is not known of one."""
    wanted = [r.more_rollouts for r in rules if r.answer == "inconclusive" and r.tier == "critical"]
    known = [w for w in wanted if w is not None]
    return max(known) if known and len(known) == len(wanted) else None
