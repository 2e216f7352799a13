#!/bin/sh
set -eu
cp /solution/money.py /app/money.py
