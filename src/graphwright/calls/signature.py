"""Call signatures: flatten a call, describe it, and say how two calls differ.

What was built for one call must never answer another one silently. `CallSignature` describes the
arguments and the global switches that change what a call computes; `watch.ModuleWatch` what a
module holds. `RangedSignature` is for what was built for a range of sizes, and answers all of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import OptionError, SignatureError, in_a_row
from .objects import apart, build, every_class_in, has_nodes, has_objects
from .options import in_brief
from .switches import CALL_NAMES, CUDA, autocast, lasting_switches

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
# A call as users write it down: positional arguments, keyword arguments, or a pair of both.
Call = tuple[Any, ...] | Mapping[str, Any] | tuple[tuple[Any, ...], Mapping[str, Any]]

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_QUICK_VALUES = frozenset((bool, int, float, str, type(None)))
# For checks at each call: module-level names are found faster than attributes.
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_STRIDED = torch.strided
_is_functional = torch._is_functional_tensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_NO_FUNCTION = torch._C._disabled_torch_function_impl
_EVERY_FUNCTION = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
# By name, so that none has to be imported.
_SHARDING = ("FSDPModule", "FullyShardedDataParallel")
# Arguments that differ from those of a known call, beyond which the others are counted.
_MOST_NAMED = 6


def flatten(
    args: Args, kwargs: Kwargs, *, objects: bool = False
) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a call into its leaves and the tree that puts them back together.

    Keyword arguments keep the caller's order, which a callable that takes any of them sees. For one
    that cannot see it, `binding.in_one_order` makes f(a=1, b=2) and f(b=2, a=1) the same call.

    Args:
        args: of the call.
        kwargs: likewise.
        objects: whether objects are taken apart; else they are leaves.

    Raises:
        SignatureError: an object holds itself.
    """
    tree = (tuple(args), dict(kwargs))
    # Without objects and containers, there is nothing to take apart.
    if objects and has_objects((*args, *kwargs.values())):
        tree = apart(tree)
    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Args, dict[str, Any]]:
    """Inverse of `flatten`."""
    args, kwargs = build(leaves, spec)
    return args, kwargs


def leaf_names(tree: Any, root: str) -> list[str]:
    """A readable name for each leaf of a tree, for example `output['logits'][0]`."""
    try:
        paths, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:  # A node type was registered without names for its children.
        return [f"{root}.{index}" for index in range(len(pytree.tree_leaves(tree)))]
    return [root + pytree.keystr(path) for path, _ in paths]


def argument_names(args: Args, kwargs: Kwargs, *, objects: bool = False) -> list[str]:
    """Names of a call's leaves, as `flatten` gives them: positional by index, keywords by name."""
    taken = apart if objects else _as_it_is
    names = leaf_names(taken(tuple(args)), "args")
    for key, value in kwargs.items():
        names += leaf_names(taken(value), key)
    return names


def _as_it_is(tree: Any) -> Any:
    return tree


def container_changes(before: Sequence[str], after: Sequence[str]) -> str:
    """What a call did to the containers among its arguments; empty if the names are the same.

    Args:
        before: names of the arguments' leaves.
        after: the same after the call.
    """
    added = [name for name in after if name not in before]
    removed = [name for name in before if name not in after]
    changes = [("adds", added), ("removes", removed)]
    return " and ".join(f"{verb} {', '.join(names)}" for verb, names in changes if names)


def require_grad(args: Args, kwargs: Kwargs) -> bool:
    """Whether any tensor among the arguments requires grad."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif type(value) not in _QUICK_VALUES and any(t.requires_grad for t in tensors_of(value)):
            return True
    return False


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in a tree, also inside of objects."""
    leaves = pytree.tree_leaves(tree)
    if has_objects(leaves):
        with contextlib.suppress(SignatureError):  # One holds itself.
            leaves = pytree.tree_leaves(apart(tree))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def describe(leaf: Any, name: str = "argument") -> tuple[Any, ...]:
    """A hashable description of one leaf: everything that must match for a call to be the same.

    Tensors are described by shape, dtype, stride, device and requires_grad; other values by type
    and bit pattern, since 1, 1.0, True and -0.0 differ.

    Raises:
        SignatureError: the leaf is neither a tensor nor a plain value.
    """
    if isinstance(leaf, torch.Tensor):
        if not _is_plain(leaf):
            raise SignatureError(
                f"{name} is {_unusual_kind(leaf)}; only plain dense tensors are supported.",
                remedy="Pass it as its dense parts, or convert it inside the model.",
            )
        return (leaf.shape, leaf.dtype, leaf.stride(), leaf.device, leaf.requires_grad)
    if isinstance(leaf, float):
        return (type(leaf), struct.pack("<d", leaf))
    if isinstance(leaf, complex):
        return (type(leaf), struct.pack("<dd", leaf.real, leaf.imag))
    if isinstance(leaf, SCALARS):
        return (type(leaf), leaf)
    _refuse_numpy(leaf, name)
    raise SignatureError(
        f"{name} is an object of type {type(leaf).__qualname__}, which graphwright cannot look "
        "into: tensors inside it would go unseen.",
        remedy="Pass tensors, plain values, and tuples, lists or dictionaries of them, or "
        "register the type with torch.utils._pytree.register_pytree_node.",
    )


