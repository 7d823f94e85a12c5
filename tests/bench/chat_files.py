"""Tokens and masks of data files, ours against those of TRL's trainers, row by row.

The files are those of tests/data/formats: two of each format of docs/sft-data.md and
docs/preference-data.md. Our side reads each as its stage does, and again as Parquet. TRL gets the
same rows and tokenises and collates them itself: `SFTTrainer` with and without
`assistant_only_loss`, `DPOTrainer`, `KTOTrainer`. Where it cannot read a file, NAME.by-hand.jsonl
holds the same rows in a form that it reads. The loss of a random model on the first file is
compared as well.

Prints a line a file and reading. Exit code 1 if a row differs that is not expected to, if an
expected difference is gone, or if a file has no row that was compared.

TRL is not a dependency; put it in a folder of its own:

    pip install --no-deps --target .posttrain/trl trl==1.16.0
    python tests/bench/chat_files.py --trl .posttrain/trl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.data.tokens import ChatTokenizer  # noqa: E402
from posttrain.core.kit.tiny import CHARACTERS, make_tiny_model, make_tiny_tokenizer  # noqa: E402
from tests.helpers.trl_side import Answer, Question, Side, ask_trl  # noqa: E402

FILES = REPO / "tests" / "data" / "formats"
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

CONTROL = "TRL takes control tokens in a user's text for such; here they are plain text"
TURNS = "TRL also learns what the user and the template write between the answer's turns"
NAMES = "TRL hands `human` and `gpt` on as roles"
TEXTS = "TRL joins texts without a template; here they are a user's and an assistant's message"
COLUMNS = "TRL does not know these columns"

Kind = Literal["sft", "sft_assistant", "pairs", "labels"]
Verdict = Literal["same", "tail", "differs", "refused"]
LOSS_ON: Mapping[str, Literal["assistant", "all"]] = {"sft": "all", "sft_assistant": "assistant"}


@dataclass(frozen=True)
class Reading:
    """A file as one of TRL's trainers reads it. `verdicts` are of its rows in order; a single one
    is of all rows.

    same: tokens and mask are the same, except that our SFT rows end with the last learned token.
    tail: the same, and TRL learns what the template writes after the end of the turn too.
    differs: tokens or mask differ. refused: TRL raises an error.
    """

    name: str
    kind: Kind
    verdicts: tuple[Verdict, ...] = ("same",)
    why: str = ""
    by_hand: bool = False
    loss_on: Literal["assistant", "all"] | None = None
    parquet: bool = True


def readings() -> list[Reading]:
    """Each file as TRL reads it, and the rows by hand where it cannot."""
    tail: tuple[Verdict, ...] = ("tail",)
    differs: tuple[Verdict, ...] = ("differs",)
    refused: tuple[Verdict, ...] = ("refused",)
    return [
        Reading("messages-1", "sft_assistant"),
        Reading("messages-1", "sft"),
        Reading(
            "messages-2",
            "sft_assistant",
            ("same", "same", "differs", "refused", "differs"),
            f"row 3: {CONTROL}; row 4: TRL hands text parts to the template; row 5: TRL does not "
            "read `train: false`",
            parquet=False,
        ),
        Reading("sharegpt-1", "sft"),
        Reading(
            "sharegpt-1",
            "sft_assistant",
            refused,
            "TRL looks for messages before it renames `conversations`",
        ),
        Reading("sharegpt-2", "sft", differs, NAMES),
        Reading("sharegpt-2", "sft_assistant", by_hand=True),
        Reading("prompt_completion-1", "sft_assistant"),
        Reading(
            "prompt_completion-1",
            "sft",
            ("tail", "tail", "tail", "differs"),
            f"row 4: {TURNS}",
            loss_on="assistant",
        ),
        Reading("prompt_completion-2", "sft", differs, TEXTS, loss_on="assistant"),
        Reading(
            "prompt_completion-2",
            "sft_assistant",
            ("same", "same", "differs"),
            f"row 3: {CONTROL}",
            by_hand=True,
        ),
        Reading("alpaca-1", "sft", refused, COLUMNS),
        Reading("alpaca-1", "sft_assistant", by_hand=True),
        Reading("alpaca-2", "sft", refused, COLUMNS),
        Reading("alpaca-2", "sft_assistant", by_hand=True),
        Reading("text-1", "sft"),
        Reading("text-2", "sft"),
        Reading(
            "pairs-1",
            "pairs",
            ("tail", "tail", "tail", "tail", "differs", "differs"),
            f"row 5: {TURNS}; row 6: {CONTROL}",
        ),
        Reading("pairs-2", "pairs", tail, parquet=False),
        Reading("implicit-1", "pairs", tail),
        Reading(
            "implicit-2", "pairs", differs, f"TRL splits within a word (`It is a ca`), and {TEXTS}"
        ),
        Reading("implicit-2", "pairs", tail, by_hand=True),
        Reading(
            "ultrafeedback-1", "pairs", refused, "TRL cannot join a prompt as text with messages"
        ),
        Reading("ultrafeedback-1", "pairs", tail, by_hand=True),
        Reading("ultrafeedback-2", "pairs", tail),
        *(
            reading
            for name in ("scored-1", "scored-2", "compared-1", "compared-2", "rated-1", "rated-2")
            for reading in (
                Reading(name, "pairs", refused, COLUMNS),
                Reading(name, "pairs", tail, by_hand=True),
            )
        ),
        Reading("dialogues-1", "pairs", differs, "TRL takes dialogues for plain texts"),
        Reading("dialogues-1", "pairs", tail, by_hand=True),
        Reading("dialogues-2", "pairs", differs, "TRL takes dialogues for plain texts"),
        Reading("dialogues-2", "pairs", tail, by_hand=True),
        Reading("labels-1", "labels", ("tail", "tail", "differs"), f"row 3: {CONTROL}"),
        Reading("labels-2", "labels", refused, "TRL needs the column `prompt`"),
        Reading("labels-2", "labels", tail, by_hand=True),
    ]


Found = list[list[Side]]
"""Of each row its sequences: one, or the chosen and the rejected one."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def as_parquet(path: Path, folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    rows, table = rows_of(path), folder / f"{path.stem}.parquet"
    names = dict.fromkeys(name for row in rows for name in row)
    filled = [{name: row.get(name) for name in names} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(filled), table)
    return table


