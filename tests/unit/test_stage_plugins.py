"""Stage and optimizer plugins: ours are registered as anybody's, and what is refused at load."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import yaml
from torch import nn

from posttrain.core.config.base import Component
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.schema import BUILT_IN, RunConfig, stage_classes
from posttrain.core.config.sections import EvaluationSection, OtherOptimizer
from posttrain.core.contracts import Stage, StageBase, StageOutput, Task
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.hooks import hookimpl
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.identity import stage_parts
from posttrain.core.training.optim import MasterOptimizer
from posttrain.pipelines.api.planned import planned
from posttrain.pipelines.run.checks import check_inputs, check_stages
from posttrain.pipelines.run.storing import check_made
from tests.helpers.pipeline import environment
from tests.helpers.plugin_site import offer
from tests.helpers.plugins import MANAGER, REQUIRED

LAB = Path(__file__).resolve().parents[1] / "data" / "lab-plugin" / "posttrain_lab" / "plugins.py"


@pytest.fixture(scope="module")
def lab() -> Any:
    """The module of the test package."""
    spec = importlib.util.spec_from_file_location("posttrain_lab_plugins", LAB)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def manager(lab: Any) -> PluginManager:
    made = PluginManager()
    made.register(lab, package="lab", version="1")
    return made


def test_the_kinds_that_are_known_before_plugins_are_those_that_are_registered() -> None:
    found = {entry.name: entry.cls.Config for entry in MANAGER.entries("stage")}
    assert found == BUILT_IN
    for kind, cls in BUILT_IN.items():
        config = cls.model_validate({"kind": kind, **REQUIRED.get(("stage", kind), {})})
        assert config.kind == MANAGER.stage(config).name == kind
    assert [entry.name for entry in MANAGER.entries("optimizer")] == ["adamw"]


def resolved(folder: Path, manager: PluginManager, **changes: Any) -> ResolvedRun:
    lion = {"name": "lion", "learning_rate": 1e-3}
    config = {
        "task": "arithmetic",
        "stages": {
            "even": {"kind": "keep_even"},
            "sft": {
                "kind": "sft",
                "inputs": {"model": "base", "dataset": "even"},
                "optimizer": lion,
            },
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return resolve(load_config([path], manager=manager), manager)


def test_a_stage_of_another_package_is_resolved_as_ours(
    tmp_path: Path, manager: PluginManager
) -> None:
    run = resolved(tmp_path, manager)
    assert run.order == ("even", "sft")
    assert run.config.stages["even"].model_dump()["count"] == 16
    used = {name: {(use.kind, use.name) for use in uses} for name, uses in run.plugins.items()}
    assert ("stage", "keep_even") in used["even"] and ("optimizer", "lion") in used["sft"]
    assert all(use.source for use in run.plugins["even"] if use.kind == "stage")
    filled = run.config.stages["sft"].model_dump(mode="json")["optimizer"]
    assert filled["betas"] == [0.9, 0.99] and filled["schedule"] == "constant"
    assert "moments" not in filled
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert resolve(load_config([again], manager=manager), manager).config == run.config
    context = stage_classes(manager)
    dumped = run.config.model_dump(mode="json")
    assert RunConfig.model_validate(dumped, context=context) == run.config


def test_an_optimizer_is_refused_where_it_cannot_work(
    tmp_path: Path, manager: PluginManager
) -> None:
    with pytest.raises(ConfigError, match=r"stages\.sft\.optimizer: optimizer 'lion' does not say"):
        resolved(tmp_path, manager, limits={"learner_ranks": 2})
    rl = {"kind": "rl", "inputs": {"model": "base"}, "algorithm": "trpo"}
    stages = {"rl": rl | {"optimizer": {"name": "lion"}}}
    with pytest.raises(ConfigError, match="takes its own optimizer step, so optimizer 'lion'"):
        resolved(tmp_path, manager, stages=stages, model={"dtype": "float32"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"even": {"kind": "keep_evn"}}, "no stage is of kind 'keep_evn'; .*'keep_even'"),
        ({"even": {"kind": "keep_even", "cuont": 3}}, "yaml:.*field of stages.even.*'count'"),
        ({"merged": {"kind": "merge", "inputs": {"model": "base"}}}, "'merge' reads 'other'"),
        ({"sft": {"kind": "sft", "optimizer": {"name": "lyon"}}}, "no optimizer named 'lyon'"),
        (
            {"sft": {"kind": "sft", "optimizer": {"name": "lion", "moments": "8bit"}}},
            "unknown field of optimizer 'lion'",
        ),
    ],
)
def test_a_mistake_in_its_fields_is_one_sentence(
    tmp_path: Path, manager: PluginManager, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, manager, stages=change)


def test_a_stage_checks_itself_before_a_run(tmp_path: Path, manager: PluginManager) -> None:
    few = {"even": {"kind": "keep_even", "count": 2}}
    notes = check_inputs(resolved(tmp_path, manager, stages=few), manager).notes
    assert "stages.even: few problems are looked at" in notes
    many = {"even": {"kind": "keep_even", "count": 2000}}
    with pytest.raises(ConfigError, match=r"stages\.even\.count: at most 1000"):
        check_inputs(resolved(tmp_path, manager, stages=many), manager)


class Made(StageBase):
    """Makes a report."""

    makes = "report"


class Measured(Made):
    """Makes a report, with an evaluation of its own if it likes."""

    evaluation: EvaluationSection | None = None


def test_the_run_s_evaluation_counts_unless_a_stage_has_its_own() -> None:
    def part(**own: object) -> str:
        stage = {"kind": "reported", "inputs": {}, **own}
        run = {name: {"num_problems": 7} for name in Measured.sections}
        return stage_parts(run, stage, Measured, {}, [], "", "")["evaluation.num_problems"]

    assert part() == part(evaluation=None) == "7"
    assert part(evaluation={"num_problems": 8}) == "8"


@pytest.mark.parametrize(("given", "notes"), [(None, []), ("few", ["stages.a: few"])])
def test_a_check_may_give_one_warning_or_nothing(
    tmp_path: Path, manager: PluginManager, given: object, notes: list[str]
) -> None:
    class Checked(Stage[Any]):
        """Makes a report."""

        name, Config = f"checked_{given}", Made

        def check(self, setting: object) -> Any:
            return given

        def run(self, context: object) -> StageOutput:
            return StageOutput({}, {})

    manager.offer(Checked)
    run = resolved(tmp_path, manager, stages={"a": {"kind": Checked.name}})
    assert check_stages(run, manager, manager.build(Task, "arithmetic")) == notes


class Faulty(StageBase):
    """Makes a report, or would."""

    makes = "report"
    broken: str

    def components(self) -> Any:
        if self.broken == "components":
            return [(("no", "such"), "reward", Component(name="accuracy"))]
        return ()


@pytest.mark.parametrize("what", ["components", "check", "describe", "estimate"])
def test_a_fault_of_its_own_names_the_stage(
    tmp_path: Path, manager: PluginManager, what: str
) -> None:
    def fails(self: object, *given: object) -> Any:
        raise ZeroDivisionError("of mine")

    class Fails(Stage[Any]):
        """Makes a report."""

        name, Config = f"fails_in_{what}", Faulty

        def run(self, context: object) -> StageOutput:
            return StageOutput({}, {})

    if what != "components":
        setattr(Fails, what, fails)
    manager.offer(Fails)
    said = rf"stage 'a': `{what}` of kind 'fails_in_{what}' \(.*test_stage_plugins\) failed with"
    with pytest.raises(ConfigError, match=said):
        run = resolved(tmp_path, manager, stages={"a": {"kind": Fails.name, "broken": what}})
        check_stages(run, manager, manager.build(Task, "arithmetic"))
        planned(run, manager, tmp_path, tmp_path / "store", device="cpu")


def stage_of(config: type[StageBase]) -> type[Stage[Any]]:
    class Reported(Stage[Any]):
        """Makes a report."""

        name, Config = "reported", config

        def run(self, context: object) -> StageOutput:
            return StageOutput({}, {})

    return Reported


class NoMakes(StageBase):
    """Says nothing."""


class BadSection(Made):
    """Names a section that does not exist."""

    sections = ("sed",)


class PassesNothing(Made):
    """Hands on what it does not read."""

    passes_on = "model"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NoMakes, "does not say what the stage makes"),
        (BadSection, r"has the sections \['sed'\]: choose from"),
        (PassesNothing, "passes on 'model', not an input: add it to `reads`"),
    ],
)
def test_a_stage_that_says_too_little_is_refused_at_load(
    config: type[StageBase], message: str
) -> None:
    @hookimpl
    def posttrain_register() -> list[type[Stage[Any]]]:
        return [stage_of(config)]

    module = ModuleType("reported")
    vars(module)["posttrain_register"] = posttrain_register
    with pytest.raises(ConfigError, match=f"package 'local' offers the class .*{message}"):
        PluginManager(load_entry_points=False).register(module)


def test_what_a_stage_returns_must_be_what_it_says(tmp_path: Path) -> None:
    stage = Made(kind="reported")
    (tmp_path / "page.html").write_text("")
    check_made("a", stage, StageOutput({"report": tmp_path / "page.html"}, {}), tmp_path)
    with pytest.raises(RunError, match="says that it makes 'report' and returned"):
        check_made("a", stage, StageOutput({}, {}), tmp_path)
    for nothing in (None, {"report": tmp_path}):
        with pytest.raises(RunError, match="it returned .*, expected StageOutput: correct `run`"):
            check_made("a", stage, cast(Any, nothing), tmp_path)
    metrics: Any = {"plugin/a": 1, "plugin/b": torch.tensor(1.0)}
    with pytest.raises(RunError, match=r"its metrics \['plugin/b'\] are not numbers"):
        check_made("a", stage, StageOutput({"report": tmp_path / "page.html"}, metrics), tmp_path)
    for wrong in (tmp_path / "none", tmp_path.parent, cast(Any, str(tmp_path / "page.html"))):
        with pytest.raises(RunError, match="expected an existing file or folder in the stage's"):
            check_made("a", stage, StageOutput({"report": wrong}, {}), tmp_path)
    both = {"report": tmp_path / "page.html", "evaluation": tmp_path}
    with pytest.raises(RunError, match=r"holds no metrics\.json, which other stages read"):
        check_made("a", stage, StageOutput(both, {}), tmp_path)


def lion(lab: Any, seed: int) -> tuple[nn.Module, MasterOptimizer]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2).to(torch.bfloat16)
    section = OtherOptimizer(name="lion", learning_rate=0.1)
    return module, MasterOptimizer(module, section, 10, algorithm=lab.Lion(lab.LionConfig()))


def train(module: nn.Module, optimizer: MasterOptimizer, steps: int) -> None:
    for step in range(steps):
        for param in module.parameters():
            param.backward(torch.full_like(param, 1.0 - step))  # type: ignore[no-untyped-call]
        optimizer.step()


def test_numbers_and_tensors_of_an_optimizer_s_state_are_kept(lab: Any, tmp_path: Path) -> None:
    one, first = lion(lab, 0)
    train(one, first, 3)
    first.write(tmp_path)
    two, second = lion(lab, 1)
    second.read(tmp_path, first.step_count)
    assert second.optimizer.param_groups[0]["total"] == 3
    train(one, first, 2)
    train(two, second, 2)
    for name, weight in first.weights().items():
        assert torch.equal(weight, second.weights()[name])


def test_a_state_that_no_checkpoint_holds_is_named(lab: Any, tmp_path: Path) -> None:
    module, optimizer = lion(lab, 0)
    train(module, optimizer, 1)
    optimizer.optimizer.state[optimizer._masters[0]]["past"] = ["a"]
    with pytest.raises(RunError, match="optimizer 'lion' keeps a list as 'past' in its state"):
        optimizer.write(tmp_path)


@pytest.mark.parametrize(
    ("error", "says"),
    [("ValueError('no\\nluck')", "ValueError: no luck"), ("SystemExit(3)", "SystemExit: 3")],
)
def test_commands_that_cannot_be_loaded_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, says: str
) -> None:
    offer(tmp_path, "broken_commands", f"raise {error}\n", monkeypatch)
    points = tmp_path / "site" / "broken_commands-1.0.dist-info" / "entry_points.txt"
    points.write_text("[posttrain.commands]\nbroken = broken_commands\n")
    command = [sys.executable, "-m", "posttrain.pipelines.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0 and "validate" in done.stdout
    said = f"warning: commands of package 'broken_commands' are left out: {says}\n"
    assert done.stderr == said