def _refuse_numpy(leaf: Any, name: str) -> None:
    """Refuse an array or a scalar of NumPy's, with what to pass instead.

    Raises:
        SignatureError: it is one.
    """
    numpy = sys.modules.get("numpy")  # Nobody has one without it.
    if numpy is None or not isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return
    if isinstance(leaf, numpy.ndarray):
        raise SignatureError(
            f"{name} is a NumPy array, and no graph would see its values change.",
            remedy=f"Pass a tensor: torch.from_numpy({name}).",
        )
    plain = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}.get(leaf.dtype.kind)
    raise SignatureError(
        f"{name} is a NumPy scalar of type {type(leaf).__name__}.",
        remedy=f"Pass {plain}({name}), or a tensor if it changes from call to call."
        if plain is not None
        else f"Pass a plain value: {name}.item().",
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor of PyTorch's own class whose bits are its values."""
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not (_is_wrapped(value) or _is_functional(value))
        and not (value.is_nested or value.is_quantized or value.is_neg() or value.is_conj())
        and not value._is_zerotensor()
        and not _was_freed(value)
    )


def _was_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has no memory any more, as where FSDP has freed it."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() == 0


def _unusual_kind(tensor: torch.Tensor) -> str:
    """What kind of tensor it is that is not plain, in words."""
    nothing = without_memory(tensor)
    if nothing is not None:
        return nothing
    if type(tensor) not in _PLAIN_TYPES:
        return f"a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"a {tensor.layout} tensor" if not tensor.is_quantized else "a quantized tensor"
    return "a lazily conjugated or negated tensor (see torch.resolve_conj, torch.resolve_neg)"


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether its class runs PyTorch's operations in its own way (`__torch_dispatch__`)."""
    cls = type(tensor)
    return cls not in _PLAIN_TYPES and cls.__torch_dispatch__ is not _NO_DISPATCH


def without_memory(tensor: torch.Tensor) -> str | None:
    """What kind of tensor it is, in words, if it has no values in its own memory; else None.

    Reading the address or bytes of such a tensor raises whatever PyTorch raises.
    """
    if nn.parameter.is_lazy(tensor):
        return f"an {type(tensor).__qualname__}, of a lazy module before its first call"
    if _is_wrapped(tensor):
        return "a tensor of a torch.func transform (vmap, grad, jvp)"
    if _is_functional(tensor):
        return "a functional tensor (torch.func.functionalize)"
    if dispatches(tensor):
        return f"a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory"
    if _was_freed(tensor):
        return "a tensor whose memory was freed"
    return None


def unusual_weight(module: nn.Module) -> tuple[str, str] | None:
    """Name and kind of the first weight that is no plain dense tensor; None if all are plain."""
    for name, tensor in _weights(module):
        lazy = nn.parameter.is_lazy(tensor)
        if lazy or tensor.is_meta or not (_is_plain(tensor) or _is_only_conjugated(tensor)):
            meta = tensor.is_meta and without_memory(tensor) is None
            return name, "a meta tensor, without values" if meta else _unusual_kind(tensor)
    return None


def sharded_module(module: nn.Module) -> tuple[str, str] | None:
    """Name and class of a module that shards its weights; None if there is none.

    The memory of such weights is freed between calls, and a graph would read it.
    """
    for path, child in module.named_modules():
        for kind in type(child).__mro__:
            if kind.__name__ in _SHARDING and kind.__module__.startswith("torch."):
                return path, kind.__name__
    return None


