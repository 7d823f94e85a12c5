"""What stages do with the model they train: an adapter put in before, weights saved after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from posttrain.core.config.base import BASE_MODEL
from posttrain.core.config.sections import LoraSection, OptimizerBase
from posttrain.core.contracts import Optimizer
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.models.layers import compile_layers, use_checkpointing
from posttrain.core.models.loading import load_policy, save_model, save_reward_model
from posttrain.core.models.lora import (
    add_adapter,
    frozen_twin,
    is_adapted,
    merge_adapter,
    save_adapter,
)
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.store.manifests import ADAPTER
from posttrain.core.training.forward import check_passes
from posttrain.core.training.optim import MasterOptimizer
from posttrain.pipelines.stage.inputs import StageInputs

if TYPE_CHECKING:
    from posttrain.pipelines.stage.context import StageContext


def reference_of(
    stage: StageInputs, model: PreTrainedModel, lora: LoraSection | None, *, moves: bool = False
) -> PreTrainedModel:
    """The stage's input model, frozen; `model` is what will be trained and has no adapter yet.

    With `lora` it shares the weights of `model`, which stay as they are; not on several ranks, as
    each sharded model has pieces of its own. One that `moves` has an adapter of its own, which is
    the policy's to begin with.
    """
    shares = lora is not None and stage.ranks.size == 1
    reference = frozen_twin(model) if shares else load_policy(stage.model_dir, stage.runtime)
    check_passes(reference)
    if lora is not None and moves:
        add_adapter(reference, lora, _adapter_seed(stage, "policy"))
    reference.requires_grad_(False)
    if not shares:
        stage.place(reference)
    return reference


def _adapter_seed(stage: StageInputs, what: str) -> int:
    return derive_seed(stage.run.seed, stage.name, "lora", what)


def start_training(
    stage: StageInputs, model: PreTrainedModel, lora: LoraSection | None, what: str = "policy"
) -> None:
    """Put the adapter in if the stage wants one; let layers be computed twice, or compiled."""
    if stage.run.model.gradient_checkpointing:
        use_checkpointing(model)
    check_passes(model)  # before an adapter, compiled layers or ranks are in the way
    if lora is not None:
        add_adapter(model, lora, _adapter_seed(stage, what))
    if stage.run.model.compile:
        compile_layers(model)
    stage.place(model)


def build_optimizer(
    stage: StageInputs, model: PreTrainedModel, section: OptimizerBase, num_steps: int, seed: int
) -> MasterOptimizer:
    """The optimizer that a section of the stage's config names, over the trained weights."""
    algorithm = stage.manager.build(Optimizer, section.name, section.fields())
    return MasterOptimizer(model, section, num_steps, seed=seed, algorithm=algorithm)


def save_trained(
    context: StageContext, model: PreTrainedModel, tokenizer: ChatTokenizer, kind: str
) -> None:
    """Write the model as a Hugging Face directory; an adapter merged, and alone in `adapter/`."""
    folder = context.out / kind
    if is_adapted(model):
        save_adapter(model, folder / ADAPTER, *base_of_adapter(context))
        merge_adapter(model)
    if kind == "reward_model":
        save_reward_model(model, tokenizer.tokenizer, folder, set(tokenizer.end_token_ids))
        return
    if model.can_generate():  # so that every engine ends its answers where this run did
        ends = list(tokenizer.end_token_ids)
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    save_model(model, tokenizer.tokenizer, folder)


def base_of_adapter(stage: StageInputs) -> tuple[str, str | None]:
    """What an adapter of the stage is loaded on: a hub id and its revision, or a directory.

    That is the stage's own input. From a hub it has a name on every machine; the commit is that of
    the snapshot's folder.
    """
    folder = stage.model_dir.resolve()
    if stage.inputs["model"].stage == BASE_MODEL and folder.parent.name == "snapshots":
        return stage.run.model.source, folder.name
    return str(folder), None
