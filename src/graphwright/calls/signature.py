"""Call signatures: describe a call, and say how two calls differ.

What was built for one call must never answer another one silently. `CallSignature` describes the
arguments and the global switches that change what a call computes; `watch.ModuleWatch` what a
module holds. `RangedSignature` is for what was built for a range of sizes, and answers all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import OptionError, SignatureError, in_a_row
from .argument_sharing import overlapping, shared
from .leaves import describe, fitting, guard_of, in_words, matches, value_of, with_value
from .objects import every_class_in, has_nodes
from .options import in_brief
from .split import (
    Args,
    Kwargs,
    MixedArguments,
    Pattern,
    Split,
    argument_names,
    flatten,
    in_order_of,
    objects_of,
    unflatten,
)
from .switches import CALL_NAMES, CUDA, autocast, lasting_switches

# A call as users write it down: positional arguments, keyword arguments, or a pair of both.
Call = tuple[Any, ...] | Mapping[str, Any] | tuple[tuple[Any, ...], Mapping[str, Any]]

_QUICK_VALUES = frozenset((bool, int, float, str, type(None)))
# Arguments that differ from those of a known call, beyond which the others are counted.
_MOST_NAMED = 6


class _AttentionKernels:
    """The priority order of attention kernels, which PyTorch changes when it first picks one.

    Only then does it see that the GPU prefers cuDNN's. That is no change by the user.

    Attributes:
        settled: whether PyTorch has picked one.
    """

    settled = False

    @classmethod
    def settle(cls) -> None:
        """Have PyTorch pick one now, where CUDA is in use."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        cls.settled = True
        with contextlib.suppress(RuntimeError), _disable_current_modes():
            few = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(few, few, few)


def has_function_mode() -> bool:
    """Whether a function mode is on, other than that of the default device."""
    c = torch._C
    return any(
        type(c._get_function_stack_at(place)) is not DeviceContext
        for place in range(c._len_torch_function_stack())
    )


