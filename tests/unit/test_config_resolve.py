"""Resolving: presets under what the user wrote, every plugin's fields checked, sums that divide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.presets import merge_fields
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import Rendered
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError
from posttrain.core.hooks import hookimpl
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Problem
from posttrain.pipelines.run.planning import parts_of_stage
from posttrain.pipelines.stage.inputs import load_tokenizer
from posttrain.plugins.renderers.chat_template import ChatTemplateRenderer

HEAD = "task: {name: arithmetic}\nstages:\n  rl:\n    kind: rl\n    inputs: {model: base}\n"


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager()


def resolved(folder: Path, manager: PluginManager, extra: str = "") -> ResolvedRun:
    path = folder / "a.yaml"
    path.write_text(HEAD + extra)
    return resolve(load_config([path]), manager)


def problems(folder: Path, manager: PluginManager, extra: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, manager, extra)
    return str(caught.value)


def rl(run: ResolvedRun) -> RlStage:
    stage = run.config.stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


def test_what_the_user_wrote_wins_over_the_preset_field_by_field(
    tmp_path: Path, manager: PluginManager
) -> None:
    plain = rl(resolved(tmp_path, manager))
    extra = (
        "    policy_loss: {name: ppo_clip, clip_high: 0.5}\n"
        "    kl: {controller: {name: fixed, coef: 0.5}}\n"
    )
    changed = rl(resolved(tmp_path, manager, extra))
    assert changed.policy_loss.fields()["clip_high"] == 0.5
    assert changed.policy_loss.fields()["clip_low"] == plain.policy_loss.fields()["clip_low"]
    assert changed.kl.controller.fields()["coef"] == 0.5
    assert changed.kl.estimator == plain.kl.estimator


def test_the_preset_decides_what_the_user_left_open(tmp_path: Path, manager: PluginManager) -> None:
    entry = manager.find("algorithm", "grpo")
    expansion = getattr(entry.cls(entry.cls.Config()), "expand")()  # noqa: B009
    stage = rl(resolved(tmp_path, manager))
    assert stage.aggregator.name == expansion["aggregator"]
    assert stage.kl.controller.fields()["coef"] == expansion["kl"]["controller"]["coef"]


def test_merging_replaces_a_component_of_another_name_as_a_whole() -> None:
    under = {"loss": {"name": "a", "x": 1}, "kl": {"place": "loss", "estimator": "k3"}}
    assert merge_fields(under, {"loss": {"name": "b"}})["loss"] == {"name": "b"}
    assert merge_fields(under, {"loss": {"name": "a", "y": 2}})["loss"] == {
        "name": "a",
        "x": 1,
        "y": 2,
    }
    assert merge_fields(under, {"loss": "a"})["loss"] == {"name": "a", "x": 1}
    assert merge_fields(under, {"kl": {"estimator": "k1"}})["kl"] == {
        "place": "loss",
        "estimator": "k1",
    }


class Shouting(ChatTemplateRenderer):
    """Another package's renderer."""

    name = "shouting"

    def render(self, *given: Any, **more: Any) -> Rendered:
        made = super().render(*given, **more)
        return replace(made, token_ids=made.token_ids[::-1])

    def prompt(self, *given: Any) -> tuple[int, ...]:
        return self.render(*given, generation_prompt=True).token_ids


def test_the_models_renderer_is_checked_and_is_part_of_what_its_stages_are(
    tmp_path: Path,
) -> None:
    manager = PluginManager()
    module = ModuleType("theirs")
    module.posttrain_register = hookimpl(lambda: [Shouting])  # type: ignore[attr-defined]
    manager.register(module, package="theirs", version="1")
    config = "model: {renderer: chat_templat}\n"
    lines = problems(tmp_path, manager, config)
    assert "model.renderer: no renderer named 'chat_templat'; did you mean 'chat_template'" in lines
    lines = problems(tmp_path, manager, "model: {renderer: {name: chat_template, tols: 1}}\n")
    assert "renderer" in lines and "tols" in lines
    parts = []
    for name in ("chat_template", "{name: chat_template, tools_in_system: true}", "shouting"):
        extra = f"  s: {{kind: sft, inputs: {{model: base}}}}\nmodel: {{renderer: {name}}}\n"
        run = resolved(tmp_path, manager, extra)
        for stage in ("rl", "s"):
            parts.append(parts_of_stage(run, stage, {}, "transformers", ""))
    assert parts[0]["model.renderer.tool_calls"] == '"auto"'
    assert parts[2]["model.renderer.tools_in_system"] == "true"
    assert parts[5]["plugin renderer shouting"].startswith("theirs 1")
    folder = make_tiny_model(tmp_path / "m")
    problem, plain = Problem("k", "Hi", "", ""), ChatTokenizer.load(folder)
    theirs = load_tokenizer(folder, run.config, manager)
    assert theirs.encode_prompt(problem) == plain.encode_prompt(problem)[::-1]


