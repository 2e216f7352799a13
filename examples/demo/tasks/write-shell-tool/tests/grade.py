"""Runs the tool on inputs that the agent has not seen, and compares its output and status.

Four named rewards; the reward is their mean, so a tool that only counts gets a part of it.
"""

import os
import random
import re
import sys
from collections import Counter

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading


def count_words(text, n):
    counts = Counter(re.findall("[a-z]+", text.lower()))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "".join(f"{count} {word}\n" for word, count in ranked[:n])


def make_text():
    """About 300 words of uneven frequency between all kinds of separators."""
    source = random.Random("topwords")
    words = ["tide", "Harbor", "gull", "ROPE", "x", "anchor", "Mast", "keel"]
    separators = [" ", "\n", ", ", "-", "1", "_", "'", "\t", "...", " 7 "]
    picked = source.choices(words, weights=[9, 7, 7, 5, 3, 3, 2, 1], k=300)
    return "".join(word + source.choice(separators) for word in picked)


def judge():
    tool = grading.read_file("/app/topwords", 256 * 1024)
    if not os.stat("/app/topwords").st_mode & 0o111:
        raise grading.Failed("/app/topwords is not executable")
    text = make_text()
    ties = "pear fig\nFig apple, pear; apple kiwi"

    def run(*arguments, stdin=""):
        files = {"topwords": (tool, 0o755), "story.txt": (text.encode(), 0o644)}
        return grading.run_candidate(["./topwords", *arguments], files, stdin.encode())

    def right(wanted, *arguments, stdin="", status=0):
        return run(*arguments, stdin=stdin) == (status, wanted.encode())

    rewards = {
        "counts": right(count_words(text, 5), "5", "story.txt") and right(count_words(text, 2), "2", stdin=text),
        "ties": right(count_words(ties, 3), "3", stdin=ties),
        "few": right("", "3", stdin="12 - 34\n") and right("1 a\n", "9", stdin="a"),
        "errors": all(right("", *wrong, stdin="a b", status=2) for wrong in ([], ["0"], ["x"]))
        and right("", "2", "no-such-file", status=1),
    }
    rewards = {name: int(value) for name, value in rewards.items()}
    # A tool that counts nothing right has no part in the rest: failing on everything is not error handling.
    whole = sum(rewards.values()) / len(rewards) if rewards["counts"] else 0
    return {"reward": whole, **rewards}


grading.grade(judge)
