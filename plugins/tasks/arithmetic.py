"""Two-operand arithmetic, as a plain question or as a one-sentence story."""

from __future__ import annotations

import random
from string import Formatter
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.math.numbers import numbers_in, same_number
from posttrain.core.math.splits import split_of, stable_hash, too_few
from posttrain.core.types import Problem, Split, Verdict

Operator = Literal["+", "-", "*"]

# Above this many operand pairs problems are drawn at random instead of being listed.
MAX_LISTED = 200_000

NAMES = ("Tom", "Mia", "Ben", "Ada", "Sam", "Eva", "Leo", "Zoe")
THINGS = ("apples", "marbles", "stickers", "pencils", "shells", "coins", "cards", "stamps")
STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "There are {a} {things} in one box and {b} {things} in another. How many are there in all?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "A shop has {a} {things} and sells {b} of them. How many {things} remain?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} in each. How many {things} are there in all?",
        "There are {a} bags, and each bag holds {b} {things}. How many {things} are there in all?",
    ),
}


class ArithmeticConfig(PluginConfig):
    """Settings of `arithmetic`. The default is the sum of two two-digit numbers."""

    operators: tuple[Operator, ...] = Field(
        default=("+",), min_length=1, description="some of + - *"
    )
    left_digits: tuple[int, int] = Field(
        default=(2, 2), description="fewest and most digits of the first operand, 1 to 12"
    )
    right_digits: tuple[int, int] = Field(
        default=(2, 2), description="fewest and most digits of the second operand, 1 to 12"
    )
    allow_negative: bool = Field(
        default=False, description="differences may be negative; only with style: number"
    )
    style: Literal["number", "word", "mixed"] = Field(
        default="number", description="number: What is 23 + 45?; word: a short story; mixed: both"
    )
    question: str = Field(
        default="What is {a} {op} {b}?",
        description="wording of a plain problem; needs {a} {op} {b}",
    )
    worked: str = Field(
        default="{a} {op} {b} = {answer}", description="worked answer for SFT; needs {answer}"
    )
    match: Literal["last_number", "first_number", "exact"] = Field(
        default="last_number", description="what of the response is compared with the answer"
    )
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 problems, how many are never trained on"
    )

    @field_validator("left_digits", "right_digits")
    @classmethod
    def _range(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= value[0] <= value[1] <= 12:
            raise ValueError("expected [fewest, most] with 1 <= fewest <= most <= 12")
        return value

    @field_validator("question", "worked")
    @classmethod
    def _template(cls, value: str, info: ValidationInfo) -> str:
        needed = {"a", "op", "b"} if info.field_name == "question" else {"answer"}
        names = {name for _, name, _, _ in Formatter().parse(value) if name is not None}
        if not needed <= names <= {"a", "op", "b", "answer"} or names - needed - {"a", "op", "b"}:
            raise ValueError(f"expected a text with {sorted('{' + n + '}' for n in needed)}")
        return value


def operand_range(digits: tuple[int, int]) -> range:
    """All numbers with that many digits; 0 is a one-digit number."""
    return range(0 if digits[0] == 1 else 10 ** (digits[0] - 1), 10 ** digits[1])


def canonical(left: int, operator: str, right: int, allow_negative: bool) -> str:
    """The key of a problem: a + b and b + a are one problem, and so are a * b and b * a."""
    if operator == "-":
        swap = right > left and not allow_negative
        left, right = (right, left) if swap else (left, right)
    else:
        left, right = min(left, right), max(left, right)
    return f"{left} {operator} {right}"


class ArithmeticTask(Task[ArithmeticConfig]):
    """Problems "What is a + b?" with answer a + b and worked answer "a + b = c".

    Formula: key = "a op b" with the operands of + and * in ascending order; held out if and only if
    sha256(key) mod 1000 < held_out_permille. Wording and order of the operands follow from the key,
    so a problem reads the same in every stage.
    Source: own; the form follows the arithmetic tests of arXiv:2005.14165, section 3.9.1.
    """

    name = "arithmetic"
    Config = ArithmeticConfig

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split` in an order decided by `seed`."""
        rng = random.Random(f"arithmetic|{split}|{seed}")
        keys = self._listed(split)
        if keys is not None:
            rng.shuffle(keys)
        else:
            lefts, operators, rights = self._space()
            found: dict[str, None] = {}
            share = self.config.held_out_permille
            odds = (share if split == "held_out" else 1000 - share) / 1000
            # 100 times the draws that are needed on average: only a space nearly used up fails.
            for _ in range(int(100 * (count + 100) / odds)):
                if len(found) >= count:
                    break
                a, op, b = rng.choice(lefts), rng.choice(operators), rng.choice(rights)
                key = canonical(a, op, b, self._negative)
                if self._split(key) == split:
                    found[key] = None
            keys = list(found)
        if len(keys) < count:
            fix = "ask for fewer, or allow more digits, operators or held_out_permille"
            raise too_few(self.name, split, count, len(keys), fix)
        return [self._problem(key) for key in keys[:count]]

    def available(self, split: Split) -> int | None:
        """The size of a space small enough to be listed; else None."""
        keys = self._listed(split)
        return None if keys is None else len(keys)

    def _space(self) -> tuple[range, tuple[str, ...], range]:
        """Left operands, operators, right operands."""
        config = self.config
        operators = tuple(dict.fromkeys(config.operators))
        return operand_range(config.left_digits), operators, operand_range(config.right_digits)

    def _listed(self, split: Split) -> list[str] | None:
        """Every key of `split`, or None when there are too many to list."""
        lefts, operators, rights = self._space()
        if len(operators) * len(lefts) * len(rights) > MAX_LISTED:
            return None
        every = {
            canonical(a, op, b, self._negative): None
            for op in operators
            for a in lefts
            for b in rights
        }
        return [key for key in every if self._split(key) == split]

    @property
    def _negative(self) -> bool:
        # A story about giving away more than one has makes no sense.
        return self.config.allow_negative and self.config.style == "number"

    def _split(self, key: str) -> Split:
        return split_of(key, self.config.held_out_permille)

    def _problem(self, key: str) -> Problem:
        """The problem of a key; all that looks random in it is a hash of the key."""
        draw = random.Random(stable_hash(key))
        first, operator, second = key.split()
        a, b = int(first), int(second)
        left = operand_range(self.config.left_digits)
        right = operand_range(self.config.right_digits)
        if operator != "-":
            fitting = [(x, y) for x, y in ((a, b), (b, a)) if x in left and y in right]
            a, b = draw.choice(fitting)
        result = {"+": a + b, "-": a - b, "*": a * b}[operator]
        as_story = self.config.style == "word" or (
            self.config.style == "mixed" and draw.random() < 0.5
        )
        prompt = self.config.question.format(a=a, op=operator, b=b)
        if as_story:
            story = draw.choice(STORIES[operator])
            prompt = story.format(a=a, b=b, name=draw.choice(NAMES), things=draw.choice(THINGS))
        worked = self.config.worked.format(a=a, op=operator, b=b, answer=result)
        return Problem(
            key, prompt, str(result), worked, {"style": "word" if as_story else "number"}
        )

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Compare the number that `match` picks from `text` by value.

        The text is taken as it is: a response cut off at "= 6" reads as 6, which is wrong for 68.
        """
        if self.config.match == "exact":
            answer = text.strip()
            return Verdict(float(answer == problem.answer), answer or None)
        numbers = numbers_in(text)
        if not numbers:
            return Verdict(0.0, None)
        answer = numbers[-1 if self.config.match == "last_number" else 0]
        return Verdict(float(same_number(answer, problem.answer)), answer)
