#!/bin/sh
# Compares the file, its owner and its mode with what was asked for; every tool by its absolute path. The reward
# is the last thing written, and a comparison that cannot be made (status 2) leaves none.
PATH=/nowhere
file=/app/handbook.txt
reward=0
if [ -f "$file" ] && [ ! -L "$file" ]; then
    /usr/bin/cmp "$file" /tests/handbook.txt
    case $? in
    0) [ "$(/usr/bin/stat -c '%u %a' "$file")" = "1000 640" ] && reward=1 ;;
    1) ;;
    *) exit 2 ;;
    esac
fi
echo "$reward" >/logs/verifier/reward.txt
