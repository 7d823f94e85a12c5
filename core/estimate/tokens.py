"""How many problems, rows and tokens the stages of a run process.

Counts are the run's own: an evaluation of a file with 60 held-out rows measures 60, whatever
`num_problems` allows. Lengths are those of a sample of the task's problems.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from posttrain.core.config.base import TASK_DATA, StageBase
from posttrain.core.config.preference_stages import (
    PreferenceDataStage,
    PreferenceStage,
    ProcessRewardModelStage,
)
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import Renderer, Task
from posttrain.core.data.formats import examples
from posttrain.core.data.messages import chat_text
from posttrain.core.data.preference_files import read_preference_rows
from posttrain.core.data.rows import data_rows
from posttrain.core.data.steps import read_labelled_steps
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import PosttrainError, reading_model
from posttrain.core.estimate.shape import KnownModel
from posttrain.core.math.splits import held_out_keys
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.sampling import common_start
from posttrain.core.runtime.config_model import LARGEST
from posttrain.core.types import Split

logger = logging.getLogger(__name__)

SAMPLE, ASSUMED_TOKENS, CHARACTERS_PER_TOKEN = 64, 64, 4
"""Problems whose lengths are measured; tokens of a text if there are none; for want of a tokenizer,
the characters of a token."""

JudgedStage = PreferenceDataStage | ProcessRewardModelStage


class Given(NamedTuple):
    """Rows that a stage trains on and holds out, and its steps of at most `batch` of them.

    If they come of `sampled` answers, they are at most so many. In a file a row, or a judged
    answer, has `tokens` in the mean and `longest` at most; else these are 0.
    """

    train: int
    held_out: int
    steps: int
    batch: int
    tokens: float = 0.0
    longest: int = 0
    sampled: int = 0


class RunData:
    """What the task and the files of a run hold. A stage's files are read once."""

    def __init__(self, config: RunConfig, manager: PluginManager) -> None:
        self.config, self.manager = config, manager
        self.task: Task[Any] = manager.task(config.task)
        self._read: dict[str, list[tuple[str, list[int]]]] = {}

    def count(self, split: Split, wanted: int) -> int:
        """`wanted` problems of a split, or all it holds if those are fewer."""
        available = self.task.available(split)
        return wanted if available is None else min(wanted, available)

    def supervised(self, stage: SftStage, worked: float = ASSUMED_TOKENS) -> Given:
        """The rows of a stage; those of the task have `worked` tokens."""
        sizes = [size for _, texts in self._rows(stage) for size in texts]
        tokens = sum(sizes) / len(sizes) if sizes else worked
        batch = stage.batch_size or max(1, int((stage.max_tokens_per_batch or 1) / tokens))
        rows = len(sizes)
        if stage.data is None:
            rows = self.count("train", stage.steps * batch if stage.steps else LARGEST)
        held_out = round(rows * stage.held_out_fraction)
        steps = stage.steps or (stage.epochs or 1) * math.ceil((rows - held_out) / batch)
        longest = max(sizes, default=math.ceil(worked))
        return Given(rows - held_out, held_out, steps, batch, tokens, longest)

    def judged(self, stage: JudgedStage) -> Given:
        """The rows of a stage, which are pairs or answers, split as the stage splits them."""
        if isinstance(stage, PreferenceStage) and (online := stage.online) is not None:
            prompts = online.rounds * online.prompts_per_round
            pairs = prompts * min(stage.pairs_per_prompt, online.num_generations // 2)
            sampled = prompts * online.num_generations
            return Given(pairs, 0, online.steps, stage.batch_size, sampled=sampled)
        rows, sampled = self._rows(stage), 0
        keys, sizes = [key for key, _ in rows], [size for _, texts in rows for size in texts]
        if stage.data is None:
            each = stage.num_generations
            if isinstance(stage, PreferenceDataStage):
                each = stage.pairs_per_prompt
            sampled = stage.num_prompts * stage.num_generations
            problems = self.count("train", stage.num_prompts)
            keys = [str(i % problems) for i in range(stage.num_prompts) if problems] * each
        kept_out = held_out_keys(keys, stage.held_out_fraction)
        train = sum(key not in kept_out for key in keys)
        steps = stage.epochs * math.ceil(train / stage.batch_size)
        mean = math.ceil(sum(sizes) / max(1, len(sizes)))
        return Given(train, len(keys) - train, steps, stage.batch_size, mean, mean, sampled)

    def _rows(self, stage: SftStage | JudgedStage) -> list[tuple[str, list[int]]]:
        """Of each row in the stage's files the key of its prompt, and the tokens of its texts."""
        key = stage.model_dump_json()
        if key not in self._read:
            rows = _texts(stage, self.task)
            self._read[key] = [(prompt, [*map(_tokens, texts)]) for prompt, texts in rows]
        return self._read[key]


def _texts(stage: SftStage | JudgedStage, task: Task[Any]) -> Iterator[tuple[str, Iterable[str]]]:
    """Of each row in a stage's files the key of its prompt and its answers; of a conversation only
    the text as a whole."""
    if isinstance(stage, SftStage):
        for source in stage.data or ():
            for _, example in examples(data_rows(source.path, "data")):
                yield "", [example.text or chat_text(example.messages, example.tools)]
    elif stage.data is None:
        return
    elif isinstance(stage, ProcessRewardModelStage):
        for answer in read_labelled_steps(stage.data, "data", stage.separator):
            yield answer.problem.key, ["".join(answer.steps)]
    elif stage.data == TASK_DATA:
        yield from ((row.key, row.texts()) for row in task.preferences())
    else:
        scores = stage.pairs_from_scores
        for row in read_preference_rows(stage.data, "data", ("pairs", "labels"), scores).rows:
            yield row.key, row.texts()


class Lengths(NamedTuple):
    """Mean tokens of a prompt, mean and longest tokens of a worked answer (None: the task has
    none), and how they are known. All prompts begin with the same `shared` tokens."""

    prompt: float
    worked: tuple[float, int] | None
    shared: int
    how: str

    @classmethod
    def measured(cls, data: RunData, model: KnownModel, seed: int) -> Lengths:
        """Of a sample of training problems; assumed lengths if there are none."""
        try:
            problems = data.task.problems("train", data.count("train", SAMPLE), seed)
        except (PosttrainError, OSError) as error:
            logger.info("no problem could be read: %s", error)
            problems = []
        if not problems:
            return cls(ASSUMED_TOKENS, None, 0, f"prompts of {ASSUMED_TOKENS} tokens, assumed")
        if (tokenizer := _tokenizer(model, data)) is None:
            how = f"at {CHARACTERS_PER_TOKEN} characters per token, without a tokenizer"
            prompts = [_tokens(each.prompt) for each in problems]
            worked, shared = [_tokens(each.worked) for each in problems if each.worked], 0
        else:
            encoded, how = [tokenizer.encode_prompt(each) for each in problems], "measured"
            prompts, shared = [*map(len, encoded)], common_start(encoded)
            worked = [len(tokenizer.encode_response(p.worked)) for p in problems if p.worked]
        prompt, answer = sum(prompts) / len(prompts), sum(worked) / max(1, len(worked))
        text = f"prompts of {prompt:.0f} tokens ({shared} of them the same in all)"
        text += f", worked answers of {answer:.0f}: mean of {len(problems)} problems, {how}"
        return cls(prompt, (answer, max(worked)) if worked else None, shared, text)

    def response(self, config: RunConfig, stage: StageBase, limit: int) -> tuple[float, int]:
        """Assumed mean and longest response of the model that a stage reads.

        A model that an sft stage of this run trained answers as long as the worked answers; any
        other model answers up to the limit.
        """
        source = stage.inputs.get("model", "")
        while source in config.stages:
            if self.worked and isinstance(config.stages[source], SftStage):
                return min(self.worked[0], limit), min(self.worked[1], limit)
            source = config.stages[source].inputs.get("model", "")
        return limit, limit


def _tokens(text: str) -> int:
    return max(1, math.ceil(len(text) / CHARACTERS_PER_TOKEN))


def _tokenizer(model: KnownModel, data: RunData) -> ChatTokenizer | None:
    from transformers import AutoTokenizer

    if model.source is None:
        return None
    try:
        with reading_model(f"the tokenizer of '{model.source}'", "it is not used"):
            found = AutoTokenizer.from_pretrained(
                model.source, local_files_only=True, trust_remote_code=False, **model.options
            )
        component = data.config.model.renderer
        renderer: Renderer[Any] = data.manager.build(Renderer, component.name, component.fields())
        return ChatTokenizer(found, data.config.model.system_prompt, renderer=renderer)
    except (OSError, ValueError, PosttrainError) as error:
        logger.info("no tokenizer in %s: %s", model.source, error)
        return None


class Rows(NamedTuple):
    """Rows that go through the model: `group` of them share a prompt, `micro` go at a time.

    `prompt` and `response` are mean tokens, `longest` those of the longest response; the first
    `shared` tokens of all prompts are the same, and are computed once in each pass.
    """

    number: int
    group: int
    micro: int
    prompt: float
    response: float
    longest: int
    shared: int

    @property
    def passes(self) -> int:
        """Micro-batches."""
        return math.ceil(self.number / max(1, self.micro))

    @property
    def tokens(self) -> float:
        """Tokens that the layers read: each group's prompt once, not a response's last token."""
        own = self.number / self.group * (self.prompt - self.shared)
        return self.passes * self.shared + own + self.number * (self.response - 1)
