"""How a rollout ends: each outcome of the design, provoked on the fake hypervisor."""

from __future__ import annotations

import json

import pytest

from dayfly.errors import BootError, GuestLost
from dayfly.evidence import JobFolder, verify_folder
from dayfly.model import Cause, Outcome, Verdict
from dayfly.protocols import StartOptions
from dayfly.rollout import decide
from dayfly.testing import FakeHypervisor

CLASSES = ["shared", "rebooted", "separate"]
RESULT = '[[artifacts]]\nsource = "/app/result.txt"\n'


def artifacts_for(verifier_class: str) -> str:
    return RESULT if verifier_class == "separate" else ""


@pytest.mark.parametrize("verifier_class", CLASSES)
def test_oracle_passes_and_doing_nothing_fails(make_task, plan_job, run_fake, verifier_class):
    make_task(verifier_class=verifier_class, artifacts=artifacts_for(verifier_class))
    result = run_fake(plan_job())
    assert {(r.agent, r.outcome) for r in result.records} == {
        ("oracle", Outcome.PASSED),
        ("no-op", Outcome.FAILED),
    }
    assert {r.verifier_class.value for r in result.records} == {verifier_class}
    assert result.exit_code == 0


def test_separate_does_not_see_undeclared_work(make_task, plan_job, run_fake):
    make_task(verifier_class="separate", artifacts='[[artifacts]]\nsource = "/app/other.txt"\n')
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.FAILED


def test_a_file_the_agent_deleted_does_not_come_back_in_separate(make_task, plan_job, run_fake):
    folder = make_task(
        verifier_class="separate",
        solve="#!fake\nremove result.txt\n",
        artifacts=RESULT,
    )
    (folder / "environment/result.txt").write_text("done\n")
    records = {r.agent: r.outcome for r in run_fake(plan_job()).records}
    assert records == {"oracle": Outcome.FAILED, "no-op": Outcome.PASSED}


@pytest.mark.parametrize("verifier_class", CLASSES)
def test_planted_verdict_is_tampered(make_task, plan_job, run_fake, verifier_class):
    make_task(
        verifier_class=verifier_class,
        solve="#!fake\nwrite /logs/verifier/reward.txt 1\n",
        artifacts=artifacts_for(verifier_class),
    )
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.TAMPERED
    assert record.reward is None
    assert record.graded


def test_tests_are_not_there_while_the_agent_works(make_task, plan_job, run_fake):
    make_task(solve="#!fake\nexpect /tests/test.sh anything\nwrite result.txt done\n")
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.AGENT_ERROR  # `expect` ended the solution: there was no such file


def test_agent_timeout_is_still_judged(make_task, plan_job, run_fake):
    make_task(solve="#!fake\nwrite result.txt done\nsleep 60\n", agent_timeout=0.2)
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.AGENT_TIMEOUT
    assert record.reward == 1.0
    assert record.graded


def test_agent_error_is_still_judged(make_task, plan_job, run_fake):
    make_task(solve="#!fake\nwrite result.txt done\nexit 3\n")
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.AGENT_ERROR
    assert record.reward == 1.0
    assert record.cause is not None and "status 3" in record.cause.message


def test_out_of_memory_is_an_outcome_even_if_the_agent_went_on(make_task, plan_job, run_fake):
    make_task(solve="#!fake\nwrite result.txt done\noom\n")
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.SANDBOX_OOM
    assert record.usage.memory_peak_bytes is not None


def test_full_disk_is_an_outcome(make_task, plan_job, run_fake):
    make_task(solve="#!fake\nfill\n")
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.DISK_FULL


@pytest.mark.parametrize(
    ("test", "cause"),
    [
        ("#!fake\nprint nothing written\n", "no_reward"),
        ("#!fake\nwrite /logs/verifier/reward.txt nan\n", None),
        ("#!fake\nwrite /logs/verifier/reward.txt pass\n", None),
        ("#!fake\nsleep 60\n", "verifier_timeout"),
    ],
)
def test_no_usable_verdict_is_never_a_score(make_task, plan_job, run_fake, test, cause):
    make_task(test=test, verifier_timeout=0.3)
    result = run_fake(plan_job(["oracle"], retries=0))
    (record,) = result.records
    assert record.outcome is Outcome.VERIFIER_ERROR
    assert record.reward is None
    assert not record.graded
    assert result.exit_code == 4
    assert cause is None or record.cause.kind == cause


def test_verifier_error_is_tried_once_more(make_task, plan_job, run_fake, tmp_path):
    make_task(test="#!fake\n")
    plan = plan_job(["oracle"], retries=5)
    (record,) = run_fake(plan).records
    assert record.retry == 1
    history = list(JobFolder.open(tmp_path / "jobs", plan.job_id).history(record.key))
    assert len(history) == 2


