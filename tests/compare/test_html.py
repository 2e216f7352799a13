"""The page of a comparison: self-contained, whole, honest about what is not known, and not to be broken out of."""

from __future__ import annotations

import math
import re

import lxml.etree
import lxml.html
import pytest

from dayfly.compare.html import render_html
from dayfly.compare.html_grid import MOST_CELLS, MOST_LEFT_OUT, MOST_TASKS
from dayfly.compare.html_sections import MOST_FLAKY
from dayfly.compare.model import (
    Comparison,
    Difference,
    Flaky,
    Group,
    LeftOut,
    Metric,
    Pair,
    SideFacts,
    Transitions,
)
from dayfly.model import VerifierClass
from dayfly.results.side import FAILS, PASSES

ORDER = ("pass→fail", "worse", "fail→pass", "better", "pass", "fail", "mixed")


def facts(agent: str = "old", **changed: object) -> SideFacts:
    values: dict[str, object] = {
        "job_id": f"job-{agent}",
        "job_name": "nightly",
        "agent": agent,
        "agent_digest": f"sha256:{agent}-agent",
        "results_digest": f"sha256:{agent}-results",
        "planned": 9,
        "graded": 8,
        "faults": 1,
        "coverage": 8 / 9,
        "tasks": 3,
        "attempts": 3,
        "score": 0.5,
        "isolation": ("tcg",),
        "verifier_classes": (VerifierClass.SEPARATE,),
        "started_unix": 1_700_000_000.0,
        "source": "files",
    }
    return SideFacts(**(values | changed))


def pair(task: str, base: str, candidate: str) -> Pair:
    before, after = _share(base), _share(candidate)
    if (before, after) in ((1, 0), (0, 1)):
        transition = "pass→fail" if before else "fail→pass"
    elif before != after:
        transition = "worse" if after < before else "better"
    else:
        transition = {1: "pass", 0: "fail"}.get(before, "mixed")
    return Pair(task, base, candidate, before, after, transition, 10.0, 11.0)


def _share(marks: str) -> float:
    passed = sum(map(marks.count, PASSES))
    return passed / (passed + sum(map(marks.count, FAILS)))


def metric(name: str = "score", **changed: object) -> Metric:
    values: dict[str, object] = {
        "name": name,
        "relative": name in ("seconds", "tokens", "cost_usd"),
        "higher_is_better": name not in ("seconds", "tokens", "cost_usd"),
        "known": True,
        "tasks": 3,
        "base": 0.6,
        "candidate": 0.5,
        "delta": -0.1,
        "low": -0.2,
        "high": 0.02,
        "p_worse": 0.07,
        "p_better": 0.9,
        "method": "made up",
    }
    return Metric(**(values | changed))


def compared(pairs: list[Pair], **changed: object) -> Comparison:
    pairs = sorted(pairs, key=lambda p: (ORDER.index(p.transition), p.delta, p.task))
    count = {name: sum(p.transition == name for p in pairs) for name in ORDER}
    values: dict[str, object] = {
        "base": facts("old"),
        "candidate": facts("new"),
        "alpha": 0.05,
        "same": ("task", "verifier"),
        "differences": (Difference(aspect="model", base="small-1", candidate="small-2"),),
        "comparable": len(pairs),
        "left_out": (),
        "transitions": Transitions(
            pass_to_fail=count["pass→fail"],
            worse=count["pass→fail"] + count["worse"],
            fail_to_pass=count["fail→pass"],
            better=count["fail→pass"] + count["better"],
            both_pass=count["pass"],
            both_fail=count["fail"],
            mixed=count["mixed"],
        ),
        "pairs": tuple(pairs),
        "metrics": {"score": metric()},
    }
    return Comparison(**(values | changed))


def usual(**changed: object) -> Comparison:
    pairs = [
        pair("one", "PPP", "FFF"),
        pair("two", "PPF", "P.i"),
        pair("three", "PPP", "PPP"),
        pair("four", "tFe", "PPP"),
        pair("five", "PFF", "FFP"),
        pair("six", "PPP", "PPF"),
    ]
    out = (
        LeftOut(task="gone", reason="only in the baseline"),
        LeftOut(task="new", reason="task changed", detail="x"),
    )
    return compared(pairs, **({"left_out": out} | changed))


