"""What verifiers share: bringing the tests, running the judge, fetching what it wrote.

All of it happens in the `verify` space, which the rollout opens before it calls a verifier.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from dayfly.errors import GuestRefused, LimitError, Tampered, VerifierError
from dayfly.model import ExecResult, Task
from dayfly.protocols import Record, TransferLimits, Vm
from dayfly.tasks import Selection, digest_of_files, read_task_files, resolve_env, select
from dayfly.verifiers.rewards import MAX_REWARD_BYTES

TESTS = "/tests"
LOGS = "/logs/verifier"
OUTPUT_NAME = "verifier/test-stdout.txt"
LOGS_NAME = "verifier/logs"
REWARD_TXT = "reward.txt"
REWARD_JSON = "reward.json"
LOG_LIMITS = TransferLimits(files=10_000, bytes=256 * 1024**2, file_bytes=256 * 1024**2, depth=16)
CHMOD_TIMEOUT_S = 30.0
RECHECK_BYTES = 64 * 1024**2
"""Tests up to this size are read back after the verifier ended."""


@dataclass(frozen=True)
class Stage:
    """One verification: the VM, the task, and where its evidence goes."""

    vm: Vm
    task: Task
    record: Record
    host_env: Mapping[str, str]

    async def bring_tests(self) -> Tests | None:
        """Put tests/ into /tests. Raises `VerifierError` when the task changed since it was loaded."""
        task = self.task
        if task.tests is None and task.tests_overlay is None:
            return None
        now = await anyio.to_thread.run_sync(read_task_files, task.path)
        if now.digest != task.digest:
            raise VerifierError(
                f"the files of task {task.name} changed while its rollout went on",
                hint="do not edit tasks during a job; then run with --resume",
                cause="task_changed",
            )
        tests = await anyio.to_thread.run_sync(_select_tests, task)
        for layer in tests.layers:
            await self.vm.put(layer.source, TESTS, exclude=layer.excludes, space="verify", meta=layer.meta)
        return tests

    async def allow_to_run(self, path: str) -> None:
        """As Harbor does: a COPY of a script that nobody made executable is one. Running it says what is wrong."""
        with suppress(GuestRefused):  # no chmod in the image
            await self.vm.exec(["chmod", "+x", path], user="root", timeout_s=CHMOD_TIMEOUT_S, space="verify")

    async def run(self, argv: Sequence[str]) -> ExecResult:
        """Run the judge; all it prints goes to `verifier/test-stdout.txt`.

        Raises `VerifierError` with cause `verifier_not_startable`, or `verifier_timeout`; what was printed
        and written until then is kept.
        """
        task = self.task
        env = resolve_env(task.verifier_env, self.host_env)
        async with self.record.sink(OUTPUT_NAME) as sink:
            try:
                result = await self.vm.exec(
                    argv,
                    env=env,
                    user=task.verifier_user,
                    timeout_s=task.verifier_timeout_s,
                    stdout=sink,
                    stderr=sink,
                    space="verify",
                    leave_children=False,
                )
            except GuestRefused as error:
                raise VerifierError(
                    f"the verifier could not be started: {error.message}",
                    hint=error.hint or f"argument list: {list(argv)}; is the interpreter in the image?",
                    cause="verifier_not_startable",
                ) from error
        if result.timed_out:
            await self.fetch_logs()
            raise VerifierError(
                f"the verifier did not end within its {task.verifier_timeout_s:g} s",
                hint=f"see {OUTPUT_NAME}; raise verifier.timeout_sec if it needs longer",
                cause="verifier_timeout",
            )
        return result

    async def fetch_reward(self, name: str) -> bytes | None:
        """A reward file's bytes; None when it is absent. Raises `VerifierError` if it is not a plain file."""
        kept = self.record.folder / LOGS_NAME / name
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        limits = TransferLimits(files=1, bytes=MAX_REWARD_BYTES, file_bytes=MAX_REWARD_BYTES, depth=1)
        try:
            await self.vm.get(f"{LOGS}/{name}", kept, limits=limits, space="verify")
        except LimitError as error:
            raise VerifierError(
                f"the verifier's {name} is longer than {MAX_REWARD_BYTES} bytes, or not a plain file",
                hint=error.message,
                cause="malformed_reward",
            ) from error
        except GuestRefused as error:
            if error.cause == "not_found":
                return None
            raise VerifierError(
                f"the verifier's {name} could not be read: {error.message}", cause="malformed_reward"
            ) from error
        return _read_plain(kept, name)

    async def fetch_logs(self) -> None:
        """Keep the rest of /logs/verifier, as far as it stays within bounds; a lack of it is noted only."""

        def known(name: str) -> bool:
            return name in (REWARD_TXT, REWARD_JSON)

        dest = self.record.folder / LOGS_NAME
        dest.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            await self.vm.get(LOGS, dest, exclude=known, limits=LOG_LIMITS, space="verify")
        except GuestRefused as error:
            self.record.note(f"{LOGS} was not kept whole: {error.message}")

    async def recheck_tests(self, tests: Tests | None) -> None:
        """Read /tests back. Raises `Tampered` when a file of it is not what was put there.

        Nothing of the agent's *processes* can reach /tests, but the judge may run code of the agent.
        """
        if tests is None or not tests.files:
            return
        if await anyio.to_thread.run_sync(lambda: tests.size) > RECHECK_BYTES:
            self.record.note(f"tests/ is larger than {RECHECK_BYTES >> 20} MiB and was not read back")
            return
        wanted = _with_parents(tests)
        with tempfile.TemporaryDirectory(prefix="dayfly-") as made:
            copy = Path(made) / "tests"
            limits = TransferLimits(bytes=2 * RECHECK_BYTES, file_bytes=2 * RECHECK_BYTES)
            try:
                await self.vm.get(
                    TESTS, copy, exclude=lambda name: name.rstrip("/") not in wanted, limits=limits, space="verify"
                )
            except GuestRefused as error:
                raise _tests_changed(error.message) from error
            changed = await anyio.to_thread.run_sync(_differing, tests, copy)
        if changed:
            raise _tests_changed(", ".join(changed[:5]))


