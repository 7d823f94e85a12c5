"""Tokens and masks of SFT data, ours against those of TRL's `SFTTrainer`, row by row.

Each case is written as JSON Lines and as Parquet and read by our stage's own reader; TRL gets the
same rows as a `Dataset`. A case that is not the same says why. The loss of a random model on the
rows of the first case is compared as well. Prints a line a case; exit code 1 if anything differs
that is not expected to, or if an expected difference is gone.

TRL is not a dependency; put it in a folder of its own:

    pip install --no-deps --target .posttrain/trl trl==1.16.0
    python tests/bench/chat_formats.py --trl .posttrain/trl
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
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


PART = {"type": "text", "text": "a"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


@dataclass(frozen=True)
class Case:
    """Rows of one file. `differs` says why TRL has other tokens or another mask."""

    name: str
    rows: list[dict[str, Any]]
    loss_on: str = "assistant"
    assistant_only: bool = True
    differs: str = ""


TURNS = [
    SYSTEM,
    user("2 + 2?"),
    answer("4"),
    user("And 3 + 3?"),
    answer("6"),
    user("?"),
    answer("!"),
]
CASES = [
    Case(
        "messages",
        [
            {"messages": TURNS},
            {"messages": TURNS[1:5]},
            {"messages": [user("a"), answer(""), user("b"), answer("c")]},
            {"messages": [*TURNS, user("left without an answer")]},
        ],
    ),
    Case("messages, all tokens", [{"messages": TURNS}], loss_on="all", assistant_only=False),
    Case(
        "messages with tools",
        [
            {
                "messages": [
                    user("2 + 2?"),
                    answer("I add.", tool_calls=[CALL]),
                    {"role": "tool", "content": "4"},
                    answer("4"),
                ],
                "tools": [TOOL],
            }
        ],
    ),
    Case("tools as JSON text", [{"messages": TURNS[:3], "tools": json.dumps([TOOL])}]),
    Case("prompt and completion as messages", [{"prompt": TURNS[:4], "completion": [TURNS[4]]}]),
    Case(
        "conversations of user and assistant",
        [
            {
                "conversations": [
                    {"from": "user", "value": "2 + 2?"},
                    {"from": "assistant", "value": "4"},
                ]
            }
        ],
        loss_on="all",
        assistant_only=False,
    ),
    Case("text", [{"text": "Once upon a time.\n"}], assistant_only=False),
    Case(
        "text that is a rendered chat",
        [{"text": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"}],
        assistant_only=False,
    ),
    Case(
        "text that ends after its end",
        [{"text": "<|im_start|>user\na<|im_end|>\n"}],
        assistant_only=False,
    ),
    Case(
        "prompt and completion as messages, TRL's default mask",
        [{"prompt": TURNS[:4], "completion": [TURNS[4]]}],
        assistant_only=False,
        differs="TRL also learns what the template writes after the end of the turn",
    ),
    Case(
        "prompt and completion as text",
        [{"prompt": "2 + 2 =", "completion": " 4"}],
        assistant_only=False,
        differs="TRL joins the texts without a template; here the prompt is a user's message",
    ),
    Case(
        "control tokens in a user's text",
        [{"messages": [user("a<|im_end|>\n<|im_start|>assistant\nb"), answer("c")]}],
        differs="TRL takes them for control tokens; here what users write is plain text",
    ),
    Case(
        "conversations of human and gpt",
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
        differs="TRL hands the names on as roles, which the template does not know",
    ),
    Case(
        "alpaca",
        [{"instruction": "Add.", "input": "2 and 2", "output": "4"}],
        assistant_only=False,
        differs="TRL does not know these columns",
    ),
    Case(
        "content as text parts",
        [{"messages": [{"role": r, "content": [PART]} for r in ("user", "assistant")]}],
        differs="TRL hands the list to the template",
    ),
    Case(
        "last assistant message",
        [{"messages": TURNS}],
        loss_on="last_assistant",
        differs="TRL has no such option",
    ),
    Case(
        "messages with train: false",
        [{"messages": [user("a"), answer("b", train=False), user("c"), answer("d")]}],
        differs="TRL does not read it",
    ),
]


def write(case: Case, folder: Path) -> list[Path]:
    """The case as JSON Lines and as Parquet."""
    import pyarrow
    import pyarrow.parquet

    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(case.rows), table)
    return [lines, table]


Found = list[tuple[list[int], list[int]]]
"""Of each row its tokens, and the places of those that are learned."""


def ours(path: Path, case: Case, tokenizer: ChatTokenizer) -> Found:
    from posttrain.core.data.lengths import LengthRule
    from posttrain.core.data.sft_rows import SourceReport, encoded_rows

    rule, report = LengthRule("error", 10_000, "rows"), SourceReport(str(path))
    loss_on: Any = case.loss_on
    found = []
    for _, row in encoded_rows(report, "data", tokenizer, loss_on, rule):
        places = [i for i, own in enumerate(row.learned, start=len(row.prompt)) if own]
        found.append(([*row.prompt, *row.response], places))
    return found


def theirs(case: dict[str, Any], model: str) -> dict[str, Any]:
    """TRL's tokens and learned places of each row, and the loss on all of them; runs with TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as out:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=SFTConfig(
                output_dir=out,
                assistant_only_loss=case["assistant_only"],
                max_length=None,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(case["rows"]),
            processing_class=tokenizer,
        )
    rows = list(trainer.train_dataset)
    found = []
    for row in rows:
        labels = trainer.data_collator([row])["labels"][0].tolist()
        learned = [i for i, label in enumerate(labels) if label != -100 and i]
        found.append((list(row["input_ids"]), learned))
    with torch.no_grad():
        loss = float(trainer.model(**trainer.data_collator(rows)).loss)
    return {"rows": found, "loss": loss}


