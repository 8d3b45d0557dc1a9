"""XLA: the model traced by torchax into JAX, compiled once, with tensors shared by DLPack.

torchax answers PyTorch's operations with JAX's while `jax.jit` traces the model. Neither is
imported before a probe or a build asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from ..calls.signature import inside_transform
from ..calls.split import Args, Kwargs, flatten, tensors_of, unflatten
from ..errors import StrategyFailed, first_line
from .base import AVAILABLE, Availability, Built, tiny_model, without_grad
from .expected import Expected, tf32_allowed

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_CONVERSIONS = ("double", "float", "to", "type", "type_as")
# PyTorch takes the device that torchax names for the accelerator, and asks it for streams and more.
COSTS = "torchax changes its process: gradients on a GPU and pinned memory no longer work there"
# It names overloads of operators for named tensors, which later torch lacks.
_KNOWN_TO_WORK = "torchax 0.0.13 is known to work with torch 2.11."


class Unusable(StrategyFailed):
    """JAX or torchax is missing, cannot be imported, or has no such device."""


@dataclass(frozen=True)
class Xla:
    """The model on JAX's device of the same kind, compiled for the sample's own shapes."""

    name: str = "xla"
    complexity: int = 40
    unsavable: str = (
        "XLA's compiled programs belong to their process, to its JAX and to the device: compile "
        "anew where the model is loaded"
    )

    def probe(self, device: torch.device) -> Availability:
        """Compile and run a tiny model."""
        model, x = tiny_model(device)
        try:
            result = self.build(model, (x,), {}).call(x)
        except Unusable as error:
            return Availability(False, error.what, error.remedy or "")
        if not torch.allclose(result, model(x), atol=1e-5):
            return Availability(False, "a tiny model gives different results through JAX")
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Trace and compile the model; its parameters are shared, not copied.

        JAX takes arrays for immutable, and parameters are not. XLA reads them at each call and
        each call is waited for, so that no change comes between; what a change in place means to
        JAX is its own affair, hence `holds_weights`: after one the callable is used no more.
        """
        weights = _weights(model)
        device = _device([*weights.values(), *tensors_of((args, dict(kwargs)))])
        jax, torchax = load(device)
        with _settings(jax, _jax_device(jax, device)):
            program = _Program(jax, torchax, model, args, kwargs, weights, device)
        notes = []
        if device.type == "cuda":
            notes.append("each call waits until the GPU is done: JAX has streams of its own")
            notes.append(COSTS)
            if os.environ.get(_PREALLOCATE, "true").lower() not in ("false", "0"):
                notes.append(
                    f"JAX may have reserved most of the GPU's memory: {_PREALLOCATE} was not "
                    "false when it was imported"
                )
        return Built(without_grad(program), notes, holds_weights=True, self_contained=True)


