"""Running an agent's program in the VM, with all it prints kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dayfly.errors import AgentError, GuestRefused, LimitError
from dayfly.model import ExecResult
from dayfly.protocols import AgentResult, Record, Vm

STDOUT_NAME = "agent/stdout.txt"
STDERR_NAME = "agent/stderr.txt"


async def run_program(
    vm: Vm,
    record: Record,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    user: str | None,
    timeout_s: float,
) -> AgentResult:
    """Run `argv` for at most `timeout_s` seconds; its streams go to agent/stdout.txt and agent/stderr.txt.

    Processes that it leaves behind stay: a task may ask for a running server.
    Raises `AgentError` when it cannot be started, so that the verifier still judges what is there.
    """
    async with record.sink(STDOUT_NAME) as stdout, record.sink(STDERR_NAME) as stderr:
        try:
            result = await vm.exec(
                argv, env=env, user=user, timeout_s=timeout_s, stdout=stdout, stderr=stderr, leave_children=True
            )
        except LimitError as error:
            raise AgentError(
                f"the agent's program was not started: {error.message}",
                hint="hand long texts over in a file: {instruction_file} instead of {instruction}",
                cause="argument_too_long",
            ) from error
        except GuestRefused as error:
            raise AgentError(
                f"the agent's program could not be started: {error.message}",
                hint=error.hint or f"{argv[0]!r} must be in the image or among the agent's files",
                cause="agent_not_startable",
            ) from error
    return _as_agent_result(result)


def _as_agent_result(result: ExecResult) -> AgentResult:
    if result.timed_out:
        return AgentResult(exit_code=None, timed_out=True, oom_killed=result.oom_killed, message="out of time")
    if result.signal is not None:
        # As a shell says it: None would read as "no status known", and a killed agent did not end well.
        return AgentResult(
            exit_code=128 + result.signal, oom_killed=result.oom_killed, message=f"ended by signal {result.signal}"
        )
    return AgentResult(exit_code=result.exit_code, oom_killed=result.oom_killed)
