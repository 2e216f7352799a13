"""Works the answer out from a sealed copy of the file, and compares it exactly, types included."""

import csv
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading


def group(path):
    customers = {}
    with open(path, newline="", encoding="utf-8") as source:
        for _, customer, item, quantity, price in list(csv.reader(source))[1:]:
            if not price:
                continue
            euros, cents = price.split(",")
            name = customer.strip()
            entry = customers.setdefault(name.casefold(), {"customer": name, "orders": 0, "cents": 0, "items": []})
            entry["orders"] += 1
            entry["cents"] += int(quantity) * (int(euros) * 100 + int(cents))
            if item not in entry["items"]:
                entry["items"].append(item)
    return sorted(customers.values(), key=lambda entry: (-entry["cents"], entry["customer"]))


def judge():
    answer = grading.parse_json(grading.read_text("/app/customers.json"), "/app/customers.json")
    if not grading.same(answer, group("/tests/orders.csv")):
        raise grading.Failed("/app/customers.json is not the list that was asked for")
    return {"reward": 1}


grading.grade(judge)
