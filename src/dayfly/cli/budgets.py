"""What each phase of a rollout may take, as `run --dry-run` prints it (no limit is hidden).

tests/cli compares these figures with what a rollout is really given.
"""

from __future__ import annotations

from dataclasses import dataclass

from dayfly.model import Options, Task
from dayfly.rollout.limits import AGENT_STOP_GRACE_S, agent_limit_s, vm_lifetime_s

START_GRACE_S = 30.0
VERIFIER_STOP_GRACE_S = 60.0


@dataclass(frozen=True)
class Budget:
    """Seconds for the work of a phase, and for the phase with its own clean-up."""

    work_s: float
    limit_s: float


def budgets(options: Options, task: Task) -> dict[str, Budget]:
    """Phase → budget, top-down; `vm` is after how long a VM is killed from outside, whatever happened."""
    return {
        "image": _plain(task.build_timeout_s),
        "boot": Budget(options.boot_timeout_s, options.boot_timeout_s + START_GRACE_S),
        "setup": _plain(options.setup_timeout_s),
        "agent": Budget(agent_limit_s(options, task), agent_limit_s(options, task) + AGENT_STOP_GRACE_S),
        "collect": _plain(options.collect_timeout_s),
        "verify": Budget(task.verifier_timeout_s, task.verifier_timeout_s + VERIFIER_STOP_GRACE_S),
        "teardown": _plain(options.teardown_timeout_s),
        "vm": _plain(vm_lifetime_s(options, task)),
    }


def _plain(seconds: float) -> Budget:
    return Budget(seconds, seconds)


def shown(budget: Budget) -> str:
    """`90s`, or `90s+60s` where a phase has time for its own clean-up."""
    rest = budget.limit_s - budget.work_s
    return short_duration(budget.work_s) + (f"+{short_duration(rest)}" if rest else "")


def short_duration(seconds: float) -> str:
    """`90s`, `15m`, `1h30m`."""
    whole = round(seconds)
    if whole < 120 or abs(whole - seconds) > 1e-9:
        return f"{seconds:g}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return "".join(f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if n)
