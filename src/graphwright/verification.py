"""Is it still the same model? A float64 reference, error measures, staleness and aliasing probes.

A candidate is right when it is about as close to a float64 reference as eager itself is: root
mean square error at most 3 times eager's, largest error at most 8 times, on every leaf of the
output, for several inputs, in calls that are repeated, interleaved and held. One wrong element
in a million does not move the mean; that is what the second bound is for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import (
    GraphwrightError,
    ModelFailed,
    SignatureError,
    VerificationError,
    first_line,
    user_frame,
)
from .snapshots import (
    Call,
    Model,
    Outcome,
    State,
    can_hold_anything,
    keep,
    outputs_by_name,
    run,
    same_bits,
)

RMS_FACTOR = 3.0
MAX_FACTOR = 8.0
# On a leaf of few elements eager may be exact by luck: some units in the last place are free.
_FREE_RMS_ULPS = 2.0
_FREE_MAX_ULPS = 8.0
# A precision that the caller allowed may cost this many of its units in the last place.
_LOSSY_RMS_ULPS = 8.0
# Eager's relative error where there is no float64 reference to measure it with.
_ASSUMED_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
# Beyond this relative error the float64 run took another path than eager did.
_ANOTHER_PATH = 0.2
_FEW_ELEMENTS = 64
TF32_ULP = 2.0**-10
# Where the caller's switches permit TF32, a candidate may use it though eager happens not to.
_TF32_RMS_ULPS = 2.0
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


@dataclass(frozen=True)
class ErrorMeasure:
    """Distance from the reference in units of the reference's root mean square."""

    rms: float
    max: float


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate is right, else why not; its error on the worst leaf."""

    ok: bool
    reason: str = ""
    error: ErrorMeasure | None = None


@dataclass
class Case:
    """One set of inputs, what eager made of it, and the float64 values where there are any."""

    call: Call
    eager: Outcome
    exact: dict[str, torch.Tensor]
    eager_error: dict[str, ErrorMeasure] = field(init=False)

    def __post_init__(self) -> None:
        self.eager_error = _errors(self.eager, self.exact)


@dataclass
class Reference:
    """Eager's behaviour on several inputs and its own distance from float64."""

    cases: list[Case]
    state: State
    eager_error: dict[str, ErrorMeasure]
    aliases: frozenset[tuple[str, str]]
    tolerance: float | None = None
    tf32: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def pure(self) -> bool:
        """Whether no call changed an input or a buffer."""
        for case in self.cases:
            before, after = case.call.leaves(), case.eager.inputs
            if case.eager.buffers or any(
                isinstance(leaf, torch.Tensor) and not same_bits(leaf, before[name])
                for name, leaf in zip(before, after.values(), strict=True)
            ):
                return False
        return True

    @property
    def worst_eager_error(self) -> ErrorMeasure | None:
        """Eager's own error on its worst leaf."""
        return max(self.eager_error.values(), key=lambda e: e.rms, default=None)

    def limit(self, name: str, leaf: torch.Tensor, peak: float, ulp: float | None) -> ErrorMeasure:
        """The error that one leaf may have; `peak` is the largest value over the mean one."""
        if self.tolerance is not None:
            return ErrorMeasure(self.tolerance, self.tolerance * max(peak, 1.0))
        eager = self.eager_error.get(name, ErrorMeasure(0.0, 0.0))
        real = leaf.dtype.to_real() if leaf.dtype.is_complex else leaf.dtype
        own = torch.finfo(real).eps if real.is_floating_point else 0.0
        rms = max(RMS_FACTOR * eager.rms, _FREE_RMS_ULPS * own)
        largest = max(MAX_FACTOR * eager.max, _FREE_MAX_ULPS * own * peak)
        if ulp is not None and leaf.dtype.is_floating_point:
            rms = max(rms, _LOSSY_RMS_ULPS * ulp)
            largest = max(largest, MAX_FACTOR / RMS_FACTOR * rms * peak)
        if self.tf32 and leaf.dtype in (torch.float32, torch.complex64):
            rms = max(rms, _TF32_RMS_ULPS * TF32_ULP)
            largest = max(largest, MAX_FACTOR / RMS_FACTOR * rms * peak)
        if leaf.numel() < _FEW_ELEMENTS:
            # A mean over a handful is as wild as its largest part, to which that bound belongs.
            rms = max(rms, largest)
        return ErrorMeasure(rms, largest)


