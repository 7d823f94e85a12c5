"""Whether one expression is an antiderivative of another, by numbers; nothing in them is run.

The texts are parsed, and only what stands in `FUNCTIONS`, numbers, names and the five operations
are computed, in constant time for each sign. So any text may come in, and none takes long.
"""

from __future__ import annotations

import ast
import cmath
import random
from collections.abc import Callable, Mapping

from posttrain.core.math.answers import bracket_depth

MAX_CHARS = 1000
MAX_DEPTH = 50
POINTS, ENOUGH = 16, 8
TOLERANCE = 1e-6
Dual = tuple[complex, complex]
"""A value and its derivative."""

# Each function of one argument, and its derivative.
FUNCTIONS: dict[str, tuple[Callable[[complex], complex], Callable[[complex], complex]]] = {
    "sin": (cmath.sin, cmath.cos),
    "cos": (cmath.cos, lambda z: -cmath.sin(z)),
    "tan": (cmath.tan, lambda z: 1 + cmath.tan(z) ** 2),
    "exp": (cmath.exp, cmath.exp),
    "log": (cmath.log, lambda z: 1 / z),
    "ln": (cmath.log, lambda z: 1 / z),
    "sqrt": (cmath.sqrt, lambda z: 0.5 / cmath.sqrt(z)),
    "asin": (cmath.asin, lambda z: 1 / cmath.sqrt(1 - z * z)),
    "acos": (cmath.acos, lambda z: -1 / cmath.sqrt(1 - z * z)),
    "atan": (cmath.atan, lambda z: 1 / (1 + z * z)),
    "sinh": (cmath.sinh, cmath.cosh),
    "cosh": (cmath.cosh, cmath.sinh),
    "tanh": (cmath.tanh, lambda z: 1 - cmath.tanh(z) ** 2),
}
CONSTANTS = {"pi": cmath.pi, "E": cmath.e, "C": 0.37 + 0.11j}


def is_antiderivative(answer: str, integrand: str, variable: str) -> bool:
    """Whether d `answer` / d `variable` equals `integrand`, to 1e-6 at points off the real line.

    Two analytic expressions that agree at all of them are equal where both are defined. `C` is the
    constant of integration. False for a text that is not such an expression.
    """
    try:
        given, wanted = _parsed(answer), _parsed(integrand)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    draw, compared = random.Random(0), 0
    for _ in range(POINTS):
        at = complex(draw.uniform(0.3, 2.2), draw.uniform(0.1, 1.1))
        names: dict[str, Dual] = {name: (value, 0) for name, value in CONSTANTS.items()}
        names[variable] = (at, 1)
        try:
            slope, value = _dual(given, names)[1], _dual(wanted, names)[0]
        except (ArithmeticError, RecursionError):
            continue  # a pole, or too large a number: another point tells
        except ValueError:
            return False
        if not abs(slope - value) <= TOLERANCE * (1 + abs(value)):
            return False
        compared += 1
    return compared >= ENOUGH


def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_CHARS or bracket_depth(text) > MAX_DEPTH:
        raise ValueError("too long")
    return ast.parse(text.strip(), mode="eval").body


def _dual(node: ast.expr, names: Mapping[str, Dual]) -> Dual:
    """Value and derivative; `ValueError` for what is not an expression of this kind."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return complex(number), 0
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value, slope = _dual(operand, names)
            return -value, -slope
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _dual(operand, names)
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(operator, _dual(left, names), _dual(right, names))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            function, derivative = FUNCTIONS[name]
            value, slope = _dual(argument, names)
            return function(value), derivative(value) * slope
    raise ValueError(f"'{ast.unparse(node)[:40]}' is not such an expression")


def _combined(operator: ast.operator, left: Dual, right: Dual) -> Dual:
    (a, da), (b, db) = left, right
    match operator:
        case ast.Add():
            return a + b, da + db
        case ast.Sub():
            return a - b, da - db
        case ast.Mult():
            return a * b, da * b + a * db
        case ast.Div():
            return a / b, (da * b - a * db) / (b * b)
        case ast.Pow():
            power = a**b
            return power, (b * a ** (b - 1) * da) + (power * cmath.log(a) * db if db else 0)
    raise ValueError(f"no operation of this kind: {operator}")
