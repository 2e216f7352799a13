"""Jobs that their gate stops, on the fake hypervisor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dayfly.errors import ConfigError
from dayfly.evidence import JobFolder
from dayfly.gate.decide import decide
from dayfly.gate.early_stop import recheck
from dayfly.gate.load import LoadedPolicy, load_policy
from dayfly.job import JobResult, Plan, plan_resume, watch_with_gate
from dayfly.model import Outcome
from dayfly.results import load_side
from dayfly.results.side import Side

TASKS = 24
GOOD = "#!fake\nwrite result.txt done\n"
BAD = "#!fake\nprint nothing done\n"
POLICY = "name: strict\nrequire: {isolation: fake}\nmetrics: {score: {margin: %s}}\n"


@pytest.fixture
def tasks(make_task) -> None:
    for number in range(TASKS):
        make_task(f"task-{number:02}")


@pytest.fixture
def policy(tmp_path: Path) -> LoadedPolicy:
    (tmp_path / "gate.yaml").write_text(POLICY % 0.2)
    return load_policy(tmp_path / "gate.yaml")


@pytest.fixture
def plan_agent(tasks: None, tmp_path: Path, plan_job):
    def plan(script: str, name: str = "mine", **settings: Any) -> Plan:
        (tmp_path / f"{name}.sh").write_text(script)
        options = {"files": {f"{name}.sh": "/opt/solve.sh"}, "argv": ["sh", "/opt/solve.sh"]}
        agents = [*settings.pop("beside", []), {"name": name, "kind": "command", "options": options}]
        return plan_job(agents, **{"concurrency": 1, **settings})

    return plan


@pytest.fixture
def load(tmp_path: Path) -> Callable[[JobResult, str], Side]:
    return lambda result, agent: load_side(tmp_path / "jobs", f"{result.job_id}:{agent}")


@pytest.fixture
def baseline(plan_agent, run_fake, load) -> Side:
    result = run_fake(plan_agent(GOOD, "accepted", concurrency=8))
    assert result.exit_code == 0
    return load(result, "accepted")


@pytest.fixture
def run_watched(baseline: Side, policy: LoadedPolicy, plan_agent, run_fake, load):
    def run(script: str, **settings: Any) -> tuple[JobResult, Side, list[dict[str, Any]]]:
        plan = plan_agent(script, **settings)
        watch_with_gate(plan, policy, baseline)
        seen: list[dict[str, Any]] = []
        result = run_fake(plan, observers=[seen.append])
        return result, load(result, "mine"), seen

    return run


def test_a_worse_agent_is_stopped_early(run_watched, baseline, policy, tmp_path):
    result, candidate, seen = run_watched(BAD)
    # 1.5/12 · ((1/0.6)^12 − 1) = 57 ≥ 40 > 37: the eleventh regression in a row is what an error of 2.5 % asks for.
    assert result.gate is not None and (result.gate.kind, result.gate.regressions) == ("blocked", 11)
    assert result.exit_code == 1 and not result.interrupted
    assert sum(r.graded for r in result.records) == 11 < result.planned
    (event,) = [e for e in seen if e["event"] == "gate_stopped"]
    assert (event["regressions"], event["improvements"], event["planned"]) == (11, 0, TASKS)
    assert event["evidence"] >= event["threshold"] == 40
    assert recheck(policy.policy, policy.digest, candidate, baseline) == result.gate
    verdict = decide(policy.policy, candidate, baseline, policy_digest=policy.digest)
    assert (verdict.verdict, verdict.exit_code, verdict.decided_by) == ("fail", 1, "early_stop")


def test_what_was_under_way_is_no_fault(run_watched, baseline, policy):
    result, candidate, _ = run_watched(BAD, concurrency=4)
    assert result.exit_code == 1 and candidate.faults == 0
    assert all(r.graded or r.outcome is Outcome.CANCELLED for r in result.records)
    again = recheck(policy.policy, policy.digest, candidate, baseline)
    assert again is not None and again.kind == "blocked"


def test_an_equal_agent_is_not_stopped(run_watched, baseline, policy):
    result, candidate, seen = run_watched(GOOD, concurrency=8)
    assert (result.gate, result.stopped, result.exit_code) == (None, "", 0)
    assert sum(r.graded for r in result.records) == TASKS
    assert not [e for e in seen if e["event"] == "gate_stopped"]
    assert recheck(policy.policy, policy.digest, candidate, baseline) is None


def test_a_job_that_can_no_longer_decide_is_stopped_as_inconclusive(baseline, plan_agent, run_fake, load, tmp_path):
    """24 tasks cannot show a margin of 2 points, and after 20 equal ones the last 4 cannot show a drop."""
    (tmp_path / "strict.yaml").write_text(POLICY % 0.02)
    strict = load_policy(tmp_path / "strict.yaml")
    plan = plan_agent(GOOD)
    watch_with_gate(plan, strict, baseline)
    result = run_fake(plan)
    assert result.gate is not None and result.gate.kind == "futile"
    assert result.exit_code == 3 and len(result.records) < TASKS
    candidate = load(result, "mine")
    assert recheck(strict.policy, strict.digest, candidate, baseline) == result.gate
    verdict = decide(strict.policy, candidate, baseline, policy_digest=strict.digest)
    assert (verdict.verdict, verdict.exit_code, verdict.decided_by) == ("inconclusive", 3, "early_stop")


def test_the_order_is_the_seeds_and_on_record(run_watched, tmp_path):
    orders = []
    for seed in (1, 1, 2):
        result, _, seen = run_watched(GOOD, seed=seed)
        begun = [e["task"] for e in seen if e["event"] == "rollout_started"]
        recorded = JobFolder.open(tmp_path / "jobs", result.job_id).job()["early_stop"]
        assert begun == recorded["order"] and recorded["seed"] == seed
        orders.append(begun)
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) != orders[0]


def test_terms_are_on_record(run_watched, baseline, policy, tmp_path):
    result, _, _ = run_watched(BAD)
    recorded = JobFolder.open(tmp_path / "jobs", result.job_id).job()["early_stop"]
    assert recorded["policy_digest"] == policy.digest and recorded["policy_name"] == "strict"
    assert recorded["alpha"] == 0.025 and recorded["margin"] == 0.2
    assert recorded["baseline"] == {
        "job": baseline.job_id,
        "agent": "accepted",
        "results_digest": baseline.digest,
    }


def test_controls_go_with_their_task_and_are_no_pairs(run_watched):
    result, _, _ = run_watched(BAD, beside=["oracle", "no-op"])
    assert result.gate is not None and result.gate.pairs == 11
    assert {r.agent for r in result.records} == {"oracle", "no-op", "mine"}
    assert len({r.task for r in result.records}) <= 12


def test_a_stopped_job_that_goes_on_stops_again_at_once(run_watched, baseline, policy, tmp_path, run_fake):
    first, _, _ = run_watched(BAD)
    plan = plan_resume(first.job_id, tmp_path / "jobs")
    watch_with_gate(plan, policy, baseline)
    again = run_fake(plan)
    assert again.exit_code == 1 and again.gate == first.gate and len(again.records) == 11


def test_it_can_go_on_without_looking_and_is_still_blocked(run_watched, baseline, policy, tmp_path, run_fake, load):
    first, _, _ = run_watched(BAD)
    result = run_fake(plan_resume(first.job_id, tmp_path / "jobs"))
    assert result.exit_code == 0 and len(result.records) == TASKS
    whole = load(result, "mine")
    assert whole.early_stop is not None
    assert recheck(policy.policy, policy.digest, whole, baseline) == first.gate.model_copy(
        update={"complete": True}
    )


def test_it_does_not_go_on_with_another_gate(run_watched, baseline, policy, tmp_path):
    first, _, _ = run_watched(BAD)
    plan = plan_resume(first.job_id, tmp_path / "jobs")
    with pytest.raises(ConfigError, match="another gate"):
        watch_with_gate(plan, dataclasses.replace(policy, digest="sha256:other"), baseline)
    with pytest.raises(ConfigError, match="another gate"):
        watch_with_gate(plan, policy, dataclasses.replace(baseline, digest="sha256:other"))


def test_a_job_needs_one_candidate_and_a_common_task(plan_agent, policy, baseline):
    with pytest.raises(ConfigError, match="one candidate"):
        watch_with_gate(
            plan_agent(GOOD, beside=[{"name": "other", "kind": "command", "options": {"argv": ["x"]}}]),
            policy,
            baseline,
        )
    changed = {n: dataclasses.replace(t, task_digest="sha256:other") for n, t in baseline.tasks.items()}
    with pytest.raises(ConfigError, match="no task"):
        watch_with_gate(plan_agent(GOOD), policy, dataclasses.replace(baseline, tasks=changed))


def test_a_policy_without_a_margin_of_the_score_cannot_stop(plan_agent, baseline, tmp_path):
    (tmp_path / "other.yaml").write_text("metrics: {score: {min: 0.5}}\n")
    with pytest.raises(ConfigError, match="no margin of the score"):
        watch_with_gate(plan_agent(GOOD), load_policy(tmp_path / "other.yaml"), baseline)


def test_an_advisory_score_cannot_stop(plan_agent, baseline, tmp_path):
    (tmp_path / "other.yaml").write_text("metrics: {score: {margin: 0.1, tier: advisory}, seconds: {margin: 1}}\n")
    with pytest.raises(ConfigError, match="advisory"):
        watch_with_gate(plan_agent(GOOD), load_policy(tmp_path / "other.yaml"), baseline)


def test_a_baseline_that_gives_no_valid_answer_is_refused_before_the_first_rollout(
    plan_agent, run_fake, policy, baseline
):
    lost = {n: dataclasses.replace(t, marks="i" * len(t.marks)) for n, t in baseline.tasks.items()}
    with pytest.raises(ConfigError, match="that could be compared with is graded"):
        watch_with_gate(plan_agent(GOOD), policy, dataclasses.replace(baseline, tasks=lost))
    stronger = {n: dataclasses.replace(t, isolation=("kvm",)) for n, t in baseline.tasks.items()}
    plan = plan_agent(GOOD)
    watch_with_gate(plan, policy, dataclasses.replace(baseline, tasks=stronger))
    with pytest.raises(ConfigError, match="isolation kvm, and this host gives fake"):
        run_fake(plan)
