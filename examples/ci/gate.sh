#!/bin/sh
# Runs the candidate's job, and lets it through or not. Ends as `dayfly gate` does: 0 pass, 1 fail, 3 inconclusive,
# 4 no valid answer; 2 when something here is written wrongly. Words given to it are passed on to `dayfly gate`.
# With MOVE_BASELINE=yes, a candidate that is let through is what the next one is compared with; with
# ONLY_BASELINE=yes as well, all other jobs are then removed, so that a cache does not grow.
set -eu

value() { # FILE KEY [KEY…]
    python3 -c '
import functools, json, sys
print(functools.reduce(lambda found, key: found[key], sys.argv[2:], json.load(open(sys.argv[1]))))' "$@"
}

rm -f junit.xml gate.svg summary.md # of an earlier build in this folder
dayfly baseline show --json >baseline.json
code=0
dayfly run job.yaml --json >run.json || code=$?
[ "$code" != 2 ] || exit 2
candidate=$(value run.json id 2>/dev/null) || exit 4 # not `last`: if no job was begun, that would be an old one
# What infrastructure lost is tried once more; what is graded is not done again.
[ "$code" != 4 ] || dayfly run --resume "$candidate" || true

code=0
dayfly gate --baseline @main --candidate "$candidate" --policy gate.yaml --junit junit.xml --badge gate.svg "$@" || code=$?
if [ "$code" = 0 ] && [ "${MOVE_BASELINE:-no}" = yes ]; then
    # --expect: if somebody else has moved it meanwhile, this fails and moves nothing.
    dayfly baseline set "$candidate" --reason "${REASON:-let through}" --expect "$(value baseline.json baseline job_id)"
    [ "${ONLY_BASELINE:-no}" != yes ] ||
        find "${DAYFLY_JOBS_DIR:-jobs}" -mindepth 1 -maxdepth 1 -type d ! -name baselines ! -name "$candidate" -exec rm -r {} +
fi
exit "$code"
