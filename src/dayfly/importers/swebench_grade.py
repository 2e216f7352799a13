"""Read what an instance's tests printed and write the reward. Copied into tests/ of each imported task.

Runs with the image's own Python, from 3.5 on: nothing but the standard library, no dayfly.
"""

import json
import os
import re
import sys
from typing import Any, Dict, List, Optional

PLACE = "/logs/verifier/reward.json"
STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_pytest(lines: List[str]) -> Dict[str, str]:
    """`PASSED a.py::test` of the summary, and `a.py::test PASSED` of verbose output."""
    found = {}  # type: Dict[str, str]
    for line in lines:
        words = line.split()
        if len(words) < 2:
            continue
        if words[0] in STATUSES:
            found[words[1]] = words[0]
        elif words[1] in STATUSES and "::" in words[0]:
            found.setdefault(words[0], words[1])
    return found


UNITTEST = re.compile(r"^(.+?) \.\.\. (ok|FAIL|ERROR|skipped|expected failure|unexpected success)\b")
WORDS = {"ok": "PASSED", "skipped": "SKIPPED", "expected failure": "XFAIL"}


def read_unittest(lines: List[str]) -> Dict[str, str]:
    """`test_a (module.Class) ... ok`; where a test prints, its verdict can stand on a later line."""
    found = {}  # type: Dict[str, str]
    waiting = None  # type: Optional[str]
    for line in lines:
        match = UNITTEST.match(line)
        if match is not None:
            found[match.group(1)] = WORDS.get(match.group(2), "FAILED")
            waiting = None
        elif " ... " in line:
            waiting = line.split(" ... ")[0]
        elif line.startswith(("FAIL: ", "ERROR: ")):
            found[line.split(": ", 1)[1]] = "FAILED"
        elif waiting is not None and line in ("ok", "FAIL", "ERROR"):
            found[waiting] = WORDS.get(line, "FAILED")
            waiting = None
    return found


def read_sympy(lines: List[str]) -> Dict[str, str]:
    """`test_a ok`; a failure is repeated under a line `____ file.py:test_a ____`."""
    found = {}  # type: Dict[str, str]
    words = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "f": "XFAIL", "s": "SKIPPED", "X": "XPASS"}
    for line in lines:
        match = re.match(r"^(test_\w+) (ok|F|E|f|s|X)\b", line)
        if match is not None:
            found[match.group(1)] = words[match.group(2)]
        match = re.match(r"^_+ \S+\.py:(test_\w+) _+$", line)
        if match is not None:
            found[match.group(1)] = "FAILED"
    return found


READERS = {"pytest": read_pytest, "unittest": read_unittest, "sympy": read_sympy}


def status_of(name: str, found: Dict[str, str]) -> Optional[str]:
    """The status of a test; some names of the data set end in the middle of a parameter."""
    if name not in found and name.count("[") > name.count("]"):
        near = {found[k] in ("PASSED", "XFAIL") for k in found if k.startswith(name)}
        if len(near) == 1:
            return "PASSED" if near.pop() else "FAILED"
    return found.get(name)


def grade(expected: Dict[str, Any], lines: List[str], status: int) -> Dict[str, float]:
    """The rewards: `reward` is 1 when all tests pass; the other two are the shares that do."""
    found = READERS[expected["parser"]]([ANSI.sub("", line).rstrip() for line in lines])
    broken = [name for name in found if found[name] in ("FAILED", "ERROR", "XPASS")]
    passed = {
        "fail_to_pass": [n for n in expected["fail_to_pass"] if status_of(n, found) in ("PASSED", "XFAIL")],
        "pass_to_pass": [
            n for n in expected["pass_to_pass"] if status_of(n, found) in ("PASSED", "XFAIL", "SKIPPED")
        ],
    }
    rewards = {}  # type: Dict[str, float]
    for key, names in sorted(passed.items()):
        rewards[key] = len(names) / len(expected[key]) if expected[key] else 1.0
        for name in expected[key]:
            if name not in names:
                print("%s: %s: %s" % (key, name, status_of(name, found) or "did not run"))
    # Tests that end badly while each of them passes were not printed by the test runner.
    whole = all(value == 1.0 for value in rewards.values()) and (status == 0 or bool(broken))
    rewards["reward"] = 1 if whole else 0
    return rewards


def main() -> None:
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json")
    with open(place, encoding="utf-8") as file:
        expected = json.load(file)
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        rewards = grade(expected, file.read().split("\n"), int(sys.argv[2]))
    print(json.dumps(rewards))
    with open(PLACE, "w") as file:
        json.dump(rewards, file)


if __name__ == "__main__":
    main()
