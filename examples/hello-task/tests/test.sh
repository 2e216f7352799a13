#!/bin/sh
# Runs in a fresh VM that the agent never touched; only /app/greeting.txt was carried over.
# No reward at all means "the verifier is broken"; 0 means "the work is not done".
if [ "$(cat /app/greeting.txt 2>/dev/null)" = "hello, world" ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
