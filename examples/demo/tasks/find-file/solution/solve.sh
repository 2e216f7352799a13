#!/bin/sh
set -eu
cd /app/inbox
find . -type f -exec sha256sum {} + | sed -n 's|^63fba81e[0-9a-f]*  \./||p' >/app/answer.txt
