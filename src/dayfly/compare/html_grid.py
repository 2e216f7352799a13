"""The grid of tasks and versions. What is missing or not graded is hatched and never shown as 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dayfly.compare.html_markup import Html, join, tag, text
from dayfly.compare.model import Comparison, LeftOut, Pair, SideFacts, Transition
from dayfly.results.side import FAILS, MARKS, MISSING, PASSES

MOST_TASKS = 2000
"""With more, equal tasks are not drawn."""
MOST_CELLS = 6000
MOST_LEFT_OUT = 500
_MOST_MARKS = 20

SYMBOLS: dict[Transition, str] = {
    "pass→fail": "▼",
    "worse": "▽",
    "fail→pass": "▲",
    "better": "△",
    "pass": "=",
    "fail": "=",
    "mixed": "=",
}
_RANKS: dict[Transition, int] = {name: rank for rank, name in enumerate(SYMBOLS)}
_TONES = {"pass→fail": "worse", "worse": "worse", "fail→pass": "better", "better": "better"}


@dataclass(frozen=True)
class Version:
    """One side, with the letter that stands for it on the page."""

    letter: str
    facts: SideFacts


Versions = dict[tuple[str, str, str], Version]
"""By `version_key`."""


def name_versions(comparisons: Sequence[Comparison]) -> Versions:
    """Every side once, the first baseline first."""
    named: Versions = {}
    for facts in (f for c in comparisons for f in (c.base, c.candidate)):
        named.setdefault(version_key(facts), Version(_letter(len(named)), facts))
    return named


def version_key(facts: SideFacts) -> tuple[str, str, str]:
    return facts.job_id, facts.agent, facts.results_digest


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"V{number + 1}"


@dataclass
class _Row:
    """One task: what each comparison has of it, by the comparison's place."""

    task: str
    pairs: dict[int, Pair] = field(default_factory=dict)
    left_out: dict[int, LeftOut] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, float, str]:
        return (
            min(_RANKS[p.transition] for p in self.pairs.values()),
            min(p.delta for p in self.pairs.values()),
            self.task,
        )

    @property
    def differs(self) -> bool:
        return any(p.transition in _TONES for p in self.pairs.values())


def draw_grid(comparisons: Sequence[Comparison]) -> Html:
    """Tasks that differ, worst first; those that do not; those left out; and what the marks mean."""
    rows = _gather(comparisons)
    compared = sorted((r for r in rows.values() if r.pairs), key=lambda r: r.rank)
    differing = [r for r in compared if r.differs]
    equal = [r for r in compared if not r.differs]
    out = sorted((r for r in rows.values() if not r.pairs), key=lambda r: r.task)
    columns = _columns(comparisons)
    most = min(MOST_TASKS, MOST_CELLS // len(columns))
    draw_equal = len(compared) <= most
    return join(
        [
            _legend(comparisons),
            _table("Tasks that differ, worst first", differing, most, columns),
            tag(
                "details",
                tag("summary", f"{len(equal):,} tasks with equal results"),
                _table("Tasks with equal results", equal, most, columns)
                if draw_equal
                else tag("p", f"{len(equal):,} tasks with equal results are not drawn: there are too many."),
            )
            if equal
            else Html(),
            _table("Tasks left out of every comparison", out, MOST_LEFT_OUT, columns) if out else Html(),
        ]
    )


def _gather(comparisons: Sequence[Comparison]) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for place, comparison in enumerate(comparisons):
        for pair in comparison.pairs:
            rows.setdefault(pair.task, _Row(pair.task)).pairs[place] = pair
        for left in comparison.left_out:
            rows.setdefault(left.task, _Row(left.task)).left_out[place] = left
    return rows


@dataclass(frozen=True)
class _Column:
    """A version, and in which comparisons it is the baseline or the candidate."""

    version: Version
    base_of: tuple[int, ...]
    candidate_of: tuple[int, ...]


def _columns(comparisons: Sequence[Comparison]) -> list[_Column]:
    made = []
    for key, version in name_versions(comparisons).items():
        base_of = tuple(n for n, c in enumerate(comparisons) if version_key(c.base) == key)
        candidate_of = tuple(n for n, c in enumerate(comparisons) if version_key(c.candidate) == key)
        made.append(_Column(version, base_of, candidate_of))
    return made


def _table(caption: str, rows: Sequence[_Row], most: int, columns: Sequence[_Column]) -> Html:
    if not rows:
        return tag("p", f"{caption}: none.")
    heads = [tag("th", "task", scope="col")]
    heads += [tag("th", f"{c.version.letter} {c.version.facts.agent}", scope="col") for c in columns]
    body = [tag("tr", tag("th", r.task, scope="row"), *_cells(r, columns)) for r in rows[:most]]
    made = tag(
        "table",
        tag("caption", f"{caption} ({len(rows):,})"),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *body),
        class_="grid",
        style=f"--columns:{len(columns)}",
    )
    rest = len(rows) - most
    note = tag("p", f"{rest:,} more are not drawn: there are too many.") if rest > 0 else Html()
    return join([tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption), note])


