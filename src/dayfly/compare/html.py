"""A comparison as one self-contained page: no script, and nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dayfly.compare import html_sections as sections
from dayfly.compare.html_grid import Versions, draw_grid, name_versions, version_key
from dayfly.compare.html_markup import Html, section, tag
from dayfly.compare.html_pictures import define_hatch
from dayfly.compare.html_style import STYLE
from dayfly.compare.model import Comparison

# Styles are part of the page; scripts, pictures, fonts, frames, forms and connections are refused.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_html(comparisons: Sequence[Comparison], *, title: str = "Comparison of agent versions") -> str:
    """The page as text, to be written as UTF-8.

    Its size is bounded: of very many tasks those that differ are drawn, and how many are not is said. It holds
    nothing but what is in `comparisons`, so equal comparisons give equal pages.
    """
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="referrer" content="no-referrer">'),
        tag("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    inside = _inside(comparisons) if comparisons else [tag("p", "Nothing was compared.")]
    body = tag("body", define_hatch(), tag("main", tag("h1", title), *inside))
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n{body}\n</html>\n'


def _inside(comparisons: Sequence[Comparison]) -> list[Html]:
    versions = name_versions(comparisons)

    def each(draw: Callable[[Comparison], list[Html]]) -> list[Html]:
        """What `draw` makes of every comparison, under a title if there are several."""
        made: list[Html] = []
        for comparison in comparisons:
            if len(comparisons) > 1:
                made.append(tag("h3", _letters(comparison, versions)))
            made += draw(comparison)
        return made

    named = [(_letters(c, versions), c) for c in comparisons]
    parts = [
        ("Differences", sections.draw_differences(named)),
        ("Transitions", each(sections.draw_flow)),
        ("Tasks", [draw_grid(comparisons)]),
        ("Left out", each(sections.list_left_out)),
        ("Flaky tasks", each(sections.list_flaky)),
        ("Groups", each(sections.draw_groups)),
        ("Same and varied", each(sections.list_varied)),
        ("Versions", [sections.list_versions(versions)]),
        ("How to read this", [sections.explain(comparisons[0].alpha)]),
    ]
    links = [tag("a", name, href=f"#{_anchor(name)}") for name, _ in parts]
    return [
        *(sections.draw_headline(name, comparison, versions) for name, comparison in named),
        tag("nav", *links, aria_label="Sections"),
        *(section(name, *drawn, id_=_anchor(name)) for name, drawn in parts),
    ]


def _letters(comparison: Comparison, versions: Versions) -> str:
    base, candidate = (versions[version_key(f)].letter for f in (comparison.base, comparison.candidate))
    return f"{base} → {candidate}"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
