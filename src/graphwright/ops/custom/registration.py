"""Registering operators with PyTorch, with checks where PyTorch itself is silent."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ...errors import ExtensionError, OptionError, first_line
from .operator import Function, parsed, refuse_tangents, writes

_DIGESTS: set[str] = set()
_TAG = re.compile(r"( ?graphwright:[0-9a-f]{64})?$")


def register(library: torch.library.Library, space: str, name: str, function: Function) -> None:
    """Register a function's schema, fake and autograd under `space::name`.

    Raises:
        ExtensionError: the name is taken.
    """
    schema = parsed(function.schema, name)
    full = f"{space}::{name}"
    tags = (torch.Tag.nondeterministic_seeded,) if function.random else ()
    try:
        library.define(str(schema).partition("::")[2], tags=tags)
    except RuntimeError as error:
        raise ExtensionError(
            f"{full} cannot be defined: {first_line(error)}", remedy="Take another name."
        ) from error
    if function.random:
        from torch._functorch import compile_utils  # half a second, which few need

        # PyTorch merges two equal calls of an operator that is not on this list.
        compile_utils.rand_ops.append(getattr(getattr(torch.ops, space), name))
    fake = _nothing if function.fake is None else _with_defaults(function.fake, schema)
    torch.library.register_fake(full, fake, lib=library)
    if writes(schema) or any(a.kwarg_only and _is_tensor(a) for a in schema.arguments):
        library.impl(name, refusing_kernel(full), "Autograd", with_keyset=True)
        return
    if not any("Tensor" in str(returned.type) for returned in schema.returns):
        return
    backward, setup_context = derivative(full, function.backward, function.setup_context)
    torch.library.register_autograd(full, backward, setup_context=setup_context, lib=library)


def validate(function: Function, name: str) -> None:
    """Refuse a function whose parts do not belong together.

    Raises:
        ExtensionError: the schema cannot be read, or fake or backward are none for it.
        OptionError: they are no functions, or a sample is no call.
    """
    schema = parsed(function.schema, name)
    if function.fake is None and schema.returns:
        raise ExtensionError(
            f"{name} has no fake: nothing says what its results look like.",
            remedy="Pass one, such as fake=lambda x: torch.empty_like(x).",
        )
    for what in ("fake", "backward", "setup_context"):
        value = getattr(function, what)
        if value is not None and not callable(value):
            raise OptionError(f"{what} of {name} is no function but {type(value).__name__}.")
    if not all(isinstance(sample, tuple) for sample in function.samples):
        raise OptionError(
            f"A sample of {name} is no tuple of arguments.", remedy="Write samples=[(x,)]."
        )
    if not any(map(_is_tensor, schema.arguments)):
        raise ExtensionError(
            f"The schema of {name} takes no tensor: nothing says which device it is for.",
            remedy="Pass a tensor of that device.",
        )
    if function.setup_context is not None and function.backward is None:
        raise OptionError(
            f"{name} has a setup_context and no backward.", remedy="Pass the backward too."
        )
    if function.fake is not None:
        _check_takes(function.fake, schema, name)
    if function.backward is not None:
        _check_differentiable(schema, name)


def _check_differentiable(schema: torch.FunctionSchema, name: str) -> None:
    """Refuse a schema that PyTorch's autograd cannot follow."""
    if writes(schema):
        raise ExtensionError(
            f"{name} writes to an argument, and has a backward.",
            remedy="Return a new tensor instead, which autograd can follow.",
        )
    if any(a.kwarg_only and _is_tensor(a) for a in schema.arguments):
        raise ExtensionError(
            f"{name} takes a tensor by keyword alone, and has a backward.",
            remedy="Move it in front of the * of the schema: PyTorch's autograd takes no others.",
        )


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _with_defaults(fake: Callable[..., Any], schema: torch.FunctionSchema) -> Callable[..., Any]:
    """A fake that is given all arguments: PyTorch leaves out those that have their default."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    named = {a.name: a.default_value for a in schema.arguments if a.kwarg_only}

    @functools.wraps(fake)
    def filled(*args: Any, **kwargs: Any) -> Any:
        rest = [kwargs.pop(a.name, a.default_value) for a in positional[len(args) :]]
        return fake(*args, *rest, **(named | kwargs))

    return filled


def derivative(
    name: str, backward: Callable[..., Any] | None, setup_context: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """What autograd is given: what the user gave, or a backward that says that there is none."""
    if backward is None:
        return _no_backward(name)
    if setup_context is None:
        return backward, None
    # PyTorch passes by name what a user's function may call otherwise.
    return backward, lambda ctx, inputs, output: setup_context(ctx, inputs, output)


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


# torch.compile makes the backward of all that it compiles, whether or not it will be asked for one:
# there an operator stands for the gradient, and complains when it runs.
_LIBRARY = torch.library.Library("graphwright", "FRAGMENT")
_LIBRARY.define("no_gradient(Tensor gradient, SymInt[] size, ScalarType dtype, str name) -> Tensor")
torch.library.register_fake(
    "graphwright::no_gradient",
    lambda gradient, size, dtype, name: gradient.new_empty(size, dtype=dtype),
    lib=_LIBRARY,
)


def _complain(gradient: torch.Tensor, size: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    raise ExtensionError(
        f"{name} has no backward, and a gradient is asked for.",
        remedy="Pass backward and setup_context, or call it under torch.no_grad().",
    )


_LIBRARY.impl("no_gradient", _complain, "CompositeExplicitAutograd")


def _no_backward(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A backward that says that there is none: silence would lose gradients."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shapes = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for v in inputs]

    def backward(ctx: Any, *gradients: Any) -> Any:
        some = next(g for g in pytree.tree_leaves(gradients) if isinstance(g, torch.Tensor))
        if type(some) is torch.Tensor and not torch.compiler.is_compiling():
            _complain(some, (), some.dtype, name)
        make = torch.ops.graphwright.no_gradient.default
        return tuple(
            None if s is None or not needs else make(some, s[0], s[1], name)
            for s, needs in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )

    return backward, setup_context


def refusing_kernel(name: str) -> Callable[..., Any]:
    """For an operator that autograd cannot follow: refuse tensors for which it would have to.

    What it writes to has a new version afterwards, so that autograd notices if that was saved.
    """
    space, _, own = name.partition("::")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops, space), own).default
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ExtensionError(
                f"{name} cannot be followed by autograd"
                + (", since it writes to an argument." if writes(operator._schema) else "."),
                remedy="Call it under torch.no_grad(), or on detached tensors.",
            )
        if forward_ad._current_level >= 0:
            refuse_tangents(name, tensors)
        result = operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        written = [t for t in _written(operator._schema, args, kwargs) if not t.is_inference()]
        torch.autograd.graph.increment_version([t for t in written if not _is_fake(t)])
        return result

    return kernel


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or type(tensor).__module__.startswith("torch._subclasses")


def _written(
    schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def suffix_of(before: int) -> str:
    """What names have in addition that this process has used so often before."""
    return f"__{before + 1}" if before else ""


def known_to_caches(digest: str) -> None:
    """Have torch.compile's caches on disk tell operators of one name apart.

    They know an operator by its name, and keep what its fake and its backward were.
    """
    from torch.compiler import config

    _DIGESTS.add(digest)
    tag = hashlib.sha256(" ".join(sorted(_DIGESTS)).encode()).hexdigest()
    config.cache_key_tag = _TAG.sub(f" graphwright:{tag}", config.cache_key_tag, count=1)
