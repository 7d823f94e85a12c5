"""Benchmarks in local files, for lm-eval and inspect-ai."""

from __future__ import annotations

import json
from pathlib import Path

CHOICES = ("Paris", "Rome", "Oslo")
CAPITALS = """\
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{question}} A:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
SUMS = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
BOTH = "group: both\ntask: [capitals, sums]\n"
INSPECT = """\
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

SUMS = [(a, b) for a in range(3) for b in range(3)]


@task
def sums():
    samples = [Sample(input=f"{a}+{b}=", target=str(a + b)) for a, b in SUMS]
    return Task(dataset=samples, solver=generate(max_tokens=4), scorer=includes())


@task
def echo():
    samples = [Sample(input=f"{a}+{b}=", target="") for a, b in SUMS]
    return Task(dataset=samples, solver=generate(max_tokens=4), scorer=includes())
"""


def write_benchmarks(folder: Path) -> Path:
    """A multiple choice, a free answer and a group of both for lm-eval, and a file of inspect-ai's.

    In `echo` every answer is right. `folder` is returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "capitals.yaml").write_text(CAPITALS)
    (folder / "sums.yaml").write_text(SUMS)
    (folder / "both.yaml").write_text(BOTH)
    (folder / "sums.py").write_text(INSPECT)
    countries = ("France", "Italy", "Norway")
    _lines(
        folder / "capitals.jsonl",
        [
            {"question": f"{countries[i % 3]} {i}?", "choices": CHOICES, "answer": i % 3}
            for i in range(20)
        ],
    )
    rows = [{"prompt": f"{i % 5}+{i % 3}=", "answer": str(i % 5 + i % 3)} for i in range(12)]
    _lines(folder / "sums.jsonl", rows)
    return folder


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