def read(page: str) -> lxml.html.HtmlElement:
    return lxml.html.document_fromstring(page)


def words(element: lxml.html.HtmlElement) -> str:
    return " ".join(" ".join(element.itertext()).split())


def rows(page: str) -> dict[str, list[lxml.html.HtmlElement]]:
    """The cells of each task in the grid."""
    return {
        words(row.find("th")): row.findall("td")
        for row in read(page).xpath("//table[contains(@class, 'grid')]/tbody/tr")
    }


def test_the_headline_says_difference_interval_p_and_how_many_tasks():
    said = words(read(render_html([usual()])).xpath("//*[contains(@class, 'headline')]")[0])
    assert "Score 60.0 % → 50.0 %: −10.0 points" in said
    assert "90 % interval −20.0 to +2.0 points" in said
    assert "p 0.07 for worse, 0.90 for better" in said
    assert "6 of 8 tasks compared" in said
    assert "A 8 of 9 attempts (88.9 %)" in said
    assert "No difference is shown" in said


@pytest.mark.parametrize(
    ("changed", "said", "shape"),
    [
        ({"p_worse": 0.05, "high": -0.01}, "The candidate is shown to be worse", "▼"),
        ({"p_better": 0.01, "delta": 0.2, "low": 0.1, "high": 0.3}, "The candidate is shown to be better", "▲"),
        ({"p_worse": 0.01, "high": None}, "The candidate is shown to be worse", "▼"),
        ({"p_worse": 0.01, "high": 0.01}, "No difference is shown", "◆"),
        ({"p_better": 0.01, "delta": 0.2, "low": 0.0, "high": 0.3}, "No difference is shown", "◆"),
        ({"p_worse": 0.051, "high": -0.01}, "No difference is shown", "◆"),
        ({"p_worse": None, "p_better": None, "low": None, "high": None}, "No difference is shown", "◆"),
        ({"known": False, "reason": "nothing graded"}, "Score: unknown (nothing graded)", "◆"),
    ],
)
def test_worse_and_better_are_claimed_only_when_they_are_shown(changed, said, shape):
    page = render_html([usual(metrics={"score": metric(**changed)})])
    headline = words(read(page).xpath("//*[contains(@class, 'headline')]")[0])
    assert said in headline and shape in headline


def test_every_picture_is_there_with_a_name():
    page = render_html([usual(metrics={n: metric(n) for n in ("score", "pass@3", "reward", "seconds")})])
    pictures = read(page).xpath("//svg[@role='img']")
    names = [p.findtext("title") for p in pictures]
    flows = "Of 6 compared tasks 1 went from passed to failed and 1 from failed to passed"
    assert len(names) == 4 and all(names) and all(p.get("aria-label") for p in pictures)
    assert [n.split(",")[0].split(";")[0] for n in names] == [
        "Difference of shares of passes",
        "Difference of mean reward",
        "Relative change of the mean",
        flows,
    ]


def test_the_picture_of_intervals_has_zero_margin_point_and_bounds_in_their_order():
    page = render_html([usual(metrics={"score": metric(margin=0.05)})])
    picture = read(page).xpath("//svg[contains(@class, 'intervals')]")[0]

    def at(name: str, attribute: str = "x1") -> float:
        return float(picture.xpath(f".//line[contains(@class, '{name}')]")[0].get(attribute).rstrip("%"))

    point = float(picture.xpath(".//svg[path[contains(@class, 'point')]]")[0].get("x").rstrip("%"))
    assert 0 <= at("bar") < point < at("margin") < at("zero") < at("bar", "x2") <= 100
    # delta is at −10 of −20 to +2 points, the margin at −5: positions are to scale.
    length = at("bar", "x2") - at("bar")
    assert (point - at("bar")) / length == pytest.approx(10 / 22, abs=1e-3)
    assert (at("margin") - at("bar")) / length == pytest.approx(15 / 22, abs=1e-3)


