"""What an operator of the user's is: its schema, its fake, its derivative; and how it is called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import ExtensionError, OptionError, first_line

_NAME = re.compile(r"[A-Za-z_]\w*")
# Namespaces that are PyTorch's own.
_TAKEN = frozenset({"aten", "prim", "prims", "c10", "torch", "graphwright"})
_PARSED_AS = "graphwright_schema"


@dataclass(frozen=True)
class Function:
    """A function of an extension.

    Attributes:
        schema: what it takes and returns, as PyTorch writes it:
            `"(Tensor x, Tensor y, float scale=1.0) -> Tensor"`. What it writes to is marked:
            `"(Tensor(a!) x) -> ()"`. A result is never one of the arguments, nor a view of one.
        fake: called with tensors that have no data, it returns such tensors of the shapes, dtypes,
            strides and devices that the function returns. torch.compile and torch.export ask it.
            None where the function returns nothing.
        backward: `backward(ctx, *gradients)`, a gradient (or None) for each argument, as
            torch.library.register_autograd takes it. None: a backward through it is an error.
        setup_context: `setup_context(ctx, inputs, output)`, which keeps what `backward` needs.
        samples: calls that torch.library.opcheck checks it with at once, each a tuple of arguments.
        symbol: its name in C++ where it is another one, such as "space::name".
    """

    schema: str
    fake: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., Any] | None = None
    samples: Sequence[tuple[Any, ...]] = field(default=(), compare=False)
    symbol: str | None = None

    def without_samples(self) -> Function:
        """The same, checked by somebody else."""
        return replace(self, samples=())


class Operator:
    """An operator of PyTorch, to be called like a function.

    Attributes:
        name: `space::name`; it is also `torch.ops.space.name`.
    """

    def __init__(self, name: str, again: Callable[[], Operator]) -> None:
        self.name = name
        self._again = again
        space, _, own = name.partition("::")
        self._packet = getattr(getattr(torch.ops, space), own)
        self.__name__ = own

    @property
    def schema(self) -> str:
        """What it takes and returns."""
        return str(self._packet.default._schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._packet(*args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Check its schema, fake and autograd on a call, by torch.library.opcheck.

        Raises:
            ExtensionError: one of them is not what the function does.
        """
        check(self._packet.default, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self._again,)

    def __copy__(self) -> Operator:
        return self

    def __deepcopy__(self, memo: Any) -> Operator:
        return self

    def __repr__(self) -> str:
        return f"<{self.schema}>"


def _made_again(again: Callable[[], Operator]) -> Operator:
    return again()


def check_name(name: str, what: str) -> None:
    """Refuse what is no name of C++, and namespaces of PyTorch's.

    Raises:
        OptionError: it is one.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"{name!r} is no name for {what}.",
            remedy="Use letters, digits and underscores, beginning with a letter.",
        )
    if what == "an extension" and name in _TAKEN:
        raise OptionError(
            f"{name!r} is a namespace of PyTorch's or of graphwright's own.",
            remedy="Take a name of your own, such as that of your project.",
        )


def parsed(schema: str, name: str) -> torch.FunctionSchema:
    """A schema, read.

    Raises:
        ExtensionError: it cannot be read, or has results that are arguments.
    """
    text = schema.strip() if isinstance(schema, str) else ""
    own, bracket, rest = text.partition("(")
    if own.strip() not in ("", name):
        raise ExtensionError(
            f"The schema of {name} has another name: {own.strip()!r}.",
            remedy="Leave the name out: '(Tensor x) -> Tensor'.",
        )
    try:
        found = torch._C.parse_schema(f"{_PARSED_AS}::{name}{bracket}{rest}")
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        raise ExtensionError(
            f"The schema of {name} cannot be read: {said[0] if said else error}: {text!r}",
            remedy="Write it as PyTorch does: '(Tensor x, int n, float scale=1.0) -> Tensor'.",
        ) from error
    aliased = [r for r in found.returns if r.alias_info is not None]
    if aliased:
        raise ExtensionError(
            f"The schema of {name} returns one of its arguments.",
            remedy="Return a tensor of its own; a function that writes to an argument returns "
            "nothing: '(Tensor(a!) x) -> ()'.",
        )
    return found


def writes(schema: torch.FunctionSchema) -> bool:
    """Whether an operator writes to an argument."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def register(library: torch.library.Library, space: str, name: str, function: Function) -> None:
    """Register a function's schema, fake and autograd under `space::name`.

    Raises:
        ExtensionError: they do not belong together.
    """
    schema = parsed(function.schema, name)
    full = f"{space}::{name}"
    if function.fake is None and schema.returns:
        raise ExtensionError(
            f"{name} has no fake: nothing says what its results look like.",
            remedy="Pass one, such as fake=lambda x: torch.empty_like(x).",
        )
    for what in ("fake", "backward", "setup_context"):
        value = getattr(function, what)
        if value is not None and not callable(value):
            raise OptionError(f"{what} of {name} is no function but {type(value).__name__}.")
    if function.setup_context is not None and function.backward is None:
        raise OptionError(
            f"{name} has a setup_context and no backward.", remedy="Pass the backward too."
        )
    library.define(f"{name}{str(schema).partition(name)[2]}")
    if function.fake is not None:
        _check_takes(function.fake, schema, name)
        torch.library.register_fake(full, function.fake, lib=library)
    elif not schema.returns:
        torch.library.register_fake(full, _nothing, lib=library)
    if writes(schema):
        if function.backward is not None:
            raise ExtensionError(
                f"{name} writes to an argument, and has a backward.",
                remedy="Return a new tensor instead, which autograd can follow.",
            )
        library.impl(name, _without_autograd(full), "Autograd", with_keyset=True)
        return
    if not any("Tensor" in str(returned.type) for returned in schema.returns):
        return
    torch.library.register_autograd(
        full,
        function.backward or no_backward(full),
        setup_context=function.setup_context,
        lib=library,
    )


