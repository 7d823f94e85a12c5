"""How `math_accuracy` grades GSM8K: worked answers, other problems' answers, marked solutions.

python tests/bench/gsm8k_verifier.py                    # ../shared/data/gsm8k, prints JSON
python tests/bench/gsm8k_verifier.py --data FOLDER      # train.jsonl, example_model_solutions.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.rewards import sample, scores  # noqa: E402


def rows_of(file: Path) -> list[dict[str, object]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def training_answers(folder: Path) -> dict[str, object]:
    """Worked solutions against their own reference, and against the next problem's."""
    worked = [str(row["answer"]) for row in rows_of(folder / "train.jsonl")]
    answers = [text.rpartition("####")[2].strip() for text in worked]
    others = answers[1:] + answers[:1]
    began = time.perf_counter()
    own = scores("math_accuracy", [sample(t, a) for t, a in zip(worked, answers, strict=True)])
    seconds = time.perf_counter() - began
    crossed = scores("math_accuracy", [sample(t, a) for t, a in zip(worked, others, strict=True)])
    same = [a.replace(",", "") == b.replace(",", "") for a, b in zip(answers, others, strict=True)]
    return {
        "training_answers": len(worked),
        "right": sum(s.value == 1.0 for s in own),
        "other_answers_that_differ": same.count(False),
        "of_these_right": sum(
            s.value == 1.0 for s, equal in zip(crossed, same, strict=True) if not equal
        ),
        "answers_per_s": round(len(worked) / seconds, 1),
    }


def marked_solutions(folder: Path) -> dict[str, object]:
    """Models' solutions against the marks that the data set gives them."""
    samples, marks = [], []
    for row in rows_of(folder / "example_model_solutions.jsonl"):
        answer = str(row["ground_truth"]).rpartition("A:")[2].strip()
        for solution in row.values():
            if isinstance(solution, dict):
                samples.append(sample(solution["solution"], answer))
                marks.append(bool(solution["is_correct"]))
    found = [s.value == 1.0 for s in scores("math_accuracy", samples, marker="A:")]
    differ = [i for i, (ours, mark) in enumerate(zip(found, marks, strict=True)) if ours != mark]
    return {
        "marked_solutions": len(marks),
        "marked_right": sum(marks),
        "disagreements": [samples[i].text[-80:] for i in differ],
    }


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=REPO.parent / "shared" / "data" / "gsm8k")
    folder = parser.parse_args().data
    print(json.dumps({**training_answers(folder), **marked_solutions(folder)}, indent=2))


if __name__ == "__main__":
    main()
