"""What gates and promotions need of the stages that they read: the same model, the same measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from posttrain.core.config.base import StageBase
from posttrain.core.config.dag import PASSES_ON, StageMap, stage_kind
from posttrain.core.config.gate_stages import ApproveStage, NewDataStage, PromoteStage
from posttrain.core.config.marks import Loc
from posttrain.core.config.supervised_stages import EvaluateStage


def check(stages: StageMap, where: Callable[[Loc], str]) -> Iterable[str]:
    """One line for each problem; inputs that are missing or wrong are left to the DAG's check."""
    data = [name for name, stage in stages.items() if isinstance(stage, NewDataStage)]
    for name in data[1:]:
        yield (
            f"{where(('stages', name))}: stages.{name}: a run has one stage of kind 'new_data', "
            f"which is '{data[0]}' here; let other stages read that"
        )
    for name, stage in stages.items():
        if isinstance(stage, ApproveStage | PromoteStage):
            yield from _same_model(name, stage, stages, where)
        if isinstance(stage, PromoteStage):
            yield from _same_measure(name, stage, stages, where)


def _same_model(
    name: str, stage: StageBase, stages: StageMap, where: Callable[[Loc], str]
) -> Iterable[str]:
    source = stage.inputs.get("evaluation", "")
    evaluation, own = stages.get(source), stage.inputs.get("model")
    if not isinstance(evaluation, EvaluateStage) or own is None:
        return
    of = evaluation.inputs.get("model")
    if _made_by(of, stages) != _made_by(own, stages):
        place = ("stages", name, "inputs", "evaluation")
        yield (
            f"{where(place)}: stages.{name}.inputs.evaluation: '{source}' evaluates '{of}', not "
            f"'{own}', the model of this stage; name a stage that evaluates '{own}'"
        )


def _same_measure(
    name: str, stage: StageBase, stages: StageMap, where: Callable[[Loc], str]
) -> Iterable[str]:
    sources = [stage.inputs.get(role, "") for role in ("evaluation", "baseline")]
    after, before = (stages.get(source) for source in sources)
    if not isinstance(after, EvaluateStage) or not isinstance(before, EvaluateStage):
        return
    for field in ("evaluation", "environment"):
        if getattr(after, field) != getattr(before, field):
            place = ("stages", name, "inputs", "baseline")
            yield (
                f"{where(place)}: stages.{name}.inputs.baseline: '{sources[1]}' and "
                f"'{sources[0]}' have different settings in '{field}'; make them equal, or remove "
                "baseline, and the champion is measured as the model was"
            )


def _made_by(name: str | None, stages: StageMap) -> str | None:
    seen: set[str] = set()
    while name is not None and name not in seen and name in stages:
        seen.add(name)
        if stage_kind(stages[name]) not in PASSES_ON:
            break
        name = stages[name].inputs.get("model")
    return name
