"""Two algorithms on the same task, side by side.

python examples/compare_two.py [MODEL]
"""

import sys

import posttrain

config = {
    "name": "compare-two",
    "model": sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct",
    "task": "digits",
    "evaluation": {"num_problems": 8, "max_response_length": 4},
    "stages": {
        "rl": {
            "kind": "rl",
            "inputs": {"model": "base"},
            "rewards": ["accuracy"],
            "steps": 3,
            "prompts_per_step": 4,
            "num_generations": 4,
            "generation": {"max_response_length": 4},
            "optimizer": {"learning_rate": 1.0e-3},
        },
        "evaluate": {"kind": "evaluate", "inputs": {"model": "rl"}},
    },
}
runs = [posttrain.run(config, overrides={"stages.rl.algorithm": a}) for a in ("grpo", "gspo")]
report = posttrain.compare(*runs)
for title, table in report.frames().items():
    print(f"\n{title}\n{table.to_string(index=False)}")
