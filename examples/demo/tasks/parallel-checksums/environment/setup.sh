#!/bin/sh
# Makes the files, the same each time; then this script goes away.
set -eu
rm -rf /app/data
mkdir /app/data
awk 'BEGIN {
    for (n = 1; n <= 12; n++) {
        text = "block " n "\n"
        while (length(text) < 100000) text = text text
        printf "%s", text >sprintf("/app/data/part-%02d.bin", n)
    }
}'
rm -f /app/setup.sh
