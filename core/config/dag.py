"""The order of stages that follows from what each reads, and checks of inputs and of gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from posttrain.core.config.base import BASE_MODEL, StageBase
from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.config.gate_stages import ApproveStage, NewDataStage, PromoteStage
from posttrain.core.config.positions import Loc
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.types import ARTIFACT_KINDS, ArtifactKind

StageMap = Mapping[str, StageBase]


def dependencies(stage: StageBase) -> tuple[str, ...]:
    """Names of the stages that `stage` reads, in the order written; the base model is none."""
    return tuple(dict.fromkeys(name for name in stage.inputs.values() if name != BASE_MODEL))


def topological_order(stages: StageMap) -> tuple[str, ...]:
    """Every stage after the stages it reads, otherwise in the order written."""
    order: list[str] = []
    for start in stages:
        _visit(start, stages, order, [])
    return tuple(order)


def _visit(name: str, stages: StageMap, order: list[str], path: list[str]) -> None:
    if name in order or name not in stages:
        return
    if name in path:
        cycle = [*path[path.index(name) :], name]
        raise ConfigError(
            f"stages read one another in a circle: {' reads '.join(cycle)}; "
            "change one of these inputs"
        )
    for needed in dependencies(stages[name]):
        _visit(needed, stages, order, [*path, name])
    order.append(name)


def check(
    stages: StageMap,
    where: Callable[[Loc], str],
    reward_roles: Mapping[str, Iterable[str]],
) -> list[str]:
    """One line for each input that is missing, unknown or of the wrong kind, and for a cycle.

    `reward_roles` names, for each rl stage, the inputs that its rewards need.
    """
    problems = []
    if BASE_MODEL in stages:
        problems.append(
            f"{where(('stages', BASE_MODEL))}: stages.{BASE_MODEL}: no stage may be called "
            f"'{BASE_MODEL}', the name of the base model in `inputs`; rename the stage"
        )
    for name, stage in stages.items():
        problems += _check_stage(name, stage, stages, where, frozenset(reward_roles.get(name, ())))
    try:
        topological_order(stages)
    except ConfigError as error:
        problems.append(f"{where(('stages',))}: stages: {error}")
    return problems


def _check_stage(
    name: str,
    stage: StageBase,
    stages: StageMap,
    where: Callable[[Loc], str],
    reward_roles: frozenset[str],
) -> list[str]:
    kind = stage.kind
    required: dict[str, ArtifactKind | None] = dict(stage.reads)
    required |= {role: _kind_of_role(role) for role in reward_roles}
    teachers = stage.teacher_roles if isinstance(stage, RlStage) else ()
    required |= dict.fromkeys(teachers, "model")
    allowed = required | dict(stage.may_read)
    inputs = ("stages", name, "inputs")
    problems = [
        f"{where(inputs)}: stages.{name}.inputs: stage kind '{kind}' reads '{role}'"
        + (", which its rewards need" if role in reward_roles else "")
        + (", the teacher of that name without a `model`" if role in teachers else "")
        + f"; add '{role}: <name of a stage>'"
        for role in required
        if role not in stage.inputs
    ]
    for role, source in stage.inputs.items():
        place = (*inputs, role)
        at = f"{where(place)}: stages.{name}.inputs.{role}"
        if role not in allowed:
            readers = "reward or teacher" if teachers else "reward"
            is_rl = isinstance(stage, RlStage)
            hint = f"; no {readers} of this stage reads it" if is_rl else ""
            problems.append(
                f"{at}: unknown input of stage kind '{kind}'{nearest(role, allowed)}{hint} "
                f"(allowed: {sorted(allowed)})"
            )
        elif source != BASE_MODEL and source not in stages:
            known = [*stages, BASE_MODEL]
            problems.append(
                f"{at}: no stage named '{source}'{nearest(source, known)} (stages: {known})"
            )
        else:
            made = "model" if source == BASE_MODEL else stages[source].makes
            wanted = allowed[role]
            if wanted is not None and made != wanted:
                problems.append(
                    f"{at} reads '{source}', which makes {_a(made)}, not {_a(wanted)}; "
                    f"name a stage that makes {_a(wanted)}: {_makers(wanted, stages, name)}"
                )
    return problems


def _kind_of_role(role: str) -> ArtifactKind | None:
    """An extra role that has the name of an artifact kind takes that kind, any other takes all."""
    return role if role in ARTIFACT_KINDS else None


def _makers(wanted: ArtifactKind, stages: StageMap, but: str) -> list[str]:
    made = [name for name, stage in stages.items() if name != but and stage.makes == wanted]
    return [*([BASE_MODEL] if wanted == "model" else []), *made]


def _a(kind: ArtifactKind) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def check_gates(stages: StageMap, where: Callable[[Loc], str]) -> Iterable[str]:
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
        if not stages[name].passes_on:
            break
        name = stages[name].inputs.get(stages[name].passes_on)
    return name