def _check_takes(fake: Callable[..., Any], schema: torch.FunctionSchema, name: str) -> None:
    """Raise if a fake cannot take the arguments of a schema.

    Raises:
        ExtensionError: it cannot.
    """
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    named = {a.name: None for a in schema.arguments if a.kwarg_only}
    try:
        signature = inspect.signature(fake)
    except (TypeError, ValueError):
        return  # It does not say what it takes.
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise ExtensionError(
            f"The fake of {name} does not take what its schema says "
            f"({', '.join([*positional, *named])}): {error}.",
            remedy="Let it take the same arguments in the same order.",
        ) from error


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What an operator returns that returns nothing."""


def no_backward(name: str) -> Callable[..., Any]:
    """A backward that says that there is none: silence would lose gradients."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ExtensionError(
            f"{name} has no backward, and a gradient is asked for.",
            remedy="Pass backward and setup_context, or call it under torch.no_grad().",
        )

    return backward


def _without_autograd(name: str) -> Callable[..., Any]:
    """For an operator that writes: refuse tensors that autograd would have to follow."""
    space, _, own = name.partition("::")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            tensors = torch.utils._pytree.tree_leaves((args, kwargs))
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
                raise ExtensionError(
                    f"{name} writes to an argument, which autograd cannot follow.",
                    remedy="Call it under torch.no_grad(), or on detached tensors.",
                )
        operator = getattr(getattr(torch.ops, space), own).default
        below = keyset & torch._C._after_autograd_keyset
        return operator.redispatch(below, *args, **kwargs)

    return kernel


def check(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """torch.library.opcheck, whose complaint becomes a sentence.

    Raises:
        ExtensionError: the operator is not what was said of it.
    """
    try:
        torch.library.opcheck(operator, args, kwargs or {})
    except Exception as error:
        test = next((t for t in _COMPLAINTS if f": {t} failed" in str(error)), "")
        what, remedy = _COMPLAINTS[test]
        cause = error.__cause__ or error
        raise ExtensionError(
            f"{operator.name()} {what}: {first_line(cause)}", remedy=remedy
        ) from error


# By the test of torch.library.opcheck.
_COMPLAINTS = {
    "test_schema": (
        "does something that its schema does not say",
        "Mark what it writes to, as in Tensor(a!) x; return a copy instead of an argument.",
    ),
    "test_autograd_registration": (
        "has an autograd that does not work",
        "Pass backward, and setup_context for what it needs.",
    ),
    "test_faketensor": (
        "has a fake that returns something else than the function",
        "Let both return the same shapes, dtypes, strides and devices.",
    ),
    "": (
        "does not do under torch.compile what it does by itself",
        "See whether fake and backward return what they should: a gradient, or None, for each "
        "argument.",
    ),
}
