#!/bin/bash
cd /app
timeout 10 python3 fizz.py > /tmp/found
if diff /tmp/found /tests/expected.txt; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
