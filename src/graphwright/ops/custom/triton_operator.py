"""triton_op(): turn a function that launches Triton kernels into a PyTorch operator."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calls.fingerprint import described
from ...calls.options import callable_problem, in_brief, items_problem, names_checked, refuse
from ...errors import ExtensionError, OptionError, first_line
from .operator import Operator, Token, check_name
from .registration import derivative, known_to_caches, refusing_kernel, suffix_of

_LOCK = threading.Lock()
_MADE: dict[str, list[tuple[_OperatorRecipe, Operator]]] = {}
# Libraries take what they have registered with them when they go.
_KEPT: list[torch.library.Library] = []


@names_checked
def triton_op(
    name: str,
    function: Callable[..., Any],
    *,
    mutates_args: Iterable[str] = (),
    reference: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    samples: Sequence[tuple[Any, ...]] = (),
) -> Operator:
    """Turn a function that launches Triton kernels into a PyTorch operator.

    It calls torch.library.triton_op, and adds what else an operator needs. torch.compile sees the
    kernels and may fuse others around them; the operator can be captured, exported, tuned and
    pickled.

    Args:
        name: `"space::name"`, a namespace of your own and a name.
        function: makes the results with operations of PyTorch, and launches kernels by
            `torch.library.wrap_triton(kernel)[grid](...)`. Its annotations are its schema.
        mutates_args: names of arguments that it writes to.
        reference: the same in plain PyTorch, for tensors on the CPU.
        backward: `backward(ctx, *gradients)`, as torch.library.register_autograd takes it. None: a
            backward through it is an error.
        setup_context: `setup_context(ctx, inputs, output)`, which keeps what `backward` needs.
        samples: calls with which torch.library.opcheck checks the operator at once.

    Raises:
        ExtensionError: its annotations make no schema, or a check of a sample fails.
        OptionError: the name or an option makes no sense.
    """
    refuse(
        "triton_op",
        None
        if isinstance(name, str)
        else f"name is {in_brief(name)}, not a text: write 'mine::name'",
        callable_problem("function", function),
        items_problem("mutates_args", mutates_args, "names"),
        *(
            None if value is None else callable_problem(option, value)
            for option, value in (
                ("reference", reference),
                ("backward", backward),
                ("setup_context", setup_context),
            )
        ),
        items_problem("samples", samples, "tuples of arguments"),
    )
    space, separator, own = name.partition("::")
    if not separator:
        raise OptionError(f"{name!r} has no namespace.", remedy=f"Call it 'mine::{name}', say.")
    check_name(space, "an extension")
    check_name(own, "an operator")
    if not all(isinstance(sample, tuple) for sample in samples):
        raise OptionError(
            f"A sample of {name} is no tuple of arguments.", remedy="Write samples=[(x,)]."
        )
    recipe = _OperatorRecipe(
        name, function, tuple(mutates_args), reference, backward, setup_context
    )
    if recipe.mutated and backward is not None:
        raise ExtensionError(
            f"{name} writes to an argument, and has a backward.",
            remedy="Return a new tensor instead, which autograd can follow.",
        )
    return _made(recipe, samples)


@dataclass(frozen=True)
class _OperatorRecipe:
    """All that an operator is made of: another process makes the same of it."""

    name: str
    function: Callable[..., Any]
    mutated: tuple[str, ...]
    reference: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None
    token: Token = field(default_factory=Token, compare=False)

    @property
    def digest(self) -> str:
        """Of the code of all functions."""
        code = (self.function, self.reference, self.backward, self.setup_context)
        return hashlib.sha256(described(code).encode()).hexdigest()


def _made(recipe: _OperatorRecipe, samples: Iterable[tuple[Any, ...]] = ()) -> Operator:
    """The operator of a recipe: the one that there is, if it is the same."""
    with _LOCK:
        others = _MADE.setdefault(recipe.name, [])
        for there, operator in others:
            if recipe.token == there.token or recipe == there:
                return operator
        operator = _defined(recipe, recipe.name + suffix_of(len(others)))
        for sample in samples:
            operator.check(*sample)  # What fails leaves its name to the next one.
        others.append((recipe, operator))
        known_to_caches(recipe.digest)
        return operator


def _defined(recipe: _OperatorRecipe, name: str) -> Operator:
    """A new operator."""
    try:
        made: Any = torch.library.triton_op(name, recipe.function, mutates_args=recipe.mutated)
    except Exception as error:
        raise ExtensionError(
            f"{name} cannot be made: {first_line(error)}",
            remedy="Annotate each argument and the result: "
            "def f(x: torch.Tensor, n: int) -> torch.Tensor.",
        ) from error
    made.register_kernel("cpu")(recipe.reference or functools.partial(_only_on_a_gpu, name))
    space, _, own = name.partition("::")
    schema = getattr(getattr(torch.ops, space), own).default._schema
    if recipe.mutated:
        library = torch.library.Library(space, "IMPL")
        _KEPT.append(library)
        library.impl(own, refusing_kernel(name), "Autograd", with_keyset=True, allow_override=True)
    elif schema.returns:
        backward, setup_context = derivative(name, recipe.backward, recipe.setup_context)
        made.register_autograd(backward, setup_context=setup_context)
    return Operator(name, functools.partial(_made, recipe), recipe.digest)


def _only_on_a_gpu(name: str, *args: Any, **kwargs: Any) -> Any:
    raise ExtensionError(
        f"{name} was called with tensors on the CPU, where Triton has no kernels.",
        remedy="Pass triton_op() a reference in plain PyTorch, or move the tensors.",
    )


# Its name in files that were pickled before.
_Recipe = _OperatorRecipe
