"""References for candidates: eager on several inputs, and eager's own error against float64."""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modes import OperationMode
from ..calls.snapshots import Call, CallOutcome, Model, ModuleState, outputs_by_name, run, same_bits
from ..calls.split import container_changes
from ..calls.switches import precision
from ..errors import (
    GraphwrightError,
    ModelFailed,
    SignatureError,
    VerificationError,
    first_line,
    user_frame,
)
from .accuracy import ErrorMeasure, as_float64, error_of, errors, peak_of, tensors_in
from .error_limits import FEW_ELEMENTS, limit_of
from .variations import milder, notes_on_masks, variations

# Eager's relative error where there is no float64 reference to measure it with.
_ASSUMED_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
# Beyond this relative error the float64 run has taken another branch than eager.
ANOTHER_PATH = 0.2
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
# Tensors with themselves in float64, by identity.
Widened = dict[int, tuple[torch.Tensor, torch.Tensor]]
_MAX_WIDENED = 1 << 29


@dataclass
class Case:
    """One set of inputs, eager's outcome, and the float64 values if there are any.

    `hint` says why these inputs are tried, if that needs saying.
    """

    call: Call
    eager: CallOutcome
    exact: dict[str, torch.Tensor]
    eager_error: dict[str, ErrorMeasure] = field(init=False)
    hint: str = ""

    def __post_init__(self) -> None:
        self.eager_error = errors(self.eager, self.exact)

    def wrong(self, reason: str) -> str:
        """What is wrong with a candidate here: the inputs, why they are tried, and `reason`."""
        name = self.call.name
        return f"wrong for {name}, {self.hint}: {reason}" if self.hint else f"{name}: {reason}"


@dataclass
class Reference:
    """Eager's behaviour on several inputs and its own distance from float64.

    `left_out` names the variations of the sample that eager itself does not survive; `call_s` is
    about what one eager call takes, in seconds.
    """

    cases: list[Case]
    state: ModuleState
    eager_error: dict[str, ErrorMeasure]
    aliases: frozenset[tuple[str, str]]
    tolerance: float | None = None
    tf32: bool = False
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    call_s: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # The state belongs to a module of this process; a loaded reference gets another one.
        return {**self.__dict__, "state": None}

    @property
    def pure(self) -> bool:
        """Whether no call wrote to an input or to what the module holds."""
        for case in self.cases:
            before, after = case.call.leaves(), case.eager.inputs
            if (
                case.eager.buffers
                or case.eager.written
                or case.eager.wrote_inputs
                or len(before) != len(after)
                or any(
                    isinstance(leaf, torch.Tensor) and not same_bits(leaf, before[name])
                    for name, leaf in zip(before, after.values(), strict=True)
                )
            ):
                return False
        return True

    @property
    def written(self) -> frozenset[str]:
        """The names of parameters and buffers that calls write to."""
        return frozenset().union(*(case.eager.written for case in self.cases))

    @property
    def worst_eager_error(self) -> ErrorMeasure | None:
        """Eager's own error on its worst leaf."""
        return max(self.eager_error.values(), key=lambda e: e.rms, default=None)

    def limit(self, name: str, leaf: torch.Tensor, peak: float, ulp: float | None) -> ErrorMeasure:
        """The error that one leaf may have; `peak` is the largest value over the mean one."""
        if self.tolerance is not None:
            return ErrorMeasure(self.tolerance, self.tolerance * max(peak, 1.0))
        eager = self.eager_error.get(name, ErrorMeasure(0.0, 0.0))
        return limit_of(leaf, eager, peak, ulp=ulp, tf32=self.tf32)


@dataclass
class Sample:
    """One call to tune for, its share of all calls, and its reference."""

    name: str
    weight: float
    call: Call
    reference: Reference