def _cells(row: _Row, columns: Sequence[_Column]) -> list[Html]:
    if not row.pairs and len({(o.reason, o.detail) for o in row.left_out.values()}) == 1:
        return [_missing(next(iter(row.left_out.values())), span=len(columns))]
    return [_cell(row, column) for column in columns]


def _cell(row: _Row, column: _Column) -> Html:
    for place in column.candidate_of:
        if place in row.pairs:
            pair = row.pairs[place]
            tone = _TONES.get(pair.transition)
            return _marked(pair.candidate_marks, tag("em", SYMBOLS[pair.transition]), tone)
    for place in column.base_of:
        if place in row.pairs:
            return _marked(row.pairs[place].base_marks, Html(), None)
    places = [p for p in (*column.candidate_of, *column.base_of) if p in row.left_out]
    return _missing(row.left_out[places[0]]) if places else _missing(None)


def _missing(left: LeftOut | None, span: int | None = None) -> Html:
    if left is None:
        said = "no such task"
    else:
        said = f"left out: {left.reason}" + (f" ({left.detail})" if left.detail else "")
    return tag("td", tag("span", said), class_="missing", colspan=span)


def _marked(marks: str, before: Html, tone: str | None) -> Html:
    passed = sum(map(marks.count, PASSES))
    graded = passed + sum(map(marks.count, FAILS))
    if not graded:
        return tag("td", before, tag("span", "not graded"), " ", _attempts(marks), class_="missing")
    share = tag("span", f"{passed}/{graded}")
    return tag("td", before, share, " ", _attempts(marks), class_=tone, style=f"--s:{passed / graded:.0%}")


def _attempts(marks: str) -> Html:
    """Each attempt's mark in a box; of very many attempts how often each mark occurs."""
    if len(marks) <= _MOST_MARKS:
        return join([_mark(m) for m in marks])
    return join([join([_mark(m), Html(f"×{marks.count(m):,} ")]) for m in dict.fromkeys(marks)])


def _mark(mark: str) -> Html:
    # Single letters keep a page of thousands of tasks small.
    name = "b" if mark in PASSES else "i" if mark in FAILS else "u"
    return Html(f"<{name}>{text(mark)}</{name}>")


def _legend(comparisons: Sequence[Comparison]) -> Html:
    """The marks that occur, and the symbols."""
    seen = {m for c in comparisons for p in c.pairs for m in p.base_marks + p.candidate_marks}
    items = [
        tag("li", tag("span", _mark(mark), class_="grid"), f" {said}") for mark, said in _meanings(seen).items()
    ]
    items.append(tag("li", tag("span", class_="swatch"), " left out or not graded: nothing is known, it is not 0"))
    items += [
        tag(
            "li",
            tag("em", "▼", class_="worse"),
            " passed → fails",
            "\u00a0 ",
            tag("em", "▽", class_="worse"),
            " worse",
        ),
        tag(
            "li",
            tag("em", "▲", class_="better"),
            " failed → passes",
            "\u00a0 ",
            tag("em", "△", class_="better"),
            " better",
        ),
        tag("li", "= equal share"),
        tag("li", "2/3: passed of graded attempts, as the bar below"),
    ]
    return tag("ul", *items, class_="legend")


def _meanings(seen: set[str]) -> Mapping[str, str]:
    said = {mark: _meaning(mark, outcome.value.replace("_", " ")) for (outcome, _), mark in MARKS.items()}
    said[MISSING] = "no record (not graded)"
    return {mark: meaning for mark, meaning in said.items() if mark in seen}


def _meaning(mark: str, outcome: str) -> str:
    if mark in PASSES:
        return outcome if outcome == "passed" else f"{outcome}, but passed"
    return outcome if mark in FAILS else f"{outcome} (not graded)"
