"""The policy that a step started from, or the nearest to it that is still on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from posttrain.core.artifacts import Artifact
from posttrain.core.config.dag import makes
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.training.checkpoint import DamagedCheckpoint, check_whole, load_checkpoint
from posttrain.core.training.retention import starting_points, step_of
from posttrain.pipelines.comparing.past_run import PastRun
from posttrain.pipelines.rl.build import build_critic, build_learner
from posttrain.pipelines.stage_files import checkpoint_folder


@dataclass(frozen=True, slots=True)
class StartModel:
    """A policy as it was after `after_step` steps; `exact` says whether the step began there."""

    model: PreTrainedModel
    after_step: int
    source: str
    exact: bool


def load_start(run: PastRun, stage_name: str, step: int) -> StartModel:
    """The policy nearest to the start of `step`: stage's input, checkpoint, or trained model.

    Raises `ResourceError` when the stage's input is gone, `RunError` for a checkpoint that cannot
    be read.
    """
    stage = run.rl_stage(stage_name)
    checkpoints = _checkpoints(run, stage_name)
    trained = _trained(run, stage_name)
    known = {0, *checkpoints, *({stage.steps} if trained is not None else set())}
    after = min(known, key=lambda number: (abs(number - (step - 1)), number))
    inputs = run.inputs(stage_name)
    if after == stage.steps and trained is not None:
        inputs = {**inputs, "model": trained}
        model = _load(run, stage_name, inputs, None)
        source = f"the stage's trained model, after step {after}"
    elif after:
        model = _load(run, stage_name, inputs, checkpoints[after])
        source = f"the checkpoint after step {after}"
    else:
        model = _load(run, stage_name, inputs, None)
        source = "the stage's input model"
    return StartModel(model, after, source, after == step - 1)


def _load(
    run: PastRun, name: str, inputs: Mapping[str, Artifact], checkpoint: Path | None
) -> PreTrainedModel:
    """The policy as the stage trains it, from its input model or, on top of that, a checkpoint."""
    there = run.stage_inputs(name, run.resolved, inputs)
    stage = there.stage
    assert isinstance(stage, RlStage)
    learner = build_learner(there, stage, there.tokenizer())
    if checkpoint is not None:
        critic = build_critic(there, stage)
        stored = None if critic is None else critic.stored
        load_checkpoint(checkpoint, learner.stored, critic=stored)
    return learner.model


def _checkpoints(run: PastRun, stage: str) -> dict[int, Path]:
    """Whole checkpoints of the stage by step; damaged ones are passed over."""
    found = {}
    root = checkpoint_folder(run.home, stage, run.record.stages[stage])
    for folder in starting_points(root):
        try:
            check_whole(folder)
        except DamagedCheckpoint:
            continue
        found[step_of(folder)] = folder
    return found


def _trained(run: PastRun, stage: str) -> Artifact | None:
    """The stage's result, if it is done and has the weights that were trained, not an adapter's."""
    config = run.rl_stage(stage)
    if config.lora is not None:
        return None
    result, _ = run.store.lookup(stage, run.record.stages[stage])
    return None if result is None else result.artifact(makes(config))
