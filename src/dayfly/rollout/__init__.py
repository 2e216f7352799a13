"""One rollout, from task to sealed record. Read `flow.carry_out` first."""

from dayfly.rollout.flow import STEPS_REBOOTED, carry_out, run_rollout
from dayfly.rollout.limits import agent_limit_s, room_for, vm_lifetime_s
from dayfly.rollout.outcomes import decide
from dayfly.rollout.progress import Context, Progress

__all__ = [
    "STEPS_REBOOTED",
    "Context",
    "Progress",
    "agent_limit_s",
    "carry_out",
    "decide",
    "room_for",
    "run_rollout",
    "vm_lifetime_s",
]
