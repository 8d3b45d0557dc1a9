"""Flatten a call; say when two calls, or two states of a module, differ.

What was built for one call must never answer another one silently. `CallSignature` describes
the arguments and the global switches that change what a call computes; `ModuleWatch` describes
what a module holds beside its parameters' values.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .errors import SignatureError

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def flatten(args: Args, kwargs: Kwargs) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a call into its leaves and the tree that puts them back together.

    Keyword arguments are put in the order of their names: f(a=1, b=2) and f(b=2, a=1) are one call.
    """
    return pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Args, dict[str, Any]]:
    """Inverse of `flatten`."""
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def leaf_names(tree: Any, root: str) -> list[str]:
    """A readable name for each leaf of a tree, for example `output['logits'][0]`."""
    try:
        paths, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:  # A node type was registered without names for its children.
        return [f"{root}.{index}" for index in range(len(pytree.tree_leaves(tree)))]
    return [root + pytree.keystr(path) for path, _ in paths]


def argument_names(args: Args, kwargs: Kwargs) -> list[str]:
    """Names of a call's leaves: positional by index, keywords by name."""
    names = leaf_names(tuple(args), "args")
    for key, value in sorted(kwargs.items()):
        names += leaf_names(value, key)
    return names


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors among the leaves of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def describe(leaf: Any, name: str = "argument") -> tuple[Any, ...]:
    """Hashable description of one leaf: everything that must match for a call to be the same.

    Tensors by shape, dtype, stride, device and requires_grad; other values by type and bit
    pattern, since 1, 1.0, True and -0.0 differ.

    Raises:
        SignatureError: the leaf is neither a tensor nor a plain value.
    """
    if isinstance(leaf, torch.Tensor):
        if not _is_plain(leaf):
            raise SignatureError(
                f"{name} is {_kind(leaf)}; only plain dense tensors are supported.",
                remedy="Pass it as its dense parts, or convert it inside the model.",
            )
        return (leaf.shape, leaf.dtype, leaf.stride(), leaf.device, leaf.requires_grad)
    if isinstance(leaf, float):
        return (float, struct.pack("<d", leaf))
    if isinstance(leaf, complex):
        return (complex, struct.pack("<dd", leaf.real, leaf.imag))
    if isinstance(leaf, SCALARS):
        return (type(leaf), leaf)
    raise SignatureError(
        f"{name} is an object of type {type(leaf).__qualname__}, which graphwright cannot look "
        "into: tensors inside it would go unseen.",
        remedy="Pass tensors, plain values, and tuples, lists or dictionaries of them, or "
        "register the type with torch.utils._pytree.register_pytree_node.",
    )


_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_STRIDED = torch.strided


def _is_plain(value: Any) -> bool:
    """A dense tensor whose class has no behaviour of its own and whose bits are its values."""
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_neg() or value.is_conj())
        and not value._is_zerotensor()
    )


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor) not in _PLAIN_TYPES:
        return f"a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"a {tensor.layout} tensor" if not tensor.is_quantized else "a quantized tensor"
    return "a lazily conjugated or negated tensor (see torch.resolve_conj, torch.resolve_neg)"


def switches() -> tuple[Any, ...]:
    """The global switches that change which kernels a call runs or what they compute.

    Read at every call, hence from torch._C: the public properties cost three times as much, and
    the older TF32 flags raise once one of the newer fp32_precision settings was used.
    """
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        *lasting_switches(),
    )


def lasting_switches() -> tuple[Any, ...]:
    """The switches but for autocast, which a guard of tensors sees come and go by itself."""
    c = torch._C
    return (
        torch.get_default_dtype(),
        c._get_deterministic_algorithms(),
        c._get_mkldnn_enabled(),
        c._get_cudnn_enabled(),
        c._get_cudnn_benchmark(),
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_fp32_precision_getter("cuda", "conv"),
        c._get_fp32_precision_getter("mkldnn", "matmul"),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )


