"""How many problems, rows and tokens the stages of a run process.

Counts are the run's own: an evaluation of a file with 60 held-out rows measures 60, whatever
`num_problems` allows. Lengths are those of a sample of the task's problems.
"""

from __future__ import annotations

import logging
import math
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
from posttrain.core.errors import PosttrainError
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


class Preferences(NamedTuple):
    """Rows that a stage trains on and holds out: at most so many if they come of `sampled` answers.

    `answer` is the mean tokens of an answer in a file, else 0; `steps` are those of all epochs.
    """

    train: int
    held_out: int
    steps: int
    sampled: int = 0
    answer: int = 0


class Supervised(NamedTuple):
    """Rows that are learned from, of `tokens` in the mean, and steps of at most `batch` of them."""

    rows: int
    steps: int
    batch: int
    tokens: float
    longest: int


class RunData:
    """What the task and the files of a run hold."""

    def __init__(self, config: RunConfig, manager: PluginManager) -> None:
        self.config, self.manager = config, manager
        self.task: Task[Any] = manager.task(config.task)
        self._preferences: dict[str, Preferences] = {}
        self._sizes: dict[str, list[int]] = {}

    def count(self, split: Split, wanted: int) -> int:
        """`wanted` problems of a split, or all it holds if those are fewer."""
        available = self.task.available(split)
        return wanted if available is None else min(wanted, available)

    def preferences(self, stage: PreferenceDataStage) -> Preferences:
        """The rows of a stage; a file is read once."""
        key = stage.model_dump_json()
        if key not in self._preferences:
            self._preferences[key] = self._read(stage)
        return self._preferences[key]

    def supervised(self, stage: SftStage, worked: float = ASSUMED_TOKENS) -> Supervised:
        """The rows of a stage; those of the task have `worked` tokens. A file is read once."""
        sizes = [size for source in stage.data or () for size in self._sizes_of(source.path)]
        tokens = sum(sizes) / len(sizes) if sizes else worked
        batch = stage.batch_size or max(1, int((stage.max_tokens_per_batch or 1) / tokens))
        rows = len(sizes)
        if stage.data is None:
            rows = self.count("train", stage.steps * batch if stage.steps else LARGEST)
        rows -= round(rows * stage.held_out_fraction)
        steps = stage.steps or (stage.epochs or 1) * math.ceil(rows / batch)
        return Supervised(rows, steps, batch, tokens, max(sizes, default=math.ceil(worked)))

    def _sizes_of(self, path: str) -> list[int]:
        """Tokens of each row, by its characters."""
        if path not in self._sizes:
            self._sizes[path] = [
                max(1, _tokens(example.text or chat_text(example.messages, example.tools)))
                for _, example in examples(data_rows(path, "data"))
            ]
        return self._sizes[path]

    def labelled_steps(self, stage: ProcessRewardModelStage) -> Preferences:
        """The answers of a stage, each a row; a file is read once for each call."""
        if stage.data is None:
            sampled = stage.num_prompts * stage.num_generations
            keys, answer = [str(i % stage.num_prompts) for i in range(sampled)], 0
        else:
            rows = read_labelled_steps(stage.data, "data", stage.separator)
            sampled, keys = 0, [row.problem.key for row in rows]
            answer = math.ceil(sum(_tokens("".join(row.steps)) for row in rows) / len(rows))
        kept_out = held_out_keys(keys, stage.held_out_fraction)
        train = sum(key not in kept_out for key in keys)
        steps = stage.epochs * math.ceil(train / stage.batch_size)
        return Preferences(train, len(keys) - train, steps, sampled, answer)

    def _read(self, stage: PreferenceDataStage) -> Preferences:
        sampled = answer = 0
        online = stage.online if isinstance(stage, PreferenceStage) else None
        if online is not None:
            prompts = online.rounds * online.prompts_per_round
            pairs = min(stage.pairs_per_prompt, online.num_generations // 2)
            return Preferences(prompts * pairs, 0, online.steps, prompts * online.num_generations)
        if stage.data is None:
            sampled = stage.num_prompts * stage.num_generations
            problems = self.count("train", stage.num_prompts)
            keys = [str(i % problems) for i in range(stage.num_prompts)] * stage.pairs_per_prompt
        else:
            rows = self.task.preferences() if stage.data == TASK_DATA else []
            if stage.data != TASK_DATA:
                rows = read_preference_rows(
                    stage.data, "data", ("pairs", "labels"), stage.pairs_from_scores
                ).rows
            answers = [_tokens(text) for row in rows for text in row.texts()]
            answer = math.ceil(sum(answers) / max(1, len(answers)))
            keys = [row.key for row in rows]
        kept_out = held_out_keys(keys, stage.held_out_fraction)
        train = sum(key not in kept_out for key in keys)
        steps = stage.epochs * math.ceil(train / stage.batch_size)
        return Preferences(train, len(keys) - train, steps, sampled, answer)


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
        tokenizer, how = _tokenizer(model, data), "measured"
        try:
            problems = data.task.problems("train", data.count("train", SAMPLE), seed)
        except (PosttrainError, OSError) as error:
            logger.info("no problem could be read: %s", error)
            return cls(ASSUMED_TOKENS, None, 0, f"prompts of {ASSUMED_TOKENS} tokens, assumed")
        if tokenizer is None:
            how = f"at {CHARACTERS_PER_TOKEN} characters per token, without a tokenizer"
            prompts = [tuple(range(_tokens(each.prompt))) for each in problems]
            worked = [_tokens(each.worked) for each in problems if each.worked]
        else:
            prompts = [tokenizer.encode_prompt(each) for each in problems]
            worked = [len(tokenizer.encode_response(p.worked)) for p in problems if p.worked]
        shared = 0 if tokenizer is None else common_start(prompts)
        prompt, answer = sum(map(len, prompts)) / len(prompts), sum(worked) / max(1, len(worked))
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
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def _tokenizer(model: KnownModel, data: RunData) -> ChatTokenizer | None:
    from transformers import AutoTokenizer

    if model.source is None:
        return None
    try:
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
