"""Hazard 16: a call that is padded to a bucket is what eager makes of it, or is not padded.

Functions that depend on their padding have to give eager's numbers all the same, by another way;
with the proof switched off they do not.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hazards import hazard, module_is_not_watched, rand, refused, same
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls import dependencies
from graphwright.calls.snapshots import layout
from graphwright.shapes import (
    aliasing,
    comparison,
    dynamic_signature,
    family,
    output_shapes,
    padding,
    proof,
    sampler,
    shape_inference,
)

Sizes = tuple[int, ...]
Arguments = Callable[[torch.device, Sizes], tuple[torch.Tensor, ...]]
WIDTH = 6
BATCH = ({0: "batch"},)
LENGTH = ({1: "length"},)
BOTH = ({0: "batch", 1: "length"}, {0: "batch", 1: "length"})


def rows(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    return (rand(device, sizes[0], WIDTH),)


def series(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    return (rand(device, 2, sizes[0], WIDTH),)


def masked(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    batch, length = sizes
    real = torch.randint(1, length + 1, (batch, 1), device=device)
    mask = (torch.arange(length, device=device) < real).float()
    return rand(device, batch, length, WIDTH), mask


@dataclass(frozen=True)
class Case:
    """A function, its arguments by named sizes, and how its calls are padded."""

    fn: Callable[[torch.device], Callable[..., Any]]
    arguments: Arguments
    dynamic_shapes: Any
    buckets: dict[str, list[int]]
    pad: Any = None
    # What the error says of the function's dimension and output, where it is refused.
    refused: tuple[str, ...] = ()

    def graphed(self, device: torch.device, **options: Any) -> tuple[Any, Any]:
        fn = self.fn(device)
        made = gw.graph(
            fn,
            dynamic_shapes=self.dynamic_shapes,
            buckets=gw.Buckets(**self.buckets),
            pad=self.pad,
            **options,
        )
        return fn, made

    def sizes(self) -> list[Sizes]:
        """Sizes below, at and above the buckets."""
        axes = []
        for sizes in self.buckets.values():
            axes.append(sorted({1, *(n - 1 for n in sizes), *sizes, sizes[-1] // 2 + 1} - {0}))
        found: list[Sizes] = [()]
        for axis in axes:
            found = [(*sizes, n) for sizes in found for n in axis]
        return found


class Attention(nn.Module):
    """One head over a series, with or without regard to its mask."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        seen = (mask > 0)[:, None] if self.masked else None
        attended = F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=seen)
        return attended, mask.sum(1)


def attention(device: torch.device) -> Callable[..., Any]:
    return Attention(masked=True).to(device).eval()


def unmasked_attention(device: torch.device) -> Callable[..., Any]:
    return Attention(masked=False).to(device).eval()


def norm(device: torch.device) -> Callable[..., Any]:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(device)


