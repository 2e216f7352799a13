#!/bin/sh
# Makes the files, the same each time; then this script goes away.
set -eu
rm -rf /app/data
mkdir /app/data
for n in 01 02 03 04 05 06 07 08 09 10 11 12; do
    yes "block $n" | head -c 200000 >"/app/data/part-$n.bin"
done
rm -f /app/setup.sh
