"""make_graphed_callables(): run forward and backward of modules and functions as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, overload

import torch
from torch import nn

from ...calls.introspection import StandIn, original_of
from ...calls.modules import FunctionModule
from ...calls.options import (
    args_problem,
    callable_problem,
    choice_problem,
    count_problem,
    flag_problem,
    in_brief,
    kwargs_problem,
    names_checked,
    refuse,
)
from ...dispatch.graphed_callable import OnMiss
from ...errors import CaptureError, OptionError
from ...graphs.composition import warn_of_lost_gain
from ...graphs.conditions import capturing_now
from ...graphs.memory import MemoryPool, pool_problem
from ..distributed import refuse_distributed
from .captured_pair import CapturedPair
from .graphed_forward import GraphedForward

Graphable = TypeVar("Graphable", bound=Callable[..., Any])


@overload
def make_graphed_callables(
    callables: tuple[Graphable, ...],
    sample_args: Sequence[Sequence[Any]],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: MemoryPool | tuple[int, int] | None = None,
    *,
    sample_kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    activation_sets: int = 4,
    on_miss: OnMiss = "capture",
) -> tuple[Graphable, ...]: ...
@overload
def make_graphed_callables(
    callables: Graphable,
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: MemoryPool | tuple[int, int] | None = None,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    activation_sets: int = 4,
    on_miss: OnMiss = "capture",
) -> Graphable: ...
@names_checked
def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    sample_kwargs: Any = None,
    activation_sets: int = 4,
    on_miss: OnMiss = "capture",
) -> Any:
    """Make forwards and backwards of callables run as graphs, for training.

    It takes the arguments of `torch.cuda.make_graphed_callables`. A graphed callable is used like
    the original: gradients reach its arguments, the parameters of a module, and what a function
    names or closes over. They belong to the caller, and no replay changes them. A module itself is
    returned with its `forward` replaced: graphs answer while its training mode is the present one,
    else the original forward does. Hooks of the module itself run around the graphs. For a result
    of `graph()`, `fuse()` or `tune()`, which gives no gradients, the module inside it is used and
    returned.

    What happens to other calls (other shapes, dtypes, strides, plain values, autocast, rebound
    parameters, hooks, modes of submodules) is up to `on_miss`. Inside another capture,
    torch.compile or a dispatch mode, the original runs. `forward.statistics` of a module, and
    `statistics` of a function, count how calls went.

    An output that the loss does not use gets a gradient of zero where its backward joins that of
    other outputs. If a function reaches tensors through containers, their replacement by other
    tensors goes unnoticed. Side effects in Python are not repeated. State that is seen to change is
    refused, such as a list that hooks of submodules append to.

    Args:
        callables: a module or function, or a tuple of them. They may run in any order.
        sample_args: arguments of one call, as a tuple; for a tuple of callables, one tuple for
            each. Tensors, plain values and containers of them, with requires_grad as in later
            calls. They are not written to.
        num_warmup_iters: ordinary runs before the capture, in addition to those that observe it.
            What runs change (batch-norm statistics, random numbers, gradients) is put back.
        allow_unused_input: whether arguments and parameters that require grad may get no gradient.
        pool: memory to share with other graphs. A handle of PyTorch's, from
            `torch.cuda.graph_pool_handle()`, is accepted without effect: a new pool is made.
        sample_kwargs: keyword arguments of that call: a dictionary, or one for each callable.
        activation_sets: how many forwards of one signature may wait for their backwards at once
            and still be graphs. Each needs memory of its own; it is captured when that many wait
            for the first time, if it fits under the pool's limit. A forward beyond them is eager
            and counted, and a warning says so once. A forward no longer waits once its backward
            has run without retain_graph=True, or its outputs were dropped.
        on_miss: a call that no graph fits is captured in the same pool ("capture"), runs without
            graphs ("eager"), or raises SignatureError ("error").

    Returns:
        the module, or a function; a tuple of them for a tuple.

    Raises:
        CaptureError: a call cannot be captured; names the operation, the line and the remedy.
            Backwards raise it if the graphs were closed before, and for create_graph=True.
        MemoryBudgetExceeded: it does not fit under the pool's limit.
        OptionError: an argument makes no sense.
    """
    refuse(
        "make_graphed_callables",
        count_problem("num_warmup_iters", num_warmup_iters, 0),
        flag_problem("allow_unused_input", allow_unused_input),
        None if _is_handle(pool) else pool_problem(pool),
        count_problem("activation_sets", activation_sets),
        choice_problem("on_miss", on_miss, get_args(OnMiss)),
    )
    several = isinstance(callables, tuple)
    each = tuple(map(_inside, callables if several else (callables,)))
    calls = _calls(each, sample_args, sample_kwargs, several=several)
    _check_all(each, several=several)
    if capturing_now():
        raise CaptureError("A capture inside another one.", remedy="Capture them one by one.")
    memory = pool if isinstance(pool, MemoryPool) else MemoryPool()
    forwards = [
        GraphedForward(
            fn,
            memory,
            warmup=num_warmup_iters,
            allow_unused=allow_unused_input,
            sets=activation_sets,
            on_miss=on_miss,
        )
        for fn in each
    ]
    made = _recorded(forwards, calls)
    for fn, forward in zip(each, forwards, strict=True):
        if isinstance(fn, nn.Module):
            fn.forward = forward
    for forward, pair in zip(forwards, made, strict=True):
        forward.add(pair)
    pairs = zip(each, forwards, strict=True)
    results = tuple(fn if isinstance(fn, nn.Module) else forward for fn, forward in pairs)
    return results if several else results[0]


def _recorded(
    forwards: Sequence[GraphedForward], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[CapturedPair]:
    """The graphs of a call of each; none of them stays if one fails."""
    made: list[CapturedPair] = []
    try:
        # Warm up all before the first is recorded: what warm-ups leave behind is free by then.
        for forward, (args, kwargs) in zip(forwards, calls, strict=True):
            made.append(forward.new_pair(args, kwargs))
            made[-1].warm()
        for pair in made:
            pair.record()
    except BaseException:
        for pair in made:
            pair.close()
        raise
    return made


def _calls(
    callables: Sequence[Any], sample_args: Any, sample_kwargs: Any, *, several: bool
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The sample arguments of each callable, checked."""
    args = sample_args if several else (sample_args,)
    kwargs = sample_kwargs if several and sample_kwargs is not None else (sample_kwargs,)
    if several and sample_kwargs is None:
        kwargs = (None,) * len(callables)
    for what, given in (("sample_args", args), ("sample_kwargs", kwargs)):
        if not isinstance(given, tuple | list) or len(given) != len(callables):
            count = len(given) if isinstance(given, tuple | list) else in_brief(given)
            raise OptionError(
                f"{what} has to be a tuple with one entry for each of the {len(callables)} "
                f"callables, not {count}.",
            )
    refuse(
        "make_graphed_callables",
        *(args_problem("sample_args", one, "sample_kwargs") for one in args),
        *(kwargs_problem("sample_kwargs", one) for one in kwargs),
    )
    return [(tuple(a), dict(k or {})) for a, k in zip(args, kwargs, strict=True)]