def test_the_resolved_yaml_resolves_to_itself(tmp_path: Path, manager: PluginManager) -> None:
    run = resolved(tmp_path, manager, "    kl: {controller: {name: fixed, coef: 0.5}}\n")
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert resolve(load_config([again]), manager) == run


def test_the_plugins_of_a_stage_are_listed_with_package_and_version(
    tmp_path: Path, manager: PluginManager
) -> None:
    uses = resolved(tmp_path, manager, "  s: {kind: sft, inputs: {model: base}}\n").plugins
    assert {"task", "algorithm", "advantage", "reward", "kl"} <= {use.kind for use in uses["rl"]}
    assert [use.kind for use in uses["s"]] == ["task", "renderer", "optimizer"]
    assert all(use.package == "posttrain" and use.version for use in uses["rl"])


@pytest.mark.parametrize(
    ("extra", "place", "says"),
    [
        ("    advantage: grppo\n", "advantage", "did you mean 'grpo'?"),
        ("    policy_loss: {name: ppo_clip, clip_hi: 1}\n", "policy_loss.clip_hi", "'clip_high'?"),
        ("    policy_loss: {name: ppo_clip, clip_low: -1}\n", "policy_loss.clip_low", "got -1"),
        ("    rewards: [acuracy]\n", "rewards.0", "did you mean 'accuracy'?"),
        ("    algorithm: grppo\n", "algorithm", "did you mean 'grpo'?"),
        ("    algorithm: {name: grpo, x: 1}\n", "algorithm.x", "it has no fields"),
        ("    sampler: grup\n", "sampler", "did you mean 'group'?"),
        ("    kl: {estimator: k9}\n", "kl.estimator", "no kl named 'k9'"),
        ("    kl: {controller: fixd}\n", "kl.controller", "did you mean 'fixed'?"),
        ("    aggregator: token_mean\n", "aggregator", "did you mean 'token-mean'?"),
        ("    rewards: [{name: accuracy, weight: 0}]\n", "rewards", "every reward has weight 0"),
        ("    num_mini_batches: 3\n", "num_mini_batches", "16 prompts per step do not divide"),
        ("    num_mini_batches: 32\n", "num_mini_batches", "choose one of [1, 2, 4, 8, 16]"),
        ("    generation: {temperature: 0}\n", "generation.temperature", "nothing can be learned"),
        ("    kl: {place: reward}\n", "kl", "use 'estimator: k1'"),
        ("    rewards: [reward_model]\n", "inputs", "reads 'reward_model', which its rewards need"),
        (
            "    rewards: [process_reward]\n",
            "inputs",
            "reads 'process_reward_model', which its rew",
        ),
    ],
)
def test_a_problem_is_told_with_line_place_and_mend(
    tmp_path: Path, manager: PluginManager, extra: str, place: str, says: str
) -> None:
    reported = problems(tmp_path, manager, extra)
    line = 5 if place == "inputs" else 6
    assert reported.startswith(f"{tmp_path}/a.yaml:{line}: stages.rl.{place}: "), reported
    assert says in reported
    assert "\n" not in reported


def test_a_reward_that_names_its_model_needs_no_input(
    tmp_path: Path, manager: PluginManager
) -> None:
    extra = "    rewards: [{name: process_reward, path: models/prm}]\n"
    assert rl(resolved(tmp_path, manager, extra)).outside_paths() == {
        "rewards.0.path": "models/prm"
    }


@pytest.mark.parametrize(
    "extra", ["    kl: {place: reward, estimator: k1}\n",
              "    kl: {place: reward, estimator: k3, allow_biased_reward_kl: true}\n"],
)  # fmt: skip
def test_an_unbiased_or_permitted_kl_in_the_reward_is_accepted(
    tmp_path: Path, manager: PluginManager, extra: str
) -> None:
    assert rl(resolved(tmp_path, manager, extra)).kl.place == "reward"


def test_an_unknown_task_and_engine_are_told_together(
    tmp_path: Path, manager: PluginManager
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(HEAD.replace("arithmetic", "arithmetc") + "engine: transformer\n")
    with pytest.raises(ConfigError) as caught:
        resolve(load_config([path]), manager)
    reported = str(caught.value)
    assert "a.yaml:1: task: no task named 'arithmetc'; did you mean 'arithmetic'?" in reported
    assert "a.yaml:6: engine: " in reported and "did you mean 'transformers'?" in reported


def test_the_base_defaults_of_an_evaluation_are_filled_in(
    tmp_path: Path, manager: PluginManager
) -> None:
    text = "  e: {kind: evaluate, inputs: {model: rl}}\nevaluation: {num_problems: 5}\n"
    stage = resolved(tmp_path, manager, text).config.stages["e"]
    section = getattr(stage, "evaluation")  # noqa: B009
    assert section is not None and section.num_problems == 5
