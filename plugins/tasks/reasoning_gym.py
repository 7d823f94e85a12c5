"""Problems that the package reasoning-gym generates, judged by its own scorers."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.math.answer_forms import is_arithmetic, is_data, is_polynomial
from posttrain.core.math.answers import last_number
from posttrain.core.math.antiderivative import is_antiderivative
from posttrain.core.math.numbers import is_number, numbers_in, same_number
from posttrain.core.math.splits import split_of, stable_hash, text_key, too_few
from posttrain.core.types import Problem, Split, Verdict

# Items are asked for in blocks of one generator seed; item i of a block depends on seed + i only.
BLOCK = 500
# So many blocks in a row without a new problem mean that there are no more.
DRY_BLOCKS = 20
# What a scorer may raise on text that is not of the form it expects: the answer is then wrong.
SCORER_ERRORS = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    SyntaxError,
    RecursionError,
)
# What a generator may raise on settings of a wrong type or range.
GENERATOR_ERRORS = (AssertionError, ValueError, TypeError, LookupError, AttributeError)
RUNS_CODE = re.compile(r"(?<!literal_)\b(eval|exec|parse_expr|sympify)\(")
# Scorers that evaluate an answer get it only if it is of this form, which can hold no code.
HARMLESS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": is_data,
    "countdown": is_arithmetic,
    "n_queens": is_data,
    "number_sorting": is_data,
    "polynomial_multiplication": is_polynomial,
    "puzzle24": is_arithmetic,
    "spiral_matrix": is_data,
    "string_insertion": is_data,
}

# The scorer compares the truth of two texts, so that any text is right (reasoning-gym 0.1.25).
BY_TEXT = frozenset({"game_of_life_halting"})
# Their scorers simplify what the model wrote, for as long as that takes.
INTEGRALS = frozenset({"simple_integration", "intermediate_integration"})


class DatasetSpec(PluginConfig):
    """One generator: its share of the problems and its own settings."""

    weight: float = Field(default=1.0, gt=0, description="share, relative to the other weights")
    config: dict[str, Any] = Field(  # Any: each generator has its own settings
        default_factory=dict, description="the generator's own settings, without seed and size"
    )


class ReasoningGymConfig(PluginConfig):
    """Settings of `reasoning_gym`."""

    datasets: dict[str, DatasetSpec] = Field(
        default={"chain_sum": DatasetSpec()},
        min_length=1,
        description="{chain_sum: {weight: 1, config: {max_terms: 2}}}, or a list of names",
    )
    match: Literal["auto", "last_number", "last_line", "text"] = Field(
        default="auto",
        description="what is scored; auto: the last number for numeric answers, as many lines "
        "as the answer has for grids, else the last line",
    )
    partial_credit: bool = Field(
        default=False, description="keep scores between 0 and 1; else only a full score counts"
    )
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 problems, how many are never trained on"
    )

    @field_validator("datasets", mode="before")
    @classmethod
    def _from_names(cls, value: Any) -> Any:  # Any: whatever YAML held
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return {name: {} for name in value}
        return value


def create(name: str, settings: dict[str, Any], seed: int) -> Any:  # Any: the package is untyped
    """A reasoning-gym dataset of `BLOCK` items; `ConfigError` for unknown names and settings."""
    import reasoning_gym  # over a second, and only runs with this task need it
    from reasoning_gym.factory import DATASETS

    place = f"task 'reasoning_gym': datasets.{name}"
    if name not in DATASETS:
        raise ConfigError(f"{place}: reasoning-gym has no such dataset{nearest(name, DATASETS)}")
    dataset_class, config_class = DATASETS[name]
    # Their scorers would run what the model wrote, in this very process.
    if name == "composite":
        raise ConfigError(f"{place}: name the datasets to be mixed themselves, with weights")
    runs_code = RUNS_CODE.search(inspect.getsource(dataset_class.score_answer)) is not None
    if runs_code and name not in HARMLESS and name not in INTEGRALS:
        raise ConfigError(
            f"{place}: its scorer evaluates answers as code, which is unsafe on a model's text: "
            "choose another dataset, such as chain_sum or gsm_symbolic"
        )
    allowed = sorted({f.name for f in dataclasses.fields(config_class)} - {"seed", "size"})
    for field in settings:
        if field not in allowed:
            raise ConfigError(
                f"{place}.config.{field}: no such setting{nearest(field, allowed)} "
                f"(allowed: {allowed}; seed and size are set by the run)"
            )
    return reasoning_gym.create_dataset(name, seed=seed, size=BLOCK, **settings)


class ReasoningGymTask(Task[ReasoningGymConfig]):
    """Problems of reasoning-gym's generators, mixed by weight.

    Formula: key = the question, in Unicode's NFC; held out if and only if
    sha256(key) mod 1000 < held_out_permille (the generators' seeds play no part: equal items come
    from different seeds). The worked answer is "expression = answer" where the generator gives its
    expression, else the answer; it is empty where a problem has many answers and the generator
    names none, which supervised stages refuse. Of datasets whose scorer evaluates answers as code,
    some get only answers of a harmless form (arithmetic, polynomials, literals; all others are
    wrong), integrals are checked by numbers, and any other is refused.
    Source: reasoning-gym, arXiv:2505.24760.
    """

    name = "reasoning_gym"
    Config = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        self._blocks: dict[tuple[str, int], Any] = {}  # Any: the package is untyped
        for name, spec in config.datasets.items():
            place = f"task 'reasoning_gym': datasets.{name}"
            try:
                self._item(name, 0, 0)
            except GENERATOR_ERRORS as error:
                raise ConfigError(
                    f"{place}.config: {error} (got {spec.config}): correct the setting"
                ) from error

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split`; how many of which dataset is drawn by weight."""
        rng = random.Random(f"reasoning_gym|{split}|{seed}")
        specs = self.config.datasets
        slots = rng.choices(list(specs), [spec.weight for spec in specs.values()], k=count)
        taken: set[str] = set()
        found = {name: self._draw(name, split, slots.count(name), seed, taken) for name in specs}
        return [found[name].pop() for name in slots]

    def _draw(
        self, name: str, split: Split, count: int, seed: int, taken: set[str]
    ) -> list[Problem]:
        """`count` problems of one dataset whose keys are not in `taken`, and adds them to it."""
        found: list[Problem] = []
        block, dry = 0, 0
        while len(found) < count:
            before = len(found)
            block_seed = stable_hash(f"{name}|{split}|{seed}|{block}") % 2**31
            for index in range(BLOCK):
                item = self._item(name, block_seed, index)
                key = text_key(item["question"])
                # The generator could not solve it itself, and gives the question for an answer.
                unsolved = name in INTEGRALS and "Integral(" in item["answer"]
                fits = split_of(key, self.config.held_out_permille) == split and not unsolved
                if fits and key not in taken:
                    taken.add(key)
                    found.append(_problem(key, name, block_seed, index, item))
                if len(found) == count:
                    break
            block, dry = block + 1, 0 if len(found) > before else dry + 1
            if dry == DRY_BLOCKS:
                fix = "ask for fewer, widen the dataset's config, or lower its weight"
                where = f"{self.name}: {name}"
                raise too_few(where, split, count, len(found), fix)
        return found

    def _item(self, name: str, block_seed: int, index: int) -> dict[str, Any]:
        """Item `index` of the block with this seed, made again each time it is asked for."""
        if (name, block_seed) not in self._blocks:
            settings = self.config.datasets[name].config
            self._blocks[(name, block_seed)] = create(name, settings, block_seed)
        item: dict[str, Any] = self._blocks[(name, block_seed)][index]
        return item

    def verify(self, problem: Problem, text: str) -> Verdict:
        """The dataset's own score of the number or line that `match` picks from `text`.

        A rewritten problem is of no dataset: its last number is compared with the answer.
        """
        if "dataset" not in problem.metadata:
            found = _read("last_number", problem.answer, text)
            right = found is not None and same_number(found, problem.answer)
            return Verdict(float(right), found)
        answer = _read(self.config.match, problem.answer, text)
        name = problem.metadata["dataset"]
        if answer is None:
            return Verdict(0.0, None)
        if name in HARMLESS and not HARMLESS[name](answer):
            return Verdict(0.0, answer)
        if name in BY_TEXT:
            return Verdict(float(answer == problem.answer), answer)
        block_seed, index = int(problem.metadata["seed"]), int(problem.metadata["index"])
        item = self._item(name, block_seed, index)
        if name in INTEGRALS:
            asked = item["metadata"]
            right = is_antiderivative(answer, str(asked["integrand"]), str(asked["variable"]))
            return Verdict(float(right), answer)
        try:
            score = float(self._blocks[(name, block_seed)].score_answer(answer, item))
        except SCORER_ERRORS:
            score = 0.0
        if not self.config.partial_credit:
            score = float(score >= 1.0)
        return Verdict(min(1.0, max(0.0, score)), answer)