class _Float64(OperationMode):
    """Runs every operation in float64, whatever precision the model asks for.

    `operations` names what was run. `widened` keeps tensors in float64 from one run to the next.
    """

    def __init__(self, widened: Widened | None = None) -> None:
        self.operations: set[str] = set()
        self._widened = {} if widened is None else widened
        super().__init__()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.operations.add(func._schema.name)
        if func._schema.is_mutable:
            formal = func._schema.arguments
            written = [
                actual
                for index, argument in enumerate(formal)
                if argument.alias_info is not None and argument.alias_info.is_write
                for actual in (args[index] if index < len(args) else kwargs.get(argument.name),)
            ]
            if any(_is_narrow(leaf) for leaf in pytree.tree_leaves(written)):
                # The written tensor keeps its dtype, so the others must not be widened.
                self._widened.clear()
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(self._widen, (args, kwargs))
        return func(*args, **kwargs)

    def _widen(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in self._widened:
            original, wide = self._widened[id(leaf)]
            if original is leaf:
                return wide
        return _widen(leaf)


def in_float64() -> contextlib.AbstractContextManager[Any]:
    """Run every operation in the block in float64, whatever precision the model asks for.

    Operations that write to a narrower tensor keep its dtype.
    """
    mode: contextlib.AbstractContextManager[Any] = _Float64()
    return mode


def widened(module: nn.Module) -> Widened:
    """A module's weights in float64, for `exact_outcome`; empty if they would take much memory.

    They are valid until the weights change.
    """
    weights = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
    if sum(weight.numel() * _wide(weight.dtype).itemsize for weight in weights) > _MAX_WIDENED:
        return {}
    return {id(weight): (weight, _widen(weight.detach())) for weight in weights}


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


def exact_outcome(
    model: Model,
    module: nn.Module,
    call: Call,
    state: ModuleState,
    weights: Widened | None = None,
    look: Callable[[Any, Call], None] | None = None,
) -> tuple[CallOutcome, set[str]]:
    """Run a call with every operation in float64: its outcome, and the operations' names.

    It raises whatever the model raises.

    Args:
        model: what is called.
        module: what holds its parameters.
        call: the inputs.
        state: the state of the module to start from.
        weights: the result of `widened`, to save time in many calls.
        look: as for `run`.
    """
    mode = _Float64(weights)
    args, kwargs = pytree.tree_map(_widen, (call.args, dict(call.kwargs)))
    wide = Call(call.name, args, kwargs)
    try:
        outcome = run(model, wide, state, look, mode)
    except Exception:
        if model is not module:
            raise
        # Some operators (recurrent layers) compare the dtypes of weights and inputs beforehand.
        state.restore()
        # What nobody has used is not copied; if it is used after all, that raises.
        apart: dict[int, Any] = {id(tensor): _without_values(tensor) for tensor in state.unused()}
        with warnings.catch_warnings():
            # PyTorch warns of its own trees where they are copied, as those that a module holds.
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            double = copy.deepcopy(module, apart).double()
        doubled = ModuleState(double, weights=False, lazily=bool(apart))
        with doubled.watching():
            outcome = run(double, wide, doubled, look, mode)
    return outcome, mode.operations


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, without values."""
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
    made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    grad = tensor.requires_grad
    return (
        nn.Parameter(made, grad) if isinstance(tensor, nn.Parameter) else made.requires_grad_(grad)
    )


def _permits_tf32(call: Call, operations: set[str]) -> bool:
    """Whether the caller's own switches let these operations use TF32 on the GPU.

    PyTorch lets cuDNN do so by default, and cuDNN decides by layout and shape: eager may happen not
    to use TF32 where a right candidate does.
    """
    if not any(tensor.is_cuda for tensor in call.tensors()):
        return False
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
    state: ModuleState | None = None,
) -> Reference:
    """Run eager, and the same in float64, on the sample inputs and on variations of them.

    Eager runs in the gradient mode that the caller is in: some modules (nn.TransformerEncoder with
    a padding mask) compute other numbers without gradients.

    Args:
        model: what is called.
        module: what holds its parameters and buffers; the same object for a module.
        call: the sample inputs.
        tolerance: relative error to accept; None for limits relative to eager's own error.
        seed: of the variations.
        state: the module's state, if it is known already.

    Raises:
        CaptureError: the model advances an iterator that was there before the call.
        ModelFailed: the model raises on its sample inputs.
        SignatureError: an argument or result cannot be compared.
        VerificationError: two eager calls with the same inputs disagree.
    """
    state = ModuleState(module) if state is None else state
    try:
        return _reference(model, module, call, state, tolerance, seed)
    finally:
        state.restore()


def _remedy(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return "Eager itself needs more memory than there is: give smaller inputs or a lower dtype."
    return "Make the plain call work first; graphwright changes only how fast it runs."


def _reference(
    model: Model,
    module: nn.Module,
    call: Call,
    state: ModuleState,
    tolerance: float | None,
    seed: int,
) -> Reference:
    first, second, call_s = _twice(model, call, state)
    if not any(isinstance(v, torch.Tensor) for v in first.outputs.values()):
        raise SignatureError(
            "The model returns no tensor, so that there is nothing to compare.",
            remedy="Return the tensors that the caller needs.",
        )
    notes: list[str] = []
    _refuse_disagreement(first, second, tolerance)
    try:
        exact, operations = _exact(model, module, call, state, first)
    except Exception as error:
        exact, operations = None, {"aten::mm", "aten::convolution"}
        notes.append(f"no float64 reference ({first_line(error, 120)}): compared with eager itself")
    small = min(v.numel() for v in first.outputs.values() if isinstance(v, torch.Tensor))
    generator = torch.Generator().manual_seed(seed)
    cases = [Case(call, first, tensors_in(first) if exact is None else exact)]
    left_out = []

    def tried(other: Call, hint: str = "") -> Case | str:
        """A case for a variation, or why eager does not survive it."""
        try:
            eager = run(model, other, state)
            wide = eager if exact is None else exact_outcome(model, module, other, state)[0]
        except Exception as error:
            return f"raises {first_line(error, 120)}"
        if finite_share(eager) < finite_share(first):
            return "gives NaN or Inf, unlike for your sample"
        return Case(other, eager, tensors_in(wide), hint)

    for variation in variations(call, generator, 6 if small < FEW_ELEMENTS else 1):
        found = tried(variation.call, variation.hint)
        if isinstance(found, Case):
            cases.append(found)
            continue
        name = variation.call.name
        left_out.append(name)
        for kept, mild in milder(call, variation.call):
            instead = tried(mild)
            if isinstance(instead, Case):
                cases.append(instead)
                notes.append(
                    f"Verified with {name}, but your own {kept}: with others eager {found}"
                )
                break
        else:
            notes.append(f"Not verified with {name}: eager {found}")
    notes += notes_on_masks(call)
    measured = [*(case.eager_error for case in cases), errors(second, cases[0].exact)]
    own = _assumed(first) if exact is None else _pooled(measured)
    tf32 = _permits_tf32(call, operations)
    if tf32:
        notes.append(
            "TF32 is permitted by torch.backends (for cuDNN that is PyTorch's default), so "
            "candidates may use it where eager happens not to."
        )
    aliases = aliases_of(model, call, state)
    return Reference(cases, state, own, aliases, tolerance, tf32, notes, left_out, call_s)


def _twice(model: Model, call: Call, state: ModuleState) -> tuple[CallOutcome, CallOutcome, float]:
    """Two eager runs of a call, and the seconds of the second one.

    Raises:
        ModelFailed: the model raises an error.
    """
    try:
        with state.iterators.guarded():
            first = run(model, call, state)
        began = time.perf_counter()
        second = run(model, call, state)
        return first, second, time.perf_counter() - began
    except GraphwrightError:
        raise
    except Exception as error:
        raise ModelFailed(
            f"The model fails in eager with the sample inputs: {first_line(error)}",
            where=user_frame(error),
            remedy=_remedy(error),
        ) from error


def _exact(
    model: Model, module: nn.Module, call: Call, state: ModuleState, eager: CallOutcome
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The tensors of a run in float64, and its operations.

    Raises:
        ArithmeticError: it takes another path than eager.
    """
    outcome, operations = exact_outcome(model, module, call, state)
    exact = tensors_in(outcome)
    if any(not error.rms <= ANOTHER_PATH for error in errors(eager, exact).values()):
        raise ArithmeticError("its float64 run takes another path")
    return exact, operations


def refuse_changed_containers(reference: Reference) -> None:
    """Refuse a model that adds to the lists and dictionaries that it is given, or takes from them.

    Graphs and traces of it do not, and a repeated call has other arguments than the first.

    Raises:
        SignatureError: it does; the text names the places.
    """
    case = reference.cases[0]
    after = [name.removesuffix(" after the call") for name in case.eager.inputs]
    changes = container_changes([*case.call.leaves()], after)
    if changes:
        raise SignatureError(
            f"The model changes the containers that it is given: it {changes}.",
            remedy="Tune a function that passes copies of them, such as "
            "`lambda features: model(dict(features))`, or return what is new instead.",
        )


def finite_share(outcome: CallOutcome) -> float:
    """Share of finite elements among the outputs."""
    tensors = [v for v in outcome.outputs.values() if isinstance(v, torch.Tensor) and v.numel()]
    shares = [float(torch.isfinite(as_float64(t)).double().mean()) for t in tensors]
    return min(shares, default=1.0)


def _assumed(outcome: CallOutcome) -> dict[str, ErrorMeasure]:
    own = {}
    for name, leaf in tensors_in(outcome).items():
        rms = _assumed_error(leaf.dtype)
        own[name] = ErrorMeasure(rms, rms * peak_of(as_float64(leaf)) if rms else 0.0)
    return own


def _assumed_error(dtype: torch.dtype) -> float:
    return _ASSUMED_ERROR.get(dtype.to_real() if dtype.is_complex else dtype, 0.0)


def _pooled(measured: Sequence[Mapping[str, ErrorMeasure]]) -> dict[str, ErrorMeasure]:
    """The errors of several runs as one, by name."""
    found = {}
    for name in measured[0]:
        several = [each[name] for each in measured if name in each]
        rms = math.sqrt(sum(e.rms**2 for e in several) / len(several))
        found[name] = ErrorMeasure(rms, max(e.max for e in several))
    return found


def _refuse_disagreement(first: CallOutcome, second: CallOutcome, tolerance: float | None) -> None:
    base = tensors_in(first)
    for name, leaf in tensors_in(second).items():
        if name not in base or base[name].shape != leaf.shape:
            gap = math.inf
        else:
            gap = error_of(leaf, base[name], base[name])[0].rms
        allowed = _assumed_error(leaf.dtype) if tolerance is None else tolerance
        if not gap <= allowed:
            raise VerificationError(
                f"Two eager calls with the same inputs disagree: {name} by {gap:.1e} relative.",
                remedy="Call model.eval() if dropout is at work, seed what is random inside the "
                "model, or pass a tolerance that covers the difference.",
            )


def aliases_of(model: Model, call: Call, state: ModuleState) -> frozenset[tuple[str, str]]:
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
