"""Dimensions: which dimensions of a call are dynamic, as torch.export declares them, and sizes."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from ..calls.objects import apart
from ..calls.options import in_brief, nearest
from ..calls.split import Args, Kwargs
from ..errors import OptionError, SignatureError, levels_above
from ..graphs.taken_apart import holds_objects
from .padding import Sizes

BATCH = "batch"


@dataclass(frozen=True)
class Size:
    """The size of one dimension of a tensor: `factor * n + offset` for a named size n."""

    name: str
    factor: int = 1
    offset: int = 0

    def of(self, n: int) -> int:
        """The dimension's size if the named size is `n`."""
        return self.factor * n + self.offset

    def solve(self, size: int) -> int | None:
        """The named size that gives this size; None if there is none."""
        n, rest = divmod(size - self.offset, self.factor)
        return None if rest else n


# The dynamic dimensions of one tensor, by axis.
Axes = Mapping[int, Size]


@dataclass(frozen=True)
class Bounds:
    """The sizes that a caller declares possible, both ends included."""

    low: int = 1
    high: int | None = None

    def hold(self, n: int) -> bool:
        """Whether a size is within the bounds."""
        return self.low <= n and (self.high is None or n <= self.high)


class Dimensions:
    """The dynamic dimensions of a function's arguments.

    Args:
        fn: the function or module.
        names: of the dimensions; others that `dynamic_shapes` names have fixed sizes.
        dynamic_shapes: mirrors the arguments: a dictionary by argument, or a tuple for the
            positional ones; for a tensor a dictionary from axis to `torch.export.Dim` (or its
            name), or a tuple with one entry per dimension, or None. `2 * dim + 1` is possible.
            Without it, dimension 0 of every tensor with the most common size there is dynamic.
        pad: mirrors the arguments in the same way: the value that a tensor is padded with.

    Raises:
        OptionError: an option is invalid.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        names: Sequence[str],
        dynamic_shapes: Any = None,
        pad: Any = None,
    ) -> None:
        self.names = tuple(names)
        self.shapes = dynamic_shapes
        self.pad = pad
        self._named = parameters_of(fn)
        # Names that a caller was warned of, with the option.
        self._warned: set[tuple[str, Any]] = set()
        self.bounds = dict.fromkeys(self.names, Bounds())
        if dynamic_shapes is None:
            if self.names != (BATCH,):
                raise OptionError(
                    f"Buckets over {', '.join(self.names)} need to know which dimensions these "
                    "are.",
                    remedy="Pass dynamic_shapes, for example "
                    "{'x': {0: Dim('batch'), 1: Dim('length')}}; without it, `batch` alone is "
                    "dimension 0.",
                )
        else:
            _refuse_other_trees(dynamic_shapes, "dynamic_shapes")
            self._declare(dynamic_shapes)
        _refuse_other_trees(pad, "pad")
        for tree, option in ((dynamic_shapes, "dynamic_shapes"), (pad, "pad")):
            self._refuse_unknown(tree, option)

    def _declare(self, tree: Any) -> None:
        """Collect the bounds of the dimensions; refuse names that occur nowhere."""
        found: set[str] = set()
        for dim in _dims(tree):
            root = getattr(dim, "root", dim)
            size = _size(root)
            assert size is not None
            name = size.name
            found.add(name)
            if name in self.bounds and isinstance(root, Dim):
                high = root.max if isinstance(root.max, int) else None
                self.bounds[name] = Bounds(max(1, int(root.min)), high)
        missing = [name for name in self.names if name not in found]
        if missing:
            raise OptionError(
                f"The buckets have sizes for {', '.join(missing)}, which no dimension of "
                f"dynamic_shapes is named; it names {', '.join(sorted(found)) or 'none'}.",
                remedy="Use the same names in both.",
            )

    def _refuse_unknown(self, tree: Any, option: str) -> None:
        """Refuse a tree that cannot mirror the arguments, as far as the parameters show it."""
        names, extra = self._named
        if isinstance(tree, Mapping) and not extra and names:
            unknown = [name for name in tree if name not in names]
            if unknown:
                raise _unknown(option, unknown, names)
        if option == "pad":
            _refuse_other_values(tree)
        else:
            _refuse_bare_dimensions(tree, option)

    def _refuse_misspelt(self, args: Args, kwargs: Kwargs) -> None:
        """Refuse names that a function with `**kwargs` could take, and that this call shows wrong.

        A name that is no argument of the call may be one of another call; one that is much like an
        argument of this call, which nothing else names, is misspelt.
        """
        names, _ = self._named
        given = [*names[: len(args)], *kwargs]
        for tree, option in ((self.shapes, "dynamic_shapes"), (self.pad, "pad")):
            if not isinstance(tree, Mapping):
                continue
            unnamed = [name for name in given if name not in tree]
            unknown = [name for name in tree if name not in names and name not in given]
            if any(nearest(str(name), unnamed) for name in unknown):
                raise _unknown(option, unknown, given)
            for name in unknown:
                if (option, name) not in self._warned:
                    self._warned.add((option, name))
                    warnings.warn(
                        f"{option} names {name!r}, which is no argument of this call: {given}.",
                        RuntimeWarning,
                        stacklevel=levels_above(),
                    )

    def name_arguments(self, names: Sequence[str]) -> None:
        """Call the positional arguments by these names."""
        self._named = list(names), True

    def arguments(self, args: Args, kwargs: Kwargs) -> list[str]:
        """Names of a call's leaves: the argument, and the keys inside of it."""
        paths, _ = self._paths(args, kwargs)
        return [name + "".join(f"[{key!r}]" for key in keys) for name, (_, _, keys) in paths]

    def axes(self, args: Args, kwargs: Kwargs) -> list[Axes]:
        """The dynamic dimensions of a call's leaves, in the order of `signature.flatten`.

        Raises:
            OptionError: a name in `dynamic_shapes` or `pad` is a misspelt argument of the call, or
                an axis is no number.
            SignatureError: the call does not match `dynamic_shapes`, or has no tensor with one of
                the dimensions.
        """
        self._refuse_misspelt(args, kwargs)
        paths, leaves = self._paths(args, kwargs)
        if self.shapes is None:
            return _batched(leaves)
        found = [
            self._axes(_follow(self.shapes, path, name), name, leaf)
            for (name, path), leaf in zip(paths, leaves, strict=True)
        ]
        there = {size.name for axes in found for size in axes.values()}
        missing = [name for name in self.names if name not in there]
        if missing:
            raise SignatureError(
                f"No tensor of the call has the dimension {missing[0]!r}; dynamic_shapes gives it "
                "to others.",
                remedy="Name the arguments in dynamic_shapes as the call passes them.",
            )
        return found

    def pads(self, args: Args, kwargs: Kwargs) -> list[float | int | bool | None]:
        """The declared pad value of each leaf of a call; None where none is declared.

        Raises:
            OptionError: a declared value is no number.
        """
        paths, _ = self._paths(args, kwargs)
        found: list[float | int | bool | None] = []
        for name, path in paths:
            value = _follow(self.pad, path, name)
            if not _is_pad(value):
                raise OptionError(
                    f"pad has {in_brief(value)} for {name}, not a number.",
                    remedy="Write {'mask': 0}, a number for each tensor.",
                )
            found.append(value)
        return found

    def _paths(self, args: Args, kwargs: Kwargs) -> tuple[list[tuple[str, Any]], list[Any]]:
        """The path to each leaf, as its argument's index and name, then keys; and the leaves."""
        names, _ = self._named
        tree = (tuple(args), dict(kwargs))
        taken = apart(tree) if holds_objects(args, kwargs) else tree
        with_paths, _ = pytree.tree_flatten_with_path(taken)
        paths = []
        for (which, argument, *rest), _ in with_paths:
            # Nodes of objects have steps without a name, too.
            keys = [_key(key) for key in rest if str(key)]
            if _key(which) == 0:
                index = _key(argument)
                name = names[index] if index < len(names) else None
                paths.append((name or f"args[{index}]", (index, name, keys)))
            else:
                paths.append((_key(argument), (None, _key(argument), keys)))
        return paths, [leaf for _, leaf in with_paths]

    def _axes(self, spec: Any, name: str, leaf: Any) -> Axes:
        if spec is None:
            return {}
        if not isinstance(leaf, torch.Tensor):
            raise SignatureError(f"dynamic_shapes has dimensions for {name}, which is no tensor.")
        if not isinstance(spec, Mapping | tuple | list):
            raise OptionError(
                f"dynamic_shapes has {in_brief(spec)} for {name}, not a dictionary by axis.",
                remedy="Write {0: Dim('batch')}, or a tuple with an entry for each dimension.",
            )
        pairs = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
        axes: dict[int, Size] = {}
        for axis, dim in pairs:
            if not isinstance(axis, int):
                raise OptionError(
                    f"dynamic_shapes has the axis {in_brief(axis)} for {name}, which is a tensor.",
                    remedy="Write {0: Dim('batch')}: axes are numbers.",
                )
            size = _size(dim)
            if size is None or size.name not in self.bounds:
                continue
            if not -leaf.dim() <= axis < leaf.dim():
                raise SignatureError(
                    f"dynamic_shapes names dimension {axis} of {name}, which has {leaf.dim()}."
                )
            axes[axis % leaf.dim()] = size
        return axes

    def sizes(self, shapes: Sequence[Any], axes: Sequence[Axes]) -> tuple[int, ...] | None:
        """The named sizes of a call; None if two tensors disagree about one.

        Args:
            shapes: of its leaves; ignored where a leaf has no axes.
            axes: of its leaves.
        """
        found: dict[str, int] = {}
        for shape, own in zip(shapes, axes, strict=True):
            for axis, size in own.items():
                n = size.solve(shape[axis])
                if n is None or found.setdefault(size.name, n) != n:
                    return None
        return tuple(found[name] for name in self.names)