def refuse_weights(module: nn.Module, *, subclasses: bool = False) -> None:
    """Refuse a module with weights that no graph can hold.

    A tensor subclass that overrides PyTorch's functions may delegate the work to plain tensors, as
    torchao's quantised weights do. It is accepted, unless `subclasses` is set.

    Args:
        module: the module.
        subclasses: refuse such subclasses too: the values of weights are copied and compared.

    Raises:
        SignatureError: a parameter, buffer or attribute is such a tensor, or FSDP shards weights.
    """
    sharded = sharded_module(module)
    if sharded is not None:
        raise SignatureError(
            f"{sharded[0] or 'The model'} is an {sharded[1]}: the memory of its weights comes and "
            "goes around each call, and a graph reads where it was.",
            remedy="Use the plain module on one device.",
        )
    for name, tensor in _weights(module):
        kind = without_memory(tensor)
        if kind is None and tensor.is_meta:
            kind = "a meta tensor, without values"
        if kind is None or (dispatches(tensor) and _answers_functions(tensor) and not subclasses):
            continue
        raise SignatureError(
            f"The weight {name} is {kind}, which a graph cannot hold.",
            remedy="Run the model once before."
            if nn.parameter.is_lazy(tensor)
            else "Use dense tensors of PyTorch's own class as weights.",
        )


def _answers_functions(tensor: torch.Tensor) -> bool:
    """Whether its class has a `__torch_function__` of its own."""
    own = type(tensor).__torch_function__
    return own is not _NO_FUNCTION and getattr(own, "__func__", own) is not _EVERY_FUNCTION


