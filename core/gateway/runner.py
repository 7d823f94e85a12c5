"""Plays environments whose episodes are played by programs, through a gateway of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from posttrain.core.contracts import Outcome, PlayedEnvironment, PromptGroup
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.gateway.app import Sessions, application
from posttrain.core.gateway.session import Session, SessionLimits
from posttrain.core.rollout.plays import (
    EpisodeFailed,
    EpisodeLimits,
    Plays,
    described,
    empty_completion,
)
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.types import Completion, Problem, SamplingParams

logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
START_S = 30.0
POLL_S = 0.02


class PlayedRunner(Plays):
    """Plays a `PlayedEnvironment`: each episode gets an address, and is what was asked there."""

    repeatable = False

    def __init__(
        self,
        environment: PlayedEnvironment[Any],
        tokenizer: ChatTokenizer,
        limits: EpisodeLimits,
        max_calls: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(environment.name, limits, check)
        self.played, self.tokenizer = environment, tokenizer
        self.per_session = SessionLimits(limits.max_model_len, max_calls)
        self.sessions = Sessions()
        self.root = ""
        self._server: Any = None  # Any: uvicorn is imported late
        self._serving: asyncio.Task[None] | None = None

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """The problem alone: what a program makes of it is not known before."""
        return self.tokenizer.encode_prompt(problem)

    async def _begin(self) -> None:
        import uvicorn

        config = uvicorn.Config(
            application(self.sessions),
            host=HOST,
            port=0,
            lifespan="off",
            log_level="warning",
            access_log=False,  # addresses hold keys
            backlog=4096,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve())
        for _ in range(int(START_S / POLL_S)):
            if self._server.started or self._serving.done():
                break
            await asyncio.sleep(POLL_S)
        if not self._server.started:
            raise RunError(f"the gateway for environment '{self.name}' did not start on {HOST}")
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.root = f"http://{HOST}:{port}"
        await self.played.start()

    async def _end(self) -> None:
        await self.played.stop()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving}, timeout=START_S)

    async def _episode(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        session = Session(submitting.submit, self.tokenizer, params, self.per_session, seed)
        self.sessions.open(session)
        try:
            outcome = await self._outcome(session, prompt.problem, seed)
        finally:
            session.sealed = True
            self.sessions.close(session)
        if session.fault is not None:
            raise session.fault  # the engine's, which no other episode would be spared
        rows = session.seal(outcome)
        if not rows:
            why = outcome.failed or "the program never asked the policy"
            return [empty_completion(submitting.engine, seed, why)]
        return rows

    async def _outcome(self, session: Session, problem: Problem, seed: int) -> Outcome:
        try:
            return await self.played.play(problem, session.endpoint(self.root), seed)
        except asyncio.CancelledError:
            raise
        except EpisodeFailed as error:
            return Outcome(failed=str(error))
        except Exception as error:  # a program may raise anything
            logger.debug("an episode failed", exc_info=True)
            return Outcome(failed=described(error))
