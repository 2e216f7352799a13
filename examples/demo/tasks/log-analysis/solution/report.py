"""Reads an access log and writes the report."""

import json
import math
import re
import sys
from collections import Counter

QUOTED = r'"(?:[^"\\]|\\.)*"'
LINE = re.compile(
    r"(?P<client>\S+) - - \[\d{2}/[A-Z][a-z]{2}/\d{4}:(?P<hour>\d{2}):\d{2}:\d{2} \+0000\] "
    r'"[A-Z]+ \S+ HTTP/\d\.\d" (?P<status>\d{3}) (?P<bytes>\d+|-) ' + QUOTED + " " + QUOTED + r" (?P<ms>\d+)"
)


def report(lines):
    """The report of an iterable of lines (without line ends)."""
    matches = [LINE.fullmatch(line) for line in lines]
    good = [match for match in matches if match]
    clients = Counter(match["client"] for match in good)
    times = sorted(int(match["ms"]) for match in good)
    return {
        "requests": len(good),
        "damaged": len(matches) - len(good),
        "bytes": sum(int(match["bytes"]) for match in good if match["bytes"] != "-"),
        "top_clients": sorted(clients, key=lambda client: (-clients[client], client))[:3],
        "errors_by_hour": dict(Counter(match["hour"] for match in good if int(match["status"]) >= 500)),
        "p95_ms": times[math.ceil(0.95 * len(times)) - 1],
    }


with open(sys.argv[1], encoding="utf-8") as log, open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(report(log.read().splitlines()), result, indent=1)
