"""Python's garbage collector beside what is timed: held off, or passing over old objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from ..calls.modes import SharedSwitch


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Keep Python's garbage collector from running inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def collection_held_off() -> Iterator[None]:
    """Collect Python's garbage now, and not again inside the block."""
    gc.collect()
    with garbage_collection_off():
        yield


def _freeze() -> Callable[[], object]:
    if gc.get_freeze_count():  # The program has frozen what it wants frozen.
        return lambda: None
    gc.collect()
    gc.freeze()
    return gc.unfreeze


# While it is thrown, collections pass over all objects that were there before: torch's alone are
# hundreds of thousands, and each figure of memory takes a collection or two.
OLD_OBJECTS_FROZEN = SharedSwitch(_freeze)
