"""A run that shares the first steps of another: its config, made from that run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError, ResourceError, nearest

if TYPE_CHECKING:
    from posttrain.core.config.fork_section import ForkSection, StepStage
    from posttrain.core.config.schema import RunConfig
    from posttrain.core.store.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class Fork:
    """A config that `run` takes, with the overrides on top of it.

    `shared` is the last shared step of `stage`, None where the run is forked before the stage.
    `notes` say what of the run's own settings an override took away.
    """

    run: str
    stage: str
    shared: int | None
    config: Mapping[str, Any]  # Any: YAML values
    overrides: tuple[str, ...]
    seed: int | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """What the command's JSON says of it."""
        found = {"run": self.run, "stage": self.stage, "step": self.shared, "seed": self.seed}
        return {**found, "changes": list(self.overrides)}


def make_fork(
    run: str,
    home: Path,
    *,
    step: int | None,
    stage: str | None,
    overrides: Sequence[str],
    seed: int | None = None,
) -> Fork:
    """The config of a fork of the run whose id begins with `run`; writes nothing.

    Raises `ConfigError` for a stage or step that cannot be forked.
    """
    import yaml

    from posttrain.core.config.loading import load_config
    from posttrain.core.store.run_record import find_run

    record = find_run(home, run)
    config = load_config([record.unchanged_config()], []).config
    raw: dict[str, Any] = yaml.safe_load(record.config.read_text("utf-8"))  # Any: YAML values
    files = raw.get("plugin_files") or {}
    raw["plugin_files"] = {name: str(record.folder / path) for name, path in files.items()}
    name = _stage(config, record, stage, with_steps=step is not None)
    raw["forked_from"] = {"run": record.run_id, "stage": name, "step": step}
    if step is None:
        if seed is not None:
            raise ConfigError(
                "--seeds draws otherwise after a step; add --step, or change `seed` with --set"
            )
        if not overrides:
            raise ConfigError(
                f"a fork before stage '{name}' without a change is the run itself; add --set "
                f"stages.{name}...=..., or --step to fork after a step of it"
            )
    else:
        raw["stages"][name]["fork"] = _section(config, record, name, step, seed, home)
    notes = _drop_preset(raw, config, overrides)
    _check_before(name, config, raw, overrides)
    return Fork(record.run_id, name, step, raw, tuple(overrides), seed, tuple(notes))


def _stage(config: RunConfig, record: RunRecord, wanted: str | None, *, with_steps: bool) -> str:
    """The stage that is forked: the one named, or the only one that can be meant."""
    from posttrain.core.config.fork_section import StepStage
    from posttrain.core.config.rl_stage import RL_KINDS

    stages = config.stages
    able = [name for name, stage in stages.items() if isinstance(stage, StepStage)]
    if wanted is not None:
        if wanted not in stages:
            raise ConfigError(
                f"this run has no stage '{wanted}'{nearest(wanted, stages)} (stages: "
                f"{list(stages)})"
            )
        if with_steps and wanted not in able:
            raise ConfigError(
                f"stage '{wanted}' of kind '{stages[wanted].kind}' has no steps that are kept in "
                f"checkpoints, so --step says nothing; choose one of {able}, or leave --step out "
                "to fork before the stage"
            )
        return wanted
    if not with_steps:
        raise ConfigError(
            "say where to fork: --step N after a step, or --stage NAME before a stage "
            f"(stages: {list(stages)})"
        )
    meant = [name for name in able if stages[name].kind in RL_KINDS] or able
    if len(meant) != 1:
        what = f"several: {meant}; name one with --stage" if meant else "none"
        raise ConfigError(f"of the stages with steps to share this run has {what}")
    return meant[0]


def _section(
    config: RunConfig, record: RunRecord, name: str, step: int, seed: int | None, home: Path
) -> dict[str, Any]:  # Any: YAML values
    """The stage's `fork`. Steps that the run itself shares are forked from whoever took them."""
    from posttrain.core.config.fork_section import StepStage

    stage = config.stages[name]
    assert isinstance(stage, StepStage)
    identity = record.stages.get(name)
    if identity is None:
        raise ResourceError(
            f"stage '{name}' never began in run {record.run_id[:12]}; the same `posttrain run` "
            "command goes on with the run"
        )
    _check_step(stage, name, step)
    found = f"{name}/{identity}"
    if stage.fork is not None:
        found = _who_took(stage.fork, step, home) if step <= stage.fork.step else found
        seed = stage.fork.seed if seed is None else seed
    return {"stage": found, "step": step, "seed": seed}


