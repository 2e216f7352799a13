"""JUnit: valid, read back by a parser, and never at odds with the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from lxml import etree

from dayfly.gate.junit import render_junit

SCHEMA = etree.XMLSchema(etree.parse(str(Path(__file__).with_name("junit.xsd"))))


def cases(document: bytes) -> dict[str, object]:
    """Results of each case by name, as a CI reads them; None for passed."""
    found = {}
    for suite in JUnitXml.fromstring(document):
        for case in suite:
            assert case.classname and case.time is not None
            found[case.name] = case.result[0] if case.result else None
    return found


def valid(document: bytes) -> etree._Element:
    root = etree.fromstring(document)
    SCHEMA.assertValid(root)
    return root


def test_valid_and_read_back(verdict):
    valid(render_junit(verdict))
    read = JUnitXml.fromstring(render_junit(verdict))
    assert [suite.name for suite in read] == ["gate rules", "tasks"]
    rules, tasks = (list(suite) for suite in read)
    assert [c.name for c in rules] == [r.id for r in verdict.rules]
    assert [c.name for c in tasks] == [t.task for t in verdict.tasks]
    assert next(c.time for c in tasks) == 1.5


def test_what_a_ci_counts_agrees_with_the_exit_code(verdict):
    root = valid(render_junit(verdict))
    failures, errors = (sum(int(s.get(kind)) for s in root) for kind in ("failures", "errors"))
    assert (failures, errors) == (len(root.findall(".//failure")), len(root.findall(".//error")))
    assert (failures > 0, errors > 0) == (verdict.exit_code == 1, verdict.exit_code in (3, 4))
    for suite in root:
        assert int(suite.get("tests")) == len(suite.findall("testcase"))
        assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped"))


def test_a_failed_gate_names_the_rules_and_the_tasks_behind_them(make_verdict):
    found = cases(render_junit(make_verdict("fail")))
    failed = {name for name, result in found.items() if isinstance(result, Failure)}
    assert failed == {"metric.score.margin", "must_pass", "db-migrate"}
    assert "floor 95 %" in found["must_pass"].message
    assert "task: db-migrate" in found["must_pass"].text
    assert "baseline 2/2, candidate 0/2" in found["db-migrate"].message


def test_tasks_that_do_not_decide_are_skipped_with_their_reason(make_verdict):
    found = cases(render_junit(make_verdict("pass")))
    skipped = {n: r.message for n, r in found.items() if isinstance(r, Skipped)}
    assert set(skipped) == {
        "metric.cost_usd.margin", "metric.seconds.margin",
        "db-migrate", "web-form", "hard", "coin", "new", "known-bad",
    }  # fmt: skip
    assert skipped["known-bad"] == "quarantined: until 2026-12-31"
    assert "no rule fails for it" in skipped["web-form"]
    assert found["easy"] is None and found["better"] is None


def test_an_advisory_rule_never_fails(verdict):
    assert not isinstance(cases(render_junit(verdict))["metric.cost_usd.margin"], (Failure, Error))


def test_at_an_invalid_verdict_nothing_is_said_against_the_agent(make_verdict):
    found = cases(render_junit(make_verdict("invalid")))
    assert [n for n, r in found.items() if isinstance(r, Error)] == ["coverage.side.candidate"]
    assert not any(isinstance(r, Failure) for r in found.values())


def test_a_verdict_without_a_rule_behind_it_counts_all_the_same(make_verdict):
    found = cases(render_junit(make_verdict("fail", rules=(), decided_by="early_stop")))
    assert isinstance(found["verdict"], Failure) and "fell by 10 points" in found["verdict"].message


def test_digests_are_properties(make_verdict):
    root = valid(render_junit(make_verdict("pass")))
    read = {p.get("name"): p.get("value") for p in root[0].find("properties")}
    assert read["policy_digest"].startswith("sha256:c") and read["baseline_digest"] == "sha256:baseline"
    assert read["candidate_digest"] == "sha256:candidate" and read["verdict"] == "pass"


def test_hostile_names_stay_names(hostile):
    root = valid(render_junit(hostile))
    assert len(root.findall(".//testcase")) == len(hostile.rules) + len(hostile.tasks)
    assert "\\x00nul\\x08" in [c.get("name") for c in root.iter("testcase")]
    JUnitXml.fromstring(render_junit(hostile))


def test_seconds_that_are_no_figure_are_none(make_verdict):
    odd = [t.model_copy(update={"seconds": float("nan")}) for t in make_verdict().tasks]
    valid(render_junit(make_verdict(tasks=tuple(odd))))


@given(text=st.text(st.characters(exclude_categories=[])))
def test_any_text_gives_a_valid_document(make_verdict, text):
    case = make_verdict().tasks[0].model_copy(update={"task": text, "reason": text})
    rule = make_verdict().rules[0].model_copy(update={"id": text, "reason": text})
    valid(render_junit(make_verdict(reason=text, tasks=(case,), rules=(rule,))))


@pytest.mark.parametrize("broken", [b'hostname="localhost" ', b'time="0.250"', b"<system-out>"])
def test_the_schema_finds_what_is_missing(make_verdict, broken):
    document = render_junit(make_verdict())
    assert broken in document
    other = document.replace(broken, b"<!-- -->" if broken.startswith(b"<") else b"").replace(b"</system-out>", b"")
    assert not SCHEMA.validate(etree.fromstring(other if b"<!-- -->" in other else document.replace(broken, b"")))
