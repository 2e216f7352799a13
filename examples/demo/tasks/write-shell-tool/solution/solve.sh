#!/bin/sh
set -eu
cp /solution/topwords /app/topwords
chmod 755 /app/topwords
