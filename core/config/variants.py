"""The section `variants`: versions of one config that `posttrain sweep` runs and compares.

Variants are named, or the product of a grid, or the trials of a search. Each is the config with
some values set, and runs with each seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from posttrain.core.config.base import Section
from posttrain.core.errors import nearest

AS_IT_IS = "config"
"""The variant of a search that is the config itself: what trials are compared with."""
MOST = 1_000
"""Variants of a grid, and trials of a search."""
NOT_SET = {
    "variants": "a variant has no variants of its own",
    "seed": "`seeds` says with which seeds every variant runs",
    "run_name": "a variant's runs have its name",
    "name": "all runs of a sweep are in one experiment",
}
"""Settings that no variant may change, and why."""

Name = Annotated[str, StringConstraints(pattern=r"^[^\s{}\x00-\x1f][^{}\x00-\x1f]{0,79}$")]
SettingPath = Annotated[str, StringConstraints(pattern=r"^[^.=\s]+(\.[^.=\s]+)*$", max_length=300)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Settings = dict[str, Any]  # Any: YAML values, by their path


class MeasureSection(Section):
    """What variants are compared by."""

    stage: str | None = Field(
        default=None, description="the stage that measured it; not set = the last of kind evaluate"
    )
    metric: str = Field(
        default="accuracy",
        min_length=1,
        max_length=200,
        description="accuracy (greedy, held out), sampled (share of right samples), or the name of "
        "any metric of the stage",
    )


class VariantSection(Section):
    """One variant: the config, or another variant, with some values set."""

    extends: str | None = Field(default=None, description="the variant that it adds to")
    set: dict[SettingPath, Any] = Field(
        default={}, description="values by their path, as of the option --set: stages.rl.steps"
    )


class SpaceSection(Section):
    """Where a search looks for one setting: between two numbers, or among choices."""

    low: int | float | None = Field(default=None, description="the least value")
    high: int | float | None = Field(default=None, description="the greatest value")
    log: bool = Field(default=False, description="equally often in 0.001 to 0.01 as 0.01 to 0.1")
    choices: tuple[Any, ...] = Field(default=(), description="the values there are, if a list")

    @model_validator(mode="before")
    @classmethod
    def _a_list_stands_for_its_choices(cls, value: Any) -> Any:  # Any: whatever YAML held
        return {"choices": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.choices) == (self.low is not None or self.high is not None):
            raise ValueError("needs low and high, or a list of choices, and not both")
        if self.choices:
            return self
        if self.low is None or self.high is None or not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}, expected low below high")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low}, and with log it must be above 0")
        return self

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant: both ends are written as such."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class SearchSection(Section):
    """Settings that Optuna looks for."""

    trials: int = Field(default=20, ge=1, le=MOST, description="variants that are tried")
    space: dict[SettingPath, SpaceSection] = Field(
        min_length=1, description="where each setting is looked for, by its path"
    )
    sampler: Literal["tpe", "random"] = Field(
        default="tpe", description="tpe: near what was good (Optuna's default); random: anywhere"
    )
    pruner: Literal["median", "halving", "none"] = Field(
        default="median",
        description="ends a trial early, at an evaluation during training (evaluate_every). "
        "median: one that is below the median of those before; halving: all but the best third at "
        "each rung; none: never",
    )


class VariantsSection(Section):
    """Versions of this config for `posttrain sweep`; `posttrain run` runs the config itself."""

    seeds: tuple[Seed, ...] = Field(
        default=(), description="each variant runs with each; not set = the config's own seed"
    )
    base: str | None = Field(
        default=None, description="the variant that others are compared with; not set = the first"
    )
    measure: MeasureSection = MeasureSection()
    target: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="held-out accuracy during training (evaluate_every) that learning speed is "
        "measured to: steps and tokens until it is reached",
    )
    named: dict[Name, VariantSection] = Field(
        default={}, description="variants by name; one may extend another"
    )
    grid: dict[SettingPath, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        default={}, description="values of each setting, by its path: every combination is one"
    )
    search: SearchSection | None = Field(
        default=None, description="settings that are searched for (pip install 'posttrain[search]')"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [n for n in ("named", "grid", "search") if getattr(self, n)]
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "has no variants"
            raise ValueError(f"{what}; give one of named, grid and search")
        size = math.prod(len(values) for values in self.grid.values())
        if size > MOST:
            raise ValueError(f"grid makes {size} variants, expected at most {MOST}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} has one twice")
        for place, path in self._paths():
            top = path.partition(".")[0]
            if top in NOT_SET:
                raise ValueError(f"{place} sets '{path}', which it cannot: {NOT_SET[top]}")
        for name, one in self.named.items():
            self._check_chain(name, one)
        if self.base is not None and self.base not in self.variants():
            known = self.variants()
            raise ValueError(
                f"base '{self.base}' is not a variant{nearest(self.base, known)} "
                f"(there are {list(known)[:12]})"
            )
        return self

    def _paths(self) -> Iterator[tuple[str, str]]:
        """Who sets which path."""
        yield from ((f"variant '{n}'", path) for n, one in self.named.items() for path in one.set)
        yield from (("grid", path) for path in self.grid)
        yield from (("search", path) for path in (self.search.space if self.search else ()))

    def _check_chain(self, name: str, one: VariantSection) -> None:
        chain = [name]
        while one.extends is not None:
            if one.extends not in self.named:
                raise ValueError(
                    f"variant '{chain[-1]}' extends '{one.extends}', which there is not"
                    f"{nearest(one.extends, self.named)}"
                )
            if one.extends in chain:
                raise ValueError(f"variants extend one another: {' -> '.join([*chain, chain[0]])}")
            chain.append(one.extends)
            one = self.named[one.extends]

    def variants(self) -> dict[str, Settings]:
        """What each variant sets, by name, in order; of a search only the config itself."""
        if self.search is not None:
            return {AS_IT_IS: {}}
        if self.grid:
            combinations = itertools.product(*self.grid.values())
            found = [dict(zip(self.grid, values, strict=True)) for values in combinations]
            return {setting_name(settings): settings for settings in found}
        return {name: self._all_of(one) for name, one in self.named.items()}

    def _all_of(self, one: VariantSection) -> Settings:
        before = {} if one.extends is None else self._all_of(self.named[one.extends])
        # A path that is set again is set last, so that it may be below one that is set before.
        kept = {path: value for path, value in before.items() if path not in one.set}
        return kept | one.set

    @property
    def compared_with(self) -> str:
        """The name of the base."""
        return self.base or next(iter(self.variants()))


def setting_name(settings: Mapping[str, Any]) -> str:
    """A variant's name by what it sets: `aggregator=token-mean, learning_rate=0.001`."""
    ends = [path.rpartition(".")[2] for path in settings]
    labels = [
        end if ends.count(end) == 1 else path for path, end in zip(settings, ends, strict=True)
    ]
    values = zip(labels, settings.values(), strict=True)
    text = ", ".join(f"{label}={_in_a_word(value)}" for label, value in values)
    return text.replace("{", "(").replace("}", ")")


def _in_a_word(value: object) -> str:
    """A value as part of a name: a plugin by its name, with what it sets."""
    if isinstance(value, Mapping):
        rest = ", ".join(f"{k} {_in_a_word(v)}" for k, v in value.items() if k != "name")
        name = str(value.get("name", ""))
        return f"{name} ({rest})" if name and rest else name or rest
    if isinstance(value, list | tuple):
        return " ".join(map(_in_a_word, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
