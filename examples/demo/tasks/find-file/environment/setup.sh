#!/bin/sh
# Makes the files, the same each time; then this script goes away.
set -eu
rm -rf /app/inbox
mkdir -p /app/inbox/a /app/inbox/b "/app/inbox/old mail" /app/inbox/old\ mail/2025
awk 'BEGIN {
    split("a|b|old mail|old mail/2025", folder, "|")
    for (n = 1; n <= 240; n++) {
        file = "/app/inbox/" folder[n % 4 + 1] "/note " n ".txt"
        for (line = 0; line < 3; line++) print "note", n * 7919 % 1009, line * n % 13 > file
        close(file)
    }
}'
rm -f /app/setup.sh
