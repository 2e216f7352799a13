"""The page of sides that were really compared: from marks to hatched cells."""

from __future__ import annotations

import lxml.html

from dayfly.compare import compare_sides
from dayfly.compare.html import render_html
from dayfly.model import VerifierClass
from dayfly.results.side import Side, TaskResults


def side(agent: str, marks: dict[str, str], digests: dict[str, str] | None = None) -> Side:
    tasks = {
        name: TaskResults(
            task=name,
            task_digest=(digests or {}).get(name, f"sha256:{name}"),
            marks=given,
            reward_sum=float(given.count("P")),
            seconds_sum=12.0 * sum(m in "PFt" for m in given),
            isolation=("tcg",),
            verifier_classes=(VerifierClass.REBOOTED,),
            tags=("db",) if name < "f" else ("git",),
        )
        for name, given in sorted(marks.items())
    }
    return Side(
        job_id=f"job-{agent}",
        job_name="nightly",
        agent=agent,
        agent_digest=f"sha256:{agent}",
        agent_kind="command",
        agent_options={"model": agent},
        attempts=max(map(len, marks.values())),
        tasks=tasks,
        started_unix=1_700_000_000.0,
        digest=f"sha256:results-{agent}",
    )


OLD = {"a": "PP", "b": "PP", "c": "PF", "d": "FF", "e": "PP", "f": "Pi", "g": "PP", "gone": "PP"}
NEW = {"a": "Ft", "b": "PF", "c": "PF", "d": "PP", "e": "PP", "f": "ii", "g": "PP", "h": "PP"}


def page_of(*candidates: Side) -> str:
    base = side("old", OLD)
    return render_html([compare_sides(base, c) for c in candidates])


def words(element: lxml.html.HtmlElement) -> str:
    return " ".join(" ".join(element.itertext()).split())


def rows(page: str) -> dict[str, str]:
    found = lxml.html.document_fromstring(page).xpath("//table[contains(@class, 'grid')]/tbody/tr")
    return {words(r.find("th")): " | ".join(words(c) for c in r.findall("td")) for r in found}


def test_every_task_of_either_side_is_on_the_page():
    found = rows(page_of(side("new", NEW, {"g": "sha256:changed"})))
    assert found["a"] == "2/2 P P | ▼ 0/2 F t"
    assert found["b"] == "2/2 P P | ▽ 1/2 P F"
    assert found["d"] == "0/2 F F | ▲ 2/2 P P"
    assert found["c"] == "1/2 P F | = 1/2 P F"
    assert found["f"].startswith("left out: not graded in the candidate")
    assert found["g"].startswith("left out: task changed")
    assert found["gone"] == "left out: only in the baseline" and found["h"] == "left out: only in the candidate"
    assert found.keys() == OLD.keys() | NEW.keys()


def test_figures_that_were_not_recorded_are_unknown():
    page = page_of(side("new", NEW))
    said = words(lxml.html.document_fromstring(page))
    assert "cost_usd unknown (not recorded" in said and "tokens unknown (not recorded" in said
    assert "6 of 9 tasks compared" in said
    assert "c candidate 1/2 c/new/1 c/new/2" in said, "flaky, with its evidence"


def test_three_versions_are_on_one_page():
    page = page_of(side("new", NEW), side("newer", dict.fromkeys(OLD, "PP")))
    assert rows(page)["a"] == "2/2 P P | ▼ 0/2 F t | = 2/2 P P"
    assert rows(page)["gone"] == "2/2 P P | left out: only in the baseline | = 2/2 P P"
