#!/bin/sh
set -eu
cp /solution/gateway.toml /app/gateway.toml
