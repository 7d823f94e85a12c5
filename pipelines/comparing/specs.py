"""What people write on the command line for a reward with its weight, and for a clip range."""

from __future__ import annotations

from posttrain.core.config.spec import Spec, parse_spec
from posttrain.core.errors import ConfigError


def parse_reward(text: str) -> tuple[Spec, float]:
    """`length_penalty,max_length=64:0.5` as a spec and a weight, 1 where none is given."""
    head, sign, tail = text.rpartition(":")
    if not sign or any(bracket in tail for bracket in "]})"):
        return parse_spec("--reward", text), 1.0
    try:
        weight = float(tail)
    except ValueError:
        if "=" in head.rpartition(",")[2]:  # a colon of the last field's own value
            return parse_spec("--reward", text), 1.0
        raise ConfigError(
            f"--reward '{text}': the weight '{tail}' after the colon is no number; the form is "
            "--reward NAME,field=value:0.5"
        ) from None
    if weight != weight or weight in (float("inf"), float("-inf")):
        raise ConfigError(f"--reward '{text}': the weight {tail} is not finite; give a number")
    return parse_spec("--reward", head), weight


def parse_clip(text: str) -> tuple[float, float]:
    """`0.2:0.28` as the distances of the clip's bounds below and above 1."""
    low, sign, high = text.partition(":")
    try:
        return float(low), float(high if sign else low)
    except ValueError:
        raise ConfigError(
            f"--clip '{text}' must be LOW:HIGH, two numbers such as 0.2:0.28 (the ratio is kept "
            "between 1 - LOW and 1 + HIGH)"
        ) from None
