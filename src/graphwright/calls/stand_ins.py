"""StandIn: what stands for a module or function, and computes the same."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Stands for a module or function, and computes the same results in another way.

    Attributes:
        _graphwright_trains: whether what was gained counts for training too.
    """

    __slots__ = ()
    _graphwright_trains = True

    @property
    def _graphwright_stands_for(self) -> Any:
        raise NotImplementedError
