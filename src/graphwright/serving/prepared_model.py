"""PreparedModel: the calls of a model that is served, joined, checked and measured."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..calls.options import count_problem, refuse
from ..calls.signature import CallSignature
from ..calls.snapshots import Call
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..calls.watch import ModuleWatch
from ..dispatch.answerer import SizesAnswered, answerer_of
from ..dispatch.graphed_module import graph
from ..errors import OptionError
from ..evaluation.accuracy import difference
from ..shapes.buckets import Buckets
from ..shapes.dimensions import BATCH, Bounds, Dimensions, named
from ..shapes.dynamic_signature import DynamicSignature
from ..shapes.padding import Sizes
from .batching import Timings
from .instances import Instance, best_count, instances, problem
from .joining import Joiner, Layout, Part, layout_of_samples
from .model_config import ModelConfig, Tensors
from .protocol import ErrorKind, RequestError

_LOGGER = logging.getLogger("graphwright.serving")
_MAX_BATCH = 32
# How many calls of a size are timed, and after how many seconds no more begin.
_TIMED = 5
_TIMING_S = 0.2
# How many requests are joined to see whether that changes an answer.
_CHECKED = 4
# Two servers or loads of one model call it in turns: it may give the same memory each time.
_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class PreparedModel:
    """A model whose sizes have been run, checked and timed.

    Attributes:
        joiner: joins requests and cuts results.
        timings: of the sizes that are computed.
        inputs: what clients send.
        outputs: what clients get.
        sample: the sample call's inputs by name, if these are what clients send.
        joins: whether requests are joined: no answer depends on other rows.
        splits: whether a request with more rows than a call can have is answered in parts.
        instances: what computes batches, side by side if there are several.
        notes: what was found wanting, in sentences.
    """

    def __init__(self, config: ModelConfig, *, threads: int | None = None) -> None:
        """Capture or run each size, check that joining changes no answer, and time it.

        Args:
            config: what is served.
            threads: of PyTorch, if all of them are this server's; None if others need them too.

        Raises:
            OptionError: the configuration makes no sense.
        """
        _refuse_undone(config)
        refuse("ModelConfig", count_problem("instances", config.instances, optional=True))
        self.config = config
        self.notes: list[str] = []
        args, kwargs, layout, points = _described(config)
        sample, self._spec = flatten(args, kwargs)
        tensors = [leaf for leaf in sample if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise OptionError(
                "The model is called without tensors.", remedy="Give args or kwargs that hold some."
            )
        device = tensors[0].device
        self.call = _callable_on(device, config, points)
        lock = _lock_of(config.model)
        self.instances = [Instance(self.call, lock, threads if device.type == "cpu" else None)]
        self._watch: ModuleWatch | None = None
        self._reference = _reference_of(config.model)
        own = _own_sizes(sample, layout)
        at = _different_sizes(own, points, anywhere=self._reference is not None, layout=layout)
        self.joiner = Joiner(self._reference or self.call, args, kwargs, layout, at)
        exact = config.buckets is not None or not _sizes_of(self.call).all_sizes
        if threads is not None or config.instances is not None:
            self.instances = self._several(device, points, threads or torch.get_num_threads())
        self.timings = Timings(self._measured(points, exact), exact)
        self.joins = True
        try:
            self._check()
            self._check_copies()
            self.splits = self._rows_are_apart()
        except RequestError as error:
            raise OptionError(
                f"The model cannot be served: {error.what}",
                remedy="Serve a function whose outputs have the shapes and datatypes of its "
                "sample call, but for the named sizes.",
            ) from error
        given = zip(self.joiner.inputs, tensors, strict=True)
        self.sample = {} if config.inputs else {each.name: tensor for each, tensor in given}
        self.inputs = tuple(config.inputs) or self.joiner.inputs
        self.outputs = tuple(config.outputs) or self.joiner.outputs

    def parts(self, inputs: Mapping[str, Any]) -> list[Part]:
        """A request as it is computed: in one part, or in several if it has too many rows for one.

        Raises:
            RequestError: an input is missing, unknown, or of another datatype or shape, or there is
                no size that could hold the request.
        """
        whole = self.joiner.part(inputs, any_rows=self.splits)
        most = self.timings.most_rows(whole.sizes[1:]) or self._most_rows
        too_many = self.splits and whole.sizes[0] > most
        parts = self.joiner.split(whole, most) if too_many else [whole]
        if self._reference is None and self.timings.exact:
            for part in parts:
                self._refuse_unbuilt(part.sizes)
        return parts

    @property
    def max_batch_size(self) -> int:
        """The most rows of a call, if all that clients see has the rows first; else 0."""
        as_sent = not self.config.inputs and not self.config.outputs
        return self._most_rows if as_sent and self.joiner.rows_come_first else 0

    @property
    def _most_rows(self) -> int:
        return max(point[0] for point in self.timings.seconds)

    def _refuse_unbuilt(self, sizes: Sizes) -> None:
        """Refuse what only the model itself could answer, which is not there."""
        found = self.timings.points_for(sizes) if self.joins else sizes in self.timings.seconds
        if found:
            return
        names = self.joiner.layout.names
        there = ", ".join("×".join(map(str, point)) for point in sorted(self.timings.seconds)[:8])
        raise RequestError(
            ErrorKind.INVALID,
            f"The request is of {_in_words(names, sizes)}, and the model was saved for the sizes "
            f"{' × '.join(names)} of {there}.",
            remedy="Send one of these sizes, or let the server load the file with its model.",
        )

    def _several(
        self, device: torch.device, points: Sequence[Sizes], threads: int
    ) -> list[Instance]:
        """As many instances as are asked for, or else as pay."""
        (first,), count = self.instances, self.config.instances
        why = problem(self.config.model, device)
        if count is None and why is not None:
            return [first]
        if count is not None and count > 1 and why is not None:
            raise OptionError(f"instances={count} cannot be: {why}.", remedy="Leave instances out.")
        # The shortest and the longest request.
        ends = sorted(points, key=lambda point: (point[0], math.prod(point)))
        ends = [point for point in ends if point[0] == ends[0][0]]
        works = [
            functools.partial(_called_with, *unflatten(self.joiner.sampler.at(point), self._spec))
            for point in dict.fromkeys((ends[0], ends[-1]))
        ]
        if count is None:
            count = best_count(first, works, threads)
        if count == 1:
            return [first]
        assert isinstance(self.config.model, nn.Module)
        self._watch = ModuleWatch(self.config.model, values=True)
        with first.lock:
            first.run(works[0])
        if self._watch.changed() is not None:  # It is changed by its own calls.
            self._watch = None
            if self.config.instances is None:
                return [first]
        return instances(first, count, threads)

    def use_current_instances(self) -> None:
        """Drop the copies of a model that has changed since they were made."""
        if len(self.instances) == 1 or self._watch is None:
            return
        if (change := self._watch.changed()) is not None:
            del self.instances[1:]
            self._watch = None
            self._note(
                f"Batches are computed one after the other, since the model changed: {change}"
            )

    def compute(
        self,
        parts: Sequence[Part],
        sizes: Sizes,
        passed: Callable[[], object] = lambda: None,
        instance: Instance | None = None,
    ) -> list[Tensors]:
        """The answers to requests, computed together.

        Args:
            parts: the requests.
            sizes: of the call.
            passed: called when they are joined, when the model was called, and when its results
                are cut apart.
            instance: which of `instances` computes them, by default the first.
        """
        args, kwargs = self.joiner.join(parts, sizes)
        passed()
        chosen = instance or self.instances[0]
        with chosen.lock:
            results = self._run(args, kwargs, chosen)
            passed()
            answers = self.joiner.cut(results, parts, sizes)
        passed()
        return answers

    def _run(
        self, args: Args, kwargs: Kwargs, instance: Instance | None = None
    ) -> list[torch.Tensor]:
        """Call the model, and fetch its results, which its next call may overwrite."""
        run = (instance or self.instances[0]).run
        return run(lambda call: self.joiner.results(call(*args, **kwargs)))

    def _measured(self, points: Sequence[Sizes], exact: bool) -> dict[Sizes, float]:
        """The median time of a call of each size, in seconds, with its copies."""
        calls = {point: unflatten(self.joiner.sampler.at(point), self._spec) for point in points}
        # Graphs are captured, and others built, largest first: that takes the least memory.
        largest_first = sorted(points, key=math.prod, reverse=True)
        for point in largest_first if exact else largest_first[-1:]:
            with self.instances[0].lock:
                self._run(*calls[point])
        found: dict[Sizes, float] = {}
        for point in sorted(points):
            times: list[float] = []
            while len(times) < _TIMED and sum(times) < _TIMING_S:
                with self.instances[0].lock:
                    begin = time.perf_counter()
                    self._run(*calls[point])
                times.append(time.perf_counter() - begin)
            found[point] = statistics.median(times)
        return found

    def _check(self) -> None:
        """Compare joined answers with those of each request alone; join less if they differ."""
        names = self.joiner.layout.names
        if len(names) > 1 and (why := self._difference(mixed=True)) is not None:
            self.timings = replace(self.timings, pads=False)
            are = "are joined only where they agree" if self._most_rows > 1 else "are not padded"
            self._note(f"Requests {are} in {', '.join(names[1:])}: {why}")
        if (why := self._difference(mixed=False)) is not None:
            self.joins = False
            self._note(f"Requests are not joined, since an answer depends on other rows: {why}")

    def _rows_are_apart(self) -> bool:
        """Whether a call of two rows gives what each row gives alone.

        Where calls have several rows, `_check` has seen that.
        """
        if not self.joins:
            return False
        if self._most_rows > 1:
            return True
        if self._reference is None:
            return False
        largest = max(self.timings.seconds, key=math.prod)
        whole = self._part_of(self.joiner.sampler.at((2, *largest[1:])), any_rows=True)
        together = self._alone(whole)
        apart = self.joiner.put_together([self._alone(p) for p in self.joiner.split(whole, 1)])
        return all(
            difference(apart[name], value, other_kernels=True) is None
            for name, value in together.items()
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        _LOGGER.warning(text)

    def _check_copies(self) -> None:
        """Compare the answers of copies with the model's own; drop them if they differ.

        Raises:
            OptionError: they differ, and instances were asked for.
        """
        why = self._difference_of_copies()
        if why is None:
            return
        if self.config.instances is not None:
            raise OptionError(
                f"instances={self.config.instances} cannot be: {why}",
                remedy="Leave instances out.",
            )
        del self.instances[1:]
        self._note(f"Batches are computed one after the other: {why}")

    def _difference_of_copies(self) -> str | None:
        largest = max(self.timings.seconds, key=math.prod)
        parts = self._requests(largest, 0, mixed=False)
        own = self.compute(parts, largest)
        for instance in self.instances[1:]:
            copied = self.compute(parts, largest, instance=instance)
            for part, answer, other in zip(parts, own, copied, strict=True):
                for name, value in answer.items():
                    why = difference(other[name], value, other_kernels=True)
                    if why is not None:
                        return f"{self._words(name, part)} is {why} by a copy of the model."
        return None

    def _difference(self, *, mixed: bool) -> str | None:
        """How the answers of joined requests differ from those of each alone; None if not.

        Beside others, kernels round in other ways; so the first one is also computed beside two
        kinds of others, where nothing but these differs.

        Args:
            mixed: whether the requests are of several lengths, so that they are padded.
        """
        largest = max(self.timings.seconds, key=math.prod)
        parts, others = (self._requests(largest, seed, mixed=mixed) for seed in (0, 1))
        expected = self._answers_alone(parts)
        if len(expected) == 1 < len(parts):
            sizes = _in_words(self.joiner.layout.names, parts[-1].sizes)
            return f"The model computes no request that is shorter than {sizes}."
        parts = [parts[number] for number in expected]
        joined = self._in_calls(parts, largest)
        how = "when padded" if mixed and largest[0] == 1 else "beside others"
        for part, answer, alone in zip(parts, joined, expected.values(), strict=True):
            for name, value in answer.items():
                why = difference(value, alone[name], other_kernels=True)
                if why is not None:
                    return f"{self._words(name, part)} is {why} {how}."
        beside = [parts[0], *(others[number] for number in [*expected][1:])]
        again = self._in_calls(beside, largest)[0]
        for name, value in again.items():
            why = difference(value, joined[0][name])
            if why is not None:
                return f"{self._words(name, parts[0])} is {why} beside others than before."
        return None

    def _answers_alone(self, parts: Sequence[Part]) -> dict[int, Tensors]:
        """The answers to each request alone, by their numbers; the last one is the longest.

        Shorter ones than the model takes, which nobody said it does not, are left out.
        """
        found = {}
        for number, part in enumerate(parts):
            try:
                found[number] = self._alone(part)
            except Exception as error:
                if isinstance(error, RequestError) or part.sizes[1:] == parts[-1].sizes[1:]:
                    raise
        return found

    def _in_calls(self, parts: Sequence[Part], sizes: Sizes) -> list[Tensors]:
        """The answers to requests of a row each, in calls of as many as there are rows."""
        rows, found = sizes[0], []
        for begin in range(0, len(parts), rows):
            found += self.compute(parts[begin : begin + rows], sizes)
        return found

    def _requests(self, largest: Sizes, seed: int, *, mixed: bool) -> list[Part]:
        """A few requests of other values, of the largest sizes or from the shortest to these."""
        # Padding is to be seen in calls of one row, too.
        count = _CHECKED if mixed else min(largest[0], _CHECKED)
        sampler, generator = self.joiner.sampler, torch.Generator().manual_seed(seed)
        changes = sampler.changes()
        parts = []
        for number in range(count):
            others = largest[1:]
            if mixed:
                lows = self._shortest
                others = tuple(
                    low + (n - low) * number // (count - 1)
                    for low, n in zip(lows, others, strict=True)
                )
            change = changes[(number + seed) % len(changes)]
            parts.append(self._part_of(sampler.changed((1, *others), change, generator)))
        return parts

    @property
    def _shortest(self) -> Sizes:
        """The least sizes of a request, without the batch."""
        layout = self.joiner.layout
        return tuple(layout.bounds[name].low for name in layout.names[1:])

    def _words(self, output: str, part: Part) -> str:
        sizes = _in_words(self.joiner.layout.names, part.sizes)
        return f"the output {output!r} of a request of {sizes}"

    def _part_of(self, leaves: Sequence[Any], *, any_rows: bool = False) -> Part:
        """A request with the leaves of a call."""
        tensors = [leaf.cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        names = [each.name for each in self.joiner.inputs]
        return self.joiner.part(dict(zip(names, tensors, strict=True)), any_rows=any_rows)

    def _alone(self, part: Part) -> Tensors:
        """The answer to one request, by the model itself where there is one."""
        sizes = part.sizes
        call = self._reference
        if call is None:
            call, sizes = self.call, min(self.timings.points_for(sizes), key=math.prod)
        args, kwargs = self.joiner.join([part], sizes)
        with torch.no_grad(), self.instances[0].lock:
            results = self.joiner.results(call(*args, **kwargs))
            return self.joiner.cut(results, [part], sizes)[0]


def _called_with(args: Args, kwargs: Kwargs, call: Callable[..., Any]) -> Any:
    return call(*args, **kwargs)


def _lock_of(model: Any) -> threading.RLock:
    """The lock of a model, the same for all that serve it."""
    with _LOCKS_LOCK:
        try:
            return _LOCKS.setdefault(model, threading.RLock())
        except TypeError:  # It cannot be looked up, or not be referred to weakly.
            return threading.RLock()


def _refuse_undone(config: ModelConfig) -> None:
    """Refuse tensors that are declared and that no function makes."""
    for declared, function in (("inputs", "preprocess"), ("outputs", "postprocess")):
        if getattr(config, declared) and getattr(config, function) is None:
            raise OptionError(
                f"{declared}= says what clients see beside a {function}=, and there is none.",
                remedy=f"Leave {declared} out: the model's own are seen.",
            )


def _in_words(names: Sequence[str], sizes: Sizes) -> str:
    return ", ".join(f"{name} {n}" for name, n in zip(names, sizes, strict=True))


def _described(config: ModelConfig) -> tuple[Args, Kwargs, Layout, list[Sizes]]:
    """The sample call, its layout, and the sizes to compute, the batch first."""
    samples = _sizes_of(config.model).samples
    if config.buckets is None and config.dynamic_shapes is None and samples:
        return _described_by(samples, config.model)
    args, kwargs = _sample_call(config, samples)
    buckets, dynamic_shapes, pad = _options_of(config)
    given = buckets.names if buckets is not None else _names_in(dynamic_shapes)
    if BATCH not in given:
        raise OptionError(
            f"The dimensions are {', '.join(given)}; requests are joined along one named 'batch'.",
            remedy="Name the dimension of the rows 'batch' in buckets and dynamic_shapes.",
        )
    names = (BATCH, *(name for name in given if name != BATCH))
    dimensions = _dimensions_of(config.model, given, dynamic_shapes, pad)
    form = DynamicSignature(dimensions, CallSignature.of(args, kwargs), args, kwargs)
    own = dict(zip(given, form.own, strict=True))
    pads = tuple(value or 0 for value in dimensions.pads(args, kwargs))
    bounds = dict(dimensions.bounds)
    points = _points_of(buckets, names, own, bounds)
    if buckets is None:
        for name, n in own.items():
            if bounds[name] == Bounds():
                bounds[name] = Bounds(1, n)
    bounds[BATCH] = Bounds(1, max(point[0] for point in points))
    layout = Layout(names, tuple(form.names), tuple(form.axes), pads, bounds)
    return args, kwargs, layout, points


def _described_by(samples: Sequence[Call], model: Any) -> tuple[Args, Kwargs, Layout, list[Sizes]]:
    """As `_described`, by the calls that a model was made for."""
    largest = max(samples, key=lambda call: _elements(call.args, call.kwargs))
    calls = [_leaves_like(call, largest) for call in samples]
    names = _names_of_leaves(model, largest.args, largest.kwargs)
    layout = layout_of_samples(names, calls, _sizes_of(model).pads or [0] * len(calls[0]))
    points = sorted({_own_sizes(leaves, layout) for leaves in calls})
    return largest.args, largest.kwargs, layout, points


def _sample_call(config: ModelConfig, samples: Sequence[Call]) -> tuple[Args, Kwargs]:
    """The call that the configuration gives, or else one that the model was made for."""
    args, kwargs = tuple(config.args), dict(config.kwargs)
    if args or kwargs:
        return args, kwargs
    if not samples:
        raise OptionError(
            "There is no sample call.", remedy="Pass args= or kwargs=, as the model takes them."
        )
    return samples[-1].args, samples[-1].kwargs


def _points_of(
    buckets: Buckets | None,
    names: Sequence[str],
    own: Mapping[str, int],
    bounds: Mapping[str, Bounds],
) -> list[Sizes]:
    """The sizes to compute, in the order of the names: the buckets', or powers of two."""
    if buckets is None:
        return _powers([own[name] for name in names], [bounds[name].low for name in names])
    places = [buckets.names.index(name) for name in names]
    return [tuple(point[place] for place in places) for point in buckets.points]


