"""Runs the tool on inputs that the agent has not seen, and compares its output and status.

Four named rewards; the reward is their mean, so a tool that only counts gets a part of it.
"""

import os
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
    words = ["tide", "Harbor", "gull", "ROPE", "x", "anchor", "Mast", "keel"]
    separators = [" ", "\n", ", ", "-", "1", "_", "'", "\t", "...", " 7 "]
    state, text = 20260317, ""
    for _ in range(300):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        text += words[min((state >> 16) % 8, (state >> 20) % 8)] + separators[(state >> 8) % 10]
    return text


STORY = make_text()
TIES = "pear fig\nFig apple, pear; apple kiwi"
CASES = {  # named reward → (arguments, standard input, status, output)
    "counts": [(["5", "story.txt"], "", 0, count_words(STORY, 5))],
    "ties": [(["3"], TIES, 0, count_words(TIES, 3))],
    "few": [(["3"], "12 - 34\n", 0, ""), (["9"], "a", 0, "1 a\n")],
    "errors": [
        ([], "a b", 2, ""),
        (["0"], "a b", 2, ""),
        (["x"], "a b", 2, ""),
        (["2", "no-such-file"], "", 1, ""),
    ],
}

# All cases run in one shell of the unprivileged user, with a line between their outputs. A tool that meddles
# with the others' results, or prints such lines itself, gains nothing: it would still have to know what is right.
ONE_CASE = """
./topwords {arguments} <input.{number} 2>/dev/null
echo "{mark} $?"
"""


def judge():
    tool = grading.read_file("/app/topwords", 256 * 1024)
    if not os.stat("/app/topwords").st_mode & 0o111:
        raise grading.Failed("/app/topwords is not executable")
    files = {"topwords": (tool, 0o755), "story.txt": (STORY.encode(), 0o644)}
    script, mark = "", f"case-{os.urandom(8).hex()}"
    for number, (arguments, given, _, _) in enumerate(case for part in CASES.values() for case in part):
        files[f"input.{number}"] = (given.encode(), 0o644)
        script += ONE_CASE.format(arguments=" ".join(arguments), number=number, mark=mark)
    files["all-cases"] = (script.encode(), 0o644)
    _, out = grading.run_candidate(["/bin/sh", "all-cases"], files)
    results = iter(read_results(out, mark.encode()))
    rewards = {
        name: int(all([next(results, None) == (status, wanted.encode()) for _, _, status, wanted in part]))
        for name, part in CASES.items()
    }
    # A tool that counts nothing right has no part in the rest: failing on everything is not error handling.
    whole = sum(rewards.values()) / len(rewards) if rewards["counts"] else 0
    return {"reward": whole, **rewards}


def read_results(out, mark):
    """(status, output) of each case; ends where the output is not well-formed."""
    while mark in out:
        printed, _, out = out.partition(mark + b" ")
        status, _, out = out.partition(b"\n")
        if not status.isdigit():
            return
        yield int(status), printed


grading.grade(judge)
