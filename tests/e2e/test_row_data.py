"""From verl's Parquet, as it is, to steps of RL: messages and tools reach the model and stay."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from posttrain.core.analysis.evidence import FOLDER, read_step
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.types import Message
from tests.helpers.pipeline import run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

SYSTEM = "Answer with a number."


def verl_file(path: Path, rows: Iterable[int]) -> Path:
    made = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{i} + 1 = ?"},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in rows
    ]
    parquet.write_table(pyarrow.Table.from_pylist(made), path)
    return path


def rl_config(folder: Path, rewards: list[Any]) -> dict[str, Any]:
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model)
    task = {
        "name": "rows",
        "path": str(verl_file(folder / "train.parquet", [*range(40), 3])),
        "held_out_path": str(verl_file(folder / "test.parquet", range(100, 108))),
    }
    rl = {
        "kind": "rl",
        "inputs": {"model": "base"},
        "steps": 2,
        "prompts_per_step": 2,
        "num_generations": 2,
        "generation": {"max_response_length": 4},
        "rewards": rewards,
        "evaluate_every": 2,
    }
    return {
        "name": "verl",
        "engine": "transformers",
        "model": {
            "source": str(model),
            "dtype": "float32",
            "max_model_len": 200,
            "system_prompt": "Never shown.",
        },
        "task": task,
        "evaluation": {"num_problems": 4, "max_response_length": 4, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {"rl": rl},
    }


def test_verl_s_parquet_trains_as_it_is(tmp_path: Path) -> None:
    config = write_config(tmp_path / "a.yaml", rl_config(tmp_path, ["accuracy"]))
    home = tmp_path / "home"
    shown = run_command("data", "show", str(tmp_path / "train.parquet"), "--home", str(home))
    assert shown.code == 0 and "verl (prompts with answers)" in shown.text, shown.text
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.text.count("data: rows that repeat another one and count once: 1 (") == 1
    assert done.code == 0, done.text
    (artifact,) = [
        Path(a["uri"].removeprefix("file://"))
        for a in done.result["stages"]["rl"]["artifacts"]
        if a["kind"] == "model"
    ]
    found = [f for f in [artifact / FOLDER, *artifact.parent.rglob(FOLDER)] if f.is_dir()]
    batch = read_step(found[0], 2).batch
    tokenizer = make_tiny_tokenizer()
    for row, problem in enumerate(batch.problems):
        system, user = problem.messages
        assert system == Message("system", SYSTEM) and user.role == "user"
        assert int(problem.answer) == int(problem.metadata["index"]) + 1
        assert batch.samples[row].problem == problem
        ids = batch.prompt_ids[row][batch.prompt_mask[row].bool()].tolist()
        text = tokenizer.decode(ids)
        assert text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        assert text.endswith(f"{user.content}<|im_end|>\n<|im_start|>assistant\n")
