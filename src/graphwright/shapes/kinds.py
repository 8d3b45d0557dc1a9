"""One kind of call: calls that differ in named sizes alone, and what is known about them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..audit import difference
from ..errors import CaptureError, SignatureError, first_line
from ..graphs.journal import Journal, compilers_off
from ..graphs.memory import MemoryPool
from ..graphs.transaction import transaction
from ..signature import (
    Args,
    CallSignature,
    Kwargs,
    flatten,
    leaf_names,
    unflatten,
)
from ..snapshots import State, clone_leaves, layout
from ..watch import FunctionModule
from .chance import depends_on_chance
from .dimensions import Axes, Dimensions
from .fitting import fit
from .outputs import OutputShapes, Sizes, Underivable, contiguous_stride, memory_format, steps_of
from .padding import Cut, Plan, Value, shape_at, widths_of
from .proof import Prover
from .sharing import aliases_of, pattern_of, twins_of
from .subject import Subject, varied
from .symbolic import derive
from .verdicts import Impossible, Verdicts

_MAX_PLANS = 1 << 16
_FITTED_BELOW = 6
_A_COUNTER = 16  # bytes
_MAX_WAYS = 4
_MAX_FOLLOWED_FROM = 256


class Kind:
    """Calls that differ in named sizes alone, and whether and how each bucket may answer them.

    Attributes:
        axes: the dynamic dimensions of the call's leaves.
        reason: why none of these calls may be filled up, or None.
        prepared: whether all buckets were prepared for it.
        grad: the gradient mode that it belongs to, where the function's numbers depend on it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        dimensions: Dimensions,
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool,
        grad: bool | None = None,
    ) -> None:
        """Remember a call as the sample; nothing runs yet.

        Raises:
            SignatureError: the call does not have the dimensions, or sizes that do not agree.
        """
        self.dimensions = dimensions
        self.grad = grad
        self.axes: list[Axes] = dimensions.axes(args, kwargs)
        self._signature = CallSignature.of(args, kwargs)
        leaves, self._spec = flatten(args, kwargs)
        self._names = dimensions.arguments(args, kwargs)
        self._check_sizes(leaves)
        self._forms = [memory_format(v) if own else None for v, own in self._with_axes(leaves)]
        self._twins = twins_of(leaves)
        self._gaps = _gaps(leaves, self.axes, self._forms)
        # A call with gaps in memory is run as it is too: does that make a difference?
        self._as_given = clone_leaves(leaves) if any(self._gaps) else None
        declared = dimensions.pads(args, kwargs)
        with torch.no_grad():
            sample = clone_leaves(leaves)
            sample = [v.detach() if isinstance(v, torch.Tensor) else v for v in sample]
            sample = [
                varied(v) if own and value is None else v
                for v, own, value in zip(sample, self.axes, declared, strict=True)
            ]
            fills = [
                _default(leaf) if value is None and own else value or 0
                for value, leaf, own in zip(declared, sample, self.axes, strict=True)
            ]
        self.subject = Subject(
            fn,
            fn if isinstance(fn, nn.Module) else FunctionModule(fn),
            self._spec,
            [sample[first] for first in self._twins],
            self.axes,
            dimensions.names,
            dimensions.bounds,
            fills,
            [value is not None for value in declared],
        )
        self._pool = pool
        self.prepared = False
        self.reason: str | None = None
        self._prover: Prover | None = None
        self._mutated: tuple[int, ...] = ()
        self._outputs = 0
        self._traces: list[OutputShapes] = []
        self.verdicts: dict[Sizes, Verdicts | str] = {}
        self._checked: set[Sizes] = set()
        self._joints: dict[tuple[str, Sizes], list[int | None] | str] = {}
        self._plans: dict[tuple[Sizes, Sizes], Plan | str] = {}

    def _with_axes(self, leaves: Sequence[Any]) -> Iterator[tuple[Any, Axes]]:
        return zip(leaves, self.axes, strict=True)

    def _check_sizes(self, leaves: Sequence[Any]) -> None:
        found = self.dimensions.sizes([getattr(v, "shape", ()) for v in leaves], self.axes)
        if found is not None and min(found) < 1:
            raise SignatureError(
                "A dimension is of size 0: there is nothing to fill up.",
                remedy="Call the function itself for that.",
            )
        if found is None:
            sizes = [
                f"{self._names[index]} has {leaf.shape[axis]} in dimension {axis}"
                for index, (leaf, own) in enumerate(self._with_axes(leaves))
                for axis in own
            ]
            raise SignatureError(
                f"The arguments do not agree about the named sizes: {'; '.join(sizes)}.",
                remedy="Correct dynamic_shapes, or the arguments.",
            )

    def sizes(self, signature: CallSignature, leaves: Sequence[Any]) -> Sizes | None:
        """The named sizes of a call of this kind; None for one of another kind."""
        mine = self._signature
        if signature.spec != mine.spec or signature.switches != mine.switches:
            return None
        for have, want, own in zip(signature.leaves, mine.leaves, self.axes, strict=True):
            if not own and have != want:
                return None
            if own and (len(have) != 5 or (have[1], have[3]) != (want[1], want[3])):
                return None
            if own and not _alike(have[0], want[0], own):
                return None
        if twins_of(leaves) != self._twins or not in_order(leaves, self.axes):
            return None
        if _pairs(signature) != _pairs(mine):
            return None
        for leaf, form in zip(leaves, self._forms, strict=True):
            if form is not None and memory_format(leaf) is not form:
                return None
        if _gaps(leaves, self.axes, self._forms) != self._gaps:
            return None
        return self.dimensions.sizes([getattr(v, "shape", ()) for v in leaves], self.axes)

    def sample(self, sizes: Sizes) -> tuple[Args, Kwargs]:
        """Arguments of some sizes, made of the sample's values."""
        args, kwargs = unflatten(self.subject.at(sizes), self._spec)
        return args, kwargs

    def plan(self, sizes: Sizes, bucket: Sizes) -> Plan | str:
        """How a bucket answers a call, once it is proved that it may; else why it may not.

        Args:
            sizes: the named sizes of the call.
            bucket: those of the bucket.
        """
        key = (sizes, bucket)
        known = self._plans.get(key)
        if known is None:
            with self._pool.lock:
                known = self._plan(sizes, bucket)
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = known
        return known

    def _plan(self, sizes: Sizes, bucket: Sizes) -> Plan | str:
        verdicts = self._verdicts(bucket)
        if isinstance(verdicts, str):
            return verdicts
        prover = self._prover
        assert prover is not None
        if verdicts.know(sizes):
            reason = prover.extend(verdicts, sizes)
        else:
            with self._trial():
                reason = prover.extend(verdicts, sizes)
        if reason is not None:
            return reason
        named = dict(zip(self.dimensions.names, bucket, strict=True))
        true = dict(zip(self.dimensions.names, sizes, strict=True))
        widths: list[Sizes | None] = []
        for leaf, own in self._with_axes(self.subject.sample):
            added: Sizes = ()
            if own:
                added = widths_of(shape_at(leaf.shape, own, true), shape_at(leaf.shape, own, named))
            widths.append(added if any(added) else None)
        return Plan(
            sizes,
            bucket,
            tuple(widths),
            tuple(self.subject.fills),
            tuple(verdicts.chosen(sizes)),
        )

    def laid_out(self, leaves: Sequence[Any], sizes: Sizes) -> Plan | None:
        """How a call of a bucket's own sizes gets the bucket's strides; None where it has these."""
        widths: list[Sizes | None] = []
        for leaf, own, form in zip(leaves, self.axes, self._forms, strict=True):
            apart = own and leaf.stride() != contiguous_stride(leaf.shape, form)
            widths.append(widths_of(leaf.shape, leaf.shape) if apart else None)
        if all(added is None for added in widths):
            return None
        with self._pool.lock:
            self._looked()
        if self.reason is not None or self._prover is None:
            return None
        cuts = (Cut(whole=True),) * self._outputs
        return Plan(sizes, sizes, tuple(widths), tuple(self.subject.fills), cuts)

    def _looked(self) -> None:
        if self._prover is None and self.reason is None:
            with self._trial():
                self._look()

    def culprits(self, sizes: Sizes, bucket: Sizes) -> set[str]:
        """Dimensions that are exact-only where a call may not be filled up to a bucket."""
        verdicts = self.verdicts.get(bucket)
        if isinstance(verdicts, Verdicts):
            return verdicts.culprits(sizes)
        return set(self.dimensions.names)

    def is_checked(self, bucket: Sizes) -> bool:
        """Whether a bucket's graph was compared with eager."""
        return bucket in self._checked

    def check(
        self, plan: Plan, run: Callable[[Args, Kwargs], Any], args: Args, kwargs: Kwargs
    ) -> str | None:
        """Compare what a bucket's graph gives for a call with what eager gives without padding.

        Args:
            plan: how the call is filled up.
            run: the graph.
            args: of the call.
            kwargs: likewise.

        Returns:
            how they differ, beyond what other kernels may; the bucket is refused then.
        """
        leaves, spec = flatten(args, kwargs)
        padded = plan.pad(leaves)
        outputs, out_spec = pytree.tree_flatten(run(*unflatten(padded, spec)))
        result = pytree.tree_unflatten(plan.cut(outputs, leaves, padded), out_spec)
        with self._trial():
            copies = clone_leaves(leaves)
            again, named = unflatten(copies, spec)
            expected = self.subject.fn(*again, **named)
        names = leaf_names(expected, "output")
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True)
        for name, (mine, theirs) in zip(names, pairs, strict=True):
            why = difference(mine, theirs, other_kernels=True)
            if isinstance(theirs, torch.Tensor) and not why and layout(mine) != layout(theirs):
                why = f"strides {mine.stride()} instead of {theirs.stride()}"
            if why is not None:
                told = f"{name} of the graph in the bucket {plan.bucket} is not eager's: {why}"
                self.verdicts[plan.bucket] = told
                self._plans = {key: p for key, p in self._plans.items() if key[1] != plan.bucket}
                return told
        if pattern_of(result, leaves) != pattern_of(expected, copies):
            told = f"the outputs in the bucket {plan.bucket} share memory in another way"
            self.verdicts[plan.bucket] = told
            self._plans = {key: p for key, p in self._plans.items() if key[1] != plan.bucket}
            return told
        self._checked.add(plan.bucket)
        return None

    def proofs(self) -> list[Verdicts]:
        """What is known about the buckets that could be tried."""
        found = list(self.verdicts.values())
        return [verdicts for verdicts in found if isinstance(verdicts, Verdicts)]

    def prove(self, bucket: Sizes, served: Sequence[Sizes]) -> str | None:
        """Why a bucket may not answer one of some calls, or None where it may answer all.

        Calls that eager refuses too count as answered.

        Args:
            bucket: its sizes.
            served: sizes of these calls.
        """
        for sizes in served:
            found = self.plan(sizes, bucket)
            if isinstance(found, str) and not isinstance(found, Impossible):
                return found
        return None

    def _verdicts(self, bucket: Sizes) -> Verdicts | str:
        known = self.verdicts.get(bucket)
        if known is None:
            self._looked()
            try:
                known = self._tried(bucket)
            except CaptureError as error:
                known = f"the call fails in that bucket: {error.what}"
            self.verdicts[bucket] = known
        return known

    def _tried(self, bucket: Sizes) -> Verdicts | str:
        if self.reason is not None:
            return self.reason
        with self._trial():
            assert self._prover is not None
            shapes = self._shapes(bucket)
            if isinstance(shapes, str):
                return shapes
            # The first one with every filling at every size.
            return self._prover.start(bucket, shapes, thorough=not self.verdicts)

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Run the function as a capture would; whatever that changes is put back."""
        devices = sorted({v.device.index for v in self.subject.sample if _on_gpu(v)})
        with (
            self._pool.lock,
            transaction(self._pool, self.subject.module, _nothing) as undo,
            torch.random.fork_rng(devices),
            compilers_off(),
        ):
            state = State(self.subject.module, weights=False)
            try:
                yield
            finally:
                state.restore()
                undo.restore(python=True)

    def _look(self) -> None:
        """Learn from a run of the sample what cutting has to know beside shapes."""
        leaves = clone_leaves(self.subject.sample)
        args, kwargs = unflatten(leaves, self._spec)
        journal = Journal()
        try:
            with journal:
                result = self.subject.fn(*args, **kwargs)
            journal.forget_what_stood_still()
            self._mutated = tuple(
                slot
                for slot, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor) and journal.wrote_to(leaf)
            )
            random = bool(journal.generators)
        finally:
            journal.undo()
        outputs, _ = pytree.tree_flatten(result)
        self._outputs = len(outputs)
        shared, reason = aliases_of(
            outputs, leaf_names(result, "output"), leaves, self._names, self.axes
        )
        self.reason = reason
        mine = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        buffers = {b.untyped_storage()._cdata for b in self.subject.module.buffers()}
        written = {s._cdata: s.nbytes() for s in journal.written if s._cdata not in mine}
        if any(n > _A_COUNTER for storage, n in written.items() if storage not in buffers):
            self.reason = "it writes to memory that is neither an argument's nor a buffer's"
        if random and (journal.wrote or depends_on_chance(self._again)):
            self.reason = "it draws random numbers, others for other sizes"
        elif len(self._mutated) and self.overlap:
            self.reason = "it writes to an argument that shares memory with another one"
        elif self._as_given is not None and self._differs_with_gaps():
            self.reason = "it depends on gaps between the rows of an argument"
        self._prover = Prover(self.subject, shared, buffers & set(written))

    def _again(self) -> Any:
        args, kwargs = unflatten(clone_leaves(self.subject.sample), self._spec)
        return self.subject.fn(*args, **kwargs)

    def _differs_with_gaps(self) -> bool:
        """Whether a call does something else for tensors with gaps than for ones without."""
        assert self._as_given is not None
        found = []
        for laid_out in (False, True):
            leaves = clone_leaves(self._as_given)
            if laid_out:
                for slot, form in enumerate(self._forms):
                    if self._gaps[slot] and form is not None:
                        dense = torch.empty_like(leaves[slot], memory_format=form)
                        leaves[slot] = dense.copy_(leaves[slot])
            args, kwargs = unflatten(leaves, self._spec)
            result = self.subject.fn(*args, **kwargs)
            found.append((result, pattern_of(result, leaves), leaves))
        (one, one_pattern, one_leaves), (two, two_pattern, two_leaves) = found
        if one_pattern != two_pattern:
            return True
        pairs = zip(
            [*pytree.tree_leaves(one), *one_leaves],
            [*pytree.tree_leaves(two), *two_leaves],
            strict=True,
        )
        outputs = len(pytree.tree_leaves(one))
        for index, (a, b) in enumerate(pairs):
            if difference(a, b, other_kernels=True) is not None:
                return True
            given = index >= outputs or one_pattern[index][0] is not None
            if isinstance(a, torch.Tensor) and not given and layout(a) != layout(b):
                return True
        return False

    @property
    def overlap(self) -> bool:
        """Whether arguments share memory without being one."""
        twins = sum(first != index for index, first in enumerate(self._twins))
        return len(self._signature.aliases) > twins

    def _shapes(self, bucket: Sizes) -> OutputShapes | str:
        """The shapes of the outputs, by a trace that takes the bucket's way."""
        for shapes in self._traces:
            if shapes.holds(bucket):
                return shapes
        try:
            shapes = self._traced(bucket)
        except Underivable as symbolic:
            try:
                # At one exact size it may go its own way: then the way beside it tells more.
                shapes = self._traced(tuple(n - 1 if n > 2 else n for n in bucket))
            except Underivable:
                try:
                    shapes = fit(self.dimensions.names, self._seen(bucket), bucket)
                except Underivable as fitted:
                    return f"the shapes of its outputs follow no rule: {symbolic}; {fitted}"
        self._traces.append(shapes)
        if not shapes.fitted:
            self._tell_ways_apart(shapes, bucket)
        return shapes

    def _traced(self, sizes: Sizes) -> OutputShapes:
        """Shapes derived on the way that some sizes take."""
        # Caches that the function keeps anywhere fill with real values first.
        args, kwargs = self.sample(sizes)
        real = pytree.tree_leaves(self.subject.fn(*args, **kwargs))
        found = derive(self.subject, sizes)
        for leaf, rule in zip(real, found.of(sizes), strict=True):
            if not isinstance(leaf, torch.Tensor) or not isinstance(rule, tuple):
                continue
            if rule[0] != leaf.shape or steps_of(rule) != layout(leaf):
                raise Underivable("symbols give other shapes or strides than the function has")
        return found

    def _tell_ways_apart(self, shapes: OutputShapes, bucket: Sizes) -> None:
        """Follow the other ways below a bucket too: each may branch on sizes further on."""
        places = [
            (*bucket[:index], n, *bucket[index + 1 :])
            for index, full in enumerate(bucket)
            for n in range(full - 1, 1, -max(1, full // _MAX_FOLLOWED_FROM))
        ]
        guards = set(shapes.guards)
        followed = {shapes.way(bucket)}
        for _ in range(_MAX_WAYS):
            other = next((sizes for sizes in places if shapes.way(sizes) not in followed), None)
            if other is None:
                return
            followed.add(shapes.way(other))
            try:
                found = self._traced(other)
            except Exception:
                continue  # Eager refuses these sizes, or symbols do not get through.
            if not set(found.guards) <= guards:
                guards |= set(found.guards)
                shapes.tell_apart_by(guards)
                followed = {shapes.way(bucket), *(shapes.way(sizes) for sizes in [other])}

    def _seen(self, bucket: Sizes) -> dict[Sizes, tuple[list[Any], pytree.TreeSpec]]:
        """What the function returns for some small sizes, and for the bucket."""
        ranges = []
        for name, full in zip(self.dimensions.names, bucket, strict=True):
            low = self.dimensions.bounds[name].low
            ranges.append([n for n in (low, low + 1, low + 2, low + _FITTED_BELOW) if n <= full])
        found = {}
        error: Exception | None = None
        for sizes in (*itertools.product(*ranges), bucket):
            args, kwargs = self.sample(sizes)
            try:
                found[sizes] = pytree.tree_flatten(self.subject.fn(*args, **kwargs))
            except Exception as raised:
                error = raised
        if bucket not in found:
            assert error is not None
            raise CaptureError(
                f"The call fails in the bucket {bucket}: {first_line(error)}",
                remedy="Leave sizes out of the buckets that the function cannot take.",
            ) from error
        return found

    def rows_apart(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        """Whether and how the chunks of a call can be joined; as `Prover.split`."""
        with self._pool.lock:
            known = self._joints.get((name, sizes))
            if known is None:
                self._looked()
                with self._trial():
                    known = self._joints[name, sizes] = self._split(name, parts, sizes)
            return known

    def _split(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        if self.reason is not None:
            return self.reason
        assert self._prover is not None
        return self._prover.split(name, parts, sizes)


def _nothing() -> None:
    """Stands for what a trial leaves behind."""


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _alike(have: Sequence[int], want: Sequence[int], axes: Axes) -> bool:
    return len(have) == len(want) and all(
        n == m for axis, (n, m) in enumerate(zip(have, want, strict=True)) if axis not in axes
    )


def in_order(leaves: Sequence[Any], axes: Sequence[Axes]) -> bool:
    """Whether dimensions lie in memory in their order, as they do in a filled-up copy.

    Gaps between rows and repeated ones make no difference to what a function returns; another order
    may, if only to its strides.
    """
    for leaf, own in zip(leaves, axes, strict=True):
        # Only dense tensors are said to be channels last.
        if own and memory_format(leaf) is torch.contiguous_format:
            steps = [step for step in layout(leaf) if step]
            if steps != sorted(steps, reverse=True):
                return False
    return True


def _pairs(signature: CallSignature) -> list[tuple[int, int]]:
    """Which arguments share memory."""
    return [(first, second) for first, second, _ in signature.aliases]


def _gaps(
    leaves: Sequence[Any], axes: Sequence[Axes], forms: Sequence[torch.memory_format | None]
) -> tuple[bool, ...]:
    """Which of the tensors that vary are laid out otherwise than new ones."""
    return tuple(
        bool(own)
        and form is not None
        and layout(leaf) != layout(torch.empty_like(leaf, device="meta", memory_format=form))
        for leaf, own, form in zip(leaves, axes, forms, strict=True)
    )


def _default(leaf: Any) -> Value:
    """What to fill with where the caller says nothing: zeros; among integers one that was seen."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is torch.bool or not leaf.numel():
        return 0
    if leaf.is_floating_point() or leaf.is_complex():
        return 0
    return int(leaf.long().min())  # Not all integers have a minimum of their own.