def mean_by_length(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / x.shape[1]


def mean_by_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def positions(x: torch.Tensor) -> torch.Tensor:
    return x + torch.linspace(0, 1, x.shape[1], device=x.device)[:, None]


def branching(x: torch.Tensor) -> torch.Tensor:
    return x * 3 if x.shape[1] > 704 else x * 2


def at_five(x: torch.Tensor) -> torch.Tensor:
    return x * 3 if x.shape[0] == 5 else x * 2


def low_alone(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    (x,) = rows(device, sizes)
    return (x - 10 if sizes[0] == 1 else x,)


def flags_up_for_some(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    (x,) = rows(device, sizes)
    flags = torch.full((sizes[0],), int(1 < sizes[0] < 8), device=device)
    return x, flags


class AnyAbove(nn.Module):
    """Whether any row of a batch is above a bound, beside what belongs to each row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, (x @ self.weight > -0.2).any(0)


def any_above(seed: int) -> Callable[[torch.device], Callable[..., Any]]:
    def made(device: torch.device) -> Callable[..., Any]:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return AnyAbove().to(device).eval()

    return made


def plain(fn: Callable[..., Any]) -> Callable[[torch.device], Callable[..., Any]]:
    return lambda device: fn


REFUSED = {
    "attention without its mask over length": Case(
        unmasked_attention,
        masked,
        BOTH,
        {"batch": [4], "length": [8, 16]},
        (None, 0),
        ("length", "output[0]"),
    ),
    "batch norm in training mode": Case(
        norm, rows, BATCH, {"batch": [4, 8]}, refused=("batch", "output")
    ),
    "a masked sum divided by the padded length": Case(
        plain(mean_by_length),
        masked,
        BOTH,
        {"batch": [4], "length": [8, 16]},
        (None, 0),
        ("length", "output"),
    ),
    "the last position": Case(
        plain(lambda x: x[:, -1] * 2), series, LENGTH, {"length": [8]}, refused=("length", "output")
    ),
    "positions from linspace": Case(
        plain(positions), series, LENGTH, {"length": [8]}, refused=("length", "output")
    ),
    "squeeze at batch 1": Case(
        plain(lambda x: (x * 2).squeeze()),
        rows,
        BATCH,
        {"batch": [4]},
        refused=("batch", "output has shape"),
    ),
    "a branch on the length": Case(
        plain(branching),
        series,
        LENGTH,
        {"length": [512, 1024]},
        refused=("length padded from", "to 1024", "output"),
    ),
    "the batch's mean": Case(
        plain(lambda x: {"rows": x * 2, "mean": x.mean()}),
        rows,
        BATCH,
        {"batch": [4, 8]},
        refused=("batch", "output['mean']"),
    ),
    "softmax over the batch": Case(
        plain(lambda x: x.softmax(0)), rows, BATCH, {"batch": [4]}, refused=("batch", "output")
    ),
    "a branch at one size": Case(
        plain(at_five), rows, BATCH, {"batch": [8]}, refused=("batch padded from 5 to 8", "output")
    ),
    "rows from the end": Case(
        plain(lambda x: x.flip(0) * 2), rows, BATCH, {"batch": [4]}, refused=("batch", "output")
    ),
}

for _seed in range(8):
    # Of any usual sample some row is above the bound, so that no padding shows.
    for _bucket in (8, 3):
        REFUSED[f"whether any row is above a bound, {_seed}, up to {_bucket}"] = Case(
            any_above(_seed), low_alone, BATCH, {"batch": [_bucket]}, refused=("batch", "output")
        )

REFUSED["whether all flags are up, of which none is"] = Case(
    plain(lambda x, flags: torch.where((flags > 0).all(), x * 2, x)),
    flags_up_for_some,
    BATCH * 2,
    {"batch": [8]},
    refused=("batch", "output"),
)

ACCEPTED = {
    "the best of a masked sequence": Case(
        plain(lambda x, mask: x.sum(-1).masked_fill(mask == 0, -1e9).topk(1, 1)),
        masked,
        BOTH,
        {"batch": [4], "length": [16]},
        (None, 0),
    ),
    "rows apart": Case(
        lambda device: nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh()).to(device).eval(),
        rows,
        BATCH,
        {"batch": [1, 4, 8]},
    ),
    "masked attention": Case(
        attention, masked, BOTH, {"batch": [1, 4], "length": [8, 16]}, (None, 0)
    ),
    "masked mean": Case(
        plain(mean_by_mask), masked, BOTH, {"batch": [4], "length": [8, 16]}, (None, 0)
    ),
    "convolution over the batch": Case(
        lambda device: nn.Conv2d(3, 4, 3, padding=1).to(device).eval(),
        lambda device, sizes: (rand(device, sizes[0], 3, 8, 8),),
        BATCH,
        {"batch": [4]},
    ),
    "2·b+1 rows": Case(
        plain(lambda x: torch.cat([x.new_ones(1, WIDTH), x.repeat_interleave(2, 0)])),
        rows,
        BATCH,
        {"batch": [4, 8]},
    ),
    "(b·l, d)": Case(
        plain(lambda x, mask: (x * mask[..., None]).flatten(0, 1)),
        masked,
        BOTH,
        {"batch": [4], "length": [8]},
        (None, 0),
    ),
    "(l·b, d)": Case(
        plain(lambda x, mask: (x * mask[..., None]).transpose(0, 1).flatten(0, 1)),
        masked,
        BOTH,
        {"batch": [4], "length": [8]},
        (None, 0),
    ),
    "half the length": Case(plain(lambda x: x[:, ::2] * 2), series, LENGTH, {"length": [8, 16]}),
    "a size among the outputs": Case(
        plain(lambda x: (x * 2, x.shape[0] * 3)), rows, BATCH, {"batch": [4, 8]}
    ),
    "pairs": Case(
        plain(lambda x, y: x @ y.T),
        lambda device, sizes: (*rows(device, sizes), rand(device, 5, WIDTH)),
        ({0: "batch"}, None),
        {"batch": [4, 8]},
    ),
}


def as_eager(case: Case, device: torch.device) -> Any:
    """Call at many sizes, twice each; all has to be eager's."""
    fn, graphed = case.graphed(device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(2):
            for sizes in case.sizes():
                arguments = case.arguments(device, sizes)
                try:
                    expected, spec = pytree.tree_flatten(fn(*arguments))
                except ValueError:
                    refused(ValueError, lambda given=arguments: graphed(*given))
                    continue
                actual, same_spec = pytree.tree_flatten(graphed(*arguments))
                assert spec == same_spec
                for mine, theirs in zip(actual, expected, strict=True):
                    if isinstance(theirs, torch.Tensor):
                        same(mine, theirs, f"at {sizes}")
                        assert layout(mine) == layout(theirs)
                    else:
                        assert mine == theirs
    return graphed


def graphs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(family.ShapeFamily, "check", lambda self, plan, run, args, kwargs: None)


def nothing_is_proved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proof.Prover, "_try", lambda self, verdicts, sizes, thorough: None)
    graphs_are_not_compared(patch)


def fillings_are_compared_with_each_other(patch: pytest.MonkeyPatch) -> None:
    """What others do: run the padded call with two fillings, and see whether they agree."""
    original = sampler.CallSampler.at
    graphs_are_not_compared(patch)

    def run(self: proof.Prover, verdicts: Any, sizes: Any, thorough: bool) -> str | None:
        sampler, found = self.subject, []
        for filling in (0, 1):
            leaves = sampler.padded(original(sampler, sizes), verdicts.bucket, filling, _SEED)
            with self._from_now() if self._state is None else contextlib.nullcontext():
                found.append(self._run(leaves)[0])
        cuts = output_shapes.cuts_of(verdicts.shapes, sizes, verdicts.bucket)
        pairs = zip(*(outcome.outputs.values() for outcome in found), cuts, strict=True)
        for one, two, ways in pairs:
            if isinstance(one, torch.Tensor) and not torch.allclose(
                ways[-1](one), ways[-1](two), equal_nan=True
            ):
                return "the fillings differ"
        return None

    patch.setattr(proof.Prover, "_try", run)


_SEED = torch.Generator().manual_seed(1)


def padding_is_whatever_was_there(patch: pytest.MonkeyPatch) -> None:
    original = padding.fill
    patch.setattr(padding, "fill", lambda leaf, widths, value: original(leaf, widths, float("nan")))
    graphs_are_not_compared(patch)


def nothing_is_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(padding.Cut, "__call__", lambda self, output: output)
    nothing_is_proved(patch)


def branches_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(output_shapes.OutputShapes, "way", lambda self, sizes: ())


def _add_refused(name: str, case: Case) -> None:
    def check(device: torch.device) -> None:
        as_eager(case, device)

    check.__name__ = f"padding_is_not_used_for_{name.replace(' ', '_')}"
    hazard(16, branches_are_not_seen if case.fn is _AT_FIVE else nothing_is_proved)(check)


def _add_accepted(name: str, case: Case) -> None:
    def check(device: torch.device) -> None:
        told = as_eager(case, device).statistics
        assert told.padded > 0
        assert not told.eager

    check.__name__ = f"padding_changes_nothing_for_{name.replace(' ', '_')}"
    hazard(16, nothing_is_cut)(check)


_AT_FIVE = REFUSED["a branch at one size"].fn
for _name, _case in REFUSED.items():
    _add_refused(_name, _case)
for _name, _case in ACCEPTED.items():
    _add_accepted(_name, _case)


@hazard(16, fillings_are_compared_with_each_other)
def two_fillings_that_agree_prove_nothing(device: torch.device) -> None:
    # None of these depends on what the padding holds.
    for name in ("positions from linspace", "squeeze at batch 1", "a branch on the length"):
        as_eager(REFUSED[name], device)


@hazard(16, padding_is_whatever_was_there)
def padding_holds_what_was_declared(device: torch.device) -> None:
    as_eager(ACCEPTED["masked attention"], device)


@hazard(16, module_is_not_watched)
def a_proof_belongs_to_the_state_it_was_made_in(device: torch.device) -> None:
    model = norm(device).eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(2):
            same(graphed(x), model(x))
        assert graphed.statistics.padded == 2
        model.train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        actual = graphed(x)
        model.load_state_dict(before)
        same(actual, model(x))


class Cached(nn.Module):
    """Writes what it is given to the begin of a buffer, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[: x.shape[0]] = x
        self.calls += 1
        return x * 2


@hazard(16, nothing_is_proved)
def padding_is_not_written_to_buffers(device: torch.device) -> None:
    model, eager = Cached().to(device).eval(), Cached().to(device).eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4, 8]), pad={"x": 0.0})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (8, 3, 7, 2):
            x = rand(device, batch, WIDTH)
            same(graphed(x), eager(x))
            same(model.kept, eager.kept)
            same(model.calls, eager.calls)


def proofs_start_from_the_first_one_s_state(patch: pytest.MonkeyPatch) -> None:
    first: dict[int, Any] = {}
    original = family.ModuleState

    def once(module: nn.Module, **options: Any) -> Any:
        return first.setdefault(id(module), original(module, **options))

    patch.setattr(family, "ModuleState", once)


@hazard(16, proofs_start_from_the_first_one_s_state)
def a_later_proof_leaves_loaded_buffers_alone(device: torch.device) -> None:
    model = norm(device).eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4, 8]))
    with torch.no_grad():
        graphed(rand(device, 3, WIDTH))
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        x = rand(device, 3, WIDTH)
        expected = model(x)
        graphed(rand(device, 7, WIDTH))
        same(model(x), expected)
        same(graphed(x), expected)


def hooks_are_not_put_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dependencies, "_OF_MODULES", ())
    patch.setattr(dependencies, "FORWARD_HOOKS", ())
    patch.setattr(dependencies, "BACKWARD_HOOKS", ())


class Hooked(nn.Module):
    """Adds a hook to a part of itself in its first call, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.part.register_forward_hook(lambda module, given, result: result + 1)
            self.ready = True
        return self.part(x)


@hazard(16, hooks_are_not_put_back)
def a_trial_leaves_no_hooks(device: torch.device) -> None:
    model = Hooked().eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        same(graphed(x), x + 1)
        same(model(x), x + 1)


def all_sizes_go_the_sample_s_way(patch: pytest.MonkeyPatch) -> None:
    first = aliasing.Sharing(((0, 0),), frozenset({0}), (), frozenset())
    patch.setattr(aliasing.Sharing, "of", lambda result, leaves, axes: first)
    graphs_are_not_compared(patch)


@hazard(16, all_sizes_go_the_sample_s_way)
def an_output_may_be_an_argument_at_some_sizes(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] > 4 else x * 2

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[8]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (5, 3, 8, 6):
            x = rand(device, batch, WIDTH)
            same(graphed(x), fn(x))


def only_the_bucket_s_way_is_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        shape_inference.ShapeInference, "_tell_ways_apart", lambda self, shapes, bucket: None
    )


@hazard(16, only_the_bucket_s_way_is_followed)
def a_branch_behind_another_is_seen(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 8:
            return x * 2
        return x * 3 if x.shape[0] == 3 else x * 2

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[16]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (9, 6, 3, 1):
            x = rand(device, batch, WIDTH)
            same(graphed(x), fn(x))


def values_are_the_sample_s(patch: pytest.MonkeyPatch) -> None:
    given = sampler.CallSampler.at
    patch.setattr(
        sampler.CallSampler, "changed", lambda self, sizes, how, generator: given(self, sizes)
    )
    patch.setattr(sampler.CallSampler, "with_odd_row", lambda self, sizes, *how: given(self, sizes))


def rows_are_repeated(patch: pytest.MonkeyPatch) -> None:
    def extended(tensor: torch.Tensor, axis: int, n: int, axes: Any) -> torch.Tensor:
        places = torch.arange(n, device=tensor.device) % tensor.shape[axis]
        return tensor.index_select(axis, places)

    patch.setattr(sampler, "_extended", extended)
    values_are_the_sample_s(patch)


@hazard(16, rows_are_repeated)
def one_row_proves_nothing_about_many(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x - x.mean(0), buckets=gw.Buckets(batch=[1, 4]), split=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (1, 9, 3):
            x = rand(device, batch, WIDTH)
            same(graphed(x), x - x.mean(0))


def errors_are_measured_by_the_mean(patch: pytest.MonkeyPatch) -> None:
    def by_mean(have: torch.Tensor, want: torch.Tensor) -> bool:
        return bool((have - want).norm() <= 1e-6 * want.norm())

    patch.setattr(comparison, "_elementwise", by_mean)
    graphs_are_not_compared(patch)


@hazard(16, errors_are_measured_by_the_mean)
def large_values_hide_no_others(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x - x.mean(1, keepdim=True), torch.full_like(x, -1e9)])

    graphed = gw.graph(fn, dynamic_shapes=LENGTH, buckets=gw.Buckets(length=[8]))
    x = rand(device, 2, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        same(graphed(x)[0], fn(x)[0])


def aliases_are_of_no_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dynamic_signature, "_pairs", lambda signature: [])
    patch.setattr(dynamic_signature.DynamicSignature, "overlap", False)


@hazard(16, aliases_are_of_no_kind)
def arguments_that_overlap_are_another_kind(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        graphed(rand(device, 3, WIDTH), rand(device, 3, WIDTH))
        x = rand(device, 3, WIDTH)
        same(graphed(x, x.view_as(x)), (kept := x.clone()) * kept)


def gaps_are_of_no_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dynamic_signature, "_gaps", lambda leaves, axes, forms: (False,) * len(leaves))


@hazard(16, gaps_are_of_no_kind)
def what_gaps_between_rows_change_is_changed(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.is_contiguous() else x * 3

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (3, 4):
            dense, wide = rand(device, batch, WIDTH), rand(device, batch, 2 * WIDTH)[:, :WIDTH]
            same(graphed(dense), fn(dense))
            same(graphed(wide), fn(wide))
