"""Numbers of optimizers that graphs read from tensors: momenta, betas, weight decay and others.

Schedulers such as OneCycleLR write another momentum into the parameter groups before each step.
PyTorch takes tensors in place of few such numbers, and no fused kernel takes any but a learning
rate. So while a step is recorded, a number that changes is a tensor in its group, and
`NumbersAsTensors` rewrites the calls that would have to read it: `x.add_(y, alpha=number)` becomes
`x.add_(y * number)`, and a fused kernel becomes what it computes. A call that it does not know
reads the tensor on the host, which every recorder refuses; then the number is a constant again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError

Tensors = list[torch.Tensor]
# Scalars that are written into a tensor of another dtype are rounded to it, not computed with as
# kernels do. So this is done only where both are the same.
_DTYPES = frozenset((torch.float32, torch.float64))
# Comparisons of a number that decide what an optimizer does, such as `momentum != 0`.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_COMPARISONS |= {f"__{name}__": compare for name, compare in _COMPARISONS.items()}


class Number:
    """An option of a parameter group, a number or several, that graphs read from tensors.

    Attributes:
        key: the option's name.
        tensors: those that an optimizer's step reads, in float64; None while it is a constant of
            the kernels.
        shown: those that other code of a training step reads, in float32 like a loss.
        proven: whether a capture with tensors has succeeded.
        unfit: why a capture with tensors has failed; None if none has.
    """

    def __init__(self, optimizer: Optimizer, index: int, key: str, device: torch.device) -> None:
        self._optimizer = optimizer
        self._index = index
        self.key = key
        self._device = device
        self._copied: Any = None
        self._asked: dict[tuple[int, str, float], None] = {}
        self._before: Any = None
        self._put: Any = None
        self._is_set = False
        self.tensors: tuple[torch.Tensor, ...] | None = None
        self.shown: tuple[torch.Tensor, ...] = ()
        self.proven = False
        self.unfit: str | None = None

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group, as it is now."""
        return self._optimizer.param_groups[self._index]

    @property
    def value(self) -> Any:
        """The option, as it is now; None if there is none."""
        groups = self._optimizer.param_groups
        return groups[self._index].get(self.key) if self._index < len(groups) else None

    @property
    def option(self) -> tuple[Optimizer, int, str]:
        """The name that `Settings.difference` has for it."""
        return self._optimizer, self._index, self.key

    @property
    def in_tensors(self) -> bool:
        """Whether graphs read it from tensors: not if the user has put in something else."""
        return self.tensors is not None and len(_numbers_in(self.value)) == len(self.tensors)

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether it is an option of this optimizer."""
        return self._optimizer is optimizer

    def __str__(self) -> str:
        return f"{self.key} of {type(self._optimizer).__name__}, group {self._index}"

    @property
    def can_change(self) -> bool:
        """Whether it may be put into tensors."""
        return self.why_constant() is None

    def move_to_tensors(self) -> None:
        """Have graphs read it from tensors from now on."""
        count = len(_numbers_in(self.value))
        with torch.inference_mode(False):
            made = [torch.zeros((), device=self._device) for _ in range(count)]
            self.tensors = tuple(each.double() for each in made)
            self.shown = tuple(made)
        self._copied = None
        self.refresh()

    def move_to_constant(self, why: str) -> None:
        """Have graphs read it from tensors no more, since that failed."""
        self.tensors, self.unfit = None, why

    def why_constant(self) -> str | None:
        """Why it is not to be put into tensors, in words; None if it may be."""
        if not _numbers_in(self.value):
            return f"{self.key} is no number"
        if any(parameter.dtype not in _DTYPES for parameter in self.group["params"]):
            return "not all parameters are in float32 or float64"
        return None if self.unfit is None else f"reading it from a tensor failed: {self.unfit}"

    def refresh(self) -> None:
        """Copy the group's present numbers into the tensors."""
        if self.tensors is None:
            return
        now = self.value
        if now is self._copied:
            return
        numbers = _numbers_in(now)
        if len(numbers) == len(self.tensors):
            with torch.no_grad():
                for tensor, shown, number in zip(self.tensors, self.shown, numbers, strict=True):
                    tensor.fill_(number)
                    shown.fill_(number)
            self._copied = now

    def answers(self, value: Any) -> tuple[Any, ...] | None:
        """What decides whether a graph fits a value; None if it is none that tensors can hold."""
        numbers = _numbers_in(value)
        if self.tensors is None or len(numbers) != len(self.tensors):
            return None
        asked = [_COMPARISONS[how](numbers[i], other) for i, how, other in self._asked]
        return (type(value) is tuple, *asked)

    def ask(self, position: int, how: str, other: float) -> bool:
        """Answer a comparison in an optimizer's code; a graph holds for values of this answer."""
        self._asked[position, how, other] = None
        return _COMPARISONS[how](_numbers_in(self._before)[position], other)

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Put `shown` into the group in place of the numbers; only if it is `in_tensors`.

        Raises:
            CaptureError: the step has set the option itself.
        """
        all_tensors = (*(self.tensors or ()), *self.shown)
        versions = [tensor._version for tensor in all_tensors]
        self._before = self._put = self.value
        self._is_set = False
        self.put(self.shown)
        group = self.group
        try:
            yield
            written = versions != [tensor._version for tensor in all_tensors]
            if self._is_set or written or group.get(self.key) is not self._put:
                raise CaptureError(
                    f"The step sets {self.key} of an optimizer, which a graph would not.",
                    remedy="Set it between the steps.",
                )
        finally:
            group[self.key] = self._before

    def put(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Put others of the tensors into the group."""
        self._is_set = self._is_set or self.group.get(self.key) is not self._put
        self._put = tensors if isinstance(self._before, tuple) else tensors[0]
        self.group[self.key] = self._put


