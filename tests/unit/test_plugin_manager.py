"""The plugin manager, and a real third-party package built and found by a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from posttrain.core.contracts import Aggregator, Algorithm, KlController, NoConfig, Reward
from posttrain.core.errors import ConfigError
from posttrain.core.hooks import hookimpl
from posttrain.core.kit.new import package_of, write_new
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Score
from posttrain.plugins import defined_in, posttrain_register
from tests.helpers.plugin_site import offer


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def reward_class(plugin_name: str | None) -> type:
    class Made(Reward[NoConfig]):
        """R = 0."""

        Config = NoConfig

        def score(self, samples: object) -> list[Score]:  # type: ignore[override]
            return []

    if plugin_name is not None:
        Made.name = plugin_name
    return Made


def offering(module_name: str, *classes: object) -> ModuleType:
    @hookimpl
    def posttrain_register() -> list[object]:
        return list(classes)

    return module(module_name, posttrain_register=posttrain_register)


@pytest.fixture
def empty() -> PluginManager:
    return PluginManager(load_entry_points=False)


def test_a_manager_without_entry_points_is_empty(empty: PluginManager) -> None:
    assert empty.entries() == []


def test_a_registered_module_offers_its_plugins(empty: PluginManager) -> None:
    empty.register(offering("m", reward_class("zero")), package="mine", version="2")
    (entry,) = empty.entries("reward")
    assert (entry.name, entry.package, entry.version) == ("zero", "mine", "2")
    assert isinstance(empty.build(Reward, "zero"), entry.cls)


def test_a_module_registered_twice_counts_once(empty: PluginManager) -> None:
    again = offering("m", reward_class("zero"))
    empty.register(again)
    empty.register(again)
    assert len(empty.entries()) == 1


def test_a_misspelt_hook_is_refused(empty: PluginManager) -> None:
    @hookimpl
    def posttrain_registr() -> list[type]:
        return []

    with pytest.raises(ConfigError, match=r"'m' has a hook that does not exist.*posttrain_regis"):
        empty.register(module("m", posttrain_registr=posttrain_registr))


def test_a_name_offered_twice_is_refused_and_both_packages_are_named(empty: PluginManager) -> None:
    empty.register(offering("m", reward_class("zero")), package="first")
    with pytest.raises(ConfigError, match=r"two plugins offer reward 'zero'.*first.*second"):
        empty.register(offering("n", reward_class("zero")), package="second")


class Scoring:
    def score(self, samples: object) -> None: ...


class Loose(BaseModel):
    scale: float = 1.0


def changed(**members: object) -> type:
    """A reward with other members; None removes one."""
    made = reward_class("zero")
    for name, value in members.items():
        setattr(made, name, value)
    return made


class Misspelt(Reward[NoConfig]):
    name, Config = "misspelt", NoConfig

    def scores(self, samples: object) -> None: ...


class Bare(Aggregator[Any]):
    name, Config = "bare", NoConfig

    def weights(self, mask: object, counts: object) -> Any: ...


class Empty(Algorithm[NoConfig]):
    name, Config = "empty", NoConfig


@pytest.mark.parametrize(
    ("offered", "says"),
    [
        (Scoring, "is not a plugin class: derive it from Reward of posttrain.core.contracts"),
        (object, "is not a plugin class: derive it from one of the base classes"),
        ("text", "is a value of type str .text., expected a class"),
        (print, "is a function, expected a class: offer the class itself"),
        (reward_class(None), "has no name: write name = 'made' in it"),
        (reward_class("a b"), "has the name 'a b', expected letters, digits, _, . and -, such as"),
        (changed(kind="rewrd"), "has the kind 'rewrd', expected one of .*derive it from Reward"),
        (changed(Config=None), "has no Config: write Config = NoConfig in it, or a class with"),
        (changed(Config=NoConfig()), "has a value of type NoConfig .* as its Config"),
        (changed(Config=Loose), "has the Config Loose, which derives from BaseModel: derive it"),
        (Bare, "has the Config NoConfig, .*: derive it from AggregatorConfig of"),
        (Empty, "sets no fields of a stage: write them in it, such as fields = "),
        (Misspelt, r"lacks what Reward asks for: define score\(self, samples\) .it has 'scores'"),
    ],
)
def test_what_is_not_a_complete_plugin_class_is_refused_with_what_it_lacks(
    empty: PluginManager, offered: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"package 'local' offers .*, which {says}"):
        empty.register(offering("m", offered))


def test_a_built_in_module_offers_the_concrete_classes_that_it_defines() -> None:
    here = reward_class("zero")
    here.__module__ = "m"
    assert defined_in(module("m", Imported=reward_class("one"), Abstract=Reward, Here=here)) == [
        here
    ]
    with pytest.raises(ConfigError, match="built-in module 'm' defines no plugin class"):
        defined_in(module("m", Imported=reward_class("one")))


def test_built_ins_are_offered_in_the_order_of_their_files() -> None:
    files = [cls.__module__ for cls in posttrain_register()]
    assert files == sorted(files) and len(set(files)) > 100


def test_an_unknown_name_comes_with_the_nearest_one(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"no reward named 'acuracy'; did you mean 'accuracy'\?"):
        manager.find("reward", "acuracy")
    with pytest.raises(ConfigError, match="no kl_controller named 'k1'"):
        manager.build(KlController, "k1")


def test_an_unknown_field_is_named_with_its_plugin(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"kl_controller 'fixed': ceof: .*not permitted"):
        manager.build(KlController, "fixed", {"ceof": 0.1})


def test_life_cycle_hooks_reach_every_module_that_has_them(empty: PluginManager) -> None:
    seen: list[tuple[str, int, float]] = []

    @hookimpl
    def posttrain_on_step_end(stage: str, step: int, metrics: Mapping[str, float]) -> None:
        seen.append((stage, step, metrics["loss"]))

    @hookimpl
    def posttrain_on_stage_end(stage: str, status: str) -> None:
        seen.append((f"{stage} {status}", 0, 0.0))

    empty.register(
        module(
            "m",
            posttrain_on_step_end=posttrain_on_step_end,
            posttrain_on_stage_end=posttrain_on_stage_end,
        )
    )
    empty.hooks.hook.posttrain_on_step_end(stage="rl", step=3, metrics={"loss": 0.5})
    empty.hooks.hook.posttrain_on_stage_end(stage="rl", status="ran", metrics={})
    assert seen == [("rl", 3, 0.5), ("rl ran", 0, 0.0)]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("raises_at_import", "raise OSError('no such device')", "OSError: no such device"),
        ("exits_at_import", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_package_that_raises_or_exits_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, says: str
) -> None:
    offer(tmp_path, name, f"{code}\n", monkeypatch)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ConfigError, match=rf"'{name}' 1\.0 .*{says}; c"):
        PluginManager()


def test_an_installed_third_party_package_is_found_by_a_fresh_interpreter(tmp_path: Path) -> None:
    folder, files = package_of("reward", "brevity")
    write_new(files, source := tmp_path / folder)
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    code = (
        "from posttrain.core.contracts import Reward\n"
        "from posttrain.core.plugin_manager import PluginManager\n"
        "from posttrain.core.types import Problem, RewardSample, Verdict\n"
        "manager = PluginManager()\n"
        "entry = manager.find('reward', 'brevity')\n"
        "reward = manager.build(Reward, 'brevity', {'max_tokens': 4})\n"
        "sample = RewardSample(Problem('', '', '', ''), (), (1,), '', False, Verdict(0, None))\n"
        "print(entry.package, entry.version, reward.score([sample])[0].value)\n"
        "print(manager.find('reward', 'accuracy').package)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.split() == ["posttrain-brevity", "0.1.0", "0.75", "posttrain"]
