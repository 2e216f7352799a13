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
    state, text = 20260314, ""
    for _ in range(300):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        text += words[min((state >> 16) % 8, (state >> 20) % 8)] + separators[(state >> 8) % 10]
    return text


STORY = make_text()
TIES = "pear fig\nFig apple, pear; apple kiwi"
CASES = {  # named reward → (arguments, standard input, status, output)
    "counts": [
        (["5", "story.txt"], "", 0, count_words(STORY, 5)),
        (["2"], STORY, 0, count_words(STORY, 2)),
    ],
    "ties": [(["3"], TIES, 0, count_words(TIES, 3))],
    "few": [(["3"], "12 - 34\n", 0, ""), (["9"], "a", 0, "1 a\n")],
    "errors": [
        ([], "a b", 2, ""),
        (["0"], "a b", 2, ""),
        (["x"], "a b", 2, ""),
        (["2", "no-such-file"], "", 1, ""),
    ],
}

# Runs all cases as the unprivileged user. A tool that meddles with the others' results gains nothing: it
# would still have to know what is right.
RUN_ALL = """
number=0
while [ -e "input.$number" ]; do
    ./run.$number <input.$number >output 2>/dev/null
    echo "status $? $(wc -c <output)"
    cat output
    number=$((number + 1))
done
"""


def judge():
    tool = grading.read_file("/app/topwords", 256 * 1024)
    if not os.stat("/app/topwords").st_mode & 0o111:
        raise grading.Failed("/app/topwords is not executable")
    cases = [case for part in CASES.values() for case in part]
    files = {"topwords": (tool, 0o755), "story.txt": (STORY.encode(), 0o644), "all": (RUN_ALL.encode(), 0o644)}
    for number, (arguments, given, _, _) in enumerate(cases):
        files[f"run.{number}"] = (f"#!/bin/sh\nexec ./topwords {' '.join(arguments)}\n".encode(), 0o755)
        files[f"input.{number}"] = (given.encode(), 0o644)
    _, out = grading.run_candidate(["/bin/sh", "all"], files)
    results = iter(read_results(out))
    rewards = {
        name: int(all([next(results, None) == (status, wanted.encode()) for _, _, status, wanted in part]))
        for name, part in CASES.items()
    }
    # A tool that counts nothing right has no part in the rest: failing on everything is not error handling.
    whole = sum(rewards.values()) / len(rewards) if rewards["counts"] else 0
    return {"reward": whole, **rewards}


def read_results(out):
    """What `RUN_ALL` printed, as (status, output); ends where it is not well-formed."""
    while out:
        head, _, out = out.partition(b"\n")
        words = head.split()
        if len(words) != 3 or words[0] != b"status" or not (words[1] + words[2]).isdigit():
            return
        yield int(words[1]), out[: int(words[2])]
        out = out[int(words[2]) :]


grading.grade(judge)
