"""Runs the sealed tests and believes only a complete, exact report.

The set of test ids must be the sealed one, each reported once, and a test with a random name that is made to
fail must be reported as failed: a runner that turns everything green gives itself away.
"""

import os
import secrets
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.append("/usr/lib/python3/dist-packages")  # -S leaves out where Debian keeps pytest

import grading

# Built-in plugins that take time or act on what lies around.
UNNEEDED = "cacheprovider stepwise doctest nose unittest junitxml pastebin logging faulthandler debugging"


def judge():
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    sentinel = f"test_{secrets.token_hex(8)}"
    with open("/tests/sentinel.py", "x") as file:
        file.write(f"def {sentinel}_fails():\n    assert False\n\ndef {sentinel}_passes():\n    assert True\n")
    with open("/tests/sealed.ini", "x") as file:
        file.write("[pytest]\npython_files = sealed_*.py sentinel.py\n")
    report = Report()
    options = ["-q", "-c", "/tests/sealed.ini", "--rootdir=/tests", "--noconftest", "--strict-markers"]
    options += ["--tb=line", "--import-mode=importlib", "--assert=plain"]
    for unneeded in UNNEEDED.split():
        options += ["-p", f"no:{unneeded}"]
    pytest.main([*options, "/tests/sealed_money.py", "/tests/sentinel.py"], plugins=[report])
    return {"reward": int(all_passed(report.outcomes, sentinel))}


class Report:
    """Outcomes by test id, as pytest reports each phase of each test."""

    def __init__(self):
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
            self.outcomes.setdefault(name, []).append(outcome)


def all_passed(outcomes, sentinel):
    import sealed_money

    if outcomes.pop(f"{sentinel}_fails", None) != ["failed"]:
        raise grading.Failed("the sentinel that must fail was not reported as failed")
    if outcomes.pop(f"{sentinel}_passes", None) != ["passed"]:
        raise grading.Failed("the sentinel that must pass was not reported as passed")
    wanted = {f"test_case[{number}]" for number in range(len(sealed_money.CASES))}
    if set(outcomes) != wanted:
        raise grading.Failed("the reported tests are not the sealed ones")
    return all(outcome == ["passed"] for outcome in outcomes.values())


grading.grade(judge)
