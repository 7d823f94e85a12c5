"""Run a small pipeline and read what it left: metrics, samples, the trained model.

python examples/run_and_read.py [MODEL]
"""

import sys

import posttrain

run = posttrain.run(
    {
        "name": "run-and-read",
        "model": sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct",
        "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
        "evaluation": {"num_problems": 20, "max_response_length": 8, "num_samples": 1},
        "stages": {
            "sft": {"kind": "sft", "inputs": {"model": "base"}, "steps": 5, "batch_size": 16},
            "evaluate": {"kind": "evaluate", "inputs": {"model": "sft"}},
        },
    }
)
print(run)
print(run.metrics("sft")[["sft/loss", "grad/norm"]])
print(run.samples("evaluate")[["prompt", "answer", "response"]].head())

# `posttrain.load(run.id)` reads the same from another process.
model, tokenizer = run.model(), run.tokenizer()
chat = [{"role": "user", "content": "What is 2 + 3?"}]
prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
