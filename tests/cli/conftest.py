"""The program as a user meets it: in this process for what it prints, as a real one for signals and streams."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dayfly.cli import main

TOML = """\
schema_version = "1.4"
[agent]
{agent}
[verifier]
timeout_sec = 25
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
build_timeout_sec = 77
[dayfly]
verifier_class = "rebooted"
"""
PASS_IF_DONE = """\
#!fake
print judging
write /logs/verifier/reward.txt 0
expect /app/result.txt done
write /logs/verifier/reward.txt 1
"""
SOLVE = "#!fake\nprint working\nwrite result.txt done\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("DAYFLY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    def make(
        name: str = "one", *, solve: str = SOLVE, test: str = PASS_IF_DONE, agent: str = "timeout_sec = 40"
    ) -> Path:
        folder = tmp_path / "tasks" / name
        (folder / "environment").mkdir(parents=True)
        (folder / "task.toml").write_text(TOML.format(agent=agent))
        (folder / "instruction.md").write_text("Write `done` into result.txt.\n")
        for path, text in (("solution/solve.sh", solve), ("tests/test.sh", test)):
            (folder / path).parent.mkdir()
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        return folder

    return make


@pytest.fixture
def run_job(dayfly: Callable[..., Any]) -> Callable[..., str]:
    """Run the tasks of this test on the fake hypervisor; returns the job's id."""

    def run(*args: str) -> str:
        done = dayfly("run", "tasks", "--hypervisor", "fake", "--json", "--display", "none", *args)
        assert done.code in (0, 4), done.err
        return str(done.json["id"])

    return run


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the program as a process of its own; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*args: str, **more: Any) -> subprocess.Popen[bytes]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])} | streams.pop("env", {})
        process = subprocess.Popen([sys.executable, "-m", "dayfly.cli", *args], cwd=tmp_path, env=env, **streams)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def on_terminal(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the program on a terminal of its own, so many columns wide (in a fork: nothing is imported anew)."""

    def call(columns: int, *args: str, env: dict[str, str] | None = None) -> Any:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        child = os.fork()
        if child == 0:
            _be_the_program(theirs, args, {"TERM": "xterm", "CI": "", "COLUMNS": "", "NO_COLOR": ""} | (env or {}))
        os.close(theirs)
        seen = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # EIO: the program closed its side
                break
            if not chunk:
                break
            seen += chunk
        os.close(ours)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return SimpleNamespace(code=code, out=seen.decode("utf-8", "replace").replace("\r\n", "\n"), err="")

    return call


def _be_the_program(terminal: int, args: tuple[str, ...], env: dict[str, str]) -> None:
    code = 99
    try:
        for fd in (0, 1, 2):
            os.dup2(terminal, fd)
        sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), "rww")
        os.environ.update(env)
        sys.argv = ["dayfly", *args]
        signal.alarm(60)  # whatever happens, no test waits for ever
        main()
        code = 0
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_until(what: Callable[[], Any], why: str) -> Any:
    for _ in range(600):
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"never: {why}")


@pytest.fixture
def events_of(tmp_path: Path) -> Callable[[str], Path | None]:
    """The event log of the only job, once it holds `text`."""

    def look(text: str) -> Path | None:
        for path in (tmp_path / "jobs").glob("*/events.jsonl"):
            if text in path.read_text():
                return path
        return None

    return lambda text: wait_until(lambda: look(text), text)
