"""ONNX Runtime: the model exported by torch.onnx, run without its Python.

The packages are optional. `onnxruntime:graph` is the runtime's own CUDA-graph mode.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ...calls.serialization import TreeTemplate
from ...calls.snapshots import clone_leaves
from ...calls.split import Args, Kwargs, flatten
from ...errors import StrategyFailed, first_line, user_frame
from ..base import AVAILABLE, Availability, Built, tiny_model, without_grad
from ..export import Flat, dims_of, exported
from .operations import differing
from .plan import CALL, ELEMENTS, MODEL, Plan, Result
from .session import PROVIDERS, Session, runtime

_CHATTY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
_GPU_PACKAGE = (
    "pip uninstall onnxruntime; pip install onnxruntime-gpu (of the two packages, which own the "
    "same files, only one may be installed)"
)


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime on the CPU or CUDA, plain or with its own CUDA graphs.

    With `dynamic_shapes`, which mirrors the call's arguments with `torch.export.Dim`s as it does
    for torch.export, the callable answers every size in their ranges.
    """

    name: str = "onnxruntime"
    complexity: int = 15
    cuda_graphs: bool = False
    holds_code: ClassVar[bool] = False
    bound_to: ClassVar[tuple[str, ...]] = ()
    portable: ClassVar[bool] = True
    dynamic_shapes: Any = field(default=None, kw_only=True, hash=False)

    def probe(self, device: torch.device) -> Availability:
        """Name what is not installed; export and run a tiny model."""
        if self.cuda_graphs and device.type != "cuda":
            return Availability(False, "CUDA graphs need a GPU", "Run on a GPU.")
        missing = _missing(device)
        if missing is not None:
            return missing
        model, x = tiny_model(device)
        self.build(model, (x,), {}).call(x)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Export into a temporary folder, load it, run it once."""
        leaves, spec = flatten(args, kwargs)
        flat = Flat(model, TreeTemplate.of(leaves, spec))
        samples = [t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor)]
        if not samples:
            raise StrategyFailed(
                "ONNX Runtime needs a tensor among the inputs.",
                remedy="Pass what the model computes with as a tensor.",
            )
        device = _device(samples, model)
        with torch.no_grad(), _own_folder() as folder:
            plan = self._plan(flat, samples)
            dims = dims_of(self.dynamic_shapes, model, args, kwargs)
            notes = _export(flat, samples, folder / MODEL, dims)
            built = self._built(folder, plan, device, samples)
            built.notes += notes
            return built

    def load(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], args: Args, kwargs: Kwargs
    ) -> Built:
        """The callable that `save` wrote; the arguments are samples.

        Raises:
            StrategyFailed: the folder holds none, or the samples are not as what was saved.
        """
        try:
            plan = Plan.read((folder / CALL).read_text(encoding="utf-8"))
        except OSError as error:
            raise StrategyFailed(f"{folder} holds no saved model: {first_line(error)}") from error
        leaves, spec = flatten(args, kwargs)
        call = TreeTemplate.of(leaves, spec)
        if call.slots != plan.slots:
            raise StrategyFailed(
                f"the call has tensors at {list(call.slots)} among its leaves; the saved one at "
                f"{list(plan.slots)}."
            )
        samples = [t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor)]
        with torch.no_grad(), _own_folder() as own:
            _copy_model(folder, own)  # What is loaded may be saved again when that folder is gone.
            return self._built(own, plan, _device(samples, None), samples)

    def _plan(self, flat: Flat, samples: Sequence[torch.Tensor]) -> Plan:
        """Run the model eagerly, for the strides of its outputs and which tensors these are."""
        versions = [_version(tensor) for tensor in samples]
        outputs = flat(*samples)
        if [_version(tensor) for tensor in samples] != versions:
            raise StrategyFailed("the model writes to its inputs, which ONNX cannot express.")
        same: dict[int, tuple[str, int]] = {}
        results: dict[int, Result] = {}
        for number, output in enumerate(outputs):
            # At another size a part of a tensor need not be all of it.
            exact = self.dynamic_shapes is not None
            twin = _twin(output, samples, exact=exact)
            if twin is not None:
                same[number] = ("input", twin)
                continue
            twin = _twin(output, outputs[:number], exact=exact)
            if twin is not None:
                same[number] = ("output", twin)
            else:
                results[number] = Result.of(output)
        if not results:
            raise StrategyFailed("the model computes no tensor of its own.")
        assert flat.out is not None  # It has just run.
        dynamic = self.dynamic_shapes is not None
        return Plan(flat.call.slots, flat.out, results, same, dynamic)

    def _built(
        self,
        folder: Path,
        plan: Plan,
        device: torch.device,
        samples: Sequence[torch.Tensor],
    ) -> Built:
        """The callable that a folder's model is; the folder goes with it."""
        session = Session(
            folder / MODEL,
            device,
            samples,
            plan.results,
            dynamic=plan.dynamic,
            graph=self.cuda_graphs,
        )

        def launch(leaves: Sequence[Any]) -> Any:
            tensors = [leaves[slot] for slot in plan.slots]
            made = session(tensors)
            for number, (kind, which) in plan.same.items():
                made[number] = tensors[which] if kind == "input" else made[which]
            return plan.out.fill(made[number] for number in range(len(plan.out.slots)))

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, _ = flatten(args, kwargs)
            return launch(leaves)

        def save(target: Path) -> None:
            text = plan.text()
            target.mkdir(parents=True, exist_ok=True)
            _copy_model(folder, target)
            (target / CALL).write_text(text, encoding="utf-8")

        # It lives as long as what can save it. TemporaryDirectory would warn when collected.
        weakref.finalize(session, shutil.rmtree, folder, ignore_errors=True)
        session(samples)
        return Built(
            without_grad(call),
            session.nodes_elsewhere(),
            True,
            without_grad(launch),
            save=save,
            self_contained=True,
        )


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A temporary folder, which stays if all goes well."""
    folder = Path(tempfile.mkdtemp(prefix="graphwright-onnx-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy_model(folder: Path, target: Path) -> None:
    """Copy the model, and its weights, where these are apart."""
    files = [*folder.glob(f"{MODEL}*")]
    if not files:
        raise StrategyFailed(f"{folder} holds no model any more")
    for file in files:
        shutil.copy(file, target)


def _export(
    flat: Flat, samples: Sequence[torch.Tensor], path: Path, dims: list[dict[int, Any]] | None
) -> list[str]:
    """Write the model, with its weights in files of their own where it is over 2 GB; notes on it.

    Raises:
        StrategyFailed: the model's code depends on a dynamic size, cannot be exported, or
            would give other numbers.
    """
    for tensor in samples:
        if tensor.dtype not in ELEMENTS:
            raise StrategyFailed(f"an input is {tensor.dtype}, which cannot be exported.")
    with _quiet():
        program = torch.onnx.export(
            # Where the model's code depends on a size, this exporter would try again with other
            # sizes, and say nothing of it.
            flat if dims is None else exported(flat, samples, dims),
            tuple(samples),
            dynamo=True,
            verbose=False,
            input_names=[f"in{n}" for n in range(len(samples))],
            output_names=[f"out{n}" for n in range(len(flat.out.slots if flat.out else ()))],
        )
        assert program is not None  # dynamo=True gives one.
        assert program.exported_program is not None
        notes = differing(program.exported_program.graph_module)
        program.save(path)
        return notes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's log of what is not installed and not needed, and of its own age."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for old in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", old)
            yield
    except torch.onnx.OnnxExporterError as error:
        # Its own text says which of three steps failed; the cause says why.
        cause = error.__cause__ or error
        raise StrategyFailed(
            f"the export failed: {first_line(cause)}", where=user_frame(cause)
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _missing(device: torch.device) -> Availability | None:
    """What is not installed that an export and a run need."""
    lacking = [name for name in ("onnx", "onnxscript") if not _imports(name)]
    if lacking:
        names = " and ".join(lacking)
        verb = "is" if len(lacking) == 1 else "are"
        return Availability(False, f"{names} {verb} not installed", "pip install onnx onnxscript")
    on_gpu = device.type == "cuda"
    try:
        known = runtime().get_available_providers()
    except ImportError:
        package = "onnxruntime-gpu" if on_gpu else "onnxruntime"
        return Availability(False, "onnxruntime is not installed", f"pip install {package}")
    if PROVIDERS.get(device.type) not in known:
        return Availability(
            False,
            f"the installed onnxruntime has no provider for {device.type}",
            _GPU_PACKAGE if on_gpu else "Run on a GPU or the CPU.",
        )
    return None


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _device(samples: Sequence[torch.Tensor], model: nn.Module | None) -> torch.device:
    """The device of a call: the GPU, if a tensor of it or of the model is there."""
    held = [] if model is None else [*model.parameters(), *model.buffers()]
    devices = [tensor.device for tensor in (*samples, *held)]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _twin(tensor: torch.Tensor, others: Sequence[torch.Tensor], *, exact: bool) -> int | None:
    """Which of some tensors is the same one: the same elements in the same memory.

    Or, if `exact`, the very same object.
    """
    for index, other in enumerate(others):
        if tensor is other or (
            not exact
            and tensor.numel()
            and tensor.data_ptr() == other.data_ptr()
            and Result.of(tensor) == Result.of(other)
        ):
            return index
    return None


ONNXRUNTIME = OnnxRuntime()
GRAPH = OnnxRuntime("onnxruntime:graph", 16, cuda_graphs=True)
