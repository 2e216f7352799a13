#!/bin/sh
# Once, when a person asks for it: the first results to compare with. It refuses when there are some already.
set -eu
dayfly run job.yaml
dayfly baseline set last --reason "${REASON:-first}" --expect none
