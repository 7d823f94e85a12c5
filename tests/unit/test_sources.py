"""An edited plugin is another plugin: its source is part of the identity of what it made."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import origins, resolve
from posttrain.core.errors import ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime import sources
from posttrain.core.store.identity import explain

BRIEF = """
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.hooks import hookimpl
from posttrain.core.types import Score
{imports}

class Brief(Reward[NoConfig]):
    "R = 1."
    name, Config = "brief", NoConfig

    def score(self, samples):
        return [Score(1.0) for _ in samples]


@hookimpl
def posttrain_register():
    return [Brief]
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and tmp_path.as_posix() in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
    sources._digest.cache_clear()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def source_of(module: str, package: str = "local") -> str:
    """The digest as a new process computes it."""
    sources._digest.cache_clear()
    importlib.invalidate_caches()
    found = importlib.import_module(module)
    return sources.plugin_source(found.Brief, package)


FILES = {
    "mine/__init__.py": "",
    "mine/brief.py": BRIEF.format(imports="from mine import words\nimport helper"),
    "mine/words.py": "WORDS = 3\n",
    "mine/prompt.txt": "Score from 0 to 10.",
    "helper.py": "def far():\n    from deep import low\nimport math; import after\n",
    "after.py": "if True: from folder.inner import leaf\n",
    "folder/inner/leaf.py": "from . import twig\n",
    "folder/inner/twig.py": "import importlib\nimportlib.import_module('late')\n",
    "folder/not_imported.py": "",
    "late.py": "import math, \\\n    last\n",
    "last.py": "",
    "deep/__init__.py": "",
    "deep/low.py": "LOW = 1\n",
    "other.py": "NOT_IMPORTED = 1\n",
}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mine/brief.py", True),
        ("mine/words.py", True),
        ("mine/prompt.txt", True),
        ("helper.py", True),
        ("deep/low.py", True),
        ("after.py", True),
        ("folder/inner/leaf.py", True),
        ("folder/inner/twig.py", True),
        ("folder/not_imported.py", False),
        ("late.py", True),
        ("last.py", True),
        ("other.py", False),
        ("mine/__pycache__/brief.cpython-311.pyc", False),
    ],
)
def test_an_edit_of_what_a_plugin_is_made_of_changes_its_source(
    tmp_path: Path, name: str, counts: bool
) -> None:
    write(tmp_path, FILES)
    before = source_of("mine.brief")
    assert before == source_of("mine.brief")
    write(tmp_path, {name: FILES.get(name, "") + "\n# edited\n"})
    assert (source_of("mine.brief") != before) == counts


def test_a_new_file_of_its_package_counts_and_the_folder_does_not(tmp_path: Path) -> None:
    write(tmp_path / "a", FILES)
    write(tmp_path / "b", FILES)
    sys.path.insert(0, str(tmp_path / "a"))
    before = source_of("mine.brief")
    for name in [n for n in sys.modules if n.split(".")[0] in ("mine", "helper", "deep")]:
        del sys.modules[name]
    sys.path[0] = str(tmp_path / "b")
    assert source_of("mine.brief") == before
    write(tmp_path / "b", {"mine/more.py": ""})
    assert source_of("mine.brief") != before
    del sys.path[0]


def test_a_single_module_and_a_plugin_it_derives_from(tmp_path: Path) -> None:
    derived = "from base_plugin import Brief as Base\n\n\nclass Brief(Base):\n    name = 'mine'\n"
    write(tmp_path, {"base_plugin.py": BRIEF.format(imports=""), "single.py": derived})
    before = source_of("single")
    write(tmp_path, {"base_plugin.py": BRIEF.format(imports="import math")})
    assert source_of("single") != before


def test_of_a_folder_of_installed_packages_only_the_plugins_own_files_count(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"mine.py": BRIEF.format(imports="import helper"), "helper.py": "A = 1\n"})
    info = {
        "mine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
        "mine-1.0.dist-info/RECORD": "mine.py,,\n",
    }
    write(tmp_path, info)
    before = source_of("mine", "mine")
    write(tmp_path, {"helper.py": "A = 2\n"})
    assert source_of("mine", "mine") == before, "of another distribution"
    write(tmp_path, {"mine-1.0.dist-info/RECORD": "mine.py,,\nhelper.py,,\n"})
    own = source_of("mine", "mine")
    write(tmp_path, {"helper.py": "A = 3\n"})
    assert source_of("mine", "mine") != own


def test_a_module_of_a_namespace_imports_by_its_full_name(tmp_path: Path) -> None:
    files = {"org/one.py": BRIEF.format(imports="from org import two"), "org/two.py": "A = 1\n"}
    write(tmp_path, files)
    before = source_of("org.one")
    write(tmp_path, {"org/two.py": "A = 2\n"})
    assert source_of("org.one") != before


def test_large_files_that_are_not_python_count_with_their_size(tmp_path: Path) -> None:
    files = {"mine/__init__.py": "", "mine/brief.py": BRIEF.format(imports="")}
    write(tmp_path, files | {"mine/weights.bin": "a" * (sources.LARGE + 1)})
    before = source_of("mine.brief")
    write(tmp_path, {"mine/weights.bin": "b" * (sources.LARGE + 1)})
    assert source_of("mine.brief") == before
    write(tmp_path, {"mine/weights.bin": "b" * (sources.LARGE + 2)})
    assert source_of("mine.brief") != before


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, FILES)
    importlib.import_module("mine.brief")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ResourceError, match=r"cannot read .*, which is part of a plugin"):
        source_of("mine.brief")


def test_built_in_plugins_are_in_posttrains_own_digest(manager: PluginManager) -> None:
    assert {entry.source for entry in manager.entries() if entry.package == "posttrain"} == {""}


def test_a_stage_says_that_the_source_of_its_plugin_changed(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    stage = {"kind": "rl", "inputs": {"model": "base"}, "rewards": ["brief"]}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"task": "arithmetic", "stages": {"rl": stage}}))

    def parts() -> dict[str, str]:
        sources._digest.cache_clear()
        manager = PluginManager()
        manager.register(importlib.import_module("mine.brief"), package="mine", version="1.0")
        run = resolve(load_config([config]), manager)
        return {f"plugin {kind} {name}": o for kind, name, o in origins(run.plugins["rl"])}

    before = parts()
    write(tmp_path, {"mine/words.py": "WORDS = 4\n"})
    assert str(explain("rl", parts(), [before], {})) == (
        "changed: the source of reward plugin brief changed"
    )


def test_a_class_from_a_notebook_is_known_by_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has no file, and `inspect` finds the source of no class there."""
    digests = []
    for body in ("return [1]", "return [1]", "return [2]"):
        cell = types.ModuleType("__main__")
        code = (
            "from posttrain.core.contracts import NoConfig, Reward\n"
            "class Typed(Reward[NoConfig]):\n"
            "    name, Config = 'typed', NoConfig\n"
            f"    def score(self, samples):\n        {body}\n"
        )
        exec(compile(code, "<cell>", "exec"), vars(cell))  # noqa: S102 - as a notebook does
        monkeypatch.setitem(sys.modules, "__main__", cell)
        digests.append(sources.plugin_source(cell.Typed, "local"))
    assert digests[0] == digests[1] != digests[2]
