"""What a worker needs to evaluate candidates as the caller's process would, and its file."""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

import torch
from torch import nn

from ...calls.modules import FunctionModule
from ...calls.snapshots import ModuleState
from ...errors import first_line
from ...evaluation.reference import Sample
from ...strategies.base import Candidate
from ...strategies.registry import LOSSY, is_ours, parse_candidates
from ..trial import CandidateEvaluator
from .settings import ProcessSettings


class IsolationError(Exception):
    """Candidates cannot be tried in processes of their own here; the text says why."""


@dataclass
class Task:
    """What a worker needs to evaluate a candidate as the caller's process would.

    All but `settings` are attributes of `CandidateEvaluator`.
    """

    module: nn.Module
    samples: list[Sample]
    device: torch.device
    objective: str
    screening_s: float
    timing_s: float
    dynamic_shapes: Any
    settings: ProcessSettings

    @classmethod
    def of(cls, evaluator: CandidateEvaluator) -> Task:
        """The task of an evaluator in this process, with this thread's present settings."""
        return cls(
            evaluator.module,
            evaluator.samples,
            evaluator.device,
            evaluator.objective,
            evaluator.screening_s,
            evaluator.timing_s,
            evaluator.dynamic_shapes,
            ProcessSettings.current(),
        )

    def evaluator(self) -> CandidateEvaluator:
        """An evaluator in the process that has loaded this task."""
        state = ModuleState(self.module)
        for sample in self.samples:
            sample.reference.state = state
        return CandidateEvaluator(
            self.module,
            self.samples,
            self.device,
            objective=self.objective,
            screening_s=self.screening_s,
            timing_s=self.timing_s,
            dynamic_shapes=self.dynamic_shapes,
        )


@dataclass
class Order:
    """One candidate that a worker is to try.

    Attributes:
        candidate: the candidate.
        device_bytes: memory of the GPU that it may take beyond what the worker holds; None for no
            limit, as on the CPU.
        is_last: whether the worker is ended afterwards, so that it need not be looked at.
        keeps_build: whether a candidate comes next that shares its build.
    """

    candidate: Candidate
    device_bytes: int | None
    is_last: bool
    keeps_build: bool

    def to_bytes(self) -> bytes:
        """The order for another process. Graphwright's own candidates go by their names.

        Each is then one object there, however often it is sent, and its trial run is made once.

        Raises:
            IsolationError: the candidate cannot be pickled.
        """
        import cloudpickle

        if is_ours(self.candidate):
            return pickle.dumps(replace(self, candidate=self.candidate.name))  # type: ignore[arg-type]  # until it is read
        try:
            with pickling_by_value():
                pickled: bytes = cloudpickle.dumps(self)
        except Exception as error:
            raise IsolationError(f"the strategy cannot be pickled: {first_line(error)}") from error
        return pickled

    @classmethod
    def from_bytes(cls, pickled: bytes) -> Order:
        """Read what `to_bytes` of the process that tunes has made."""
        order: Order = pickle.loads(pickled)
        if isinstance(order.candidate, str):
            (order.candidate,) = parse_candidates([order.candidate], LOSSY)
        return order


def write_task(task: Task) -> IO[bytes]:
    """Write a task to a file without a name, which lasts as long as a process holds it open.

    Raises:
        IsolationError: the task cannot be pickled or written.
    """
    import cloudpickle

    file = tempfile.TemporaryFile(prefix="graphwright-")  # noqa: SIM115  # handed out
    try:
        with pickling_by_value():
            torch.save(task, file, pickle_module=cloudpickle)
        file.flush()
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise IsolationError(f"a temporary file cannot be written: {error}") from error
        if isinstance(error, Exception):
            raise IsolationError(f"it cannot be pickled: {first_line(error, 160)}") from error
        raise
    return file


@contextlib.contextmanager
def pickling_by_value() -> Iterator[None]:
    """Have cloudpickle store definitions, not just names, of modules that cannot be imported."""
    import cloudpickle

    known = cloudpickle.list_registry_pickle_by_value()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            ours = getattr(module, "__name__", None) == name and getattr(module, "__file__", None)
            if not ours or "." in name or name in known or name == "__main__" or _importable(name):
                continue
            with contextlib.suppress(ValueError):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _importable(name: str) -> bool:
    """Whether another process would find a module by its name."""
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):
            if finder.find_spec(name, None) is not None:
                return True
    return False


def publish_globals() -> None:
    """Put the globals of functions that were pickled by value into the modules they name.

    Dynamo looks there for what such a function calls. What a module has already stays.
    """
    for function in gc.get_objects():
        if type(function) is not types.FunctionType:
            continue
        seen = function.__globals__
        name = seen.get("__name__")
        if not isinstance(name, str):
            continue
        # A missing module could not be imported either: `pickling_by_value` has checked.
        module = sys.modules.setdefault(name, types.ModuleType(name))
        if vars(module) is seen:
            continue
        for key, value in seen.items():
            vars(module).setdefault(key, value)


def modules_to_import(module: nn.Module) -> list[str]:
    """Names of the Python modules that define a model's classes."""
    function: Any = module.function_of() if isinstance(module, FunctionModule) else None
    names = {type(part).__module__ for part in module.modules()}
    names.add(getattr(function, "__module__", None) or "torch")
    return sorted(names - {"__main__"})
