"""A calculator as a tool, and a small example of an environment: it replies with the value of <calc>...</calc>.

An answer without such a request ends the episode.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from lockstep.rollouts.rewards import Row, Turn

_REQUEST = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARACTERS = 200  # of an expression


class Calculator:
    """Counts its uses and gives no reward of its own."""

    def reset(self, row: Row) -> None:
        self.num_uses = 0

    def step(self, answer: str) -> Turn:
        requests = _REQUEST.findall(answer)
        if not requests:
            return Turn()
        self.num_uses += 1
        return Turn(message=calculate(requests[-1]))


def calculate(expression: str) -> str:
    """The value of a sum of numbers with + - * / and brackets, exactly; or what is wrong with it, for the model."""
    if len(expression) > _MAX_CHARACTERS:
        return "error: the expression is too long"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: use numbers, + - * / and brackets"
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not a sum of numbers")