def _is_only_conjugated(tensor: torch.Tensor) -> bool:
    return (tensor.is_conj() or tensor.is_neg()) and _is_plain(tensor.resolve_conj().resolve_neg())


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and attributes that are tensors, by name."""
    for path, child in module.named_modules():
        # A ScriptModule has no plain dictionaries.
        for held in ("_parameters", "_buffers"):
            for name, value in getattr(child, held).items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value
        for name, value in vars(child).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


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
class MixedArguments:
    """Arguments that are tensors and plain values, without containers.

    Attributes:
        count: how many are positional.
        names: of the keyword arguments, in order.
        plain: the plain values, with their positions.
        places: positions of the tensors.
        guard: PyTorch's own check of the tensors.
        any_order: whether the keyword arguments may come in another order.
    """

    count: int
    names: tuple[str, ...]
    plain: tuple[tuple[int, Any], ...]
    places: tuple[int, ...]
    guard: Callable[..., bool]
    any_order: bool

    @classmethod
    def of(cls, args: Args, kwargs: Kwargs, *, any_order: bool) -> MixedArguments | None:
        """Describe a call; None if it has other arguments, or no tensors."""
        values = (*args, *kwargs.values())
        places = tuple(i for i, v in enumerate(values) if isinstance(v, torch.Tensor))
        plain = tuple((i, v) for i, v in enumerate(values) if isinstance(v, SCALARS))
        if not places or len(places) + len(plain) < len(values):
            return None
        guard = guard_of(tuple(values[i] for i in places))
        if guard is None:
            return None
        return cls(len(args), tuple(kwargs), plain, places, guard, any_order)

    def values(self, args: Args, kwargs: Kwargs) -> Args | None:
        """A call's arguments as one tuple, if the plain ones are the same objects; else None."""
        if len(args) != self.count or len(kwargs) != len(self.names):
            return None
        if kwargs:
            if (*kwargs,) == self.names:  # Written out, since it is done at each call.
                args = (*args, *kwargs.values())
            elif (named := in_order_of(self.names, kwargs, self.any_order)) is not None:
                args = (*args, *named)
            else:
                return None
        for index, value in self.plain:
            if args[index] is not value:
                return None
        return args

    def tensors(self, values: Args) -> Args:
        """The tensors among them."""
        return tuple([values[index] for index in self.places])


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
    # Whether objects are taken apart.
    objects: bool = field(compare=False, repr=False, default=False)
    # Whether calls with the keyword arguments in another order fit, since nobody can see it.
    any_order: bool = field(compare=False, repr=False, default=False)

    @classmethod
    def of(
        cls, args: Args, kwargs: Kwargs, *, objects: bool = False, any_order: bool = False
    ) -> CallSignature:
        """Describe a call.

        Args:
            args: of the call.
            kwargs: likewise.
            objects: whether objects among them are taken apart, or refused.
            any_order: whether calls fit that have the keyword arguments in another order; only
                where the callable cannot see it (`binding.sees_order`).

        Raises:
            SignatureError: an argument is neither a tensor nor a plain value.
        """
        if CUDA and not _AttentionKernels.settled:
            _AttentionKernels.settle()
        leaves, spec = flatten(args, kwargs, objects=objects)
        described: list[tuple[Any, ...]] = []
        for index, leaf in enumerate(leaves):
            try:
                described.append(describe(leaf))
            except SignatureError:
                # Naming leaves is slow, so only the error does it.
                describe(leaf, argument_names(args, kwargs, objects=objects)[index])
                raise
        flat = guard = None
        aliases = _shared(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) > 1 and _overlapping(tensors):
            raise SignatureError(
                "Two arguments share memory that belongs to something other than PyTorch.",
                remedy="Pass copies, or views of one tensor.",
            )
        values = (*args, *kwargs.values())
        if not aliases and all(isinstance(value, torch.Tensor) for value in values):
            flat = (
                tuple(describe(value) for value in args),
                {name: describe(value) for name, value in kwargs.items()},
            )
            guard = guard_of(values)
        mixed = None
        if flat is None and not aliases:
            mixed = MixedArguments.of(args, kwargs, any_order=any_order)
        switched = (*autocast(), *lasting_switches())
        return cls(
            spec, tuple(described), aliases, switched, flat, guard, mixed, objects, any_order
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
        return replace(self, mixed=mixed, any_order=True)

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
        if inside_transform():
            return False
        if self.flat is None:
            return self._equals(args, kwargs)
        positional, named = self.flat
        if len(args) != len(positional) or len(kwargs) != len(named):
            return False
        for value, expected in zip(args, positional, strict=True):
            if not _matches(value, expected):
                return False
        if not self.any_order and (*kwargs,) != self.names:
            return False
        for name, value in kwargs.items():
            if name not in named or not _matches(value, named[name]):
                return False
        values = (*args, *kwargs.values())
        if len(values) > 1 and (_shared(values) or _overlapping(values)):
            return False
        return self._same_switches()

    def _equals(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call's signature is this one."""
        try:
            return CallSignature.of(args, self._ordered(kwargs), objects=self.objects) == self
        except SignatureError:
            return False

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
        return {name: _value_of(leaf) for name, leaf in found.items() if len(leaf) == 2}

    def in_short(self, width: int = 40) -> str:
        """The arguments in a few words: sizes of tensors, and plain values by their names."""
        found = [
            f"{'×'.join(map(str, each[0])) or 'scalar'} {str(each[1]).removeprefix('torch.')}"
            if len(each) == 5
            else f"{name}={_value_of(each)!r}"
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
        added = [_given(name, theirs[name]) for name in theirs if name not in mine]
        lacking = [name for name in mine if name not in theirs]
        changed = [
            f"{name} is {_describe_in_words(theirs[name])}, {made} for {_describe_in_words(leaf)}"
            for name, leaf in mine.items()
            if name in theirs and theirs[name] != leaf
        ]
        found = []
        if added:
            them = "it" if len(added) == 1 else "them"
            found.append(f"{_listed(added)}; {made} without {them}")
        if lacking:
            was = _listed([_given(name, mine[name]) for name in lacking])
            found.append(f"no {_listed(lacking)}; {made} with {was}")
        if changed:
            found.append(_listed(changed, "; "))
        if not found and other.spec != self.spec:
            # Lists where there were tuples, or a dictionary in another order.
            held = ", ".join(self._held_otherwise(other)) or "the arguments"
            found.append(f"{held}: other containers than {made} for, or in another order")
        return found

    def _held_otherwise(self, other: CallSignature) -> list[str]:
        """Names of the arguments that are trees of another kind in another call."""
        parts = []
        for signature in (self, other):
            args, kwargs = signature.spec.children()
            names = [*(f"args[{n}]" for n in range(len(args.children()))), *signature.names]
            parts.append(dict(zip(names, (*args.children(), *kwargs.children()), strict=True)))
        return [name for name, spec in parts[0].items() if parts[1].get(name) != spec]


def _given(name: str, described: tuple[Any, ...]) -> str:
    """An argument with its value, in words."""
    if len(described) == 5:
        shape, dtype = described[:2]
        return f"{name}, a tensor {tuple(shape)} {str(dtype).removeprefix('torch.')}"
    return f"{name}={_value_of(described)!r}"


def _value_of(described: tuple[Any, ...]) -> Any:
    """The plain value that a description is of."""
    cls, value = described
    if issubclass(cls, float):
        return struct.unpack("<d", value)[0]
    return complex(*struct.unpack("<dd", value)) if issubclass(cls, complex) else value


def _listed(words: Sequence[str], between: str = ", ") -> str:
    """The first of some words, and how many more there are."""
    more = len(words) - _MOST_NAMED
    return between.join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def in_order_of(names: tuple[str, ...], kwargs: Kwargs, any_order: bool) -> Args | None:
    """The values of keyword arguments of these names, in this order; None if they are others.

    Args:
        names: of the arguments.
        kwargs: of a call.
        any_order: whether these may come in another order.
    """
    if (*kwargs,) == names:
        return (*kwargs.values(),)
    if not any_order or len(kwargs) != len(names):
        return None
    try:
        return tuple([kwargs[name] for name in names])
    except KeyError:
        return None


def _matches(value: Any, expected: tuple[Any, ...]) -> bool:
    """Whether `describe(value)` would equal a description; faster than describing it."""
    shape, dtype, stride, device, requires_grad = expected
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not value.is_nested
        and value.dtype is dtype
        and value.shape == shape
        and value.stride() == stride
        and value.device == device
        and value.requires_grad is requires_grad
        and not value.is_neg()
        and not value._is_zerotensor()
        and not (_is_wrapped(value) or _is_functional(value))
        and not (dtype.is_complex and value.is_conj())
        and not _was_freed(value)
    )


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A fast check whether tensors have the same type, layout, device and so on as these.

    torch.compile guards its code with it. It may reject tensors that fit, for example under another
    autocast or inference mode.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        # Its stub speaks of one tensor where it takes several.
        sizes: Any = [list(tensor.size()) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check if tensors and check(*tensors) else None
    except (ImportError, TypeError, ValueError, RuntimeError):  # It is no public interface.
        return None


def are_plain(values: Sequence[Any]) -> bool:
    """Whether all values are dense tensors of PyTorch's own class."""
    for value in values:
        if type(value) not in _PLAIN_TYPES or value.layout is not _STRIDED or value.is_nested:
            return False
    return True


def fitting(guard: Callable[..., bool], values: Sequence[Any]) -> bool:
    """Whether some values are plain tensors that pass a guard and share no memory."""
    # The guard crashes the process on tensors without strides.
    if not are_plain(values):
        return False
    if not guard(*values):
        return False
    if len(values) < 2:
        return not any(map(_was_freed, values))
    return _own_storages(values)


def _own_storages(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor has its own storage, which is not empty."""
    found = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(found) == len(tensors) and 0 not in found and not _overlapping(tensors)


def _overlapping(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether different storages overlap in memory, as those of NumPy arrays may."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    ranges = sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
    return any(a + n > b for (a, n), (b, _) in itertools.pairwise(ranges) if a != b)


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


def _shared(leaves: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """Pairs of leaves that share a storage, with the bytes between their first elements."""
    tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(tensors) < 2:
        return ()
    first: dict[int, tuple[int, int]] = {}
    pairs = []
    for index, tensor in tensors:
        if tensor.numel() == 0:
            continue
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in first:
            other, start = first[pointer]
            pairs.append((other, index, tensor.data_ptr() - start))
        else:
            first[pointer] = (index, tensor.data_ptr())
    return tuple(pairs)


def _describe_in_words(described: tuple[Any, ...]) -> str:
    if len(described) == 5:
        shape, dtype, stride, device, requires_grad = described
        grad = ", requires_grad" if requires_grad else ""
        return (
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')} strides {stride} on {device}{grad}"
        )
    return f"{described[0].__name__} {_value_of(described)!r}"


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
            if not own:
                if mine != theirs:
                    return plain
                continue
            shape, *kind = theirs
            if len(theirs) != 5 or len(shape) != len(mine[0]):
                return plain
            expected = list(mine[0])
            for each in own:
                n = expected[each.axis] = shape[each.axis]
                if not each.low <= n <= each.high:
                    return f"{each.name} is {n}; what was built answers {each.low} to {each.high}"
                if sizes.setdefault(each.name, n) != n:
                    return f"{each.name} is both {sizes[each.name]} and {n}"
            known = [mine[1], _contiguous(expected), *mine[3:]]
            if list(shape) != expected or kind[:1] + kind[2:] != known[:1] + known[2:]:
                return plain
            if _strides_differ(expected, kind[1], known[1]):
                return plain
        return None


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