@dataclass(frozen=True)
class CallSignature:
    """What two calls must share so that what was built for one can answer the other."""

    spec: pytree.TreeSpec
    leaves: tuple[tuple[Any, ...], ...]
    aliases: tuple[tuple[int, int, int], ...]
    switches: tuple[Any, ...]
    # For the common case, arguments that are all plain tensors, which are compared without
    # flattening: descriptions of the positional arguments, and of the keyword arguments. None for
    # other calls.
    flat: tuple[tuple[tuple[Any, ...], ...], dict[str, tuple[Any, ...]]] | None = field(
        compare=False
    )
    # PyTorch's own check in C++ of tensors against this call's: True only for calls that fit.
    guard: Callable[..., bool] | None = field(compare=False, repr=False)
    # The same for calls that have plain values beside the tensors.
    mixed: MixedArguments | None = field(compare=False, repr=False, default=None)
    # The same for calls with containers and objects, of a signature that lasts.
    pattern: Pattern | None = field(compare=False, repr=False, default=None)
    # Whether objects are taken apart.
    objects: bool = field(compare=False, repr=False, default=False)
    # Whether calls with the keyword arguments in another order fit, since nobody can see it.
    any_order: bool = field(compare=False, repr=False, default=False)

    @classmethod
    def of(
        cls,
        args: Args,
        kwargs: Kwargs,
        *,
        objects: bool = False,
        any_order: bool = False,
        lasts: bool = False,
    ) -> CallSignature:
        """Describe a call.

        Args:
            args: of the call.
            kwargs: likewise.
            objects: whether objects among them are taken apart, or refused.
            any_order: whether calls fit that have the keyword arguments in another order; only
                where the callable cannot see it (`binding.sees_order`).
            lasts: whether many calls are compared with it, which it is made ready for.

        Raises:
            SignatureError: an argument is neither a tensor nor a plain value.
        """
        if CUDA and not _AttentionKernels.settled:
            _AttentionKernels.settle()
        leaves, spec = flatten(args, kwargs, objects=objects)
        described = _described(leaves, args, kwargs, objects=objects)
        flat = guard = None
        aliases = shared(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) > 1 and overlapping(tensors):
            raise SignatureError(
                "Two arguments share memory that belongs to something other than PyTorch.",
                remedy="Pass copies, or views of one tensor.",
            )
        values = (*args, *kwargs.values())
        if not aliases and all(isinstance(value, torch.Tensor) for value in values):
            flat = _described_alone(args, kwargs)
            guard = guard_of(values)
        mixed = pattern = None
        if flat is None and not aliases:
            mixed = MixedArguments.of(args, kwargs, any_order=any_order)
            if mixed is None and lasts:
                pattern = Pattern.of(args, kwargs, leaves, spec, any_order=any_order)
        switched = (*autocast(), *lasting_switches())
        return cls(
            spec,
            described,
            aliases,
            switched,
            flat,
            guard,
            mixed,
            pattern,
            objects,
            any_order,
        )

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the keyword arguments, in order."""
        return tuple(self.spec.children()[1].context)

    def in_order(self, kwargs: Kwargs) -> Kwargs:
        """The keyword arguments of a call that fits, in the order of those described here."""
        if not self.any_order or (*kwargs,) == self.names:
            return kwargs
        return {name: kwargs[name] for name in self.names}

    def in_any_order(self) -> CallSignature:
        """The same signature; calls with the keyword arguments in another order fit too."""
        mixed = None if self.mixed is None else replace(self.mixed, any_order=True)
        pattern = None if self.pattern is None else replace(self.pattern, any_order=True)
        return replace(self, mixed=mixed, pattern=pattern, any_order=True)

    def _ordered(self, kwargs: Kwargs) -> Kwargs:
        """The keyword arguments of any call, in the order of those described if that is free."""
        return self.in_order(kwargs) if kwargs.keys() == {*self.names} else kwargs

    @functools.cached_property
    def has_objects(self) -> bool:
        """Whether objects among the arguments were taken apart."""
        return self.objects and has_nodes(self.spec)

    @functools.cached_property
    def in_objects(self) -> tuple[tuple[pytree.TreeSpec, tuple[Any, ...]], ...]:
        """The arguments that hold objects: the tree of each, with its leaves."""
        if not self.has_objects:
            return ()
        args, kwargs = self.spec.children()
        found, start = [], 0
        for spec in (*args.children(), *kwargs.children()):
            end = start + spec.num_leaves
            if has_nodes(spec):
                found.append((spec, self.leaves[start:end]))
            start = end
        return tuple(found)

    @property
    def holds_static(self) -> bool:
        """Whether an object is a static cache, as transformers names those of a fixed size."""
        return any(
            "Static" in cls.__name__ for spec, _ in self.in_objects for cls in every_class_in(spec)
        )

    @functools.cached_property
    def wants_grad(self) -> bool:
        """Whether any tensor of the call requires grad."""
        return any(len(leaf) == 5 and leaf[4] for leaf in self.leaves)

    @functools.cached_property
    def kind(self) -> Any:
        """What calls share that differ in plain values alone; None if there are no such values."""
        leaves = tuple(leaf if len(leaf) == 5 else leaf[0] for leaf in self.leaves)
        if all(len(leaf) == 5 for leaf in self.leaves):
            return None
        return (self.spec, leaves, self.aliases, self.switches)

    def differing_value(self, other: CallSignature) -> str | None:
        """The first argument in which two calls differ, if they differ in plain values alone."""
        if (self.spec, self.aliases, self.switches) != (other.spec, other.aliases, other.switches):
            return None
        pairs = [*zip(self.leaves, other.leaves, strict=True)]
        found = [index for index, (a, b) in enumerate(pairs) if a != b]
        if not found or any(len(a) == 5 or a[0] is not b[0] for a, b in (pairs[i] for i in found)):
            return None
        args, kwargs = unflatten(range(len(self.leaves)), self.spec)
        return argument_names(args, kwargs, objects=self.objects)[found[0]]

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call has this signature; takes a microsecond or two."""
        # The guard sees neither make_fx's mode nor the tangents of forward AD.
        if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return False
        if self.guard is not None and self.flat is not None:
            positional, named = self.flat
            if len(args) != len(positional) or len(kwargs) != len(named):
                return False
            values = args
            if named:
                if (*kwargs,) == self.names:  # Written out, since it is done at each call.
                    values = (*args, *kwargs.values())
                elif (rest := in_order_of(self.names, kwargs, self.any_order)) is not None:
                    values = (*args, *rest)
                else:
                    return False
            if fitting(self.guard, values):
                return self._same_switches()
        if self.mixed is not None:
            row = self.mixed.values(args, kwargs)
            if row is not None and fitting(self.mixed.guard, self.mixed.tensors(row)):
                return self._same_switches()
        return self.split(args, kwargs) is not None or self._fits_after_all(args, kwargs)

    def _fits_after_all(self, args: Args, kwargs: Kwargs) -> bool:
        """The same for a call that no quick check has told; takes longer."""
        if inside_transform():
            return False
        if self.flat is not None:
            return self._fits_flat(args, kwargs, *self.flat)
        try:
            return CallSignature.of(args, self._ordered(kwargs), objects=self.objects) == self
        except SignatureError:
            return False

    def _fits_flat(
        self,
        args: Args,
        kwargs: Kwargs,
        positional: tuple[Any, ...],
        named: Mapping[str, tuple[Any, ...]],
    ) -> bool:
        """Whether a call of tensors alone has these descriptions; takes longer than the guard."""
        if len(args) != len(positional) or len(kwargs) != len(named):
            return False
        for value, expected in zip(args, positional, strict=True):
            if not matches(value, expected):
                return False
        if not self.any_order and (*kwargs,) != self.names:
            return False
        for name, value in kwargs.items():
            if name not in named or not matches(value, named[name]):
                return False
        values = (*args, *kwargs.values())
        if len(values) > 1 and (shared(values) or overlapping(values)):
            return False
        return self._same_switches()

    def taken_apart(self, args: Args, kwargs: Kwargs) -> Split:
        """A call that is known to fit, taken apart."""
        kwargs = self.in_order(kwargs)
        if self.flat is not None:
            return Split((*args, *kwargs.values()), ())  # All are tensors.
        if self.mixed is not None:
            values = self.mixed.values(args, kwargs)
            if values is not None:
                return Split(values, ())
        if self.pattern is not None:
            found = self.pattern.split(args, kwargs)
            if found is not None:
                return found
        leaves, _ = flatten(args, kwargs, objects=self.objects)
        return Split(leaves, objects_of(args, kwargs))

    def split(self, args: Args, kwargs: Kwargs) -> Split | None:
        """A call with containers or objects, taken apart, if it is quickly told that it fits."""
        pattern = self.pattern
        if pattern is None:
            return None
        if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return None
        found = pattern.split(args, kwargs)
        if found is None or not fitting(pattern.guard, pattern.tensors(found.leaves)):
            return None
        if not self._same_switches():
            return None
        return found

    def _same_switches(self) -> bool:
        """Whether the switches are what they were."""
        return (*autocast(), *lasting_switches()) == self.switches

    def differences(self, args: Args, kwargs: Kwargs, made: str = "built") -> str | None:
        """Why a call does not fit this signature, in words, or None when it fits.

        Args:
            args: of the call.
            kwargs: likewise.
            made: what was done for calls of this signature: "captured", "tuned".
        """
        if inside_transform():
            return (
                "the call is traced, or inside a torch.func transform, forward-mode AD or a mode "
                "of PyTorch's"
            )
        kwargs = self._ordered(kwargs)
        try:
            other = CallSignature.of(args, kwargs, objects=self.objects)
        except SignatureError as error:
            return in_a_row(error)
        if other == self:
            return None
        if other.names != self.names and {*other.names} == {*self.names}:
            return (
                f"the keyword arguments come in another order ({', '.join(other.names)}; {made} "
                f"for {', '.join(self.names)}), which the callable may see"
            )
        found = self.other_arguments(other, made)
        if other.spec == self.spec and other.aliases != self.aliases:
            found.append("the arguments share memory in another way")
        if other.switches != self.switches:
            pairs = zip(CALL_NAMES, self.switches, other.switches, strict=True)
            found += [f"the switch {name} is {b}, and was {a}" for name, a, b in pairs if a != b]
        if self.differs_in_a_number(other):
            found.append("a number that changes from call to call is better passed as a tensor")
        return "; ".join(found)

    def by_name(self) -> dict[str, tuple[Any, ...]]:
        """The descriptions of the arguments' leaves, by their names."""
        args, kwargs = unflatten(range(len(self.leaves)), self.spec)
        names = argument_names(args, kwargs, objects=self.objects)
        return dict(zip(names, self.leaves, strict=True))

    def plain_keywords(self) -> dict[str, Any]:
        """The keyword arguments of the call that are plain values themselves."""
        _, kwargs = self.spec.children()
        _, named = unflatten(self.leaves, self.spec)
        pairs = zip(named.items(), kwargs.children(), strict=True)
        found = {name: leaf for (name, leaf), each in pairs if each.is_leaf()}
        return {name: value_of(leaf) for name, leaf in found.items() if len(leaf) == 2}

    def in_short(self, width: int = 40) -> str:
        """The arguments in a few words: sizes of tensors, and plain values by their names."""
        found = [
            f"{'×'.join(map(str, each[0])) or 'scalar'} {str(each[1]).removeprefix('torch.')}"
            if len(each) == 5
            else f"{name}={value_of(each)!r}"
            for name, each in self.by_name().items()
        ]
        text = ", ".join(found) or "no arguments"
        return text if len(text) <= width else f"{text[: width - 1]}…"

    def differs_in_a_number(self, other: CallSignature) -> bool:
        """Whether two calls differ in ints and floats alone."""
        if self.differing_value(other) is None:
            return False
        pairs = zip(self.leaves, other.leaves, strict=True)
        return all(a == b or issubclass(a[0], float) or a[0] is int for a, b in pairs)

    def other_arguments(self, other: CallSignature, made: str) -> list[str]:
        """How the arguments of another call differ, in words."""
        mine, theirs = self.by_name(), other.by_name()
        added = [with_value(name, theirs[name]) for name in theirs if name not in mine]
        lacking = [name for name in mine if name not in theirs]
        changed = [
            f"{name} is {in_words(theirs[name])}, {made} for {in_words(leaf)}"
            for name, leaf in mine.items()
            if name in theirs and theirs[name] != leaf
        ]
        was = [with_value(name, mine[name]) for name in lacking]
        them = "it" if len(added) == 1 else "them"
        found = (
            (added, f"{_listed(added)}; {made} without {them}"),
            (lacking, f"no {_listed(lacking)}; {made} with {_listed(was)}"),
            (changed, _listed(changed, "; ")),
        )
        words = [text for names, text in found if names]
        if not words and other.spec != self.spec:
            # Lists where there were tuples, or a dictionary in another order.
            held = ", ".join(self._held_otherwise(other)) or "the arguments"
            words.append(f"{held}: other containers than {made} for, or in another order")
        return words

    def _held_otherwise(self, other: CallSignature) -> list[str]:
        """Names of the arguments that are trees of another kind in another call."""
        parts = []
        for signature in (self, other):
            args, kwargs = signature.spec.children()
            names = [*(f"args[{n}]" for n in range(len(args.children()))), *signature.names]
            parts.append(dict(zip(names, (*args.children(), *kwargs.children()), strict=True)))
        return [name for name, spec in parts[0].items() if parts[1].get(name) != spec]


