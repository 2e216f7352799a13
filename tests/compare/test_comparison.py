"""Pairing and estimating: which tasks can be compared and why not, what changed, and what is not known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayfly.compare import compare_sides, side_facts
from dayfly.compare.model import Comparison
from dayfly.model import MARKS, VerifierClass
from dayfly.results.side import MISSING, Side, TaskResults


def task(name: str, marks: str, **changes: Any) -> TaskResults:
    bare = TaskResults(task=name, task_digest=f"sha256:{name}", marks=marks)
    fields: dict[str, Any] = {
        "reward_sum": float(bare.passed),
        "seconds_sum": 10.0 * bare.graded,
        "tokens_sum": 100 * bare.graded,
        "cost_sum": 0.5 * bare.graded,
        "verifier_digest": f"sha256:judge-{name}",
        "verifier_classes": (VerifierClass.SEPARATE,),
        "isolation": ("tcg",),
        "disk_digests": ("sha256:disk",),
        "agent_limit_s": 600.0,
        "verifier_timeout_s": 60.0,
        "machine": (1, 1024, 4096),
    }
    return replace(bare, **(fields | changes))


def side(job: str, tasks: dict[str, str] | list[TaskResults], **changes: Any) -> Side:
    made = tasks if isinstance(tasks, list) else [task(n, m) for n, m in tasks.items()]
    fields: dict[str, Any] = {
        "job_id": job,
        "job_name": "test",
        "agent": "agent",
        "agent_digest": f"sha256:{job}",
        "agent_kind": "command",
        "agent_options": {},
        "attempts": max((t.planned for t in made), default=1),
        "tasks": {t.task: t for t in sorted(made, key=lambda t: t.task)},
    }
    return Side(**(fields | changes))


def reasons(comparison: Comparison) -> dict[str, str]:
    return {t.task: t.reason for t in comparison.left_out}


def aspects(comparison: Comparison) -> set[str]:
    return {d.aspect for d in comparison.differences}


# --- what can be compared ----------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any], str | None]] = [
    ("verifier changed", {"verifier_digest": "sha256:other", "task_digest": "sha256:other"}, None),
    ("task changed", {"task_digest": "sha256:other"}, None),
    ("limits differ", {"agent_limit_s": 900.0}, "limits"),
    ("limits differ", {"verifier_timeout_s": 61.0}, "limits"),
    ("limits differ", {"machine": (2, 1024, 4096)}, "limits"),
    ("image differs", {"disk_digests": ("sha256:new",)}, "image"),
    ("isolation differs", {"isolation": ("kvm",)}, "isolation"),
    ("isolation differs", {"isolation": ("fake", "tcg")}, "isolation"),
    ("verifier class differs", {"verifier_classes": (VerifierClass.SHARED,)}, "verifier class"),
    ("not graded in the candidate", {"marks": "iv."}, None),
    ("under the coverage floor", {"marks": "Pi."}, None),
]


@pytest.mark.parametrize(("reason", "changes", "allowed"), CHANGES)
def test_a_task_that_is_not_the_same_is_left_out_with_its_reason(
    reason: str, changes: dict[str, Any], allowed: Any
) -> None:
    base = side("base", {"x": "PPP", "y": "PPP"})
    candidate = side("new", [task("x", **({"marks": "PPP"} | changes)), task("y", "PPP")])
    compared = compare_sides(base, candidate, min_task_coverage=0.5)
    assert reasons(compared) == {"x": reason} and compared.comparable == 1
    assert compared.left_out[0].detail, "says how it differs"
    if allowed is not None:
        meant = compare_sides(base, candidate, allowed=[allowed])
        assert meant.comparable == 2 and allowed in aspects(meant), "compared, and the difference is listed"


def test_an_attempt_of_a_weaker_class_makes_the_whole_task_weaker() -> None:
    mixed = side("a", [task("x", "PP", isolation=("tcg", "kvm"))])
    assert compare_sides(mixed, side("b", [task("x", "PP")])).comparable == 1
    assert reasons(compare_sides(mixed, side("b", [task("x", "PP", isolation=("kvm",))]))) == {
        "x": "isolation differs"
    }


def test_the_first_reason_that_holds_is_the_one_given() -> None:
    """In the order of `Reason`; a quarantined task is only that, as it must not count as lost."""
    every: dict[str, Any] = {}
    order = [c for c in reversed(CHANGES) if "marks" not in c[1]]
    for reason, changes, _ in order:
        every |= changes
        base, candidate = side("a", [task("x", "P")]), side("b", [task("x", "i", **every)])
        assert reasons(compare_sides(base, candidate)) == {"x": reason}
        assert reasons(compare_sides(base, candidate, quarantined={"x"})) == {"x": "quarantined"}
    gone = compare_sides(side("a", {"x": "P", "y": "P"}), side("b", {"y": "P"}), quarantined={"x"})
    assert reasons(gone) == {"x": "quarantined"} and gone.comparable_share == 1.0


def test_what_a_side_did_not_record_is_no_difference() -> None:
    unknown = task("x", "P", agent_limit_s=None, machine=None, verifier_digest="", isolation=(), disk_digests=())
    compared = compare_sides(side("a", [task("x", "P")]), side("b", [unknown]))
    assert compared.comparable == 1
    assert not {"verifier", "isolation", "image"} & ({*compared.same} | aspects(compared)), "neither same nor not"


def test_tasks_added_removed_and_judged_anew_are_listed() -> None:
    """Fault case 59: a baseline of ten tasks; nine of them, one with another verifier, and a new one."""
    names = [f"t{i}" for i in range(10)]
    candidate = [task(n, "P") for n in names[1:]] + [task("fresh", "P")]
    candidate[0] = replace(candidate[0], verifier_digest="sha256:other")
    compared = compare_sides(side("a", dict.fromkeys(names, "P")), side("b", candidate))
    assert reasons(compared) == {
        "t0": "only in the baseline",
        "t1": "verifier changed",
        "fresh": "only in the candidate",
    }
    assert compared.comparable == 8 and compared.comparable_share == pytest.approx(8 / 11)
    assert {"task", "verifier"} <= aspects(compared)


# --- what changed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "transition"),
    [
        ("PPP", "FtF", "pass→fail"),
        ("PPi", "F.F", "pass→fail"),
        ("PPP", "PPF", "worse"),
        ("PPF", "FFF", "worse"),
        ("FFF", "PPT", "fail→pass"),
        ("FFF", "PFF", "better"),
        ("PFF", "PPP", "better"),
        ("PPP", "PiP", "pass"),
        ("FFF", "eex", "fail"),
        ("PFF", "FPF", "mixed"),
        ("PPFF", "PFii", "mixed"),
    ],
)
def test_every_transition(before: str, after: str, transition: str) -> None:
    compared = compare_sides(side("a", {"x": before}), side("b", {"x": after}))
    assert [p.transition for p in compared.pairs] == [transition]


def test_timeouts_are_graded_and_lost_attempts_are_not() -> None:
    """Fault case 57: [pass, timeout, timeout] is a third; nine of ten lost to infrastructure leave one task."""
    slow = side_facts(side("a", {"x": "Ptt"}))
    assert slow.score == pytest.approx(1 / 3) and slow.coverage == 1.0
    lost = side("b", {f"t{i}": "P" if i == 0 else "i" for i in range(10)})
    facts = side_facts(lost)
    assert (facts.graded, facts.planned, facts.faults, facts.score) == (1, 10, 9, 1.0)
    assert facts.coverage == pytest.approx(0.1)
    compared = compare_sides(side("a", {f"t{i}": "P" for i in range(10)}), lost)
    assert compared.comparable == 1 and compared.comparable_share == pytest.approx(0.1)
    assert list(reasons(compared).values()) == ["not graded in the candidate"] * 9


def test_worst_first_then_by_name() -> None:
    base = {"d": "PPP", "c": "PPP", "b": "PPP", "a": "PPP", "e": "FFF"}
    compared = compare_sides(side("a", base), side("b", base | {"b": "PFF", "c": "PPF", "d": "FFF", "e": "PPP"}))
    assert [p.task for p in compared.pairs] == ["d", "b", "c", "e", "a"]
    t = compared.transitions
    assert (t.pass_to_fail, t.worse, t.fail_to_pass, t.better, t.both_pass, t.both_fail) == (1, 3, 1, 1, 1, 0)


def test_only_attempts_that_both_planned_are_paired() -> None:
    compared = compare_sides(side("a", {"x": "PPFFF", "y": "PPPPP"}), side("b", {"x": "PP", "y": "FF"}))
    assert {p.task: p.base_marks for p in compared.pairs} == {"x": "PP", "y": "PP"}
    assert "attempts" in aspects(compared) and compared.metrics["score"].base == 1.0
    assert "pass^2" in compared.metrics and "pass^5" not in compared.metrics
    assert "all attempts" in compared.metrics["seconds"].method


def test_flaky_tasks_of_either_side_have_an_attempt_of_each_kind() -> None:
    compared = compare_sides(side("a", {"x": "iPF", "y": "PPP"}), side("b", {"x": "PPP", "y": ".tP"}))
    shown = [(f.task, f.side, f.passed, f.graded, f.passing, f.failing) for f in compared.flaky]
    assert shown == [
        ("x", "base", 1, 2, "x/agent/2", "x/agent/3"),
        ("y", "candidate", 1, 2, "y/agent/3", "y/agent/2"),
    ]


def test_groups_are_by_tag_and_one_task_has_no_interval() -> None:
    tags = {"x": ("db",), "y": ("db", "net"), "z": ()}
    base = [task(n, "PP", tags=tags[n]) for n in tags]
    candidate = [task(n, "FF" if n == "y" else "PP", tags=tags[n]) for n in tags]
    groups = {g.tag: g for g in compare_sides(side("a", base), side("b", candidate)).groups}
    assert groups.keys() == {"db", "net"}
    assert (groups["db"].tasks, groups["db"].base, groups["db"].candidate) == (2, 1.0, 0.5)
    assert groups["net"].delta == -1.0 and groups["net"].low is None and groups["net"].high is None


def test_what_varied_is_named_by_what_it_is() -> None:
    long = "be careful " * 40
    base = side(
        "a",
        {"x": "P"},
        agent_options={"model": "m1", "system_prompt": long, "turns": 5, "api_key": "k1", "same": 1},
        host={"qemu": "7.2", "kernel": "6.1"},
        seed=1,
    )
    candidate = side(
        "b",
        {"x": "P"},
        agent_options={"model": "m2", "system_prompt": long + "!", "turns": 6, "api_key": "k2", "same": 1},
        host={"qemu": "9.0", "kernel": "6.1"},
        seed=2,
    )
    compared = compare_sides(base, candidate)
    assert aspects(compared) == {"agent", "model", "prompt", "options", "host", "seed"}
    said = [(d.aspect, d.base, d.candidate) for d in compared.differences]
    assert ("model", "m1", "m2") in said and ("options", "turns: 5", "turns: 6") in said
    assert ("host", "qemu: 7.2", "qemu: 9.0") in said
    prompt = next(d for d in compared.differences if d.aspect == "prompt")
    assert prompt.base != prompt.candidate and len(prompt.base) < 120, "shortened, and still told apart"
    assert "k1" not in compared.model_dump_json() and "k2" not in compared.model_dump_json()
    assert set(compared.same) == {
        *("attempts", "task", "verifier", "limits", "image", "isolation", "verifier class"),
    }


def test_no_value_of_an_environment_or_a_secret_is_shown() -> None:
    def made(value: str) -> dict[str, object]:
        options = {
            "env": {"LANG": f"C.{value}", "OPENAI_API_KEY": value},
            "github_token": value,
            "max_tokens": len(value),
        }
        return options | {"http": {"password": value, "timeout": value}, "operating_system": value}

    a, b = made("v-one"), made("v-other")
    compared = compare_sides(side("a", {"x": "P"}, agent_options=a), side("b", {"x": "P"}, agent_options=b))
    said = {d.base.split(":")[0]: (d.aspect, d.base, d.candidate) for d in compared.differences}
    for name in ("env.LANG", "env.OPENAI_API_KEY", "github_token", "http.password"):
        assert said[name] == ("options", f"{name}: set, not shown", f"{name}: set, not shown")
    assert said["max_tokens"][1:] == ("max_tokens: 5", "max_tokens: 7")
    assert said["http.timeout"][2] == "http.timeout: v-other"
    assert said["operating_system"][0] == "options"


def test_what_one_side_did_not_record_is_neither_same_nor_different() -> None:
    base = side("a", [task("x", "P", agent_limit_s=5.0)], host={"kernel": "6"})
    candidate = side("b", [task("x", "P", agent_limit_s=None)], host={"kernel": "6", "qemu": "8"})
    compared = compare_sides(base, candidate)
    assert not {"limits", "host"} & ({*compared.same} | aspects(compared))


# --- figures, and what is not known ------------------------------------------------------------------


def test_a_drop_that_is_shown_and_one_that_is_not() -> None:
    names = [f"t{i:02}" for i in range(20)]
    base = dict.fromkeys(names, "P")
    five = compare_sides(side("a", base), side("b", base | dict.fromkeys(names[:5], "F"))).metrics["score"]
    four = compare_sides(side("a", base), side("b", base | dict.fromkeys(names[:4], "F"))).metrics["score"]
    assert five.p_worse == pytest.approx(0.5**5) and four.p_worse == pytest.approx(0.5**4)
    assert (five.base, five.candidate, five.delta) == (1.0, 0.75, -0.25)
    assert five.low is not None and five.high is not None and five.low < -0.25 < five.high < 0


def test_every_figure_of_one_more_attempt_is_worked_out_by_hand() -> None:
    base = [task("x", "PF", cost_sum=2.0), task("y", "PP", cost_sum=2.0)]
    candidate = [task("x", "PF", cost_sum=3.0), task("y", "FF", cost_sum=3.0)]
    m = compare_sides(side("a", base), side("b", candidate), metrics=["pass@1"]).metrics
    shown = {n: (m[n].base, m[n].candidate) for n in ("score", "reward", "pass@1", "pass@2", "pass^2", "cost_usd")}
    assert shown == {
        "score": (0.75, 0.25),
        "reward": (0.75, 0.25),
        "pass@1": (0.75, 0.25),
        "pass@2": (1.0, 0.5),
        "pass^2": (0.5, 0.0),
        "cost_usd": (1.0, 1.5),
    }
    assert m["cost_usd"].delta == pytest.approx(0.5) and not m["cost_usd"].higher_is_better


def test_unknown_is_never_zero() -> None:
    base = side("a", [task("x", "PP", tokens_sum=None, cost_sum=0.0), task("y", "PP", cost_sum=0.0)])
    candidate = side("b", [task("x", "Pi"), task("y", "PP")])
    m = compare_sides(base, candidate, metrics=["pass@3"], margins={"pass^5": 0.1}).metrics
    for name in ("tokens", "cost_usd", "pass@2", "pass^2", "pass@3", "pass^5"):
        assert not m[name].known and m[name].reason, name
        assert (m[name].base, m[name].candidate, m[name].delta) == (None, None, None), name
    assert m["score"].known and m["seconds"].known


def test_no_comparable_task_leaves_every_figure_unknown() -> None:
    for base, candidate in ((side("a", {}), side("b", {})), (side("a", {"x": "P"}), side("b", {"y": "P"}))):
        compared = compare_sides(base, candidate)
        assert compared.comparable == 0 and compared.comparable_share == 0.0
        assert compared.metrics and not any(m.known for m in compared.metrics.values())


def test_equal_sides_show_no_difference() -> None:
    names = {f"t{i:02}": "PF" if i % 2 else "PP" for i in range(30)}
    for metric in compare_sides(side("a", names), side("b", names)).metrics.values():
        assert metric.known and metric.delta == 0
        assert metric.p_worse is None or metric.p_worse > 0.05


def test_clusters_widen_the_interval_and_tasks_without_one_are_counted() -> None:
    def tasks(down: int) -> list[TaskResults]:
        return [
            task(f"t{i:02}", "FF" if i < down else "PP", metadata={"repo": str(i // 5)} if i else {})
            for i in range(40)
        ]

    base, candidate = side("a", tasks(0)), side("b", tasks(10))
    alone = compare_sides(base, candidate).metrics["score"]
    by_repo = compare_sides(base, candidate, cluster_by="repo").metrics["score"]
    assert alone.low is not None and by_repo.low is not None and by_repo.low < alone.low
    assert "clusters by repo, 1 tasks without it" in by_repo.method


MARK = st.sampled_from([*sorted(set(MARKS.values())), MISSING])
TASKS = st.dictionaries(st.text(max_size=3), st.text(MARK, min_size=1, max_size=4), max_size=6)


@settings(max_examples=60, deadline=None)
@given(TASKS, TASKS, st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_whatever_the_marks_every_task_is_somewhere_and_json_has_no_nan(
    old: dict[str, str], new: dict[str, str], cluster: bool, floor: float
) -> None:
    compared = compare_sides(
        side("a", old),
        side("b", new),
        cluster_by="k" if cluster else None,
        min_task_coverage=floor,
        margins={"score": 0.05, "pass@2": 0.1, "seconds": 0.2},
    )
    named = [p.task for p in compared.pairs] + [t.task for t in compared.left_out]
    assert sorted(named) == sorted(old.keys() | new.keys())
    t = compared.transitions
    assert t.worse + t.better + t.both_pass + t.both_fail + t.mixed == compared.comparable
    text = json.dumps(compared.model_dump(mode="json"), allow_nan=False)
    assert Comparison.model_validate(json.loads(text)) == compared
