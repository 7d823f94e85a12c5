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
QWEN = ["grpo", "dapo", "gspo", "7b_grpo"]
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


@pytest.mark.parametrize("name", QWEN)
def test_the_recipes_for_qwen_are_valid_and_planned(name: str, tmp_path: Path) -> None:
    """Without the model, which a machine that is offline does not have."""
    run = resolved(f"recipes/gsm8k_qwen2.5_{name}", f"task.path={SAMPLE}", ANYWHERE)
    assert run.config.name == f"gsm8k_qwen2.5_{name}"
    problems = check_inputs(run, MANAGER).problems
    assert problems["train"].prompt.endswith('output the final answer after "####".')
    plans = plan_stages(run, tmp_path, MANAGER)
    assert [plan.name for plan in plans] == list(run.order) and not any(p.cached for p in plans)
    rl = rl_of(run)
    longest = max(rl.generation.max_response_length, run.config.evaluation.max_response_length)
    assert longest + 512 <= run.config.model.max_model_len


def test_the_recipe_for_qwen_has_the_example_s_numbers() -> None:
    """verl's examples/grpo_trainer/run_qwen2-7b.sh and the defaults of its actor."""
    for name in ("grpo", "7b_grpo"):
        rl = rl_of(resolved(f"recipes/gsm8k_qwen2.5_{name}", f"task.path={SAMPLE}", ANYWHERE))
        assert (rl.prompts_per_step, rl.num_generations, rl.num_mini_batches) == (1024, 5, 4)
        assert rl.prompts_per_step // rl.num_mini_batches == 256
        assert rl.steps == 7473 // 1024 * 15, "15 passes without the last part of each"
        (loss,) = rl.loss_terms
        assert (loss.name, loss.fields()["dual_clip_c"]) == ("ppo_clip", 3.0)
        assert (rl.kl.estimator.name, rl.kl.controller.fields()["coef"]) == ("k3", 0.001)
        assert rl.aggregator.name == "token-mean" and rl.optimizer.learning_rate == 1e-6
    gspo = rl_of(resolved("recipes/gsm8k_qwen2.5_gspo", f"task.path={SAMPLE}", ANYWHERE))
    (loss,) = gspo.loss_terms
    assert (loss.fields()["clip_low"], loss.fields()["clip_high"]) == (3e-4, 4e-4)
    assert (gspo.prompts_per_step, gspo.num_generations) == (512, 16)


def test_the_recipe_scores_as_the_example_does() -> None:
    """Only a number after #### counts."""
    run = resolved("recipes/gsm8k_qwen2.5_grpo", f"task.path={SAMPLE}", ANYWHERE)
    task = MANAGER.task(run.config.task)
    (problem,) = task.problems("train", 1, 0)
    assert task.verify(problem, f"So it is\n#### {problem.answer}").correct == 1
    assert task.verify(problem, f"So it is {problem.answer}.").correct == 0