@dataclass(frozen=True)
class CallSignature:
    """What two calls must share for the one to stand for the other."""

    spec: pytree.TreeSpec
    leaves: tuple[tuple[Any, ...], ...]
    aliases: tuple[tuple[int, int, int], ...]
    switches: tuple[Any, ...]
    # The common case, arguments that are plain tensors, is compared without flattening:
    # one description a positional argument, and one a keyword, in the order of their names. None
    # where there are others.
    flat: tuple[tuple[tuple[Any, ...], ...], dict[str, tuple[Any, ...]]] | None = field(
        compare=False
    )
    # PyTorch's own check of tensors against such a call's, in C++: true only for calls that fit.
    guard: Callable[..., bool] | None = field(compare=False, repr=False)

    @classmethod
    def of(cls, args: Args, kwargs: Kwargs) -> CallSignature:
        """Describe a call.

        Raises:
            SignatureError: an argument is neither a tensor nor a plain value.
        """
        leaves, spec = flatten(args, kwargs)
        described: list[tuple[Any, ...]] = []
        for index, leaf in enumerate(leaves):
            try:
                described.append(describe(leaf))
            except SignatureError:
                # Naming leaves is slow, so it is done only for the error.
                describe(leaf, argument_names(args, kwargs)[index])
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
                {name: describe(value) for name, value in sorted(kwargs.items())},
            )
            guard = _guard((*args, *(kwargs[name] for name in flat[1])))
        return cls(spec, tuple(described), aliases, switches(), flat, guard)

    @functools.cached_property
    def wants_grad(self) -> bool:
        """Whether any tensor of the call requires grad."""
        return any(len(leaf) == 5 and leaf[4] for leaf in self.leaves)

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call has this signature; takes a microsecond or two."""
        if self.guard is not None and self.flat is not None:
            positional, named = self.flat
            if len(args) != len(positional) or len(kwargs) != len(named):
                return False
            try:
                values = (*args, *[kwargs[name] for name in named]) if named else args
            except KeyError:
                return False
            if fitting(self.guard, values):
                return switches() == self.switches
        if inside_transform():
            return False
        if self.flat is None:
            return self.differences(args, kwargs) is None
        positional, named = self.flat
        if len(args) != len(positional) or len(kwargs) != len(named):
            return False
        for value, expected in zip(args, positional, strict=True):
            if not _is(value, expected):
                return False
        for name, value in kwargs.items():
            if name not in named or not _is(value, named[name]):
                return False
        if len(args) + len(kwargs) > 1 and _shared((*args, *kwargs.values())):
            return False
        return switches() == self.switches

    def differences(self, args: Args, kwargs: Kwargs) -> str | None:
        """Why a call does not fit this signature, in words, or None when it fits."""
        if inside_transform():
            return "the call is traced, or inside a torch.func transform or a dispatch mode"
        try:
            other = CallSignature.of(args, kwargs)
        except SignatureError as error:
            return error.what
        if other == self:
            return None
        if other.spec != self.spec:
            return "other arguments: the tree of positional and keyword arguments differs"
        found = []
        names = argument_names(args, kwargs)
        for name, mine, theirs in zip(names, self.leaves, other.leaves, strict=True):
            if mine != theirs:
                found.append(f"{name} is {_words(theirs)}, built for {_words(mine)}")
        if other.aliases != self.aliases:
            found.append("the arguments share memory in another way")
        if other.switches != self.switches:
            found.append("autocast or a torch.backends switch changed")
        return "; ".join(found)


def _is(value: Any, expected: tuple[Any, ...]) -> bool:
    """Whether a value has a description, without making a description of it."""
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
        and not (dtype.is_complex and value.is_conj())
    )


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A quick check whether tensors are of the same type, layout, device and so on as these.

    It is what torch.compile guards its code with; it may say no to tensors that fit, under another
    autocast or inference mode for example.
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


def fitting(guard: Callable[..., bool], values: Sequence[Any]) -> bool:
    """Whether a guard passes some values, which are tensors that share no memory."""
    for value in values:
        # The guard ends the process on tensors without strides.
        if type(value) not in _PLAIN_TYPES or value.layout is not _STRIDED or value.is_nested:
            return False
    return guard(*values) and (len(values) < 2 or _apart(values))


def _apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor has a storage of its own that holds something."""
    found = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(found) == len(tensors) and 0 not in found and not _overlapping(tensors)


