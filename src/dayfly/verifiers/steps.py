"""The rewards of a multi-step task: when to go on, and how the verdicts of the steps become one. Harbor's rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dayfly.model import Task, Verdict
from dayfly.verifiers.rewards import choose_reward


def shortfall(step: Task, verdict: Verdict | None) -> str | None:
    """Why the steps after `step` are not done, or None: a missing reward is below any `min_reward`."""
    rewards: Mapping[str, float] = verdict.rewards if verdict is not None else {}
    for name, wanted in step.min_reward.items():
        if name not in rewards:
            return f"step {step.step}: there is no reward {name!r}, and min_reward asks for {wanted:g}"
        if rewards[name] < wanted:
            return f"step {step.step}: {name} = {rewards[name]:g} is below min_reward {wanted:g}"
    return None


def combine(task: Task, verdicts: Sequence[Verdict | None], stopped: str | None) -> Verdict | None:
    """The verdict of a task from those of its steps that were begun, in order; None when no step has one.

    `mean`: of each named reward the mean over the steps with a verdict, where a step without that name counts
    0. `final`: what the last step that was begun got. A task passes only when every step was done and judged,
    whatever the number says. Raises `VerifierError` when the named rewards do not make one.
    """
    judged = [v for v in verdicts if v is not None]
    if not judged:
        return None
    last = verdicts[-1]
    complete = len(judged) == len(task.steps) and stopped is None
    details = {"reward_from": f"{task.reward_strategy} of {len(judged)} of {len(task.steps)} steps"}
    if stopped is not None:
        details["stopped"] = stopped
    if task.reward_strategy == "final":
        if last is None:
            return None
        reward, rewards = last.reward, dict(last.rewards)
    else:
        names = {name: None for v in judged for name in v.rewards}
        rewards = {n: math.fsum(v.rewards.get(n, 0.0) for v in judged) / len(judged) for n in names}
        reward, _ = choose_reward(rewards, task.reward_range)
    return Verdict(
        reward=reward,
        rewards=rewards,
        passed=complete and reward >= task.pass_reward,
        exit_code=last.exit_code if last is not None else None,
        details=details,
    )
