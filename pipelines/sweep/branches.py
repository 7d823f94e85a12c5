"""The branches of a sweep: each variant with each seed, resolved, and which stages they share.

A branch is an ordinary run of the config with some values set. What two branches have in common is
found before anything runs: stages of equal identities, as far as these can be known without their
inputs, are one stage.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.config.loading import LoadedConfig, load_config, override_of
from posttrain.core.config.positions import OVERRIDE
from posttrain.core.config.variants import SearchSection, Settings, VariantsSection
from posttrain.core.errors import ConfigError, PosttrainError, nearest
from posttrain.pipelines.run.checks import check_inputs, resolve_configs

if TYPE_CHECKING:
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.contracts import Plugin
    from posttrain.core.plugin_manager import PluginManager

Configs = Sequence[Path | Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Branch:
    """A variant with a seed. `overrides` make its config out of the sweep's configs.

    `stages` maps each stage, in order, to what it is known by before its inputs exist.
    """

    variant: str
    seed: int
    overrides: tuple[str, ...]
    resolved: ResolvedRun = field(repr=False, compare=False)
    stages: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def key(self) -> str:
        """What it is found by in a sweep's record: its name, its stages, and its config."""
        config = self.resolved.config.model_dump(mode="json", exclude={"description", "variants"})
        text = json.dumps([self.variant, dict(self.stages), config], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a config's section `variants` asks for."""

    name: str
    section: VariantsSection
    configs: Configs
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    base: str
    settings: Mapping[str, Settings]
    branches: tuple[Branch, ...]
    measure: tuple[str, str]
    """Stage and metric."""
    loaded: LoadedConfig = field(repr=False)

    def shared(self) -> Counter[str]:
        """How many branches have each stage that several have."""
        found = Counter(known for branch in self.branches for known in branch.stages.values())
        return Counter({known: count for known, count in found.items() if count > 1})

    def distinct(self) -> int:
        """Stages that differ from one another."""
        return len({known for branch in self.branches for known in branch.stages.values()})


def sweep_of(
    configs: Configs,
    overrides: Sequence[str] | None,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    home: Path,
) -> Sweep:
    """The sweep of a config, with every variant resolved and its data and model checked.

    `seeds` stand for the section's own; `only` keeps these variants and the base. Raises
    `PosttrainError` that names the variant.
    """
    sets = tuple(overrides or ())
    loaded = load_config(configs, sets)
    section = loaded.config.variants
    if section is None:
        raise ConfigError(
            f"{loaded.where('name')}: this config has no section `variants`, so there is nothing "
            "to sweep; add one (docs/sweeps.md), or use posttrain run"
        )
    chosen = tuple(seeds or section.seeds or (loaded.config.seed,))
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"seeds {list(chosen)} has one twice; name each once")
    settings = _chosen(section, only)
    branches: list[Branch] = []
    for variant, values in settings.items():
        branches += branches_of(loaded, configs, sets, variant, values, chosen, home)
    if section.search is not None:
        _check_space(section.search, loaded, configs, sets)
    measure = _measure(section, branches[0].resolved, loaded)
    name, base = loaded.config.name, section.compared_with
    return Sweep(
        name, section, configs, sets, chosen, base, settings, tuple(branches), measure, loaded
    )


def checked_variants(
    resolved: ResolvedRun,
    configs: Configs,
    overrides: Sequence[str] | None,
    home: Path,
    plugins: Sequence[type[Plugin[Any]]] = (),
) -> Sweep | None:
    """The sweep of a config that has variants, each of them checked; None of one without.

    `plugins` that only this process knows are not in the processes of a sweep: a config that needs
    some is not checked.
    """
    if resolved.config.variants is None or plugins:
        return None
    return sweep_of(configs, overrides, home=home)


def _chosen(section: VariantsSection, only: Sequence[str]) -> dict[str, Settings]:
    """The variants asked for, the base first and always among them."""
    known, base = section.variants(), section.compared_with
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name}: there is not a variant of that name{nearest(name, known)} "
                f"(there are {', '.join(map(repr, list(known)[:12]))})"
            )
    wanted = [base, *(n for n in known if n != base and (not only or n in only))]
    return {name: known[name] for name in wanted}


def branches_of(
    loaded: LoadedConfig,
    configs: Configs,
    overrides: Sequence[str],
    variant: str,
    settings: Settings,
    seeds: Sequence[int],
    home: Path,
) -> list[Branch]:
    """A variant with each seed, resolved; its model and data are checked once."""
    template = loaded.config.run_name
    names = _names_of_plugins(loaded, configs, overrides, settings)
    own = [override_of(path, value) for path, value in {**names, **settings}.items()]
    title = override_of("run_name", f"{template} [{variant}]"[:200])
    first, *_ = seeds
    common = (*overrides, "variants=null", *own, title)
    try:
        resolved, manager = resolve_configs(configs, [*common, f"seed={first}"])
        check_inputs(resolved, manager)
    except PosttrainError as error:
        text = _placed(str(error), loaded, variant, settings)
        raise type(error)(f"variant '{variant}': {text}") from error
    found = []
    for seed in seeds:  # which nothing but the seed itself depends on
        config = resolved.config.model_copy(update={"seed": seed})
        own_run = replace(resolved, config=config)
        stages = known_stages(own_run, manager, home)
        found.append(Branch(variant, seed, (*common, f"seed={seed}"), own_run, stages))
    return found