# ---------------------------------------------------------------- the reference


class _Float64(TorchDispatchMode):
    """Runs every operation in float64, whatever precision the model asks for on the way.

    `operations` names what was run.
    """

    def __init__(self) -> None:
        self.operations: set[str] = set()
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        self.operations.add(func._schema.name)
        if func._schema.is_mutable:
            formal = func._schema.arguments
            written = [
                actual
                for index, argument in enumerate(formal)
                if argument.alias_info is not None and argument.alias_info.is_write
                for actual in (args[index] if index < len(args) else named.get(argument.name),)
            ]
            if any(_is_narrow(leaf) for leaf in pytree.tree_leaves(written)):
                # What is written to keeps its dtype; widening the rest could only mismatch.
                return func(*args, **named)
        args, named = pytree.tree_map(_widen, (args, named))
        return func(*args, **named)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is not _wide(leaf.dtype)


def _widen(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(_wide(leaf.dtype))
    return _wide(leaf) if isinstance(leaf, torch.dtype) else leaf


def _exact(
    model: Model, module: nn.Module, call: Call, state: State
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The model's float64 outcome and the operations that led there.

    Raises whatever the model raises on the way.
    """
    mode = _Float64()
    args, kwargs = pytree.tree_map(_widen, (call.args, dict(call.kwargs)))
    wide = Call(call.name, args, kwargs)
    try:
        with mode:
            outcome = run(model, wide, state)
    except Exception:
        if model is not module:
            raise
        # Some operators (recurrent layers) compare the dtypes of weights and inputs beforehand.
        state.restore()
        double = copy.deepcopy(module).double()
        with mode:
            outcome = run(double, wide, State(double))
    values = {n: v for n, v in outcome.leaves().items() if isinstance(v, torch.Tensor)}
    return values, mode.operations


def _permits_tf32(call: Call, operations: set[str]) -> bool:
    """Whether the caller's own switches let these operations use TF32 on the GPU.

    PyTorch lets cuDNN do so by default, and cuDNN decides by layout and shape: eager may happen not
    to use TF32 where a right candidate does.
    """
    if not any(tensor.is_cuda for tensor in call.tensors()):
        return False
    precision = torch._C._get_fp32_precision_getter
    cudnn = any("conv" in name or "cudnn_rnn" in name for name in operations)
    matmul = any(name in _MATMULS for name in operations)
    return (cudnn and precision("cuda", "conv") == "tf32") or (
        matmul and precision("cuda", "matmul") == "tf32"
    )


def reference(
    model: Model,
    module: nn.Module,
    call: Call,
    *,
    tolerance: float | None = None,
    seed: int = 0,
) -> Reference:
    """Run eager and a float64 copy of the work on the sample inputs and variations of them.

    Eager runs in the gradient mode that the caller is in: some modules (nn.TransformerEncoder with
    a padding mask) compute other numbers without gradients.

    Args:
        model: what is called.
        module: what holds its parameters and buffers; the same object for a module.
        call: the sample inputs.
        tolerance: relative error to accept in place of the rule stated above.
        seed: of the variations.

    Raises:
        ModelFailed: the model raises on its sample inputs.
        SignatureError: an argument or result cannot be compared.
        VerificationError: two eager calls with the same inputs disagree.
    """
    state = State(module)
    try:
        return _reference(model, module, call, state, tolerance, seed)
    finally:
        state.restore()


def _reference(
    model: Model,
    module: nn.Module,
    call: Call,
    state: State,
    tolerance: float | None,
    seed: int,
) -> Reference:
    try:
        first = run(model, call, state)
        second = run(model, call, state)
    except GraphwrightError:
        raise
    except Exception as error:
        raise ModelFailed(
            f"The model fails in eager with the sample inputs: {first_line(error)}",
            where=user_frame(error),
            remedy="Make the plain call work first; graphwright changes only how fast it runs.",
        ) from error
    if not any(isinstance(v, torch.Tensor) for v in first.outputs.values()):
        raise SignatureError(
            "The model returns no tensor, so that there is nothing to compare.",
            remedy="Return the tensors that the caller needs.",
        )
    notes: list[str] = []
    _refuse_disagreement(first, second, tolerance)
    try:
        exact, operations = _exact(model, module, call, state)
        gap = _errors(first, exact)
        if any(not error.rms <= _ANOTHER_PATH for error in gap.values()):
            raise ArithmeticError("its float64 run takes another path")
    except Exception as error:
        exact, operations = None, {"aten::mm", "aten::convolution"}
        notes.append(f"no float64 reference ({first_line(error, 120)}): compared with eager itself")
    small = min(v.numel() for v in first.outputs.values() if isinstance(v, torch.Tensor))
    generator = torch.Generator().manual_seed(seed)
    cases = [Case(call, first, _tensors(first) if exact is None else exact)]
    for other in _variations(call, generator, 6 if small < _FEW_ELEMENTS else 1):
        try:
            eager = run(model, other, state)
            values = _tensors(eager) if exact is None else _exact(model, module, other, state)[0]
        except Exception as error:
            notes.append(f"{other.name}: left out, eager raises {first_line(error, 120)}")
            continue
        if _finite(eager) < _finite(first):
            notes.append(
                f"{other.name}: left out, eager gives NaN or Inf where the sample does not"
            )
            continue
        cases.append(Case(other, eager, values))
    measured = [case.eager_error for case in cases]
    measured.append(_errors(second, cases[0].exact))
    if exact is None:
        own = _assumed(first)
    else:
        own = {name: _pooled([m[name] for m in measured if name in m]) for name in measured[0]}
    tf32 = _permits_tf32(call, operations)
    if tf32:
        notes.append(
            "TF32 is permitted by torch.backends (for cuDNN that is PyTorch's default), so "
            "candidates may use it where eager happens not to."
        )
    return Reference(cases, state, own, _aliases(model, call, state), tolerance, tf32, notes)


def _tensors(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {n: v for n, v in outcome.leaves().items() if isinstance(v, torch.Tensor)}


def _finite(outcome: Outcome) -> float:
    """Share of finite elements among the outputs."""
    tensors = [v for v in outcome.outputs.values() if isinstance(v, torch.Tensor) and v.numel()]
    shares = [float(torch.isfinite(_real(t)).double().mean()) for t in tensors]
    return min(shares, default=1.0)


def _assumed(outcome: Outcome) -> dict[str, ErrorMeasure]:
    own = {}
    for name, leaf in _tensors(outcome).items():
        rms = _assumed_error(leaf.dtype)
        own[name] = ErrorMeasure(rms, rms * _peak(_real(leaf)) if rms else 0.0)
    return own


def _assumed_error(dtype: torch.dtype) -> float:
    return _ASSUMED_ERROR.get(dtype.to_real() if dtype.is_complex else dtype, 0.0)


def _pooled(errors: list[ErrorMeasure]) -> ErrorMeasure:
    rms = math.sqrt(sum(e.rms**2 for e in errors) / len(errors))
    return ErrorMeasure(rms, max(e.max for e in errors))


def _refuse_disagreement(first: Outcome, second: Outcome, tolerance: float | None) -> None:
    base = _tensors(first)
    for name, leaf in _tensors(second).items():
        if name not in base or base[name].shape != leaf.shape:
            gap = math.inf
        else:
            gap = _error(leaf, base[name], base[name])[0].rms
        allowed = _assumed_error(leaf.dtype) if tolerance is None else tolerance
        if not gap <= allowed:
            raise VerificationError(
                f"Two eager calls with the same inputs disagree: {name} by {gap:.1e} relative.",
                remedy="Call model.eval() if dropout is at work, seed what is random inside the "
                "model, or pass a tolerance that covers the difference.",
            )


def _variations(call: Call, generator: torch.Generator, draws: int) -> Iterator[Call]:
    """Other inputs of the same kind; `generator` lives on the CPU.

    Integers are drawn from the sample's own values, so that an id stays a valid id (on a GPU, one
    that is not kills the process); where all are equal they are lowered by one, in a variation of
    their own, since a value that never differs tells nothing.
    """
    changes: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        (f"random inputs {index + 1}", lambda t: _drawn(t, generator)) for index in range(draws)
    ]
    changes.append(("the sample's values permuted", lambda t: _permuted(t, generator)))
    if any(t.dtype is torch.bool for t in call.tensors()):
        changes.append(("booleans flipped", lambda t: ~t if t.dtype is torch.bool else t))
    if any(_is_flag(t) for t in call.tensors()):
        changes.append(("constants changed", _flipped))
    if not any(t.numel() and can_hold_anything(t) for t in call.tensors()):
        return
    for name, change in changes:
        mine = replace(call.clone(), name=name)
        with torch.no_grad():
            for tensor in mine.tensors():
                if tensor.numel() and can_hold_anything(tensor):
                    tensor.copy_(change(tensor.detach()))
        yield mine


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values like the tensor's: a mask's, its mean and deviation, its own integers."""
    shape = tensor.shape
    values = _real(tensor).reshape(-1).cpu()
    if tensor.is_complex():
        parts = _drawn(torch.view_as_real(tensor), generator)
        return torch.view_as_complex(parts.contiguous())
    ones = bool((values == 1).any())
    only_both = bool(((values == 0) | (values == 1)).all())
    if only_both and (ones or tensor.dtype is torch.bool or tensor.is_floating_point()):
        drawn = torch.rand(shape, generator=generator) < 0.5
    elif tensor.is_floating_point():
        finite = values[torch.isfinite(values)]
        mean = float(finite.mean()) if finite.numel() else 0.0
        deviation = float(finite.std()) if finite.numel() > 1 else 0.0
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn = normal * (deviation or 1.0) + mean
    else:
        places = torch.randint(0, tensor.numel(), shape, generator=generator)
        return tensor.reshape(-1)[places.to(tensor.device)]
    return drawn.to(tensor.device, tensor.dtype)


def _is_flag(tensor: torch.Tensor) -> bool:
    """An integer or boolean tensor all of whose elements are one value above 0."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return False
    first = tensor.reshape(-1)[:1]
    return bool((tensor == first).all()) and int(first) > 0


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_flag(tensor):
        return tensor
    return ~tensor if tensor.dtype is torch.bool else tensor - 1


def _permuted(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


# ---------------------------------------------------------------- error measures


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as float64; real and imaginary parts in a dimension of their own."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.double()


def _peak(values: torch.Tensor) -> float:
    """Largest magnitude over the root mean square, of the finite values; at least 1."""
    values = values[torch.isfinite(values)].abs()
    if values.numel() == 0:
        return 1.0
    scale = float(values.square().mean().sqrt())
    return max(1.0, float(values.max()) / scale) if scale > 0 else 1.0


def _error(
    actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor
) -> tuple[ErrorMeasure, float]:
    """Error of `actual` and the peak of `exact`, where eager and exact are both finite."""
    wide, exact, eager = _real(actual), _real(exact), _real(eager)
    where = torch.isfinite(eager) & torch.isfinite(exact)
    values = exact[where]
    if values.numel() == 0:
        return ErrorMeasure(0.0, 0.0), 1.0
    scale = float(values.square().mean().sqrt()) or 1.0
    gap = (wide[where] - values).abs()
    rms = float(gap.square().mean().sqrt()) / scale
    return ErrorMeasure(rms, float(gap.max()) / scale), _peak(values)


def _errors(outcome: Outcome, exact: Mapping[str, torch.Tensor]) -> dict[str, ErrorMeasure]:
    found = {}
    for name, leaf in _tensors(outcome).items():
        if name in exact and exact[name].shape == leaf.shape:
            found[name] = _error(leaf, exact[name], leaf)[0]
    return found


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """0 where finite, else 1 for NaN, 2 for +Inf, 3 for -Inf."""
    values = _real(tensor)
    return values.isnan() + 2 * values.isposinf() + 3 * values.isneginf()


def _layout(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    return [st for st, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def compare(outcome: Outcome, case: Case, ref: Reference, ulp: float | None = None) -> Verdict:
    """Judge one outcome against what eager and float64 made of the same inputs.

    `ulp` is the unit in the last place of a lossy precision that the caller allowed.
    """
    if outcome.spec != case.eager.spec:
        return Verdict(False, "the output's structure differs from eager's")
    want, have = case.eager.leaves(), outcome.leaves()
    worst: ErrorMeasure | None = None
    for name in (*want, *(n for n in have if n not in want)):
        if name not in have or name not in want:
            which = "not changed, eager changes it" if name in want else "changed, eager leaves it"
            return Verdict(False, f"{name}: {which}")
        leaf, expected = have[name], want[name]
        if not isinstance(leaf, torch.Tensor) or not isinstance(expected, torch.Tensor):
            if type(leaf) is not type(expected) or not _same_value(leaf, expected):
                return Verdict(False, f"{name} is {leaf!r}, eager's is {expected!r}")
            continue
        for what in ("shape", "dtype", "device"):
            mine, theirs = getattr(leaf, what), getattr(expected, what)
            if mine != theirs:
                return Verdict(False, f"{name} has {what} {mine}, eager's has {theirs}")
        if leaf.numel() and _layout(leaf) != _layout(expected):
            have_, want_ = leaf.stride(), expected.stride()
            return Verdict(False, f"{name} has strides {have_}, eager's has {want_}")
        if name in case.eager_error and same_bits(leaf, expected):
            worst = _worse(worst, case.eager_error[name])
            continue
        if not torch.equal(_special(leaf), _special(expected)):
            return Verdict(False, f"{name} has NaN or Inf in other places than eager's")
        exact = case.exact.get(name, expected)
        if exact.shape != expected.shape:
            exact = expected
        error, peak = _error(leaf, exact, expected)
        limit = ref.limit(name, leaf, peak, ulp)
        worst = _worse(worst, error)
        if not (error.rms <= limit.rms and error.max <= limit.max):
            return Verdict(
                False,
                f"{name} is off by {error.rms:.1e} (rms) and {error.max:.1e} (largest); "
                f"allowed {limit.rms:.1e} and {limit.max:.1e}",
                error,
            )
    return Verdict(True, error=worst)


def _worse(a: ErrorMeasure | None, b: ErrorMeasure) -> ErrorMeasure:
    return b if a is None or b.rms > a.rms else a


def _same_value(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


# ---------------------------------------------------------------- probes


def verify(model: Model, ref: Reference, *, ulp: float | None = None) -> Verdict:
    """Judge a candidate: every case, then calls that are repeated, held and interleaved.

    Args:
        model: the candidate, called as the original is.
        ref: what `reference` gave.
        ulp: unit in the last place of a lossy precision that the caller allowed.

    Raises:
        whatever the candidate raises. Buffers and parameters are as before in any case.
    """
    try:
        verdict = _verdict(model, ref, ulp)
    finally:
        ref.state.restore()
        name = ref.state.corrupted()
    if name is not None:
        return Verdict(False, f"parameter {name} was changed by the candidate", verdict.error)
    return verdict


def _verdict(model: Model, ref: Reference, ulp: float | None) -> Verdict:
    worst: ErrorMeasure | None = None
    for case in ref.cases:
        verdict = compare(run(model, case.call, ref.state), case, ref, ulp)
        if not verdict.ok:
            return replace(verdict, reason=f"{case.call.name}: {verdict.reason}")
        worst = verdict.error if worst is None else _worse(verdict.error, worst)
    aliases = _aliases(model, ref.cases[0].call, ref.state)
    for output, other in sorted(aliases ^ ref.aliases):
        more = (output, other) in aliases
        how = "shares memory with" if more else "no longer shares memory, as eager's does, with"
        return Verdict(False, f"{output} {how} {other}", worst)
    for probe in (_held, _written, _overwritten, _reused):
        verdict = probe(model, ref, ulp)
        if not verdict.ok:
            return verdict
    return Verdict(True, error=worst)


def _other_case(ref: Reference) -> Case:
    """A case whose outcome differs from the first one's, so that staleness would show."""
    first = _tensors(ref.cases[0].eager)
    for case in ref.cases[1:]:
        outputs = _tensors(case.eager)
        if any(not same_bits(v, first[n]) for n, v in outputs.items() if n in first):
            return case
    return ref.cases[-1]


def _changed(live: Mapping[str, Any], kept: Mapping[str, Any]) -> str | None:
    for name, leaf in live.items():
        if isinstance(leaf, torch.Tensor) and not same_bits(leaf, kept[name]):
            return name
    return None


def _held(model: Model, ref: Reference, ulp: float | None) -> Verdict:
    """Output 1 must survive call 2, and call 3 must not depend on either."""
    one, two = ref.cases[0], _other_case(ref)
    ref.state.restore()
    call = one.call.clone()
    live, _ = outputs_by_name(model(*call.args, **call.kwargs))
    kept = keep(live)
    verdict = compare(run(model, two.call, ref.state), two, ref, ulp)
    if not verdict.ok:
        return replace(verdict, reason=f"stale: called with other inputs, {verdict.reason}")
    name = _changed(live, kept)
    if name is not None:
        return Verdict(False, f"{name} of one call was overwritten by the next call")
    again = compare(run(model, one.call, ref.state), one, ref, ulp)
    return replace(again, reason=f"called again, {again.reason}" if again.reason else "")


def _written(model: Model, ref: Reference, ulp: float | None) -> Verdict:
    """What the caller writes into an output must not come back from a later call.

    A frozen or traced constant that is handed out as it is would do that.
    """
    one = ref.cases[0]
    ref.state.restore()
    call = one.call.clone()
    live, _ = outputs_by_name(model(*call.args, **call.kwargs))
    shared = {output for output, _ in ref.aliases}
    with torch.inference_mode():  # Outputs may be inference tensors.
        for name, leaf in live.items():
            if isinstance(leaf, torch.Tensor) and name not in shared and can_hold_anything(leaf):
                leaf.fill_(1)
    verdict = compare(run(model, one.call, ref.state), one, ref, ulp)
    if not verdict.ok:
        return replace(verdict, reason=f"after its output was written to, {verdict.reason}")
    return verdict


def _overwritten(model: Model, ref: Reference, ulp: float | None) -> Verdict:
    """An output that shares no memory with an input must survive a change of the input."""
    one, two = ref.cases[0], _other_case(ref)
    ref.state.restore()
    call = one.call.clone()
    live, _ = outputs_by_name(model(*call.args, **call.kwargs))
    kept = keep(live)
    _overwrite(call, two.call)
    shared = {output for output, _ in ref.aliases}
    name = _changed({n: v for n, v in live.items() if n not in shared}, kept)
    if name is not None:
        return Verdict(False, f"{name} changed when an input was written to after the call")
    return Verdict(True)


def _reused(model: Model, ref: Reference, ulp: float | None) -> Verdict:
    """The same tensors with new values must give the new values' outcome."""
    one, two = ref.cases[0], _other_case(ref)
    ref.state.restore()
    call = one.call.clone()
    model(*call.args, **call.kwargs)
    ref.state.restore()
    _overwrite(call, two.call)
    outputs, spec = outputs_by_name(model(*call.args, **call.kwargs))
    after = {f"{name} after the call": leaf for name, leaf in call.leaves().items()}
    outcome = Outcome(spec, keep(outputs), keep(after), ref.state.changes())
    verdict = compare(outcome, two, ref, ulp)
    if not verdict.ok:
        return replace(verdict, reason=f"stale: input overwritten in place, {verdict.reason}")
    return verdict


def _overwrite(call: Call, other: Call) -> None:
    with torch.no_grad():
        for mine, theirs in zip(call.tensors(), other.tensors(), strict=True):
            if can_hold_anything(mine):
                mine.copy_(theirs)


def _aliases(model: Model, call: Call, state: State) -> frozenset[tuple[str, str]]:
    """Pairs of an output and an input, parameter, buffer or earlier output in one storage."""
    state.restore()
    mine = call.clone()
    outputs, _ = outputs_by_name(model(*mine.args, **mine.kwargs))
    owners = {}
    for name, leaf in (*state.tensors(), *mine.leaves().items()):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            owners[leaf.untyped_storage().data_ptr()] = name
    found = set()
    for name, leaf in outputs.items():
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            owner = owners.setdefault(leaf.untyped_storage().data_ptr(), name)
            if owner != name:
                found.add((name, owner))
    return frozenset(found)
