"""Worked examples from a file: JSON Lines with `prompt` and `completion`."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.data.json_lines import read_json_lines
from posttrain.core.errors import DataError
from posttrain.core.types import Problem

EXAMPLE = '{"prompt": "2 + 2 =", "completion": "4"}'


def read_examples(path: str, setting: str) -> list[Problem]:
    """Every line of the file as a problem whose worked answer is its `completion`."""
    file = Path(path)
    examples = []
    for row in read_json_lines(file, setting, EXAMPLE):
        prompt, completion = row.values.get("prompt"), row.values.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str) or not prompt:
            raise DataError(
                f"{row.where} needs the texts 'prompt' and 'completion', such as {EXAMPLE}; it has "
                f"{sorted(row.values)}: correct this line"
            )
        examples.append(Problem(row.where, prompt, completion, completion))
    return examples
