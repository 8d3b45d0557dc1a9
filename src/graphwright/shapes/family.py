"""One kind of call: calls that differ in named sizes alone, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modes import compilers_off
from ..calls.modules import FunctionModule
from ..calls.signature import Args, Kwargs, flatten, leaf_names, unflatten
from ..calls.snapshots import ModuleState, clone_leaves, layout
from ..errors import CaptureError
from ..evaluation.accuracy import difference
from ..graphs.memory import MemoryPool
from ..graphs.python_state import PythonState
from ..graphs.transaction import transaction
from ..graphs.turns import turns_of
from .aliasing import pattern_of
from .dimensions import shape_at
from .dynamic_signature import DynamicSignature
from .eligibility import Observation, observe
from .padding import Cut, PaddingPlan, Sizes, Value, widths_of
from .proof import Prover
from .sampler import CallSampler, varied
from .shape_inference import ShapeInference
from .verdicts import Impossible, Verdicts

_MAX_PLANS = 1 << 16


class ShapeFamily:
    """Calls that differ in named sizes alone, and whether and how each bucket may answer them.

    Attributes:
        form: what these calls have in common.
        grad: the gradient mode that it belongs to, where the function's numbers depend on it.
        subject: the function, and the first call as the sample.
        reason: why none of these calls may be filled up, or None.
        sets_up: what its first run sets up, by name, for good; None where that is nothing.
        prepared: whether all buckets were prepared for it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        form: DynamicSignature,
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool,
        grad: bool | None = None,
    ) -> None:
        """Remember a call as the sample; nothing runs yet.

        Args:
            fn: what is called.
            form: of the call.
            args: of the call.
            kwargs: likewise.
            pool: whose lock guards all of this.
            grad: see above.

        Raises:
            SignatureError: a declared pad value is no number.
        """
        self.form = form
        self.grad = grad
        leaves, spec = flatten(args, kwargs)
        # A call with gaps in memory is run as it is too: does that make a difference?
        self._as_given = clone_leaves(leaves) if any(form.gaps) else None
        declared = form.dimensions.pads(args, kwargs)
        with torch.no_grad():
            sample = clone_leaves(leaves)
            sample = [v.detach() if isinstance(v, torch.Tensor) else v for v in sample]
            sample = [
                varied(v) if own and value is None else v
                for v, own, value in zip(sample, form.axes, declared, strict=True)
            ]
            fills = [
                _default(leaf) if value is None and own else value or 0
                for value, leaf, own in zip(declared, sample, form.axes, strict=True)
            ]
        self.subject = CallSampler(
            fn,
            fn if isinstance(fn, nn.Module) else FunctionModule(fn),
            spec,
            [sample[first] for first in form.twins],
            form.axes,
            form.dimensions.names,
            form.dimensions.bounds,
            fills,
            [value is not None for value in declared],
        )
        self._pool = pool
        self._turns = turns_of(self.subject.module, None if isinstance(fn, nn.Module) else fn)
        self.prepared = False
        self.reason: str | None = None
        self.sets_up: str | None = None
        self._traces = ShapeInference(self.subject)
        self._observed: Observation | None = None
        self._prover: Prover | None = None
        self._verdicts: dict[Sizes, Verdicts | str] = {}
        self._checked: set[Sizes] = set()
        self._joints: dict[tuple[str, Sizes], list[int | None] | str] = {}
        self._plans: dict[tuple[Sizes, Sizes], PaddingPlan | str] = {}

    def plan(self, sizes: Sizes, bucket: Sizes) -> PaddingPlan | str:
        """How a bucket answers a call, once it is proved that it may; else why it may not.

        Args:
            sizes: the named sizes of the call.
            bucket: those of the bucket.
        """
        key = (sizes, bucket)
        known = self._plans.get(key)
        if known is None:
            with self._alone():
                known = self._plan(sizes, bucket)
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = known
        return known

    def _plan(self, sizes: Sizes, bucket: Sizes) -> PaddingPlan | str:
        verdicts = self._verdicts_on(bucket)
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
        subject = self.subject
        named = dict(zip(subject.names, bucket, strict=True))
        true = dict(zip(subject.names, sizes, strict=True))
        widths: list[Sizes | None] = []
        for leaf, own in zip(subject.sample, subject.axes, strict=True):
            added: Sizes = ()
            if own:
                added = widths_of(shape_at(leaf.shape, own, true), shape_at(leaf.shape, own, named))
            widths.append(added if any(added) else None)
        return PaddingPlan(
            sizes, bucket, tuple(widths), tuple(subject.fills), tuple(verdicts.chosen(sizes))
        )

    def laid_out(self, leaves: Sequence[Any], sizes: Sizes) -> PaddingPlan | None:
        """How a call of a bucket's own sizes gets the bucket's strides; None where it has these."""
        widths = self.form.layout_widths(leaves)
        if widths is None:
            return None
        with self._alone():
            self._look()
        if self.reason is not None or self._observed is None:
            return None
        cuts = (Cut(whole=True),) * self._observed.outputs
        return PaddingPlan(sizes, sizes, widths, tuple(self.subject.fills), cuts)

    def culprits(self, sizes: Sizes, bucket: Sizes) -> set[str]:
        """Dimensions that are exact-only where a call may not be filled up to a bucket."""
        verdicts = self._verdicts.get(bucket)
        if isinstance(verdicts, Verdicts):
            return verdicts.culprits(sizes)
        return set(self.subject.names)

    def is_checked(self, bucket: Sizes) -> bool:
        """Whether a bucket's graph was compared with eager."""
        return bucket in self._checked

    def check(
        self, plan: PaddingPlan, run: Callable[[Args, Kwargs], Any], args: Args, kwargs: Kwargs
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
            expected = self.subject.result(copies)
        bucket = plan.bucket
        other = _first_other(result, expected)
        if other is not None:
            name, why = other
            return self._refuse(
                bucket, f"{name} of the graph in the bucket {bucket} is not eager's: {why}"
            )
        if pattern_of(result, leaves) != pattern_of(expected, copies):
            return self._refuse(
                bucket, f"the outputs in the bucket {bucket} share memory in another way"
            )
        self._checked.add(bucket)
        return None

    def _refuse(self, bucket: Sizes, why: str) -> str:
        """A bucket's graph is not eager's: forget what was thought of it."""
        self._verdicts[bucket] = why
        self._plans = {key: plan for key, plan in self._plans.items() if key[1] != bucket}
        return why

    def proofs(self) -> list[Verdicts]:
        """What is known about the buckets that could be tried."""
        found = list(self._verdicts.values())
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

    def rows_apart(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        """Whether and how the chunks of a call can be joined; as `Prover.split`."""
        with self._alone():
            known = self._joints.get((name, sizes))
            if known is None:
                known = self._joints[name, sizes] = self._split(name, parts, sizes)
            return known

    def _split(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        self._look()
        if self.reason is not None:
            return self.reason
        assert self._prover is not None
        with self._trial():
            return self._prover.split(name, parts, sizes)

    def _verdicts_on(self, bucket: Sizes) -> Verdicts | str:
        known = self._verdicts.get(bucket)
        if known is None:
            self._look()
            try:
                known = self._tried(bucket)
            except CaptureError as error:
                known = f"the call fails in that bucket: {error.what}"
            self._verdicts[bucket] = known
        return known

    def _tried(self, bucket: Sizes) -> Verdicts | str:
        if self.reason is not None:
            return self.reason
        assert self._prover is not None
        with self._trial():
            shapes = self._traces.at(bucket)
            if isinstance(shapes, str):
                return shapes
            # The first one with every filling at every size.
            return self._prover.start(bucket, shapes, thorough=not self._verdicts)

    def _look(self) -> None:
        """Run the sample, once, for what has to be known beside shapes."""
        if self._observed is None and self.reason is None:
            with self._trial() as undo:
                seen = observe(self.subject, self.form, self._as_given)
                self.sets_up = undo.changed()
            self.reason = seen.reason
            self._observed = seen
            self._prover = Prover(self.subject, seen.shared, seen.buffers)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have neither graphs of the pool nor eager calls of the function run meanwhile."""
        # Before the lock: an eager call of another thread, which is waited for, may want it too.
        with self._turns.alone(), self._pool.lock:
            yield

    @contextmanager
    def _trial(self) -> Iterator[PythonState]:
        """Run the function as a capture would; whatever that changes is put back."""
        devices = sorted({v.device.index for v in self.subject.sample if _on_gpu(v)})
        with (
            self._pool.lock,
            transaction(self._pool, self.subject.module, _nothing) as undo,
            torch.random.fork_rng(devices),
            compilers_off(),
        ):
            state = ModuleState(self.subject.module, weights=False)
            try:
                yield undo
            finally:
                state.restore()
                undo.restore(python=True)


def _first_other(result: Any, expected: Any) -> tuple[str, str] | None:
    """The first output of a graph that is not eager's, and how they differ."""
    names = leaf_names(expected, "output")
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True)
    for name, (mine, theirs) in zip(names, pairs, strict=True):
        why = difference(mine, theirs, other_kernels=True)
        if isinstance(theirs, torch.Tensor) and not why and layout(mine) != layout(theirs):
            why = f"strides {mine.stride()} instead of {theirs.stride()}"
        if why is not None:
            return name, why
    return None


def _nothing() -> None:
    """Stands for what a trial leaves behind."""


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _default(leaf: Any) -> Value:
    """What to fill with where the caller says nothing: zeros; among integers one that was seen."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is torch.bool or not leaf.numel():
        return 0
    if leaf.is_floating_point() or leaf.is_complex():
        return 0
    return int(leaf.long().min())  # Not all integers have a minimum of their own.
