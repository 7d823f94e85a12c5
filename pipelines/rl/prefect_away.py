"""A Prefect server that goes away during a run, or refuses what the run reports.

It only displays, so the run goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import prefect.context
from prefect import Flow
from prefect.exceptions import CancelledRun, ObjectNotFound
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES

from posttrain.core.errors import causes

AWAY_TIMEOUT_S = 2.0
"""How long a request waits for a server that was away before. It is not repeated."""
UNREACHABLE = "Failed to reach API"
"""What Prefect's client raises, as a RuntimeError, where a flow finds no server."""

logger = logging.getLogger(__name__)
_reported: list[str] = []


def unreachable(error: BaseException) -> bool:
    """Whether Prefect's server did not answer, or did not take what it was sent.

    It refuses a key that has expired, for instance, and a run that somebody has deleted.
    """
    return any(
        isinstance(found, httpx.HTTPError | ObjectNotFound) or UNREACHABLE in str(found)
        for found in causes(error)
    )


def went_away(error: BaseException) -> None:
    """Report once that the server is away; later requests do not wait for it (`no_patience`)."""
    no_patience()
    if _reported:
        return
    _reported.append(str(error))
    answers = [found for found in causes(error) if isinstance(found, httpx.HTTPStatusError)]
    shown = answers[0] if answers else error
    first = (str(shown).splitlines() or [type(shown).__name__])[0]
    refused = bool(answers) and answers[0].response.is_client_error
    logger.warning(
        "Prefect's server %s (%s): the run goes on and keeps its results; Prefect's pages lack "
        "what follows",
        "refuses what the run reports" if refused else "does not answer",
        first,
    )


def no_patience(retries: int = 0) -> None:
    """From now on a request to the server waits for seconds at most.

    Requests are still sent: a server that is back shows what comes then.
    """
    # For all threads; what a `with` block has set for this one stays in it.
    context = prefect.context.GLOBAL_SETTINGS_CONTEXT or prefect.context.get_settings_context()
    prefect.context.GLOBAL_SETTINGS_CONTEXT = prefect.context.SettingsContext(
        profile=context.profile,
        settings=context.settings.copy_with_update(
            updates={
                PREFECT_CLIENT_MAX_RETRIES: retries,
                PREFECT_API_REQUEST_TIMEOUT: AWAY_TIMEOUT_S,
            }
        ),
    )
    shared = prefect.context.SyncClientContext.get()
    if shared is not None:  # a flow run and its tasks share a client, which keeps its first timeout
        shared.client._client.timeout = httpx.Timeout(AWAY_TIMEOUT_S)


def was_away() -> bool:
    """Whether the server failed to answer in this process."""
    return bool(_reported)


class Body:
    """What became of the body of a flow, whatever Prefect could store of it."""

    def __init__(self) -> None:
        self.began = False
        self.ended = False
        self.error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole body of the flow."""
        self.began = True
        try:
            yield
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):  # asked to stop, it has to end soon
                no_patience(retries=1)
            raise
        self.ended = True


def call_flow(flow: Flow[..., Any], body: Body, *arguments: Any, optional: bool) -> None:
    """Call the flow. A state that could not be written changes nothing about what its body did.

    An error of the body is raised, and not the one of the request that was to report it. Where an
    `optional` flow could not begin, its body runs without a flow run.
    """
    try:
        flow(*arguments)
    except CancelledRun:  # the state that the body returned
        raise
    except Exception as error:  # of the body or of a request: both may be of any kind
        if error is body.error or not (body.ended or unreachable(error)):
            raise
        if body.error is not None:
            went_away(error)
            raise body.error from None
        if not body.ended and (body.began or not optional):
            raise
        went_away(error)
        if not body.ended:
            without: Callable[..., Any] = flow.fn
            without(*arguments)