def ours(path: Path, reading: Reading, tokenizer: ChatTokenizer) -> Found:
    """What our stage makes of the file."""
    from posttrain.core.data.lengths import LengthRule
    from posttrain.core.data.preference import tokenise_labelled, tokenise_pairs
    from posttrain.core.data.preference_files import read_preference_rows
    from posttrain.core.data.sft_rows import SourceReport, encoded_rows

    rule = LengthRule("error", 10_000, "rows")
    if reading.kind in LOSS_ON:
        loss_on = reading.loss_on or LOSS_ON[reading.kind]
        rows = encoded_rows(SourceReport(str(path)), "data", tokenizer, loss_on, rule)
        return [[_side(row.prompt, row.response, row.learned)] for _, row in rows]
    if reading.kind == "labels":
        labelled = read_preference_rows(path, "data", ("labels",)).rows
        return [
            [_side(row.prompt_ids, row.answer_ids, row.answer_learned)]
            for row in tokenise_labelled(labelled, tokenizer, rule)
        ]
    pairs = read_preference_rows(path, "data", ("pairs",)).rows
    return [
        [
            _side(pair.prompt_ids, pair.chosen_ids, pair.chosen_learned),
            _side(pair.prompt_ids, pair.rejected_ids, pair.rejected_learned),
        ]
        for pair in tokenise_pairs(pairs, tokenizer, rule)
    ]


def _side(prompt: Sequence[int], answer: Sequence[int], learned: Sequence[bool]) -> Side:
    own = learned or (True,) * len(answer)
    places = [place for place, one in enumerate(own, start=len(prompt)) if one]
    return [*prompt, *answer], places


def verdict(own: list[Side], other: list[Side] | str) -> Verdict:
    """How TRL's sequences of a row differ from ours."""
    if isinstance(other, str):
        return "refused"
    found: Verdict = "same"
    for (ids, places), (more, learned) in zip(own, other, strict=True):
        if not places or ids != more[: len(ids)]:
            return "differs"
        if learned == [*places, len(ids)] and len(more) == len(ids) + 1:
            found = "tail"
        elif learned != places:
            return "differs"
    return found


