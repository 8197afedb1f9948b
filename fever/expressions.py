"""Expressions of a search such as `loguniform(1e-5,1e-2)`, as the function and its values. Nothing is executed.

Whatever asks which values a search has, or what they name, asks here.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from fever.errors import FeverError
from fever.text import INTEGERS, shorten

ALLOWED = (
    "uniform(low,high), loguniform(low,high), quniform(low,high,step), randint(low,high) and lograndint(low,high) "
    "(whole numbers below high), choice(value,value,...)"
)
WORDS = {"true": True, "false": False, "null": None, "none": None}  # as YAML and Python write them
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)  # of `ast`, for any text


def read_expression(name: str, text: str) -> tuple[str, list[Any]]:
    """The function of an expression and its values, which are what JSON can hold; `name` is the setting's. Raises
    `FeverError` for whatever is not a call with values."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except UNREADABLE:
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        raise refusal(name, text, "it is not a function with values in parentheses")
    return call.func.id, [_literal(name, text, argument) for argument in call.args]


def refusal(name: str, text: str, why: str) -> FeverError:
    """The error for an expression."""
    return FeverError(f"{shorten(f'{name}={text}')} cannot be searched: {why}; allowed are {ALLOWED}")


def _literal(name: str, text: str, node: ast.expr) -> Any:
    """A value as Python or YAML writes it. A bare word is a string; tuples become lists, as in YAML."""
    if isinstance(node, ast.Name):
        return WORDS.get(node.id.lower(), node.id)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(name, text, one) for one in node.elts]
    if isinstance(node, ast.Dict) and all(node.keys):
        return {
            str(_literal(name, text, key)): _literal(name, text, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    try:
        value = ast.literal_eval(node)
        json.dumps(value, allow_nan=False)
    except UNREADABLE:
        value = ...
    if value is ... or (type(value) is int and value not in INTEGERS):  # which no file of settings could hold
        raise refusal(name, text, f"{shorten(ast.get_source_segment(text.strip(), node) or 'one')} is not a value")
    return value
