"""Harbor's contract: tests/test.sh judges, and writes a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dayfly.errors import VerifierError
from dayfly.model import ExecResult, Task, Verdict
from dayfly.protocols import Record, Vm
from dayfly.tasks import script_command
from dayfly.verifiers.rewards import choose_reward, parse_rewards
from dayfly.verifiers.stage import REWARD_JSON, REWARD_TXT, TESTS, Stage, Tests, default_host_env


class ScriptVerifier:
    """Runs /tests/test.sh directly (its first line names the interpreter) and reads /logs/verifier.

    The script's exit status is recorded and decides nothing; only a well-formed reward is a verdict.
    """

    def __init__(self, host_env: Mapping[str, str] | None = None) -> None:
        """`host_env` fills `${VAR}` in the task's verifier.env; default: this process's environment."""
        self._host_env = host_env

    async def verify(self, vm: Vm, task: Task, record: Record) -> Verdict:
        """See `protocols.Verifier`. Raises `VerifierError`; `Tampered` when the tests were changed."""
        stage = Stage(vm, task, record, default_host_env(self._host_env))
        tests = await stage.bring_tests()
        if tests is None:
            await stage.allow_to_run(f"{TESTS}/test.sh")
        ended = await stage.run(_command(tests))
        await stage.fetch_logs()
        text = await stage.fetch_reward(REWARD_TXT)
        named = await stage.fetch_reward(REWARD_JSON)
        try:
            rewards = parse_rewards(text, named)
            reward, rule = choose_reward(rewards, task.reward_range)
        except VerifierError as error:
            raise _with_the_ending(error, ended) from error
        await stage.recheck_tests(tests)
        if named is not None and text is not None and not _agrees(text, rewards):
            record.note(f"reward.json decides; reward.txt says something else: {text[:80]!r}")
        return Verdict(
            reward=reward,
            rewards=rewards,
            passed=reward >= task.pass_reward,
            exit_code=ended.exit_code,
            details=_details(ended, tests, rule),
        )


def _command(tests: Tests | None) -> list[str]:
    script = tests.source_of("test.sh") if tests is not None else None
    return script_command(f"{TESTS}/test.sh", script) if script is not None else [f"{TESTS}/test.sh"]


def _agrees(text: bytes, rewards: Mapping[str, float]) -> bool:
    try:
        return parse_rewards(text, None)["reward"] == rewards.get("reward")
    except VerifierError:
        return False


def _details(ended: ExecResult, tests: Tests | None, rule: str) -> dict[str, Any]:
    details: dict[str, Any] = {"reward_from": rule, "seconds": round(ended.duration_s, 3)}
    if tests is not None:
        details["tests_digest"] = tests.digest
    if ended.signal is not None:
        details["signal"] = ended.signal
    return details


def _with_the_ending(error: VerifierError, ended: ExecResult) -> VerifierError:
    """The same error, saying how the script ended: often the reason why there is no reward."""
    how = f"signal {ended.signal}" if ended.signal is not None else f"exit status {ended.exit_code}"
    memory = ", after the kernel killed a process for want of memory" if ended.oom_killed else ""
    cause = "verifier_oom" if ended.oom_killed and error.cause == "no_reward" else error.cause
    return VerifierError(f"{error.message}; test.sh ended with {how}{memory}", hint=error.hint, cause=cause)
