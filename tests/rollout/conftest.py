"""Real VMs on the demo's base image, through the public API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.evidence import new_rollout_id
from dayfly.job import JobResult, parse_job, plan_new, run_job
from dayfly.model import Machine
from dayfly.protocols import StartOptions, Vm
from dayfly.registry import HypervisorSettings, make_hypervisor

SMALL = Machine(memory_mib=512, storage_mib=1024)


@pytest.fixture(scope="session")
def hypervisor():
    return make_hypervisor("qemu", HypervisorSettings())


@pytest.fixture
def in_vm(base_disk, hypervisor, tmp_path) -> Callable[..., Any]:
    """Run an async function in a fresh VM."""

    def run(work: Callable[[Vm], Awaitable[Any]], machine: Machine = SMALL, **options: Any) -> Any:
        async def main() -> Any:
            vm_id = f"{new_rollout_id()}-t"
            start = StartOptions(vm_id=vm_id, writable=tmp_path / f"{vm_id}.img", workdir="/app", **options)
            with anyio.fail_after(240):
                async with hypervisor.start(base_disk, machine, start) as vm:
                    return await work(vm)

        return anyio.run(main)

    return run


TOML = """\
schema_version = "1.4"
{top}
[agent]
timeout_sec = {agent_timeout}
{agent}
[verifier]
timeout_sec = 60.0
{collect}
[environment]
docker_image = "dayfly/demo-base:latest"
workdir = "/app"
cpus = 1
memory_mb = 512
storage_mb = {storage}
{environment}
[dayfly]
verifier_class = "{verifier_class}"
"""


@pytest.fixture
def make_task(tmp_path, base_disk) -> Callable[..., Path]:
    def make(
        name: str = "write-result",
        *,
        solve: str = "#!/bin/sh\necho done > /app/result.txt\n",
        test: str = '#!/bin/sh\n[ "$(cat /app/result.txt)" = done ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n",
        verifier_class: str = "rebooted",
        agent_timeout: float = 60.0,
        storage: int = 256,
        top: str = "",
        agent: str = "",
        environment: str = "",
        collect: str = "",
    ) -> Path:
        folder = tmp_path / "tasks" / name
        (folder / "environment").mkdir(parents=True)
        (folder / "task.toml").write_text(
            TOML.format(
                top=top,
                agent=agent,
                agent_timeout=agent_timeout,
                environment=environment,
                collect=f'[[verifier.collect]]\ncommand = "{collect}"' if collect else "",
                verifier_class=verifier_class,
                storage=storage,
            )
        )
        (folder / "instruction.md").write_text("Write `done` into result.txt.\n")
        for path, text in (("solution/solve.sh", solve), ("tests/test.sh", test)):
            (folder / path).parent.mkdir()
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        return folder

    return make


@pytest.fixture
def run_job_on_vms(tmp_path) -> Callable[..., JobResult]:
    def run(agents: list[Any], **settings: Any) -> JobResult:
        job = parse_job(
            {"name": "vm", "tasks": [str(tmp_path / "tasks")], "agents": agents, "retries": 0, **settings},
            "test",
        )
        return anyio.run(lambda: run_job(plan_new(job, tmp_path, tmp_path / "jobs")))

    return run