def judge(reading: Reading, own: Found, other: Answer) -> tuple[list[Verdict], bool]:
    """The verdict on each row of TRL's, and whether all are as expected."""
    rows: list[list[Side] | None] = [*own, *[None] * (len(other.rows) - len(own))]
    found: list[Verdict] = []
    for mine, theirs in zip(rows, other.rows, strict=False):
        sides = None if isinstance(theirs, str) else [(side[0], side[1]) for side in theirs]
        if sides is None:
            found.append("refused")
        else:
            found.append("differs" if mine is None else verdict(mine, sides))
    expected = reading.verdicts * (len(found) if len(reading.verdicts) == 1 else 1)
    complete = len(own) == len(other.rows) or not {"same", "tail"} & set(expected)
    return found, bool(found) and complete and tuple(found) == tuple(expected)


def our_loss(path: Path, tokenizer: ChatTokenizer, model: Path, folder: Path) -> float:
    """The model's mean loss per learned token on the file."""
    import torch

    from posttrain.core.data.lengths import LengthRule
    from posttrain.core.data.sft_rows import SourceReport, TokenRows, encoded_rows
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.loading import load_policy
    from posttrain.core.training.sft import negative_log_likelihood

    rows = TokenRows(folder / "tokens")
    rule, report = LengthRule("error", 10_000, "rows"), SourceReport(str(path))
    for example, row in encoded_rows(report, "data", tokenizer, "assistant", rule):
        rows.add(row, example.where, "")
    rows.finish()
    runtime = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
    batch = rows.batch(range(len(rows)), tokenizer.pad_token_id)
    loss, count = negative_log_likelihood(load_policy(model, runtime), batch, micro_batch_size=8)
    return loss / count


def given(reading: Reading) -> Path:
    """The file that TRL gets."""
    return FILES / f"{reading.name}{'.by-hand' if reading.by_hand else ''}.jsonl"


def compare(site: Path, root: Path) -> bool:
    """Print a line a reading; whether everything is as expected."""
    letters = dict.fromkeys(CHARACTERS + "".join(p.read_text("utf-8") for p in FILES.iterdir()))
    characters = make_tiny_tokenizer("".join(letters), TEMPLATE)
    model = make_tiny_model(root / "model", tokenizer=characters)
    tokenizer, asked = ChatTokenizer.load(model), readings()
    answers = ask_trl(model, site, [Question(r.kind, rows_of(given(r))) for r in asked], root)
    fine, agreed = True, {path.stem: 0 for path in FILES.glob("*-[12].jsonl")}
    for reading, answer in zip(asked, answers, strict=True):
        path = FILES / f"{reading.name}.jsonl"
        own = ours(path, reading, tokenizer)
        found, expected = judge(reading, own, answer)
        if reading.parquet:
            expected &= ours(as_parquet(path, root), reading, tokenizer) == own
        agreed[reading.name] += sum(one in ("same", "tail") for one in found)
        fine &= expected
        name = f"{reading.name}, {reading.kind}{', by hand' if reading.by_hand else ''}"
        why = f" ({reading.why})" if reading.why else ""
        print(f"{'ok  ' if expected else 'FAIL'} {name}: {' '.join(found)}{why}", flush=True)
        if not expected:
            print(f"     {own}\n     {answer.rows}")
    loss, other = our_loss(FILES / "messages-1.jsonl", tokenizer, model, root), answers[0].loss
    near = other is not None and abs(loss - other) < 1e-4
    print(f"{'ok  ' if near else 'FAIL'} loss on messages-1: {loss:.6f}, TRL {other}")
    never = sorted(name for name, count in agreed.items() if not count)
    print(f"{len(agreed)} files, {sum(agreed.values())} rows with the same tokens and mask")
    if never:
        print(f"FAIL no row is the same in {never}")
    return fine and near and not never


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trl", type=Path, required=True, help="folder that TRL is installed in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        sys.exit(not compare(options.trl, Path(root)))


if __name__ == "__main__":
    main()