def test_more_time_is_worse_and_less_is_better():
    slower = metric("seconds", delta=0.2, low=0.1, high=0.3, p_worse=0.01)
    cheaper = metric("tokens", delta=-0.2, low=-0.3, high=-0.1, p_better=0.01)
    picture = read(render_html([usual(metrics={"seconds": slower, "tokens": cheaper})])).xpath(
        "//svg[contains(@class, 'intervals')]"
    )[0]
    assert [p.get("class") for p in picture.xpath(".//path[contains(@class, 'point')]")] == [
        "point worse",
        "point better",
    ]


def test_the_margin_of_what_should_be_small_is_on_its_other_side():
    page = render_html([usual(metrics={"seconds": metric("seconds", margin=0.1)})])
    picture = read(page).xpath("//svg[contains(@class, 'intervals')]")[0]
    zero, margin = (picture.xpath(f".//line[@class='{n}']")[0].get("x1").rstrip("%") for n in ("zero", "margin"))
    assert float(margin) > float(zero)


def test_a_bound_far_outside_is_an_arrow_at_the_edge():
    page = render_html([usual(metrics={"seconds": metric("seconds", delta=2.5, low=0.1, high=90.0)})])
    picture = read(page).xpath("//svg[contains(@class, 'intervals')]")[0]
    assert "[+10.0, +9000.0]" in words(picture)
    for line in picture.xpath(".//line"):
        assert 0 <= float(line.get("x1").rstrip("%")) <= float(line.get("x2").rstrip("%")) <= 100
    assert len(picture.xpath(".//path[contains(@d, 'L0 0')]")) == 1


def test_what_is_unknown_is_said_and_never_drawn_as_zero():
    unknown = metric("cost_usd", known=False, reason="not recorded", base=None, delta=None)
    page = render_html([usual(metrics={"cost_usd": unknown})])
    picture = read(page).xpath("//svg[contains(@class, 'intervals')]")[0]
    assert words(picture).count("unknown") == 1
    assert not picture.xpath(".//path[contains(@class, 'point')]") and not picture.xpath(".//line[@class='bar']")
    assert "unknown (not recorded)" in words(read(page))


def test_the_flows_count_every_compared_task():
    page = render_html([usual()])
    picture = read(page).xpath("//svg[contains(@class, 'flow')]")[0]
    said = [t.text for t in picture.xpath("./text")]
    assert [t for t in said if re.match(r"\d", t)] == [
        *("3 passed", "2 mixed", "1 failed"),
        *("3 passed", "2 mixed", "1 failed"),
        "2 left out",
    ]
    assert len(picture.xpath(".//path[contains(@class, 'ribbon worse')]")) == 2
    assert picture.xpath("./rect[contains(@fill, 'url(#')]"), "what is left out is hatched"


def test_the_grid_has_a_row_per_task_worst_first():
    page = render_html([usual()])
    assert list(rows(page)) == ["one", "six", "four", "two", "three", "five", "gone", "new"]
    assert [words(c) for c in rows(page)["one"]] == ["3/3 P P P", "▼ 0/3 F F F"]
    assert [c.get("style") for c in rows(page)["one"]] == ["--s:100%", "--s:0%"]
    assert [words(c) for c in rows(page)["two"]] == ["2/3 P P F", "△ 1/1 P . i"]


def test_what_is_missing_is_hatched():
    page = render_html([usual()])
    assert [u.text for u in rows(page)["two"][1].findall("u")] == [".", "i"]
    assert [(c.get("class"), words(c)) for c in rows(page)["new"]] == [("missing", "left out: task changed (x)")]
    assert ".grid td.missing" in page and "repeating-linear-gradient" in page
    assert "no record (not graded)" in words(read(page)) and "infra error (not graded)" in words(read(page))


