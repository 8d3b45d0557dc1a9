"""called(): what takes long is done beside the event loop, which has others to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

# Bytes that are read or written one element at a time within a millisecond or two.
SMALL = 64 * 1024

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def called(
    here: bool,
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """A function's result; called in a thread if the loop is not to wait for it."""
    if here:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
