"""TRL's side of `step.py`: GRPOTrainer on the same model and prompts, a step at a time."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from step_baton import Baton
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the answer is in the text: as cheap as the other side's."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(a in text) for text, a in zip(texts, answer, strict=True)]


class Turns(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Waits for its turn before each step."""

    def __init__(self) -> None:
        self.baton = Baton()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.baton.wait()


class Timed(GRPOTrainer):  # type: ignore[misc]  # trl is not typed
    """Notes how long sampling and scoring take of each step."""

    rollout_seconds: list[float]

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate_and_score_completions(*args, **kwargs)
        self.rollout_seconds.append(time.perf_counter() - began)
        return found


def main() -> None:
    """Train for as many steps as asked; the times go to the file that is named."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    rows = options["prompts"] * options["generations"]
    fastest = options["fast"]
    micro = options["micro"] if fastest else 8  # TRL's default
    autocast = options["dtype"] != "float32" or options["autocast"]
    config = GRPOConfig(
        output_dir=options["out"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=options["generations"],
        max_completion_length=options["tokens"],
        generation_kwargs={"min_new_tokens": options["tokens"]},
        max_steps=options["steps"],
        learning_rate=1e-6,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        model_init_kwargs={"dtype": options["dtype"]}
        | ({"attn_implementation": "eager"} if fastest else {}),
        **({"gradient_checkpointing": False} if fastest else {}),
        # Without autocast to bfloat16, TRL's default: the model is in the compute precision
        # already. A processor without bfloat16 instructions emulates it.
        **({"bf16": False} if fastest or not autocast else {}),
    )
    trainer = Timed(
        model=options["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(options["problems"]),
        callbacks=[Turns()],
    )
    trainer.rollout_seconds = []
    trainer.train()
    with open(options["times"], "w", encoding="utf-8") as file:
        json.dump({"rollout": trainer.rollout_seconds}, file)


if __name__ == "__main__":
    main()
