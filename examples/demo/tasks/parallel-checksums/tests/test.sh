#!/bin/sh
# Compares both files with sealed ones; every tool by its absolute path. On a machine with another number of
# CPUs the task cannot be judged, and no reward is written.
PATH=/nowhere
[ "$(/usr/bin/nproc)" = 2 ] || { echo "this machine does not have 2 CPUs"; exit 2; }

same() { # handed in, sealed
    [ -f "$1" ] && [ ! -L "$1" ] || return 1
    /usr/bin/cmp "$1" "$2"
    case $? in
    0) return 0 ;;
    1) return 1 ;;
    *) exit 2 ;;
    esac
}

reward=0
if same /app/cpus.txt /tests/cpus.txt && same /app/SHA256SUMS /tests/SHA256SUMS; then reward=1; fi
echo "$reward" >/logs/verifier/reward.txt
