"""PyTorch's switches: everything process-wide or of a thread that changes what a call computes.

`TABLE` is the only list of them. Signatures of calls, worker processes, cold starts, saved files
and cached choices are made from it, by each row's kind:

- "call": compared at every call, and nowhere else. It cannot be carried to another process, means
  nothing there, or is a faster way to read rows that can;
- "everywhere": compared at every call and in saved files, and repeated in other processes;
- "saved": compared in saved files, and repeated. Operations on the CPU read it at each run, so that
  a graph there follows it, but what compilers built may not; or a row of kind "call" stands for it;
- "repeated": only repeated in other processes of this machine. What runs reads it each time, or it
  decides between ways of equal precision.

A cached choice depends on all rows that another process repeats. Rows with the device "cuda" are
compared at calls on builds for GPUs alone, and in saved files of models on a GPU.

Each row is written as the expression that reads it, so that `lasting_switches`, which runs at every
call, is one function without a call of ours inside. Rows that this version of PyTorch cannot read
are left out, once, at import.

Looked at elsewhere:

- gradient and inference mode: each part has its own rule for them, and `workers.settings` repeats
  them;
- dispatch modes, torch.func, forward AD, tracing, hooks for saved tensors: `signature.fits` and
  `graphs.conditions`;
- hooks for all modules: `ModuleWatch`;
- anomaly detection: `GraphedStep` runs eagerly under it; elsewhere autograd runs and sees it;
- options of torch.compile: `workers.settings`; they say how something is built.

Not switches, since they change no result of what is captured or built:

- torch.set_printoptions, set_warn_always, torch.cuda.set_sync_debug_mode, autograd's warnings and
  torch.utils.checkpoint's flags: messages and checks of a run by the host;
- torch.__future__: how `Module.to` replaces parameters, which is watched as such;
- torch.set_num_interop_threads, autograd's multithreading, torch.backends.mkl.verbose,
  backends.mkldnn.verbose, backends.openmp, backends.xeon, the allocators' settings,
  set_sm_carveout: where or how fast work runs;
- torch.set_default_tensor_type: sets the default dtype and device, which are rows;
- torch.backends.mps, kleidiai, xnnpack, cusparselt, miopen and autocast of other devices: there is
  no recorder for these devices, or the back end can only be asked whether it is there;
- TorchScript's fusers and profiling executor, TunableOp, the workspaces of cuBLAS, and
  torch.backends.python_native: they choose among kernels of one precision, and have no public way
  to be read; `workers.leftovers` compares the fusers.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

Kind = Literal["call", "everywhere", "saved", "repeated"]
Device = Literal["any", "cpu", "cuda"]

# Whether this is a build for GPUs.
CUDA = torch.version.cuda is not None or torch.version.hip is not None
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Switch:
    """One switch of PyTorch's.

    Attributes:
        name: for messages, files and keys; mostly what a user calls or sets.
        expression: reads it; names are those of `_NAMES`.
        set: sets it in this process; None if another process cannot be given the value.
        device: whose operations it changes.
        kind: where it counts; see this module's text.
        of_thread: whether it is one thread's.
    """

    name: str
    expression: str
    set: Callable[[Any], object] | None
    device: Device
    kind: Kind
    of_thread: bool = False
    get: Callable[[], Any] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "get", eval(f"lambda: {self.expression}", _NAMES))

    @property
    def exists(self) -> bool:
        """Whether this version of PyTorch has it."""
        try:
            self.get()
        except Exception:
            return False
        return True


class AttentionFastPath:
    """The user's setting of torch.backends.mha's fast path, which captures turn off.

    Attributes:
        user_setting: the setting; None while no capture is under way.
    """

    user_setting: bool | None = None


class _OlderTf32Flags:
    """Whether the older TF32 flags can be read, which is faster than the newer settings.

    They raise once the newer settings have values that the flags cannot express.
    """

    answers = True


def precision(backend: str, operation: str) -> str:
    """The float32 precision in force, as `torch.backends.BACKEND.OPERATION.fp32_precision`.

    The older TF32 flags raise once one of these settings was used.
    """
    found: str = torch._C._get_fp32_precision_getter(backend, operation)
    return found


_MATMUL_TF32 = torch._C._get_cublas_allow_tf32
_CUDNN_TF32 = torch._C._get_cudnn_allow_tf32
_OPERATIONS = ("matmul", "conv", "rnn")


def _tf32() -> tuple[bool, ...]:
    """Whether TF32 is on in matrix products and cuDNN; where RNNs differ, a third time for them."""
    if _OlderTf32Flags.answers:
        try:
            return _MATMUL_TF32(), _CUDNN_TF32()
        except Exception:
            _OlderTf32Flags.answers = False
    products, convolutions, rnns = (precision("cuda", o) == "tf32" for o in _OPERATIONS)
    return (products, convolutions) + (() if rnns == convolutions else (rnns,))


# What torch.set_float32_matmul_precision is said to have set where newer settings disagree.
_MIXED = "mixed"


def _older_precision() -> str:
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return _MIXED


def _function_modes() -> tuple[Any, ...] | None:
    """The default device, including `with torch.device(...)`, and other function modes."""
    c = torch._C
    if not c._is_torch_function_mode_enabled():  # Inside of DisableTorchFunction.
        return None
    found = []
    for place in range(c._len_torch_function_stack()):
        mode = c._get_function_stack_at(place)
        found.append(mode.device if type(mode) is DeviceContext else mode)
    return tuple(each for each in found if each != _HOST) or None


# The order of attention kernels is PyTorch's own before and after it has seen the GPU.
_KERNEL_ORDERS = ([1, 2, 0, 3], [3, 1, 2, 0])


def _chosen_order() -> tuple[int, ...] | None:
    """The order of attention kernels that the user has set; None for PyTorch's own."""
    order = torch._C._get_sdp_priority_order()
    return None if [n for n in order if n != 4] in _KERNEL_ORDERS else tuple(order)


