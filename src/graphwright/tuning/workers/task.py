"""What a worker needs to evaluate candidates as the caller's process would, and its file."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import IO, Any

import torch
from torch import nn

from ...calls.modules import FunctionModule
from ...calls.snapshots import ModuleState
from ...errors import first_line
from ...evaluation.reference import Sample
from ...processes.pickled_files import pickling_by_value, write_pickled
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
    try:
        return write_pickled(task)
    except OSError as error:
        raise IsolationError(f"a temporary file cannot be written: {error}") from error
    except Exception as error:
        raise IsolationError(f"it cannot be pickled: {first_line(error, 160)}") from error


def modules_to_import(module: nn.Module) -> list[str]:
    """Names of the Python modules that define a model's classes."""
    function: Any = module.function_of() if isinstance(module, FunctionModule) else None
    names = {type(part).__module__ for part in module.modules()}
    names.add(getattr(function, "__module__", None) or "torch")
    return sorted(names - {"__main__"})
