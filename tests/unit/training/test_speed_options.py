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


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "lora"])
@pytest.mark.parametrize("family", SPEED_FAMILIES)
def test_the_gradient_is_the_plain_one(family: str, lora: bool) -> None:
    for options in combinations():
        found = gradients(family, replace(options, lora=lora))
        assert_equal_gradients(found, wanted(family, lora))
