"""Stage `promote`: the champion's alias moves to a model that is better, and to no other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from posttrain.core.analysis.statistics import Comparison, compare, read_outcomes, same_problems
from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.config.gate_stages import PromoteStage
from posttrain.core.contracts import StageOutput
from posttrain.core.errors import RunError
from posttrain.core.store.approval import this_person, utc_now
from posttrain.core.store.artifacts import Artifact
from posttrain.core.tracking import registry
from posttrain.core.tracking.registry import RegisteredVersion
from posttrain.pipelines.stage.context import StageContext, write_evaluation
from posttrain.pipelines.stage.outside import CHAMPION
from posttrain.pipelines.stages.evaluate import measure

MEASURED, REGISTERED, MOVED = 1, 2, 3
"""Steps of a promotion, as listeners see them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the model is the champion now, and why (not)."""

    promoted: bool
    reason: str
    comparison: Comparison | None = None


def run_promote(context: StageContext) -> StageOutput:
    """Compare with the champion, register, move the alias: each can be done again after a kill."""
    stage = context.stage
    assert isinstance(stage, PromoteStage)
    model = context.inputs["model"]
    if not model.mlflow_model_id:
        raise RunError(
            f"stage '{context.name}' reads the base model, which no stage of this pipeline made: "
            "promote a model that sft, preference or rl made"
        )
    champion = registry.find_alias(context.mlflow_uri, stage.registered_name, stage.alias)
    _require(context, champion)
    decision = _decide(context, stage, model, champion)
    context.log_step(MEASURED, _metrics(decision))
    version = ""
    if decision.promoted:
        version = _move(context, stage, model, champion, decision)
    record = {
        "name": stage.registered_name,
        "alias": stage.alias,
        "version": version,
        "previous_version": _before(model, champion),
        "model_digest": model.digest,
        "evaluation_digest": context.inputs["evaluation"].digest,
        "champion_digest": "" if champion is None else champion.digest,
        "min_improvement": stage.min_improvement,
        **asdict(decision),
    }
    path = context.out / "promotion.json"
    path.write_text(json.dumps(record, indent=2))
    context.tracker.log_file(path)
    word = "promoted" if decision.promoted else "not promoted"
    context.tracker.set_tags({"posttrain.promotion": f"{word}: {decision.reason}"})
    context.reporter.say(f"{context.name}: {word}: {decision.reason}")
    return StageOutput({"registration": path}, _metrics(decision))


def _require(context: StageContext, champion: RegisteredVersion | None) -> None:
    """The champion must be the one that decided this stage's identity."""
    known = context.inputs.get(CHAMPION)
    before = "" if known is None else known.digest
    after = "" if champion is None else champion.digest
    if before != after:
        raise RunError(
            f"stage '{context.name}': the champion was changed by somebody else meanwhile (now "
            f"{'none' if champion is None else 'version ' + champion.version}): run the same "
            "command again, which compares with the new one"
        )


def _decide(
    context: StageContext, stage: PromoteStage, model: Artifact, champion: RegisteredVersion | None
) -> Decision:
    name = f"{stage.registered_name}@{stage.alias}"
    known = registry.find_digest(context.mlflow_uri, stage.registered_name, model.digest)
    if champion is not None and champion.digest == model.digest:
        return _already(name, champion)
    if known is not None and known.rolled_back is not None:
        taken = known.rolled_back
        return Decision(
            False,
            f"it is version {known.version}, which {taken.get('by')} took back at "
            f"{taken.get('at')}; `posttrain rollback {stage.registered_name} --to {known.version}` "
            "makes it the champion again",
        )
    if champion is None:
        return Decision(True, f"there was no {name} yet: it is the first")
    compared = compare(
        read_outcomes(_champion_evaluation(context, champion)),
        read_outcomes(context.inputs["evaluation"].path),
        stage.measure,
    )
    better = compared.low > stage.min_improvement
    needed = f"{100 * stage.min_improvement:+.1f}"
    verdict = "is above" if better else "is not above"
    return Decision(
        better,
        f"{compared.describe()} against version {champion.version}; the lower bound {verdict} "
        f"{needed}",
        compared,
    )


class _Promotion(BaseModel):
    """What the tag of a promotion holds, as far as it is read."""

    reason: str = ""
    comparison: dict[str, str | int | float] | None = None


def _already(name: str, champion: RegisteredVersion) -> Decision:
    """The promotion of a model that is the champion, as it was written down when it became it."""
    kept = champion.noted(registry.TAG_PROMOTION, _Promotion) or {}
    compared: dict[str, Any] = kept.get("comparison") or {}  # Any: numbers and a name
    whole = set(compared) == {part.name for part in fields(Comparison)}
    why = f" ({kept['reason']})" if "reason" in kept else ""
    return Decision(
        True,
        f"it is {name}, version {champion.version}, already{why}",
        Comparison(**compared) if whole else None,
    )


def _champion_evaluation(context: StageContext, champion: RegisteredVersion) -> Path:
    """The champion on the evaluation's problems: from `baseline` if that fits, else measured."""
    evaluation, baseline = context.inputs["evaluation"], context.inputs.get("baseline")
    if baseline is not None and champion.digest in baseline.parents:
        rows = (read_outcomes(baseline.path), read_outcomes(evaluation.path))
        if same_problems(*rows):
            return baseline.path
    as_stage = context.run.stages[context.stage.inputs["evaluation"]]
    assert isinstance(as_stage, EvaluateStage)
    registry.check_weights(champion)
    measured = measure(context, as_stage, champion.path)
    return write_evaluation(context.out / "champion", measured)


def _move(
    context: StageContext,
    stage: PromoteStage,
    model: Artifact,
    champion: RegisteredVersion | None,
    decision: Decision,
) -> str:
    """Register, write down what the move means, move the alias. Returns the version."""
    uri, name = context.mlflow_uri, stage.registered_name
    if champion is not None and champion.digest == model.digest:
        return champion.version
    compared = decision.comparison
    evidence = {
        "reason": decision.reason,
        "by": this_person(),
        "at": utc_now(),
        "stage_run": context.tracker.run_id,
        "comparison": None if compared is None else asdict(compared),
    }
    tags = {
        registry.TAG_DIGEST: model.digest,
        registry.TAG_URI: model.uri,
        registry.TAG_PREVIOUS: registry.NONE if champion is None else champion.version,
        registry.TAG_PROMOTION: json.dumps(evidence),
    }
    version = registry.register_champion(uri, model.mlflow_model_id, name, tags)
    context.log_step(REGISTERED, {})
    _require(context, registry.find_alias(uri, name, stage.alias))
    registry.move_alias(uri, name, stage.alias, version)
    context.log_step(MOVED, {})
    return version


def _before(model: Artifact, champion: RegisteredVersion | None) -> str:
    """The version that was the champion before this stage began its work; empty if none was."""
    if champion is None:
        return ""
    return champion.previous if champion.digest == model.digest else champion.version


def _metrics(decision: Decision) -> dict[str, float]:
    metrics = {"promote/promoted": float(decision.promoted)}
    if decision.comparison is not None:
        found = decision.comparison
        metrics |= {
            "promote/difference": found.difference,
            "promote/low": found.low,
            "promote/high": found.high,
            "promote/gained": float(found.gained),
            "promote/lost": float(found.lost),
        }
    return metrics
