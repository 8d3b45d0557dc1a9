"""Random numbers that a call draws on the host and never looks at.

Models with layer drop draw a number for each layer, and use it in training only. All that such a
draw does is move the host's generator. A CUDA graph does not repeat it, so it is made again at each
replay: the generator is then where eager would have left it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ..calls.first_use import announce
from ..calls.operations import leaves, tensors
from ..errors import CaptureError
from .inspection.node import Node
from .recorder import Recording

# Neither eager's nor a user's, most likely.
OTHER_SEED = 8_675_309


def is_foreign(generator: torch.Generator, device: torch.device) -> bool:
    """Whether graphs on a device cannot draw from a generator by themselves."""
    return generator.device.type != device.type


def drawn_from(source: str) -> CaptureError:
    """The error for a call that draws from what no graph can repeat."""
    return CaptureError(
        f"The call draws random numbers from {source}; a graph would keep them.",
        remedy="Draw them on the device, or outside the captured call.",
    )


@dataclass(frozen=True, eq=False)
class Draw:
    """An operation that draws from the host's default generator, and its arguments.

    Equal to another one if it does the same.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self) -> None:
        """Move the generator as far as the operation did."""
        self.func(*self.args, **self.kwargs)

    def __eq__(self, other: object) -> bool:
        # As text, 1, 1.0 and True differ, and NaN is itself.
        return isinstance(other, Draw) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class HostDraws:
    """The draws of one run from the host's default generator, and which of them are used.

    A draw is used if anything but the draw itself is given its tensor, or its memory outlives the
    run. Draws into memory that was there before count as used.

    Attributes:
        made: the draws, in order.
    """

    def __init__(self) -> None:
        self.made: list[Draw] = []
        self._memory: dict[int, tuple[int, StorageWeakRef]] = {}
        self._used: set[int] = set()

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Note a draw, after it was made."""
        index = len(self.made)
        if tensors((args, kwargs)):
            self._used.add(index)
            self.made.append(Draw(func, (), {}))
            return
        self.made.append(Draw(func, args, dict(kwargs)))
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            # While the weak reference lives, the identity is not reused.
            self._memory[storage._cdata] = index, StorageWeakRef(storage)

    def use(self, tree: Any) -> None:
        """Note that something is given the tensors and storages of a tree."""
        if self._memory:
            for leaf in leaves(tree):
                announce(leaf, self._use)

    def _use(self, identity: int | None) -> None:
        if identity in self._memory:
            self._used.add(self._memory[identity][0])

    def used(self) -> set[int]:
        """Positions of the draws that are used. Ask while the run's results are still alive."""
        alive = {index for index, memory in self._memory.values() if not memory.expired()}
        return self._used | alive

    def to_repeat(self, device: torch.device) -> tuple[Draw, ...]:
        """The draws that each replay has to make again, beside graphs on a device.

        Raises:
            CaptureError: one of them is used.
        """
        if not is_foreign(torch.default_generator, device):
            return ()
        if self.used():
            raise drawn_from(f"a generator on the {torch.default_generator.device}")
        return tuple(self.made)


class UsesOf(TorchFunctionMode):
    """Notes uses that no operation shows, such as `tolist()`.

    PyTorch takes other ways through some modules under it, as under `first_use.RawAccess`.
    """

    def __init__(self, draws: HostDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._draws.use((args, kwargs))
        return func(*args, **(kwargs or {}))


class DrawingRecording:
    """A recording with draws on the host that are made again at each replay."""

    def __init__(self, recording: Recording, draws: Sequence[Draw]) -> None:
        self.order = recording.order
        self._recording = recording
        self._draws = draws

    @property
    def name(self) -> str:
        """As the recording's."""
        return self._recording.name

    @name.setter
    def name(self, value: str) -> None:
        self._recording.name = value

    @property
    def nodes(self) -> int:
        """As the recording's."""
        return self._recording.nodes

    @property
    def external(self) -> list[torch.UntypedStorage]:
        """As the recording's."""
        return self._recording.external

    @property
    def drawn_beside(self) -> Recording:
        """The recording itself, without the draws."""
        return self._recording

    def inspect(self) -> tuple[list[Node], list[int]]:
        """As the recording's."""
        return self._recording.inspect()

    def dump(self, path: Path) -> None:
        """As the recording's."""
        self._recording.dump(path)

    def timed(self, nodes: Sequence[Node]) -> list[Node] | None:
        """As the recording's."""
        return self._recording.timed(nodes)

    def replay(self) -> None:
        """Replay and draw."""
        self._recording.replay()
        repeat(self._draws)

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Run and draw."""
        self._recording.run(sources, targets)
        repeat(self._draws)

    def close(self) -> None:
        """Close the recording."""
        self._recording.close()


@contextlib.contextmanager
def generator_kept(draws: Sequence[Draw]) -> Iterator[None]:
    """Put the host's generator back after runs that make such draws."""
    state = torch.default_generator.get_state() if draws else None
    try:
        yield
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def draw_others(draws: Sequence[Draw]) -> None:
    """Have the next run that makes such draws get other numbers: what depends on them differs."""
    if draws:
        torch.default_generator.manual_seed(OTHER_SEED)


def repeat(draws: Sequence[Draw]) -> None:
    """Make draws again."""
    for draw in draws:
        draw.again()
