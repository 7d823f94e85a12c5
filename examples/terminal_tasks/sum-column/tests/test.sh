#!/bin/bash
# Half a point for each file.
python3 - <<'PROGRAM'
import json
from pathlib import Path


def right(name: str, wanted: str) -> bool:
    path = Path("/work", name)
    return path.is_file() and path.read_text().strip() == wanted


reward = 0.5 * right("total.txt", "49") + 0.5 * right("largest.txt", "pear")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
PROGRAM
