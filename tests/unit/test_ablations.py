"""The shipped ablations resolve, leave no aggregator out, and add DAPO's layers one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.loading import load_config, override_of, shipped_configs
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.variants import VariantsSection
from posttrain.core.plugin_manager import PluginManager

REPO = Path(__file__).resolve().parents[2]
MANAGER = PluginManager()
ABLATIONS = sorted(name for name in shipped_configs() if name.startswith("ablations/"))
PAGE = (REPO / "docs" / "ablations.md").read_text("utf-8")
LAYERS = [
    "grpo",
    "+ overlong filtering",
    "+ clip-higher",
    "+ soft overlong punishment",
    "+ token-level loss",
    "+ dynamic sampling",
]
"""Of table 1 in arXiv:2503.14476, in its order."""


def config_of(name: str) -> RunConfig:
    return resolve(load_config([Path(name)]), MANAGER).config


def variants_of(name: str) -> VariantsSection:
    found = config_of(name).variants
    assert found is not None
    return found


def resolved(name: str, variant: str) -> ResolvedRun:
    values = variants_of(name).variants()[variant]
    overrides = [override_of(path, value) for path, value in values.items()]
    return resolve(load_config([Path(name)], overrides), MANAGER)


def rl_of(name: str, variant: str) -> RlStage:
    stage = resolved(name, variant).config.stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


def test_the_ablations_are_shipped() -> None:
    assert ABLATIONS == ["ablations/aggregation", "ablations/dapo"]


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_stands_alone_and_all_its_variants_resolve(name: str) -> None:
    config = config_of(name)
    assert config.model.source == "posttrain/tiny-random" and config.description
    assert len(variants_of(name).seeds) >= 3
    for variant in variants_of(name).variants():
        stages = resolved(name, variant).config.stages
        differ = {key for key in stages if stages[key] != config.stages[key]}
        assert differ <= {"rl"}, "all variants start from one model and are measured alike"
        assert f"| `{variant}` |" in PAGE or f"| {variant} |" in PAGE


def test_every_aggregator_of_the_registry_is_a_variant_and_nothing_else_differs() -> None:
    known = {e.name for e in MANAGER.entries("aggregator") if e.package == "posttrain"}
    variants = variants_of("ablations/aggregation").variants()
    assert {name: {"stages.rl.aggregator": name} for name in known} == variants


def fields(stage: RlStage) -> dict[str, Any]:
    return stage.model_dump(mode="json")


def test_the_layers_of_dapo_are_the_papers_and_each_adds_one_thing_to_the_one_before() -> None:
    assert list(variants_of("ablations/dapo").variants()) == LAYERS
    stages = [fields(rl_of("ablations/dapo", layer)) for layer in LAYERS]
    changes = [
        {key for key in after if after[key] != before[key]}
        for before, after in zip(stages, stages[1:], strict=False)
    ]
    assert changes == [
        {"overlong_filter"},
        {"policy_loss"},
        {"rewards"},
        {"aggregator"},
        {"sampler"},
    ]


def test_all_layers_together_are_the_preset_dapo_and_the_first_is_grpo_without_kl(
    tmp_path: Path,
) -> None:
    path = shipped_configs()["ablations/dapo"]
    text = yaml.safe_load(path.read_text("utf-8"))
    del text["variants"], text["stages"]["rl"]["rewards"], text["stages"]["rl"]["kl"]
    text["stages"]["rl"]["algorithm"] = "dapo"
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump(text))
    preset = resolve(load_config([tmp_path / "preset.yaml"]), MANAGER).config.stages["rl"]
    assert isinstance(preset, RlStage)
    last, by_name = fields(rl_of("ablations/dapo", LAYERS[-1])), fields(preset)
    differ = {key for key in last if last[key] != by_name[key]}
    own = {"algorithm", "overlong_filter", "rewards", "sampler", "rollout_correction"}
    assert differ <= own, "the preset filters nothing, and carries groups over"
    assert [one["name"] for one in last["rewards"]] == [one["name"] for one in by_name["rewards"]]
    first = rl_of("ablations/dapo", "grpo")
    assert first.aggregator.name == "seq-mean-token-mean" and first.kl.controller.name == "fixed"
