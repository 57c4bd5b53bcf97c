"""The arithmetic that family files may use: names, whole numbers, ``+ - * /`` (exact), comparisons, list elements."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mtpcheck.errors import FamilyError


def _exact(a: int, b: int) -> int:
    if not b or a % b:
        raise FamilyError(f"{a} is not a multiple of {b}")
    return a // b


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _exact,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        raise FamilyError(f"cannot read expression {expression!r}") from None


def evaluate(expression: str | int, names: Mapping[str, Any]) -> Any:
    """Value of ``expression`` over ``names``. Raises FamilyError for an unknown name or any other syntax."""
    if isinstance(expression, int):
        return expression
    if expression in names:
        return names[expression]
    return _evaluate(_parse(expression), names, expression)


def _evaluate(node: ast.expr, names: Mapping[str, Any], whole: str) -> Any:
    match node:
        case ast.Constant(value=(int() | str()) as value):
            return value
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            elements, at = names.get(name) or [], _evaluate(index, names, whole)
            if not isinstance(elements, list):
                raise FamilyError(f"{name!r} is {elements!r}, expected a list, needed for {whole!r}")
            return elements[at] if at < len(elements) else None  # a list that is not given says nothing
        case ast.Name(id=name):
            if names.get(name) is None:
                raise FamilyError(f"{name!r} is not known, needed for {whole!r}")
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, names, whole), _evaluate(right, names, whole))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, names, whole), _evaluate(right, names, whole))
    raise FamilyError(f"{whole!r}: only names, whole numbers, + - * /, comparisons and list elements are allowed")


def expand(template: str, names: Mapping[str, Any]) -> str:
    """Replace every ``{expression}`` of a name template by its value."""
    return re.sub(r"\{([^}]*)\}", lambda match: str(evaluate(match[1], names)), template)
