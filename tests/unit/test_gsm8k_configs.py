"""The shipped GSM8K runs: they resolve, plan and validate wherever the data lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ResourceError
from posttrain.core.estimate.tokens import RunData
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.api.planned import stage_rows
from posttrain.pipelines.run.checks import check_inputs
from posttrain.pipelines.run.planning import plan_stages

MANAGER = PluginManager()
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "gsm8k"
NAMES = ["gsm8k_smollm2", "gsm8k_smollm2_dapo"]
ANYWHERE = "engine=transformers"  # the shipped engine, vllm, is not installed everywhere


def resolved(name: str, *overrides: str) -> ResolvedRun:
    return resolve(load_config([Path(name)], list(overrides)), MANAGER)


def rl_of(run: ResolvedRun) -> RlStage:
    stage = run.config.stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_local_data_is_valid_and_planned(name: str, tmp_path: Path) -> None:
    run = resolved(name, f"task.path={SAMPLE}", ANYWHERE)
    problems = check_inputs(run, MANAGER).problems
    assert problems["train"].prompt.endswith("the answer as a number.")
    plans = plan_stages(run, tmp_path, MANAGER)
    assert [plan.name for plan in plans] == list(run.order) and not list(tmp_path.iterdir())
    rows = stage_rows(run.config, run.order, {}, RunData(run.config, MANAGER))
    assert all(row["arithmetic"] for row in rows)


def test_without_data_validation_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    run = resolved("gsm8k_smollm2", ANYWHERE)
    with pytest.raises(ResourceError, match=r"hub cannot be reached .* set `path` to a folder"):
        check_inputs(run, MANAGER)


def test_the_two_runs_share_all_stages_but_the_last(tmp_path: Path) -> None:
    grpo, dapo = (resolved(name) for name in NAMES)
    for stage in ("evaluate_base", "sft", "evaluate_sft"):
        assert grpo.config.stages[stage] == dapo.config.stages[stage]
    assert grpo.config.task == dapo.config.task and grpo.config.model == dapo.config.model
    assert (rl_of(grpo).algorithm.name, rl_of(dapo).algorithm.name) == ("grpo", "dapo")
    assert rl_of(dapo).sampler.name == "dynamic"
    other = resolved("gsm8k_smollm2", "stages.rl.algorithm=dapo")
    assert rl_of(other).aggregator.name == "token-mean"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_sized_for_two_cores(name: str) -> None:
    run = resolved(name)
    stage = rl_of(run)
    assert stage.steps == 20
    longest = stage.generation.max_response_length
    tokens = stage.prompts_per_step * stage.num_generations * longest
    assert tokens <= 12_500, "25 s a step at 500 tokens/s"
    assert longest + 300 <= run.config.model.max_model_len
