"""The sealed cases: those that the agent sees, and more of the same descriptions.

pytest runs here as the grader. The candidate's module is called in a process of another user (see
`grading.call_candidate`), once for all cases; nothing of it is imported here.
"""

import grading
import pytest

SPLITS = [
    (900, 3, [300, 300, 300]),
    (1000, 3, [334, 333, 333]),
    (5, 4, [2, 1, 1, 1]),
    (2, 5, [1, 1, 0, 0, 0]),
    (0, 2, [0, 0]),
    (99999, 7, [14286, 14286, 14286, 14286, 14285, 14285, 14285]),
    (17, 1, [17]),
]
AMOUNTS = [
    ("1,234.50", 123450),
    ("3.5", 350),
    ("-0.05", -5),
    ("17", 1700),
    ("  42.07 ", 4207),
    ("-12.30", -1230),
    ("1,000,000", 100000000),
    ("0.9", 90),
    ("-0.5", -50),
]
REFUSED = [
    ("split_bill", [-1, 2]),
    ("split_bill", [5, 0]),
    ("parse_amount", ["12.345"]),
    ("parse_amount", [""]),
    ("parse_amount", ["1.2.3"]),
    ("parse_amount", ["twelve"]),
    ("parse_amount", ["1.-5"]),
]
CASES = (
    [("split_bill", [cents, people], ["returned", shares]) for cents, people, shares in SPLITS]
    + [("parse_amount", [text], ["returned", cents]) for text, cents in AMOUNTS]
    + [(name, arguments, ["raised", "ValueError"]) for name, arguments in REFUSED]
)


@pytest.fixture(scope="session")
def results():
    source = grading.read_file("/app/money.py", 64 * 1024)
    return grading.call_candidate(source, [case[:2] for case in CASES])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_case(results, number):
    assert grading.same(results[number], CASES[number][2])
