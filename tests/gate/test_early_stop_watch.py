"""The evidence that stops a job early: its value, its validity, its order, and what it is taken from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from dayfly.errors import ConfigError
from dayfly.gate.early_stop import (
    EarlyStopWatch,
    Evidence,
    comparable_tasks,
    only_score_decides,
    order_of,
    recheck,
    terms_of,
)
from dayfly.gate.policy import MetricRule, Policy
from dayfly.results.side import MISSING
from dayfly.stats import e_value

POLICY = Policy(metrics={"score": MetricRule(margin=0.05)})
DIGEST = "sha256:policy"


def evidence_of(differences: Iterable[float], margin: float = 0.0) -> Evidence:
    evidence = Evidence(margin)
    for d in differences:
        evidence.add([d])
    return evidence


def watch_over(base, candidate, policy=POLICY, seed=0, clusters=None) -> EarlyStopWatch:
    terms = terms_of(policy, DIGEST, base, candidate.agent, seed)
    return EarlyStopWatch(terms, policy, base, comparable_tasks(policy, base, candidate.tasks), clusters)


# --- the value -----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([-1.0, 1.0, 0.0]), max_size=60))
def test_with_one_attempt_each_it_is_the_published_formula(differences):
    """2^(m+1) · B(b+1, c+1) · P(Beta(b+1, c+1) > ½), as dayfly.stats computes it in closed form."""
    evidence = evidence_of(differences)
    b, c = differences.count(-1.0), differences.count(1.0)
    assert evidence.value == pytest.approx(e_value(b, c), rel=1e-9)
    assert (evidence.regressions, evidence.improvements, evidence.pairs) == (b, c, len(differences))


@pytest.mark.parametrize("sizes", [[1.0] * 6, [1 / 3, 2 / 3, 1.0, 1 / 3, 1.0], [0.1, 0.5, 0.9, 1.0]])
def test_its_mean_over_all_signs_is_one(sizes):
    """That is what makes it a martingale for an agent that is no other, whatever the sizes of the differences."""
    values = [
        evidence_of(s * d for s, d in zip(signs, sizes, strict=True)).value
        for signs in itertools.product((-1, 1), repeat=len(sizes))
    ]
    assert math.fsum(values) / len(values) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("losses", [[(0.25, -1.0), (0.75, 0.0)], [(0.5, -1.0), (0.25, 1.0), (0.25, 0.0)]])
def test_its_mean_is_one_for_a_drop_by_just_the_margin_and_more_beyond_it(losses):
    """Over all results of six tasks of an agent that is worse by 25 points, whose tasks need not be alike."""

    def mean(margin: float) -> float:
        drawn = itertools.product(losses, repeat=6)
        return math.fsum(math.prod(p for p, _ in d) * evidence_of((x for _, x in d), margin).value for d in drawn)

    assert mean(0.25) == pytest.approx(1.0, abs=1e-9)
    assert mean(0.3) < 1 < mean(0.2)


def test_with_a_margin_it_is_the_mean_over_all_stakes():
    """Against numeric integration by another method."""
    differences, margin = [-1.0, -2 / 3, 0.0, 1 / 3, -1.0, 1.0, -1.0], 0.1

    def product(stake: float) -> float:
        return math.prod(1 + stake * (-d - margin) for d in differences)

    expected, _ = quad(product, 0, 1 / (1 + margin))
    assert evidence_of(differences, margin).value == pytest.approx(expected * (1 + margin), rel=1e-9)


def test_a_cluster_never_loses_more_than_the_stake():
    evidence = Evidence(0.05, scale=3)
    evidence.add([1.0, 1.0, 1.0])
    assert 0 < evidence.value < 1
    evidence.add([-1.0])
    evidence.add([0.0, -1.0])
    assert math.isfinite(evidence.log) and (evidence.pairs, evidence.regressions) == (6, 2)


def test_it_ever_reaches_its_threshold_in_no_more_than_alpha_of_all_paths():
    """All 2^16 paths of fair coins, not a sample: P(max E ≥ 1/α) ≤ α."""
    steps, threshold = 16, 10.0
    alive = {(0, 0): 1.0}
    reached = 0.0
    for _ in range(steps):
        after: dict[tuple[int, int], float] = {}
        for (b, c), chance in alive.items():
            for place in ((b + 1, c), (b, c + 1)):
                if evidence_of([-1.0] * place[0] + [1.0] * place[1]).value >= threshold:
                    reached += chance / 2
                else:
                    after[place] = after.get(place, 0.0) + chance / 2
        alive = after
    assert 0.02 < reached <= 1 / threshold


def test_large_evidence_is_a_finite_number():
    assert math.isfinite(evidence_of([-1.0] * 5000).value)


def test_small_losses_beside_few_large_gains_are_no_evidence():
    """15 tasks a little worse and 5 much better are no drop: the sizes count, not the signs alone."""
    assert evidence_of([-1 / 3] * 15 + [1.0] * 5).value < 1
    assert e_value(15, 5) > 6


# --- the order -----------------------------------------------------------------------------------


def test_the_order_depends_on_seed_and_names_only():
    names = [f"task-{i}" for i in range(30)]
    order = order_of(names, 7)
    assert order == order_of(reversed(names), 7) != order_of(names, 8)
    assert sorted(t for (t,) in order) == sorted(names) != [t for (t,) in order]
    fewer = [t for t in order if t != ["task-3"]]
    assert order_of([n for n in names if n != "task-3"], 7) == fewer


def test_each_place_in_the_order_is_as_likely_for_every_task():
    first = [order_of("abcd", seed)[0][0] for seed in range(400)]
    assert all(70 <= first.count(t) <= 130 for t in "abcd")


def test_tasks_of_a_cluster_stay_together():
    units = order_of(["a1", "a2", "b", "c1", "c2"], 1, {"a1": "a", "a2": "a", "c1": "c", "c2": "c"})
    assert sorted(sorted(u) for u in units) == [["a1", "a2"], ["b"], ["c1", "c2"]]


# --- the watch -----------------------------------------------------------------------------------


def test_it_looks_at_the_finished_beginning_of_the_order_only(make_side, marks):
    """However many failures are in behind a rollout that is not ready: fast ones are no random choice."""
    base = make_side(marks(30, 30), "base")
    watch = watch_over(base, blank(make_side, 30))
    for name in watch.order[1:]:
        assert watch.add(name, 1, "F") is None
    assert watch.evidence.pairs == 0
    assert watch.add(watch.order[0], 1, "F") is not None
    assert watch.evidence.pairs == 8


def blank(make_side, count: int, attempts: int = 1):
    return make_side({f"task-{i:03}": MISSING * attempts for i in range(count)}, "candidate")


def test_a_task_counts_when_all_its_attempts_are_final(make_side, marks):
    base = make_side(marks(3, 3, 2), "base")
    watch = watch_over(base, blank(make_side, 3, 2))
    first = watch.order[0]
    watch.add(first, 2, "F")
    assert watch.evidence.pairs == 0
    watch.add(first, 1, "i")  # lost to the infrastructure, for good
    assert (watch.evidence.pairs, watch.evidence.regressions) == (1, 1)


@pytest.mark.parametrize("mark", ["c", "s", MISSING])
def test_cancelled_attempts_are_not_final(make_side, marks, mark):
    base = make_side(marks(3, 3), "base")
    watch = watch_over(base, blank(make_side, 3))
    watch.add(watch.order[0], 1, mark)
    watch.add(watch.order[1], 1, "F")
    assert watch.evidence.pairs == 0


def test_lost_attempts_are_no_failures(make_side, marks):
    watch = watch_over(make_side(marks(30, 30), "base"), blank(make_side, 30))
    for name in watch.order:
        watch.add(name, 1, "i")
    assert watch.stopped is None and watch.evidence.pairs == 0


def test_no_more_than_the_margin_is_let_through(make_side, marks):
    """Sure to be worse, but by 10 points where 15 are let through: no evidence against it."""
    policy = Policy(metrics={"score": MetricRule(margin=0.15)}, must_pass=("*",))
    base, count = make_side(marks(400, 400), "base"), 0
    watch = watch_over(base, blank(make_side, 400), policy)
    for place, name in enumerate(watch.order):
        count += place % 10 == 9
        watch.add(name, 1, "F" if place % 10 == 9 else "P")
    assert watch.stopped is None and watch.evidence.regressions == count == 40
    assert watch.evidence.value < 1
    assert evidence_of([-1.0] * 40 + [0.0] * 360).value > watch.threshold  # without the margin


def test_a_quarantined_and_a_changed_task_are_no_pairs(make_side, make_task):
    base = make_side([make_task(n, "P") for n in "abcd"], "base")
    tasks = {n: make_task(n, "F") for n in "abc"} | {"e": make_task("e", "F")}
    tasks["b"] = replace(tasks["b"], task_digest="sha256:changed")
    assert list(comparable_tasks(POLICY, base, tasks, {"a"})) == ["c"]


def test_futility_is_asked_for_only_where_the_score_alone_decides():
    assert only_score_decides(POLICY)
    assert only_score_decides(
        POLICY.model_copy(update={"metrics": POLICY.metrics | {"tokens": MetricRule(margin=1, tier="advisory")}})
    )
    for change in (
        {"must_pass": ("a",)},
        {"no_regression": ("a",)},
        {"metrics": POLICY.metrics | {"seconds": MetricRule(margin=0.1)}},
        {"metrics": {"score": MetricRule(margin=0.05, min=0.5)}},
        {"metrics": {"score": MetricRule(margin=0.05, tier="supporting")}},
    ):
        assert not only_score_decides(POLICY.model_copy(update=change))


def test_futile_means_that_no_end_decides(make_side, marks, judge):
    """For every way to go on from where it stopped with all or none of the rest passing, the gate is undecided."""
    policy = Policy(metrics={"score": MetricRule(margin=0.02)})
    base = make_side(marks(40, 40), "base")
    watch = watch_over(base, blank(make_side, 40), policy)
    for place, name in enumerate(watch.order):
        if watch.add(name, 1, "F" if place == 3 else "P") is not None:
            break
    assert watch.stopped is not None and watch.stopped.kind == "futile"
    done = {n: "F" if i == 3 else "P" for i, n in enumerate(watch.order[: watch.stopped.pairs])}
    assert len(done) < 40
    for rest in "PF":
        whole = {n: done.get(n, rest) for n in base.tasks}
        candidate = make_side(whole, "candidate", early_stop=watch.terms.model_dump(mode="json"))
        assert judge(policy, candidate, base).verdict == "inconclusive"


# --- afterwards ----------------------------------------------------------------------------------


@pytest.fixture
def stopped(make_side, marks):
    """A baseline that passes everything, and a candidate whose job was stopped after eight failures in a row."""
    base = make_side(marks(30, 30), "base")
    watch = watch_over(base, blank(make_side, 30), seed=5)
    done = dict.fromkeys(watch.order[:8], "F")
    given = {n: done.get(n, MISSING) for n in base.tasks}
    return make_side(given, "candidate", early_stop=watch.terms.model_dump(mode="json")), base


def test_recheck_finds_the_stop_from_marks_and_seed(stopped):
    candidate, base = stopped
    found = recheck(POLICY, DIGEST, candidate, base)
    assert found is not None and (found.kind, found.regressions, found.pairs) == ("blocked", 8, 8)


def test_recheck_does_not_take_the_jobs_word(stopped):
    candidate, base = stopped
    told = dict(candidate.early_stop or {})
    for changed in (
        replace(candidate, early_stop=None),
        replace(candidate, early_stop={"policy_digest": DIGEST}),
        replace(candidate, early_stop=told | {"seed": 6}),
        replace(candidate, early_stop=told | {"alpha": 0.5}),
        replace(candidate, early_stop=told | {"agent": "other"}),
        replace(
            candidate, tasks={n: replace(t, marks=t.marks.replace("F", "P")) for n, t in candidate.tasks.items()}
        ),
    ):
        assert recheck(POLICY, DIGEST, changed, base) is None
    assert recheck(POLICY, "sha256:other", candidate, base) is None
    assert recheck(POLICY, DIGEST, candidate, replace(base, digest="sha256:other")) is None
    assert recheck(POLICY, DIGEST, candidate, None) is None


def test_terms_need_a_margin_of_the_score(make_side, marks):
    base = make_side(marks(3, 3), "base")
    for metrics in ({}, {"score": MetricRule(min=0.5)}, {"reward": MetricRule(margin=0.1)}):
        with pytest.raises(ConfigError, match="no margin of the score"):
            terms_of(Policy(metrics=metrics, must_pass=("*",)), DIGEST, base, "agent", 0)
