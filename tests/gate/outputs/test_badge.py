"""The badge says the verdict, to eyes and to screen readers, and loads nothing."""

from __future__ import annotations

import re

from lxml import etree

from dayfly.gate.badge import render_badge

SVG = "{http://www.w3.org/2000/svg}"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_says_the_verdict(verdict):
    root = etree.fromstring(render_badge(verdict))
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert root.get("aria-label") == root.findtext(f"{SVG}title") == f"gate: {verdict.verdict}"
    assert [t.text for t in root.iter(f"{SVG}text")] == ["gate", verdict.verdict]


def test_words_are_within_their_box_and_readable(verdict):
    root = etree.fromstring(render_badge(verdict))
    for word in root.iter(f"{SVG}text"):
        half = int(word.get("textLength")) / 2
        assert float(word.get("x")) - half > 0 and float(word.get("x")) + half < int(root.get("width"))
    for colour in [root.find(f"{SVG}rect").get("fill"), root.find(f"{SVG}path").get("fill")]:
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5


def test_nothing_of_agents_or_tasks_is_in_it_and_nothing_is_loaded(hostile, make_verdict):
    badge = render_badge(hostile)
    assert badge == render_badge(make_verdict(hostile.verdict))
    assert not re.search(r"href|url\(|<script|<style|<image|\son\w+=", badge)