def _overlapping(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether storages that begin at different places overlap, as those of NumPy arrays may."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    ranges = sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
    return any(a + n > b for (a, n), (b, _) in itertools.pairwise(ranges) if a != b)


def inside_transform() -> bool:
    """Whether vmap, tracing, a dispatch mode or the like wants to see the operations themselves."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
    )


def _shared(leaves: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """Pairs of leaves in one storage, and how many bytes they lie apart in it."""
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


def _words(described: tuple[Any, ...]) -> str:
    if len(described) == 5:
        shape, dtype, stride, device, requires_grad = described
        grad = ", requires_grad" if requires_grad else ""
        return (
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')} strides {stride} on {device}{grad}"
        )
    kind, value = described
    if kind is float:
        return f"float {struct.unpack('<d', value)[0]!r}"
    return f"{kind.__name__} {value!r}"


# Every module has these, and no inference depends on them.
_MAX_COMPILED = 200
_OF_NO_CONSEQUENCE = {*vars(nn.Module()), "_is_hf_initialized"} - {"training"}


class ModuleWatch:
    """Notices whatever makes work that was built from a module out of date.

    Watched: parameters, buffers, submodules and attributes (`training` among them) by identity,
    tensors by address and shape too; forward hooks; for a plain function
    also the modules and tensors that it names. With `values=True` also in-place changes of tensors,
    for work that holds a copy of the weights or has folded them.

    Not watched: what is inside of attributes that are lists, dictionaries or other objects, what a
    Python function
    reaches by other ways, and, with `values=True`, writes that leave a tensor's version as it is
    (through `.data`, numpy or a pointer). The watch keeps the tensors' memory alive, so that what
    was built never reads memory that was given to others, and no address comes back.
    """

    def __init__(self, module: nn.Module, *, values: bool) -> None:
        self._values = values
        self._function = module if isinstance(module, FunctionModule) else None
        self._reached = self._reach()
        self._hooks: list[dict[Any, Any]] = []
        self._holders: list[dict[str, Any]] = []
        self._getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        for child in module.modules():
            attributes = child.__dict__
            self._hooks += [attributes["_forward_hooks"], attributes["_forward_pre_hooks"]]
            self._holders += [child._parameters, child._buffers, child._modules]
            watched = _watched(attributes)
            if watched:
                # Twice the first name: for one alone itemgetter gives no tuple.
                get = operator.itemgetter(watched[0], *watched)
                self._getters.append((get, attributes))
        self._filled = [holder for holder in self._holders if holder]
        self._empty = [holder for holder in (*self._holders, *self._hooks) if not holder]
        self._hooks = [hooks for hooks in self._hooks if hooks]
        self._hooked = [dict(hooks) for hooks in self._hooks]
        # A method that was put in place of a class's own (LoRA, offloading) is a new attribute.
        self._sized = [*self._filled, *(attributes for _, attributes in self._getters)]
        self._sizes = list(map(len, self._sized))
        self._held = self._now()
        self._tensors = [
            v for v in self._held if isinstance(v, torch.Tensor) and v.layout is torch.strided
        ]
        self._memory = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = list(map(_ADDRESS, self._tensors))
        self._unique = list({id(tensor): tensor for tensor in self._tensors}.values())
        self._geometries = list(map(_geometry, self._unique))
        self._guard = _guard(self._unique)
        self._versions = _versions(self._tensors) if values else []
        self.unchanged = self._compiled(module) if not values else self._unchanged

    def _unchanged(self) -> bool:
        return self.changed() is None

    def _compiled(self, module: nn.Module) -> Callable[[], bool]:
        """`changed() is None` as one expression, which is twice as fast, where it is short enough.

        It may say no where nothing has changed, to an equal value in another object.
        """
        if self._function is not None or self._hooked or len(self._held) > _MAX_COMPILED:
            return self._unchanged
        names: dict[str, Any] = {}

        def name(value: Any) -> str:
            names[f"x{len(names)}"] = value
            return f"x{len(names) - 1}"

        terms = [f"not {name(holder)}" for holder in self._empty]
        for holder in self._filled:
            it = name(holder)
            terms.append(f"len({it}) == {len(holder)}")
            terms += [f"{it}[{key!r}] is {name(value)}" for key, value in holder.items()]
        for child in module.modules():
            attributes = child.__dict__
            it = name(attributes)
            terms.append(f"len({it}) == {len(attributes)}")
            for key in _watched(attributes):
                terms.append(f"{it}[{key!r}] is {name(attributes[key])}")
        for tensor in self._tensors:
            terms.append(f"{name(tensor.data_ptr)}() == {tensor.data_ptr()}")
        terms.append(f"not {name(self._reshaped)}()")
        source = f"lambda {', '.join(names)}: lambda: {' and '.join(terms)}"
        made: Callable[[], bool] = eval(source)(**names)  # of names and addresses made here
        return made

    def _reach(self) -> list[Any]:
        """What a plain function names, by identity."""
        if self._function is None:
            return []
        return [value for _, value in modules_behind(self._function._function)]

    def _reaches_others(self) -> bool:
        now = self._reach()
        return len(now) != len(self._reached) or any(map(operator.is_not, now, self._reached))

    def _now(self) -> list[Any]:
        chain = itertools.chain.from_iterable
        values = [get(attributes) for get, attributes in self._getters]
        return [*chain(holder.values() for holder in self._filled), *chain(values)]

    def changed(self) -> str | None:
        """What has changed since the watch was made, in words, or None."""
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:
            return "a parameter, buffer, submodule, attribute or forward hook was added or removed"
        try:
            now = self._now()
        except KeyError:
            return "an attribute of a module was deleted"
        if any(map(operator.is_not, now, self._held)):
            for index, (new, old) in enumerate(zip(now, self._held, strict=True)):
                if new is not old and not _same_scalar(new, old):
                    return _what_was_replaced(new, old)
                self._held[index] = new  # An equal value in another object: `x.eps = 1e-5`.
        if list(map(_ADDRESS, self._tensors)) != self._addresses:
            return "the memory of a parameter or buffer moved"
        if self._reshaped():
            return "the shape or strides of a parameter or buffer changed"
        if self._values and _versions(self._tensors) != self._versions:
            return "a parameter or buffer changed in place, and the chosen strategy holds a copy"
        if self._hooked and self._hooks != self._hooked:
            return "a forward hook was added or removed"
        if self._function is not None and self._reaches_others():
            return "the function now names another module or tensor"
        return None

    def _reshaped(self) -> bool:
        if self._guard is not None and self._guard(*self._unique):
            return False
        return list(map(_geometry, self._unique)) != self._geometries

    def rebound(self) -> bool:
        """Whether a tensor that was watched is held no longer, or has moved, for good."""
        if self._function is not None and self._reaches_others():
            return True
        held = {id(value) for value in self._now_or_nothing()}
        return any(id(tensor) not in held for tensor in self._tensors) or (
            list(map(_ADDRESS, self._tensors)) != self._addresses or self._reshaped()
        )

    def _now_or_nothing(self) -> list[Any]:
        try:
            return self._now()
        except KeyError:
            return []


def _watched(attributes: Mapping[str, Any]) -> list[str]:
    """Attributes of a module that are its class's own, not nn.Module's."""
    return [name for name in attributes if name not in _OF_NO_CONSEQUENCE]


def _same_scalar(a: Any, b: Any) -> bool:
    scalars = isinstance(a, SCALARS) and isinstance(b, SCALARS)
    return scalars and describe(a) == describe(b)


def _what_was_replaced(new: Any, old: Any) -> str:
    if isinstance(old, SCALARS):
        return f"an attribute of a module changed from {old!r} (train() or eval(), for example)"
    return "a parameter, buffer, submodule or tensor attribute was replaced"


_ADDRESS = torch.Tensor.data_ptr


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _versions(tensors: Sequence[Any]) -> list[int]:
    # Inference tensors keep no version counter; they cannot change outside inference mode.
    return [0 if t.is_inference() else t._version for t in tensors]


def in_training(module: nn.Module) -> bool:
    """Whether a module is in training mode; a frozen script has no mode."""
    return bool(getattr(module, "training", False))


class FunctionModule(nn.Module):
    """A plain function as a module, with the modules and tensors that it reaches as its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.training = False
        self._function = function
        for name, value in modules_behind(function):
            if isinstance(value, nn.Module):
                self._modules[name] = value
                self.training |= in_training(value)
            else:
                self._buffers[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)


def modules_behind(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Modules and tensors that a plain function reaches: by closure, default, global or method.

    One level deep: containers and helper functions are not searched.
    """
    for name, value in values_behind(function):
        if isinstance(value, nn.Module | torch.Tensor):
            yield name, value


def values_behind(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Whatever a plain function reaches by closure, default, global or method, by name.

    What a decorator or torch.compile has wrapped counts as the function too.
    """
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    inner = getattr(function, "__wrapped__", None) if inner is None else inner
    if inner is not None and not isinstance(function, nn.Module):
        if isinstance(inner, nn.Module):
            yield "wrapped", inner
        else:
            for name, value in values_behind(inner):
                yield f"wrapped_{name}", value
    while isinstance(function, functools.partial):
        for index, value in enumerate((*function.args, *function.keywords.values())):
            yield f"partial_{index}", value
        function = function.func
    owner = getattr(function, "__self__", None)
    if not isinstance(function, types.FunctionType | types.MethodType | nn.Module):
        owner = function  # An object with __call__.
    if isinstance(owner, nn.Module):
        yield "self", owner
    elif hasattr(owner, "__dict__") and not isinstance(owner, types.ModuleType):
        for name, value in vars(owner).items():
            yield f"self_{name}", value
        function = getattr(function, "__call__", function)  # noqa: B004  # fetched, not asked for
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    code = function.__code__
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default_{index}", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default_{name}", value
