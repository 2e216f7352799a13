"""Runs the demo tasks without VMs: the base image's files under bubblewrap, one sandbox for one VM.

This is for trying tasks and their verifiers quickly; it protects nothing, and it is not how dayfly runs them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
TIMEOUT_S = 120


@dataclass
class Sandbox:
    """One machine: a folder for each place that can be written, and commands run in it one after the other."""

    image: Path
    folder: Path
    cpus: int = 1
    commands: list[str] = field(default_factory=list)

    WRITABLE = ("app", "home/dev", "root", "tmp", "logs", "tests", "solution", "opt")

    def __post_init__(self) -> None:
        for name in self.WRITABLE:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("agent", "artifacts", "verifier"):
            (self.folder / "logs" / name).mkdir(exist_ok=True)
            (self.folder / "logs" / name).chmod(0o777)
        (self.folder / "tmp").chmod(0o1777)
        os.chown(self.folder / "home/dev", 1000, 1000)

    def add(self, command: str, user: str = "root") -> None:
        """Plan a shell command; its exit status goes to `status` of the run."""
        drop = "" if user == "root" else f"setpriv --reuid={user} --regid={user} --init-groups "
        home = "/root" if user == "root" else f"/home/{user}"
        self.commands.append(f"HOME={home} {drop}/bin/sh -c {shlex.quote(command)}; echo $? >>/opt/status")

    def run(self) -> list[int]:
        """Do what was planned, in one sandbox; processes left behind stay until the last command has ended."""
        (self.folder / "opt/status").write_text("")
        argv = ["taskset", "-c", f"0-{self.cpus - 1}", "bwrap", "--ro-bind", str(self.image), "/"]
        for name in self.WRITABLE:
            argv += ["--bind", str(self.folder / name), f"/{name}"]
        argv += ["--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        argv += ["--die-with-parent", "--cap-add", "ALL", "--chdir", "/app", "--clearenv"]
        argv += ["--setenv", "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        done = subprocess.run(
            [*argv, "/bin/bash", "-c", "\n".join(self.commands)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
        (self.folder / "output.txt").write_bytes(done.stdout)
        self.commands.clear()
        return [int(word) for word in (self.folder / "opt/status").read_text().split()]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")


@dataclass
class Bench:
    """Works a task through as one agent and one verifier class would have it."""

    image: Path
    folder: Path
    break_tests: str = "true"

    def rollout(
        self,
        task: str,
        agent: str,
        verifier_class: str | None = None,
        files: dict[str, bytes] | None = None,
        break_tests: str = "true",
    ) -> tuple[float | None, str]:
        """(reward, all output); the reward is None when the verifier left none.

        `agent` is a shell command; `files` (path below /opt → content) are brought along, /solution is there.
        `break_tests` is a command that runs when the tests are in place.
        """
        self.break_tests = break_tests
        path = DEMO / "tasks" / task
        config = tomllib.loads((path / "task.toml").read_text())
        used = verifier_class or config["dayfly"]["verifier_class"]
        first = self._machine(path, config, "first")
        shutil.copytree(path / "solution", first.folder / "solution", dirs_exist_ok=True)
        for name, data in (files or {}).items():
            (first.folder / "opt" / name).parent.mkdir(parents=True, exist_ok=True)
            (first.folder / "opt" / name).write_bytes(data)
        (first.folder / "opt/instruction.md").write_bytes((path / "instruction.md").read_bytes())
        export = "export DAYFLY_INSTRUCTION_FILE=/opt/instruction.md; "
        first.add(export + agent, config.get("agent", {}).get("user", "root"))
        if used == "shared":
            return self._verify(path, config, first)
        first.run()
        if used == "rebooted":
            return self._verify(path, config, first)
        second = self._machine(path, config, "second")
        second.run()
        for artifact in config["artifacts"]:
            source, dest = first.folder / artifact.lstrip("/"), second.folder / artifact.lstrip("/")
            dest.unlink(missing_ok=True)
            if source.is_file():
                shutil.copy2(source, dest, follow_symlinks=False)
                os.chown(dest, source.stat().st_uid, source.stat().st_gid)
        return self._verify(path, config, second)

    def _machine(self, task: Path, config: dict[str, Any], name: str) -> Sandbox:
        machine = Sandbox(self.image, self.folder / name, config["environment"]["cpus"])
        if (task / "environment").exists():
            shutil.copytree(task / "environment", machine.folder / "app", dirs_exist_ok=True)
        if check := config["environment"].get("healthcheck"):
            machine.add(check["command"])
        return machine

    def _verify(self, task: Path, config: dict[str, Any], machine: Sandbox) -> tuple[float | None, str]:
        hidden = machine.folder / "opt" / "hidden"
        shutil.copytree(task / "tests", hidden)
        machine.add("cp -r /opt/hidden/. /tests && rm -rf /opt/hidden && rm -f /logs/verifier/reward.*")
        machine.add(self.break_tests)
        command = config["dayfly"].get("verify")
        machine.add(shlex.join(command) if command else "/tests/test.sh")
        status = machine.run()[-1]
        if command:
            return {0: 1.0, 1: 0.0}.get(status), machine.output
        return _read_reward(machine.folder / "logs/verifier"), machine.output


def _read_reward(folder: Path) -> float | None:
    if (folder / "reward.json").exists():
        return float(json.loads((folder / "reward.json").read_text())["reward"])
    if (folder / "reward.txt").exists():
        return float((folder / "reward.txt").read_text())
    return None


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the demo's base image, unpacked once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    archive = cache / "dayfly/base/demo-base.tar"
    if not archive.exists():
        pytest.skip(f"{archive} is not there; scripts/build-base-image makes it")
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("trying tasks without VMs needs root and bubblewrap")
    root = tmp_path_factory.mktemp("image")
    subprocess.run(["tar", "-xf", archive, "-C", root], check=True, timeout=TIMEOUT_S)
    for name in Sandbox.WRITABLE:
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture
def bench(image_root: Path, tmp_path: Path) -> Bench:
    return Bench(image_root, tmp_path)
