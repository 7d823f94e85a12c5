"""A base model whose template ends turns with another token than its `eos_token`, in a whole run.

Its data hold rows that are too long, prompts that differ in white space alone, and a system prompt
that its template refuses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.kit.tiny import CHARACTERS, make_tiny_model, make_tiny_tokenizer
from tests.helpers.pipeline import run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ '<|im_start|>' + m['content'] + '<|turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
LONG = "x" * 200


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ends")
    tokenizer = make_tiny_tokenizer(CHARACTERS, TEMPLATE)
    tokenizer.add_special_tokens(
        {"eos_token": "<|eos|>", "additional_special_tokens": ["<|turn|>", "<|other|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    model = make_tiny_model(folder / "model", tokenizer=tokenizer)
    path = model / "generation_config.json"
    other = tokenizer.convert_tokens_to_ids("<|other|>")
    ends = [tokenizer.eos_token_id, other]
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))

    rows = [{"prompt": p, "answer": "1"} for p in ("a b", "a  b", "a\tb", " a b", "a b\n")]
    write_rows(folder / "train.jsonl", [*rows, {"prompt": LONG, "answer": "1"}])
    write_rows(folder / "held_out.jsonl", [{"prompt": p, "answer": "1"} for p in ("c", LONG + "y")])
    pairs = [{"prompt": f"{i}", "chosen": "1", "rejected": "2"} for i in range(6)]
    write_rows(folder / "pairs.jsonl", [*pairs, {"prompt": "z", "chosen": LONG, "rejected": "2"}])
    generation, fast = {"max_response_length": 8}, {"learning_rate": 1.0e-2}
    return {
        "name": "ends",
        "engine": "transformers",
        "model": {
            "source": str(model),
            "dtype": "float32",
            "max_model_len": 64,
            "system_prompt": "Be brief.",
        },
        "task": {
            "name": "jsonl",
            "path": str(folder / "train.jsonl"),
            "held_out_path": str(folder / "held_out.jsonl"),
        },
        "evaluation": {"num_problems": 4, "max_response_length": 8, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {
            "sft": {
                "kind": "sft",
                "inputs": {"model": "base"},
                "steps": 30,
                "batch_size": 6,
                "optimizer": fast,
            },
            "dpo": {
                "kind": "preference",
                "inputs": {"model": "sft"},
                "data": str(folder / "pairs.jsonl"),
                "optimizer": {"learning_rate": 1.0e-6},
            },
            "rl": {
                "kind": "rl",
                "inputs": {"model": "dpo"},
                "steps": 1,
                "prompts_per_step": 6,
                "num_generations": 2,
                "generation": generation,
                "optimizer": {"learning_rate": 1.0e-6},
            },
            "evaluate": {"kind": "evaluate", "inputs": {"model": "rl"}},
        },
    }


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_ends_answers_where_it_taught_to_and_counts_what_is_too_long(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = write_config(tmp_path / "run.yaml", config)
    done = run_command("run", str(path), "--home", str(tmp_path / "home"), "--json")
    assert done.code == 0, done.text
    base = ChatTokenizer.load(Path(config["model"]["source"]))
    assert len(base.end_token_ids) == 3
    for name in ("sft", "dpo", "rl"):
        model = next(a for a in done.result["stages"][name]["artifacts"] if a["kind"] == "model")
        saved = json.loads((Path(model["uri"]) / "generation_config.json").read_text())
        assert saved["eos_token_id"] == list(base.end_token_ids)
        assert ChatTokenizer.load(Path(model["uri"])).end_token_ids == base.end_token_ids

    client = MlflowClient(done.result["mlflow_uri"])
    children = client.search_runs(
        [done.result["mlflow_experiment_id"]],
        f"tags.mlflow.parentRunId = '{done.result['mlflow_run_id']}'",
    )
    metrics = {run.data.tags["posttrain.stage"]: run.data.metrics for run in children}
    for name in ("sft", "dpo", "rl"):
        assert metrics[name]["data/overlong_dropped"] == 1, name
        assert metrics[name]["data/overlong_truncated"] == 0
    assert metrics["rl"]["eval/overlong_dropped"] == 1
    assert metrics["evaluate"]["eval/overlong_dropped"] == 1
    # What SFT taught: an answer of one character, then the template's end. The engine stops there.
    assert metrics["evaluate"]["eval/greedy_accuracy"] == 1.0
    assert metrics["evaluate"]["resp_len/truncated_frac"] == 0.0
    assert metrics["evaluate"]["resp_len/mean"] == 2.0


def test_validate_shows_and_refuses_what_the_run_would(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = str(write_config(tmp_path / "run.yaml", config))
    done = run_command("validate", path, "--json")
    assert done.code == 0, done.text
    found = done.result["warnings"]
    # An rl stage has problems to train on and held-out ones.
    stages = [s for name in config["stages"] for s in [name] * (2 if name == "rl" else 1)]
    assert [text.split(":")[0] for text in found] == [f"stages.{s}" for s in stages]
    assert "1 of 6 worked answers with their prompt are too long, such as" in found[0]
    refused = run_command("validate", path, "--set", "model.overlong=error")
    assert refused.code == 3
    assert "stages.sft: 1 of 6" in refused.text and "model.overlong to drop" in refused.text
    same = run_command(
        "run", path, "--set", "model.overlong=error", "--home", str(tmp_path / "home")
    )
    assert same.code == 3 and "1 of 6 worked answers" in same.text, same.text
