"""docs/environments.md: its files and commands work, its other configs are complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from posttrain.core.config.sections import EnvironmentComponent
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.cli.main import app
from tests.helpers.plugins import MANAGER
from tests.helpers.tutorials import blocks, run_page
from tests.unit.test_docs_site import FENCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


@pytest.mark.slow
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    printed = run_page(PAGE, tmp_path)
    assert len(printed) == 4 and "completed in" in printed[1] and "completed in" in printed[3]


def test_the_environments_of_the_page_pass_their_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "tiny")
    for block in blocks(PAGE):
        if block.does == "file":
            (tmp_path / block.argument).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    for name in ("guess", "lake"):
        result = CliRunner().invoke(
            app,
            ["env", "check", f"{name}.yaml", "--set", "model.source=tiny", "--json"],
        )
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout.splitlines()[-1])["checks"]
        assert sum(each["state"] == "passed" for each in found) > 8


def test_the_environments_that_need_a_server_fit_their_fields() -> None:
    names = []
    for language, text in FENCE.findall(PAGE.read_text("utf-8")):
        values = yaml.safe_load(text) if language == "yaml" else {}
        if "environment" in values:
            component = EnvironmentComponent.model_validate(values["environment"])
            MANAGER.config("environment", component.name, component.fields())
            names.append(component.name)
    assert names == ["mcp", "openenv", "terminal"]
