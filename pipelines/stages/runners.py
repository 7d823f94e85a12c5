"""What runs each kind of stage."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.pipelines.stages.approve import run_approve
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.evaluate import run_evaluate
from posttrain.pipelines.stages.new_data import run_new_data
from posttrain.pipelines.stages.preference import run_preference
from posttrain.pipelines.stages.promote import run_promote
from posttrain.pipelines.stages.register import run_register
from posttrain.pipelines.stages.reward_model import run_reward_model
from posttrain.pipelines.stages.rl import run_rl
from posttrain.pipelines.stages.sft import run_sft
from posttrain.pipelines.stages.transform import run_transform

STAGE_RUNNERS: dict[str, Callable[[StageContext], StageOutput]] = {
    "evaluate": run_evaluate,
    "sft": run_sft,
    "reward_model": run_reward_model,
    "preference": run_preference,
    "rl": run_rl,
    "register": run_register,
    "transform": run_transform,
    "approve": run_approve,
    "promote": run_promote,
    "new_data": run_new_data,
}
