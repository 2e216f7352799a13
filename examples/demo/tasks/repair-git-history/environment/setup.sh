#!/bin/sh
# Makes the repository, bit for bit the same each time; then this script goes away.
set -eu
export GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
rm -rf /app/repo
git init -q --template= -b main /app/repo
cd /app/repo

commit() { # author, day, message
    git add -A
    GIT_AUTHOR_NAME=$1 GIT_AUTHOR_EMAIL=$1@harbor.example GIT_AUTHOR_DATE="2026-03-$2T09:30:00+0000" \
        GIT_COMMITTER_NAME=ci GIT_COMMITTER_EMAIL=ci@harbor.example GIT_COMMITTER_DATE="2026-03-$2T10:00:00+0000" \
        git commit -q --no-verify -m "$3"
}

printf '# tides\n\nTide tables for small harbours.\n' >README.md
printf 'harbour,high\nmole,03:12\n' >tides.csv
commit ines 02 'Start the table'
printf 'key-9f2c41d7-do-not-share\n' >deploy.key
printf '#!/bin/sh\nscp -i deploy.key tides.csv tides@harbor.example:\n' >deploy.sh
commit ruben 03 'Deploy from the command line'
printf 'key-b07718aa-do-not-share\n' >deploy.key
printf 'harbour,high\nmole,03:12\nnorth quay,03:40\n' >tides.csv
commit ines 05 'Add the north quay'
git rm -q --cached deploy.key
rm deploy.key
printf '#!/bin/sh\nscp -i "$DEPLOY_KEY" tides.csv tides@harbor.example:\n' >deploy.sh
commit ruben 06 'Take the key from the environment'
printf '# tides\n\nTide tables for small harbours. Times are UTC.\n' >README.md
commit ines 09 'Say which time it is'

# The index records inode numbers and times; this one does not.
rm .git/index
git read-tree HEAD
rm -f /app/setup.sh