def _inside(fn: Any) -> Any:
    """The module or function inside a result of graph(), fuse() or tune()."""
    while isinstance(fn, StandIn) and not isinstance(fn, GraphedForward):
        if not fn._graphwright_trains:
            warn_of_lost_gain(
                fn,
                f"make_graphed_callables() got a {type(fn).__name__}, which is for inference",
                "Pass the model itself.",
            )
        fn = original_of(fn)
        fn = fn.function_of() if isinstance(fn, FunctionModule) else fn
    return fn


def _check_all(callables: Sequence[Any], *, several: bool) -> None:
    for index, fn in enumerate(callables):
        _check(fn, f"callables[{index}]" if several else "callables")
    if len(set(map(id, callables))) < len(callables):
        raise OptionError(
            "The same callable stands twice in `callables`.",
            remedy="Name it once; with on_miss='capture' later calls may be of other kinds.",
        )


def _check(fn: Any, name: str) -> None:
    refuse("make_graphed_callables", callable_problem(name, fn))
    owner = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
    refuse_distributed(owner)
    if isinstance(fn, torch.jit.ScriptModule):
        raise OptionError(
            f"{name} is a TorchScript module, whose forward cannot be replaced.",
            remedy="Pass a function that calls it.",
        )
    if isinstance(fn, nn.Module):
        buffers = [path for path, buffer in fn.named_buffers() if buffer.requires_grad]
        if buffers:
            raise OptionError(
                f"Buffers of {name} require grad: {', '.join(buffers)}.",
                remedy="Make them parameters, or set requires_grad=False.",
            )


def _is_handle(pool: Any) -> bool:
    """Whether it is a handle of PyTorch's, in whose place a new pool is made."""
    return isinstance(pool, tuple) and all(isinstance(n, int) for n in pool)
