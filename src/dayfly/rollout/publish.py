"""From progress to `rollout.json`, sealed and durable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread

import dayfly
from dayfly.errors import VerifierError
from dayfly.model import VERIFIER_CLASS_ORDER, Outcome, RolloutRecord, StepResult, Usage, Verdict, VerifierClass
from dayfly.protocols import AgentResult
from dayfly.rollout.outcomes import UNGRADED, decide
from dayfly.rollout.progress import Progress
from dayfly.verifiers import combine


async def publish(p: Progress) -> RolloutRecord:
    """Seal the evidence and make the folder durable under its final name."""
    verdict = _final_verdict(p)
    outcome, cause, further = decide(verdict, p.failures)
    trusted = verdict if outcome is not Outcome.TAMPERED and outcome not in UNGRADED else None
    keep = p.options.keep_disk
    if keep == "always" or (keep == "failed" and outcome is not Outcome.PASSED):
        p.folder.keep_disk()
    key = p.spec.key
    record = RolloutRecord(
        rollout_id=p.spec.rollout_id,
        job_id=p.spec.job_id,
        task=key.task,
        task_digest=key.task_digest,
        agent=key.agent,
        agent_digest=key.agent_digest,
        attempt=key.attempt,
        retry=p.spec.retry,
        outcome=outcome,
        reward=trusted.reward if trusted else None,
        rewards=trusted.rewards if trusted else {},
        verdict=trusted,
        cause=cause,
        further_causes=further,
        isolation=p.context.hypervisor.isolation,
        verifier_class=_weakest_class(p),
        start_fingerprint=p.fingerprint,
        started_unix=p.started_unix,
        finished_unix=time.time(),
        phases=tuple(p.phases),
        steps=tuple(_step_results(p)),
        usage=_usage(p),
        machine=p.spec.machine,
        vms=tuple(p.vms),
        seed=p.spec.seed,
        dayfly_version=dayfly.__version__,
        image_digest=p.disk.image_digest if p.disk else "",
        disk_digest=p.disk.digest if p.disk else "",
    )
    return await anyio.to_thread.run_sync(p.context.job.publish_rollout, record, p.folder)


def _final_verdict(p: Progress) -> Verdict | None:
    """The only step's, or what the task's strategy makes of the steps'."""
    if p.task is None or not p.task.steps:
        return p.now.verdict if p.steps else None
    try:
        return combine(p.task, [s.verdict for s in p.steps], p.stopped)
    except VerifierError as error:
        p.fail(Outcome.VERIFIER_ERROR, error)
        return None


def _weakest_class(p: Progress) -> VerifierClass:
    """The record's class: the weakest of the steps that were begun, or what was to be."""
    planned = p.options.verifier_class or (p.task.verifier_class if p.task else VerifierClass.SHARED)
    return min((s.verifier_class for s in p.steps), key=VERIFIER_CLASS_ORDER.index, default=planned)


def _step_results(p: Progress) -> Iterator[StepResult]:
    ends = [*(s.failures_before for s in p.steps), len(p.failures)][1:]
    for step, end in zip(p.steps, ends, strict=False):
        if step.task.step is not None:
            result = step.agent_result or AgentResult(exit_code=None)
            yield StepResult(
                name=step.task.step,
                verdict=step.verdict,
                verifier_class=step.verifier_class,
                causes=tuple(cause for _, cause in p.failures[step.failures_before : end]),
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                started_unix=step.started_unix,
                finished_unix=step.finished_unix,
            )


def _usage(p: Progress) -> Usage:
    """Over all steps; what an agent did not say of one step is not known of the whole."""
    results = [s.agent_result for s in p.steps if s.agent_result is not None]

    def total(name: str) -> Any:
        values = [getattr(r, name) for r in results]
        return None if not values or None in values else sum(values)

    return Usage(
        memory_peak_bytes=p.stats.memory_peak_bytes if p.stats else None,
        disk_used_bytes=p.stats.disk_used_bytes if p.stats else None,
        tokens_in=total("tokens_in"),
        tokens_out=total("tokens_out"),
        cost_usd=total("cost_usd"),
    )
