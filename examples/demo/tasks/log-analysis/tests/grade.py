"""Works the figures out from a sealed copy of the log. Each figure is a named reward; the reward is their mean."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading
from report import report


def judge():
    with open("/tests/access.log", encoding="utf-8") as log:
        wanted = report(log.read().splitlines())
    answer = grading.parse_json(grading.read_text("/app/report.json"), "/app/report.json")
    if not isinstance(answer, dict) or set(answer) != set(wanted):
        raise grading.Failed("/app/report.json does not have exactly the fields that were asked for")
    rewards = {name: int(grading.same(answer[name], value)) for name, value in wanted.items()}
    return {"reward": round(sum(rewards.values()) / len(rewards), 4), **rewards}


grading.grade(judge)
