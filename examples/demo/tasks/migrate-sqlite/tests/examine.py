"""Prints what is in a database, and which of the rules it enforces, as JSON. Runs as an unprivileged user."""

import json
import sqlite3
import sys


def main(path):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA foreign_keys = ON")
    found = {"schema": read_schema(db), "rows": read_rows(db), "rules": try_rules(db)}
    json.dump(found, sys.stdout)


def read_schema(db):
    objects = db.execute(
        "SELECT type, name FROM sqlite_master WHERE type <> 'index' AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
        " ORDER BY type, name"
    )
    return {
        "version": db.execute("PRAGMA user_version").fetchone()[0],
        "objects": objects.fetchall(),
        "customers": read_columns(db, "customers"),
        "orders": read_columns(db, "orders"),
        "foreign_keys": [[key[3], key[2], key[4] or "id"] for key in db.execute("PRAGMA foreign_key_list(orders)")],
        "indexed": is_indexed(db),
    }


def read_columns(db, table):
    return [[name, kind.upper(), key] for _, name, kind, _, _, key in db.execute(f"PRAGMA table_info({table})")]


def is_indexed(db):
    for index in db.execute("PRAGMA index_list(orders)").fetchall():
        columns = db.execute("SELECT name FROM pragma_index_info(?) ORDER BY seqno", [index[1]]).fetchall()
        if columns and columns[0][0] == "customer_id" and not index[4]:
            return True
    return False


def read_rows(db):
    return {
        "customers": db.execute("SELECT name, email FROM customers ORDER BY name").fetchall(),
        "orders": db.execute(
            "SELECT orders.id, email, item, price_cents FROM orders"
            " JOIN customers ON customers.id = customer_id ORDER BY orders.id"
        ).fetchall(),
        "audit": db.execute("SELECT at, what FROM audit ORDER BY rowid").fetchall(),
        "integrity": db.execute("PRAGMA integrity_check").fetchone()[0],
    }


def try_rules(db):
    """Each statement must be refused by the database itself, but the first, which must work."""
    statements = {
        "accepts": "INSERT INTO customers (name, email) VALUES ('Hal', 'hal@harbor.example')",
        "unique": "INSERT INTO customers (name, email) VALUES ('Hal', 'hal@harbor.example')",
        "named": "INSERT INTO customers (name, email) VALUES (NULL, 'x@harbor.example')",
        "addressed": "INSERT INTO customers (name, email) VALUES ('X', NULL)",
        "owned": "INSERT INTO orders (customer_id, item, price_cents) VALUES (999999, 'rope', 1)",
        "not_null": "INSERT INTO orders (customer_id, item, price_cents) VALUES (NULL, 'rope', 1)",
        "priced": "INSERT INTO orders (customer_id, item, price_cents) SELECT min(id), 'rope', NULL FROM customers",
    }
    return {name: works(db, sql) is (name == "accepts") for name, sql in statements.items()}


def works(db, sql):
    """True or False as the database's rules say; None when it fails for another reason."""
    try:
        db.execute(sql)
    except sqlite3.IntegrityError:
        return False
    except sqlite3.Error:
        return None
    return True


main(sys.argv[1])
