"""Workflow commands: few, the important first, and nothing that names could plant."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.gate.annotations import render_annotations
from dayfly.gate.verdict import RuleResult, TaskCase

COMMAND = re.compile(r"::(error|warning|notice) title=([^:,]+)::(.+)")


def read(line: str) -> tuple[str, str, str]:
    """A command as the runner reads it."""
    level, title, message = COMMAND.fullmatch(line).groups()
    for token, escaped in ((":", "%3A"), (",", "%2C"), ("\r", "%0D"), ("\n", "%0A"), ("%", "%25")):
        title = title.replace(escaped, token)
        message = message if token in ":," else message.replace(escaped, token)
    return level, title, message


def test_the_first_says_the_verdict(verdict):
    level, title, message = read(render_annotations(verdict)[0])
    assert title == f"gate: {verdict.verdict}" and "the margin is 5" in message and "19 of 20" in message
    assert level == {0: "notice", 1: "error", 3: "warning", 4: "error"}[verdict.exit_code]


def test_errors_exist_only_where_the_exit_code_says_so(verdict):
    levels = {read(line)[0] for line in render_annotations(verdict)}
    assert ("error" in levels) == (verdict.exit_code in (1, 4))


def test_in_the_order_of_importance(make_verdict):
    titles = [read(line)[:2] for line in render_annotations(make_verdict("fail"))]
    assert titles == [
        ("error", "gate: fail"),
        ("error", "gate: must_pass"),
        ("error", "regressed: db-migrate"),
        ("warning", "gate: metric.seconds.margin: inconclusive (supporting)"),
        ("warning", "regressed: web-form"),
    ]


def test_an_invalid_verdict_blames_no_task(make_verdict):
    lines = [read(line) for line in render_annotations(make_verdict("invalid"))]
    assert [title for level, title, _ in lines if level == "error"] == ["gate: invalid"]


@pytest.mark.parametrize("kind", ["rules", "tasks"])
def test_at_most_ten_and_it_says_how_many_more(make_verdict, kind):
    many = [f"t{i}" for i in range(5000)]
    more = {
        "rules": tuple(
            RuleResult(id=n, kind="tasks", tier="critical", answer="fail", reason=n) for n in many
        ),
        "tasks": tuple(TaskCase(task=n, status="regressed") for n in many),
    }  # fmt: skip
    lines = render_annotations(make_verdict("fail", **{kind: more[kind]}))
    assert len(lines) == 10
    assert re.match(r"\d{4} more findings", read(lines[-1])[2])


def test_critical_rules_come_before_supporting_ones(make_verdict):
    rules = tuple(
        RuleResult(id=f"{tier}{i}", kind="metric", tier=tier, answer="fail", reason="x")
        for tier in ("advisory", "supporting", "critical")
        for i in range(4)
    )
    lines = render_annotations(make_verdict("fail", rules=rules, decided_by="critical0", tasks=()))
    titles = [read(line)[1].removeprefix("gate: ") for line in lines[1:9]]
    assert titles[:7] == [f"critical{i}" for i in (1, 2, 3)] + [f"supporting{i}" for i in range(4)]
    assert titles[7] == "advisory0: fail (advisory)"


def test_hostile_names_plant_nothing(hostile):
    lines = render_annotations(hostile)
    assert 1 <= len(lines) <= 10
    for line in lines:
        assert len(line.splitlines()) == 1 and COMMAND.fullmatch(line) and line.isprintable()
        assert len(line) < 8000


def test_values_are_escaped(make_verdict):
    rule = RuleResult(id="a:b,c%d", kind="tasks", tier="critical", answer="fail", reason="100 %: a, b\n::error::c")
    lines = render_annotations(make_verdict("fail", rules=(rule,), decided_by="", tasks=()))
    assert lines[1] == "::error title=gate%3A a%3Ab%2Cc%25d::100 %25: a, b\\n::error::c"
    assert read(lines[1])[1] == "gate: a:b,c%d"


@given(text=st.text(st.characters(exclude_categories=[])))
def test_any_text_stays_on_its_line(make_verdict, text):
    case = TaskCase(task=text, status="regressed", reason=text)
    rule = RuleResult(id=text, kind="tasks", tier="critical", answer="fail", reason=text, tasks=(text,))
    lines = render_annotations(make_verdict("fail", reason=text, tasks=(case,), rules=(rule,)))
    for line in lines:
        assert len(line.splitlines()) == 1 and COMMAND.fullmatch(line)
        line.encode()