def _check_step(stage: StepStage, name: str, step: int) -> None:
    steps = getattr(stage, "steps", None)
    if isinstance(steps, int) and step > steps:
        raise ConfigError(
            f"--step {step}: stage '{name}' of this run has {steps} steps; choose one of them"
        )


def _who_took(fork: ForkSection, step: int, home: Path) -> str:
    """NAME/IDENTITY of the stage that took `step` itself, where forks were forked."""
    from posttrain.pipelines.run.forks import find_parent

    while (own := find_parent(fork, home).stage.fork) is not None and step <= own.step:
        fork = own
    return fork.stage


def _drop_preset(
    raw: dict[str, Any], config: RunConfig, overrides: Sequence[str]
) -> list[str]:  # Any: YAML values
    """Where an override names another algorithm, take away what the old one had set."""
    named = [text.partition("=")[0].strip() for text in overrides]
    stages = [key.split(".")[1] for key in named if _names_algorithm(key)]
    notes = []
    for stage in dict.fromkeys(stages):
        if stage not in config.stages:
            continue
        values = raw["stages"][stage]
        dropped = [field for field in _preset_fields(values, overrides, stage) if field in values]
        for field in dropped:
            del values[field]
        if dropped:
            notes.append(
                f"stages.{stage}: {', '.join(dropped)} are what the new algorithm says, unless "
                "--set says otherwise"
            )
    return notes


def _names_algorithm(key: str) -> bool:
    parts = key.split(".")
    return parts[0] == "stages" and len(parts) > 2 and parts[2] == "algorithm"


def _preset_fields(values: Mapping[str, Any], overrides: Sequence[str], stage: str) -> list[str]:
    """Fields that the old or the new algorithm of a stage sets."""
    import yaml

    from posttrain.core.contracts import Algorithm
    from posttrain.core.plugin_manager import PluginManager

    manager = PluginManager()
    place = f"stages.{stage}.algorithm"
    given = [text.partition("=") for text in overrides]
    wanted = [yaml.safe_load(v) for key, _, v in given if key.strip() in (place, f"{place}.name")]
    components = [values["algorithm"], *wanted]
    found: dict[str, None] = {}
    for component in components:
        fields = {"name": component} if isinstance(component, str) else dict(component)
        name = str(fields.pop("name", ""))
        preset = manager.build(Algorithm, name, fields)
        found |= dict.fromkeys(preset.expand())
    return list(found)


def _check_before(
    name: str, before: RunConfig, raw: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Raise `ConfigError` for a change of a stage that is done before the fork."""
    from posttrain.core.config.loading import load_config

    now = load_config([raw], list(overrides)).config
    for other in _read_by(name, now):
        stage, was = now.stages[other], before.stages.get(other)
        if was is None:
            continue
        values, old = stage.model_dump(mode="json"), was.model_dump(mode="json")
        left_out = {"checkpoint_every", *stage.without_effect}
        changed = [f for f in values if f not in left_out and values[f] != old.get(f)]
        if changed:
            raise ConfigError(
                f"stages.{other}.{changed[0]}: stage '{other}' comes before the fork in "
                f"'{name}', and is shared; to change it, fork there: --stage {other}"
            )
        for section in stage.sections:
            if getattr(now, section) != getattr(before, section):
                raise ConfigError(
                    f"{section}: stage '{other}', which comes before the fork in '{name}', depends "
                    f"on it, and is shared; to change it, fork there: --stage {other}"
                )


def _read_by(name: str, config: RunConfig) -> list[str]:
    """The stages whose results stage `name` needs, its own inputs' inputs too."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        for source in config.stages[waiting.pop()].inputs.values():
            if source in config.stages and source not in found:
                found.append(source)
                waiting.append(source)
    return found
