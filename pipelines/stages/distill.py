"""Stage `distill`: the loop of an `rl` stage, with the defaults of learning from a teacher."""

from __future__ import annotations

from posttrain.core.contracts import StageOutput
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stages.rl import run_rl


def run_distill(context: StageContext) -> StageOutput:
    """Train the input model on what its teacher knows; saves the result and the curves."""
    return run_rl(context)
