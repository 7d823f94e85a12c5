"""What a run stores is finite and loads elsewhere: weights, checkpoints, adapters, scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from posttrain.core.data.tokens import response_batch
from posttrain.core.kit.tiny import END, make_tiny_model, make_tiny_tokenizer
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_reward_model
from posttrain.core.training.reward_model import score_batch_rows
from tests.helpers.pipeline import Finished, prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

OFTEN = ["--set", "keep.checkpoint_minutes=0.00001"]


def poisoned_model(folder: Path) -> Path:
    """Rows with a 7 have a gradient that is not a number: its embedding's square overflows."""
    made = make_tiny_model(folder, tied=False)
    model = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        token = make_tiny_tokenizer().convert_tokens_to_ids("7")
        model.get_input_embeddings().weight[token] = 3e38
    model.save_pretrained(made)
    return made


def sft_only(model: Path) -> dict[str, Any]:
    config = tiny_config(model)
    sft = config["stages"]["sft"] | {"steps": 8, "batch_size": 2, "micro_batch_size": 1}
    config["stages"] = {"sft": sft}
    return config


def counted(home: Path, done: Finished) -> list[tuple[int, float]]:
    """The steps at which MLflow has the metric of what was not finite."""
    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    experiments = [item.experiment_id for item in client.search_experiments()]
    runs = client.search_runs(experiments, order_by=["attributes.start_time DESC"])
    stage = next(run for run in runs if run.data.tags.get("posttrain.stage") == "sft")
    found = client.get_metric_history(stage.info.run_id, "grad/non_finite")
    return sorted((point.step, point.value) for point in found)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_or_is_skipped(tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", sft_only(poisoned_model(tmp_path / "model")))
    home = prepared(tmp_path / "home")
    done = run_command("run", str(config), "--home", str(home), *OFTEN)
    assert done.code == 1 and "Traceback" not in done.text, done.text
    found = re.search(r"sft: step (\d+): .*gradient is nan \(.*rows of its batch: .*\)", done.text)
    assert found and "optimizer.non_finite: skip" in done.text, done.text
    step = int(found[1])
    assert 1 < step < 8, "some rows are fine"
    assert counted(home, done) == [(step, 1.0)]
    assert not list((home / "artifacts").glob("*sft-*")), "nothing is stored"
    (folder,) = (home / "checkpoints").glob("sft-*")
    kept = [f"step-{n:06d}" for n in range(max(1, step - 2), step)]
    assert sorted(path.name for path in folder.glob("step-*")) == kept, "by time, the newest two"

    skip = ["--set", "stages.sft.optimizer.non_finite=skip"]
    few = [*skip, "--set", "stages.sft.optimizer.max_skipped=1"]
    done = run_command("run", str(config), "--home", str(home), *OFTEN, *few)
    assert done.code == 1 and "above optimizer.max_skipped 1" in done.text, done.text
    done = run_command("run", str(config), "--home", str(home), *OFTEN, *skip, "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["sft"]["status"] == "resumed", "all before it is not lost"
    steps = [at for at, _ in counted(home, done)]
    assert steps[0] == step and 2 <= len(steps) < 8
    assert all(f"step {at}" in done.text for at in steps), "a warning of each"
    (made,) = done.result["stages"]["sft"]["artifacts"]
    model = AutoModelForCausalLM.from_pretrained(made["uri"])
    assert all(p.isfinite().all() for p in model.parameters())

    # Neither the time of checkpoints nor their number is part of what a stage is.
    again = ["--set", "stages.sft.checkpoint_every=3", "--set", "keep.checkpoint_minutes=0"]
    done = run_command("run", str(config), "--home", str(home), *skip, *again, "--json")
    assert done.result["stages"]["sft"]["status"] == "cached"


def test_nothing_is_measured_of_a_model_that_gives_nan(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "model", tied=False)
    model = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    model.save_pretrained(made)
    config = tiny_config(made)
    config["stages"] = {"said": {"kind": "evaluate", "inputs": {"model": "base"}}}
    home = prepared(tmp_path / "home")
    done = run_command("run", str(write_config(tmp_path / "run.yaml", config)), "--home", str(home))
    assert done.code == 4 and "that are not numbers (NaN)" in done.text, done.text
    assert not list((home / "artifacts").glob("*said-*")), "nothing is stored"


def with_adapters(model: Path) -> dict[str, Any]:
    config = tiny_config(model)
    stages = config["stages"]
    sft = stages["sft"] | {"lora": {"rank": 4}, "batch_size": 8}
    sft["optimizer"] = {"learning_rate": 0.02}
    answers = {"num_prompts": 24, "num_generations": 16, "generation": {"max_response_length": 8}}
    dpo = {"kind": "preference", "inputs": {"model": "sft"}, **answers, "lora": {"rank": 4}}
    dpo["optimizer"] = {"learning_rate": 0.02}
    config["stages"] = {"sft": sft, "dpo": dpo, "reward_model": stages["reward_model"]}
    return config


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run with adapters. Its tokenizer pads with the end of a turn."""
    folder = tmp_path_factory.mktemp("adapters")
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = END
    model = make_tiny_model(folder / "model", tokenizer=tokenizer, init_std=0.3)
    return write_config(folder / "run.yaml", with_adapters(model))


def run_in(home: Path, config: Path) -> Finished:
    done = run_command("run", str(config), "--home", str(prepared(home)), *OFTEN, "--json")
    assert done.code == 0, done.text
    return done


@pytest.fixture(scope="module")
def adapted(adapters: Path) -> Finished:
    return run_in(adapters.parent / "one", adapters)


def folder_of(done: Finished, stage: str) -> Path:
    return Path(done.result["stages"][stage]["artifacts"][0]["uri"])


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_an_adapter_on_the_base_that_it_names_is_the_model(adapted: Finished, stage: str) -> None:
    made = folder_of(adapted, stage)
    settings = json.loads((made / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    merged = AutoModelForCausalLM.from_pretrained(made)
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        before, wanted = base(input_ids=ids).logits, merged(input_ids=ids).logits
        got = PeftModel.from_pretrained(base, made / "adapter")(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)
    assert (before - wanted).abs().max() > 0.01


@pytest.mark.slow
def test_the_digests_of_equal_runs_agree(adapters: Path, adapted: Finished, tmp_path: Path) -> None:
    again = run_in(tmp_path / "home", adapters)
    for stage in ("sft", "dpo", "reward_model"):
        first, second = (done.result["stages"][stage]["artifacts"][0] for done in (adapted, again))
        assert first["digest"] == second["digest"], stage


def test_the_reward_model_scores_the_same_in_a_batch(adapted: Finished) -> None:
    made = folder_of(adapted, "reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = [tokenizer(text)["input_ids"] for text in (f"1{END}", f"3 + 4 = 7{END}", "12", f"{END}")]
    rows = response_batch(
        prompts=[row[:1] for row in ids],
        responses=[row[1:] for row in ids],
        group_ids=range(len(ids)),
        pad_token_id=0,
        problems=(),
    )
    runtime = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
    with torch.no_grad():
        ours = score_batch_rows(load_reward_model(made, runtime, new_head=False), rows)[:, None]
        alone = torch.cat([model(input_ids=torch.tensor([row])).logits for row in ids])
        torch.testing.assert_close(alone, ours, rtol=0, atol=1e-4)
        for side in ("left", "right"):
            batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side=side)
            both = {name: batch[name] for name in ("input_ids", "attention_mask")}
            torch.testing.assert_close(model(**both).logits, alone, rtol=0, atol=1e-4)
    assert alone.std() > 0
