"""A comparison in words: what is unknown is called so, and no name can break a line or a block."""

from __future__ import annotations

from dayfly.compare import compare_sides
from dayfly.compare.markdown import render_markdown
from dayfly.compare.text import render_text
from dayfly.results.side import Side, TaskResults


def side(job: str, marks: dict[str, str]) -> Side:
    tasks = {n: TaskResults(task=n, task_digest="d", marks=m, seconds_sum=9.0) for n, m in sorted(marks.items())}
    return Side(
        job_id=job,
        job_name=job,
        agent="a",
        agent_digest=job,
        agent_kind="command",
        agent_options={},
        attempts=2,
        tasks=tasks,
    )


BASE = side("base", {"gone": "PP", "down": "PP", "up": "FF", "same": "PP", "flaky": "PF", "lost": "ii"})
CANDIDATE = side("new", {"fresh": "PP", "down": "FF", "up": "PP", "same": "PP", "flaky": "PF", "lost": "PP"})


def test_words_say_what_changed_and_what_could_not_be_compared() -> None:
    lines = render_text(compare_sides(BASE, CANDIDATE))
    text = "\n".join(lines)
    assert "4 of 7 tasks can be compared" in text
    for reason in (
        "only in the baseline: gone",
        "only in the candidate: fresh",
        "not graded in the baseline: lost",
    ):
        assert reason in text
    assert "  worse: down  pass→fail  PP → FF" in lines and "  better: up  fail→pass  FF → PP" in lines
    assert "tokens: unknown" in text and "cost_usd: unknown" in text
    assert "flaky in the baseline: flaky 1/2: flaky/a/1 passed, flaky/a/2 did not" in lines
    assert "nan" not in text.lower()


def test_long_lists_say_how_much_is_not_shown() -> None:
    many = {f"t{i:03}": "PP" for i in range(50)}
    lines = render_text(compare_sides(side("a", many), side("b", dict.fromkeys(many, "FF"))), most=5)
    assert sum(line.startswith("  worse: ") for line in lines) == 5
    assert "  and 45 more that got worse; --all lists them" in lines


def test_nothing_to_compare_is_said_and_no_score_is() -> None:
    text = "\n".join(render_text(compare_sides(side("a", {"x": "PP"}), side("b", {"y": "PP"}))))
    assert "0 of 2 tasks can be compared" in text and "score: unknown (no task is comparable)" in text


def test_markdown_is_a_table_and_an_indented_block_whatever_the_names() -> None:
    odd = "a\n```\n<b>|@all\x1b[31m"
    text = render_markdown([compare_sides(side("a", {odd: "PP"}), side("b", {odd: "FF"}))], most=200)
    assert "\x1b" not in text
    after_table = text.split("\n\n", 2)[2]
    assert all(not line or line.startswith("    ") for line in after_table.splitlines())