def _is_pad(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _refuse_other_trees(tree: Any, option: str) -> None:
    """Refuse what cannot mirror any arguments."""
    if tree is not None and not isinstance(tree, Mapping | tuple | list):
        example = "{'x': {0: Dim('batch')}}" if option == "dynamic_shapes" else "{'mask': 0}"
        raise OptionError(
            f"{option} is {in_brief(tree)}, not a dictionary by argument.",
            remedy=f"Write {example}, or a tuple that mirrors the positional arguments.",
        )


def _refuse_other_values(pad: Any) -> None:
    """Refuse pad values that are no numbers."""
    wrong = [each for each in pytree.tree_leaves(pad) if not _is_pad(each)]
    if wrong:
        raise OptionError(
            f"pad has {in_brief(wrong[0])}, not a number.",
            remedy="Write {'mask': 0}, a number for each tensor.",
        )


def _refuse_bare_dimensions(tree: Any, option: str) -> None:
    """Refuse dimensions in the place of tensors."""
    for name, spec in tree.items() if isinstance(tree, Mapping) else enumerate(tree or ()):
        if isinstance(spec, str | Size | Dim):
            raise OptionError(
                f"{option}[{name!r}] is a dimension, and nothing says which one of the "
                "tensor's it is.",
                remedy=f"Write the axis too: {{0: {in_brief(spec)}}}."
                if isinstance(spec, str)
                else "Write the axis too: {0: Dim('batch')}.",
            )


def _unknown(option: str, unknown: Sequence[Any], known: Sequence[str]) -> OptionError:
    """The error for names that are no arguments."""
    return OptionError(
        f"{option} names {', '.join(map(repr, unknown))}; the arguments are {', '.join(known)}.",
        remedy=nearest(str(unknown[0]), known) or "Name the arguments as the function does.",
    )


def _batched(leaves: Sequence[Any]) -> list[Axes]:
    sizes = Counter(
        leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()
    )
    if not sizes:
        raise SignatureError(
            "The call has no tensor with a dimension that could be the batch.",
            remedy="Pass dynamic_shapes, or leave the buckets out.",
        )
    common = sizes.most_common(1)[0][0]  # of several, that of the first tensor
    return [
        {0: Size(BATCH)}
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == common
        else {}
        for leaf in leaves
    ]


def parameters_of(fn: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of a function's parameters, and whether it takes further ones (`*args`, `**kwargs`)."""
    # torch.compile's module takes anything, and the one that it compiles has the names.
    fn = getattr(fn, "_orig_mod", fn)
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):
        return [], True
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    names = [n for n, p in signature.parameters.items() if p.kind not in several]
    return names, any(kind in several for kind in kinds)


def _key(entry: Any) -> Any:
    """The index, key or attribute in one step of a path."""
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _follow(tree: Any, path: Any, name: str) -> Any:
    """What a tree that mirrors the arguments has at a leaf's place; None if nothing."""
    index, argument, keys = path
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        found = tree.get(argument)
    else:
        found = tree[index] if index is not None and index < len(tree) else None
    for key in keys:
        if found is None:
            return None
        try:
            found = found.get(key) if isinstance(found, Mapping) else found[key]
        except (TypeError, LookupError) as error:
            raise SignatureError(
                f"No place of {name} in the tree that mirrors it: {key!r}."
            ) from error
    return found


def _dims(tree: Any) -> list[Any]:
    """All dimensions in a tree of them."""
    if isinstance(tree, Mapping):
        return [dim for value in tree.values() for dim in _dims(value)]
    if isinstance(tree, tuple | list):
        return [dim for value in tree for dim in _dims(value)]
    return [] if _size(tree) is None else [tree]


def named(tree: Any) -> tuple[str, ...]:
    """Names of the dimensions in a tree of them, each once."""
    sizes = (_size(getattr(dim, "root", dim)) for dim in _dims(tree))
    return tuple(dict.fromkeys(size.name for size in sizes if size is not None))


def portable(tree: Any) -> Any:
    """A copy of a tree of dimensions that can be pickled: dimensions like `2 * dim` cannot."""
    if isinstance(tree, Mapping):
        return {key: portable(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(portable(value) for value in tree)
    return _size(tree) if hasattr(tree, "root") else tree


def within(tree: Any, ends: Mapping[str, tuple[int, int]]) -> Any:
    """A copy of a tree, its dimensions bounded by these ends; one with a single size is fixed.

    An export for fewer sizes may assume more about them: that a table of 512 positions suffices.
    """
    if isinstance(tree, Mapping):
        return {key: within(value, ends) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(within(value, ends) for value in tree)
    size = _size(tree)
    if size is None or size.name not in ends:
        return tree
    low, high = ends[size.name]
    return size.factor * Dim(size.name, min=low, max=high) + size.offset if low < high else None


def _size(dim: Any) -> Size | None:
    """A dimension's size; None for one that is static.

    Raises:
        OptionError: it has no name, or is no dimension at all.
    """
    if dim is None or dim is Dim.STATIC or isinstance(dim, int):
        return None
    if isinstance(dim, str):
        return Size(dim)
    if isinstance(dim, Size):
        return dim
    if isinstance(dim, Dim):
        fn = getattr(dim, "fn", None)
        if fn is None:
            return Size(dim.__name__)
        root: Any = getattr(dim, "root", None)
        one, two = int(fn(1)), int(fn(2))
        return Size(root.__name__, two - one, 2 * one - two)
    raise OptionError(
        f"dynamic_shapes has {in_brief(dim)}, which names no dimension.",
        remedy="Use torch.export.Dim('batch'), its name as a text, or None for a fixed size.",
    )


def shape_at(shape: Sequence[int], axes: Axes, named: Mapping[str, int]) -> Sizes:
    """The shape of an argument with other named sizes."""
    return tuple(
        axes[axis].of(named[axes[axis].name]) if axis in axes else n for axis, n in enumerate(shape)
    )
