"""Arithmetic in the shell's whole numbers, `$((A * 2 + 1))`: parsed as a Python expression, but never run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping


def evaluate(expression: str, integer: Callable[[str], int]) -> int:
    """Return the value of an expression.

    Args:
        expression: numbers, names, brackets, `+ - * / %` and comparisons, as in `(A + 1) * 2 > B`.
        integer: returns the value of a name.

    Raises:
        SyntaxError: the text is no expression.
        ValueError: the expression has an operation that is not listed above.
        ZeroDivisionError: it divides by 0.
    """
    return _value(ast.parse(expression.strip(), mode="eval").body, integer)


def _value(node: ast.expr, integer: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return integer(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, integer)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_value(left, integer), _value(right, integer))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
            return int(COMPARISONS[type(sign)](_value(left, integer), _value(right, integer)))
    raise ValueError("not an expression of whole numbers")


def _quotient(left: int, right: int) -> int:
    """Divide as the shell does, which rounds towards 0; Python rounds down."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    """Return the shell's remainder, which has the sign of `left`."""
    return left - right * _quotient(left, right)


OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
