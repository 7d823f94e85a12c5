"""docs/plugins/KIND.md: a page for every kind, complete, with the example that `new` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.core.contracts import CONTRACTS
from posttrain.core.kit.checks import checks_of
from posttrain.core.kit.new import example
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.scripts import load_script

GENERATOR = load_script("generate_plugins")
MANAGER = PluginManager()


def test_the_script_writes_a_page_for_each_kind(tmp_path: Path) -> None:
    GENERATOR.write(tmp_path)
    assert {path.stem for path in (tmp_path / "plugins").iterdir()} == set(CONTRACTS)


@pytest.mark.parametrize("kind", CONTRACTS)
def test_a_page_has_the_contract_the_checks_and_the_example(kind: str) -> None:
    page = GENERATOR.page(kind, MANAGER)
    assert example(kind, "my_plugin").rstrip() in page
    assert all(f"- {check.name}\n" in page for check in checks_of(kind))
    contract = CONTRACTS[kind]
    assert f"### `{contract.__name__}`" in page
    for name in contract.__abstractmethods__:
        assert re.search(rf"^`{name}\(.*\*\*To be implemented\.\*\* \S", page, re.M), name
    assert "ExampleConfig" not in page and "'Tensor'" not in page
