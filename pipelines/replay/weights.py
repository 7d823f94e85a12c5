"""Trained weights as a run kept them after some of its steps: in checkpoints, and in its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from posttrain.core.config.dag import makes
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.training.checkpoint import master_weights
from posttrain.core.training.retention import starting_points, step_of
from posttrain.core.training.step_tensors import CRITIC, POLICY
from posttrain.pipelines.replay.sources import StepSource

_PLACES = {POLICY: ".", CRITIC: "critic"}


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Those of one stage; `model` is its saved result, if that is of the trained weights, whole."""

    source: StepSource
    last_step: int
    model: Path | None

    @classmethod
    def of(cls, resolved: ResolvedRun, source: StepSource) -> KeptWeights:
        """What there is of the stage."""
        stage, known = resolved.config.stages[source.stage], source.recorded
        all_recorded = len(known) == max(known)
        last = getattr(stage, "steps", None) or (max(known) if all_recorded else 0)
        adapted = getattr(stage, "lora", None) is not None  # and merged before it was saved
        if source.result is None or adapted:
            return cls(source, last, None)
        path = source.result / makes(stage) / "model.safetensors"
        return cls(source, last, path if path.is_file() else None)

    def after(self, step: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Of `names` (`policy/...`, `critic/...`, as the optimizers order them) those kept."""
        for folder in starting_points(self.source.checkpoints):
            if step_of(folder) == step:
                return _of_checkpoint(folder, names)
        if step == self.last_step and self.model is not None:
            start = f"{POLICY}/"
            saved = load_file(self.model)
            known = {name: saved.get(name.removeprefix(start)) for name in names}
            return {name: value for name, value in known.items() if value is not None}
        return {}


def _of_checkpoint(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for model, place in _PLACES.items():
        masters = master_weights(folder, place)
        own = [name for name in names if name.startswith(f"{model}/")]
        found |= {
            name: masters[str(number)] for number, name in enumerate(own) if str(number) in masters
        }
    return found
