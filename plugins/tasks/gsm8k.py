"""GSM8K: grade-school problems with worked solutions that end in `#### <number>`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.contracts.preference_rows import PreferenceRow
from posttrain.core.data.preference import marked_pairs
from posttrain.core.data.problem_sets import problems_digest
from posttrain.core.data.tables import HubSource, hub_rows, parquet_rows, resolve_revision
from posttrain.core.errors import DataError
from posttrain.core.math.answers import final_number, only_number_after
from posttrain.core.math.numbers import is_number, same_number
from posttrain.core.math.splits import loose_key, text_key, too_few
from posttrain.core.runtime.json_files import JsonRow, read_json_lines
from posttrain.core.store.manifests import combine_digests, file_digest
from posttrain.core.types import Problem, Split, Verdict

MARKER = "####"
CALCULATOR = re.compile(r"<<[^<>\n]*>>")
EXAMPLE = '{"question": ..., "answer": "... #### 72"}'
FIX = "download it, and set `path` to a folder with train.jsonl and test.jsonl"
TEMPLATE = (
    "{question}\n\nReason step by step. End with a line that holds four hash signs and the answer "
    "as a number, such as: #### 42"
)


class Gsm8kConfig(PluginConfig):
    """Settings of `gsm8k`. Without `path` the data come from the hub, and stay in its cache."""

    path: Path | None = Field(
        default=None,
        description="folder with train and test as .jsonl or .parquet, or the file of training "
        "problems; null = from the hub",
    )
    held_out_path: Path | None = Field(
        default=None, description="file of held-out problems; needed when `path` is a file"
    )
    source: str = Field(default="openai/gsm8k", min_length=3, description="data set on the hub")
    subset: str = Field(default="main", description="its subset: main or socratic")
    revision: str | None = Field(default=None, description="its revision; null = the newest")
    prompt: str = Field(default=TEMPLATE, description="what is asked; needs {question}")
    keep_calculator: bool = Field(
        default=False, description="leave annotations such as <<48/2=24>> in worked solutions"
    )
    strict: bool = Field(
        default=False,
        description="read the answer only from a line `#### <number>`; else also from \\boxed{}, "
        "else the last number",
    )
    solutions: Path | None = Field(
        default=None,
        description="GSM8K's example_model_solutions.jsonl, for stages with `data: task`",
    )
    pairs_per_question: int = Field(
        default=2, ge=1, description="pairs of a right and a wrong solution, at most, per question"
    )

    @field_validator("prompt")
    @classmethod
    def _has_place(cls, value: str) -> str:
        if value.count("{question}") != 1:
            raise ValueError("expected a text with {question} in it, once")
        return value

    @model_validator(mode="after")
    def _both_files(self) -> Gsm8kConfig:
        if self.held_out_path is not None and self.path is None:
            raise ValueError("held_out_path needs a path for the training problems next to it")
        return self


class Gsm8kTask(Task[Gsm8kConfig]):
    """GSM8K: the split `train` trains, `test` is held out.

    Formula: key = the question, in Unicode's NFC; answer = the number after ####; worked =
    the solution without calculator annotations. A response is right when its final number (after
    the last ####, else in the last \\boxed{}, else the last one) has the answer's value, exactly.
    Preferences are the marked solutions of `solutions`, without the held-out questions.
    Source: Cobbe et al., arXiv:2110.14168; data under the MIT licence.
    """

    name = "gsm8k"
    Config = Gsm8kConfig
    gives_preferences = True

    def __init__(self, config: Gsm8kConfig) -> None:
        super().__init__(config)
        self._files: dict[str, Path] = {}
        self._source = ""
        train, test = self._rows()
        held_out = self._problems(test)
        self._splits: dict[Split, list[Problem]] = {
            "train": list(self._problems(train, held_out).values()),
            "held_out": list(held_out.values()),
        }

    def _rows(self) -> tuple[Iterable[JsonRow], Iterable[JsonRow]]:
        """Rows of the two splits; notes where they come from."""
        config = self.config
        if config.path is None:
            hub = resolve_revision(HubSource(config.source, config.subset, config.revision), FIX)
            self._source = f"hub {hub}"
            return hub_rows(hub, "train", FIX), hub_rows(hub, "test", FIX)
        place = config.path.expanduser()
        if place.is_dir():
            train, test = _file(place, "train"), config.held_out_path or _file(place, "test")
        elif config.held_out_path is None:
            wanted = "a folder with train.jsonl and test.jsonl, or a held_out_path with a file"
            raise DataError(
                f"task.path is '{config.path}', expected {wanted}: correct it; relative paths "
                f"start at {Path.cwd()}"
            )
        else:
            train, test = place, config.held_out_path
        self._files = {"train": train.expanduser(), "held_out": test.expanduser()}
        self._source = ", ".join(str(path) for path in self._files.values())
        return _read(train, "task.path"), _read(test, "task.held_out_path")

    def _problems(
        self, rows: Iterable[JsonRow], others: Mapping[str, Problem] | None = None
    ) -> dict[str, Problem]:
        """Problems of a split by key, none of them among `others`."""
        found: dict[str, Problem] = {}
        for row in rows:
            problem = self._problem(row)
            known = found.setdefault(problem.key, problem)
            if others and problem.key in others:
                known, reported = others[problem.key], "the same question in both splits"
            elif not same_number(known.answer, problem.answer):
                reported = f"one question with the answers {known.answer} and {problem.answer}"
            else:
                continue
            raise DataError(
                f"{known.metadata['source']} and {row.where} hold {reported}: remove one"
            )
        return found

    def _problem(self, row: JsonRow) -> Problem:
        question, solution = row.values.get("question"), row.values.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str) or not question.strip():
            raise DataError(
                f"{row.where} needs the texts 'question' and 'answer', such as {EXAMPLE}; it has "
                f"{sorted(row.values)}: correct this line"
            )
        body, found, answer = solution.rpartition(MARKER)
        if not found or not is_number(answer):
            raise DataError(
                f"{row.where}: the solution ends in {solution[-40:]!r}, expected a last line "
                "'#### <number>': correct this line"
            )
        if not self.config.keep_calculator:
            body = CALCULATOR.sub("", body)
        number = answer.strip().replace(",", "")
        worked = f"{body}{MARKER} {number}"
        problem = self.rewritten(question, number)
        return Problem(problem.key, problem.prompt, number, worked, {"source": row.where})

    def question(self, problem: Problem) -> str:
        """The question without the instructions around it."""
        before, _, after = self.config.prompt.partition("{question}")
        return problem.prompt.removeprefix(before).removesuffix(after)

    def rewritten(self, question: str, answer: str) -> Problem:
        """The question in the task's template; its worked answer is the last line alone."""
        prompt = self.config.prompt.replace("{question}", question)
        return Problem(text_key(question), prompt, answer, f"{MARKER} {answer}")

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split` in an order decided by `seed`."""
        rows = list(self._splits[split])
        if len(rows) < count:
            raise too_few(self.name, split, count, len(rows), "ask for fewer")
        random.Random(f"gsm8k|{split}|{seed}").shuffle(rows)
        return rows[:count]

    def available(self, split: Split) -> int | None:
        """How many problems the split has."""
        return len(self._splits[split])

    def preferences(self) -> list[PreferenceRow]:
        """Pairs of right and wrong model solutions to questions that are not held out."""
        if self.config.solutions is None:
            raise DataError(
                "a stage has `data: task`, but the task has no marked solutions: set "
                "task.solutions to GSM8K's example_model_solutions.jsonl"
            )
        held_out = {loose_key(problem.key) for problem in self._splits["held_out"]}
        rows = read_json_lines(self.config.solutions, "task.solutions", '{"question": ..., ...}')
        count = self.config.pairs_per_question
        return marked_pairs(rows, self.config.prompt, held_out, count, self._restyled)

    def _restyled(self, solution: str) -> str:
        """A model's solution in the form of a worked one: `A: 18` at its end is `#### 18`."""
        body, found, answer = solution.rpartition("A:")
        text = f"{body}{MARKER} {answer.strip()}" if found else solution
        return text if self.config.keep_calculator else CALCULATOR.sub("", text)

    def fingerprint(self) -> str:
        """Digest of the files; of what was read, when it came from the hub."""
        named = {name: file_digest(path) for name, path in self._files.items()}
        if not named:
            rows = [problem for split in self._splits.values() for problem in split]
            named["hub"] = problems_digest(rows)
        if self.config.solutions is not None:
            named["solutions"] = file_digest(self.config.solutions.expanduser())
        return combine_digests(named)

    def source(self) -> str:
        """The files, or the data set on the hub and its commit."""
        solutions = self.config.solutions
        return self._source if solutions is None else f"{self._source}, {solutions}"

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Whether the final number of `text` has the value of the answer."""
        found = only_number_after(text, MARKER) if self.config.strict else final_number(text)
        return Verdict(float(found is not None and same_number(found, problem.answer)), found)


def _file(folder: Path, split: str) -> Path:
    """The file of a split in a folder, laid out as on GitHub or as on the hub."""
    names = (f"{split}.jsonl", f"{split}.parquet", f"{split}-00000-of-00001.parquet")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise DataError(
            f"task.path '{folder}' has no {split}.jsonl and no {split}.parquet: put it there, or "
            "name the files in path and held_out_path"
        )
    return found[0]


def _read(path: Path, setting: str) -> Iterable[JsonRow]:
    if path.suffix == ".parquet":
        return parquet_rows(path, ("question", "answer"), setting)
    return read_json_lines(path, setting, EXAMPLE)