class _Program:
    """A compiled model, to be called as the model is."""

    def __init__(
        self,
        jax: Any,
        torchax: Any,
        model: nn.Module,
        args: Args,
        kwargs: Kwargs,
        weights: dict[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._jax, self._device = jax, device
        self._place = _jax_device(jax, device)
        self._expected = expected = Expected.of(model, args, kwargs)
        leaves, spec = flatten(args, kwargs)
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        # A weight of several names is one: torch refuses to tell apart what is tied.
        distinct = {id(weight): weight for weight in weights.values()}
        position = {known: i for i, known in enumerate(distinct)}
        places = {name: position[id(weight)] for name, weight in weights.items()}
        self._weights = [_shared(jax, weight, device) for weight in distinct.values()]
        plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        env = _environment(torchax)
        seed = env.prng_key
        dtypes = [torchax.ops.mappings.t2j_dtype(r.dtype) for r in expected.results]

        def function(weights_in: list[Any], inputs: list[Any]) -> list[Any]:
            held = [torchax.tensor.Tensor(array, env) for array in weights_in]
            given = [torchax.tensor.Tensor(array, env) for array in inputs]
            row = list(plain)
            for slot, tensor in zip(self._slots, given, strict=True):
                row[slot] = tensor
            mine, named = unflatten(row, spec)
            state = {name: held[place] for name, place in places.items()}
            # What the model makes without naming a device is JAX's as well.
            with torch.no_grad(), env, torch.device("jax"):
                outputs = torch.func.functional_call(model, state, mine, named, strict=False)
            results = expected.tensors(outputs)
            arrays = zip((*held, *given), (*weights_in, *inputs), strict=True)
            if any(tensor.jax() is not array for tensor, array in arrays):
                raise StrategyFailed("the model changes an input or a buffer in place")
            if env.prng_key is not seed:
                raise StrategyFailed("the model draws random numbers: XLA would repeat them")
            if not all(hasattr(result, "jax") for result in results):
                raise StrategyFailed("the model returns a tensor that was made outside JAX")
            return [
                result.jax().astype(dtype) for result, dtype in zip(results, dtypes, strict=True)
            ]

        samples = [_shared(jax, leaves[slot], device) for slot in self._slots]
        with _without_fast_path():
            self._compiled = jax.jit(function).lower(self._weights, samples).compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if inside_transform() or (
            self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            raise StrategyFailed("neither CUDA graphs nor torch's modes can see JAX's work")
        leaves, _ = flatten(args, kwargs)
        with _settings(self._jax, self._place):
            # The stream that JAX names waits for torch's own before the inputs are read.
            inputs = [_shared(self._jax, leaves[slot], self._device) for slot in self._slots]
            if not inputs and self._device.type == "cuda":
                # Nothing else says when memory that JAX gave to torch, and got back, is free.
                torch.cuda.current_stream(self._device).synchronize()
            outputs = self._compiled(self._weights, inputs)
            # Until then JAX reads memory of torch's, which is free again on return.
            self._jax.block_until_ready(outputs)
            # XLA gives each result memory of its own, that of an input handed through included.
            return self._expected.restored([from_dlpack(array) for array in outputs])


def _environment(torchax: Any) -> Any:
    """Where torchax answers operations, with floating-point results no wider than torch's.

    Some of its operations widen to JAX's default, double (max_pool2d), and all that follows them.
    """
    # Mixed with JAX's, a tensor of torch's would be a constant that nobody watches.
    config = torchax.config.Configuration(allow_mixed_math_with_scalar_tensor=False)
    env = torchax.tensor.Environment(config)
    plain, answer = torchax.tensor.Tensor, env.dispatch

    def dispatch(func: Any, types: Any, args: Args, kwargs: Kwargs | None) -> Any:
        given = pytree.tree_leaves((args, dict(kwargs or {})))
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        kinds = [t.dtype for t in tensors if t.dtype.is_floating_point]
        # Before the answer: an operation in place changes what it is given.
        kind = functools.reduce(torch.promote_types, kinds or [torch.get_default_dtype()])
        result = answer(func, types, args, kwargs)
        named = getattr(func, "__name__", "").partition(".")[0] in _CONVERSIONS
        if not tensors or named or any(isinstance(leaf, torch.dtype) for leaf in given):
            return result
        narrow = torchax.ops.mappings.t2j_dtype(kind)

        def narrowed(value: Any) -> Any:
            if not value.dtype.is_floating_point or value.dtype.itemsize <= narrow.itemsize:
                return value
            array = value.jax().astype(narrow)
            if not any(value is tensor for tensor in tensors):
                return plain(array, env)
            value._elem = array
            return value

        return pytree.tree_map_only(plain, narrowed, result)

    env.dispatch = dispatch
    return env


def load(device: torch.device) -> tuple[Any, Any]:
    """JAX and torchax, imported without a change to torch but for the name of its spare backend.

    Raises:
        Unusable: one of them is missing, or its import fails.
    """
    missing = [name for name in ("jax", "torchax") if not _is_found(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        packages = " ".join(_package_of_jax(device) if n == "jax" else n for n in missing)
        raise Unusable(
            f"{' and '.join(missing)} {verb} not installed", remedy=f"pip install {packages}"
        )
    if "jax" not in sys.modules:
        os.environ.setdefault(_PREALLOCATE, "false")
    before = set(sys.modules)
    telemetry = os.environ.get("ENABLE_RUNTIME_UPTIME_TELEMETRY")
    try:
        # torchax switches off the fast path of attention, and telemetry on, for all the process.
        with _kept_fast_path(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax = importlib.import_module("jax")
            torchax = importlib.import_module("torchax")
            for part in ("config", "tensor", "ops.mappings"):
                importlib.import_module(f"torchax.{part}")
        if "torchax" not in before:
            # Else torch takes it for an accelerator, and TorchDynamo asks it for its stream.
            torchax.device_module.is_available = lambda: False
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "torchax":
                del sys.modules[name]
        raise Unusable(
            f"torchax {_version('torchax')} cannot be imported beside jax {_version('jax')} and "
            f"torch {torch.__version__}: {first_line(error)}",
            remedy=_KNOWN_TO_WORK,
        ) from error
    finally:
        if telemetry is None:
            os.environ.pop("ENABLE_RUNTIME_UPTIME_TELEMETRY", None)
    return jax, torchax


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # It is imported, and was made by hand.
        return True


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _package_of_jax(device: torch.device) -> str:
    if device.type != "cuda":
        return "jax"
    return f'"jax[cuda{(torch.version.cuda or "13").partition(".")[0]}]"'


@contextlib.contextmanager
def _kept_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    with _kept_fast_path():
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextlib.contextmanager
def _settings(jax: Any, place: Any) -> Iterator[None]:
    """64-bit types as in torch, no precision below torch's own, and nothing on other devices."""
    precision = "highest"
    if place.platform != "cpu" and tf32_allowed():
        precision = "tensorfloat32"
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision(precision),
        jax.default_device(place),
    ):
        yield


def _jax_device(jax: Any, device: torch.device) -> Any:
    try:
        found = jax.local_devices(backend=device.type)
    except RuntimeError as error:
        raise Unusable(
            f"jax {_version('jax')} has no {device.type} device: {first_line(error)}",
            remedy=f"pip install {_package_of_jax(device)}",
        ) from error
    index = 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    for place in found:
        if place.local_hardware_id == index:
            return place
    raise Unusable(f"jax does not see {device}", remedy="Unset CUDA_VISIBLE_DEVICES, or JAX's own.")


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where the model runs: on a GPU if any of its tensors lies there."""
    devices = {tensor.device for tensor in tensors}
    on_gpu = [device for device in devices if device.type == "cuda"]
    if len(on_gpu) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        raise StrategyFailed("the model runs on several devices, or on one that JAX does not share")
    return on_gpu[0] if on_gpu else torch.device("cpu")


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors that are plain attributes, by all of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def _shared(jax: Any, tensor: torch.Tensor, device: torch.device) -> Any:
    """A tensor as an array of JAX's in the same memory, if it is contiguous there."""
    tensor = tensor.detach().to(device).contiguous()
    # JAX compiles for a layout, and reads one from the strides of dimensions of size one, too.
    return jax.dlpack.from_dlpack(tensor.reshape(-1).view(tensor.shape))


XLA = Xla()
