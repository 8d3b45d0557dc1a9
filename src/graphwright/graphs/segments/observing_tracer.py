"""ObservingTracer: runs a call as eager code, and notes the steps that can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...calls.operations import tensors, written
from ...errors import CaptureError, current_place, first_line
from ..static_inputs import StaticInputs
from .steps import New, Step, bytes_of
from .tracer import Differs, Tracer


class ObservingTracer(Tracer):
    """Runs the operations after the known steps as eager code does, and notes them.

    Attributes:
        script: the steps that were run.
        problem: why they cannot be recorded, if they cannot.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.script: list[Step] = []
        self.problem: CaptureError | None = None
        self._shared_out: list[tuple[torch.Tensor, bytes]] = []

    def by_arguments(self) -> Step | None:
        """The first break whose outcome depends on the arguments, as far as tensors show."""
        reached: set[int] = set()
        for step in self.script:
            sources = step.sources
            if not any(
                isinstance(s, str) or (isinstance(s, int) and s in reached) for s in sources
            ):
                continue
            if step.key is not None:
                return step
            reached |= {made.number for made in step.made if isinstance(made, New)}
            if step.func._schema.is_mutable:
                reached |= {source for source in sources if isinstance(source, int)}
        return None

    @property
    def wrote_outside(self) -> bool:
        """Whether the call wrote to memory that it did not make."""
        return any(storage._cdata not in self.numbers for storage in self.written)

    def known_steps_done(self) -> None:
        """From here on the call is run for good: stop pretending that it is being captured.

        If it does something else then than under a capture, recording will notice.
        """
        self._pretence.close()

    def identify(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, constant: bool
    ) -> tuple[Any, ...]:
        """As `Tracer.identify`; what cannot be identified is refused, and the call goes on."""
        if self.problem is not None and self.all_known():
            return ()
        try:
            return super().identify(args, kwargs, constant=constant)
        except Differs:
            raise
        except Exception as error:
            self.refuse(_as_problem(error))
            return ()

    def _run_unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of a call that can no longer be recorded."""
        result = func(*args, **kwargs)
        self.drew(func, args, kwargs, result)
        for tensor in tensors(result):
            self.made(tensor)
        return result

    def export(self, tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """Share a tensor's memory with code from outside: it must not be written to any more."""
        lost = self.numbers.get(tensor.untyped_storage()._cdata) in self._lost
        shared = content if lost else tensor.detach()
        self._shared_out.append((shared, bytes_of(content)))
        return shared

    def _check_exported(self, writes: Sequence[torch.Tensor]) -> None:
        """Refuse writes, past or imminent, to memory that was shared with code from outside."""
        places = {tensor.untyped_storage().data_ptr() for tensor in writes}
        for tensor, held in self._shared_out:
            if tensor.untyped_storage().data_ptr() in places or bytes_of(tensor) != held:
                self.refuse(
                    CaptureError(
                        "The call writes to memory that NumPy or another library shares.",
                        where=current_place(),
                        remedy="Write to a copy: tensor.clone().numpy().",
                    )
                )

    def finish(self, tree: Any) -> None:
        """As `Tracer.finish`; check shared memory and random generators too."""
        self._check_exported(())
        self.check_end()
        super().finish(tree)

    def refuse(self, error: CaptureError) -> None:
        """Note that the call cannot be recorded, and go on."""
        self.problem = self.problem or error

    def run_new(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Run an operation and note its step."""
        if self.problem is not None:
            return self._run_unrecorded(func, args, kwargs)
        self._check_exported(written(func, args, kwargs))
        breaks = self.is_break(func, args, kwargs)
        hosts = self.host_tensors(func, args, kwargs)
        statics = [tensor.to(self.device) for tensor in hosts]
        result = func(*args, **kwargs)
        self.drew(func, args, kwargs, result)
        try:
            step = self.step_of(func, arguments, tensors((args, kwargs)), result, breaks=breaks)
        except Exception as error:
            self.refuse(_as_problem(error))
            return result
        step.statics = statics
        step.place = step.place or (current_place() if statics else None)
        self.script.append(step)
        return result


def reads_of_arguments(
    work: Callable[[list[Any]], Any], leaves: Sequence[Any], device: torch.device
) -> Step | None:
    """The first read of values that depend on a call's arguments; None if there is none.

    Args:
        work: runs the call on the leaves of its arguments; what it writes is put back.
        leaves: these.
        device: where the call runs.
    """
    inputs = StaticInputs(leaves, lambda n: torch.empty(n, dtype=torch.uint8, device=device))
    observer = ObservingTracer((), {}, inputs, device, set())
    try:
        with observer.seen():
            work(inputs.leaves)
    except CaptureError:
        return None  # Then it cannot be recorded either.
    finally:
        observer.undo()
    return observer.by_arguments()


def _as_problem(error: Exception) -> CaptureError:
    if isinstance(error, CaptureError):
        return error
    return CaptureError(
        f"An operation cannot be followed: {first_line(error)}", where=current_place()
    )
