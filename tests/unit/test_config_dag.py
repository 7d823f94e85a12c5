"""The DAG of stages: what each reads, in which order they run, what is refused."""

from __future__ import annotations

import pytest
import yaml

from posttrain.core.config import dag
from posttrain.core.config.positions import Loc
from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import StageBase
from posttrain.core.errors import ConfigError

WHOLE = """
evaluate_base: {kind: evaluate, inputs: {model: base}}
evaluate: {kind: evaluate, inputs: {model: rl, baseline: evaluate_base}}
register: {kind: register, inputs: {model: rl, evaluation: evaluate}}
rl: {kind: rl, inputs: {model: sft, reward_model: reward_model}}
reward_model: {kind: reward_model, inputs: {model: sft}}
sft: {kind: sft, inputs: {model: base}}
"""


def stages_of(text: str) -> dict[str, StageBase]:
    return RunConfig.model_validate({"stages": yaml.safe_load(text)}).stages


def nowhere(loc: Loc) -> str:
    return "here"


def check(text: str, rewards_need: tuple[str, ...] = ()) -> list[str]:
    stages = stages_of(text)
    return dag.check(stages, nowhere, {name: rewards_need for name in stages if name == "rl"})


def test_every_stage_runs_after_what_it_reads_and_ties_keep_the_order_written() -> None:
    order = dag.topological_order(stages_of(WHOLE))
    assert order == ("evaluate_base", "sft", "reward_model", "rl", "evaluate", "register")


def test_a_stage_depends_on_the_stages_it_reads_but_not_on_the_base_model() -> None:
    stages = stages_of(WHOLE)
    assert dag.dependencies(stages["rl"]) == ("sft", "reward_model")
    assert dag.dependencies(stages["sft"]) == ()


def test_a_whole_pipeline_has_no_problems() -> None:
    assert check(WHOLE, ("reward_model",)) == []


def test_a_circle_is_printed() -> None:
    text = "a: {kind: sft, inputs: {model: b}}\nb: {kind: sft, inputs: {model: a}}\n"
    with pytest.raises(ConfigError, match="a reads b reads a"):
        dag.topological_order(stages_of(text))
    assert any("a reads b reads a" in line for line in check(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "sft: {kind: sft, inputs: {model: bse}}",
            "stages.sft.inputs.model: no stage named 'bse'; did you mean 'base'?",
        ),
        ("sft: {kind: sft}", "stages.sft.inputs: stage kind 'sft' reads 'model'"),
        (
            "sft: {kind: sft, inputs: {model: base, modle: base}}",
            "stages.sft.inputs.modle: unknown input of stage kind 'sft'; did you mean 'model'?",
        ),
        (
            "e: {kind: evaluate, inputs: {model: base}}\n"
            "r: {kind: register, inputs: {model: e, evaluation: e}}",
            "stages.r.inputs.model reads 'e', which makes an evaluation, not a model",
        ),
        (
            "r: {kind: register, inputs: {model: base, evaluation: base}}",
            "stages.r.inputs.evaluation reads 'base', which makes a model, not an evaluation",
        ),
        (
            "base: {kind: sft, inputs: {model: base}}",
            "stages.base: no stage may be called 'base'",
        ),
        (
            "s: {kind: sft, inputs: {model: base}}\n"
            "rl: {kind: rl, inputs: {model: base, reward_model: s}}",
            "no reward of this stage reads it",
        ),
    ],
)
def test_a_wrong_input_is_told(text: str, says: str) -> None:
    assert any(says in line for line in check(text)), check(text)


def test_an_input_that_a_reward_needs_must_be_there_and_of_its_kind() -> None:
    missing = check("rl: {kind: rl, inputs: {model: base}}", ("reward_model",))
    assert len(missing) == 1
    assert "reads 'reward_model', which its rewards need" in missing[0]
    text = "s: {kind: sft, inputs: {model: base}}\nrl: {kind: rl, inputs: {model: s, R: s}}"
    wrong = check(text.replace("R:", "reward_model:"), ("reward_model",))
    assert len(wrong) == 1
    assert "makes a model, not a reward_model" in wrong[0]
