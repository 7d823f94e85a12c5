"""Plugins in files: short names, modules, copies, and one sentence for each mistake."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.contracts import Reward
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.protocol import specs_of
from posttrain.core.runtime.plugin_files import copy_files, load_file
from posttrain.core.runtime.sources import LARGE, local_source
from tests.helpers.rewards import sample

CODE = """
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import Score
{imports}

class Brief(Reward[NoConfig]):
    "R = 1."
    name, Config = "brief", NoConfig

    def score(self, samples):
        return [Score({value}) for _ in samples]
"""


@pytest.fixture(autouse=True)
def clean_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def write(path: Path, value: object = 1.0, imports: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CODE.format(value=value, imports=imports))
    return path


def run_of(folder: Path, rewards: list[Any], *more: str, **stage: object) -> ResolvedRun:
    rl = {"kind": "rl", "inputs": {"model": "base"}, "rewards": rewards, **stage}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"task": "arithmetic", "stages": {"rl": rl}}))
    return resolve(load_config([folder / "run.yaml"], more), PluginManager())


def score_of(manager: PluginManager, name: str) -> float | None:
    return manager.build(Reward, name).score([sample()])[0].value


def test_a_path_is_relative_to_the_config_then_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "conf" / "both.py")
    write(tmp_path / "cwd" / "both.py", 2.0)
    write(tmp_path / "cwd" / "only here.py", 3.0)
    monkeypatch.chdir(tmp_path / "cwd")
    run = run_of(tmp_path / "conf", ["both.py:Brief", "only here.py:Brief"])
    assert run.config.plugin_files == {
        "both.py": str(tmp_path / "conf" / "both.py"),
        "only here.py": str(tmp_path / "cwd" / "only here.py"),
    }
    changed = run_of(tmp_path / "conf", ["accuracy"], "stages.rl.rewards=[both.py:Brief]")
    assert changed.config.plugin_files == {"both.py": str(tmp_path / "cwd" / "both.py")}


def test_two_files_of_one_name_stay_apart_and_have_clean_labels(tmp_path: Path) -> None:
    write(tmp_path / "a" / "my.py", "limit.VALUE", "import limit")
    (tmp_path / "a" / "limit.py").write_text("VALUE = 1.0\n")
    write(tmp_path / "b" / "my.py", "limit.VALUE", "import limit")
    (tmp_path / "b" / "limit.py").write_text("VALUE = 2.0\n")
    run = run_of(tmp_path, ["a/my.py:Brief", "b/my.py:Brief"])
    rewards = run.config.stages["rl"].rewards  # type: ignore[union-attr,attr-defined]
    assert [r.name for r in rewards] == ["my.py:Brief", "b/my.py:Brief"]
    assert [r.label for r in rewards] == ["brief", "brief_2"]
    manager = PluginManager(load_entry_points=False)
    manager.add_files(run.config.plugin_files)
    assert [score_of(manager, r.name) for r in rewards] == [1.0, 2.0]
    origins = {use.name: use.origin for use in run.plugins["rl"] if use.kind == "reward"}
    assert len(set(origins.values())) == 2 and all(
        o.startswith("local file ") for o in origins.values()
    )


def test_a_file_whose_plugin_was_replaced_is_no_part_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "my.py", 4.0)
    run = run_of(tmp_path, ["my.py:Brief"], "stages.rl.rewards=[accuracy]")
    assert run.config.plugin_files == {}


def test_the_complete_config_loads_to_the_same_run(tmp_path: Path) -> None:
    write(tmp_path / "my.py")
    run = run_of(tmp_path, ["my.py:Brief"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "full.yaml").write_text(run.to_yaml())
    again = resolve(load_config([tmp_path / "elsewhere" / "full.yaml"]), PluginManager())
    assert again.config == run.config and again.plugins == run.plugins


def test_where_the_folder_lies_does_not_matter_and_an_edit_does(tmp_path: Path) -> None:
    uses = []
    for name, value in (("one", 1.0), ("two", 1.0), ("three", 2.0)):
        write(tmp_path / name / "my.py", value)
        run = run_of(tmp_path / name, ["my.py:Brief"])
        uses.append([use for use in run.plugins["rl"] if use.kind == "reward"])
    assert uses[0] == uses[1] != uses[2]


def test_an_edited_file_is_loaded_again_also_within_a_second(tmp_path: Path) -> None:
    path = write(tmp_path / "my.py", 1.0)
    manager = PluginManager(load_entry_points=False)
    assert score_of(manager, f"{path}:Brief") == 1.0
    write(path, 2.0)
    assert score_of(manager, f"{path}:Brief") == 2.0
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("value", "imports"),
    [("words.VALUE", "from at_once import words"), ("__import__('later.words').words.VALUE", "")],
)
def test_an_edited_module_that_it_imports_is_loaded_again(
    tmp_path: Path, value: str, imports: str
) -> None:
    path = write(tmp_path / "my.py", value, imports)
    for name in ("at_once", "later"):  # namespaces: they have no __init__.py
        (tmp_path / name).mkdir()
    manager = PluginManager(load_entry_points=False)
    for number in (1.0, 22.0, 333.0):
        for name in ("at_once", "later"):
            (tmp_path / name / "words.py").write_text(f"VALUE = {number}\n")
        assert score_of(manager, f"{path}:Brief") == number


def test_a_copy_is_the_same_module_and_is_what_workers_read(tmp_path: Path) -> None:
    path = write(tmp_path / "from" / "my.py", "float(VALUE)", "from near import VALUE")
    (tmp_path / "from" / "near.py").write_text(
        "import pathlib\nHERE = pathlib.Path(__file__).parent\n"
        "VALUE = (HERE / 'value.txt').read_text() + (HERE / 'a' / 'b' / 'digit.txt').read_text()\n"
    )
    (tmp_path / "from" / "value.txt").write_text("0.")
    (tmp_path / "from" / "a" / "b").mkdir(parents=True)
    (tmp_path / "from" / "a" / "b" / "digit.txt").write_text("5")
    (tmp_path / "from" / "not part of it.txt").write_text("x")
    manager = PluginManager(load_entry_points=False)
    manager.add_files({"my.py": path})
    reward = manager.build(Reward, "my.py:Brief")
    copies = copy_files(manager.files.paths, tmp_path / "to")
    kept = sorted(each.name for each in copies["my.py"].parent.rglob("*") if each.is_file())
    assert kept == ["digit.txt", "my.py", "near.py", "value.txt"]
    manager.add_files(copies)
    assert type(manager.build(Reward, "my.py:Brief")) is type(reward)
    (spec,) = specs_of([reward])
    assert spec.file == copies["my.py"]
    assert spec.load(Reward) is type(reward)


def test_a_folder_that_was_on_the_path_stays_there(tmp_path: Path) -> None:
    path = write(tmp_path / "script" / "my.py", 5.0)
    other = write(tmp_path / "other" / "my.py", 6.0)
    sys.path.append(str(path.parent))
    for file in (path, other):
        load_file(file)
        load_file(copy_files({"my.py": file}, tmp_path / "to")["my.py"])
    assert str(path.parent) in sys.path
    assert str(other.parent) not in sys.path


def test_a_large_file_counts_with_its_content(tmp_path: Path) -> None:
    write(tmp_path / "my.py", imports='TABLE = "table.txt"')
    found = set()
    for letter in "ab":
        (tmp_path / "table.txt").write_text(letter * (LARGE + 1))
        found.add(local_source(tmp_path / "my.py"))
    assert len(found) == 2


def test_the_source_of_a_plugin_that_it_derives_from_counts(tmp_path: Path) -> None:
    base = load_file(write(tmp_path / "package" / "base.py"))
    text = f"import sys\nBase = sys.modules['{base.__name__}'].Brief\nclass Brief(Base): pass\n"
    (tmp_path / "my.py").write_text(text)
    manager = PluginManager(load_entry_points=False)
    without = manager.in_file(f"{tmp_path}/my.py:Brief").source
    manager.add(base.Brief, package="package", version="1")
    assert without == local_source(tmp_path / "my.py")
    assert manager.in_file(f"{tmp_path}/my.py:Brief").source != without


def test_a_file_that_was_edited_while_a_run_began_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "from" / "my.py")
    load_file(path)
    write(path, 3.0)
    with pytest.raises(ResourceError, match=r"my\.py was edited while the run began; start"):
        copy_files({"my.py": path}, tmp_path / "to")


def test_a_preset_names_files_next_to_its_own(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "algo.py").write_text(
        "from posttrain.core.contracts import Algorithm, GroupAdvantage, GroupConfig, NoConfig\n"
        "class Mine(GroupAdvantage[GroupConfig]):\n"
        "    'A = R - mean.'\n"
        "    name, Config = 'mine', GroupConfig\n"
        "    def group_advantages(self, rewards, rows, batch):\n"
        "        return rewards - rewards.mean()\n"
        "class Algo(Algorithm[NoConfig]):\n"
        "    'Source: a test.'\n"
        "    name, Config = 'algo', NoConfig\n"
        "    def expand(self):\n"
        "        return {'advantage': 'algo.py:Mine'}\n"
    )
    run = run_of(tmp_path, ["accuracy"], algorithm="lib/algo.py:Algo")
    assert run.config.stages["rl"].advantage.name == "algo.py:Mine"  # type: ignore[union-attr,attr-defined]


FAULTS = {
    "broken.py": "def f(:\n    pass\n",
    "raises.py": "x = 1\n\nvalue = missing_name\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "imports.py": "import no_such_module_anywhere\n",
    "plain.py": "class Brief:\n    def score(self, samples):\n        return []\n",
    "empty.py": "",
    "value.py": "Brief = 3\n",
    "abstract.py": "from posttrain.core.contracts import NoConfig, Reward\n"
    "class Brief(Reward[NoConfig]):\n    name, Config = 'b', NoConfig\n",
}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken.py:Brief", r"broken\.py:1 cannot be loaded: SyntaxError: .*; correct it"),
        ("raises.py:Brief", r"raises\.py:3 cannot be loaded: NameError: .*missing_name.*"),
        ("leaves.py:Brief", r"leaves\.py:2 cannot be loaded: SystemExit: 3"),
        ("imports.py:Brief", r"imports\.py:1 cannot .*no_such_module_anywhere'; install it, or"),
        ("plain.py:Brief", r"plain\.py: Brief is not a plugin class: derive it from Reward of"),
        ("empty.py:Brief", r"empty\.py has no class 'Brief' \(there is no plugin class in it\)"),
        ("value.py:Brief", r"value\.py: Brief is a value of type int \(3\), expected a class"),
        ("abstract.py:Brief", r"abstract\.py: Brief lacks what Reward asks for: define score\("),
        ("good.py:Brif", r"good\.py has no class 'Brif'; did you mean 'Brief'\?"),
        ("good.py", r"'good\.py' names a file without a class: write good\.py:Brief"),
        ("goood.py:Brief", r"there is no file 'goood\.py' .*a path is relative to the config file"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(
    tmp_path: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.py")
    for file, text in FAULTS.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml:\d+: stages\.rl\.rewards\.0: .*{says}"):
        run_of(tmp_path, [name])


def test_a_plugin_of_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "my.py")
    says = "my.py:Brief is a plugin of kind 'reward', and one of kind 'advantage' is needed here"
    with pytest.raises(ConfigError, match=rf"stages\.rl\.advantage: {says}"):
        run_of(tmp_path, ["accuracy"], advantage="my.py:Brief")


def test_worker_processes_read_the_copy_when_the_file_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "my files" / "my.py", "near.VALUE", "import near")
    (path.parent / "near.py").write_text("VALUE = 0.25\n")
    manager = PluginManager(load_entry_points=False)
    manager.add_files({"my.py": path})
    reward = manager.build(Reward, "my.py:Brief")
    for copy in copy_files(manager.files.paths, tmp_path / "copies").values():
        load_file(copy)
    shutil.rmtree(path.parent)
    with RewardPool([reward], workers=1) as pool:
        ((score,),) = pool.score([sample()])
    assert score.value == 0.25, score.detail
