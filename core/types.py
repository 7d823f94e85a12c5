"""Values that cross a boundary: problems, completions, scores. Plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "stop_string"]
ScoreStatus = Literal["ok", "unscored", "error", "timeout", "crashed"]
Split = Literal["train", "held_out"]

ArtifactKind = str
"""What an artifact is: one of `ARTIFACT_KINDS`, or another that a plugin's stage makes."""
ARTIFACT_KINDS = (
    "model",
    "reward_model",
    "evaluation",
    "registration",
    "report",
    "rollouts",
    "dataset",
    "teacher_record",
    "approval",
)


RUN_SECTIONS = ("seed", "task", "engine", "model", "evaluation", "name")
"""Sections of a run's config that can be part of a stage's identity."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One thing a stage made: where it is, what it holds (sha256), where it comes from."""

    kind: ArtifactKind
    uri: str
    digest: str
    stage: str
    parents: tuple[str, ...] = ()
    mlflow_run_id: str = ""
    mlflow_model_id: str = ""

    @property
    def path(self) -> Path:
        return Path(self.uri)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's message makes. `arguments` is a JSON object; `id` may be empty."""

    name: str
    arguments: Mapping[str, Any]  # Any: JSON values
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in the form that chat APIs share.

    `reasoning` is an assistant's thinking, kept apart from its `content`. `name` and `tool_call_id`
    say which call a tool's message answers. `malformed` are the texts of calls that could not be
    read as calls, in a message that was parsed from tokens. With `train` False the message is
    never learned from.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    name: str = ""
    tool_call_id: str = ""
    malformed: tuple[str, ...] = ()
    train: bool = True


ToolSchema = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {name, description,
parameters}}."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt of a task, with what its verifier and SFT need.

    `key` is the canonical content of the problem: two problems with one key are the same problem,
    and a key belongs to exactly one split. `messages` is what the model is asked, with `tools` at
    hand; left out, it is `prompt` as one user message. `prompt` is the text that people, judges and
    tables read.
    """

    key: str
    prompt: str
    answer: str
    worked: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSchema, ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            object.__setattr__(self, "messages", (Message("user", self.prompt),))


TASK = "task_of_mixture"
"""The metadata that says which of several tasks a problem is of."""


def of_tasks(problems: Sequence[Problem]) -> dict[str, list[int]]:
    """Places of the problems of each task, sorted by its label; empty where there is one task."""
    found: dict[str, list[int]] = {}
    for place, problem in enumerate(problems):
        if TASK in problem.metadata:
            found.setdefault(problem.metadata[TASK], []).append(place)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a task's verifier says of one answer: `correct` in [0, 1] and what it read."""

    correct: float
    parsed: str | None


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict on one step of an answer: `correct` in [0, 1]; `end` is the character after."""

    end: int
    correct: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine draws responses. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    A response also ends with the token that completes one of `stop_strings` in its text; that token
    is kept. With `entropy`, each completion carries the entropy of every draw: of the model's own
    next-token distribution at temperature 1, before top-k and top-p. `max_tokens_each` is a limit
    for each prompt in addition to `max_tokens`, the largest of them; empty = the same for all.
    `seeds_each` stands in the place of `seed` for each prompt.
    """

    num_generations: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    entropy: bool = False
    max_tokens_each: tuple[int, ...] = ()
    seeds_each: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as the engine sampled it: token ids in, token ids out, nothing re-tokenised.

    `logprobs` are nats under the distribution that was sampled from (log-softmax of logits /
    temperature, renormalised when top-p or top-k cut it), one per token id. The end-of-sequence
    token is part of `token_ids` when it was sampled; `finish_reason` is `length` when the limit cut
    the response, `stop_string` when it ended with one of `SamplingParams.stop_strings`.

    `entropies` are nats, one per token, when they were asked for: of the model's next-token
    distribution at
    temperature 1 before any cut, exact or, from engines that know no more, over its 20 likeliest
    tokens, renormalised. In a response of several turns, `sampled` says of each token whether the
    policy sampled it (empty = all); the others are observations, with log-prob and entropy 0.
    `node_ids` name the tree node that made each token, in responses that share prefixes. `counts`
    are what its episode counted, by name (`turns`, `calls`, `failed`).

    Of an episode with an environment, `turn_ends` are the tokens after which each turn of the
    policy ended, `turn_rewards` what the environment gave for it (None = nothing), `state_keys`
    digests of what the policy was shown before it. `reward` is the environment's own score of the
    whole episode; `failed` says why the episode is not to be learned from (empty = it is).

    Responses of one `episode` (a number within the group; -1 = this response alone) are branches
    of it, the one with its last turn first. `prompt_ids` are the response's own where they are not
    the group's. `elsewhere` marks tokens that an earlier branch has, sampled or not (empty = none).
    `versions` are the policy's at each token, where weights changed on the way (empty = they did
    not).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    seed: int
    engine: str
    engine_version: str
    entropies: tuple[float, ...] = ()
    sampled: tuple[bool, ...] = ()
    node_ids: tuple[int, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float | None, ...] = ()
    state_keys: tuple[int, ...] = ()
    reward: float | None = None
    failed: str = ""
    episode: int = -1
    prompt_ids: tuple[int, ...] = ()
    elsewhere: tuple[bool, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def oldest_version(self) -> int:
        """That of the oldest policy which sampled of it."""
        return min(self.versions, default=self.policy_version)


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward plugin sees of one response.

    `response_ids` are the tokens that the policy sampled. Of a response of several turns, `text` is
    the last one, what the policy said after the last observation (empty when an observation is the
    end), so that no verifier takes a tool's output for an answer; `turns` is what the policy said
    in each turn, and `transcript` is everything, observations included. In a single turn all three
    are the response. `token_ids` are all tokens up to the last sampled one, where others wrote some
    of them (empty = `response_ids`). `outcome` is the environment's own score of the episode, None
    without one.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    text: str
    truncated: bool
    verdict: Verdict
    steps: tuple[StepVerdict, ...] = ()
    transcript: str = ""
    turns: tuple[str, ...] = ()
    outcome: float | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one sample; `value` None means it could not be scored: never a zero.

    `status` says why: `unscored` (the reward has nothing to say of it), `error` (it raised, or
    returned what is not a score), `timeout`, `crashed` (its process died). `detail` is for people.
    `components` are the named parts of the value; `steps` the scores of the response's steps, from
    rewards that give them.
    """

    value: float | None
    status: ScoreStatus = "ok"
    detail: str = ""
    steps: tuple[StepVerdict, ...] = ()
    components: Mapping[str, float] = field(default_factory=dict)
