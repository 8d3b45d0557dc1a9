"""Joiner: calls of several requests become one call, and its results are cut apart again.

Requests are laid one below the other along the dimension "batch". Where they differ in another
named dimension, such as "length", the shorter ones are padded at their end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..calls.objects import flatten_result
from ..calls.signature import Args, Kwargs, flatten, leaf_names, unflatten
from ..errors import OptionError
from ..shapes.dimensions import BATCH, Axes, Bounds, Size, shape_at
from ..shapes.padding import Sizes, Value, cut_to
from ..shapes.sampler import CallSampler
from .protocol import DATATYPES, Kind, RequestError, TensorMetadata


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a call's tensors vary.

    Attributes:
        names: of the dimensions; "batch" is the first.
        leaves: names of the call's leaves.
        axes: the dimensions of each leaf.
        pads: what each leaf is padded with.
        bounds: of the sizes, by name.
    """

    names: tuple[str, ...]
    leaves: tuple[str, ...]
    axes: tuple[Axes, ...]
    pads: tuple[Value, ...]
    bounds: Mapping[str, Bounds]


@dataclass(frozen=True)
class Part:
    """A request's share of a call.

    Attributes:
        leaves: its tensors, in the order of the model's inputs.
        sizes: its named sizes; the first is its number of rows.
        key: what has to be equal in requests that are joined: tensors without rows.
    """

    leaves: tuple[torch.Tensor, ...]
    sizes: Sizes
    key: tuple[bytes, ...]


