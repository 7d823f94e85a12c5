"""A calculator for Python arithmetic: it reads the expression itself, and runs no code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Tool, ToolResult

Number = int | float
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def rounded(value: Number, digits: int = 0) -> Number:
    """`round` with at most 400 digits: of a whole number Python takes 10 to the power of them."""
    return round(value, max(-400, min(400, digits))) if digits else round(value)


FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": rounded,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "floor": math.floor,
    "ceil": math.ceil,
    "gcd": math.gcd,
}


class CalculatorConfig(PluginConfig):
    """Settings of `calculator`."""

    max_chars: int = Field(default=200, ge=1, le=2000, description="longest expression, characters")
    max_bits: int = Field(
        default=1024, ge=64, le=8192, description="largest whole number on the way, binary digits"
    )


class Refused(ValueError):
    """What the calculator does not do, in words."""


class CalculatorTool(Tool[CalculatorConfig]):
    """Value = the expression's, by a walk over its syntax tree with a list of what is allowed.

    Allowed: whole and decimal numbers, + - * / // % **, brackets, pi, e, and the functions abs,
    min, max, round, sqrt, log, exp, sin, cos, tan, floor, ceil, gcd. Whole numbers are exact up to
    `max_bits`; other results have 12 digits. Sizes are checked before a power is taken, so no
    expression takes long. Source: own; the walk is that of the module `ast` of Python.
    """

    name = "calculator"
    Config = CalculatorConfig
    description = "computes the value of an arithmetic expression in Python's notation"
    parameters: ClassVar[Mapping[str, Any]] = {  # Any: JSON values
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "such as (3 + 4) * 2 or sqrt(2)"}
        },
        "required": ["expression"],
    }

    def call(self, arguments: str) -> ToolResult:
        """The value, or in words why there is none."""
        text, limit = arguments.strip(), self.config.max_chars
        if len(text) > limit:
            return ToolResult(f"error: more than {limit} characters", failed=True)
        try:
            value = self._value(ast.parse(text, mode="eval").body)
            return ToolResult(str(value) if isinstance(value, int) else f"{value:.12g}")
        except Refused as error:
            return ToolResult(f"error: {error}", failed=True)
        except (SyntaxError, MemoryError, RecursionError):
            return ToolResult("error: not an arithmetic expression", failed=True)
        except (ArithmeticError, ValueError, TypeError) as error:
            return ToolResult(f"error: {error}", failed=True)

    def _value(self, node: ast.expr) -> Number:
        """The value of one node, checked for its size."""
        match node:
            # A bool is an int to Python, and not to us.
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._checked(value)
            case ast.Name(id=name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power(self._value(left), self._value(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return self._checked(OPERATORS[type(op)](self._value(left), self._value(right)))
            case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
                return self._checked(FUNCTIONS[name](*(self._value(item) for item in given)))
        raise Refused(f"{type(node).__name__} is not part of arithmetic here")

    def _power(self, base: Number, exponent: Number) -> Number:
        if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
            if base.bit_length() * abs(exponent) > self.config.max_bits:
                raise Refused("the power is too large")
        return self._checked(base**exponent)

    def _checked(self, value: object) -> Number:
        if isinstance(value, int) and value.bit_length() <= self.config.max_bits:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        raise Refused("the result is too large, or no real number")