def default_host_env(host_env: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if host_env is None else host_env


@dataclass(frozen=True)
class Tests:
    """What was put into /tests: the task's tests and, over them, those of a step."""

    layers: tuple[Selection, ...]

    @property
    def files(self) -> dict[str, str]:
        """Name → digest, as it must be when all layers are there."""
        return {name: digest for layer in self.layers for name, digest in layer.files.items()}

    def source_of(self, name: str) -> Path | None:
        """The host file that /tests/`name` is a copy of."""
        return next((layer.source / name for layer in reversed(self.layers) if name in layer.files), None)

    @property
    def digest(self) -> str:
        """sha256:… over names and contents."""
        return digest_of_files(self.files)

    @property
    def size(self) -> int:
        return sum((layer.source / name).lstat().st_size for layer in self.layers for name in layer.files)


def _select_tests(task: Task) -> Tests:
    folders = [f for f in (task.tests, task.tests_overlay) if f is not None]
    return Tests(tuple(select(f, task=task.path, program="test.sh") for f in folders))


def _tests_changed(what: str) -> Tampered:
    return Tampered(
        f"the tests were changed while the verifier ran: {what}",
        hint="code under test may do that; tests that edit themselves must work on a copy",
        cause="tests_changed",
    )


def _with_parents(tests: Tests) -> set[str]:
    """The names that were put, and the folders on the way to them."""
    names = set(tests.files)
    for name in tests.files:
        parts = name.split("/")[:-1]
        names.update("/".join(parts[:n]) for n in range(1, len(parts) + 1))
    return names


def _differing(tests: Tests, copy: Path) -> list[str]:
    """Names whose content in `copy` is not what was sent. Links are left to the guest's own comparison."""
    got = select(copy).files if copy.is_dir() else {}
    return [
        name
        for name, digest in sorted(tests.files.items())
        if not digest.startswith("link:") and got.get(name) != digest
    ]


def _read_plain(path: Path, name: str) -> bytes | None:
    """Read a fetched file without following a link that the guest may have made of it."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return file.read(MAX_REWARD_BYTES + 1)
    raise VerifierError(
        f"the verifier's {name} is not a plain file",
        hint="a link or folder is no verdict",
        cause="malformed_reward",
    )
