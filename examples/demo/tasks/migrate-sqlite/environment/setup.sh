#!/bin/sh
# Makes the database, bit for bit the same each time; then this script goes away.
set -eu
rm -f /app/shop.db
sqlite3 -batch -bail /app/shop.db <<'SQL'
PRAGMA synchronous = OFF; -- for this connection only
BEGIN;
PRAGMA user_version = 1;
CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT, email TEXT, item TEXT, price TEXT);
CREATE TABLE audit (at TEXT, what TEXT);
INSERT INTO audit VALUES ('2026-01-07', 'opened'), ('2026-02-11', 'prices checked');
INSERT INTO orders VALUES
    (1, 'Ines D.', 'ines@harbor.example', 'rope', '12.50'),
    (2, 'Ruben', 'ruben@harbor.example', 'lamp', '30.00'),
    (4, 'Ines Duarte', 'Ines@Harbor.example', 'hook', '0.99'),
    (5, 'Tove', ' tove@harbor.example', 'chart', '7.05'),
    (7, 'Pat O''Brien', 'pat@harbor.example', 'rope', '12.50'),
    (8, 'Tove Lind', 'tove@harbor.example ', 'buoy', '119.90'),
    (9, 'Ruben', 'ruben@harbor.example', 'anchor', '1080.10'),
    (12, 'Ines Duarte-Koch', 'ines@harbor.example', 'gauge', '64.29'),
    (13, 'Åsa', 'asa@harbor.example', 'lamp', '29.95'),
    (20, 'Ruben', 'RUBEN@harbor.example', 'rope', '8.2');
COMMIT;
SQL
rm -f /app/setup.sh
