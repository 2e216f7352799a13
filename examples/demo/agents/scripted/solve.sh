#!/bin/sh
# An agent without a model, for the demo: it reads the instruction, recognises the task by its text, and does
# what its plan says. It is deterministic.
#
#   solve.sh PLAN [INSTRUCTION_FILE]
set -eu
plan=$1
instruction=${2:-$DAYFLY_INSTRUCTION_FILE}

main() {
    task=$(recognise)
    mode=$(sed -n "s/^$task  *//p" "$plan")
    echo "this is $task; I shall: $mode"
    cd /app
    "${mode}_$task"
}

recognise() {
    text=$(cat "$instruction")
    case $text in
    *money.py*) echo fix_failing_test ;;
    *topwords*) echo write_shell_tool ;;
    *fixed.bundle*) echo repair_git_history ;;
    *customers.json*) echo csv_to_json ;;
    *library.db*) echo query_sqlite ;;
    *shop.db*) echo migrate_sqlite ;;
    *gateway.toml*) echo fix_config ;;
    */app/inbox*) echo find_file ;;
    *"port 8080"*) echo serve_sums ;;
    *handbook.txt*) echo merge_patch ;;
    *SHA256SUMS*) echo parallel_checksums ;;
    *access.log*) echo log_analysis ;;
    *)
        echo "I do not know this task" >&2
        exit 3
        ;;
    esac
}

# --- honest work ---------------------------------------------------------------------------------

solve_fix_failing_test() {
    cat >money.py <<'PYTHON'
import re


def split_bill(cents, people):
    if cents < 0 or people < 1:
        raise ValueError("nothing to split")
    return [cents // people + (number < cents % people) for number in range(people)]


def parse_amount(text):
    found = re.fullmatch(r"(-?)(\d[\d,]*)(?:\.(\d\d?))?", text.strip(), re.ASCII)
    if not found:
        raise ValueError(text)
    cents = int(found[2].replace(",", "") + (found[3] or "").ljust(2, "0"))
    return -cents if found[1] else cents
PYTHON
}

solve_csv_to_json() {
    python3 - <<'PYTHON'
import csv, json

people = {}
for row in csv.DictReader(open("orders.csv", newline="", encoding="utf-8")):
    if row["price"]:
        name = row["customer"].strip()
        one = people.setdefault(name.lower(), {"customer": name, "orders": 0, "cents": 0, "items": {}})
        one["orders"] += 1
        one["cents"] += int(row["quantity"]) * int(row["price"].replace(",", ""))
        one["items"][row["item"]] = None
result = sorted(people.values(), key=lambda one: (-one["cents"], one["customer"]))
json.dump([one | {"items": list(one["items"])} for one in result], open("customers.json", "w"))
PYTHON
}

solve_query_sqlite() {
    sqlite3 -batch -separator , library.db >answer.csv <<'SQL'
SELECT 'branch,member,days';
WITH late AS (
    SELECT b.branch AS branch, m.name AS name, sum(coalesce(l.returned, 200) - l.due) AS days
    FROM loan l JOIN book b ON b.id = l.book JOIN member m ON m.id = l.member
    WHERE coalesce(l.returned, 200) > l.due GROUP BY b.branch, m.id
)
SELECT branch.name,
    coalesce((SELECT name FROM late WHERE late.branch = branch.id ORDER BY days DESC, name LIMIT 1), ''),
    coalesce((SELECT max(days) FROM late WHERE late.branch = branch.id), 0)
FROM branch ORDER BY branch.name;
SQL
}

solve_fix_config() {
    sed -i -e 's/"8443"/8443/' -e 's/9002$/9002"/' -e 's|"/static"|"/static/"|' -e 's/"file"/"files"/' gateway.toml
    # The routes of /api/ and /api/v1/ change places: swap both their prefixes and their upstreams.
    sed -i -e '/^prefix = "\/api\/"$/{N;s/.*/@first/}' -e '/^prefix = "\/api\/v1\/"$/{N;s/.*/@second/}' gateway.toml
    sed -i -e 's|^@first$|prefix = "/api/v1/"\nupstream = "legacy"|' \
        -e 's|^@second$|prefix = "/api/"\nupstream = "backend"|' gateway.toml
    python3 gateway.py check
}

solve_find_file() {
    prefix=$(sed -n 's/^`\([0-9a-f]\{8\}\)`.*/\1/p' "$instruction")
    (cd inbox && find . -type f -exec sha256sum {} +) | sed -n "s|^$prefix[0-9a-f]*  \./||p" >answer.txt
}

solve_serve_sums() {
    cat >server.py <<'PYTHON'
import re, socket, threading


def serve(client):
    with client:
        data = b""
        while b"\r\n\r\n" not in data:
            data += client.recv(65536) or b"\r\n\r\n"
        path, _, query = data.split()[1].decode().partition("?")
        given = re.fullmatch(r"a=(-?\d+)&b=(-?\d+)", query, re.ASCII)
        status, body = 404, "not here"
        if path == "/health":
            status, body = 200, "ok"
        elif path == "/sum":
            status, body = 400, "a and b, please"
            if given:
                status, body = 200, '{"sum": %d}' % (int(given[1]) + int(given[2]))
        client.sendall(f"HTTP/1.0 {status} -\r\n\r\n{body}".encode())


server = socket.create_server(("127.0.0.1", 8080), backlog=64)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=[server.accept()[0]], daemon=True).start()
PYTHON
    setsid python3 server.py </dev/null >ready 2>&1 &
    until grep -q ready ready; do sleep 0.1; done
}

