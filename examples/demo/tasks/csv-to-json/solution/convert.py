import csv
import json
import sys

customers = {}
with open(sys.argv[1], newline="", encoding="utf-8") as source:
    for row in csv.DictReader(source):
        if not row["price"]:
            continue
        name = row["customer"].strip()
        entry = customers.setdefault(name.lower(), {"customer": name, "orders": 0, "cents": 0, "items": []})
        entry["orders"] += 1
        entry["cents"] += int(row["quantity"]) * int(row["price"].replace(",", ""))
        if row["item"] not in entry["items"]:
            entry["items"].append(row["item"])
listed = sorted(customers.values(), key=lambda entry: (-entry["cents"], entry["customer"]))
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(listed, result, ensure_ascii=False, indent=1)
