#!/bin/bash
# No reward file: the exit code is the reward.
[ "$(cat /app/greeting.txt)" = hello ]
