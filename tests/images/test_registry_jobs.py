"""Jobs over images of a registry: a fault of it is never a score, and a tag that moves changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.cli.display import EventLines
from dayfly.errors import NeedsDecision, NotFoundError
from dayfly.evidence import JobFolder
from dayfly.images import ImageStore, PullLimits, Registries
from dayfly.images.tar import Entry, Kind, write_tar
from dayfly.job import JobResult, Plan, parse_job, plan_new, plan_resume, refuse_drift, run_job
from dayfly.report import summarise
from dayfly.testing import FakeHypervisor

TOML = """\
[environment]
docker_image = "{image}"
[dayfly]
verifier_class = "rebooted"
"""
Make = Callable[..., Path]
Run = Callable[..., JobResult]


def layer(name: str) -> bytes:
    return write_tar((Entry(b"", Kind.DIR), b""), (Entry(name.encode(), Kind.FILE, size=1), b"x"))


@pytest.fixture
def make_task(tmp_path: Path) -> Make:
    def make(name: str, image: str) -> Path:
        folder = tmp_path / "tasks" / name
        (folder / "tests").mkdir(parents=True)
        (folder / "task.toml").write_text(TOML.format(image=image))
        (folder / "instruction.md").write_text("Do it.\n")
        (folder / "tests/test.sh").write_text("#!fake\nwrite /logs/verifier/reward.txt 1\n")
        return folder

    return make


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", architecture="amd64")


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(**settings: Any) -> Plan:
        data = {"tasks": ["tasks"], "agents": ["no-op"], "hypervisor": "fake", "concurrency": 4} | settings
        return plan_new(parse_job(data, "test"), tmp_path, tmp_path / "jobs")

    return make


@pytest.fixture
def run(store: ImageStore) -> Run:
    def go(plan: Plan, events: list[Any] | None = None) -> JobResult:
        async def work() -> JobResult:
            return await run_job(
                plan,
                hypervisor=FakeHypervisor(),
                observers=[events.append] if events is not None else [],
                own_signals=False,
                image_store=store,
                registries=Registries(PullLimits(pause_s=0.01, breaker_failures=4)),
            )

        return anyio.run(work)

    return go


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"status": 429, "headers": {"Retry-After": "0"}}, "registry_rate_limited"),
        ({"status": 503}, "registry_unavailable"),
    ],
    ids=["429", "503"],
)
def test_a_failing_registry_is_no_score(
    registry: Any, front: Any, use: Any, make_task: Make, plan: Any, run: Run, fault: dict[str, Any], cause: str
) -> None:
    use(front.host, registry.host)
    for number in range(6):
        make_task(f"bad-{number}", f"{front.host}/bad/{number}:1")
    registry.push("good/g:1", [layer("g")])
    make_task("good", f"{registry.host}/good/g:1")
    front.fault("/manifests/", **fault)
    wanted = plan(retries=1)
    result = run(wanted)
    records = {r.task: r for r in result.records}
    bad = [records[f"bad-{n}"] for n in range(6)]
    assert {(r.outcome.value, r.cause.kind if r.cause else "") for r in bad} == {("infra_error", cause)}
    assert records["good"].outcome.value == "passed"
    figures = summarise(wanted.planned_by_agent, result.records).agents[0]
    assert (figures.planned, figures.graded, figures.score) == (7, 1, 1.0)
    assert result.exit_code == 4


def test_rollouts_of_a_failing_registry_end_without_asking_it(
    front: Any, use: Any, make_task: Make, plan: Any, run: Run
) -> None:
    use(front.host)
    for number in range(12):
        make_task(f"bad-{number}", f"{front.host}/bad/{number}:1")
    front.fault("/manifests/", status=503)
    run(plan(retries=2))
    asked = sum("/manifests/" in line for line in front.asked)
    assert asked <= 4 + 3  # the breaker's four failures, and what was under way then


def test_a_tag_that_moves_does_not_matter_to_its_job(
    registry: Any, use: Any, make_task: Make, plan: Any, run: Run, tmp_path: Path, store: ImageStore
) -> None:
    use(registry.host)
    name = f"{registry.host}/moving/m:1"
    old = registry.push("moving/m:1", [layer("old")])
    make_task("moving", name)
    started = plan(attempts=1)
    assert run(started).records[0].image_digest == old
    folder = JobFolder.open(tmp_path / "jobs", started.job_id)
    assert folder.lock_data()["images"] == {name: old}

    new = registry.push("moving/m:1", [layer("new")])
    assert store.pull(name, policy="always").digest == new
    shutil.rmtree(tmp_path / "jobs" / started.job_id / "rollouts")
    again = plan_resume(started.job_id, tmp_path / "jobs")
    refuse_drift(again, accept=False)
    assert [r.image_digest for r in run(again).records] == [old]
    assert plan().job_file.pull == "missing"
    assert run(plan()).records[0].image_digest == new


def test_an_image_that_is_gone_needs_a_decision(
    registry: Any, use: Any, make_task: Make, plan: Any, run: Run, tmp_path: Path, store: ImageStore
) -> None:
    use(registry.host)
    name = f"{registry.host}/gone/g:1"
    registry.push("gone/g:1", [layer("old")])
    layout = registry.folder / f"layout-{registry.count}"
    store.import_image(layout, f"{registry.host}/local/only:1")
    make_task("gone", name.replace("gone/g", "local/only"))
    started = plan()
    run(started)
    registry.push("gone/g:2", [layer("new")])
    store.import_image(registry.folder / f"layout-{registry.count}", f"{registry.host}/local/only:1")
    store.prune()
    shutil.rmtree(tmp_path / "jobs" / started.job_id / "rollouts")
    again = plan_resume(started.job_id, tmp_path / "jobs")
    with pytest.raises(NeedsDecision, match="local/only"):
        run(again)
    refuse_drift(again, accept=True)
    assert run(again).records[0].outcome.value == "passed"


def test_an_image_that_comes_late_is_used_and_locked(
    registry: Any, front: Any, use: Any, make_task: Make, plan: Any, run: Run, tmp_path: Path
) -> None:
    use(front.host)
    digest = registry.push("late/l:1", [layer("late")])
    name = f"{front.host}/late/l:1"
    make_task("late", name)
    front.fault("/blobs/", status=503)
    started = plan(retries=0)
    assert run(started).records[0].outcome.value == "infra_error"
    # The tag was resolved all the same, and a resumed job goes on with what it was.
    assert JobFolder.open(tmp_path / "jobs", started.job_id).lock_data()["images"] == {name: digest}
    front.faults.clear()
    registry.push("late/l:1", [layer("later")])
    again = run(plan_resume(started.job_id, tmp_path / "jobs"))
    assert [(r.outcome.value, r.image_digest) for r in again.records] == [("passed", digest)]


def test_an_image_that_must_not_be_pulled_stops_the_job(
    registry: Any, use: Any, make_task: Make, plan: Any, run: Run, tmp_path: Path
) -> None:
    use(registry.host)
    registry.push("closed/c:1", [layer("c")])
    make_task("closed", f"{registry.host}/closed/c:1")
    with pytest.raises(NotFoundError, match="closed/c"):
        run(plan(pull="never"))
    assert not (tmp_path / "jobs").exists()


def test_what_is_pulled_is_told(registry: Any, use: Any, make_task: Make, plan: Any, run: Run) -> None:
    use(registry.host)
    registry.push("told/t:1", [layer("t")])
    make_task("told", f"{registry.host}/told/t:1")
    make_task("absent", f"{registry.host}/told/absent:1")
    events: list[dict[str, Any]] = []
    run(plan(retries=0), events)
    kinds = {e["event"]: e for e in events}
    assert kinds["image_pulled"]["image"] == f"{registry.host}/told/t:1" and kinds["image_pulled"]["bytes"] > 0
    assert kinds["image_failed"]["image"] == f"{registry.host}/told/absent:1"
    told = EventLines().line(kinds["image_failed"] | {"hint": "one\ntwo"})
    assert told is not None and told.endswith("(hint: one · two)")
