"""Configs that a page shows after `<!-- config -->` have fields and plugins that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.plugin_manager import PluginManager

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONFIGS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.rglob("*.md"))
    for number, text in enumerate(
        re.findall(r"<!-- config -->\n```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    )
]
REWARD = """
from posttrain.core.contracts import NoConfig, Reward


class Brief(Reward[NoConfig]):
    '''R = 1 for each answer.'''

    name, Config = "brief", NoConfig

    def score(self, samples):
        return [None for _ in samples]
"""


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_in_a_page_resolves(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARD, "utf-8")
    path = tmp_path / "page.yaml"
    path.write_text(text, "utf-8")
    assert resolve(load_config([path]), PluginManager()).order


def test_pages_show_configs() -> None:
    assert CONFIGS
