"""Supervised fine-tuning on conversations from a file; an interrupted call continues when repeated.

python examples/sft_on_chats.py [MODEL]
"""

import json
import sys
from pathlib import Path

import posttrain

chats = Path("chats.jsonl")
capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
rows = [
    {
        "messages": [
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": f"{city}."},
        ]
    }
    for country, city in capitals.items()
]
chats.write_text("".join(f"{json.dumps(row)}\n" for row in rows * 8))

run = posttrain.run(
    {
        "name": "sft-on-chats",
        "model": sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct",
        "stages": {
            "sft": {
                "kind": "sft",
                "inputs": {"model": "base"},
                "data": chats,
                "epochs": 2,
                "batch_size": 8,
            }
        },
    },
    overrides={"stages.sft.optimizer.learning_rate": 1.0e-3},
)
print(run.metrics("sft")["sft/loss"])
print(run.artifacts["sft/model"].path)
