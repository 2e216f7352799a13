"""Reads the database in a process of another user, and tries whether its rules really hold.

A database file can be built to harm whoever opens it, so the grader itself never does; it compares what the
reading process found (see `examine.py`) with the sealed rows. Three named rewards; the reward is their mean.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading

CUSTOMERS = [
    ["Ines Duarte-Koch", "ines@harbor.example"],
    ["Pat O'Brien", "pat@harbor.example"],
    ["Ruben", "ruben@harbor.example"],
    ["Tove Lind", "tove@harbor.example"],
    ["Åsa", "asa@harbor.example"],
]
ORDERS = [
    [1, "ines@harbor.example", "rope", 1250],
    [2, "ruben@harbor.example", "lamp", 3000],
    [4, "ines@harbor.example", "hook", 99],
    [5, "tove@harbor.example", "chart", 705],
    [7, "pat@harbor.example", "rope", 1250],
    [8, "tove@harbor.example", "buoy", 11990],
    [9, "ruben@harbor.example", "anchor", 108010],
    [12, "ines@harbor.example", "gauge", 6429],
    [13, "asa@harbor.example", "lamp", 2995],
    [20, "ruben@harbor.example", "rope", 820],
]
SCHEMA = {
    "version": 2,
    "objects": [["table", "audit"], ["table", "customers"], ["table", "orders"]],
    "customers": [["id", "INTEGER", 1], ["name", "TEXT", 0], ["email", "TEXT", 0]],
    "orders": [
        ["id", "INTEGER", 1],
        ["customer_id", "INTEGER", 0],
        ["item", "TEXT", 0],
        ["price_cents", "INTEGER", 0],
    ],
    "foreign_keys": [["customer_id", "customers", "id"]],
    "indexed": True,
}
ROWS = {
    "customers": CUSTOMERS,
    "orders": ORDERS,
    "audit": [["2026-01-07", "opened"], ["2026-02-11", "prices checked"]],
    "integrity": "ok",
}


def judge():
    database = grading.read_file("/app/shop.db", 4 << 20)
    with open("/tests/examine.py", "rb") as file:
        examine = file.read()
    files = {"shop.db": (database, 0o600), "examine.py": (examine, 0o444)}
    status, out = grading.run_candidate([*grading.PYTHON, "examine.py", "shop.db"], files)
    if status != 0:
        raise grading.Failed("/app/shop.db cannot be read as version 2")
    found = grading.parse_json(out, "what was found")
    rules = found["rules"]
    rewards = {
        "schema": int(grading.same(found["schema"], SCHEMA)),
        "rows": int(grading.same(found["rows"], ROWS)),
        "rules": int(len(rules) == 7 and all(rules.values())),
    }
    return {"reward": round(sum(rewards.values()) / 3, 4) if rewards["rows"] else 0, **rewards}


grading.grade(judge)
