"""A Prefect server that does not answer changes nothing about what a flow's body did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import prefect.context
import pytest

from posttrain.core.errors import RunError
from posttrain.pipelines.rl import prefect_away
from posttrain.pipelines.rl.prefect_away import Body, call_flow, was_away

REFUSED = httpx.ConnectError("All connection attempts failed")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prefect_away, "_reported", [])
    before = prefect.context.GLOBAL_SETTINGS_CONTEXT
    yield
    prefect.context.GLOBAL_SETTINGS_CONTEXT = before


class Lost:
    """A flow whose requests fail before its body, or after it."""

    def __init__(self, body: Body, when: str, error: BaseException | None = None) -> None:
        self.body, self.when, self.error, self.calls = body, when, error, 0

    def fn(self) -> None:
        with self.body.running():
            self.calls += 1
            if self.error is not None:
                raise self.error

    def __call__(self) -> None:
        if self.when == "before":
            raise REFUSED
        try:
            self.fn()
        except BaseException:
            raise REFUSED from None
        if self.when == "after":
            raise REFUSED


def _called(when: str, error: BaseException | None = None, *, optional: bool = True) -> Any:
    body = Body()
    flow = Lost(body, when, error)
    call_flow(flow, body, optional=optional)  # type: ignore[arg-type]
    return flow


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_body_runs_once(when: str) -> None:
    assert _called(when).calls == 1
    assert was_away()


def test_a_flow_that_must_be_known_does_not_begin() -> None:
    with pytest.raises(httpx.ConnectError):
        _called("before", optional=False)


@pytest.mark.parametrize("error", [RunError("the loss is NaN"), KeyboardInterrupt()])
def test_the_error_of_the_body_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        _called("after", error)
    assert found.value is error


def test_what_is_not_prefect_s_is_raised() -> None:
    def broken() -> None:
        raise ValueError("a")

    with pytest.raises(ValueError, match="a"):
        call_flow(broken, Body(), optional=True)  # type: ignore[arg-type]
    assert not was_away()
