#!/bin/sh
# Absolute paths, an empty environment and isolated mode: nothing that the agent left in PATH, in a startup
# file or beside its work takes part in the verdict.
exec /usr/bin/env -i PATH=/usr/bin:/bin LC_ALL=C.UTF-8 /usr/bin/python3 -I -S -B /tests/grade.py
