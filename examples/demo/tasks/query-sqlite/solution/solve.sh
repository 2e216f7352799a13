#!/bin/sh
set -eu
sqlite3 -batch -csv -header /app/library.db >/app/answer.csv <<'SQL'
WITH late AS (
    SELECT book.branch AS branch, loan.member AS member,
        sum(max(0, coalesce(loan.returned, 200) - loan.due)) AS days
    FROM loan JOIN book ON book.id = loan.book
    GROUP BY 1, 2
),
ranked AS (
    SELECT late.*, member.name AS name,
        row_number() OVER (PARTITION BY late.branch ORDER BY days DESC, member.name) AS place
    FROM late JOIN member ON member.id = late.member WHERE days > 0
)
SELECT branch.name AS branch, coalesce(ranked.name, '') AS member, coalesce(ranked.days, 0) AS days
FROM branch LEFT JOIN ranked ON ranked.branch = branch.id AND ranked.place = 1
ORDER BY branch.name;
SQL
sed -i 's/,"",/,,/; s/\r$//' /app/answer.csv