solve_parallel_checksums() {
    nproc >cpus.txt
    printf '%s\n' data/* | xargs -n 4 -P "$(nproc)" sha256sum | sort -k 2 >SHA256SUMS
}

# --- half of the work ----------------------------------------------------------------------------

half_write_shell_tool() {
    # Counts well, but knows nothing of wrong arguments.
    cat >topwords <<'SHELL'
#!/bin/sh
cat ${2:-} | tr -cs A-Za-z '\n' | tr A-Z a-z | grep . | sort | uniq -c | sort -k1,1nr -k2 | head -n "$1" | sed 's/^ *//'
SHELL
    chmod +x topwords
}

half_migrate_sqlite() {
    # Moves the rows, and forgets every constraint and the index.
    sqlite3 -batch shop.db <<'SQL'
ALTER TABLE orders RENAME TO old;
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, email TEXT);
INSERT INTO customers (name, email) SELECT name, address FROM
    (SELECT name, lower(trim(email)) AS address, max(id) FROM old GROUP BY address);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, item TEXT, price_cents INTEGER);
INSERT INTO orders SELECT old.id, customers.id, item, CAST(round(price * 100) AS INTEGER)
    FROM old JOIN customers ON customers.email = lower(trim(old.email));
DROP TABLE old;
PRAGMA user_version = 2;
SQL
}

half_log_analysis() {
    # Two of the six figures are left out.
    awk '!/" [0-9][0-9][0-9] [0-9-]+ ".* [0-9]+$/ { damaged++; next }
        { requests++; if ($10 ~ /^[0-9]+$/) bytes += $10; clients[$1]++ }
        END { printf "{\"requests\": %d, \"damaged\": %d, \"bytes\": %d, \"top_clients\": [", requests, damaged, bytes
            for (place = 0; place < 3; place++) {
                best = ""
                for (c in clients) if (best == "" || clients[c] > clients[best]) best = c
                printf "%s\"%s\"", place ? ", " : "", best
                delete clients[best]
            }
            print "], \"errors_by_hour\": {}, \"p95_ms\": 0}" }' access.log >report.json
}

half_fix_config() {
    # Until the check passes, and no further.
    sed -i -e 's/"8443"/8443/' -e 's/9002$/9002"/' -e 's/"file"/"files"/' gateway.toml
    python3 gateway.py check
}

half_fix_failing_test() {
    # One of the two bugs.
    cat >>money.py <<'PYTHON'


def split_bill(cents, people):
    return [cents // people + (number < cents % people) for number in range(people)]
PYTHON
}

half_csv_to_json() {
    # Takes names as they are written, and forgets to sort.
    python3 - <<'PYTHON'
import csv, json

people = {}
for row in csv.DictReader(open("orders.csv", newline="", encoding="utf-8")):
    if row["price"]:
        one = people.setdefault(row["customer"], {"customer": row["customer"], "orders": 0, "cents": 0, "items": []})
        one["orders"] += 1
        one["cents"] += int(row["quantity"]) * int(row["price"].replace(",", ""))
        one["items"].append(row["item"])
json.dump(list(people.values()), open("customers.json", "w"))
PYTHON
}

half_find_file() {
    # The first file will do.
    (cd inbox && find . -type f | sort | sed -n '1s|^\./||p') >answer.txt
}

half_parallel_checksums() {
    # Only what the shell's first guess finds.
    nproc >cpus.txt
    printf '%s\n' data/*1* | xargs -n 4 sha256sum | sort -k 2 >SHA256SUMS
}

half_query_sqlite() {
    # Takes the member's home branch for the book's branch.
    sqlite3 -batch -separator , library.db >answer.csv <<'SQL'
SELECT 'branch,member,days';
SELECT branch, name, max(days) FROM (
    SELECT h.name AS branch, m.name AS name, sum(max(0, coalesce(l.returned, 200) - l.due)) AS days
    FROM loan l JOIN member m ON m.id = l.member JOIN branch h ON h.id = m.home_branch GROUP BY m.id
) GROUP BY branch ORDER BY branch;
SQL
}

# --- worse ---------------------------------------------------------------------------------------

break_repair_git_history() {
    rm -rf repo
    echo "Done: the secret is gone from the history."
}

give_up_merge_patch() {
    patch --batch handbook.txt <change.patch
}

main
