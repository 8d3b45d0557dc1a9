"""What answers calls, as serving and the command line ask it, whichever function has made it.

What `graph`, `fuse`, `tune` and `load` return names its answerer; nobody else knows their classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..calls.introspection import StandIn, named_answerer

if TYPE_CHECKING:
    # Symbolic shapes take a second to import.
    from ..shapes.buckets import Buckets
    from ..shapes.padding import Value


@dataclass(frozen=True)
class SizesAnswered:
    """Which calls are answered by what was made, rather than by the model.

    Attributes:
        all_sizes: whether calls of any sizes are.
        samples: the calls that it was made for; empty if it was made for none in particular.
        argument_names: of the leaves of a call, where there is no model to ask; else None.
        pads: the pad value of each leaf of a call; empty if they are not known.
        buckets: the sizes that calls are padded to; None where none are named.
        dynamic_shapes: as for `graph()`, of these buckets.
        pad: likewise.
    """

    all_sizes: bool = False
    samples: Sequence[Any] = ()
    argument_names: Sequence[str] | None = None
    pads: Sequence[Value] = ()
    buckets: Buckets | None = None
    dynamic_shapes: Any = None
    pad: Any = None


class Answerer(Protocol):
    """What answers the calls of something that graphwright has made."""

    def counts(self) -> Counter[str]:
        """How many calls went which way; `eager: ` stands before why a call was eager."""

    def explain(self) -> str:
        """What runs now and why, and how the calls went so far."""

    def reference(self) -> Callable[..., Any] | None:
        """What computes a call of any sizes as the model does; None if there is no model."""

    def sizes(self) -> SizesAnswered:
        """Which calls are answered by what was made."""


def answerer_of(made: Any) -> Answerer | None:
    """What answers the calls of something that graphwright has made; None for anything else."""
    found: Answerer | None = named_answerer(made) if isinstance(made, StandIn) else None
    return found