class Joiner:
    """Joins requests for one function.

    Args:
        fn: the function or module.
        args: of a sample call.
        kwargs: likewise.
        layout: which dimensions of the call's tensors vary.
        at: named sizes at which `fn` may be called to see the shapes of its results; the first is
            the sample's own.

    Attributes:
        inputs: what the function takes.
        outputs: what it gives.

    Raises:
        OptionError: the function has no inputs or outputs that requests could be joined in.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        layout: Layout,
        at: Sequence[Sizes],
    ) -> None:
        self.layout = layout
        sample, self._spec = flatten(args, kwargs)
        self.sampler = CallSampler(
            fn,
            torch.nn.Module(),
            self._spec,
            sample,
            list(layout.axes),
            layout.names,
            layout.bounds,
            list(layout.pads),
            [False] * len(sample),
        )
        self._places = [i for i, leaf in enumerate(sample) if isinstance(leaf, torch.Tensor)]
        self._axes = [layout.axes[place] for place in self._places]
        for axes in self._axes:
            self._refuse_offset("An input", axes)
        names = [input_name(layout.leaves[place]) for place in self._places]
        self.device = self.sampler.device
        self.inputs = tuple(
            TensorMetadata(name, DATATYPES[sample[place].dtype], _open(sample[place].shape, axes))
            for name, place, axes in zip(names, self._places, self._axes, strict=True)
        )
        results = [self._results(fn, self.sampler.at(sizes)) for sizes in at]
        self._results_axes = self._axes_of(at, results)
        self.outputs = tuple(
            TensorMetadata(name, DATATYPES[value.dtype], _open(value.shape, axes))
            for (name, value), axes in zip(results[0].items(), self._results_axes, strict=True)
        )

    def part(self, inputs: Mapping[str, torch.Tensor]) -> Part:
        """A request's share of a call, by the names of the inputs.

        Raises:
            RequestError: an input is missing, unknown, or of another datatype or shape.
        """
        unknown = [name for name in inputs if all(name != each.name for each in self.inputs)]
        if unknown:
            raise _invalid(f"The model has no input {unknown[0]!r}; {self._expected()}")
        found: dict[str, tuple[int, str]] = {}
        leaves, key = [], []
        for wanted, axes in zip(self.inputs, self._axes, strict=True):
            leaf = inputs.get(wanted.name)
            if leaf is None:
                raise _invalid(f"The input {wanted.name!r} is missing; {self._expected()}")
            if not isinstance(leaf, torch.Tensor) or DATATYPES[leaf.dtype] != wanted.datatype:
                given = DATATYPES[leaf.dtype] if isinstance(leaf, torch.Tensor) else "BYTES"
                raise _invalid(f"The input {wanted.name!r} is {given}, not {wanted.datatype}.")
            self._note_sizes(wanted, axes, tuple(leaf.shape), found)
            if BATCH not in (size.name for size in axes.values()):
                values = leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                key.append(repr(tuple(leaf.shape)).encode() + values)
            leaves.append(leaf)
        return Part(tuple(leaves), tuple(found[name][0] for name in self.layout.names), tuple(key))

    def _note_sizes(
        self, wanted: TensorMetadata, axes: Axes, shape: Sizes, found: dict[str, tuple[int, str]]
    ) -> None:
        """Check an input's shape, and collect its named sizes with who had them first."""
        fixed = len(shape) == len(wanted.shape) and all(
            n in (-1, m) for n, m in zip(wanted.shape, shape, strict=True)
        )
        if not fixed:
            raise _invalid(
                f"The input {wanted.name!r} has the shape {list(shape)}, not {list(wanted.shape)}."
            )
        for axis, size in axes.items():
            n = size.solve(shape[axis])
            if n is None or not self.layout.bounds[size.name].hold(n):
                bounds = self.layout.bounds[size.name]
                high = "" if bounds.high is None else f" to {size.of(bounds.high)}"
                raise _invalid(
                    f"Dimension {axis} of the input {wanted.name!r} is {shape[axis]}; it may be "
                    f"{size.of(bounds.low)}{high or ' and more'}."
                )
            other, whose = found.setdefault(size.name, (n, wanted.name))
            if other != n:
                raise _invalid(
                    f"The inputs {whose!r} and {wanted.name!r} disagree about {size.name}: "
                    f"{other} and {n}."
                )

    def join(self, parts: Sequence[Part], sizes: Sizes) -> tuple[Args, dict[str, Any]]:
        """One call for all parts, of at least their sizes, on the function's device.

        Rows that are left over are copies of the first one.
        """
        leaves = list(self.sampler.sample)
        for number, (place, axes) in enumerate(zip(self._places, self._axes, strict=True)):
            leaves[place] = self._joined(number, axes, parts, sizes)
        return unflatten(leaves, self._spec)

    def _joined(self, number: int, axes: Axes, parts: Sequence[Part], sizes: Sizes) -> torch.Tensor:
        first = parts[0].leaves[number]
        shape = shape_at(first.shape, axes, dict(zip(self.layout.names, sizes, strict=True)))
        rows = _batch_axis(axes)
        if first.shape == shape:
            return first.to(self.device, non_blocking=True)
        on_gpu = self.device.type == "cuda"
        whole = torch.empty(shape, dtype=first.dtype, pin_memory=on_gpu)
        if rows is None:
            whole.fill_(self.layout.pads[self._places[number]])
            cut_to(whole, first.shape).copy_(first)
            return whole.to(self.device, non_blocking=True)
        begin = 0
        for part in parts:
            leaf = part.leaves[number]
            place = whole.narrow(rows, begin, leaf.shape[rows])
            if place.shape != leaf.shape:
                place.fill_(self.layout.pads[self._places[number]])
            cut_to(place, leaf.shape).copy_(leaf)
            begin += leaf.shape[rows]
        row = axes[rows].factor
        if begin < shape[rows]:
            rest = whole.narrow(rows, begin, shape[rows] - begin)
            times = [rest.shape[rows] // row if axis == rows else 1 for axis in range(rest.dim())]
            rest.copy_(whole.narrow(rows, 0, row).repeat(times))
        return whole.to(self.device, non_blocking=True)

    def results(self, result: Any) -> list[torch.Tensor]:
        """The tensors of what the function returned, on the CPU, in the order of the outputs."""
        leaves, _ = flatten_result(result)
        return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def cut(
        self, results: Sequence[torch.Tensor], parts: Sequence[Part]
    ) -> list[dict[str, torch.Tensor]]:
        """What each part gets of the results: a copy of its rows, cut to its own sizes.

        The results themselves may be overwritten by the next call.
        """
        begins = [0, *itertools.accumulate(part.sizes[0] for part in parts)]
        return [self._own(results, part, begin) for part, begin in zip(parts, begins, strict=False)]

    def _own(
        self, results: Sequence[torch.Tensor], part: Part, begin: int
    ) -> dict[str, torch.Tensor]:
        named = dict(zip(self.layout.names, part.sizes, strict=True))
        found = {}
        for output, axes, value in zip(self.outputs, self._results_axes, results, strict=True):
            rows = _batch_axis(axes)
            if rows is not None:
                factor = axes[rows].factor
                value = value.narrow(rows, begin * factor, part.sizes[0] * factor)
            own = cut_to(value, shape_at(value.shape, axes, named))
            found[output.name] = own.clone(memory_format=torch.contiguous_format)
        return found

    def _results(self, fn: Callable[..., Any], leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        args, kwargs = unflatten(list(leaves), self._spec)
        with torch.no_grad():
            result = fn(*args, **kwargs)
        found, _ = flatten_result(result)
        names = leaf_names(result, "output")
        if len(names) != len(found):
            names = [f"output[{index}]" for index in range(len(found))]
        made = {
            output_name(name): value.detach()
            for name, value in zip(names, found, strict=True)
            if isinstance(value, torch.Tensor)
        }
        if not made:
            raise OptionError(
                "The model returns no tensors that a server could send.",
                remedy="Serve a function that returns tensors.",
            )
        return made

    def _axes_of(
        self, at: Sequence[Sizes], results: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[Axes]:
        """The dimensions of the outputs, by how their shapes differ from the first call's."""
        found: list[dict[int, Size]] = [{} for _ in results[0]]
        if all(sizes[0] == at[0][0] for sizes in at):  # No other number of rows can be called.
            for axes, value in zip(found, results[0].values(), strict=True):
                if value.shape[:1] == (at[0][0],):
                    axes[0] = Size(BATCH)
        for sizes, other in zip(at[1:], results[1:], strict=True):
            changed = [i for i, (a, b) in enumerate(zip(at[0], sizes, strict=True)) if a != b]
            if len(changed) != 1:
                continue
            (which,) = changed
            name, step = self.layout.names[which], sizes[which] - at[0][which]
            for axes, (output, value) in zip(found, results[0].items(), strict=True):
                shapes = value.shape, other[output].shape
                for axis, (a, b) in enumerate(zip(*shapes, strict=True)):
                    if a == b:
                        continue
                    factor, rest = divmod(b - a, step)
                    if rest or axes.get(axis, Size(name)).name != name:
                        raise OptionError(
                            f"Dimension {axis} of the output {output!r} is {a} where {name} is "
                            f"{at[0][which]}, and {b} where it is {sizes[which]}: such results "
                            "cannot be cut apart.",
                            remedy="Leave the dimension out of dynamic_shapes.",
                        )
                    axes[axis] = Size(name, factor, a - factor * at[0][which])
        for axes in found:
            self._refuse_offset("An output", axes)
        return [dict(axes) for axes in found]

    def _refuse_offset(self, what: str, axes: Axes) -> None:
        sizes = [size for size in axes.values() if size.name == BATCH]
        if len(sizes) > 1 or any(size.offset for size in sizes):
            raise OptionError(
                f"{what} has no single dimension that is a multiple of the number of rows.",
                remedy="Give the batch one dimension of each tensor in dynamic_shapes.",
            )

    def _expected(self) -> str:
        wanted = (f"{each.name} {each.datatype} {list(each.shape)}" for each in self.inputs)
        return f"it takes {', '.join(wanted)}."


def input_name(leaf: str) -> str:
    """The name of an input: `features['mask']` is "features.mask"."""
    return re.sub(r"\[['\"]?([^]'\"]*)['\"]?\]", r".\1", leaf)


def output_name(leaf: str) -> str:
    """The name of an output: a key or attribute, or "output_0" for an element without a name."""
    path = input_name(leaf).removeprefix("output").lstrip(".")
    return f"output_{path}" if path[:1].isdigit() else path or "output"


def layout_of_samples(
    names_of_leaves: Sequence[str], samples: Sequence[Sequence[Any]], pads: Sequence[Value]
) -> Layout:
    """The layout of a function that was made for several calls: dimensions in which they differ.

    Dimensions that always have the same size have one name. The batch is the first dimension of
    the first tensor; the others are called length, length_1 and so on.

    Args:
        names_of_leaves: names of the calls' leaves.
        samples: the leaves of each call.
        pads: what each leaf is padded with.
    """
    first = samples[0]
    columns: dict[tuple[int, ...], str] = {}
    axes: list[dict[int, Size]] = []
    for index, leaf in enumerate(first):
        own: dict[int, Size] = {}
        if isinstance(leaf, torch.Tensor):
            for axis in range(leaf.dim()):
                column = tuple(sample[index].shape[axis] for sample in samples)
                if axis == 0 and BATCH not in columns.values():
                    columns[column] = BATCH
                if len(set(column)) > 1 or (axis == 0 and columns.get(column) == BATCH):
                    others = sum(name != BATCH for name in columns.values())
                    called = "length" if not others else f"length_{others}"
                    own[axis] = Size(columns.setdefault(column, called))
        axes.append(own)
    names = tuple(columns.values())
    sizes = list(zip(*columns, strict=True)) if columns else []
    largest = {name: max(row[i] for row in sizes) for i, name in enumerate(names)}
    bounds = {name: Bounds(1, largest[name]) for name in names}
    return Layout(names, tuple(names_of_leaves), tuple(axes), tuple(pads), bounds)


def _batch_axis(axes: Axes) -> int | None:
    return next((axis for axis, size in axes.items() if size.name == BATCH), None)


def _open(shape: Sequence[int], axes: Axes) -> Sizes:
    return tuple(-1 if axis in axes else n for axis, n in enumerate(shape))


def _invalid(what: str) -> RequestError:
    return RequestError(Kind.INVALID, what)
