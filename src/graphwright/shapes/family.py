"""ShapeFamily: calls that differ only in named sizes, and what is known about padding them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modes import compilers_off
from ..calls.modules import FunctionModule
from ..calls.snapshots import ModuleState, clone_leaves, layout
from ..calls.split import Args, Kwargs, flatten, leaf_names, unflatten
from ..errors import CaptureError, SignatureError
from ..evaluation.accuracy import difference
from ..graphs.capture_turns import Busy, turns_of
from ..graphs.host_draws import Draw
from ..graphs.journal import Journal
from ..graphs.memory import MemoryPool, lock_of
from ..graphs.python_state import PythonState
from ..graphs.transaction import transaction
from ..report.progress import SHORT_S, progress_shown
from .aliasing import pattern_of
from .dimensions import shape_at
from .dynamic_signature import DynamicSignature
from .eligibility import OTHER_DRAWS, Observation, observe
from .padding import Cut, PaddingPlan, Sizes, Value, widths_of
from .proof import Prover
from .sampler import CallSampler, varied
from .shape_inference import ShapeInference
from .verdicts import Case, Impossible, Verdicts

_MAX_PLANS = 1 << 16


class ShapeFamily:
    """Calls that differ only in named sizes, and whether and how each bucket may answer them.

    Attributes:
        signature: what these calls have in common.
        grad: their gradient mode, if the function's results depend on it.
        sampler: the function, with the first call as the sample.
        reason: why none of these calls may be padded, or None.
        sets_up: name of something that the first run sets up for good; None if there is nothing.
        prepared: whether all buckets were prepared for these calls.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: DynamicSignature,
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool,
        grad: bool | None = None,
    ) -> None:
        """Remember a call as the sample; nothing runs yet.

        Args:
            fn: what is called.
            signature: of the call.
            args: of the call.
            kwargs: likewise.
            pool: its lock guards the family.
            grad: see above.

        Raises:
            SignatureError: a declared pad value is no number, or a tensor holds no values.
        """
        self.signature = signature
        self.grad = grad
        leaves, spec = flatten(args, kwargs)
        _refuse_without_values(leaves)
        # A call with gaps in memory is also run as it is, to see whether the gaps matter.
        self._as_given = clone_leaves(leaves) if any(signature.gaps) else None
        declared = signature.dimensions.pads(args, kwargs)
        with torch.no_grad():
            sample = clone_leaves(leaves)
            sample = [v.detach() if isinstance(v, torch.Tensor) else v for v in sample]
            sample = [
                varied(v) if own and value is None else v
                for v, own, value in zip(sample, signature.axes, declared, strict=True)
            ]
            pad_values = [
                _default(leaf) if value is None and own else value or 0
                for value, leaf, own in zip(declared, sample, signature.axes, strict=True)
            ]
        self.sampler = CallSampler(
            fn,
            fn if isinstance(fn, nn.Module) else FunctionModule(fn),
            spec,
            [sample[first] for first in signature.twins],
            signature.axes,
            signature.dimensions.names,
            signature.dimensions.bounds,
            pad_values,
            [value is not None for value in declared],
        )
        self._pool = pool
        self._turns = turns_of(self.sampler.module, None if isinstance(fn, nn.Module) else fn)
        self.prepared = False
        self.reason: str | None = None
        self.sets_up: str | None = None
        self._shapes = ShapeInference(self.sampler)
        self._observed: Observation | None = None
        self._prover: Prover | None = None
        self._verdicts: dict[Sizes, Verdicts | str] = {}
        self._checked: set[tuple[Sizes, Case, Sizes]] = set()
        self._joints: dict[tuple[str, Sizes], list[int | None] | str] = {}
        self._plans: dict[tuple[Sizes, Sizes], PaddingPlan | str] = {}
        self._drawn: dict[Sizes, list[Draw]] = {}

    def plan(self, sizes: Sizes, bucket: Sizes) -> PaddingPlan | str:
        """How a call is padded to a bucket, once that is proved harmless; else why it may not be.

        Args:
            sizes: the named sizes of the call.
            bucket: those of the bucket.
        """
        key = (sizes, bucket)
        known = self._plans.get(key)
        if known is None:
            with self._exclusively():
                known = self._plan(sizes, bucket)
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                    self._drawn.clear()
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
            with self._undone():
                reason = prover.extend(verdicts, sizes)
        if reason is not None:
            return reason
        assert self._observed is not None
        if self._observed.draws and self._draws(sizes) != self._draws(bucket):
            return OTHER_DRAWS
        sampler = self.sampler
        named = dict(zip(sampler.names, bucket, strict=True))
        true = dict(zip(sampler.names, sizes, strict=True))
        widths: list[Sizes | None] = []
        for leaf, own in zip(sampler.sample, sampler.axes, strict=True):
            added: Sizes = ()
            if own:
                added = widths_of(shape_at(leaf.shape, own, true), shape_at(leaf.shape, own, named))
            widths.append(added if any(added) else None)
        return PaddingPlan(
            sizes, bucket, tuple(widths), tuple(sampler.pad_values), tuple(verdicts.chosen(sizes))
        )

    def _draws(self, sizes: Sizes) -> list[Draw]:
        """What a call of some sizes draws from the host's generator."""
        if sizes not in self._drawn:
            with self._undone(), torch.no_grad(), Journal() as journal:
                self.sampler.result(clone_leaves(self.sampler.at(sizes)))
            self._drawn[sizes] = journal.draws.made
        return self._drawn[sizes]

    def layout_plan(self, leaves: Sequence[Any], sizes: Sizes) -> PaddingPlan | None:
        """How a call of a bucket's own sizes gets the bucket's strides; None if it has them."""
        widths = self.signature.layout_widths(leaves)
        if widths is None:
            return None
        with self._exclusively():
            self._observe_sample()
        if self.reason is not None or self._observed is None:
            return None
        cuts = (Cut(whole=True),) * self._observed.outputs
        return PaddingPlan(sizes, sizes, widths, tuple(self.sampler.pad_values), cuts)

    def culprits(self, sizes: Sizes, bucket: Sizes) -> set[str]:
        """The dimensions that must have the bucket's own size, after a plan was refused."""
        verdicts = self._verdicts.get(bucket)
        if isinstance(verdicts, Verdicts):
            return verdicts.culprits(sizes)
        return set(self.sampler.names)

    def is_checked(self, plan: PaddingPlan) -> bool:
        """Whether a bucket has been compared with eager as it is, for calls of the plan's case."""
        return self._case(plan) in self._checked

    def _case(self, plan: PaddingPlan) -> tuple[Sizes, Case, Sizes]:
        verdicts = self._verdicts_of(plan)
        return plan.bucket, verdicts.case(plan.sizes), plan.sizes if verdicts.shapes.blind else ()

    def _verdicts_of(self, plan: PaddingPlan) -> Verdicts:
        verdicts = self._verdicts[plan.bucket]
        assert isinstance(verdicts, Verdicts)
        return verdicts

    def check(
        self, plan: PaddingPlan, run: Callable[[Args, Kwargs], Any], args: Args, kwargs: Kwargs
    ) -> str | None:
        """Compare the results of a bucket's graph for a padded call with eager's without padding.

        Args:
            plan: how the call is padded.
            run: replays the graph.
            args: of the call.
            kwargs: likewise.

        Returns:
            how they differ beyond what other kernels may, and calls of this case are refused; or
            None.
        """
        leaves, spec = flatten(args, kwargs)
        padded = plan.pad(leaves)
        outputs, out_spec = pytree.tree_flatten(run(*unflatten(padded, spec)))
        result = pytree.tree_unflatten(plan.cut(outputs, leaves, padded), out_spec)
        with self._exclusively(), self._undone():
            copies = clone_leaves(leaves)
            expected = self.sampler.result(copies)
        bucket = plan.bucket
        other = _first_difference(result, expected)
        if other is not None:
            name, why = other
            return self._refuse(
                plan, f"{name} of the graph in the bucket {bucket} is not eager's: {why}"
            )
        if pattern_of(result, leaves) != pattern_of(expected, copies):
            return self._refuse(
                plan, f"the outputs in the bucket {bucket} share memory in another way"
            )
        self._checked.add(self._case(plan))
        return None

    def check_eagerly(self, plan: PaddingPlan) -> str | None:
        """As `check`, for a bucket whose graph writes: eager with padding takes its place."""
        prover = self._prover
        assert prover is not None
        with self._exclusively(), self._undone():
            why = prover.compare_as_it_is(self._verdicts_of(plan), plan)
        if why is not None:
            return self._refuse(plan, why)
        self._checked.add(self._case(plan))
        return None

    def _refuse(self, plan: PaddingPlan, why: str) -> str:
        """Refuse calls of a plan's case, for which its bucket differs from eager; returns why."""
        verdicts = self._verdicts_of(plan)
        verdicts.note(plan.sizes, why, alone=True)
        self._plans = {
            (sizes, bucket): known
            for (sizes, bucket), known in self._plans.items()
            if bucket != plan.bucket or verdicts.reason(sizes) is None
        }
        return why

    def proofs(self) -> list[Verdicts]:
        """The verdicts on all buckets that could be tried."""
        found = list(self._verdicts.values())
        return [verdicts for verdicts in found if isinstance(verdicts, Verdicts)]

    def prove(self, bucket: Sizes, served: Sequence[Sizes]) -> str | None:
        """Why a bucket may not answer one of some calls, or None if it may answer all.

        Calls that eager refuses too are not counted.

        Args:
            bucket: its sizes.
            served: sizes of these calls.
        """
        for sizes in served:
            found = self.plan(sizes, bucket)
            if isinstance(found, str) and not isinstance(found, Impossible):
                return found
        return None

    def returns_objects(self) -> bool:
        """Whether the sample's results hold objects, such as caches: these are to be taken apart.

        Raises:
            CaptureError: the sample cannot be run here.
        """
        if self._observed is None:
            with self._exclusively():
                self._observe_sample()
        return self._observed is not None and self._observed.objects

    def chunk_joints(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        """How the results of a call's chunks are joined, or why not; as `Prover.split`."""
        with self._exclusively():
            known = self._joints.get((name, sizes))
            if known is None:
                known = self._joints[name, sizes] = self._split(name, parts, sizes)
            return known

    def _split(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        self._observe_sample()
        if self.reason is not None:
            return self.reason
        assert self._prover is not None
        assert self._observed is not None
        if self._observed.draws:
            return "it draws random numbers on the host, and each chunk would"
        with self._undone():
            return self._prover.split(name, parts, sizes)

    def _verdicts_on(self, bucket: Sizes) -> Verdicts | str:
        known = self._verdicts.get(bucket)
        if known is None:
            title = f"proving that padding to {'×'.join(map(str, bucket))} is safe"
            with progress_shown(None, title, after_s=SHORT_S):
                self._observe_sample()
                try:
                    known = self._try_bucket(bucket)
                except Busy:
                    raise
                except CaptureError as error:
                    known = f"the call fails in that bucket: {error.what}"
            self._verdicts[bucket] = known
        return known

    def _try_bucket(self, bucket: Sizes) -> Verdicts | str:
        if self.reason is not None:
            return self.reason
        assert self._prover is not None
        with self._undone():
            shapes = self._shapes.at(bucket)
            if isinstance(shapes, str):
                return shapes
            # The first bucket is tried with every variant of padding at every size.
            return self._prover.start(bucket, shapes, thorough=not self._verdicts)

    def _observe_sample(self) -> None:
        """Run the sample once, to see what has to be known beside shapes."""
        if self._observed is None and self.reason is None:
            with self._undone() as python_state:
                with python_state.refusing_advances():
                    seen = observe(self.sampler, self.signature, self._as_given)
                self.sets_up = python_state.changed()
            self.reason = seen.reason
            self._observed = seen
            self._prover = Prover(self.sampler, seen.shared, seen.buffers)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Let neither graphs of the pool nor eager calls of the function run inside the block."""
        # Before the lock: an eager call that this waits for may need the lock.
        with self._turns.alone(), lock_of(self._pool):
            yield

    @contextmanager
    def _undone(self) -> Iterator[PythonState]:
        """Run the function inside the block as a capture would; what it changes is put back."""
        devices = sorted({v.device.index for v in self.sampler.sample if _on_gpu(v)})
        with (
            lock_of(self._pool),
            transaction(self._pool, self.sampler.module, _nothing) as python_state,
            torch.random.fork_rng(devices),
            compilers_off(),
        ):
            state = ModuleState(self.sampler.module, weights=False)
            try:
                yield python_state
            finally:
                state.restore()
                python_state.restore(python=True)


def _refuse_without_values(leaves: Iterable[Any]) -> None:
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        raise SignatureError(
            "A tensor on the device meta holds no values, by which padding could be tried.",
            remedy="Pass tensors on the model's device.",
        )


def _first_difference(result: Any, expected: Any) -> tuple[str, str] | None:
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
    """Placeholder: nothing was recorded that would have to be dropped."""


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _default(leaf: Any) -> Value:
    """The pad value where none is declared: 0; for integers the smallest of the sample."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is torch.bool or not leaf.numel():
        return 0
    if leaf.is_floating_point() or leaf.is_complex():
        return 0
    return int(leaf.long().min())  # Not all integer dtypes support min().
