"""docs/distillation.md: its configs are complete, and the first is one that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import prepared, run_command
from tests.helpers.plugins import MANAGER

pytestmark = pytest.mark.usefixtures("shared_prefect")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distillation.md"
CONFIGS = [
    text
    for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    if text.startswith("name: ")
]


NAMES = [text.split()[1] for text in CONFIGS]


@pytest.mark.parametrize("text", CONFIGS, ids=NAMES)
def test_a_config_of_the_page_is_complete(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in re.findall(r"model: \./([\w-]+)", text):
        (tmp_path / folder).mkdir()
    (tmp_path / "run.yaml").write_text(text)
    stage = resolve(load_config([tmp_path / "run.yaml"]), MANAGER).config.stages["student"]
    assert isinstance(stage, RlStage) and (stage.teachers or stage.learns_from_record)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_one_runs(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "run.yaml").write_text(CONFIGS[0])
    small = [
        f"model.source={tmp_path / 'tiny'}",
        "model.dtype=float32",
        "stages.teacher.steps=2",
        "stages.student.steps=2",
        "stages.student.prompts_per_step=2",
        "evaluation.num_problems=4",
    ]
    sets = [part for override in small for part in ("--set", override)]
    home = prepared(tmp_path / "home")
    done = run_command("run", str(tmp_path / "run.yaml"), *sets, "--home", str(home), "--json")
    assert done.code == 0, done.text
    metrics = done.result["stages"]["student"]["metrics"]
    assert metrics["distil/divergence"] > 0 and "acc/mean" in metrics