def _read(match: str, expected: str, text: str) -> str | None:
    """The part of `text` that is scored, or None when it has none."""
    if match == "auto":
        rows = expected.count("\n") + 1
        if rows > 1:  # a grid: as many lines at the end as it has, with their blanks
            return "\n".join(text.rstrip().split("\n")[-rows:]) if text.strip() else None
        bare = re.sub(r"\\d?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", expected.strip("$"))
        match = "last_number" if is_number(bare) else "last_line"
    if match == "last_number":
        numbers, stated = numbers_in(text), last_number(text)
        if stated is not None and len(numbers_in(stated)) > 1:  # 3/4 and 1e-18 are one number
            return stated
        return numbers[-1] if numbers else None
    lines = text.split("\n") if match == "last_line" else [text]
    kept = [line.strip() for line in lines if line.strip()]
    return kept[-1] if kept else None


def _problem(key: str, name: str, seed: int, index: int, item: dict[str, Any]) -> Problem:
    """A generated item as a problem; its seed and index are enough to make the item again."""
    question, answer = item["question"].strip(), item["answer"] or ""
    expression = item["metadata"].get("expression")
    reported = isinstance(expression, str) and expression != answer  # countdown asks for it
    worked = f"{expression} = {answer}" if reported else answer
    place = {"dataset": name, "seed": str(seed), "index": str(index)}
    return Problem(key, question, answer, worked, place)