def test_a_lost_vm_is_infrastructure_and_each_try_is_kept(make_task, plan_job, run_fake, tmp_path):
    make_task(solve="#!fake\nprint before\ndie\n")
    plan = plan_job(["oracle"], retries=2)
    result = run_fake(plan)
    (record,) = result.records
    assert (record.outcome, record.retry) == (Outcome.INFRA_ERROR, 2)
    assert record.cause.kind == "guest_lost"
    history = list(JobFolder.open(tmp_path / "jobs", plan.job_id).history(record.key))
    assert sorted(r.retry for r in history) == [0, 1, 2]
    assert len({v.id for r in history for v in r.vms}) == 3, "a VM is never used again, not for a retry"
    assert result.exit_code == 4


def test_a_failed_start_is_retried_and_then_counts_normally(make_task, plan_job, run_fake):
    make_task()
    tries = []

    def fault(options: StartOptions) -> Exception | None:
        tries.append(options.vm_id)
        return BootError("no luck") if len(tries) < 3 else None

    (record,) = run_fake(plan_job(["oracle"]), FakeHypervisor(fault=fault)).records
    assert (record.outcome, record.retry) == (Outcome.PASSED, 2)


def test_an_unknown_exception_is_infrastructure(make_task, plan_job, run_fake):
    make_task()
    fault = lambda options: ZeroDivisionError("surprise")  # noqa: E731
    (record,) = run_fake(plan_job(["oracle"], retries=0), FakeHypervisor(fault=fault)).records
    assert record.outcome is Outcome.INFRA_ERROR
    assert "ZeroDivisionError" in record.cause.message


def test_the_fault_of_one_vm_ends_that_one_only(make_task, plan_job, run_fake):
    for number in range(10):
        make_task(f"task-{number}")
    victim = []

    def fault(options: StartOptions) -> Exception | None:
        if not victim:
            victim.append(options.vm_id)
            return GuestLost("broke the protocol", cause="protocol_violation")
        return None

    records = run_fake(plan_job(["oracle"], retries=0), FakeHypervisor(fault=fault)).records
    assert sorted(r.outcome for r in records) == [Outcome.INFRA_ERROR] + [Outcome.PASSED] * 9


def test_evidence_is_complete_and_sealed(make_task, plan_job, run_fake, tmp_path):
    make_task(solve="#!fake\nprint hello from the agent\nwrite result.txt done\n")
    plan = plan_job(["oracle"])
    (record,) = run_fake(plan).records
    place = JobFolder.open(tmp_path / "jobs", plan.job_id).rollout_path(record.key)
    assert verify_folder(place) == []
    assert (place / "agent/stdout.txt").read_bytes() == b"hello from the agent\n"
    changed = {c["path"] for c in json.loads((place / "changes.json").read_bytes())}
    assert "/app/result.txt" in changed
    assert {p.name for p in record.phases} == {
        "image",
        "boot",
        "setup",
        "agent",
        "collect",
        "verify",
        "teardown",
    }
    assert record.start_fingerprint is not None
    (place / "agent/stdout.txt").write_bytes(b"something else\n")
    assert verify_folder(place) != []


def test_start_fingerprints_of_one_task_are_equal(make_task, plan_job, run_fake):
    make_task()
    records = run_fake(plan_job(attempts=3)).records
    assert len(records) == 6
    assert len({r.start_fingerprint.digest for r in records}) == 1


def test_rewards_and_verdict_reach_the_record(make_task, plan_job, run_fake):
    make_task(test='#!fake\nwrite /logs/verifier/reward.json {"reward": 0.25, "style": 1}\n'.replace('"', '\\"'))
    (record,) = run_fake(plan_job(["oracle"])).records
    assert record.outcome is Outcome.FAILED
    assert record.reward == 0.25
    assert record.rewards["style"] == 1


V = Verdict(reward=1, passed=True)
F = Verdict(reward=0, passed=False)


def c(kind: str) -> Cause:
    return Cause(kind=kind, message=kind)


@pytest.mark.parametrize(
    ("verdict", "failures", "outcome", "deciding"),
    [
        (V, [], Outcome.PASSED, None),
        (F, [], Outcome.FAILED, None),
        (None, [], Outcome.VERIFIER_ERROR, "no_verdict"),
        (V, [(Outcome.AGENT_TIMEOUT, "t")], Outcome.AGENT_TIMEOUT, "t"),
        (V, [(Outcome.AGENT_TIMEOUT, "t"), (Outcome.SANDBOX_OOM, "o")], Outcome.AGENT_TIMEOUT, "t"),
        (None, [(Outcome.AGENT_TIMEOUT, "t"), (Outcome.VERIFIER_ERROR, "v")], Outcome.VERIFIER_ERROR, "v"),
        (None, [(Outcome.AGENT_ERROR, "a"), (Outcome.TAMPERED, "x")], Outcome.TAMPERED, "x"),
        (None, [(Outcome.TAMPERED, "x"), (Outcome.INFRA_ERROR, "i")], Outcome.TAMPERED, "x"),
        (None, [(Outcome.AGENT_ERROR, "a"), (Outcome.INFRA_ERROR, "i")], Outcome.INFRA_ERROR, "i"),
    ],
)
def test_decide(verdict, failures, outcome, deciding):
    made = [(o, c(k)) for o, k in failures]
    got, cause, further = decide(verdict, made)
    assert got is outcome
    assert (cause.kind if cause else None) == deciding
    assert len(further) == max(0, len(made) - 1)