def test_a_task_left_out_of_one_of_two_comparisons_is_hatched_there():
    second = compared([pair("one", "PPP", "PPP")], candidate=facts("third"), left_out=usual().left_out)
    cells = rows(render_html([usual(), second]))
    assert [words(c) for c in cells["one"]] == ["3/3 P P P", "▼ 0/3 F F F", "= 3/3 P P P"]
    assert [words(c) for c in cells["two"]] == ["2/3 P P F", "△ 1/1 P . i", "no such task"]
    assert [c.get("class") for c in cells["two"]] == [None, "better", "missing"]


def test_many_attempts_are_counted_instead_of_drawn():
    cells = rows(render_html([compared([pair("one", "P" * 40 + "F." * 5, "F" * 50)])]))["one"]
    assert [words(c) for c in cells] == ["40/45 P ×40 F ×5 . ×5", "▽ 0/50 F ×50"]


def test_flaky_tasks_come_with_their_evidence():
    flaky = Flaky(task="five", side="candidate", passed=1, graded=3, passing="five/new/3", failing="five/new/1")
    said = words(read(render_html([usual(flaky=(flaky,))])).xpath("//section[@id='flaky-tasks']")[0])
    assert "five candidate 1/3 five/new/3 five/new/1" in said


def test_groups_versions_and_differences_are_shown():
    page = render_html(
        [usual(groups=(Group(tag="db", tasks=1, base=1, candidate=1, delta=0, low=None, high=None),))]
    )
    said = words(read(page))
    assert "db 1 100.0 % 100.0 % 0.0 points unknown" in said
    assert "sha256:old-agent" in said and "sha256:new-results" in said and "2023-11-14 22:13 UTC" in said
    assert "model small-1 small-2 whole side" in said


def test_nothing_known_at_all_is_a_page_too():
    nothing = facts("empty", planned=0, graded=0, coverage=0.0, score=None, isolation=(), started_unix=0.0)
    unknown = metric(known=False, reason="no task can be compared", delta=None)
    page = render_html([compared([], base=nothing, candidate=nothing, metrics={"score": unknown})])
    said = words(read(page))
    assert "No task could be compared." in said and "nothing was planned" in said and "started unknown" in said
    assert "0.0 %" not in said
    assert "Nothing was compared." in render_html([])


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='x",
    "</title></style></svg><svg onload=x>",
    "a\x1b[31mred\x00\x07",
    "left\u202egnp.exe\u2066",
    "&lt;b&gt; &amp;amp;",
    "]]><!-- --><?php ?>",
    "half \ud800 surrogate",
    "line\nbreak\u2028x",
    "=1+1|`x`",
]


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_text_stays_text_and_is_shown(evil):
    page = render_html(
        [
            compared(
                [pair(evil, "PPP", "FFF"), pair(f"{evil}2", "PPP", "PPP")],
                base=facts(evil, job_name=evil, problems=(evil,)),
                left_out=(LeftOut(task=f"{evil}3", reason="task changed", detail=evil),),
                differences=(Difference(aspect="prompt", base=evil, candidate=evil),),
                groups=(Group(tag=evil, tasks=1, base=1, candidate=0, delta=-1, low=-1, high=0),),
                flaky=(Flaky(task=evil, side="base", passed=1, graded=2, passing=evil, failing=evil),),
                metrics={evil: metric(evil, method=evil), "cost_usd": metric("cost_usd", known=False, reason=evil)},
            )
        ],
        title=evil,
    )
    page.encode("utf-8")
    parsed = read(page)
    plain = read(render_html([usual()]))
    known = {e.tag for e in plain.iter()}
    assert {e.tag for e in parsed.iter()} <= known | {"figure", "figcaption"}, "no element that text brought in"
    assert not any(name.startswith("on") for e in parsed.iter() for name in e.attrib)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    shown = "".join(parsed.xpath("//section[@id='tasks']//tbody//th")[0].itertext())
    assert shown in (evil, evil.encode("unicode_escape").decode())


def elements_are_balanced(page: str) -> None:
    """Every element but those without an end is closed in its order: the page is then well-formed XML."""
    lxml.etree.fromstring(re.sub(r"(<meta [^>]*)>", r"\1/>", page).encode())


