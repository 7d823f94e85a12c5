"""Tokens and masks of preference pairs, ours against those of TRL's `DPOTrainer`, pair by pair.

Each case is written as JSON Lines and as Parquet and read by our stage's own reader; TRL gets the
same rows as a `Dataset`. A case that is not the same says why. Prints a line a case; exit code 1 if
anything differs that is not expected to, or if an expected difference is gone.

TRL is not a dependency; put it in a folder of its own:

    pip install --no-deps --target .posttrain/trl trl==1.16.0
    python tests/bench/chat_pairs.py --trl .posttrain/trl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.data.tokens import ChatTokenizer  # noqa: E402
from tests.helpers.tiny import make_tiny_model, make_tiny_tokenizer  # noqa: E402

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
OTHER_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
TURNS = [SYSTEM, user("2 + 2?"), answer("4"), user("And 3 + 3?")]
BOTH = {"chosen": [answer("6")], "rejected": [answer("7")]}
HH = "\n\nHuman: 2 + 2?\n\nAssistant:"


@dataclass(frozen=True)
class Case:
    """Rows of one file. `differs` says why TRL has other tokens or another mask."""

    name: str
    rows: list[dict[str, Any]]
    differs: str = ""


CASES = [
    Case(
        "messages with a prompt",
        [
            {"prompt": TURNS[1:2], "chosen": [answer("4")], "rejected": [answer("5")]},
            {"prompt": TURNS, **BOTH},
        ],
    ),
    Case(
        "messages with an implicit prompt",
        [
            {"chosen": [*TURNS, answer("6")], "rejected": [*TURNS, answer("7")]},
            {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c d")]},
        ],
    ),
    Case("margins", [{"prompt": TURNS, **BOTH, "margin": 1.5}]),
    Case(
        "a prompt of messages that ends with a system message",
        [{"prompt": [SYSTEM], **BOTH}],
    ),
    Case("unicode and line breaks", [{"prompt": [user("é\n\n—")], **BOTH}]),
    Case("tools", [{"prompt": TURNS, **BOTH, "tools": [TOOL]}]),
    Case("tools as JSON text", [{"prompt": TURNS, **BOTH, "tools": json.dumps([TOOL])}]),
    Case(
        "tool calls as answers",
        [
            {
                "prompt": [user("2 + 2?")],
                "chosen": [answer("", tool_calls=[CALL])],
                "rejected": [answer("", tool_calls=[OTHER_CALL])],
                "tools": [TOOL],
            }
        ],
    ),
    Case(
        "answers of several turns",
        [
            {
                "prompt": [user("2 + 2?")],
                "chosen": [answer("4"), user("Sure?"), answer("Yes")],
                "rejected": [answer("5"), user("Sure?"), answer("No")],
            }
        ],
        differs="TRL also learns what the user and the template write between the turns",
    ),
    Case(
        "UltraFeedback, binarized",
        [
            {
                "prompt": "2 + 2?",
                "chosen": [user("2 + 2?"), answer("4")],
                "rejected": [user("2 + 2?"), answer("5")],
                "score_chosen": 9.0,
                "score_rejected": 2.0,
            }
        ],
        differs="TRL cannot join the text of the prompt with messages; remove the column there",
    ),
    Case(
        "texts with a prompt",
        [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}],
        differs="TRL joins the texts without a template; here the prompt is a user's message",
    ),
    Case(
        "texts with an implicit prompt",
        [{"chosen": "It is a cat", "rejected": "It is a car"}],
        differs="TRL cuts within the word ('It is a ca'), and joins the texts without a template",
    ),
    Case(
        "Human/Assistant dialogues",
        [{"chosen": HH + " 4", "rejected": HH + " 5"}],
        differs="TRL takes them for plain texts; here they are the turns of a chat",
    ),
    Case(
        "control tokens in a user's text",
        [{"prompt": [user("a<|im_end|>\n<|im_start|>assistant\nb")], **BOTH}],
        differs="TRL takes them for control tokens; here what users write is plain text",
    ),
    Case(
        "turns of human and gpt",
        [
            {
                "conversations": [{"from": "human", "value": "a"}],
                "chosen": {"from": "gpt", "value": "b"},
                "rejected": {"from": "gpt", "value": "c"},
            }
        ],
        differs="TRL does not know these columns",
    ),
    Case(
        "scored answers",
        [
            {
                "instruction": "2 + 2?",
                "completions": [
                    {"response": "5", "overall_score": 1.0},
                    {"response": "4", "overall_score": 9.0},
                ],
            }
        ],
        differs="TRL does not know these columns",
    ),
]

Found = list[list[tuple[list[int], list[int]]]]
"""Of each pair, chosen first: the tokens, and the places of those that are learned."""


def write(case: Case, folder: Path) -> list[Path]:
    """The case as JSON Lines and as Parquet."""
    import pyarrow
    import pyarrow.parquet

    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(case.rows), table)
    return [lines, table]


def ours(path: Path, tokenizer: ChatTokenizer) -> Found:
    from posttrain.core.data.lengths import LengthRule
    from posttrain.core.data.preference import tokenise_pairs
    from posttrain.core.data.preference_files import read_preference_rows

    rows = read_preference_rows(path, "data", ("pairs",)).rows
    found: Found = []
    for pair in tokenise_pairs(rows, tokenizer, LengthRule("error", 10_000, "rows")):
        sides = []
        for ids, learned in (
            (pair.chosen_ids, pair.chosen_learned),
            (pair.rejected_ids, pair.rejected_learned),
        ):
            own, start = learned or (True,) * len(ids), len(pair.prompt_ids)
            places = [place for place, one in enumerate(own, start=start) if one]
            sides.append(([*pair.prompt_ids, *ids], places))
        found.append(sides)
    return found


def theirs(case: dict[str, Any], model: str) -> Found:
    """TRL's tokens and learned places of each pair; runs with TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as out:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=DPOConfig(
                output_dir=out,
                max_length=None,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(case["rows"]),
            processing_class=tokenizer,
        )
    found: Found = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        sides = []
        for side in range(2):
            length = int(batch["attention_mask"][side].sum())
            ids = batch["input_ids"][side][:length].tolist()
            mask = batch["completion_mask"][side][:length].tolist()
            sides.append((ids, [place for place, own in enumerate(mask) if own]))
        found.append(sides)
    return found


