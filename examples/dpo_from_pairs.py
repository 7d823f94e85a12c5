"""DPO on pairs of a better and a worse answer from a file.

python examples/dpo_from_pairs.py [MODEL]
"""

import json
import sys
from pathlib import Path

import posttrain

sums = [(left, right) for left in range(8) for right in range(8)]
rows = [
    {
        "prompt": f"What is {left} + {right}?",
        "chosen": str(left + right),
        "rejected": f"I think it is {left + right + 1}",
    }
    for left, right in sums
]
pairs = Path("pairs.jsonl")
pairs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

config = {
    "name": "dpo-from-pairs",
    "model": sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct",
    "stages": {
        "dpo": {
            "kind": "preference",
            "inputs": {"model": "base"},
            "algorithm": "dpo",
            "data": pairs,
            "batch_size": 16,
            "held_out_fraction": 0.25,
            "optimizer": {"learning_rate": 1.0e-4},
        }
    },
}
print(posttrain.validate(config))
run = posttrain.run(config)
print(run.metrics("dpo")[["loss/preference", "rewards/accuracy"]])
print(run.stages["dpo"].metrics["pref/held_out_pair_accuracy"])
