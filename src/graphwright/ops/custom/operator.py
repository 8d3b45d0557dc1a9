"""The user's operators: their schema, fake implementation and derivative, and calling them."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.autograd import forward_ad

from ...calls.options import in_brief
from ...errors import ExtensionError, OptionError, first_line

_NAME = re.compile(r"[A-Za-z_]\w*")
# Namespaces that are PyTorch's own.
_TAKEN = frozenset({"aten", "prim", "prims", "c10", "torch", "graphwright"})
# What an Extension has besides its functions.
_ATTRIBUTES = frozenset({"name", "libraries"})
_PARSED_AS = "graphwright_schema"
_NO_CALL = re.compile("Expected a value of type|expected at most|missing value for arg")
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
        random: whether it draws random numbers of PyTorch's generators, so that two calls are not
            one.
    """

    schema: str
    fake: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., Any] | None = None
    samples: Sequence[tuple[Any, ...]] = field(default=(), compare=False)
    symbol: str | None = None
    random: bool = False

    def without_samples(self) -> Function:
        """The same, checked by somebody else."""
        return replace(self, samples=())


class Token:
    """Tells recipes apart: their functions cannot, which come back from a pickle as others.

    It has no members that are seen from outside: a remembered choice is known by what an operator
    does, in every process.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


class Operator:
    """An operator of PyTorch, to be called like a function.

    Attributes:
        name: `space::name`; it is also `torch.ops.space.name`.
    """

    def __init__(self, name: str, again: Callable[[], Operator], digest: str) -> None:
        """`again` makes it in another process; `digest` is of all that it is made of."""
        self.name = name
        self._again = again
        self._digest = digest
        space, _, own = name.partition("::")
        self._packet = getattr(getattr(torch.ops, space), own)
        self._writes = writes(self._packet.default._schema)
        self.__name__ = own

    @property
    def schema(self) -> str:
        """What it takes and returns."""
        return str(self._packet.default._schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._packet(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        if forward_ad._current_level >= 0:
            refuse_tangents(self.name, tensors)
        result = self._packet(*args, **kwargs)
        if not self._writes:
            _refuse_aliases(self.name, tensors, result)
        return result

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


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The plain tensors among values, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def refuse_tangents(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise if forward mode comes through: the tangents would be lost."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise ExtensionError(
            f"{name} has no derivative in forward mode.",
            remedy="Use reverse mode (backward, torch.func.vjp), or plain PyTorch here.",
        )


def _refuse_aliases(name: str, given: Iterable[torch.Tensor], result: Any) -> None:
    """Raise if a result is an argument: compiled code would take it for another tensor."""
    returned = [tensor for tensor in _tensors([result]) if not is_wrapped(tensor)]
    if not returned:
        return
    inputs = {t.untyped_storage()._cdata for t in given if t.numel() and not is_wrapped(t)}
    if any(tensor.untyped_storage()._cdata in inputs for tensor in returned):
        raise ExtensionError(
            f"{name} has returned one of its arguments, or a view of one.",
            remedy="Return a tensor of its own: contiguous() and to() return their argument where "
            "it is right already, and clone() never does.",
        )


def check_name(name: str, what: str) -> None:
    """Refuse what is no name of C++, and namespaces of PyTorch's.

    Raises:
        OptionError: it is one.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"{in_brief(name)} is no name for {what}.",
            remedy="Use letters, digits and underscores, beginning with a letter.",
        )
    if what == "a function" and (name in _ATTRIBUTES or name.startswith("__")):
        raise OptionError(
            f"{name!r} is an attribute of every extension.",
            remedy=f"Call it otherwise, and name the function of C++ by symbol={name!r}.",
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


def check(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """torch.library.opcheck, whose complaint becomes a sentence.

    Raises:
        ExtensionError: the operator is not what was said of it.
    """
    try:
        with warnings.catch_warnings():
            # opcheck's own doing, from PyTorch 2.15 on.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            torch.library.opcheck(operator, args, kwargs or {})
    except Exception as error:
        if re.search(
            r"Expected a value of type|expected at most|missing value for arg", str(error)
        ):
            raise ExtensionError(
                f"A sample is no call of {operator.name()}: {first_line(error.__cause__ or error)}",
                remedy="Pass what its schema says, in that order.",
            ) from error
        test = next((t for t in _COMPLAINTS if f": {t} failed" in str(error)), "")
        what, remedy = _COMPLAINTS[test]
        cause = error.__cause__ or error
        raise ExtensionError(
            f"{operator.name()} {what}: {first_line(cause)}", remedy=remedy
        ) from error