@contextlib.contextmanager
def as_tensors(numbers: Sequence[Number], rates: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have a training step read numbers from tensors, and its optimizers compute with them.

    Calls are rewritten while an optimizer steps, and not meanwhile: torch.compile compiles a model
    anew for each such mode.

    Args:
        numbers: those that are `in_tensors`.
        rates: tensors of learning rates.
    """
    running: list[Any] = []  # One optimizer may step inside of another's step.
    mode = contextlib.ExitStack()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not running:
            for number in numbers:
                number.put(number.tensors or ())
            mode.enter_context(NumbersAsTensors(numbers, rates))
        running.append(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        running.pop()
        if not running:
            mode.close()
            for number in numbers:
                number.put(number.shown)

    with contextlib.ExitStack() as stack:
        for number in numbers:
            stack.enter_context(number.as_tensors())
        for hook in (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ):
            stack.callback(hook.remove)
        try:
            yield
        finally:
            mode.close()  # A step has failed if it is open still.


def _numbers_in(value: Any) -> tuple[float, ...]:
    """The numbers that an option consists of; none if it is of another kind."""
    several = value if type(value) is tuple else (value,)
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in several):
        return several
    return ()


class NumbersAsTensors(TorchFunctionMode):
    """Has calls of PyTorch's take tensors in place of the numbers of optimizers.

    Args:
        numbers: those that are in tensors now.
        rates: tensors of learning rates, which are treated alike.
    """

    def __init__(self, numbers: Iterable[Number], rates: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._number_of: dict[int, tuple[Number, int]] = {
            id(tensor): (number, position)
            for number in numbers
            for position, tensor in enumerate(number.tensors or ())
        }
        # By identity, those computed from numbers alone too; kept, so that none is reused.
        self._known: dict[int, torch.Tensor] = {id(rate): rate for rate in rates}
        for number in numbers:
            self._known |= {id(tensor): tensor for tensor in number.tensors or ()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = {} if kwargs is None else kwargs
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        mine = [tensor for tensor in given if id(tensor) in self._known]
        if not mine:
            return func(*args, **kwargs)
        asked = self._asked(func.__name__, args)
        if asked is not None:
            return asked
        rewrite = _REWRITES.get(func.__name__)
        result = NotImplemented
        if rewrite is not None:
            result = rewrite(lambda t: id(t) in self._known, func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if type(result) is not torch.Tensor:
            return result
        if len(mine) == len(given):
            self._known[id(result)] = result
            return result
        return _narrowed(result, [t.dtype for t in given if id(t) not in self._known])

    def _asked(self, name: str, args: Any) -> bool | None:
        """The answer to a comparison of a number, or to whether it is zero; else None."""
        number, position = self._number_of.get(id(args[0]), (None, 0)) if args else (None, 0)
        if number is None:
            return None
        if name in _COMPARISONS and len(args) == 2 and isinstance(args[1], int | float):
            return number.ask(position, name, args[1])
        return number.ask(position, "ne", 0) if name == "__bool__" else None


def _narrowed(result: torch.Tensor, others: Sequence[torch.dtype]) -> torch.Tensor:
    """A result in the dtype that it has with a number in the place of a tensor.

    Of two tensors without dimensions the wider one counts.

    Args:
        result: of an operation.
        others: dtypes of the tensors that are no numbers.
    """
    if result.dtype is not torch.float64 or len(set(others)) != 1:
        return result
    return result.to(others[0]) if others[0].is_floating_point else result


# How calls are rewritten that would read a number on the host. Each is given a function that tells
# such tensors, and the call; it returns NotImplemented for a call that needs no change.
_IsNumber = Callable[[Any], bool]
_Rewrite = Callable[[_IsNumber, Any, Any, Any], Any]
_REWRITES: dict[str, _Rewrite] = {}


def _rewrites(*names: str) -> Callable[[_Rewrite], _Rewrite]:
    def register(rewrite: _Rewrite) -> _Rewrite:
        _REWRITES.update(dict.fromkeys(names, rewrite))
        return rewrite

    return register


def _all(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments of a call in a row."""
    return (*args, *kwargs.values())


def _like(number: torch.Tensor, tensors: Any) -> torch.Tensor:
    """A number in the dtype of tensors, so that the fast kernels for many tensors take it."""
    first = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
    return number.to(first.dtype)


@_rewrites("add", "add_", "sub", "sub_")
def _add(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    alpha = kwargs.get("alpha")
    if not is_number(alpha):
        return NotImplemented
    x, other = args
    return func(x, torch.mul(other, alpha))


@_rewrites("addcmul", "addcmul_", "addcdiv", "addcdiv_")
def _add_product(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    value = kwargs.get("value")
    if not is_number(value):
        return NotImplemented
    x, one, other = args
    return func(x, one * value, other)


@_rewrites("lerp", "lerp_")
def _lerp(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    x, end, weight = _all(args, kwargs)
    return func(x, end, _like(weight, x)) if is_number(weight) else NotImplemented


@_rewrites("_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_")
def _foreach_scale(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    tensors, other = args
    return func(tensors, _like(other, tensors)) if is_number(other) else NotImplemented


@_rewrites("_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_")
def _foreach_add(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    tensors, other = args
    alpha = kwargs.get("alpha")
    in_place = func.__name__.endswith("_")
    if is_number(alpha):
        return func(tensors, torch._foreach_mul(other, _like(alpha, tensors)))
    if not is_number(other):
        return NotImplemented
    if func.__name__.startswith("_foreach_sub"):  # It takes no tensor.
        other = -other
    # Given a tensor, the function itself would read it: it prefers its overload for numbers.
    overloads = torch.ops.aten._foreach_add_ if in_place else torch.ops.aten._foreach_add
    return overloads.Tensor(tensors, _like(other, tensors), **kwargs)


@_rewrites("_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv", "_foreach_addcdiv_")
def _foreach_add_product(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    tensors, one, other, *value = _all(args, kwargs)
    if not (value and is_number(value[0])):
        return NotImplemented
    return func(tensors, torch._foreach_mul(one, _like(value[0], tensors)), other)


@_rewrites("_foreach_lerp", "_foreach_lerp_")
def _foreach_lerp(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    tensors, ends, weight = _all(args, kwargs)
    if not is_number(weight):
        return NotImplemented
    way = list(torch._foreach_sub(ends, tensors))
    torch._foreach_mul_(way, _like(weight, tensors))
    add: Any = torch._foreach_add_ if func.__name__.endswith("_") else torch._foreach_add
    return add(tensors, way)


@_rewrites("_foreach_pow", "_foreach_pow_")
def _foreach_pow(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
    base, exponent = _all(args, kwargs)
    if is_number(base):
        base = [_like(base, exponent)] * len(exponent)
    elif is_number(exponent):
        exponent = [_like(exponent, base)] * len(base)
    else:
        return NotImplemented
    return func(base, exponent)


def _rewrites_kernel(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Take a function in place of a fused kernel, if one of its numbers but lr is a tensor."""

    def register(instead: Callable[..., None]) -> Callable[..., None]:
        def rewrite(is_number: _IsNumber, func: Any, args: Any, kwargs: Any) -> Any:
            if not any(is_number(value) for key, value in kwargs.items() if key != "lr"):
                return NotImplemented
            scale, overflows = kwargs.pop("grad_scale", None), kwargs.pop("found_inf", None)
            # All that a kernel writes to, which is nothing if gradients overflow.
            written = [tensor for tensors in args for tensor in tensors]
            before = [] if overflows is None else [tensor.clone() for tensor in written]
            if scale is not None:
                _times(args[1], scale.double().reciprocal())
            instead(*args, **kwargs)
            for tensor, old in zip(written, before, strict=overflows is not None):
                tensor.copy_(torch.where(overflows == 1, old, tensor))
            return None

        _REWRITES[name] = rewrite
        return instead

    return register


def _scaled(tensors: Tensors, factor: Any) -> Tensors:
    if isinstance(factor, torch.Tensor):
        factor = _like(factor, tensors)
    return list(torch._foreach_mul(tensors, factor))


def _times(tensors: Tensors, factor: Any) -> None:
    if isinstance(factor, torch.Tensor):
        factor = _like(factor, tensors)
    torch._foreach_mul_(tensors, factor)


def _plus(tensors: Tensors, summand: Any) -> None:
    if isinstance(summand, torch.Tensor):
        torch.ops.aten._foreach_add_.Tensor(tensors, _like(summand, tensors))
    else:
        torch._foreach_add_(tensors, summand)


def _with_l2(grads: Tensors, params: Tensors, weight_decay: Any) -> Tensors:
    """Gradients of a loss with an L2 penalty."""
    if not isinstance(weight_decay, torch.Tensor) and weight_decay == 0:
        return grads
    return list(torch._foreach_add(grads, _scaled(params, weight_decay)))


@_rewrites_kernel("_fused_sgd_")
def _sgd(
    params: Tensors,
    grads: Tensors,
    momenta: Tensors,
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
) -> None:
    if maximize:
        grads = list(torch._foreach_neg(grads))
    grads = _with_l2(grads, params, weight_decay)
    if momenta:
        if is_first_step:
            torch._foreach_copy_(momenta, grads)
        else:
            _times(momenta, momentum)
            torch._foreach_add_(momenta, _scaled(grads, 1 - dampening))
        grads = list(torch._foreach_add(grads, _scaled(momenta, momentum))) if nesterov else momenta
    torch._foreach_add_(params, _scaled(grads, -lr))


def _adam(
    params: Tensors,
    grads: Tensors,
    averages: Tensors,
    squares: Tensors,
    largest: Tensors,
    steps: Tensors,
    *,
    amsgrad: bool,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    decoupled: bool,
) -> None:
    if maximize:
        grads = list(torch._foreach_neg(grads))
    if decoupled:
        _times(params, 1 - lr * weight_decay)
    else:
        grads = _with_l2(grads, params, weight_decay)
    way = list(torch._foreach_sub(grads, averages))
    torch._foreach_add_(averages, _scaled(way, 1 - beta1))
    _times(squares, beta2)
    torch._foreach_addcmul_(squares, _scaled(grads, 1 - beta2), grads)
    # In float64, as the kernels on the host compute it: 1 - beta2 ** step loses digits.
    counts = torch.stack(list(steps)).double()
    root = list((1 - beta2**counts).sqrt().to(params[0].dtype))
    size = list((-lr / (1 - beta1**counts)).to(params[0].dtype))
    if amsgrad:
        torch._foreach_maximum_(largest, squares)
        squares = largest
    denominators = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(denominators, root)
    _plus(denominators, eps)
    torch._foreach_div_(denominators, size)
    torch._foreach_addcdiv_(params, averages, denominators)


@_rewrites_kernel("_fused_adam_")
def _adam_with_l2(*args: Any, **kwargs: Any) -> None:
    _adam(*args, **kwargs, decoupled=False)


@_rewrites_kernel("_fused_adamw_")
def _adam_decoupled(*args: Any, **kwargs: Any) -> None:
    _adam(*args, **kwargs, decoupled=True)


@_rewrites_kernel("_fused_adagrad_")
def _adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
) -> None:
    if maximize:
        grads = list(torch._foreach_neg(grads))
    grads = _with_l2(grads, params, weight_decay)
    torch._foreach_addcmul_(sums, grads, grads)
    counts = torch.stack(list(steps)).double()
    size = list((-lr / (1 + (counts - 1) * lr_decay)).to(params[0].dtype))
    roots = list(torch._foreach_sqrt(sums))
    _plus(roots, eps)
    torch._foreach_div_(roots, size)
    torch._foreach_addcdiv_(params, grads, roots)
