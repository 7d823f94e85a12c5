"""Episodes of a tiny random model that calls a tool by writing one character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from posttrain.core.contracts import (
    EngineSetup,
    NoConfig,
    PromptGroup,
    RolloutRequest,
    SampledGroup,
    Tool,
    ToolResult,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.types import Problem, SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from posttrain.plugins.environments.tools import ToolsConfig, ToolsEnvironment

CHARACTERS = "\n0123456789?[]"
PROBLEMS = tuple(Problem(f"{n}", f"{n}", f"{n}", f"{n}") for n in (12, 7, 305, 44))


class Lengths(Tool[NoConfig]):
    """Says how long its argument is, in as many digits as that."""

    name = "lengths"
    Config = NoConfig
    description = "counts"

    def call(self, arguments: str) -> ToolResult:
        return ToolResult(str(len(arguments)) * (1 + len(arguments) % 4), failed=not arguments)


def tools_environment(**fields: Any) -> ToolsEnvironment:  # Any: config fields
    """An environment in which `?` calls the tool and its result stands in brackets."""
    given = {"tools": ["lengths"], "call_open": "", "call_close": "?", "result": "[{result}]"}
    environment = ToolsEnvironment(
        ToolsConfig.model_validate({**given, "instructions": "", "max_calls": 9, **fields})
    )
    environment.setup([Lengths(NoConfig())])
    return environment


class Tiny:
    """A started engine on a tiny model, with its tokenizer and prompts."""

    def __init__(self, folder: Path, max_model_len: int = 96) -> None:
        tokenizer = make_tiny_tokenizer(CHARACTERS, BARE_TEMPLATE)
        self.folder = make_tiny_model(folder, seed=5, init_std=0.2, tokenizer=tokenizer)
        self.tokenizer = ChatTokenizer.load(folder)
        self.engine = TransformersEngine(TransformersEngineConfig())
        self.engine.start(
            EngineSetup(
                model_dir=folder,
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_model_len=max_model_len,
                max_batch_size=64,
                stop_token_ids=(self.tokenizer.eos_token_id,),
                pad_token_id=self.tokenizer.pad_token_id,
                seed=0,
            )
        )

    def runner(
        self, max_turns: int = 4, max_observation_tokens: int = 8, **fields: Any
    ) -> EpisodeRunner:
        environment = tools_environment(**fields)
        return EpisodeRunner(environment, self.tokenizer, max_turns, max_observation_tokens)

    def prompts(self, runner: EpisodeRunner) -> list[PromptGroup]:
        return [PromptGroup(p, runner.encode_prompt(p)) for p in PROBLEMS]

    def request(
        self, params: SamplingParams, runner: EpisodeRunner | None = None
    ) -> RolloutRequest:
        runner = runner or self.runner()

        def verify(group: SampledGroup) -> list[float]:
            return [0.0] * len(group.completions)

        return RolloutRequest(
            engine=self.engine,
            prompts=self.prompts(runner),
            params=params,
            policy_version=0,
            generate=lambda prompts, params: runner.generate(self.engine, prompts, params),
            more_prompts=lambda count: [],
            verify=verify,
            check=lambda: None,
            episodes=runner,
        )
