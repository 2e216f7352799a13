#!/bin/sh
# Makes the repository from an exported history, bit for bit the same each time; then both files go away.
set -eu
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
rm -rf /app/repo
git init -q --template= -b main /app/repo
cd /app/repo
git -c core.logAllRefUpdates=false fast-import --quiet </app/history.export
# Not `checkout`: the index that it writes records inode numbers and times.
git read-tree main
git checkout-index -a
rm -f /app/setup.sh /app/history.export