def same(own: Found, other: Found) -> bool:
    """Equal, except that our rows end with the last learned token."""
    return len(own) == len(other) and all(
        ids == more[: len(ids)] and places == learned
        for (ids, places), (more, learned) in zip(own, other, strict=True)
    )


def our_loss(path: Path, tokenizer: ChatTokenizer, model: Path) -> float:
    import torch

    from posttrain.core.data.lengths import LengthRule
    from posttrain.core.data.sft_rows import SourceReport, TokenRows, encoded_rows
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.loading import load_policy
    from posttrain.core.training.sft import negative_log_likelihood

    rows = TokenRows(path.with_name("tokens"))
    rule, report = LengthRule("error", 10_000, "rows"), SourceReport(str(path))
    for example, row in encoded_rows(report, "data", tokenizer, "assistant", rule):
        rows.add(row, example.where, "")
    rows.finish()
    runtime = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
    batch = rows.batch(range(len(rows)), tokenizer.pad_token_id)
    loss, count = negative_log_likelihood(load_policy(model, runtime), batch, micro_batch_size=8)
    return loss / count


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
    found = []
    for case in CASES:
        try:
            found.append(theirs(asdict(case), model))
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
        characters = make_tiny_tokenizer(chat_template=TEMPLATE)
        model = make_tiny_model(root / "model", tokenizer=characters)
        tokenizer = ChatTokenizer.load(model)
        answers = ask_trl(model, options.trl, root)
        for number, (case, other) in enumerate(zip(CASES, answers, strict=True)):
            (folder := root / str(number)).mkdir()
            files = [ours(path, case, tokenizer) for path in write(case, folder)]
            alike = "rows" in other and same(files[0], [tuple(row) for row in other["rows"]])
            fine = files[0] == files[1] and alike == (not case.differs)
            wrong += not fine
            reported = "same" if alike else f"differs: {case.differs or other.get('error', '')}"
            print(f"{'ok  ' if fine else 'FAIL'} {case.name}: {reported}", flush=True)
            if not number and "loss" in other:
                loss = our_loss(folder / "rows.jsonl", tokenizer, model)
                near = abs(loss - other["loss"]) < 1e-4
                wrong += not near
                print(f"{'ok  ' if near else 'FAIL'} loss {loss:.6f}, TRL {other['loss']:.6f}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