def _set_order(order: tuple[int, ...] | None) -> None:
    torch._C._set_sdp_priority_order([*_KERNEL_ORDERS[0], 4] if order is None else [*order])


# The smallest normal float64: half of it is zero where denormals are flushed.
_SMALLEST = 2.0**-1022


def _set_autocast(device: str, dtype: torch.dtype | Literal[False]) -> None:
    torch.set_autocast_enabled(device, bool(dtype))
    if dtype:
        torch.set_autocast_dtype(device, dtype)


def _set_warn_only(on: bool) -> None:
    torch.use_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=on)


def _set_einsum(strategy: str | Literal[False]) -> None:
    if torch.backends.opt_einsum.is_available():
        setattr(torch.backends.opt_einsum, "enabled", strategy is not False)  # noqa: B010
        if strategy is not False:
            setattr(torch.backends.opt_einsum, "strategy", strategy)  # noqa: B010


def _set_flash(name: str | None) -> None:
    if name is None:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        torch.nn.attention.activate_flash_attention_impl(name)


def _set_cached(on: bool) -> None:
    """Open or close the block of a process that has no other."""
    parametrize._cache_enabled = int(on)
    parametrize._cache = {}


def _set_older_precision(value: str) -> None:
    if value != _MIXED:  # The rows below it say what it cannot.
        torch.set_float32_matmul_precision(value)


def _setter(name: str) -> Callable[[Any], object] | None:
    """A function of torch._C, if this version has it."""
    return getattr(torch._C, name, None)


def _flag(path: str) -> Callable[[Any], None]:
    """Sets an attribute of torch that is named by its path."""
    owner, _, name = path.rpartition(".")
    return lambda value: setattr(operator.attrgetter(owner)(torch), name, value)


def _precise(backend: str, operation: str) -> Callable[[Any], object]:
    return functools.partial(torch._C._set_fp32_precision_setter, backend, operation)


_NAMES: dict[str, Any] = {
    "c": torch._C,
    "torch": torch,
    "parametrize": parametrize,
    "mha": torch.backends.mha,
    # Its properties take longer to read than all other switches. Without the package they mean
    # nothing.
    "einsum": torch.backends.opt_einsum._get_enabled.__globals__
    if torch.backends.opt_einsum.is_available()
    else {"enabled": False},
    "flash": getattr(torch.nn.attention, "_registry", None),
    "order": torch._C._get_sdp_priority_order,
    "smallest": _SMALLEST,
    "fast_path": AttentionFastPath,
    "tf32": _tf32,
    "precision": precision,
    "older_precision": _older_precision,
    "function_modes": _function_modes,
    "chosen_order": _chosen_order,
}
# Their stubs know no constructor.
_LINALG: Any = torch._C._LinalgBackend
_BLAS: Any = torch._C._BlasBackend
_MATMUL = "torch.backends.cuda.matmul"

