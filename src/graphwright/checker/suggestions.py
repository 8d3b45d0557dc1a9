"""Code to suggest in place of an expression, where it is sure to be valid."""

from __future__ import annotations

import ast
from typing import cast

# Built-in functions of Python that read values themselves.
_DECIDE = ("all", "any", "max", "min", "sorted", "sum")
_MAKERS = (
    "tensor",
    "as_tensor",
    "asarray",
    "from_numpy",
    "arange",
    "linspace",
    "logspace",
    "zeros",
    "ones",
    "full",
    "eye",
)
# Names that are defined in __init__ too.
_KNOWN = ("torch", "np", "numpy", "math", "self", "float", "int", "range", "list", "True", "False")


def chosen_on_the_gpu(expression: str, source: str) -> str:
    """For a condition that is a tensor: torch.where; for an assertion: one on the GPU."""
    tree = _parsed(expression)
    if tree is None or isinstance(tree, ast.BoolOp):
        return ""
    if isinstance(tree, ast.Compare) and isinstance(tree.ops[0], ast.In | ast.NotIn):
        return ""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in _DECIDE:
        return ""
    if source.startswith("assert"):
        return f"torch._assert_async({expression})"
    return f"torch.where({expression}, a, b)"


def made_once(expression: str) -> str:
    """For a constant: a buffer, if everything in it is known when the module is made."""
    tree = _method(_parsed(expression))
    if tree is not None and tree.func.attr in ("to", "cuda", "type_as"):
        tree = _method(tree.func.value)
    if tree is None or tree.func.attr not in _MAKERS:
        return ""
    tree.keywords = [keyword for keyword in tree.keywords if keyword.arg != "device"]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not names <= set(_KNOWN):
        return ""
    return f'self.register_buffer("constant", {ast.unparse(tree)}, persistent=False)  # in __init__'


class _Method(ast.Call):
    func: ast.Attribute


def _method(tree: ast.expr | None) -> _Method | None:
    """A call of an attribute; None for any other expression."""
    called = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute)
    return cast("_Method", tree) if called else None


def _parsed(expression: str) -> ast.expr | None:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError):
        return None
