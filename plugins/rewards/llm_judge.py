"""A language model's grade of a response, from any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from posttrain.core.contracts import PluginConfig, Reward, RewardContext
from posttrain.core.rewards.judge import (
    Budget,
    ChatClient,
    Endpoint,
    Message,
    Pace,
    Reply,
    ReplyCache,
    api_key,
    chat,
    key_of,
    score_by_pattern,
    score_in_json,
)
from posttrain.core.types import RewardSample, Score

RUBRIC = """How well does the response answer the question? Judge nothing else.

Question:
{prompt}

{response}

Think briefly, then end with a line 'Score: N', N a number from {low} (useless) to {high} (best)."""


class LlmJudgeConfig(PluginConfig):
    """Settings of `llm_judge`."""

    base_url: str = Field(description="the endpoint up to /v1, as http://127.0.0.1:8000/v1")
    model: str = Field(min_length=1, description="name of the model at the endpoint")
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="NAME of the environment variable with the key; the key is written nowhere",
    )
    rubric: str = Field(
        default=RUBRIC,
        description="what the judge is asked; {prompt}, {response}, {answer} (the reference), "
        "{low} and {high} are filled in",
    )
    low: float = Field(default=0.0, description="lowest score of the rubric")
    high: float = Field(default=10.0, description="highest score of the rubric")
    rescale: bool = Field(default=True, description="map [low, high] to [0, 1]")
    reply: Literal["pattern", "json"] = Field(
        default="pattern", description="where a reply has its score: `score_pattern` or `json_key`"
    )
    score_pattern: str = Field(
        default=r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)",
        description="regular expression whose group 1 is the score; the last match counts",
    )
    json_key: str = Field(default="score", description="key of the score in the last JSON object")
    votes: int = Field(
        default=1, ge=1, le=1_000, description="replies to a response, whose median counts"
    )
    temperature: float = Field(default=0.0, ge=0, le=100, description="of the judge; 0 = greedy")
    max_tokens: int = Field(default=512, ge=1, description="tokens of a reply, at most")
    cache: str | None = Field(
        default="~/.cache/posttrain/llm_judge",
        description="folder of replies that need not be asked for again; null = none",
    )
    requests_per_second: float | None = Field(default=None, gt=0, description="null = no limit")
    max_concurrency: int = Field(default=8, ge=1, le=100_000, description="requests at one time")
    max_requests: int | None = Field(
        default=None, ge=1, description="attempts in all, since this stage began; null = no limit"
    )
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="tokens of chats and replies in all; null = no limit"
    )
    timeout_s: float = Field(default=60.0, gt=0, le=86_400, description="seconds for one attempt")
    max_retries: int = Field(
        default=4, ge=0, le=1_000, description="further attempts at one request"
    )
    backoff_s: float = Field(
        default=1.0, ge=0, le=3_600, description="seconds before the first of them"
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_endpoint(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL like http://127.0.0.1:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("a URL is logged, so it holds no key: name a variable in api_key_env")
        return value

    @model_validator(mode="after")
    def _can_be_graded(self) -> LlmJudgeConfig:
        if "{response}" not in self.rubric:
            raise ValueError("the rubric has no {response}: the judge would grade nothing")
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) is not below high ({self.high:g})")
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern is not a regular expression: {error}") from error
        if groups < 1:
            raise ValueError("score_pattern has no group: put the score into (...)")
        return self


class LlmJudgeReward(Reward[LlmJudgeConfig]):
    """R_i = median of the votes' scores, (s - low) / (high - low) with `rescale`; None if unread.

    A vote is one reply; a response is scored when more than half of its votes were read, as a
    number in [low, high] (one outside is not read). Otherwise the status is that of the first
    failure: `timeout`, or `error` for a refusal, garbage, or a budget that is spent; never a zero.
    The cache is keyed by rubric, model, prompt, response, temperature, length and number of the
    vote, not by the endpoint; only replies with a score are kept. Budgets count from the stage's
    start, so a resumed stage starts again at 0; cached replies cost nothing.

    The response stands between marks made of its own hash, and the judge is instructed not to obey
    it. That makes injection harder, not impossible: a policy trained long enough on a judge finds
    what the judge likes. Look at the best-scored samples, and add a reward that can be checked. At
    temperature 0 votes of one model mostly agree; raise it to make them differ.
    Source: LLM as a judge, arXiv:2306.05685; median of votes as in G-Eval, arXiv:2303.16634.
    """

    name = "llm_judge"
    Config = LlmJudgeConfig
    runs_in = "host"
    deterministic = False

    def __init__(self, config: LlmJudgeConfig) -> None:
        super().__init__(config)
        self.budget = Budget(config.max_requests, config.max_total_tokens)
        self.pace = Pace(config.requests_per_second)
        folder = config.cache
        self.cache = None if folder is None else ReplyCache(Path(folder).expanduser())

    def setup(self, context: RewardContext) -> None:
        """Find out now, not at the first sample, that the key or the cache's folder is missing."""
        api_key(self.config.api_key_env)
        if self.cache is not None:
            self.cache.open()

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; a response that is there twice is judged once."""
        if not samples:
            return []
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._score_all(samples))
        with ThreadPoolExecutor(1, "llm_judge") as thread:  # the caller's thread has a loop
            return thread.submit(lambda: asyncio.run(self._score_all(samples))).result()

    async def _score_all(self, samples: Sequence[RewardSample]) -> list[Score]:
        config = self.config
        endpoint = Endpoint(
            base_url=config.base_url,
            model=config.model,
            api_key_env=config.api_key_env,
            timeout=config.timeout_s,
            max_retries=config.max_retries,
            backoff=config.backoff_s,
            parameters={"temperature": config.temperature, "max_tokens": config.max_tokens},
        )
        chats = [self._chat(sample) for sample in samples]
        keys = [key_of({"chat": messages}) for messages in chats]
        async with ChatClient(endpoint, self.budget, self.pace, config.max_concurrency) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    asked = {
                        key: group.create_task(self._judge(client, messages))
                        for key, messages in dict(zip(keys, chats, strict=True)).items()
                    }
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [asked[key].result() for key in keys]

    def _chat(self, sample: RewardSample) -> list[dict[str, str]]:
        config, problem = self.config, sample.problem
        return chat(
            config.rubric,
            prompt=problem.prompt,
            response=sample.text,
            answer=problem.answer,
            low=config.low,
            high=config.high,
        )

    async def _judge(self, client: ChatClient, messages: Sequence[Message]) -> Score:
        votes = [self._vote(client, messages, vote) for vote in range(self.config.votes)]
        replies = await asyncio.gather(*votes)
        read = [self._read(reply) for reply in replies]
        given = [value for value in read if isinstance(value, float)]
        if 2 * len(given) <= self.config.votes:
            failed = next(reply for reply in read if isinstance(reply, Reply))
            return Score(None, failed.status, failed.detail)
        score = statistics.median(given)
        low, high = self.config.low, self.config.high
        value = (score - low) / (high - low) if self.config.rescale else score
        return Score(value, components={"judge": score, "votes": float(len(given))})

    async def _vote(self, client: ChatClient, messages: Sequence[Message], vote: int) -> Reply:
        config = self.config
        key = key_of(
            {
                "messages": list(messages),
                "model": config.model,
                "temperature": config.temperature,
                "max_tokens": config.max_tokens,
                "vote": vote,
            }
        )
        kept = None if self.cache is None else self.cache.get(key)
        if kept is not None:
            return Reply(kept)
        seed = {"seed": vote} if config.votes > 1 else {}
        reply = await client.ask(messages, **seed)
        if self.cache is not None and reply.text is not None:
            if isinstance(self._read(reply), float):
                self.cache.put(key, reply.text)
        return reply

    def _read(self, reply: Reply) -> float | Reply:
        """The score of a reply, or the reply with what is wrong with it."""
        if reply.text is None:
            return reply
        if self.config.reply == "json":
            score = score_in_json(reply.text, self.config.json_key)
        else:
            score = score_by_pattern(reply.text, self.config.score_pattern)
        if score is None:
            return Reply(None, "error", f"no score in the judge's reply: {reply.text[-120:]!r}")
        if not self.config.low <= score <= self.config.high:
            bounds = f"[{self.config.low:g}, {self.config.high:g}]"
            return Reply(None, "error", f"the judge's score {score:g} is outside {bounds}")
        return score
