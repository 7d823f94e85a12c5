"""Every number of every section and plugin against values that mean nothing anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, Field, ValidationError

from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import PluginConfig
from posttrain.core.runtime.config_model import LARGEST, ConfigModel
from tests.helpers.plugins import MANAGER

BAD: tuple[Any, ...] = (math.nan, math.inf, -math.inf, "nan", ".inf", -1, True, 1e30, 10**400)

# Fields in which -1 has a meaning; nothing else of `BAD` has one anywhere.
MINUS_ONE = {
    "PreferenceComponent.coef": "the opposite of a preference is learned (unlearning)",
    "RewardComponent.weight": "a reward that is a penalty",
    "GdpoConfig.weights": "weights of the rewards, penalties too",
    "PreferenceStage.f_alpha": "the alpha-divergence is defined for every alpha",
    **{
        f"{loss}Config.alpha_po": "AlphaPO's shape bends either way"
        for loss in ("Simpo", "Cpo", "Hinge", "Ipo")
    },
    "PromoteStage.min_improvement": "a share of problems that may be lost",
    "GkdConfig.log_prob_floor": "a log-prob",
    "ClipCovConfig.cov_low": "a covariance",
    "ClipCovConfig.cov_high": "a covariance",
    "ArpoRuleConfig.broken": "a reward, -1 by default",
    "TerminalConfig.timeout_reward": "a reward, which may be a penalty",
    "LlmJudgeConfig.low": "end of a judge's scale",
    "LlmJudgeConfig.high": "end of a judge's scale; above low",
    "SoftOverlongConfig.floor": "the least penalty, -1 by default",
    "StopProperlyConfig.coef": "a negative reward, with mode: set only",
    "OwnTeacherSection.min_reward": "a reward",
    "SpaceSection.low": "end of a range of any setting",
    "SpaceSection.high": "end of a range of any setting; above low",
    "RlStage.reward_clip": "bounds of rewards",
    "AgentConfig.on_failure": "a reward",
    "GymnasiumConfig.illegal_reward": "a reward, such as that of any other turn of the game",
}


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation is made of, with those of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for part in get_args(annotation):
        yield from models_in(part)


def all_models() -> list[type[BaseModel]]:
    configs = [entry.cls.Config for entry in MANAGER.entries()]
    found = [model for root in (RunConfig, *configs) for model in models_in(root)]
    return list(dict.fromkeys(found))


def leaves(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    parts = get_args(annotation)
    return {leaf for part in parts for leaf in leaves(part)} if parts else {annotation}


def numeric_fields() -> list[Any]:
    """Every field that takes numbers, as test parameters."""
    found = {}
    for model in all_models():
        for name, field in model.model_fields.items():
            if leaves(field.annotation) & {int, float}:
                found[f"{model.__name__}.{name}"] = (model, name)
    return [pytest.param(*value, id=place) for place, value in found.items()]


def refused(model: type[BaseModel], field: str, value: object) -> bool:
    """Whether the model complains of this very field."""
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        return any(problem["loc"][:1] == (field,) for problem in error.errors())
    return False


def test_every_config_has_the_strict_base() -> None:
    assert len(all_models()) > 100
    assert not [model for model in all_models() if not issubclass(model, ConfigModel)]


@pytest.mark.parametrize(("model", "field"), numeric_fields())
def test_a_number_without_a_meaning_is_refused(model: type[BaseModel], field: str) -> None:
    lists = "tuple" in str(model.model_fields[field].annotation)
    meant = f"{model.__name__}.{field}" in MINUS_ONE
    accepted = [
        bad
        for bad in BAD
        if not (bad == -1 and meant)
        and not all(
            refused(model, field, value) for value in (([bad], [bad, bad]) if lists else (bad,))
        )
    ]
    assert not accepted


def test_the_exceptions_exist() -> None:
    known = {param.id for param in numeric_fields()}
    assert not set(MINUS_ONE) - known


class ThirdPartyConfig(PluginConfig):
    """A plugin's config without any bound of its own."""

    count: int = 1
    rate: float | None = None
    shares: tuple[float, ...] = ()
    table: dict[str, int] = Field(default_factory=dict)
    either: int | bool = 1
    huge: int = Field(default=0, le=2**62)


@pytest.mark.parametrize("bad", [math.nan, math.inf, True, 1e30, -1e30])
def test_a_third_partys_config_refuses_them_too(bad: object) -> None:
    fields: tuple[tuple[str, object], ...] = (
        ("count", bad),
        ("rate", bad),
        ("shares", [0.5, bad]),
        ("table", {"a": bad}),
    )
    assert not [name for name, value in fields if not refused(ThirdPartyConfig, name, value)]


def test_a_fields_own_bound_and_booleans_that_are_meant_are_kept() -> None:
    made = ThirdPartyConfig.model_validate(
        {"count": LARGEST, "either": True, "huge": 2**61, "shares": 0.5, "rate": "1e-5"}
    )
    assert (made.either, made.huge, made.shares, made.rate) == (True, 2**61, (0.5,), 1e-5)
    assert not refused(ThirdPartyConfig, "rate", None)


def test_the_bounds_show_in_the_schema() -> None:
    count = ThirdPartyConfig.model_json_schema()["properties"]["count"]
    assert (count["minimum"], count["maximum"]) == (-LARGEST, LARGEST)


def test_values_survive_the_way_through_json() -> None:
    made = ThirdPartyConfig(shares=(0.5, 1.0), table={"a": 2})
    again = ThirdPartyConfig.model_validate(json.loads(made.model_dump_json()))
    assert again == made