def _options_of(config: ModelConfig) -> tuple[Buckets | None, Any, Any]:
    """Buckets, dynamic_shapes and pad: the caller's, or those that graph() was given."""
    own = _sizes_of(config.model)
    if own.buckets is None or config.buckets is not None:
        return config.buckets, config.dynamic_shapes, config.pad
    return own.buckets, own.dynamic_shapes, own.pad


def _names_in(dynamic_shapes: Any) -> tuple[str, ...]:
    return (BATCH,) if dynamic_shapes is None else named(dynamic_shapes)


def _powers(own: Sequence[int], lows: Sequence[int]) -> list[Sizes]:
    """Powers of two up to 32 rows, and a quarter, half and all of each other size.

    Args:
        own: the sample's sizes, the batch first.
        lows: the least that each may be.
    """
    rows = [1 << n for n in range(_MAX_BATCH.bit_length())]
    others = [
        sorted({max(low, n // 4), max(low, n // 2), n})
        for n, low in zip(own[1:], lows[1:], strict=True)
    ]
    return list(itertools.product(rows, *others))


def _callable_on(
    device: torch.device, config: ModelConfig, points: Sequence[Sizes]
) -> Callable[..., Any]:
    """What answers: the model as it is, or on a GPU its graphs."""
    model = config.model
    if device.type != "cuda" or not isinstance(model, nn.Module):
        return model
    if answerer_of(model) is not None or type(model).__module__.startswith("graphwright."):
        return model
    buckets = config.buckets
    if buckets is None:
        names = _names_in(config.dynamic_shapes)
        order = [(BATCH, *(n for n in names if n != BATCH)).index(name) for name in names]
        buckets = Buckets.from_points(names, [tuple(point[i] for i in order) for point in points])
    return graph(
        model,
        buckets=buckets,
        dynamic_shapes=config.dynamic_shapes,
        pad=config.pad,
        max_graphs=max(_MAX_BATCH, len(points)),
    )


def _sizes_of(model: Callable[..., Any]) -> SizesAnswered:
    """Which calls are answered faster than by a model; of all sizes where nothing was made."""
    answerer = answerer_of(model)
    return SizesAnswered(all_sizes=True) if answerer is None else answerer.sizes()


def _reference_of(model: Callable[..., Any]) -> Callable[..., Any] | None:
    """What computes any size eagerly; None where a file was loaded without its model."""
    answerer = answerer_of(model)
    return model if answerer is None else answerer.reference()


def _names_of_leaves(model: Callable[..., Any], args: Args, kwargs: Kwargs) -> list[str]:
    """Names of a call's leaves, positional ones by the parameters where these are known."""
    return _dimensions_of(model, (BATCH,)).arguments(args, kwargs)


def _dimensions_of(
    model: Callable[..., Any], names: Sequence[str], dynamic_shapes: Any = None, pad: Any = None
) -> Dimensions:
    """The dimensions of a model's arguments, which are named as its parameters are."""
    found = Dimensions(_reference_of(model) or model, names, dynamic_shapes, pad)
    own = _sizes_of(model).argument_names
    if own is not None:
        found.name_arguments(own)
    return found


def _own_sizes(leaves: Sequence[Any], layout: Layout) -> Sizes:
    named: dict[str, int] = {}
    for leaf, axes in zip(leaves, layout.axes, strict=True):
        for axis, size in axes.items():
            named.setdefault(size.name, size.solve(leaf.shape[axis]) or 0)
    return tuple(named[name] for name in layout.names)


def _different_sizes(
    own: Sizes, points: Sequence[Sizes], *, anywhere: bool, layout: Layout
) -> list[Sizes]:
    """Sizes that differ from the first in one dimension each: they show the results' shapes."""
    start = own if anywhere or own in points else max(points, key=math.prod)
    found = [start]
    for index, name in enumerate(layout.names):
        if anywhere:
            n = start[index]
            other = n - 1 if n > layout.bounds[name].low and n > 1 else n + 1
            found.append((*start[:index], other, *start[index + 1 :]))
        else:
            alike = (
                p
                for p in points
                if p[:index] + p[index + 1 :] == start[:index] + start[index + 1 :]
            )
            found += [p for p in alike if p != start][:1]
    return found


def _leaves_like(call: Any, other: Any) -> list[Any]:
    """The leaves of a call, its keyword arguments in the order of another one's.

    A model may have been tuned for calls that name the same arguments in several orders.
    """
    named = call.kwargs
    if named.keys() == other.kwargs.keys():
        named = {name: named[name] for name in other.kwargs}
    return flatten(call.args, named)[0]


def _elements(args: Args, kwargs: Kwargs) -> int:
    return sum(v.numel() for v in flatten(args, kwargs)[0] if isinstance(v, torch.Tensor))
