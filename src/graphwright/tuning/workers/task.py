"""What a process needs to evaluate candidates as this one would, in a file without a name."""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import nn

from ...calls.modules import FunctionModule
from ...calls.snapshots import ModuleState
from ...errors import first_line
from ...evaluation.reference import Sample
from ..trial import CandidateEvaluator
from .settings import Settings


class IsolationError(Exception):
    """Candidates cannot be tried in processes of their own here; the text says why."""


@dataclass
class Task:
    """What a child needs to evaluate a candidate as the caller's process would."""

    module: nn.Module
    samples: list[Sample]
    device: torch.device
    objective: str
    screening_s: float
    dynamic_shapes: Any
    settings: Settings

    @classmethod
    def of(cls, evaluator: CandidateEvaluator) -> Task:
        """What an evaluator in this process does, with the settings of this moment."""
        return cls(
            evaluator.module,
            evaluator.samples,
            evaluator.device,
            evaluator.objective,
            evaluator.screening_s,
            evaluator.dynamic_shapes,
            Settings.taken(),
        )

    def evaluator(self) -> CandidateEvaluator:
        """An evaluator in this process, which has loaded the task."""
        state = ModuleState(self.module)
        for sample in self.samples:
            sample.reference.state = state
        return CandidateEvaluator(
            self.module,
            self.samples,
            self.device,
            objective=self.objective,
            screening_s=self.screening_s,
            dynamic_shapes=self.dynamic_shapes,
        )


def written(task: Task) -> IO[bytes]:
    """The task in a file that has no name: it goes when the last process that holds it does.

    Raises:
        IsolationError: it cannot be pickled.
    """
    import cloudpickle

    file = tempfile.TemporaryFile(prefix="graphwright-")  # noqa: SIM115  # handed out
    try:
        with by_value():
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
def by_value() -> Iterator[None]:
    """Pickle what modules define that another process could not import, not just their names."""
    import cloudpickle

    known = cloudpickle.list_registry_pickle_by_value()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            ours = getattr(module, "__name__", None) == name and getattr(module, "__file__", None)
            if not ours or "." in name or name in known or name == "__main__" or _found(name):
                continue
            with contextlib.suppress(ValueError):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _found(name: str) -> bool:
    """Whether another process would find a module by its name."""
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):
            if finder.find_spec(name, None) is not None:
                return True
    return False


def lend_globals() -> None:
    """Have modules show what functions see as globals that were pickled by value from them.

    Dynamo looks there for what such a function calls. What is there already stays.
    """
    for function in gc.get_objects():
        if type(function) is not types.FunctionType:
            continue
        seen = function.__globals__
        name = seen.get("__name__")
        if not isinstance(name, str):
            continue
        # A module that is not there could not be imported either: `by_value` has looked.
        module = sys.modules.setdefault(name, types.ModuleType(name))
        if vars(module) is seen:
            continue
        for key, value in seen.items():
            vars(module).setdefault(key, value)


def modules_of(module: nn.Module) -> list[str]:
    """Modules that define a model's classes, to be imported once for all children."""
    owner: Any = module._function if isinstance(module, FunctionModule) else None
    names = {type(child).__module__ for child in module.modules()}
    names.add(getattr(owner, "__module__", None) or "torch")
    return sorted(names - {"__main__"})