_ALL = (
    # Those of a thread.
    Switch(
        "autocast on the CPU",
        "c._is_any_autocast_enabled()"
        " and torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu')",
        functools.partial(_set_autocast, "cpu"),
        "any",
        "everywhere",
        of_thread=True,
    ),
    Switch(
        "autocast on CUDA",
        "c._is_any_autocast_enabled()"
        " and torch.is_autocast_enabled('cuda') and torch.get_autocast_dtype('cuda')",
        functools.partial(_set_autocast, "cuda"),
        "any",
        "everywhere",
        of_thread=True,
    ),
    Switch(
        "autocast's cache",
        "torch.is_autocast_cache_enabled()",
        torch.set_autocast_cache_enabled,
        "any",
        "repeated",
        of_thread=True,
    ),
    Switch(
        "the default device",
        "function_modes() if c._len_torch_function_stack() else None",
        None,
        "any",
        "call",
        of_thread=True,
    ),
    Switch(
        "torch.set_default_device",
        "torch.get_default_device()",
        torch.set_default_device,
        "any",
        "saved",
        of_thread=True,
    ),
    Switch(
        "torch.set_flush_denormal",
        "smallest * 0.5 == 0",
        torch.set_flush_denormal,
        "cpu",
        "repeated",
        of_thread=True,
    ),
    # Those of the process, the wider before the narrower that may differ from them.
    Switch(
        "the default dtype",
        "torch.get_default_dtype()",
        torch.set_default_dtype,
        "any",
        "everywhere",
    ),
    Switch(
        "torch.nn.utils.parametrize.cached",
        "parametrize._cache_enabled > 0",
        _set_cached,
        "any",
        "everywhere",
    ),
    Switch(
        "torch.use_deterministic_algorithms (warn_only, fill_uninitialized_memory)",
        "c._get_deterministic_algorithms() and (c._get_deterministic_algorithms_warn_only(),"
        " c._get_deterministic_fill_uninitialized_memory())",
        None,
        "any",
        "call",
    ),
    Switch(
        "torch.use_deterministic_algorithms",
        "c._get_deterministic_algorithms()",
        torch.use_deterministic_algorithms,
        "any",
        "saved",
    ),
    Switch(
        "torch.use_deterministic_algorithms(warn_only)",
        "c._get_deterministic_algorithms_warn_only()",
        _set_warn_only,
        "any",
        "repeated",
    ),
    Switch(
        "torch.utils.deterministic.fill_uninitialized_memory",
        "c._get_deterministic_fill_uninitialized_memory()",
        _setter("_set_deterministic_fill_uninitialized_memory"),
        "any",
        "repeated",
    ),
    Switch(
        "torch.backends.mkldnn.enabled",
        "c._get_mkldnn_enabled()",
        _setter("_set_mkldnn_enabled"),
        "any",
        "everywhere",
    ),
    Switch(
        "torch.backends.cuda.flash_sdp",
        "c._get_flash_sdp_enabled()",
        _setter("_set_sdp_use_flash"),
        "any",
        "everywhere",
    ),
    Switch(
        "torch.backends.cuda.math_sdp",
        "c._get_math_sdp_enabled()",
        _setter("_set_sdp_use_math"),
        "any",
        "everywhere",
    ),
    Switch(
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        "c._get_math_sdp_allow_fp16_bf16_reduction()",
        _setter("_set_math_sdp_allow_fp16_bf16_reduction"),
        "any",
        "everywhere",
    ),
    Switch(
        "torch.backends.mha.set_fastpath_enabled",
        "mha._is_fastpath_enabled if fast_path.user_setting is None else fast_path.user_setting",
        torch.backends.mha.set_fastpath_enabled,
        "any",
        "everywhere",
    ),
    Switch(
        "torch.backends.opt_einsum",
        "einsum['enabled'] and einsum['strategy']",
        _set_einsum,
        "any",
        "everywhere",
    ),
    # What the CPU's operations read at each run.
    Switch(
        "torch.set_num_threads",
        "torch.get_num_threads()",
        torch.set_num_threads,
        "cpu",
        "repeated",
        of_thread=True,
    ),
    Switch(
        "torch.sparse.check_sparse_tensor_invariants",
        "c._check_sparse_tensor_invariants()",
        _setter("_set_check_sparse_tensor_invariants"),
        "any",
        "repeated",
    ),
    Switch(
        "torch.backends.quantized.engine",
        "c._get_qengine()",
        _setter("_set_qengine"),
        "cpu",
        "repeated",
    ),
    Switch(
        "torch.backends.nnpack",
        "c._get_nnpack_enabled()",
        _setter("_set_nnpack_enabled"),
        "cpu",
        "repeated",
    ),
    Switch(
        "torch.backends.mkldnn.deterministic",
        "c._get_mkldnn_deterministic()",
        _setter("_set_mkldnn_deterministic"),
        "cpu",
        "repeated",
    ),
    Switch(
        "torch.set_float32_matmul_precision",
        "older_precision()",
        _set_older_precision,
        "any",
        "repeated",
    ),
    *[
        Switch(
            f"torch.backends.mkldnn.{operation}.fp32_precision",
            f"precision('mkldnn', {operation!r})",
            _precise("mkldnn", operation),
            "cpu",
            "saved",
        )
        for operation in ("matmul", "conv", "rnn")
    ],
    # What is for GPUs alone.
    Switch(
        "fp32_precision (TF32) of torch.backends.cuda.matmul and torch.backends.cudnn",
        "tf32()",
        None,
        "cuda",
        "call",
    ),
    *[
        Switch(
            f"torch.backends.{owner}.fp32_precision",
            f"precision('cuda', {operation!r})",
            _precise("cuda", operation),
            "cuda",
            "saved",
        )
        for owner, operation in (
            ("cuda.matmul", "matmul"),
            ("cudnn.conv", "conv"),
            ("cudnn.rnn", "rnn"),
        )
    ],
    Switch(
        f"{_MATMUL}.allow_fp16_reduced_precision_reduction",
        "c._get_cublas_allow_fp16_reduced_precision_reduction()",
        _flag("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
        "cuda",
        "everywhere",
    ),
    Switch(
        f"{_MATMUL}.allow_bf16_reduced_precision_reduction",
        "c._get_cublas_allow_bf16_reduced_precision_reduction()",
        _flag("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
        "cuda",
        "everywhere",
    ),
    Switch(
        f"{_MATMUL}.allow_fp16_accumulation",
        "c._get_cublas_allow_fp16_accumulation()",
        _flag("backends.cuda.matmul.allow_fp16_accumulation"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cudnn.enabled",
        "c._get_cudnn_enabled()",
        _setter("_set_cudnn_enabled"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cudnn.benchmark",
        "c._get_cudnn_benchmark()",
        _setter("_set_cudnn_benchmark"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cudnn.deterministic",
        "c._get_cudnn_deterministic()",
        _setter("_set_cudnn_deterministic"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cudnn.depthwise_kernel",
        "c._get_cudnn_depthwise_kernel()",
        _setter("_set_cudnn_depthwise_kernel"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cudnn.benchmark_limit",
        "c._cuda_get_cudnn_benchmark_limit()",
        _setter("_cuda_set_cudnn_benchmark_limit"),
        "cuda",
        "repeated",
    ),
    Switch(
        "torch.backends.cuda.mem_efficient_sdp",
        "c._get_mem_efficient_sdp_enabled()",
        _setter("_set_sdp_use_mem_efficient"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cuda.cudnn_sdp",
        "c._get_cudnn_sdp_enabled()",
        _setter("_set_sdp_use_cudnn"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.backends.cuda.fa3_sdp",
        "c._get_fa3_sdp_enabled()",
        _setter("_set_sdp_use_fa3"),
        "cuda",
        "everywhere",
    ),
    Switch(
        "torch.nn.attention.activate_flash_attention_impl",
        "flash._FLASH_ATTENTION_ACTIVE and flash._FLASH_ATTENTION_ACTIVE[0]",
        _set_flash,
        "cuda",
        "everywhere",
    ),
    Switch(
        "the order of kernels for attention (sdpa_kernel(set_priority=True))",
        "tuple(order())",
        None,
        "cuda",
        "call",
    ),
    Switch(
        "torch.nn.attention.sdpa_kernel(set_priority=True)",
        "chosen_order()",
        _set_order,
        "cuda",
        "saved",
    ),
    Switch(
        "torch.backends.cuda.preferred_linalg_library",
        "int(c._get_linalg_preferred_backend())",
        lambda value: torch._C._set_linalg_preferred_backend(_LINALG(value)),
        "cuda",
        "repeated",
    ),
    *[
        # On ROCm, reading it asks the devices.
        Switch(
            "torch.backends.cuda.preferred_blas_library",
            "int(c._get_blas_preferred_backend())",
            lambda value: torch._C._set_blas_preferred_backend(_BLAS(value)),
            "cuda",
            "repeated",
        )
    ]
    * (torch.version.hip is None),
    Switch(
        "torch.backends.miopen.immediate",
        "c._get_miopen_immediate()",
        _setter("_set_miopen_immediate"),
        "cuda",
        "everywhere" if torch.version.hip is not None else "repeated",
    ),
)

TABLE: tuple[Switch, ...] = tuple(switch for switch in _ALL if switch.exists)


def _at_calls(*, cuda: bool) -> tuple[Switch, ...]:
    """The rows that are compared at every call, autocast excepted, whatever the build."""
    return tuple(
        switch
        for switch in TABLE
        if switch.kind in ("call", "everywhere")
        and (cuda or switch.device != "cuda")
        and switch not in _AUTOCAST
    )


_AUTOCAST = TABLE[:2]


def _reader(rows: tuple[Switch, ...]) -> Callable[[], tuple[Any, ...]]:
    """One function that reads rows, without a call of ours inside.

    PyTorch's functions are names of its own, which are found faster than attributes.
    """
    names = dict(_NAMES)

    def named(match: re.Match[str]) -> str:
        owner, name = match.groups()
        names[f"{owner}_{name}"] = getattr(names[owner], name)
        return f"{owner}_{name}("

    text = ", ".join(f"({row.expression})" for row in rows)
    text = re.sub(r"\b(c|torch)\.(\w+)\(", named, text)
    read: Callable[[], tuple[Any, ...]] = eval(f"lambda: ({text},)", names)
    return read


# The switches that change what a call computes, autocast excepted. They are read at every call. A
# guard of tensors notices by itself when autocast is turned on or off.
lasting_switches = _reader(_at_calls(cuda=CUDA))


def call_switches() -> tuple[Any, ...]:
    """All that a signature compares: autocast's dtypes, then the lasting switches."""
    return (*autocast(), *lasting_switches())


def autocast() -> tuple[Any, Any]:
    """Autocast's dtype on the CPU and on CUDA, or False."""
    if not torch._C._is_any_autocast_enabled():  # Faster than asking for each.
        return False, False
    cpu, cuda = _AUTOCAST
    return cpu.get(), cuda.get()


# The names of what `call_switches` returns.
CALL_NAMES = tuple(row.name for row in (*_AUTOCAST, *_at_calls(cuda=CUDA)))
# What another process repeats.
CARRIED = tuple(switch for switch in TABLE if switch.set is not None and switch.kind != "call")
# The names of those that a new thread has to be given.
OF_THREAD = tuple(switch.name for switch in CARRIED if switch.of_thread)


def read() -> dict[str, Any]:
    """The values of what another process repeats, by name."""
    return {switch.name: switch.get() for switch in CARRIED}


def apply(values: Mapping[str, Any]) -> None:
    """Set switches in this process and thread for good; those with the value already are left.

    Args:
        values: what `read` returned in another process or thread.

    Raises:
        RuntimeError: one cannot be set here; the text names it.
    """
    for switch in CARRIED:
        if switch.set is not None and switch.get() != values.get(switch.name, switch.get()):
            switch.set(values[switch.name])
    found = differences(values, read())
    if found:
        raise RuntimeError(f"settings of PyTorch cannot be repeated here: {'; '.join(found)}")


@contextlib.contextmanager
def applied(values: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, switches have these values, by name; nothing is done to others.

    What somebody else sets meanwhile stays.

    Raises:
        RuntimeError: one cannot be set here; the text names it.
    """
    before = {switch.name: switch.get() for switch in CARRIED if switch.name in values}
    try:
        apply(values)
    except BaseException:
        apply(before)
        raise
    try:
        yield
    finally:
        now = {switch.name: switch.get() for switch in CARRIED if switch.name in before}
        apply({name: old for name, old in before.items() if now[name] == values[name]})


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The switches in which two readings differ, in words with both values.

    What only one of them has is unknown, as between versions, and no difference.
    """
    return [
        f"{name} is {new[name]}, and was {value}"
        for name, value in old.items()
        if name in new and new[name] != value
    ]


# What files of version 1 have the values of, in their order.
OF_VERSION_1 = (
    "autocast on the CPU",
    "autocast on CUDA",
    "the default dtype",
    "torch.use_deterministic_algorithms",
    "torch.backends.mkldnn.enabled",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.cuda.flash_sdp",
    "torch.backends.cuda.mem_efficient_sdp",
    "torch.backends.cuda.math_sdp",
    "torch.backends.cuda.cudnn_sdp",
)


def saved(device: str) -> frozenset[str]:
    """The names of what is compared between saving a model and loading it.

    Args:
        device: the type of the device that the model was saved on.
    """
    return frozenset(
        switch.name
        for switch in CARRIED
        if switch.kind in ("everywhere", "saved") and switch.device in ("any", device)
    )
