"""Every option of speed, alone and together, gives the gradient of the plain way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from tests.helpers.speed import (
    SPEED_FAMILIES,
    Options,
    assert_equal_gradients,
    combinations,
    gradients,
    plain_gradients,
)


@cache
def wanted(family: str, lora: bool) -> dict[str, Tensor]:
    return plain_gradients(family, Options(lora=lora))


CASES = [
    pytest.param(
        *(family, lora),
        id=f"{family}-{'lora' if lora else 'weights'}",
        marks=[pytest.mark.slow] if lora and family != "llama" else [],
    )
    for family in SPEED_FAMILIES
    for lora in (False, True)
]


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_the_gradient_is_the_plain_one(family: str, lora: bool) -> None:
    for options in combinations():
        found = gradients(family, replace(options, lora=lora))
        assert_equal_gradients(found, wanted(family, lora))
