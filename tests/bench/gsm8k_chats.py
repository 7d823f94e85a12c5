"""SFT of SmolLM2 on three-turn chats made from GSM8K's rows: held-out loss over time.

A chat asks the question, then to go on, then for the number. With `--trl` the loss of the first
step is compared with that of TRL's `SFTTrainer` on the same rows.

    python tests/bench/gsm8k_chats.py --rows train.jsonl --seed 0
    pip install --no-deps --target .posttrain/trl trl==1.16.0
    python tests/bench/gsm8k_chats.py --rows train.jsonl --trl .posttrain/trl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.pipeline import Finished, run_command, write_config  # noqa: E402
from tests.helpers.trl_side import Question, ask_trl  # noqa: E402

CHATS, FIRST = 200, 8
# What SmolLM2's template writes, with the assistant's turns marked for TRL.
MARKED = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_of(row: dict[str, str]) -> dict[str, Any]:
    """The first step of the solution, the others, and the number, each on demand."""
    solution, _, number = row["answer"].rpartition("\n#### ")
    first, _, rest = solution.partition("\n")
    turns = [(row["question"], first), ("Go on.", rest or "That is all."), ("So?", number)]
    messages = []
    for asked, said in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": messages}


def train(folder: Path, name: str, home: Path, settings: dict[str, Any], seed: int) -> Finished:
    stage = {"kind": "sft", "inputs": {"model": "base"}, "data": str(folder / f"{name}.jsonl")}
    config = {
        "name": name,
        "seed": seed,
        "model": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "float32"},
        "stages": {"sft": stage | settings},
    }
    path = write_config(folder / f"{name}.yaml", config)
    done = run_command("run", str(path), "--home", str(home), "--json", timeout=3600)
    if done.code:
        raise SystemExit(done.text[-3000:])
    return done


def history(done: Finished, metric: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    run = done.result["stages"]["sft"]["mlflow_run_id"]
    points = MlflowClient(done.result["mlflow_uri"]).get_metric_history(run, metric)
    return sorted((point.step, point.value) for point in points)


def trl_loss(rows: list[dict[str, Any]], model: Path, site: Path, folder: Path) -> float:
    """TRL's loss on the rows."""
    (found,) = ask_trl(model, site, [Question("sft_assistant", rows, MARKED)], folder)
    if found.loss is None:
        raise SystemExit(f"TRL refused a row: {found.rows}")
    return found.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, default=Path(".posttrain"))
    parser.add_argument("--trl", type=Path, help="folder that TRL is installed in")
    options = parser.parse_args()
    lines = options.rows.read_text("utf-8").splitlines()
    chats = [chat_of(json.loads(line)) for line in lines[:CHATS]]
    optimizer = {"learning_rate": 2.0e-5}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, rows in (("chats", chats), ("first", chats[:FIRST])):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        if options.trl is not None:
            settings = {"steps": 1, "batch_size": FIRST, "optimizer": optimizer}
            done = train(folder, "first", options.home, settings, options.seed)
            ours = history(done, "sft/loss")[0][1]
            model = next((options.home / "models").iterdir())
            other = trl_loss(chats[:FIRST], model, options.trl, folder)
            print(f"first step's loss {ours:.6f}, TRL {other:.6f}, difference {ours - other:+.1e}")
            return
        settings = {
            "epochs": 1,
            "batch_size": 16,
            "held_out_fraction": 0.2,
            "evaluate_every": 5,
            "optimizer": optimizer,
        }
        done = train(folder, "chats", options.home, settings, options.seed)
        for step, loss in history(done, "sft/held_out_loss"):
            print(f"step {step:3d}  held-out loss {loss:.4f}")


if __name__ == "__main__":
    main()
