#!/bin/sh
# Attack 19: the reward is there before the verifier is.
mkdir -p /logs/verifier
echo 1 >/logs/verifier/reward.txt
echo '{"reward": 1}' >/logs/verifier/reward.json
chmod 555 /logs/verifier
chmod 444 /logs/verifier/*
chattr +i /logs/verifier/reward.json 2>/dev/null
exit 0