def test_the_page_is_balanced_and_takes_nothing_from_anywhere():
    page = render_html([usual(), usual(candidate=facts("third"))])
    elements_are_balanced(page)
    parsed = read(page)
    for element in parsed.iter():
        for name, value in element.attrib.items():
            assert name not in ("src", "srcset", "action", "background", "poster", "ping"), name
            if name == "href":
                assert value.startswith("#") and parsed.xpath(f"//*[@id='{value[1:]}']")
    assert not parsed.xpath("//script | //link | //iframe | //object | //embed | //form | //img")
    assert not re.search(r"@import|url\((?!#)|https?:|//[a-z]", page)
    policy = parsed.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")[0]
    assert policy.split("; ")[:2] == ["default-src 'none'", "style-src 'unsafe-inline'"]
    ids = parsed.xpath("//@id")
    assert len(ids) == len(set(ids))


def test_tables_can_be_read_aloud():
    for element in read(render_html([usual()])).xpath("//table"):
        assert element.find("caption").text_content()
        assert all(h.get("scope") == "col" for h in element.xpath("./thead//th"))
        assert all(h.get("scope") == "row" for h in element.xpath("./tbody//th"))


@pytest.mark.parametrize("odd_value", [None, math.nan, math.inf, -math.inf])
def test_no_nan_and_no_none_on_the_page(odd_value):
    fields = ("base", "candidate", "delta", "low", "high", "p_worse", "p_better", "p_beyond_margin")
    values = dict.fromkeys(fields, odd_value)
    odd = {
        "score": metric(**values),
        "reward": metric("reward", **(values | {"delta": 0.0})),
        "pass@2": metric("pass@2", margin=0.1, p_beyond_margin=odd_value),
        "seconds": metric("seconds", low=odd_value, high=odd_value, margin=0.1),
    }
    page = render_html(
        [usual(metrics=odd, groups=(Group(tag="t", tasks=1, base=1, candidate=1, delta=0, low=odd_value, high=0),))]
    )
    assert not re.search(r"\b([Nn]a[Nn]|inf|None|null)\b", page)


def test_equal_comparisons_give_equal_pages():
    assert render_html([usual()]) == render_html([usual()])


def many(count: int, candidate: str) -> Comparison:
    return compared([pair(f"suite/task-{n:06}", "PPPPP", candidate if n % 2 else "PPPPP") for n in range(count)])


@pytest.mark.parametrize("count", [5_000, 100_000])
def test_very_many_tasks_make_no_very_large_page(count):
    flaky = tuple(
        Flaky(task=f"t{n}", side="base", passed=1, graded=2, passing=f"t{n}/a/1", failing=f"t{n}/a/2")
        for n in range(count)
    )
    out = tuple(LeftOut(task=f"gone-{n}", reason="only in the baseline") for n in range(count))
    page = render_html([many(count, "FFFFF").model_copy(update={"flaky": flaky, "left_out": out})])
    assert len(page.encode()) < 2 * 1024 * 1024
    said = words(read(page))
    assert f"{count // 2 - MOST_TASKS:,} more are not drawn" in said
    assert f"{count // 2:,} tasks with equal results are not drawn" in said
    assert f"{count - MOST_LEFT_OUT:,} more are not drawn" in said
    assert f"{count - MOST_FLAKY:,} more are not shown" in said
    assert len(rows(page)) == MOST_TASKS + MOST_LEFT_OUT


def test_all_tasks_are_drawn_when_they_are_few_enough_and_the_differing_ones_when_not():
    assert len(rows(render_html([many(MOST_TASKS, "FFFFF")]))) == MOST_TASKS
    page = render_html([many(MOST_TASKS + 2, "FFFFF")])
    assert len(rows(page)) == MOST_TASKS // 2 + 1
    versions = [many(MOST_TASKS, "FFFFF").model_copy(update={"candidate": facts(f"v{n}")}) for n in range(5)]
    assert len(rows(render_html(versions))) == MOST_CELLS // 6
