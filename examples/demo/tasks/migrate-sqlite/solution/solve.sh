#!/bin/sh
set -eu
sqlite3 -batch -bail /app/shop.db <<'SQL'
PRAGMA foreign_keys = OFF;
BEGIN;
ALTER TABLE orders RENAME TO old_orders;
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL UNIQUE);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY NOT NULL,
    customer_id INTEGER NOT NULL REFERENCES customers (id),
    item TEXT NOT NULL,
    price_cents INTEGER NOT NULL
);
INSERT INTO customers (name, email)
    SELECT name, lower(trim(email)) FROM old_orders AS o
    WHERE id = (SELECT max(id) FROM old_orders AS l WHERE lower(trim(l.email)) = lower(trim(o.email)))
    ORDER BY id;
INSERT INTO orders
    SELECT o.id, c.id, o.item, CAST(round(o.price * 100) AS INTEGER)
    FROM old_orders AS o JOIN customers AS c ON c.email = lower(trim(o.email));
DROP TABLE old_orders;
CREATE INDEX orders_by_customer ON orders (customer_id);
PRAGMA user_version = 2;
COMMIT;
PRAGMA journal_mode = DELETE;
SQL