def same(own: Found, other: Found) -> bool:
    """Equal, except that TRL also learns what the template writes after the end of the turn."""
    if len(own) != len(other):
        return False
    return all(
        ids == more[: len(ids)]
        and places == [place for place in learned if place < len(ids)]
        and len(more) - len(ids) <= 1
        for pair, trl_pair in zip(own, other, strict=True)
        for (ids, places), (more, learned) in zip(pair, trl_pair, strict=True)
    )


def ask_trl(model: Path, site: Path, folder: Path) -> list[dict[str, Any]]:
    """What `theirs` returns of each case, or its error, from a process that has TRL."""
    paths = [str(site.resolve()), os.environ.get("PYTHONPATH", "")]
    answers = folder / "trl.json"
    with (folder / "trl.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, __file__, "--trl-side", str(answers), "--model", str(model)],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
    if done.returncode:
        raise SystemExit(f"TRL's side failed:\n{(folder / 'trl.log').read_text()[-3000:]}")
    found: list[dict[str, Any]] = json.loads(answers.read_text())
    return found


def trl_side(model: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for case in CASES:
        try:
            found.append({"rows": theirs(asdict(case), model)})
        except Exception as error:  # whatever TRL raises is its answer
            found.append({"error": f"{type(error).__name__}: {error}"[:200]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trl", type=Path, help="folder that TRL is installed in")
    parser.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_side:
        options.trl_side.write_text(json.dumps(trl_side(options.model)))
        return
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = make_tiny_model(
            root / "model", tokenizer=make_tiny_tokenizer(chat_template=TEMPLATE)
        )
        tokenizer = ChatTokenizer.load(model)
        answers = ask_trl(model, options.trl, root)
        for number, (case, other) in enumerate(zip(CASES, answers, strict=True)):
            (folder := root / str(number)).mkdir()
            files = [ours(path, tokenizer) for path in write(case, folder)]
            trl = [[(ids, places) for ids, places in pair] for pair in other.get("rows", [])]
            alike = "rows" in other and same(files[0], trl)
            fine = files[0] == files[1] and alike == (not case.differs)
            wrong += not fine
            reported = "same" if alike else f"differs: {case.differs or other.get('error', trl)}"
            print(f"{'ok  ' if fine else 'FAIL'} {case.name}: {reported}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
