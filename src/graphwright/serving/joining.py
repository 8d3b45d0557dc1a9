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

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..calls.objects import apart, flatten_result
from ..calls.split import Args, Kwargs, flatten, leaf_names, unflatten
from ..errors import OptionError
from ..shapes.dimensions import BATCH, Axes, Bounds, Size, shape_at
from ..shapes.padding import Sizes, Value, cut_to, memory_format
from ..shapes.sampler import CallSampler
from .protocol import DATATYPES, DTYPES, ErrorKind, RequestError, TensorMetadata
from .requests import check_inputs


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


@dataclass(frozen=True)
class _Form:
    """How a function's result is built.

    Attributes:
        spec: its tree.
        tensors: which of its leaves are tensors.
        paths: where these are, such as `['logits']`; None if two of them cannot be told apart.
    """

    spec: pytree.TreeSpec
    tensors: tuple[bool, ...]
    paths: tuple[str, ...] | None


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
        # What was tuned or captured for images in channels last is called with such.
        self._formats = [memory_format(sample[place]) for place in self._places]
        self._rows_axes = [_batch_axis(axes) for axes in self._axes]
        for axes in self._axes:
            self._refuse_offset("An input", axes)
        self._pads = [
            _array(torch.full((), layout.pads[place], dtype=sample[place].dtype))
            for place in self._places
        ]
        names = [input_name(layout.leaves[place]) for place in self._places]
        self.device = self.sampler.device
        _refuse_equal(names, "inputs")
        self.inputs = tuple(
            TensorMetadata(
                name, _datatype("input", name, sample[place]), _open(sample[place].shape, axes)
            )
            for name, place, axes in zip(names, self._places, self._axes, strict=True)
        )
        found = [self._results(fn, self.sampler.at(sizes)) for sizes in at]
        self._form, results = found[0][0], [named for _, named in found]
        self._results_axes = self._axes_of(at, results)
        alone = {_changed_alone(at[0], sizes) for sizes in at}
        self._all_changed = alone >= set(range(len(layout.names)))
        self.outputs = tuple(
            TensorMetadata(name, _datatype("output", name, value), _open(value.shape, axes))
            for (name, value), axes in zip(results[0].items(), self._results_axes, strict=True)
        )

    @property
    def rows_come_first(self) -> bool:
        """Whether the first dimension of each input and output is the number of rows."""
        every = [*self._axes, *self._results_axes]
        return all(axes.get(0) == Size(BATCH) for axes in every)

    def part(self, inputs: Mapping[str, Any], *, any_rows: bool = False) -> Part:
        """A request's share of a call, by the names of the inputs.

        Args:
            inputs: of the request.
            any_rows: whether there may be more rows than a call can have.

        Raises:
            RequestError: an input is missing, unknown, or of another datatype or shape.
        """
        check_inputs(inputs, self.inputs)
        found: dict[str, tuple[int, str]] = {}
        leaves, key = [], []
        for wanted, axes in zip(self.inputs, self._axes, strict=True):
            leaf = inputs[wanted.name]
            self._note_sizes(wanted, axes, tuple(leaf.shape), found, any_rows)
            if _batch_axis(axes) is None:
                values = leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                key.append(repr(tuple(leaf.shape)).encode() + values)
            leaves.append(leaf)
        return Part(tuple(leaves), tuple(found[name][0] for name in self.layout.names), tuple(key))

    def _note_sizes(
        self,
        wanted: TensorMetadata,
        axes: Axes,
        shape: Sizes,
        found: dict[str, tuple[int, str]],
        any_rows: bool,
    ) -> None:
        """Check an input's named sizes, and collect them with who had them first."""
        for axis, size in axes.items():
            bounds = self.layout.bounds[size.name]
            if any_rows and size.name == BATCH:
                bounds = Bounds(bounds.low)
            n = size.solve(shape[axis])
            if n is None or not bounds.hold(n):
                high = "" if bounds.high is None else f" to {size.of(bounds.high)}"
                step = "" if size.factor == 1 else f" in steps of {size.factor}"
                raise _invalid(
                    f"Dimension {axis} of the input {wanted.name!r} is {shape[axis]}; it may be "
                    f"{size.of(bounds.low)}{high or ' and more'}{step}."
                )
            other, whose = found.setdefault(size.name, (n, wanted.name))
            if other != n:
                raise _invalid(
                    f"The inputs {whose!r} and {wanted.name!r} disagree about {size.name}: "
                    f"{other} and {n}."
                )

    def split(self, part: Part, most: int) -> list[Part]:
        """A request in parts of at most so many rows, in their order."""
        rows = part.sizes[0]
        return [
            self._rows_of(part, begin, min(most, rows - begin)) for begin in range(0, rows, most)
        ]

    def _rows_of(self, part: Part, begin: int, count: int) -> Part:
        leaves = []
        for leaf, axes in zip(part.leaves, self._axes, strict=True):
            rows = _batch_axis(axes)
            if rows is not None:
                factor = axes[rows].factor
                leaf = leaf.narrow(rows, begin * factor, count * factor)
                if rows:  # Graphs are captured for contiguous tensors.
                    leaf = leaf.clone(memory_format=torch.contiguous_format)
            leaves.append(leaf)
        return Part(tuple(leaves), (count, *part.sizes[1:]), part.key)

    def put_together(
        self, answers: Sequence[Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """The answer to a request, of the answers to its parts in their order."""
        found = {}
        for output, axes in zip(self.outputs, self._results_axes, strict=True):
            values = [answer[output.name] for answer in answers]
            rows = _batch_axis(axes)
            # What has no rows is the same for all parts.
            found[output.name] = values[0] if rows is None else torch.cat(values, rows)
        return found

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
        rows = self._rows_axes[number]
        format_ = self._formats[number]
        if first.shape == shape and format_ is torch.contiguous_format:
            # What has no rows belongs to several calls, one of which may write to it.
            return first.to(self.device, non_blocking=True, copy=rows is None)
        on_gpu = self.device.type == "cuda"
        whole = torch.empty(shape, dtype=first.dtype, pin_memory=on_gpu, memory_format=format_)
        if rows is None:
            whole.fill_(self.layout.pads[self._places[number]])
            cut_to(whole, first.shape).copy_(first)
            return whole.to(self.device, non_blocking=True)
        laid, pad = _array(whole), self._pads[number]
        before = (slice(None),) * rows
        end = 0
        for part in parts:
            values = _array(part.leaves[number])
            begin, end = end, end + values.shape[rows]
            place = laid[(*before, slice(begin, end))]
            if place.shape != values.shape:
                place[...] = pad
            place[tuple(map(slice, values.shape))] = values
        row = axes[rows].factor
        first_row = laid[(*before, slice(row))]
        for begin in range(end, shape[rows], row):
            laid[(*before, slice(begin, begin + row))] = first_row
        return whole.to(self.device, non_blocking=True)

    def results(self, result: Any) -> list[torch.Tensor]:
        """The tensors of what the function returned, on the CPU, in the order of the outputs.

        Raises:
            RequestError: FAILED, they are not where those of the sample call are.
        """
        leaves, spec = flatten_result(result)
        tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        found = list(itertools.compress(leaves, tensors))
        if tensors != self._form.tensors or spec != self._form.spec:
            found = self._in_order(result, found)
        # NumPy has no tensors that are negative by a bit alone.
        return [tensor.detach().cpu().resolve_neg() for tensor in found]

    def _in_order(self, result: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a result whose keys, say, come in another order than the sample's."""
        paths, expected = _paths(result), self._form.paths
        if paths is None or expected is None or set(paths) != set(expected):
            given = "another structure" if paths is None else f"the outputs {_listed(paths)}"
            raise RequestError(
                ErrorKind.FAILED,
                f"The model gave {given}, and in the sample call "
                f"{', '.join(output.name for output in self.outputs)}.",
            )
        at = dict(zip(paths, tensors, strict=True))
        return [at[path] for path in expected]

    def cut(
        self, results: Sequence[torch.Tensor], parts: Sequence[Part], sizes: Sizes
    ) -> list[dict[str, torch.Tensor]]:
        """What each part gets of the results: a copy of its rows, cut to its own sizes.

        The results themselves may be overwritten by the next call.

        Args:
            results: of a call.
            parts: that it was made of.
            sizes: of the call.

        Raises:
            RequestError: FAILED, the results are of another datatype than the sample call's, or not
                as large as such a call's have to be.
        """
        self._check(results, sizes)
        arrays = [_array(value) for value in results]
        begins = [0, *itertools.accumulate(part.sizes[0] for part in parts)]
        return [self._own(arrays, part, begin) for part, begin in zip(parts, begins, strict=False)]

    def _check(self, results: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Refuse results that cannot be cut apart: they depend on more than the call's sizes."""
        named = dict(zip(self.layout.names, sizes, strict=True))
        for output, axes, value in zip(self.outputs, self._results_axes, results, strict=True):
            if value.dtype is not DTYPES[output.datatype]:
                raise RequestError(
                    ErrorKind.FAILED,
                    f"The output {output.name!r} is of {value.dtype}, and of "
                    f"{DTYPES[output.datatype]} in the sample call.",
                )
            same_rank = value.dim() == len(output.shape)
            # Where not all named sizes could be changed, more may vary than is known.
            shape = output.shape if self._all_changed else value.shape
            if not same_rank or value.shape != shape_at(shape, axes, named):
                raise RequestError(
                    ErrorKind.FAILED,
                    f"The output {output.name!r} has the shape {list(value.shape)}, which does not "
                    f"follow from the sizes of the call, {', '.join(map(str, sizes))}.",
                )

    def _own(
        self, arrays: Sequence[np.ndarray[Any, Any]], part: Part, begin: int
    ) -> dict[str, torch.Tensor]:
        named = dict(zip(self.layout.names, part.sizes, strict=True))
        found = {}
        for output, axes, array in zip(self.outputs, self._results_axes, arrays, strict=True):
            index = list(map(slice, array.shape))
            for axis, size in axes.items():
                first = begin * size.factor if size.name == BATCH else 0
                index[axis] = slice(first, first + size.of(named[size.name]))
            own = torch.from_numpy(np.array(array[tuple(index)], order="C"))
            bfloat16 = DTYPES[output.datatype] is torch.bfloat16  # Which NumPy does not know.
            found[output.name] = own.view(torch.bfloat16) if bfloat16 else own
        return found

    def _results(
        self, fn: Callable[..., Any], leaves: Sequence[Any]
    ) -> tuple[_Form, dict[str, torch.Tensor]]:
        """How the result of a call is built, and its tensors by their names."""
        args, kwargs = unflatten(list(leaves), self._spec)
        with torch.no_grad():
            result = fn(*args, **kwargs)
        found, spec = flatten_result(result)
        names = leaf_names(result, "output")
        if len(names) != len(found):
            names = [f"output[{index}]" for index in range(len(found))]
        pairs = [
            (output_name(name), value.detach())
            for name, value in zip(names, found, strict=True)
            if isinstance(value, torch.Tensor)
        ]
        _refuse_equal([name for name, _ in pairs], "outputs")
        if not pairs:
            raise OptionError(
                "The model returns no tensors that a server could send.",
                remedy="Serve a function that returns tensors.",
            )
        tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in found)
        return _Form(spec, tensors, _paths(result)), dict(pairs)

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
            which = _changed_alone(at[0], sizes)
            if which is None:
                continue
            name, step = self.layout.names[which], sizes[which] - at[0][which]
            wheres = tuple(f"where {name} is {n}" for n in (at[0][which], sizes[which]))
            _refuse_others(results[0], other, wheres)
            for axes, (output, value) in zip(found, results[0].items(), strict=True):
                shapes = value.shape, other[output].shape
                for axis, (a, b) in enumerate(zip(*shapes, strict=True)):
                    if a == b:
                        continue
                    factor, rest = divmod(b - a, step)
                    if rest or axes.get(axis, Size(name)).name != name:
                        raise OptionError(
                            f"Dimension {axis} of the output {output!r} is {a} {wheres[0]}, and "
                            f"{b} {wheres[1]}: such results cannot be cut apart.",
                            remedy="Leave the dimension out of dynamic_shapes.",
                        )
                    axes[axis] = Size(name, factor, a - factor * at[0][which])
        for axes in found:
            self._refuse_offset("An output", axes)
        return list(found)

    def _refuse_offset(self, what: str, axes: Axes) -> None:
        sizes = [size for size in axes.values() if size.name == BATCH]
        if len(sizes) > 1 or any(size.offset for size in sizes):
            raise OptionError(
                f"{what} has no single dimension that is a multiple of the number of rows.",
                remedy="Give the batch one dimension of each tensor in dynamic_shapes.",
            )


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
    bounds = {name: Bounds(1, max(column)) for column, name in columns.items()}
    return Layout(tuple(bounds), tuple(names_of_leaves), tuple(axes), tuple(pads), bounds)


def _datatype(what: str, name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DATATYPES:
        raise OptionError(
            f"The {what} {name!r} is of {tensor.dtype}, for which the protocol has no name.",
            remedy=f"Serve a function whose {what}s are of {', '.join(map(str, DATATYPES))}.",
        )
    return DATATYPES[tensor.dtype]


def _refuse_equal(names: Sequence[str], what: str) -> None:
    """Refuse a function of which two inputs or outputs would have one name."""
    for name in names:
        if names.count(name) > 1:
            raise OptionError(
                f"Two {what} of the model are called {name!r}.",
                remedy="Serve a function that gives them other names.",
            )


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory as an array.

    Each of PyTorch's operations on a tensor lets another thread take its turn, which takes longer
    than to copy the tensors of a request; NumPy's on small arrays do not.
    """
    found: np.ndarray[Any, Any] = (
        tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    ).numpy()
    return found


def _batch_axis(axes: Axes) -> int | None:
    return next((axis for axis, size in axes.items() if size.name == BATCH), None)


def _refuse_others(
    first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], wheres: Sequence[str]
) -> None:
    """Refuse a function whose outputs are other ones where a size is another."""
    if first.keys() != other.keys():
        raise OptionError(
            f"The outputs are {', '.join(first)} {wheres[0]}, and {', '.join(other)} {wheres[1]}.",
            remedy="Serve a function that gives the same ones at all sizes.",
        )
    for name, value in first.items():
        if value.dim() != other[name].dim():
            raise OptionError(
                f"The output {name!r} has the shape {list(value.shape)} {wheres[0]}, and "
                f"{list(other[name].shape)} {wheres[1]}.",
                remedy="Keep its dimensions at all sizes: squeeze() drops those of size 1; "
                "squeeze(1), say, leaves the others.",
            )


def _changed_alone(first: Sizes, other: Sizes) -> int | None:
    """The index of the one size that differs; None if several do, or none."""
    changed = [index for index, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 else None


def _paths(result: Any) -> tuple[str, ...] | None:
    """Where the tensors of a result are; None if two of them cannot be told apart."""
    try:
        leaves, _ = pytree.tree_flatten_with_path(apart(result))
    except ValueError:  # A node type was registered without names for its children.
        return None
    paths = [pytree.keystr(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tuple(paths) if len(set(paths)) == len(paths) else None


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(output_name(path) for path in paths) or "none"


def _open(shape: Sequence[int], axes: Axes) -> Sizes:
    return tuple(-1 if axis in axes else n for axis, n in enumerate(shape))


def _invalid(what: str) -> RequestError:
    return RequestError(ErrorKind.INVALID, what)