def _described_alone(
    args: Args, kwargs: Kwargs
) -> tuple[tuple[tuple[Any, ...], ...], dict[str, tuple[Any, ...]]]:
    """The arguments of a call of tensors alone, described."""
    return tuple(map(describe, args)), {name: describe(value) for name, value in kwargs.items()}


def _described(
    leaves: Sequence[Any], args: Args, kwargs: Kwargs, *, objects: bool
) -> tuple[tuple[Any, ...], ...]:
    """The leaves of a call, described; errors name them."""
    described: list[tuple[Any, ...]] = []
    for index, leaf in enumerate(leaves):
        try:
            described.append(describe(leaf))
        except SignatureError:
            # Naming leaves is slow, so only the error does it.
            describe(leaf, argument_names(args, kwargs, objects=objects)[index])
            raise
    return tuple(described)


def _listed(words: Sequence[str], between: str = ", ") -> str:
    """The first of some words, and how many more there are."""
    more = len(words) - _MOST_NAMED
    return between.join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def inside_func() -> bool:
    """Whether torch.func or forward AD looks on, which no capture of ours sets up itself."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def inside_transform() -> bool:
    """Whether a transform such as vmap, a tracer or a mode has to see the operations itself."""
    return (
        inside_func()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
        or (torch._C._len_torch_function_stack() > 0 and has_function_mode())
    )


def in_backward() -> bool:
    """Whether a backward calls this, as that of a checkpoint: on a GPU in a thread of its own."""
    return torch._C._current_graph_task_id() != -1


def under_hooks_for_saved_tensors() -> bool:
    """Whether hooks for saved tensors are on: autograd passes what it saves to them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@dataclass(frozen=True)
