"""A program of the task's choice judges by its exit status."""

from __future__ import annotations

from collections.abc import Mapping

from dayfly.errors import VerifierError
from dayfly.model import ExecResult, Task, Verdict
from dayfly.protocols import Record, Vm
from dayfly.verifiers.stage import OUTPUT_NAME, Stage, default_host_env

NOT_STARTED = (126, 127)
"""What shells and `env` say when the program that they were to run cannot be."""


class CommandVerifier:
    """`[dayfly] verify = [...]`: exit status 0 passes with reward 1, any other fails with reward 0.

    A signal, a timeout, want of memory, 126 and 127 are no verdict.
    """

    def __init__(self, host_env: Mapping[str, str] | None = None) -> None:
        """`host_env` fills `${VAR}` in the task's verifier.env; default: this process's environment."""
        self._host_env = host_env

    async def verify(self, vm: Vm, task: Task, record: Record) -> Verdict:
        """See `protocols.Verifier`. Raises `VerifierError`; `Tampered` when the tests were changed."""
        assert task.verifier_command is not None
        stage = Stage(vm, task, record, default_host_env(self._host_env))
        tests = await stage.bring_tests()
        ended = await stage.run(task.verifier_command)
        await stage.fetch_logs()
        _refuse_accidents(ended)
        await stage.recheck_tests(tests)
        passed = ended.exit_code == 0
        return Verdict(
            reward=1.0 if passed else 0.0,
            rewards={"reward": 1.0 if passed else 0.0},
            passed=passed,
            exit_code=ended.exit_code,
            details={
                "reward_from": "the exit status",
                "seconds": round(ended.duration_s, 3),
                **({"tests_digest": tests.digest} if tests else {}),
            },
        )


def _refuse_accidents(ended: ExecResult) -> None:
    """An end that says something of the verifier and nothing of the work."""
    if ended.exit_code == 0:
        return
    if ended.oom_killed:
        why, cause = "was killed for want of memory", "verifier_oom"
    elif ended.signal is not None or ended.exit_code is None:
        why, cause = f"was ended by signal {ended.signal}", "verifier_signal"
    elif ended.exit_code in NOT_STARTED:
        why, cause = f"ended with status {ended.exit_code}: a program was not found", "verifier_not_startable"
    else:
        return
    raise VerifierError(f"the verifier {why}", hint=f"see {OUTPUT_NAME}", cause=cause)
