"""Verifiers on the fake VM: what they bring, what they keep, and when there is no verdict."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dayfly.errors import ConfigError, LimitError, Tampered, VerifierError
from dayfly.evidence import RolloutFolder
from dayfly.model import Disk, EntryMeta, ExecResult, ImageConfig, Machine, Task
from dayfly.protocols import StartOptions
from dayfly.tasks import load_task
from dayfly.testing import FakeHypervisor
from dayfly.verifiers import CommandVerifier, ScriptVerifier

pytestmark = pytest.mark.anyio

REWARD = "/logs/verifier/reward.txt"


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    def make(script: str, toml: str = "", files: dict[str, str] | None = None) -> Task:
        folder = tmp_path / "task"
        everything = {
            "task.toml": f"[environment]\ndocker_image = 'none'\n{toml}",
            "instruction.md": "Do it.",
            "tests/test.sh": f"#!fake\n{script}\n",
            **(files or {}),
        }
        for name, text in everything.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return load_task(folder, strict=True)

    return make


@pytest.fixture
def record(tmp_path: Path) -> RolloutFolder:
    return RolloutFolder(tmp_path / "work")


@pytest.fixture
def vm_of(tmp_path: Path):
    @asynccontextmanager
    async def start():
        disk = Disk(tmp_path / "none", "sha256:0", ImageConfig(workdir="/app"))
        options = StartOptions(vm_id="v", writable=tmp_path / "disk.json")
        async with FakeHypervisor().start(disk, Machine(), options) as vm:
            await vm.open_verifier_space(["/tests", "/logs/verifier"])
            yield vm

    return start


async def refused(vm_of, task: Task, record: RolloutFolder, verifier: Any = None) -> VerifierError:
    async with vm_of() as vm:
        with pytest.raises(VerifierError) as caught:
            await (verifier or ScriptVerifier({})).verify(vm, task, record)
    return caught.value


async def test_a_script_gives_a_verdict_and_its_output_is_kept(make_task, vm_of, record):
    task = make_task(f"print hello\nwrite {REWARD} 1\nwrite /logs/verifier/ctrf.json {{}}\nexit 3")
    async with vm_of() as vm:
        verdict = await ScriptVerifier({}).verify(vm, task, record)
    assert (verdict.reward, verdict.passed, verdict.rewards) == (1.0, True, {"reward": 1.0})
    assert verdict.exit_code == 3  # recorded, and decides nothing
    assert verdict.details["reward_from"] == "the key reward" and verdict.details["tests_digest"]
    assert (record.folder / "verifier/test-stdout.txt").read_bytes() == b"hello\n"
    assert (record.folder / "verifier/logs/reward.txt").read_bytes() == b"1\n"
    assert (record.folder / "verifier/logs/ctrf.json").exists()


@pytest.mark.parametrize(("reward", "passed"), [("0", False), ("0.49", False), ("0.5", True), ("1", True)])
async def test_the_tasks_threshold_decides(make_task, vm_of, record, reward, passed):
    task = make_task(f"write {REWARD} {reward}", "[dayfly]\npass_reward = 0.5")
    async with vm_of() as vm:
        assert (await ScriptVerifier({}).verify(vm, task, record)).passed is passed


async def test_named_rewards_win_and_a_contradiction_is_noted(make_task, vm_of, record):
    script = f'write {REWARD} 1\nwrite /logs/verifier/reward.json \'{{"reward": 0, "style": 0.5}}\''
    async with vm_of() as vm:
        verdict = await ScriptVerifier({}).verify(vm, make_task(script), record)
    assert verdict.rewards == {"reward": 0.0, "style": 0.5} and not verdict.passed
    assert any("reward.txt" in note for note in record.notes)


@pytest.mark.parametrize(
    ("script", "cause", "words"),
    [
        ("print I forgot", "no_reward", "exit status 0"),
        ("exit 7", "no_reward", "exit status 7"),
        (f"write {REWARD} pass", "malformed_reward", "pass"),
        ("oom", "verifier_oom", "memory"),
    ],
)
async def test_without_a_reward_there_is_no_verdict(make_task, vm_of, record, script, cause, words):
    error = await refused(vm_of, make_task(script), record)
    assert error.cause == cause and words in error.message


async def test_a_timeout_keeps_the_output_and_the_reward_does_not_count(make_task, vm_of, record):
    script = f"print so far\nwrite {REWARD} 1\nwrite /logs/verifier/log x\nsleep 60"
    error = await refused(vm_of, make_task(script, "[verifier]\ntimeout_sec = 0.05"), record)
    assert error.cause == "verifier_timeout"
    assert (record.folder / "verifier/test-stdout.txt").read_bytes() == b"so far\n"
    assert (record.folder / "verifier/logs/log").exists()


async def test_a_script_without_an_interpreter_is_no_verdict(make_task, vm_of, record):
    task = make_task("")
    (task.path / "tests/test.sh").write_text("#!/no/such/interpreter\n")
    task = load_task(task.path, strict=True)
    assert (await refused(vm_of, task, record)).cause == "verifier_not_startable"


async def test_tests_that_changed_since_the_task_was_loaded_do_not_judge(make_task, vm_of, record):
    task = make_task(f"write {REWARD} 0")
    (task.path / "tests/test.sh").write_text(f"#!fake\nwrite {REWARD} 1\n")
    assert (await refused(vm_of, task, record)).cause == "task_changed"


@pytest.mark.parametrize("edit", ["append /tests/expected.txt x", "remove /tests/expected.txt"])
async def test_tests_that_are_changed_while_they_judge_are_a_tampering(make_task, vm_of, record, edit):
    task = make_task(f"{edit}\nwrite {REWARD} 1", files={"tests/expected.txt": "e"})
    async with vm_of() as vm:
        with pytest.raises(Tampered, match=r"expected\.txt"):
            await ScriptVerifier({}).verify(vm, task, record)


async def test_files_added_beside_the_tests_are_fine(make_task, vm_of, record):
    task = make_task(f"write /tests/__pycache__/x y\nwrite {REWARD} 1", files={"tests/deep/er/x": "1"})
    async with vm_of() as vm:
        assert (await ScriptVerifier({}).verify(vm, task, record)).passed


async def test_what_is_left_out_does_not_arrive(make_task, vm_of, record):
    files = {"tests/.harborignore": "draft\n", "tests/draft": "1"}
    task = make_task(f"expect /tests/draft 1\nwrite {REWARD} 1", files=files)
    assert (await refused(vm_of, task, record)).cause == "no_reward"


class Recording:
    """A VM that passes calls on and remembers how programs were run."""

    def __init__(self, vm: Any) -> None:
        self.vm, self.calls, self.metas = vm, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vm, name)

    async def exec(self, argv: Any, **options: Any) -> ExecResult:
        self.calls.append((argv, options))
        return await self.vm.exec(argv, **options)

    async def put(self, source: Any, dest: Any, *, meta: Any = None, **options: Any) -> Any:
        self.metas.append((dest, meta))
        return await self.vm.put(source, dest, meta=meta, **options)


async def test_the_script_runs_by_harbors_contract(make_task, vm_of, record):
    toml = "[verifier]\nuser = 'judge'\ntimeout_sec = 9\nenv = {TOKEN = '${SECRET}', MODE = 'x'}"
    task = make_task(f"write {REWARD} 1", toml)
    async with vm_of() as vm:
        recording = Recording(vm)
        await ScriptVerifier({"SECRET": "s3cret"}).verify(recording, task, record)
    ((argv, options),) = recording.calls
    assert argv == ["/tests/test.sh"]
    assert options["user"] == "judge" and options["timeout_s"] == 9 and options["space"] == "verify"
    assert options["env"] == {"TOKEN": "s3cret", "MODE": "x"} and options.get("cwd") is None
    assert recording.metas == [("/tests", {"test.sh": EntryMeta(mode=0o755)})]
    kept = b"".join(p.read_bytes() for p in record.folder.rglob("*") if p.is_file())
    assert b"s3cret" not in kept


async def test_a_missing_secret_is_found_before_anything_runs(make_task, vm_of, record):
    task = make_task(f"write {REWARD} 1", "[verifier]\nenv = {TOKEN = '${SECRET}'}")
    async with vm_of() as vm:
        with pytest.raises(ConfigError, match="SECRET"):
            await ScriptVerifier({}).verify(vm, task, record)


class HostileGuest(Recording):
    """A guest that answers the request for a reward with something else than a file."""

    def __init__(self, vm: Any, answer: str) -> None:
        super().__init__(vm)
        self.answer = answer

    async def get(self, source: str, dest: Path, **options: Any) -> Any:
        if source != REWARD:
            return await self.vm.get(source, dest, **options)
        match self.answer:
            case "link":
                dest.symlink_to("/etc/hostname")
            case "folder":
                dest.mkdir()
            case "huge":
                raise LimitError("2147483648 bytes are more than 65536")
        return None


@pytest.mark.parametrize("answer", ["link", "folder", "huge", "nothing"])
async def test_only_a_plain_small_file_is_a_reward(make_task, vm_of, record, answer):
    async with vm_of() as vm:
        with pytest.raises(VerifierError) as caught:
            await ScriptVerifier({}).verify(HostileGuest(vm, answer), make_task(f"write {REWARD} 1"), record)
    assert caught.value.cause == "malformed_reward"


# --- the command verifier ------------------------------------------------------------------------

COMMAND = "[dayfly]\nverify = ['/tests/check', '--all']"


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (1, 0.0), (2, 0.0), (125, 0.0)])
async def test_an_exit_status_is_a_verdict(make_task, vm_of, record, status, reward):
    task = make_task("", COMMAND, {"tests/check": f"#!fake\nprint looked\nexit {status}\n"})
    async with vm_of() as vm:
        verdict = await CommandVerifier({}).verify(vm, task, record)
    assert (verdict.reward, verdict.passed, verdict.exit_code) == (reward, status == 0, status)
    assert (record.folder / "verifier/test-stdout.txt").read_bytes() == b"looked\n"


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("oom", "verifier_oom"),
        ("exit 127", "verifier_not_startable"),
        ("exit 126", "verifier_not_startable"),
        ("sleep 60", "verifier_timeout"),
    ],
)
async def test_an_accident_of_the_command_is_no_verdict(make_task, vm_of, record, script, cause):
    toml = "[verifier]\ntimeout_sec = 0.05\n" + COMMAND
    task = make_task("", toml, {"tests/check": f"#!fake\n{script}\n"})
    assert (await refused(vm_of, task, record, CommandVerifier({}))).cause == cause


async def test_a_command_that_is_not_there_is_no_verdict(make_task, vm_of, record):
    task = make_task("", "[dayfly]\nverify = ['/opt/absent']")
    assert (await refused(vm_of, task, record, CommandVerifier({}))).cause == "verifier_not_startable"