class Range:
    """The sizes that one dimension may have; dimensions with the same name have the same size.

    Attributes:
        leaf: index of the leaf among the call's leaves.
        axis: which dimension of the leaf.
        name: of the dimension.
        low: smallest size.
        high: largest size.
    """

    leaf: int
    axis: int
    name: str
    low: int
    high: int


@dataclass(frozen=True)
class RangedSignature:
    """What calls must share, except for the sizes of some dimensions.

    Tensors with such dimensions must be contiguous, as the sample's were.
    """

    base: CallSignature
    ranges: tuple[Range, ...]

    @property
    def wants_grad(self) -> bool:
        """Whether any tensor of the call requires grad."""
        return self.base.wants_grad

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether what was built for the range can answer a call."""
        return self.differences(args, kwargs) is None

    def differences(self, args: Args, kwargs: Kwargs, made: str = "built") -> str | None:
        """Why a call does not fit, in words, or None when it fits; as `CallSignature` says it."""
        plain = self.base.differences(args, kwargs, made)
        if plain is None or inside_transform():
            return plain
        try:
            other = CallSignature.of(args, kwargs)
        except Exception:
            return plain
        base = self.base
        same = (other.spec, other.aliases, other.switches)
        if same != (base.spec, base.aliases, base.switches):
            return plain
        sizes: dict[str, int] = {}
        for index, (mine, theirs) in enumerate(zip(base.leaves, other.leaves, strict=True)):
            own = [each for each in self.ranges if each.leaf == index]
            if not own and mine != theirs:
                return plain
            if own and (why := _outside(own, mine, theirs, sizes)) is not None:
                return why or plain
        return None


def _outside(
    ranges: Sequence[Range], mine: Sequence[Any], theirs: Sequence[Any], sizes: dict[str, int]
) -> str | None:
    """Why a tensor is outside of ranges: empty if it differs in more; None if it is inside.

    Args:
        ranges: of its axes.
        mine: the description of the tensor that is known.
        theirs: that of the other one.
        sizes: gets the size of each dimension, by name.
    """
    shape, *kind = theirs
    if len(theirs) != 5 or len(shape) != len(mine[0]):
        return ""
    expected = list(mine[0])
    for each in ranges:
        n = expected[each.axis] = shape[each.axis]
        if not each.low <= n <= each.high:
            return f"{each.name} is {n}; what was built answers {each.low} to {each.high}"
        if sizes.setdefault(each.name, n) != n:
            return f"{each.name} is both {sizes[each.name]} and {n}"
    known = [mine[1], _contiguous(expected), *mine[3:]]
    if list(shape) != expected or kind[:1] + kind[2:] != known[:1] + known[2:]:
        return ""
    return "" if _strides_differ(expected, kind[1], known[1]) else None


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _strides_differ(shape: Sequence[int], strides: Any, expected: Sequence[int]) -> bool:
    """Whether strides differ in a dimension of more than one element."""
    steps = zip(shape, strides, expected, strict=True)
    return any(size > 1 and mine != theirs for size, mine, theirs in steps)


def quick_key(args: Args, kwargs: Kwargs) -> Any:
    """A key that is quickly made, of shapes and plain values; None for other arguments."""
    key: list[Any] = []
    try:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                key.append(value.shape)
            elif type(value) in _QUICK_VALUES and value == value:  # NaN would be another each time.
                key.append(value)
            else:
                return None
    except RuntimeError:  # A nested tensor has no shape.
        return None
    return (*key, *kwargs) if kwargs else tuple(key)


def kind_key(args: Args, kwargs: Kwargs) -> Any:
    """A key of calls that differ in plain values alone; None for other arguments, or if all agree.

    It is quickly made, and does not say all that a signature does.
    """
    key: list[Any] = []
    plain = False
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                return None
            key.append(value.shape)
        elif type(value) in _QUICK_VALUES:
            plain = True
            key.append(type(value))
        else:
            return None
    return (*key, *kwargs) if plain else None


def arguments_of(call: Call) -> tuple[Args, Kwargs]:
    """Positional and keyword arguments of a `Call`, which has one of three forms.

    Raises:
        OptionError: it is none of them.
    """
    if isinstance(call, tuple):
        if len(call) == 2 and isinstance(call[0], tuple) and _is_named(call[1]):
            return call[0], dict(call[1])
        return call, {}
    if _is_named(call):
        return (), dict(call)
    raise OptionError(
        f"A call is written as a tuple, a dictionary by names, or a pair of both, not as "
        f"{in_brief(call)}.",
        remedy="For one positional argument x write (x,).",
    )


def _is_named(value: Any) -> bool:
    """Whether a value is a dictionary of arguments by their names."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