def _check_space(
    search: SearchSection, loaded: LoadedConfig, configs: Configs, overrides: Sequence[str]
) -> None:
    """Raise `ConfigError` for a setting that no trial can have: a path that there is not, a choice
    or an end of a range that is refused both by itself and with the first of all others."""
    tried = {path: space.choices or (space.low, space.high) for path, space in search.space.items()}
    firsts = {path: values[0] for path, values in tried.items()}
    for path, values in tried.items():
        for value in values:
            alone = {path: value}
            problem = _refusal(alone, loaded, configs, overrides)
            if problem and _refusal({**firsts, **alone}, loaded, configs, overrides):
                raise ConfigError(f"variants.search: {path} cannot be {value!r:.60}: {problem}")


def _refusal(
    settings: Settings, loaded: LoadedConfig, configs: Configs, overrides: Sequence[str]
) -> str:
    """Why the config cannot have these settings; empty if it can."""
    names = _names_of_plugins(loaded, configs, overrides, settings)
    try:
        own = [override_of(path, value) for path, value in {**names, **settings}.items()]
        resolve_configs(configs, [*overrides, "variants=null", *own])
    except PosttrainError as error:
        return _placed(str(error), loaded, "", settings)
    return ""


def _names_of_plugins(
    loaded: LoadedConfig, configs: Configs, overrides: Sequence[str], settings: Settings
) -> dict[str, str]:
    """The names of plugins that an algorithm brings, where a variant sets a field of one.

    `stages.rl.policy_loss.clip_high: 0.28` is then of the loss that the variant's algorithm has.
    """
    raw: Any = loaded.raw["stages"]  # Any: nested YAML values
    held: dict[str, tuple[str, str]] = {}
    for path in settings:
        parts = path.split(".")
        if len(parts) < 4 or parts[0] != "stages" or parts[1] not in raw:
            continue
        above = ".".join(parts[:3])
        if parts[2] not in raw[parts[1]] and above not in settings:
            held[above] = (parts[1], parts[2])
    if not held:
        return {}
    rest = {p: v for p, v in settings.items() if not p.startswith(tuple(f"{h}." for h in held))}
    try:
        sets = [override_of(path, value) for path, value in rest.items()]
        resolved, _ = resolve_configs(configs, [*overrides, *sets])
    except PosttrainError:
        return {}  # the variant itself has the mistake, and its message the place
    values: Any = resolved.config.model_dump(mode="json")["stages"]
    found = {}
    for above, (stage, part) in held.items():
        component = values[stage].get(part)
        # AdamW is written without a name; a section that is not a plugin has none.
        if isinstance(component, dict) and "name" in component and part != "optimizer":
            found[f"{above}.name"] = component["name"]
    return found


def _placed(text: str, loaded: LoadedConfig, variant: str, settings: Settings) -> str:
    """The message with the lines of the file in place of options that nobody gave."""
    section = loaded.config.variants
    assert section is not None
    for path, value in settings.items():
        override = override_of(path, value)
        shown = OVERRIDE + (override if len(override) <= 100 else f"{override[:97]}...")
        holder = _holder(section, variant, path)
        text = text.replace(f"{shown}: ", f"{loaded.where(holder)}: ")
    return text


def _holder(section: VariantsSection, variant: str, path: str) -> tuple[str | int, ...]:
    """Where the config says that a variant sets this path."""
    if section.search is not None:
        return ("variants", "search", "space", path)
    if section.grid:
        return ("variants", "grid", path)
    name: str | None = variant
    while name is not None and path not in section.named[name].set:
        name = section.named[name].extends
    return ("variants", "named", name or variant, "set", path)


def _measure(
    section: VariantsSection, resolved: ResolvedRun, loaded: LoadedConfig
) -> tuple[str, str]:
    """The stage and the metric that variants are compared by."""
    stages, wanted = resolved.config.stages, section.measure.stage
    if wanted is not None:
        if wanted not in stages:
            place = ("variants", "measure", "stage")
            raise ConfigError(
                loaded.problem(place, f"there is no stage '{wanted}'{nearest(wanted, stages)}")
            )
        return wanted, section.measure.metric
    evaluating = [name for name in resolved.order if stages[name].kind == "evaluate"]
    if not evaluating:
        raise ConfigError(
            loaded.problem(
                ("variants",),
                "no stage of kind evaluate measures the variants; add one, or name a stage and a "
                "metric in variants.measure",
            )
        )
    last = [n for n in evaluating if stages[n].inputs.get("model") != "base"] or evaluating
    return last[-1], section.measure.metric


def known_stages(resolved: ResolvedRun, manager: PluginManager, home: Path) -> dict[str, str]:
    """What each stage is known by, in order: its identity, with those of its inputs in the place
    of their digests.

    Stages of two branches that are known by the same have the same identity.
    """
    from posttrain.core.config.base import BASE_MODEL
    from posttrain.core.contracts import Task
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.source import known_digest
    from posttrain.core.store.identity import identity_of
    from posttrain.pipelines.run.planning import parts_of_stage
    from posttrain.pipelines.stage.engines import choose_engine

    config = resolved.config
    engine = choose_engine(config, manager, ModelRuntime.from_config(config.model))
    task: Task[Any] = manager.task(config.task)
    fingerprint = task.fingerprint()
    base = known_digest(config.model, home / "models")
    found = {BASE_MODEL: base or f"{config.model.source} {config.model.revision}"}
    for name in resolved.order:
        inputs = {role: found[source] for role, source in config.stages[name].inputs.items()}
        parts = parts_of_stage(resolved, name, inputs, engine, fingerprint)
        found[name] = f"{name} {identity_of(parts)}"
    del found[BASE_MODEL]
    return found
