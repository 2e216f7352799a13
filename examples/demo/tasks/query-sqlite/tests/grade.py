"""Compares the answer with the sealed one, line by line; how lines end does not matter."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading


def judge():
    with open("/tests/expected.csv", encoding="utf-8") as file:
        wanted = file.read().split("\n")
    answer = grading.read_text("/app/answer.csv", 64 * 1024)
    lines = [line.replace('"', "").rstrip("\r") for line in answer.rstrip("\r\n").split("\n")]
    if lines != wanted[:-1]:
        raise grading.Failed("/app/answer.csv is not the answer")
    return {"reward": 1}


grading.grade(judge)
