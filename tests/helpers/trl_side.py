"""What TRL's trainers make of rows: tokens, the places that are learned, and the loss on them.

`ask_trl` runs this file in a process that has TRL, from a folder of its own, on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Side = tuple[list[int], list[int]]
"""The tokens of a sequence, and the places of those that are learned."""


@dataclass(frozen=True)
class Question:
    """Rows for a trainer of TRL's. `template` replaces the model's own, and must write the same.

    `kind`: sft, sft_assistant (with `assistant_only_loss`), pairs (DPO) or labels (KTO).
    """

    kind: Literal["sft", "sft_assistant", "pairs", "labels"]
    rows: Sequence[dict[str, Any]]  # Any: JSON values
    template: str | None = None


@dataclass(frozen=True)
class Answer:
    """Of each row its sequences, or the error that it was refused with.

    `loss` is the model's loss on all rows at once, for sft where no row was refused.
    """

    rows: list[list[Side] | str]
    loss: float | None = None


def ask_trl(model: Path, site: Path, questions: Sequence[Question], folder: Path) -> list[Answer]:
    """What TRL, installed in the folder `site`, makes of the questions; `folder` takes files."""
    asked, answered, log = (folder / f"trl.{end}" for end in ("json", "answers.json", "log"))
    asked.write_text(json.dumps([asdict(question) for question in questions]))
    paths = [str(site.resolve()), os.environ.get("PYTHONPATH", "")]
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, __file__, str(model), str(asked), str(answered)],
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
    if done.returncode:
        raise SystemExit(f"TRL's side failed:\n{log.read_text()[-3000:]}")
    return [Answer(**answer) for answer in json.loads(answered.read_text())]


# --- in the process that has TRL -----------------------------------------------------------------


def answer(question: Question, model: Any, tokenizer: Any) -> Answer:
    """Each row by itself, so that one that is refused leaves the others."""
    import torch

    found: list[list[Side] | str] = []
    for row in question.rows:
        try:
            trainer = _trainer(question.kind, [row], model, tokenizer)
            (made,) = trainer.train_dataset
            found.append(_sides(trainer.data_collator([made])))
        except Exception as error:  # whatever TRL raises is its answer
            found.append(f"{type(error).__name__}: {error}"[:200])
    if not question.kind.startswith("sft") or any(isinstance(row, str) for row in found):
        return Answer(found)
    trainer = _trainer(question.kind, question.rows, model, tokenizer)
    with torch.no_grad():
        loss = trainer.model(**trainer.data_collator(list(trainer.train_dataset))).loss
    return Answer(found, float(loss))


def _trainer(kind: str, rows: Sequence[dict[str, Any]], model: Any, tokenizer: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    makers = {
        "sft": (SFTTrainer, SFTConfig, {}),
        "sft_assistant": (SFTTrainer, SFTConfig, {"assistant_only_loss": True}),
        "pairs": (DPOTrainer, DPOConfig, {}),
        # This loss compares with no other row's answer.
        "labels": (KTOTrainer, KTOConfig, {"loss_type": "apo_zero_unpaired"}),
    }
    trainer, config, settings = makers[kind]
    with tempfile.TemporaryDirectory() as out:
        return trainer(
            model=model,
            args=config(
                output_dir=out,
                max_length=None,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                **settings,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )


def _sides(batch: Any) -> list[Side]:
    """The sequences of a collated batch; the first token of one is never learned."""
    found = []
    for number, ids in enumerate(batch["input_ids"]):
        if "labels" in batch:
            own = batch["labels"][number] != -100
        else:
            own = batch["completion_mask"][number] != 0
        length = int(batch["attention_mask"][number].sum()) if "attention_mask" in batch else None
        learned = [place for place, one in enumerate(own[:length].tolist()) if one and place]
        found.append((ids[:length].tolist(), learned))
    return found


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, asked, answered = sys.argv[1:]
    answers = []
    for values in json.loads(Path(asked).read_text()):
        question = Question(**values)
        tokenizer = AutoTokenizer.from_pretrained(path)
        if question.template is not None:
            chat = question.rows[0]["messages"]
            before = tokenizer.apply_chat_template(chat, tokenize=False)
            tokenizer.chat_template = question.template
            if tokenizer.apply_chat_template(chat, tokenize=False) != before:
                raise SystemExit("the template writes something else than the model's own")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        answers.append(asdict(answer(question, model, tokenizer)))
    Path(answered).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
