"""The demo job in real microVMs: what its agents get, and the reference solutions in every verifier class."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from dayfly.job import load_job_file, plan_new, run_job
from dayfly.model import Disk, Outcome, RolloutRecord, VerifierClass

pytestmark = [pytest.mark.vm, pytest.mark.slow]

DEMO = Path(__file__).parents[2] / "examples" / "demo"
SCRIPTED = {
    "csv-to-json": (Outcome.PASSED, 1),
    "find-file": (Outcome.PASSED, 1),
    "fix-config": (Outcome.PASSED, 1),
    "fix-failing-test": (Outcome.PASSED, 1),
    "log-analysis": (Outcome.FAILED, 0.6667),
    "merge-patch": (Outcome.AGENT_ERROR, 0),
    "migrate-sqlite": (Outcome.FAILED, 0.3333),
    "parallel-checksums": (Outcome.PASSED, 1),
    "query-sqlite": (Outcome.PASSED, 1),
    "repair-git-history": (Outcome.FAILED, 0),
    "serve-sums": (Outcome.PASSED, 1),
    "write-shell-tool": (Outcome.FAILED, 0.75),
}
TASKS = sorted(SCRIPTED)
STRICTER = [(task, verifier_class) for task in TASKS if task != "serve-sums" for verifier_class in VerifierClass]


def run_demo(jobs_dir: Path, **changes: object) -> list[RolloutRecord]:
    job = load_job_file(DEMO / "job.yaml").model_copy(update={"attempts": 1, "retries": 0, **changes})
    return anyio.run(lambda: run_job(plan_new(job, DEMO, jobs_dir))).records


def explain(record: RolloutRecord) -> str:
    return f"{record.task} {record.agent} {record.verifier_class.value}: {record.outcome.value} {record.cause}"


@pytest.fixture(scope="module")
def demo(base_disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> list[RolloutRecord]:
    """The demo job as it is, with one attempt."""
    return run_demo(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def by_class(
    base_disk: Disk, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, VerifierClass], RolloutRecord]:
    """The oracle in each verifier class, whatever a task says."""
    oracle = [agent for agent in load_job_file(DEMO / "job.yaml").agents if agent.name == "oracle"]
    jobs_dir = tmp_path_factory.mktemp("jobs")
    found = {}
    for verifier_class in VerifierClass:
        tasks = [f"tasks/{task}" for task, wanted in STRICTER if wanted is verifier_class]
        for record in run_demo(jobs_dir, tasks=tasks, agents=oracle, verifier_class=verifier_class):
            found[record.task, verifier_class] = record
    return found


@pytest.mark.parametrize("task", TASKS)
def test_the_three_agents_get_what_they_deserve(demo: list[RolloutRecord], task: str) -> None:
    ended = {record.agent: record for record in demo if record.task == task}
    assert ended["oracle"].outcome is Outcome.PASSED, explain(ended["oracle"])
    assert ended["no-op"].outcome is Outcome.FAILED, explain(ended["no-op"])
    scripted = ended["scripted"]
    assert (scripted.outcome, scripted.reward) == SCRIPTED[task], explain(scripted)


@pytest.mark.parametrize("task", TASKS)
def test_rollouts_of_a_task_start_equal(demo: list[RolloutRecord], task: str) -> None:
    prints = [record.start_fingerprint for record in demo if record.task == task]
    assert len(prints) == 3
    assert len({found.digest for found in prints if found is not None}) == 1


@pytest.mark.parametrize(("task", "verifier_class"), STRICTER)
def test_the_solution_passes_in_every_class(
    by_class: dict[tuple[str, VerifierClass], RolloutRecord], task: str, verifier_class: VerifierClass
) -> None:
    record = by_class[task, verifier_class]
    assert record.outcome is Outcome.PASSED, explain(record)
