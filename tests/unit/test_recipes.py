"""The shipped recipes: one per algorithm, each a run that resolves and plans, with its numbers."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from posttrain.core.config.loading import find_config, load_config, shipped_configs
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError
from posttrain.core.estimate.tokens import RunData
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.api.planned import stage_rows
from posttrain.pipelines.run.planning import plan_stages

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "configs" / "recipes" / "README.md").read_text("utf-8")
MANAGER = PluginManager()
RECIPES = sorted(
    name
    for name in shipped_configs()
    if name.startswith("recipes/") and "gsm8k" not in name  # those are settings of a data set
)
PRESETS = {e.name: e.cls for e in MANAGER.entries("algorithm") if e.package == "posttrain"}
VARIANTS = {name: cls.variant_of for name, cls in PRESETS.items() if cls.variant_of}  # type: ignore[attr-defined]
ALGORITHMS = sorted(PRESETS.keys() - VARIANTS.keys())


@cache
def resolved(name: str) -> ResolvedRun:
    return resolve(load_config([Path(name)]), MANAGER)


def config_of(name: str) -> RunConfig:
    return resolved(f"recipes/{name}").config


def rl_of(name: str) -> RlStage:
    stage = config_of(name).stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


def text_of(name: str) -> str:
    return find_config(Path(name)).read_text("utf-8")


def test_every_algorithm_has_a_recipe_of_its_name() -> None:
    assert [f"recipes/{name}" for name in ALGORITHMS] == RECIPES
    assert set(VARIANTS.values()) <= set(ALGORITHMS), "a variant is served by the other's recipe"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_with_its_algorithm_between_two_evaluations(recipe: str) -> None:
    config = resolved(recipe).config
    name = recipe.removeprefix("recipes/")
    assert config.name == name and config.description
    trained = [key for key, stage in config.stages.items() if hasattr(stage, "algorithm")]
    assert [getattr(config.stages[key], "algorithm").name for key in trained] == [name]  # noqa: B009
    assert resolved(recipe).order[-2:] == ("evaluate", "register")
    assert config.stages["evaluate"].inputs == {"model": trained[0], "baseline": "evaluate_base"}
    assert config.stages["register"].inputs == {"model": trained[0], "evaluation": "evaluate"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_planned_without_its_model(recipe: str, tmp_path: Path) -> None:
    run = resolved(recipe)
    plans = plan_stages(run, tmp_path, MANAGER)
    assert [plan.name for plan in plans] == list(run.order)
    assert not any(plan.cached for plan in plans)
    rows = stage_rows(run.config, run.order, {}, RunData(run.config, MANAGER))
    assert all(row["arithmetic"] for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_leaves_room_for_a_prompt_beside_the_longest_response(recipe: str) -> None:
    config = resolved(recipe).config
    lengths = [config.evaluation.max_response_length]
    for stage in config.stages.values():
        if hasattr(stage, "generation"):
            lengths.append(stage.generation.max_response_length)
    assert max(lengths) + 256 <= config.model.max_model_len


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_its_source_and_says_how_to_bring_the_data(recipe: str) -> None:
    text = text_of(recipe)
    assert re.search(r"Sources?: .*(arXiv:\d{4}\.\d{5}|Williams 1992)", text)
    assert "not given" in text
    assert "name: jsonl" in text or recipe == "recipes/grpo_process"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_lists_every_recipe_with_its_model_and_source(recipe: str) -> None:
    name = recipe.removeprefix("recipes/")
    (row,) = [line for line in README.splitlines() if line.startswith(f"| [{name}]({name}.yaml) |")]
    model, source = (cell.strip() for cell in row.strip("|").split("|")[2:])
    assert resolved(recipe).config.model.source.rsplit("/", 1)[-1] == model
    for part in source.removeprefix("arXiv:").split(", "):
        assert part in text_of(recipe)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "rl" in resolved(r).config.stages])
def test_the_readme_s_small_run_fits_on_top_of_every_rl_recipe(recipe: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    small = tmp_path / "small.yaml"
    small.write_text(block)
    added = re.findall(r"`--set (stages\.(\w+)\.\S+?)`", README)
    sets = [override for override, name in added if name in resolved(recipe).config.stages]
    config = resolve(load_config([Path(recipe), small], sets), MANAGER).config
    wanted = yaml.safe_load(block)
    stage = config.stages["rl"]
    assert isinstance(stage, RlStage)
    assert stage.prompts_per_step == wanted["stages"]["rl"]["prompts_per_step"]
    assert stage.algorithm.name == recipe.removeprefix("recipes/")
    assert config.task.name == wanted["task"]


# --- the numbers of three of them -------------------------------------------------------------


def test_dapo_has_the_paper_s_numbers() -> None:
    config, rl = config_of("dapo"), rl_of("dapo")
    assert config.model.source == "Qwen/Qwen2.5-32B"
    optimizer = rl.optimizer
    assert (optimizer.learning_rate, optimizer.schedule) == (1e-6, "constant")
    assert (optimizer.warmup_rollouts, optimizer.warmup_steps) == (20, 0)
    assert (rl.prompts_per_step, rl.num_generations) == (512, 16)
    mini_batch = rl.prompts_per_step * rl.num_generations // rl.num_mini_batches
    assert (mini_batch, rl.epochs * rl.num_mini_batches) == (512, 16)
    (loss,) = rl.loss_terms
    assert loss.name == "ppo_clip"
    assert (loss.fields()["clip_low"], loss.fields()["clip_high"]) == (0.2, 0.28)
    assert rl.aggregator.name == "token-mean" and rl.sampler.name == "dynamic"
    assert rl.sampler.fields()["keep"] == "mixed" and rl.drop_groups == "none"
    assert rl.kl.controller.fields() == {"coef": 0.0}
    assert rl.generation.max_response_length == 20480 == 16384 + 4096
    assert (rl.generation.temperature, rl.generation.top_p) == (1.0, 1.0)
    rule, overlong = rl.rewards
    assert (rule.name, overlong.name) == ("dapo_rule", "soft_overlong")
    fields = overlong.fields()
    assert (fields["max_length"], fields["buffer_length"], fields["factor"]) == (20480, 4096, 1.0)
    evaluation = config.evaluation
    assert (evaluation.num_samples, evaluation.top_p, evaluation.temperature) == (32, 0.7, 1.0)


def test_ppo_has_the_numbers_of_a_13b_run() -> None:
    config, rl = config_of("ppo"), rl_of("ppo")
    assert "13b" in config.model.source
    assert rl.optimizer.learning_rate == 1.5e-5 and rl.optimizer.max_grad_norm == 1.0
    (loss,) = rl.loss_terms
    assert (loss.fields()["clip_low"], loss.fields()["clip_high"]) == (0.2, 0.2)
    assert rl.prompts_per_step * rl.num_generations == 256
    assert rl.advantage.name == "gae" and rl.advantage.fields()["lam"] == 0.95
    assert rl.entropy_coef == 0.01 and rl.epochs == 4
    assert rl.critic is not None and rl.critic.epochs == 4
    assert rl.critic.optimizer.learning_rate == 1.5e-5
    assert "0.5 of the value loss" in text_of("recipes/ppo")
    assert rl.kl.place == "reward" and rl.kl.estimator.name == "k1"


def test_grpo_has_the_numbers_of_groups_of_64() -> None:
    rl = rl_of("grpo")
    assert rl.optimizer.learning_rate == 8e-7
    assert rl.kl.controller.fields() == {"coef": 0.1} and rl.kl.place == "loss"
    assert rl.num_generations == 64
    generation = rl.generation
    assert (generation.temperature, generation.top_p) == (0.7, 0.9)
    assert generation.max_response_length == 2048


# --- how they are found -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recipes/dapo", "recipes/dapo.yaml", "quickstart"])
def test_a_shipped_config_is_found_by_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_config(Path(name))
    assert found == REPO / "configs" / Path(name).with_suffix(".yaml")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("recipes/dapoo", "did you mean 'recipes/dapo'?"),
        ("dapo", "did you mean 'recipes/dapo'?"),
        ("nowhere/else", "the folder nowhere does not exist"),
    ],
)
def test_a_misspelt_recipe_is_told_its_nearest_name(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(says)):
        find_config(Path(name))


def test_the_recipes_are_packaged_with_the_wheel() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
    data = settings["tool"]["setuptools"]["package-data"]["posttrain.configs"]
    folder = REPO / "configs"
    packed = {path for pattern in data for path in folder.glob(pattern)}
    assert packed == set(shipped_configs().values())
