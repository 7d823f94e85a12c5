"""Rates that a test makes up, and the estimates of a config that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import LoraSection
from posttrain.core.costs.estimate import Estimator
from posttrain.core.costs.rates import Groups, HeadWork, Kept, LayerCost, Line, Sequences
from posttrain.core.costs.shape import find_model
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.pipeline import write_config

MANAGER = PluginManager()


@dataclass(frozen=True)
class MadeUp:
    """A second for each piece of work that is given one; nothing for all else."""

    trained: float = 0.0
    trained_reused: float = 0.0
    scored: float = 0.0
    scored_reused: float = 0.0
    read: float = 0.0
    decoded: float = 0.0
    decoding_pass: float = 0.0
    drawn: float = 0.0
    adamw_s: float = 0.0
    copy_s: float = 0.0
    fresh_s: float = 0.0
    sync_s: float = 0.0
    digest_s: float = 0.0
    held: float = 0.0
    known_logits: float = 0.0

    def training(self, rows: Sequences, lora: LoraSection | None) -> LayerCost:
        return LayerCost(self.trained)

    def reused(self, rows: Sequences) -> LayerCost:
        return LayerCost(self.trained_reused)

    def kept(self, groups: Groups, lora: LoraSection | None) -> Kept:
        tokens = sum(prompt + sum(responses) - len(responses) for prompt, responses in groups)
        return Kept(self.held * tokens)

    def forward(self, rows: Sequences, *, reused: bool = False) -> LayerCost:
        return LayerCost(self.scored_reused if reused else self.scored)

    def prefill(self, prompt: int) -> LayerCost:
        return LayerCost(self.read)

    def decoding(self, rows: Sequences, most: int) -> LayerCost:
        return LayerCost(self.decoded, pass_s=self.decoding_pass)

    def head(self, work: HeadWork) -> Line:
        return Line(0.0, self.known_logits if work == "reused" else 0.0)

    def draw(self, *, greedy: bool) -> float:
        return self.drawn


ALL = MadeUp(
    trained=3e-6,
    trained_reused=2e-6,
    scored=1e-6,
    scored_reused=0.5e-6,
    read=1e-6,
    decoded=1e-6,
    drawn=1e-6,
    adamw_s=1e-9,
    copy_s=1e-10,
    fresh_s=1e-10,
    sync_s=3e-10,
    digest_s=1e-9,
    held=1000.0,
)


def run_config(model_dir: Path, stages: dict[str, Any], **sections: Any) -> RunConfig:
    """A run on the tiny model, its presets filled in."""
    model = {"source": str(model_dir), "dtype": "float32", "max_model_len": 256}
    given = {
        "model": model | sections.pop("model", {}),
        "task": {"name": "arithmetic"},
        "engine": "transformers",
        "stages": stages,
        **sections,
    }
    with TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "run.yaml", given)
        return resolve(load_config([path], []), MANAGER).config


def estimator(config: RunConfig, rates: Any = ALL, engine: str = "transformers") -> Estimator:
    """For at most 64 sequences at once."""
    known = find_model(config.model, Path("no-cache"))
    assert known is not None
    return Estimator.of(config, MANAGER, known, engine, 64, rates)
