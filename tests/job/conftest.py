"""Small tasks whose scripts the fake hypervisor understands, and jobs over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.job import JobResult, Plan, parse_job, plan_new, run_job
from dayfly.testing import FakeHypervisor

MakeTask = Callable[..., Path]
RunFake = Callable[..., JobResult]

TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = {agent_timeout}
[verifier]
timeout_sec = {verifier_timeout}
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
{artifacts}
[dayfly]
verifier_class = "{verifier_class}"
"""

PASS_IF_DONE = """\
#!fake
write /logs/verifier/reward.txt 0
expect /app/result.txt done
write /logs/verifier/reward.txt 1
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    def make(
        name: str = "write-result",
        *,
        solve: str = "#!fake\nwrite result.txt done\n",
        test: str = PASS_IF_DONE,
        verifier_class: str = "rebooted",
        agent_timeout: float = 30.0,
        verifier_timeout: float = 30.0,
        artifacts: str = "",
    ) -> Path:
        folder = tmp_path / "tasks" / name
        (folder / "environment").mkdir(parents=True)
        (folder / "task.toml").write_text(
            TOML.format(
                verifier_class=verifier_class,
                agent_timeout=agent_timeout,
                verifier_timeout=verifier_timeout,
                artifacts=artifacts,
            )
        )
        (folder / "instruction.md").write_text("Write `done` into result.txt.\n")
        script(folder / "solution/solve.sh", solve)
        script(folder / "tests/test.sh", test)
        return folder

    return make


@pytest.fixture
def plan_job(tmp_path: Path) -> Callable[..., Plan]:
    def make(agents: list[Any] | None = None, **settings: Any) -> Plan:
        job = parse_job(
            {
                "name": "test",
                "tasks": [str(tmp_path / "tasks")],
                "agents": agents or ["oracle", "no-op"],
                "hypervisor": "fake",
                "concurrency": 8,
                **settings,
            },
            "test",
        )
        return plan_new(job, tmp_path, tmp_path / "jobs")

    return make


@pytest.fixture
def run_fake() -> RunFake:
    def run(plan: Plan, hypervisor: FakeHypervisor | None = None, observers: Any = None) -> JobResult:
        return anyio.run(
            lambda: run_job(plan, hypervisor=hypervisor or FakeHypervisor(), observers=observers or [])
        )

    return run
