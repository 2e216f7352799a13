"""Figures of a job: statistics that can be checked by hand or against scipy, and fault case 57."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dayfly.model import Outcome, RolloutRecord, Usage, Verdict, VerifierClass
from dayfly.report import (
    HEADER,
    format_seconds,
    render_markdown,
    render_text,
    rows,
    score_interval,
    summarise,
)
from dayfly.stats import pass_all_k, pass_at_k, wilson


def record(
    outcome: Outcome,
    *,
    task: str = "t",
    agent: str = "a",
    attempt: int = 1,
    passed: bool | None = None,
    seconds: float = 1.0,
    started: float = 0.0,
    cost: float | None = None,
) -> RolloutRecord:
    if passed is None and outcome in (Outcome.PASSED, Outcome.FAILED):
        passed = outcome is Outcome.PASSED
    verdict = None if passed is None else Verdict(reward=float(passed), passed=passed)
    return RolloutRecord(
        rollout_id=f"{task}-{agent}-{attempt}-{started}",
        job_id="job",
        task=task,
        task_digest="sha256:t",
        agent=agent,
        agent_digest="sha256:a",
        attempt=attempt,
        outcome=outcome,
        verdict=verdict,
        reward=verdict.reward if verdict else None,
        isolation="tcg",
        verifier_class=VerifierClass.SHARED,
        started_unix=started,
        finished_unix=started + seconds,
        usage=Usage(cost_usd=cost),
    )


# --- fault case 57 -------------------------------------------------------------------------------


def test_timeouts_count_as_their_verdict_and_are_not_dropped() -> None:
    records = [
        record(Outcome.PASSED, attempt=1),
        record(Outcome.AGENT_TIMEOUT, attempt=2, passed=False),
        record(Outcome.AGENT_TIMEOUT, attempt=3, passed=False),
    ]
    (agent,) = summarise(3, records).agents
    assert agent.score == pytest.approx(1 / 3)
    assert (agent.graded, agent.planned, agent.coverage) == (3, 3, 1.0)
    assert agent.counts == {Outcome.PASSED: 1, Outcome.AGENT_TIMEOUT: 2}
    assert agent.flaky == ("t",)


def test_a_timeout_whose_work_was_complete_passes() -> None:
    (agent,) = summarise(1, [record(Outcome.AGENT_TIMEOUT, passed=True)]).agents
    assert agent.score == 1.0


def test_one_graded_of_ten_shows_its_coverage_and_is_inconclusive_under_a_floor() -> None:
    records = [record(Outcome.PASSED, task="t0")]
    records += [record(Outcome.INFRA_ERROR, task=f"t{i}") for i in range(1, 10)]
    (agent,) = summarise(10, records).agents
    assert (agent.score, agent.coverage, agent.graded) == (1.0, 0.1, 1)
    assert "1/10 (10 %)" in render_text(summarise(10, records))
    floored = summarise(10, records, min_coverage=0.8)
    assert floored.agents[0].score is None
    assert floored.agents[0].interval is None
    assert floored.inconclusive
    assert "inconclusive" in render_text(floored)
    assert "1.000" not in render_text(floored)


def test_three_infra_errors_of_ten_do_not_blame_the_agent() -> None:
    records = [record(Outcome.PASSED, task=f"t{i}") for i in range(7)]
    records += [record(Outcome.INFRA_ERROR, task=f"t{i}") for i in range(7, 10)]
    (agent,) = summarise(10, records).agents
    assert (agent.score, agent.coverage) == (1.0, 0.7)
    assert (agent.tasks, agent.tasks_graded) == (10, 7)


def test_what_never_ran_lowers_the_coverage() -> None:
    (agent,) = summarise(4, [record(Outcome.PASSED)]).agents
    assert agent.coverage == 0.25


# --- the score -----------------------------------------------------------------------------------


def test_score_is_the_mean_over_tasks_not_over_rollouts() -> None:
    records = [record(Outcome.PASSED, task="one", attempt=i) for i in (1, 2, 3, 4)]
    records.append(record(Outcome.FAILED, task="two"))
    records.append(record(Outcome.INFRA_ERROR, task="two", attempt=2))
    (agent,) = summarise(8, records).agents
    assert agent.score == 0.5


def test_tampering_fails_even_with_a_passing_verdict() -> None:
    assert not record(Outcome.TAMPERED, passed=True).passes
    (agent,) = summarise(1, [record(Outcome.TAMPERED)]).agents
    assert (agent.score, agent.mean_reward, agent.coverage) == (0.0, 0.0, 1.0)


def test_a_retry_counts_once_with_its_attempt() -> None:
    records = [record(Outcome.INFRA_ERROR, started=0.0), record(Outcome.PASSED, started=5.0)]
    (agent,) = summarise(1, reversed(records)).agents
    assert (agent.recorded, agent.score, agent.coverage) == (1, 1.0, 1.0)


def test_no_score_over_different_agents() -> None:
    records = [record(Outcome.PASSED, agent="oracle"), record(Outcome.FAILED, agent="no-op")]
    summary = summarise(2, records)
    assert [a.agent for a in summary.agents] == ["no-op", "oracle"]
    assert summary.total.score is None
    assert (summary.total.planned, summary.total.graded, summary.total.coverage) == (2, 2, 1.0)
    assert [row[0] for row in rows(summary)] == ["no-op", "oracle", "total"]


def test_an_agent_without_a_record_is_shown() -> None:
    summary = summarise({"a": 1, "b": 1}, [record(Outcome.PASSED)])
    assert [(a.agent, a.planned, a.graded, a.score) for a in summary.agents] == [
        ("a", 1, 1, 1.0),
        ("b", 1, 0, None),
    ]
    assert summary.total.coverage == 0.5


def test_nothing_at_all() -> None:
    summary = summarise(0, [])
    assert (summary.total.coverage, summary.total.score, summary.agents, summary.elapsed_s) == (0.0, None, (), 0.0)
    assert "0/0" in render_text(summary)
    assert render_markdown(summary)


def test_time_and_cost() -> None:
    records = [record(Outcome.PASSED, task=f"t{i}", seconds=i, started=10.0 * i, cost=0.5) for i in range(1, 21)]
    summary = summarise(20, records)
    agent = summary.agents[0]
    assert (agent.median_s, agent.p95_s, agent.total_s) == (10.5, 19.0, 210.0)
    assert (summary.elapsed_s, agent.cost_usd) == (210.0, 10.0)
    unknown = [*records, record(Outcome.PASSED, task="t21")]
    assert summarise(21, unknown).agents[0].cost_usd is None


# --- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("passes", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (57, 100)])
def test_wilson_is_scipys(passes: int, n: int) -> None:
    expected = stats.binomtest(passes, n).proportion_ci(method="wilson")
    assert wilson(passes / n, n) == pytest.approx((expected.low, expected.high))


def test_one_attempt_per_task_has_wilson() -> None:
    interval = score_interval({f"t{i}": (1, int(i < 3)) for i in range(10)})
    assert interval is not None
    assert (interval.method, interval.over) == ("wilson", "tasks")
    assert (interval.low, interval.high) == pytest.approx(wilson(0.3, 10))


def test_several_attempts_have_t_over_tasks() -> None:
    means = [0.75, 0.5, 0.25, 0.5, 0.75]
    interval = score_interval({f"t{i}": (4, int(4 * m)) for i, m in enumerate(means)})
    low, high = stats.t.interval(0.95, len(means) - 1, loc=0.55, scale=stats.sem(means))
    assert interval is not None
    assert (interval.method, interval.low, interval.high) == ("t", pytest.approx(low), pytest.approx(high))


def test_clusters_widen_the_interval_of_tasks_that_move_together() -> None:
    trials = {f"t{i}": (2, 2 if i < 5 else i % 2) for i in range(10)}
    alone = score_interval(trials)
    together = score_interval(trials, {f"t{i}": "first" if i < 5 else "second" for i in range(10)})
    assert alone is not None
    assert together is not None
    assert together.high - together.low > alone.high - alone.low


def test_equal_tasks_never_claim_certainty() -> None:
    interval = score_interval({f"t{i}": (3, 3) for i in range(10)})
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(wilson(1.0, 10))
    assert interval.low < 0.8


def test_one_task_speaks_of_its_attempts_only() -> None:
    interval = score_interval({"t": (10, 4)})
    assert interval is not None
    assert interval.over == "attempts"
    assert (interval.low, interval.high) == pytest.approx(wilson(0.4, 10))


def test_pass_at_k() -> None:
    assert pass_at_k([(4, 2)], 2) == pytest.approx(1 - 1 / 6)
    assert pass_all_k([(4, 2)], 2) == pytest.approx(1 / 6)
    assert pass_at_k([(4, 0), (4, 4)], 3) == 0.5
    assert pass_at_k([(4, 2), (1, 1)], 2) is None
    assert pass_all_k([], 1) is None


def test_pass_at_k_is_not_available_when_an_attempt_is_missing() -> None:
    records = [record(Outcome.PASSED, attempt=1), record(Outcome.INFRA_ERROR, attempt=2)]
    (agent,) = summarise(2, records).agents
    assert agent.pass_at == {1: 1.0, 2: None}
    assert "pass@2 not available" in render_text(summarise(2, records))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Outcome)),
            st.sampled_from(["t1", "t2", "t3"]),
            st.sampled_from(["a", "b"]),
            st.integers(1, 3),
            st.none() | st.booleans(),
        )
    ),
    st.integers(0, 30),
)
def test_never_nan_and_never_a_score_without_coverage(
    drawn: list[tuple[Outcome, str, str, int, bool | None]], planned: int
) -> None:
    records = [record(o, task=t, agent=a, attempt=n, passed=p) for o, t, a, n, p in drawn]
    summary = summarise(planned, records)
    json.dumps(summary.model_dump(mode="json"), allow_nan=False)
    for agent in summary.agents:
        assert 0.0 <= agent.coverage <= 1.0
        if agent.score is None:
            assert agent.graded == 0
        else:
            assert agent.coverage > 0
            assert agent.interval is not None
            assert 0.0 <= agent.interval.low <= agent.score + 1e-9
            assert agent.score - 1e-9 <= agent.interval.high <= 1.0
            assert math.isfinite(agent.mean_reward or 0.0)
    for row in rows(summary):
        assert len(row) == len(HEADER)
        assert "/" in row[HEADER.index("coverage")]


# --- text ----------------------------------------------------------------------------------------


def test_text_names_isolation_and_verifier_class() -> None:
    text = render_text(summarise(1, [record(Outcome.PASSED)]))
    assert "isolation: tcg; verifier class: shared" in text


def test_markdown_keeps_its_columns_whatever_the_names() -> None:
    text = render_markdown(summarise(1, [record(Outcome.PASSED, agent="a|b\nc")]))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert table[2].startswith("| a\\|b c |")


def test_incomplete_coverage_is_never_rounded_to_all() -> None:
    records = [record(Outcome.PASSED, task=f"t{i}") for i in range(999)]
    assert "999/1000 (99 %)" in render_text(summarise(1000, records))


def test_seconds_are_readable() -> None:
    assert [format_seconds(s) for s in (None, 0.04, 59.9, 61, 3725)] == [
        "–",
        "0.0 s",
        "59.9 s",
        "1 min 01 s",
        "1 h 02 min",
    ]
