"""Observing a call: its Python is run as it is, and what can be recorded of it is noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...calls.operations import tensors, written
from ...errors import CaptureError, first_line
from ..static_tensors import StaticInputs
from .steps import New, Step, bytes_of
from .tracer import Differs, Tracer, place_now


class ObservingTracer(Tracer):
    """Does what comes after the known steps as eager code does, and notes it.

    Attributes:
        script: the steps that it has done.
        problem: why they cannot be recorded, if they cannot.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.script: list[Step] = []
        self.problem: CaptureError | None = None
        self._exported: list[tuple[torch.Tensor, bytes]] = []

    def by_arguments(self) -> Step | None:
        """The first break whose outcome comes from the arguments, as far as tensors tell."""
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
        """Whether it wrote to memory that the call has not made."""
        return any(storage._cdata not in self.numbers for storage in self.written)

    def on_its_own(self) -> None:
        """From here on it is the call itself: it is not told of a capture, as eager code is not.

        Code that then does something else shows when this is recorded.
        """
        self._pretence.close()

    def asked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, constant: bool
    ) -> tuple[Any, ...]:
        """As a walk does, but for what it cannot look into."""
        if self.problem is not None and self.all_known():
            return ()
        try:
            return super().asked(args, kwargs, constant=constant)
        except Differs:
            raise
        except Exception as error:
            self.refuse(_as_problem(error))
            return ()

    def _only_done(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of a call that cannot be recorded any more."""
        result = func(*args, **kwargs)
        self.drew(func, args, kwargs)
        for tensor in tensors(result):
            self.made(tensor)
        return result

    def exported(self, tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """Code from outside gets hold of a tensor's memory: it must not be written to any more."""
        lost = self.numbers.get(tensor.untyped_storage()._cdata) in self._lost
        shared = content if lost else tensor.detach()
        self._exported.append((shared, bytes_of(content)))
        return shared

    def _check_exported(self, writes: Sequence[torch.Tensor]) -> None:
        """Whether somebody has written to memory that others hold, or is about to."""
        places = {tensor.untyped_storage().data_ptr() for tensor in writes}
        for tensor, held in self._exported:
            if tensor.untyped_storage().data_ptr() in places or bytes_of(tensor) != held:
                self.refuse(
                    CaptureError(
                        "The call writes to memory that NumPy or another library shares.",
                        where=place_now(),
                        remedy="Write to a copy: tensor.clone().numpy().",
                    )
                )

    def finish(self, tree: Any) -> None:
        """As a walk does; and look at what was shared."""
        self._check_exported(())
        self.check_end()
        super().finish(tree)

    def refuse(self, error: CaptureError) -> None:
        """It cannot be recorded, but it can be done."""
        self.problem = self.problem or error

    def fresh(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: tuple[Any, ...]
    ) -> Any:
        """Do an operation."""
        if self.problem is not None:
            return self._only_done(func, args, kwargs)
        self._check_exported(written(func, args, kwargs))
        stops = self.is_break(func, args, kwargs)
        hosts = self.hosts_among(func, args, kwargs)
        statics = [tensor.to(self.device) for tensor in hosts]
        result = func(*args, **kwargs)
        self.drew(func, args, kwargs)
        try:
            step = self.noted(func, asked, tensors((args, kwargs)), result, stops=stops)
        except Exception as error:
            self.refuse(_as_problem(error))
            return result
        step.statics = statics
        step.place = step.place or (place_now() if statics else None)
        self.script.append(step)
        return result


def reads_of_arguments(
    work: Callable[[list[Any]], Any], leaves: Sequence[Any], device: torch.device
) -> Step | None:
    """Where a call lets the host know something that comes from its arguments; None if nowhere.

    Args:
        work: the call, on the leaves of its arguments; what it writes to is put back.
        leaves: these.
        device: where it runs.
    """
    inputs = StaticInputs(leaves, lambda n: torch.empty(n, dtype=torch.uint8, device=device))
    observation = ObservingTracer((), {}, inputs, device, set())
    try:
        with observation.seen():
            work(inputs.leaves)
    except CaptureError:
        return None  # It cannot be recorded either.
    finally:
        observation.undo()
    return observation.by_arguments()


def _as_problem(error: Exception) -> CaptureError:
    if isinstance(error, CaptureError):
        return error
    return CaptureError(f"An operation cannot be followed: {first_line(error)}", where=place_now())
