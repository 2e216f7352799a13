"""The Markdown summary: complete, bounded, and nothing of a name takes effect."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dayfly.gate.summary import LIMIT_BYTES, code, prose, render_summary
from dayfly.gate.verdict import RuleResult, TaskCase

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
OURS = {"<br>", "</details>"}


def inline(markdown: str) -> list:
    """Every inline token outside of code."""
    return [c for t in MARKDOWN.parse(markdown) if t.type == "inline" for c in t.children]


def tables(markdown: str) -> dict[str, list[list[str]]]:
    """Cells of each table by the title above it."""
    found: dict[str, list[list[str]]] = {}
    title, rows, row = "", [], None
    for token in MARKDOWN.parse(markdown):
        if token.type == "table_open":
            rows = found.setdefault(title, [])
        elif token.type == "tr_open":
            row = []
            rows.append(row)
        elif token.type == "html_block" and (match := re.search("<summary>(.*)</summary>", token.content)):
            title = match[1]
        elif token.type == "inline":
            text = "".join(c.content if c.type != "html_inline" else " " for c in token.children)
            if row is not None and token.level >= 4:
                row.append(text)
            else:
                title = text
    return found


def harmless(markdown: str) -> None:
    """No link, image, emphasis or HTML but ours; nothing that GitHub makes a link or a mention of."""
    for token in MARKDOWN.parse(markdown):
        assert token.type not in ("fence", "code_block", "hr", "blockquote_open", "bullet_list_open")
        if token.type == "html_block":
            assert re.fullmatch(r"<details><summary>[\w ,]+ \(\d+\)</summary>|</details>", token.content.strip())
    for token in inline(markdown):
        assert token.type in ("text", "code_inline", "softbreak", "strong_open", "strong_close", "html_inline")
        if token.type == "html_inline":
            assert token.content in OURS
        if token.type == "text":
            assert not re.search(r"[@#<>&$~`\[\]|\\]|//|www\.|:\w", token.content, re.I), token.content


def test_says_what_was_decided_and_on_what(verdict):
    text = render_summary(verdict)
    harmless(text)
    word = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive", "invalid": "invalid"}[
        verdict.verdict
    ]
    assert re.match(rf"## \S+ Gate (is )?{word}\n", text)
    assert f"Exit code {verdict.exit_code}." in text and "the score fell by 10 points" in text
    assert "19 of 20 rollouts graded (95.0 %)" in text
    figures = "-10.0 points (90 % interval -20.0 to +1.0) against the baseline over 9 comparable tasks"
    assert ("score 75.0 %" in text and figures in text) == (verdict.verdict != "invalid")
    for digest in ("sha256:" + "c" * 64, "sha256:baseline", "sha256:candidate"):
        assert digest in text


def test_a_tick_or_cross_per_rule(verdict):
    rows = tables(render_summary(verdict))["Rules"][1:]
    marks = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "invalid": "⚠️"}
    assert [(row[0], row[1]) for row in rows] == [(marks[r.answer], r.id) for r in verdict.rules]
    assert all("floor 95 %" in row[3] for row in rows)


def test_a_notice_is_neither_tick_nor_cross(make_verdict):
    rule = RuleResult(id="flaky", kind="notice", tier="advisory", answer="pass", reason="attempts disagree")
    assert tables(render_summary(make_verdict(rules=(rule,))))["Rules"][1] == [
        "ℹ️",
        "flaky",
        "",
        "attempts disagree",
    ]


def test_sections_failing_first(make_verdict):
    found = tables(render_summary(make_verdict("fail")))
    assert list(found) == [
        "Rules", "Regressions (2)", "Failed (1)", "Flaky (1)", "Quarantine (1)", "Left out (1)",
        "Not counted, quarantined (1)", "Improved (1)", "Passed (1)", "What was decided on",
    ]  # fmt: skip
    assert found["Regressions (2)"][1][:3] == ["db-migrate", "2/2", "0/2"]
    assert found["Quarantine (1)"][1] == ["known-bad", "core", "image is gone", "2026-12-31"]


def test_how_many_more_rollouts_would_decide(make_verdict):
    assert "About 40 more rollouts" in render_summary(make_verdict("inconclusive"))


def test_unknown_is_said(make_verdict):
    text = render_summary(make_verdict("invalid", comparison=None, baseline=None))
    assert "Baseline" not in tables(text)["What was decided on"][-1]
    bare = make_verdict().candidate.model_copy(update={"score": None, "graded": 0, "coverage": 0.0})
    assert "score not known, 0 of 20" in render_summary(make_verdict("inconclusive", candidate=bare))


def test_hostile_names_mean_nothing(hostile):
    text = render_summary(hostile)
    harmless(text)
    assert text.isprintable() or {c for c in text if not c.isprintable()} <= {"\n"}
    rows = [row for table in tables(text).values() for row in table]
    assert {len(row) for row in rows} <= {3, 4}
    assert sum(len(t) - 1 for n, t in tables(text).items() if n == "Rules") == len(hostile.rules)


@pytest.mark.parametrize("length", [10, 200, 5000])
def test_five_thousand_tasks_with_long_hostile_names_are_bounded(make_verdict, length):
    statuses = ["regressed", "failed", "flaky", "left out", "improved", "passed"]
    names = [f"{i}|`<b>@x\u202e\U0001f600" + "\U0001f600|" * length for i in range(5000)]
    cases = [TaskCase(task=n, status=statuses[i // 834], reason=n[:999]) for i, n in enumerate(names)]
    text = render_summary(make_verdict("fail", tasks=tuple(cases)))
    assert len(text.encode()) <= LIMIT_BYTES < 900 * 1024
    found = tables(text)
    assert list(found)[1] == "Regressions (834)" and list(found)[-1] == "What was decided on"
    left = sum(int(n) for n in re.findall(r"(\d+) rows left out", text))
    shown = sum(len(rows) - 1 for title, rows in found.items() if re.search(r"\(\d{3}\)", title))
    assert shown + left == 5000 and shown > 500


def test_five_thousand_ordinary_tasks_all_have_room(make_verdict):
    cases = tuple(TaskCase(task=f"task-{i}", status="passed", base="3/3", candidate="3/3") for i in range(5000))
    text = render_summary(make_verdict("pass", tasks=cases))
    assert "left out" not in text and len(tables(text)["Passed (5000)"]) == 5001


@given(text=st.text(st.characters(exclude_categories=[])))
def test_any_text_is_harmless(text):
    for made in (prose(text), code(text)):
        harmless(f"| a | b |\n| --- | --- |\n| {made} | c |")
        rows = tables(f"| a | b |\n| --- | --- |\n| {made} | c |")[""]
        assert len(rows) == 2 and len(rows[1]) == 2 and rows[1][1] == "c"


def test_plain_sentences_stay_plain():
    plain = "candidate: 3 of 4 rollouts graded (75 %), floor 95.5 %; about +2 more."
    assert prose(plain) == plain
    assert prose("pass@3 of user_name") == "`pass@3` of `user_name`"
