"""Another loss, clip range or aggregator on the same tokens, without a model.

`LOSS[,field=value]...[@AGGREGATOR[,field=value]...]`: `own` is the run's own loss, and what is left
out stays as in the run. KL coefficient and rollout correction stay the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.config.spec import Spec, parse_spec
from posttrain.core.contracts import Aggregator, PolicyLoss
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.objective import LossTerm, Objective

OWN = "own"
OPTION = "--what-if"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is changed; `text` is how a person writes it, and its name on the page."""

    text: str
    loss: Spec
    aggregator: Spec | None = None


def parse(text: str) -> WhatIf:
    """What a person wrote; raises `ConfigError` for what is not of that form."""
    loss_part, at, aggregator_part = text.partition("@")
    loss = parse_spec(OPTION, loss_part)
    aggregator = parse_spec(f"{OPTION} {loss_part}@", aggregator_part) if at else None
    return WhatIf(text, loss, aggregator)


def objective_under(
    what: WhatIf, base: Objective, manager: PluginManager, norm_length: int
) -> Objective:
    """The run's objective `base` as `what` changes it.

    `norm_length` (tokens) is for an aggregator with a constant length that is not given. Raises
    `ConfigError` for what the plugins refuse, and for losses that a weight per token says nothing
    of.
    """
    aggregator = None
    if what.aggregator is not None:
        known = manager.find(Aggregator.kind, what.aggregator.name).cls.Config.model_fields
        length = {"norm_length": norm_length} if "norm_length" in known else {}
        fields = length | what.aggregator.fields
        aggregator = manager.build(Aggregator, what.aggregator.name, fields)
    if not base.terms:
        return _distilled_under(what, base, aggregator)
    terms = tuple(
        replace(term, aggregator=aggregator or term.aggregator)
        for term in _terms(what, base, manager)
    )
    for term in terms:
        allowed = term.loss.allowed_aggregators()
        if allowed is not None and term.aggregator.name not in allowed:
            raise ConfigError(
                f"what-if '{what.text}': {term.loss.name} is one value per response and goes with "
                f"{sorted(allowed)}, not with {term.aggregator.name}: write "
                f"{term.loss.name}@{min(allowed)}, or set allow_any_agg=true where it has that"
            )
    return replace(base, terms=terms, aggregator=aggregator or base.aggregator)


def _distilled_under(
    what: WhatIf, base: Objective, aggregator: Aggregator[Any] | None
) -> Objective:
    """The same of a stage whose only loss is its distillation loss."""
    term = base.distillation
    if term is None or what.loss.name != OWN or what.loss.fields:
        raise ConfigError(
            f"what-if '{what.text}': this stage has no policy loss, and another distillation loss "
            "takes the logits, which evidence does not hold; write own@AGGREGATOR"
        )
    term = replace(term, aggregator=aggregator or term.aggregator)
    return replace(base, distillation=term, aggregator=aggregator or base.aggregator)


def _terms(what: WhatIf, base: Objective, manager: PluginManager) -> tuple[LossTerm, ...]:
    first = base.terms[0]
    if what.loss.name != OWN:
        loss = manager.build(PolicyLoss, what.loss.name, what.loss.fields)
        if loss.source != "rollout":
            raise ConfigError(
                f"what-if '{what.text}': {loss.name} reads batches of its own, not the rollout's "
                "tokens; choose a loss of the rollout"
            )
        return (replace(first, loss=loss),)
    if not what.loss.fields:
        return base.terms
    if len(base.terms) > 1:
        names = [term.loss.name for term in base.terms]
        raise ConfigError(
            f"what-if '{what.text}': the run's loss has {len(base.terms)} terms, {names}, so it is "
            "not clear whose fields these are; name one loss"
        )
    fields = first.loss.config.model_dump(mode="json") | what.loss.fields
    return (replace(first, loss=manager.build(PolicyLoss, first.loss.name, fields)),)


def usual(base: Objective, manager: PluginManager) -> list[WhatIf]:
    """What most people ask first: each other way to aggregate, and the best-known losses.

    The run's own is not among them, and some may be refused: `gspo` where advantages differ
    within a response.
    """
    terms = base.terms or (() if base.distillation is None else (base.distillation,))
    own = {term.aggregator.name for term in terms}
    names = [e.name for e in manager.entries(Aggregator.kind)]
    asked = [f"{OWN}@{name}" for name in names if {name} != own]
    if not base.terms:
        return [parse(text) for text in asked]
    asked += ["ppo_clip", "ppo_clip,clip_high=0.28", "gspo@seq-mean-token-mean", "cispo"]
    asked += ["vanilla_pg"]
    taken = {term.loss.name: term.loss.config for term in base.terms}
    found = [parse(text) for text in asked]
    return [w for w in found if not _is_own(w, taken, manager)]


def _is_own(what: WhatIf, taken: Mapping[str, object], manager: PluginManager) -> bool:
    """Whether it is what the run has, under another name."""
    if what.loss.name not in taken or what.aggregator is not None or len(taken) > 1:
        return False
    config: object = manager.config(PolicyLoss.kind, what.loss.name, what.loss.fields)
    return config == taken[what.loss.name]
