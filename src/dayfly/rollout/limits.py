"""How long each part of a rollout may take, and how much room it needs. Seconds and MiB."""

from __future__ import annotations

from dayfly.model import Healthcheck, Machine, Options, Task, VerifierClass

AGENT_STOP_GRACE_S = 60.0
"""Beyond the agent's own limit, for the guest to kill its processes and hand over the last output."""
STEP_SETUP_GRACE_S = 60.0
"""Beyond the limit of a step's setup.sh, for what comes before and after it."""


def vm_lifetime_s(options: Options, task: Task) -> float:
    """The hard limit of a VM's life: the sum of what its phases may take, and a margin.

    For a task with steps also of the verifiers that work in VMs of their own while the agent's stands still.
    """
    return (
        options.boot_timeout_s
        + max(setup_limit_s(options, task), *(verifier_setup_limit_s(options, s) for s in task.all_steps))
        + agent_limit_s(options, task)
        + sum(
            AGENT_STOP_GRACE_S + collect_limit_s(options, s) + s.verifier_timeout_s + step_setup_limit_s(options, s)
            for s in task.all_steps
        )
        + sum(_beside_limit_s(options, s) for s in task.steps[:-1])
        + options.teardown_timeout_s
        + 120
    )


def _beside_limit_s(options: Options, step: Task) -> float:
    """What a separate verifier's VM may take before and after the verifier itself."""
    image = step.verifier_build_timeout_s if step.verifier_has_own_image else 0.0
    return image + options.boot_timeout_s + verifier_setup_limit_s(options, step) + options.teardown_timeout_s


def agent_limit_s(options: Options, task: Task) -> float:
    """The agent's time in seconds: the job's override, else the task's, else the job's default; over all steps."""
    return sum(
        options.agent_timeout_s or s.agent_timeout_s or options.default_agent_timeout_s for s in task.all_steps
    )


def setup_limit_s(options: Options, task: Task) -> float:
    """The set-up's time, with what the task's health check may take."""
    return options.setup_timeout_s + _healthcheck_limit_s(task.healthcheck)


def verifier_setup_limit_s(options: Options, task: Task) -> float:
    """The same for a separate verifier's VM."""
    return options.setup_timeout_s + _healthcheck_limit_s(verifier_healthcheck(task))


def verifier_healthcheck(task: Task) -> Healthcheck | None:
    """A separate verifier's own; else the task's, if it runs on the task's image."""
    return task.verifier_healthcheck or (None if task.verifier_has_own_image else task.healthcheck)


def step_setup_limit_s(options: Options, step: Task) -> float:
    """The same for what a step begins with, after its setup.sh was stopped at the limit; 0 without steps."""
    if step.step is None:
        return 0.0
    return options.setup_timeout_s + STEP_SETUP_GRACE_S + _healthcheck_limit_s(step.step_healthcheck)


def collect_limit_s(options: Options, task: Task) -> float:
    """The collection's time, with what the collect hooks may take."""
    return options.collect_timeout_s + sum(h.timeout_s for h in task.collect)


def _healthcheck_limit_s(check: Healthcheck | None) -> float:
    if check is None:
        return 0.0
    return check.start_period_s + check.retries * (check.timeout_s + check.interval_s) + check.start_interval_s


def room_for(options: Options, task: Task) -> Machine | None:
    """What must be free on the host, if that is more than the agent's machine.

    The VM of a separate verifier may be larger. Between steps it runs beside the agent's, which stands still
    and keeps its memory; the agent's disk is there in any case.
    """
    judges = [
        (s.verifier_machine or s.machine, number < len(task.steps))
        for number, s in enumerate(task.all_steps, 1)
        if (options.verifier_class or s.verifier_class) is VerifierClass.SEPARATE
    ]
    if not judges:
        return None
    own = task.machine
    return Machine(
        cpus=max(own.cpus, *(m.cpus for m, _ in judges)),
        memory_mib=max(own.memory_mib, *(m.memory_mib + beside * own.memory_mib for m, beside in judges)),
        storage_mib=own.storage_mib + max(m.storage_mib for m, _ in judges),
    )
