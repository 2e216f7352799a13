#!/bin/sh
# Makes the database, bit for bit the same each time; then this script goes away.
set -eu
rm -f /app/library.db
sqlite3 -batch -bail /app/library.db <<'SQL'
PRAGMA synchronous = OFF; -- for this connection only
BEGIN;
CREATE TABLE branch (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE member (id INTEGER PRIMARY KEY, name TEXT NOT NULL, home_branch INTEGER REFERENCES branch (id));
CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT NOT NULL, branch INTEGER NOT NULL REFERENCES branch (id));
CREATE TABLE loan (
    id INTEGER PRIMARY KEY, book INTEGER NOT NULL REFERENCES book (id),
    member INTEGER NOT NULL REFERENCES member (id), due INTEGER NOT NULL, returned INTEGER
);
INSERT INTO branch VALUES (1, 'Mole'), (2, 'Quay'), (3, 'Mill'), (4, 'Ferry'), (5, 'Annex');
INSERT INTO member VALUES (1, 'Ada', 5), (2, 'Bo', 3), (3, 'Cleo', 3), (4, 'Dov', 5), (5, 'Eva', 1), (6, 'Finn', 4), (7, 'Gro', 2), (8, 'Hal', 1);
INSERT INTO book VALUES
    (1, 'Volume 1', 5), (2, 'Volume 2', 5), (3, 'Volume 3', 5), (4, 'Volume 4', 2), (5, 'Volume 5', 1),
    (6, 'Volume 6', 3), (7, 'Volume 7', 4), (8, 'Volume 8', 2), (9, 'Volume 9', 4), (10, 'Volume 10', 1),
    (11, 'Volume 11', 2), (12, 'Volume 12', 1), (13, 'Volume 13', 2), (14, 'Volume 14', 4), (15, 'Volume 15', 3),
    (16, 'Volume 16', 2), (17, 'Volume 17', 4), (18, 'Volume 18', 2), (19, 'Volume 19', 1), (20, 'Volume 20', 2),
    (21, 'Volume 21', 4), (22, 'Volume 22', 2), (23, 'Volume 23', 2), (24, 'Volume 24', 1), (25, 'Volume 25', 1),
    (26, 'Volume 26', 2), (27, 'Volume 27', 2), (28, 'Volume 28', 2), (29, 'Volume 29', 2), (30, 'Volume 30', 3),
    (31, 'Volume 31', 3), (32, 'Volume 32', 2), (33, 'Volume 33', 2), (34, 'Volume 34', 2), (35, 'Volume 35', 2),
    (36, 'Volume 36', 4), (37, 'Volume 37', 3), (38, 'Volume 38', 1), (39, 'Volume 39', 3), (40, 'Volume 40', 4);
INSERT INTO loan VALUES
    (1, 14, 5, 57, 63), (2, 4, 2, 172, 178), (3, 23, 6, 110, 125), (4, 15, 1, 143, 139), (5, 20, 7, 25, 32),
    (6, 5, 7, 160, 168), (7, 4, 3, 135, NULL), (8, 16, 6, 50, 64), (9, 36, 8, 110, 111), (10, 10, 5, 170, 178),
    (11, 6, 4, 130, 120), (12, 25, 6, 151, 145), (13, 21, 6, 199, NULL), (14, 23, 3, 65, 90), (15, 23, 1, 143, NULL),
    (16, 9, 1, 173, 183), (17, 19, 8, 209, NULL), (18, 30, 1, 57, NULL), (19, 35, 3, 105, 98), (20, 30, 6, 47, NULL),
    (21, 13, 3, 35, 38), (22, 33, 8, 178, 196), (23, 35, 5, 196, NULL), (24, 22, 2, 140, 134), (25, 28, 8, 230, NULL),
    (26, 25, 5, 66, NULL), (27, 36, 6, 220, NULL), (28, 8, 1, 221, NULL), (29, 23, 8, 113, 115), (30, 20, 6, 217, NULL),
    (31, 15, 5, 168, 183), (32, 24, 6, 191, 194), (33, 26, 6, 90, 101), (34, 15, 6, 196, NULL), (35, 37, 4, 56, 51),
    (36, 27, 7, 142, 132), (37, 14, 7, 177, 199), (38, 23, 5, 179, NULL), (39, 5, 8, 70, NULL), (40, 15, 1, 76, 72),
    (41, 34, 3, 77, NULL), (42, 11, 4, 101, 116), (43, 39, 7, 29, 36), (44, 8, 6, 171, NULL), (45, 4, 7, 109, 111),
    (46, 11, 1, 196, NULL), (47, 39, 6, 177, 180), (48, 22, 7, 110, 121), (49, 40, 3, 184, 198), (50, 14, 4, 172, 187),
    (51, 12, 1, 175, NULL), (52, 28, 3, 47, 71), (53, 24, 7, 181, NULL), (54, 31, 5, 130, 146), (55, 34, 5, 201, 196),
    (56, 23, 6, 147, 133), (57, 23, 8, 145, 139), (58, 5, 4, 51, 64), (59, 22, 1, 30, 40), (60, 34, 8, 156, 156),
    (61, 6, 5, 82, 76), (62, 22, 2, 146, 161), (63, 5, 5, 214, NULL), (64, 38, 1, 201, NULL), (65, 33, 3, 109, 131),
    (66, 6, 2, 20, 34), (67, 38, 7, 68, NULL), (68, 40, 8, 196, NULL), (69, 28, 5, 141, 138), (70, 33, 1, 214, NULL),
    (71, 31, 5, 169, 184), (72, 13, 8, 62, 82), (73, 25, 1, 157, NULL), (74, 8, 2, 207, NULL), (75, 8, 7, 189, 195),
    (76, 8, 2, 123, 111), (77, 11, 3, 76, 68), (78, 22, 3, 200, 194), (79, 15, 4, 125, 114), (80, 6, 7, 162, NULL),
    (81, 8, 2, 91, NULL), (82, 29, 7, 179, NULL), (83, 9, 8, 100, 116), (84, 26, 3, 187, 175), (85, 22, 5, 58, 75),
    (86, 39, 2, 160, 161), (87, 39, 3, 80, 83), (88, 19, 3, 115, 124), (89, 12, 6, 202, NULL), (90, 9, 2, 166, 156),
    (91, 1, 1, 150, 140), (92, 2, 2, 150, 140), (93, 3, 3, 150, 140), (94, 7, 8, 100, 101);
COMMIT;
SQL
rm -f /app/setup.sh
