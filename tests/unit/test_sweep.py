"""What a sweep is made of: its section, its effects, its judge; without running anything."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from posttrain.core.analysis.sweep import Speed, learning_speed, paired_effect, seeds_effect
from posttrain.core.config.loading import load_config
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.variants import VariantsSection, setting_name
from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.store.run_record import find_run
from posttrain.pipelines.cli.sweep import parse_seeds
from posttrain.pipelines.sweep.branches import Sweep, sweep_of
from posttrain.pipelines.sweep.driver import Driver
from posttrain.pipelines.sweep.places import Messages, Place
from posttrain.pipelines.sweep.processes import Processes
from posttrain.pipelines.sweep.record import (
    FILE,
    BranchRecord,
    SweepRecord,
    read_record,
    write_record,
)
from posttrain.pipelines.sweep.search import is_in, require_optuna
from posttrain.pipelines.sweep.stopping import StopBehind
from posttrain.pipelines.sweep.sweeping import SweepOptions, planned_sweep
from posttrain.pipelines.sweep.worker import record_of
from tests.helpers.made_runs import RUN, made_run
from tests.helpers.pipeline import tiny_config

LEARNING_RATE = "stages.rl.optimizer.learning_rate"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sweep") / "model")


def config(model: Path, variants: Any) -> dict[str, Any]:
    found = tiny_config(model)
    stages = found["stages"]
    stages["rl"] |= {"inputs": {"model": "sft"}, "rewards": ["accuracy"]}
    stages["evaluate"]["inputs"] = {"model": "rl"}
    found["stages"] = {name: stages[name] for name in ("sft", "rl", "evaluate")}
    return found | {"variants": variants}


def swept(model: Path, variants: Any, **options: Any) -> Sweep:
    return sweep_of([config(model, variants)], [], home=model.parent / "home", **options)


# --- the section -----------------------------------------------------------------------------


def test_a_variant_has_what_those_before_it_set() -> None:
    section = VariantsSection.model_validate(
        {
            "named": {
                "a": {},
                "b": {"extends": "a", "set": {"stages.rl.steps": 1, "stages.rl.epochs": 2}},
                "c": {"extends": "b", "set": {"stages.rl.steps": 3}},
            }
        }
    )
    assert section.variants()["c"] == {"stages.rl.epochs": 2, "stages.rl.steps": 3}
    assert section.compared_with == "a"


def test_a_grid_has_every_combination_and_names_for_them() -> None:
    loss = {"name": "ppo_clip", "clip_high": 0.3}
    grid = {"stages.rl.policy_loss": [loss, "gspo"], LEARNING_RATE: [1e-3, 2e-3]}
    names = list(VariantsSection.model_validate({"grid": grid}).variants())
    assert names == [
        "policy_loss=ppo_clip (clip_high 0.3), learning_rate=0.001",
        "policy_loss=ppo_clip (clip_high 0.3), learning_rate=0.002",
        "policy_loss=gspo, learning_rate=0.001",
        "policy_loss=gspo, learning_rate=0.002",
    ]
    assert setting_name({"a.x": 1, "b.x": 2}) == "a.x=1, b.x=2"


@pytest.mark.parametrize(
    ("variants", "reported"),
    [
        ({}, "has no variants; give one of named, grid and search"),
        ({"named": {"a": {}}, "grid": {"x.y": [1]}}, "has named and grid"),
        ({"named": {"a": {"extends": "b"}, "b": {"extends": "a"}}}, "a -> b -> a"),
        ({"named": {"a": {"extends": "z"}}}, "extends 'z', which there is not"),
        ({"named": {"abc": {}}, "base": "abd"}, "did you mean 'abc'"),
        ({"named": {"a": {"set": {"seed": 3}}}}, "`seeds` says"),
        ({"named": {"a{": {}}}, "pattern"),
        ({"named": {"a": {}}, "seeds": [1, 1]}, "has one twice"),
        ({"grid": {"x.y": list(range(40)), "x.z": list(range(40))}}, "1600 variants"),
        ({"search": {"space": {"x": {"low": 2, "high": 1}}}}, "expected low below high"),
        ({"search": {"space": {"x": {"low": 0, "high": 1, "log": True}}}}, "above 0"),
        ({"search": {"space": {"x": {}}}}, "low and high, or a list"),
        ({"named": {"a": {}}, "targte": 0.5}, "did you mean 'target'"),
    ],
)
def test_a_section_that_means_nothing_is_refused(variants: Any, reported: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([{"task": "arithmetic", "variants": variants, "stages": {
            "sft": {"kind": "sft", "inputs": {"model": "base"}}
        }}])  # fmt: skip
    assert reported in str(error.value)
    assert "\n" not in str(error.value)


# --- branches --------------------------------------------------------------------------------


def test_stages_before_the_difference_are_shared_by_seed(model: Path) -> None:
    variants = {
        "seeds": [0, 1],
        "named": {
            "a": {},
            "b": {"set": {LEARNING_RATE: 2e-3}},
            "c": {"set": {LEARNING_RATE: 3e-3}},
        },
    }
    found = swept(model, variants)
    assert [b.label for b in found.branches[:3]] == ["a, seed 0", "a, seed 1", "b, seed 0"]
    shared = found.shared()
    assert {known.partition(" ")[0] for known in shared} == {"sft"}
    assert sorted(shared.values()) == [3, 3]
    assert found.distinct() == 2 + 6 + 6
    assert found.measure == ("evaluate", "accuracy")


def test_a_branch_is_the_config_with_its_settings(model: Path) -> None:
    variants = {"named": {"a": {}, "b": {"set": {LEARNING_RATE: 2e-3}}}}
    found = swept(model, variants, seeds=[7])
    (b,) = [branch for branch in found.branches if branch.variant == "b"]
    own = b.resolved.config
    assert own.seed == 7
    assert own.variants is None
    assert own.run_name == "{name}-seed{seed} [b]"
    rl = own.stages["rl"]
    assert isinstance(rl, RlStage) and rl.optimizer.learning_rate == 2e-3


def test_a_field_of_a_plugin_that_the_algorithm_brings(model: Path) -> None:
    path = "stages.rl.policy_loss.clip_high"
    variants = {
        "named": {
            "a": {},
            "b": {"set": {path: 0.28}},
            "c": {"set": {"stages.rl.algorithm": "gspo", path: 0.01}},
        }
    }
    losses: dict[str, Any] = {}
    for one in swept(model, variants).branches:
        rl = one.resolved.config.stages["rl"]
        assert isinstance(rl, RlStage)
        losses[one.variant] = rl.policy_loss
    assert losses["a"].fields()["clip_high"] == 0.2
    assert (losses["b"].name, losses["b"].fields()["clip_high"]) == ("ppo_clip", 0.28)
    assert (losses["c"].name, losses["c"].fields()["clip_high"]) == ("gspo", 0.01)


def test_errors_name_the_variant_and_the_line(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    variants = {"named": {"a": {}, "b": {"set": {"stages.rl.stepz": 3}}}}
    path.write_text(yaml.safe_dump(config(model, variants), sort_keys=False))
    line = path.read_text().splitlines().index("        stages.rl.stepz: 3") + 1
    with pytest.raises(ConfigError) as error:
        sweep_of([path], [], home=tmp_path)
    assert str(error.value).startswith(f"variant 'b': {path}:{line}: stages.rl.stepz: unknown")


def test_only_keeps_the_base_and_knows_its_names(model: Path) -> None:
    variants = {"base": "b", "named": {"a": {}, "b": {}, "c": {}}}
    assert list(swept(model, variants, only=["c"]).settings) == ["b", "c"]
    with pytest.raises(ConfigError, match="--only cc: there is not a variant.*did you mean 'c'"):
        swept(model, variants, only=["cc"])
    with pytest.raises(ConfigError, match="no section `variants`"):
        swept(model, None)


def test_seeds_of_the_command_line() -> None:
    assert parse_seeds("0, 2,1") == (0, 2, 1)
    for text in ("", "a", "-1", "1,", "1.5"):
        with pytest.raises(ConfigError, match="expected whole numbers"):
            parse_seeds(text)


def test_branches_of_equal_stages_are_kept_apart(model: Path) -> None:
    room = {"limits.min_free_gb": 2}
    found = swept(model, {"named": {"a": {}, "b": {}, "c": {"set": room}}})
    assert len({branch.key for branch in found.branches}) == 3
    assert found.distinct() == 3


# --- effects ---------------------------------------------------------------------------------


def test_effects_of_equal_variants_are_shown_at_most_once_in_twenty() -> None:
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        of_seed = draw.normal(0, 0.05, size=3)  # what a training run brings
        cells = {
            seed: {
                str(p): float(np.clip(np.sign(draw.normal(of_seed[seed] * 3, 1.0)), -1, 1))
                * float(draw.random() < 0.4)
                for p in range(100)
            }
            for seed in range(3)
        }
        found = paired_effect(cells)
        assert found is not None
        wrong += found.shown
    assert wrong / 300 <= 0.05


def test_a_large_effect_is_shown_and_one_seed_counts_problems() -> None:
    cells = {s: {str(p): float(p % 10 < 4) for p in range(200)} for s in (0, 1, 2)}
    found = paired_effect(cells)
    assert found is not None and found.shown and found.verdict() == "better"
    assert found.difference == pytest.approx(0.4)
    assert found.how == "paired over 200 problems and 3 seeds"
    one = paired_effect({0: cells[0]})
    assert one is not None and one.how == "paired over 200 problems"
    assert paired_effect({}) is None


def test_equal_answers_are_not_certainty() -> None:
    found = paired_effect({s: dict.fromkeys("abcde", 0.0) for s in (0, 1)})
    assert found is not None and found.low is not None and found.low < -0.3


def test_a_measure_without_problems_is_paired_over_seeds() -> None:
    found = seeds_effect([0.1, 0.12, 0.11])
    assert found is not None and found.shown
    single = seeds_effect([0.1])
    assert single is not None and single.low is None and not single.shown
    assert seeds_effect([]) is None


def test_learning_speed_counts_tokens_up_to_the_target() -> None:
    rows: dict[int, dict[str, float]] = {
        0: {"eval/greedy_accuracy": 0.1},
        1: {"tokens/response": 10.0},
        2: {"tokens/response": 20.0, "sampling/tokens_drawn": 25.0, "eval/greedy_accuracy": 0.5},
        3: {"tokens/response": 40.0, "eval/greedy_accuracy": 0.9},
    }
    assert learning_speed(rows, 0.5) == Speed(2, 35.0)
    assert learning_speed(rows, 0.95) is None


# --- stopping, the record, the search --------------------------------------------------------


def branch(variant: str, seed: int) -> Any:
    return SimpleNamespace(variant=variant, seed=seed, key=f"{variant}{seed}")


def test_a_variant_that_is_surely_behind_is_stopped_and_the_base_never() -> None:
    branches = [branch(v, s) for v in ("base", "bad", "same") for s in (0, 1)]
    record = SweepRecord()
    answers = {"base": "1" * 30, "bad": "0" * 20 + "1" * 10, "same": "0" + "1" * 29}
    for one in branches:
        own = BranchRecord(variant=one.variant, seed=one.seed, problems="p")
        record.branches[one.key] = own
        own.right = {5: answers[one.variant]}
    judge = StopBehind("base", branches)
    assert judge.seen(record, branches[2], "rl", 5) == "stopped at step 5, sure to 95%"
    assert judge.seen(record, branches[4], "rl", 5) == ""
    assert judge.seen(record, branches[0], "rl", 5) == ""
    assert judge.seen(record, branches[2], "rl", 6) == ""  # the base has not been there
    for own in record.branches.values():
        own.problems = own.variant
    assert judge.seen(record, branches[2], "rl", 5) == ""  # other problems are no pairs


def test_a_record_is_read_back_and_a_damaged_one_is_reported(tmp_path: Path) -> None:
    record = SweepRecord(branches={"k": BranchRecord(variant="a", seed=1, right={3: "01"})})
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert read_record(tmp_path / "none") == SweepRecord()
    (tmp_path / FILE).write_text('{"branches": 3}')
    with pytest.raises(RunError, match="is not what a sweep wrote"):
        read_record(tmp_path)


def test_a_run_of_another_home_is_here_with_its_record_or_missing_in_one_sentence(
    model: Path, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    recorder = made_run(there, model)
    recorder.warn("sft: beware")
    run = record_of(there, RUN)
    del run["stages"]["rl"]  # of a run that has finished all are done
    stage, *_ = run["stages"]
    sweep = swept(model, {"named": {"a": {}}})

    def missing(store: Path) -> str:
        driver = Driver(sweep, here, store, str(store), Processes(here, here, 1))
        return driver.missing(RUN, run)

    assert missing(there / "artifacts") == ""
    assert find_run(here, RUN).stages == run["stages"]
    assert find_run(here, RUN).warnings == ("sft: beware",)
    assert find_run(here, RUN).config.read_text() == (recorder.folder / "config.yaml").read_text()
    reported = missing(here / "artifacts")
    assert f"the result of its stage '{stage}' is not in {here / 'artifacts'}" in reported
    assert "\n" not in reported


def test_places_that_are_not_ready_get_no_branch_and_without_any_the_sweep_ends(
    model: Path, tmp_path: Path
) -> None:
    """A process that ends while it starts, as on a node without room: really started, and ended."""
    home = tmp_path / "home"
    driver = Driver(
        swept(model, {"named": {"a": {}}}), home, home / "artifacts", "", NoRoom(home, home, 1)
    )
    with pytest.raises(RunError, match="no branch of the sweep can begin: its process ended"):
        driver.run(driver.sweep.branches)
    assert not driver.record.branches


@pytest.mark.parametrize("count", [0, -1, 257])
def test_a_number_of_branches_at_once_that_means_nothing_is_refused(
    model: Path, tmp_path: Path, count: int
) -> None:
    options = SweepOptions(tmp_path, tmp_path, count)
    with pytest.raises(ConfigError, match=f"--parallel is {count}, expected 1 to 256"):
        planned_sweep([config(model, {"named": {"a": {}}})], [], options)


class NoRoom(Processes):
    """Processes that end before they can take a branch."""

    def open(self, messages: Messages) -> Place:
        place = super().open(messages)
        place.is_ready = False
        place.kill()
        return place


def test_trials_of_another_space_are_not_of_this_search() -> None:
    section = VariantsSection.model_validate(
        {"search": {"space": {"a.b": {"low": 1, "high": 3}, "a.c": ["x", "y"]}}}
    ).search
    assert section is not None
    assert section.space["a.b"].whole
    assert is_in({"a.b": 2, "a.c": "x"}, section)
    assert not is_in({"a.b": 4, "a.c": "x"}, section)
    assert not is_in({"a.b": 2, "a.c": "z"}, section)
    assert not is_in({"a.b": 2}, section)


@pytest.mark.parametrize(
    ("space", "reported"),
    [
        ({"stages.rl.stepz": [1]}, "stepz cannot be 1: .*did you mean 'steps'"),
        ({"stages.rl.steps": [1, {}]}, "steps cannot be {}: .*must be a valid integer"),
        ({LEARNING_RATE: {"low": -1, "high": 1}}, "rate cannot be -1: .*greater than 0"),
        ({LEARNING_RATE: {"low": 0.1, "high": 1e8}}, "rate cannot be 100000000.0: .*less than"),
        ({"stages.rl.fork": ["x"]}, "fork cannot be 'x': .*a mapping"),
    ],
)
def test_what_no_trial_can_have_is_refused(model: Path, space: Any, reported: str) -> None:
    with pytest.raises(ConfigError, match=f"variants.search: stages.*{reported}"):
        swept(model, {"search": {"space": space}})


def test_settings_of_a_search_may_need_one_another(model: Path) -> None:
    space = {"stages.rl.schedule": ["streaming"], "stages.rl.max_staleness": [1, 2]}
    assert swept(model, {"search": {"space": space}}).base == "config"


def test_a_search_without_optuna_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ResourceError, match=r"pip install 'posttrain\[search\]'"):
        require_optuna()
