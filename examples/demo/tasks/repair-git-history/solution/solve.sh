#!/bin/sh
# Export the history without the file, import it into a new repository, bundle that.
set -eu
fixed=$(mktemp -d)
git init -q --bare -b main "$fixed"
git -C /app/repo fast-export main -- . ':(exclude)deploy.key' | git -C "$fixed" fast-import --quiet
git -C "$fixed" bundle create -q /app/fixed.bundle main
rm -rf "$fixed"
