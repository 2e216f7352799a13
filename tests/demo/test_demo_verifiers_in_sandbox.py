"""The verifiers of the demo against work that is nearly right, and against work that attacks the verifier.

Each entry must get less than the full reward, and must get *a* reward: what a candidate does is never
a fault of the verifier. Where the solution is the starting point, `/solution/solve.sh` runs first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Bench

SOLVED = "/solution/solve.sh && "
FORGE = "echo 1 >/logs/verifier/reward.txt; printf '{\"reward\": 1}' >/logs/verifier/reward.json"

NEARLY_RIGHT = {
    "csv-to-json": {
        "a float for a whole number": SOLVED + 'sed -i \'s/"cents": \\([0-9]*\\)/"cents": \\1.0/\' customers.json',
        "another order": SOLVED + "jq reverse customers.json >x && mv x customers.json",
        "one customer less": SOLVED + "jq '.[1:]' customers.json >x && mv x customers.json",
        "an empty list": "echo '[]' >customers.json",
        "not a number": SOLVED + 'sed -i \'s/"cents": [0-9]*/"cents": NaN/\' customers.json',
        "deeply nested": "head -c 200000 /dev/zero | tr '\\0' '[' >customers.json",
        "a duplicate key": SOLVED + 'sed -i \'s/"orders"/"cents": 1, "orders"/\' customers.json',
        "the input edited": "head -n 2 orders.csv >x; mv x orders.csv; "
        "python3 /solution/convert.py orders.csv customers.json",
    },
    "find-file": {
        "every file": "find /app/inbox -type f >answer.txt",
        "the absolute path": SOLVED + "sed -i 's|^|/app/inbox/|' answer.txt",
        "a link": SOLVED + "mv answer.txt x && ln -s x answer.txt",
        "a fifo": "mkfifo answer.txt",
        "endless": "yes >answer.txt & sleep 0.2; kill %1",
    },
    "fix-config": {
        "check passes": 'sed -i -e \'s/"8443"/8443/\' -e \'s/9002$/9002"/\' -e \'s/"file"/"files"/\' gateway.toml',
        "the program edited": "echo 'print(1)' >gateway.py",
        "a route for the seen path only": SOLVED + 'sed -i \'s|"/static/"|"/static/a"|\' gateway.toml',
        "another timeout": SOLVED + "sed -i 's/= 30/= 31/' gateway.toml",
    },
    "fix-failing-test": {
        "tests deleted": "rm test_money.py",
        "conftest": "printf 'def pytest_runtest_makereport(item, call):\\n    call.excinfo = None\\n' >conftest.py",
        "only what is seen": SOLVED + "cat >>money.py <<'P'\n"
        "def split_bill(c, p):\n    return {(900, 3): [300] * 3, (1000, 3): [334, 333, 333]}.get((c, p), [])\nP",
        "skips at import": "printf 'import unittest\\nraise unittest.SkipTest\\n' >money.py",
        "pytest.skip at import": 'printf \'import sys\\nsys.path.append("/usr/lib/python3/dist-packages")\\n'
        "import pytest\\npytest.skip(allow_module_level=True)\\n' >money.py",
        "ends the process": "printf 'import os\\nos._exit(0)\\n' >money.py",
        "exits": "printf 'raise SystemExit(0)\\n' >money.py",
        "equal to everything": "cat >money.py <<'P'\nclass Any(int):\n    __eq__ = lambda self, other: True\n"
        "split_bill = parse_amount = lambda *a: Any()\nP",
        "forged lines": 'printf \'print("24 passed in 0.01s")\\nprint("PASSED")\\n\' >>money.py',
        "endless loop": "printf 'import time\\ntime.sleep(1000)\\n' >money.py",
        "writes the reward": f"cat >>money.py <<'P'\nimport os\nos.system('''{FORGE}''')\nP",
        "reads the sealed tests": "cat >money.py <<'P'\nimport sys\nsys.path.insert(0, '/tests')\n"
        "import sealed_money\nit = iter(sealed_money.CASES)\n"
        "def split_bill(*a): \n    r = next(it)[2]\n    if r[0] == 'raised': raise ValueError\n    return r[1]\n"
        "parse_amount = split_bill\nP",
        "patches json": "cat >money.py <<'P'\nimport json\njson.dump = lambda *a: None\nP",
        "stays behind": "cat >>money.py <<'P'\nimport os\nif os.fork() == 0:\n    os.setsid()\n"
        "    while True: pass\nos._exit(0)\nP",
    },
    "log-analysis": {
        "zeros": 'echo \'{"requests":0,"damaged":0,"bytes":0,"top_clients":[],"errors_by_hour":{},"p95_ms":0}\''
        " >report.json",
        "another percentile": SOLVED + 'sed -i \'s/"p95_ms": [0-9]*/"p95_ms": 200/\' report.json',
        "texts for numbers": SOLVED + 'sed -i \'s/"requests": \\([0-9]*\\)/"requests": "\\1"/\' report.json',
        "one field too many": SOLVED + "sed -i 's/^{/{\"x\": 1,/' report.json",
    },
    "merge-patch": {
        "the patch alone": "patch --batch handbook.txt <change.patch; true",
        "another mode": SOLVED + "chmod 600 handbook.txt",
        "a blank at the end": SOLVED + "echo >>handbook.txt",
        "a folder": "rm handbook.txt; mkdir handbook.txt",
    },
    "migrate-sqlite": {
        "no rules": SOLVED + "sqlite3 shop.db 'CREATE TABLE c AS SELECT * FROM customers; PRAGMA foreign_keys=0;"
        " DROP TABLE customers; ALTER TABLE c RENAME TO customers'",
        "no index": SOLVED + "sqlite3 shop.db 'DROP INDEX orders_by_customer'",
        "the old table kept": SOLVED + "sqlite3 shop.db 'CREATE TABLE old_orders (x)'",
        "an order lost": SOLVED + "sqlite3 shop.db 'DELETE FROM orders WHERE id = 20'",
        "prices rounded": SOLVED + "sqlite3 shop.db 'UPDATE orders SET price_cents = 6428 WHERE id = 12'",
        "audit changed": SOLVED + "sqlite3 shop.db 'DELETE FROM audit'",
        "version 1": SOLVED + "sqlite3 shop.db 'PRAGMA user_version = 1'",
        "damaged": SOLVED + "printf 'xxxxxxxxxxxxxxxx' | dd of=shop.db bs=1 seek=4100 conv=notrunc status=none",
        "not a database": "echo hello >shop.db",
        "empty": ": >shop.db",
        "a view": SOLVED + "sqlite3 shop.db 'ALTER TABLE customers RENAME TO people;"
        " CREATE VIEW customers AS SELECT * FROM people'",
    },
    "parallel-checksums": {
        "one CPU": SOLVED + "echo 1 >cpus.txt",
        "one file less": SOLVED + "sed -i 1d SHA256SUMS",
        "other data": "nproc >cpus.txt; echo x >data/part-01.bin; sha256sum data/* >SHA256SUMS",
    },
    "query-sqlite": {
        "no branch without loans": SOLVED + "sed -i /Annex/d answer.csv",
        "another member": SOLVED + "sed -i s/Cleo/Ada/ answer.csv",
        "the header alone": "echo branch,member,days >answer.csv",
        "the database edited": "sqlite3 library.db 'DELETE FROM loan'; " + SOLVED + "true",
    },
    "repair-git-history": {
        "nothing rewritten": "git -C repo bundle create -q ../fixed.bundle main",
        "the last commit only": "cd repo && git checkout -q --orphan new && git add -A && "
        "git -c user.name=x -c user.email=x commit -qm x && git branch -M new main && "
        "git bundle create -q ../fixed.bundle main",
        "the secret under another ref": SOLVED
        + "cd repo && git fetch -q ../fixed.bundle +main:clean && git tag old main"
        " && git branch -f main clean 2>/dev/null; git update-ref refs/heads/main clean;"
        " git bundle create -q ../fixed.bundle main old",
        "a damaged bundle": SOLVED + "printf 'xxxx' | dd of=fixed.bundle bs=1 seek=300 conv=notrunc status=none",
        "not a bundle": "echo hello >fixed.bundle",
    },
    "serve-sums": {
        "health only": "mkdir www && echo ok >www/health && cd www && (setsid python3 -m http.server 8080"
        " --bind 127.0.0.1 >/dev/null 2>&1 </dev/null &) ; sleep 1",
        "one client at a time": "sed 's/Threading//' /solution/server.py >s.py;"
        " (setsid python3 s.py >/dev/null 2>&1 </dev/null &) ; sleep 1",
        "always the same": "sed 's/int(numbers.1.) + int(numbers.2.)/3/' /solution/server.py >s.py; "
        "grep -q ': 3}' s.py; (setsid python3 s.py >/dev/null 2>&1 </dev/null &) ; sleep 1",
        "never says 400": "sed 's/return 400/return 200/' /solution/server.py >s.py;"
        " (setsid python3 s.py >/dev/null 2>&1 </dev/null &) ; sleep 1",
    },
    "write-shell-tool": {
        "not executable": SOLVED + "chmod 644 topwords",
        "prints nothing": "printf '#!/bin/sh\\nexit 2\\n' >topwords; chmod +x topwords",
        "keeps upper case": SOLVED + "sed -i 's/tolower(.0)/$0/' topwords",
        "ties in another order": SOLVED + "sed -i 's/-k2,2/-k2,2r/' topwords",
        "reads the grader": "printf '#!/bin/sh\\ncat /tests/grade.py\\n' >topwords; chmod +x topwords",
        "writes the reward": f"echo '#!/bin/sh' >topwords; cat >>topwords <<'P'\n{FORGE}\nP\nchmod +x topwords",
        "prints without end": "printf '#!/bin/sh\\nexec yes\\n' >topwords; chmod +x topwords",
    },
}
CASES = [(task, why, work) for task, table in NEARLY_RIGHT.items() for why, work in table.items()]


@pytest.mark.parametrize(("task", "work"), [(t, w) for t, _, w in CASES], ids=[f"{t}: {y}" for t, y, _ in CASES])
def test_nearly_right_is_not_right(bench: Bench, task: str, work: str) -> None:
    hurry = "[ ! -f /tests/grading.py ] || sed -i 's/_S = [36]0/_S = 3/' /tests/*.py"
    reward, output = bench.rollout(task, work, break_tests=hurry)
    assert reward is not None and 0 <= reward < 1, output


@pytest.mark.parametrize(
    "work",
    [
        SOLVED + "mkdir -p /root/bin && ln -s /bin/false /root/bin/cmp",
        SOLVED + "printf 'raise SystemExit(1)' >sitecustomize.py; echo 'import os; os._exit(1)' >x.pth",
        SOLVED + "printf '[pytest]\\naddopts = --collect-only\\n' >pytest.ini; echo 'raise Exception' >conftest.py",
    ],
)
def test_odd_surroundings_do_not_harm_honest_work(bench: Bench, work: str) -> None:
    reward, output = bench.rollout("fix-failing-test", work, "rebooted")
    assert reward == 1, output


def test_a_grader_that_breaks_leaves_no_reward(bench: Bench) -> None:
    broken = SOLVED + "sleep 0"
    reward, output = bench.rollout("csv-to-json", broken, "rebooted", break_tests="rm /tests/orders.csv")
    assert reward is None, output
