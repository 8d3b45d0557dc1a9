"""How a program is run on a sample call, where nobody says how, and again in the same way.

A SentenceTransformer is run by its `encode`; what else can be called is called, such as pipelines
of transformers and diffusers. None of these libraries is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..calls.introspection import without_answers

Run = Callable[[Any, Any], Any]
ENCODE = "encode"
# Where diffusers keeps how its pipelines show progress.
_BARS = "_progress_bar_config"


def is_sentence_transformer(program: object) -> bool:
    """Whether something is a SentenceTransformer, whatever is installed on it."""
    return _is_a(program, "sentence_transformers", "SentenceTransformer")


def _is_a(program: object, package: str, name: str) -> bool:
    """Whether something is of a package's class, which is not imported for that."""
    return any(
        each.__name__ == name and each.__module__.partition(".")[0] == package
        for each in without_answers(type(program)).__mro__
    )


def run_of(program: object, run: Run | None) -> Run:
    """What runs a program on a call, as its user says or as such programs are run.

    Generators of random numbers that a call holds are at the same place after each run as before
    it: runs of one call draw the same numbers. Pipelines of diffusers show no bars.
    """
    chosen = run
    if chosen is None:
        chosen = _encoded if is_sentence_transformer(program) else call_as_given

    def again(program: Any, call: Any) -> Any:
        states = [(each, each.get_state()) for each in _generators_in(call)]
        try:
            with _without_bars(program):
                return chosen(program, call)
        finally:
            for generator, state in states:
                generator.set_state(state)

    return again


def call_as_given(program: Any, call: Any) -> Any:
    """Call a program as a sample says."""
    if isinstance(call, tuple):
        return program(*call)
    if isinstance(call, Mapping):
        return program(**call)
    return program(call)


def _encoded(program: Any, call: Any) -> Any:
    return call_as_given(getattr(program, ENCODE), call)


@contextlib.contextmanager
def _without_bars(program: object) -> Iterator[None]:
    """A pipeline of diffusers shows no progress of its own: ours is shown, and it runs often."""
    if not _is_a(program, "diffusers", "DiffusionPipeline"):
        yield
        return
    configure: Any = getattr(program, "set_progress_bar_config")  # noqa: B009  # not of objects
    before = dict(getattr(program, _BARS, {}))
    configure(**{**before, "disable": True})
    try:
        yield
    finally:
        configure(**before)


def _generators_in(call: Any, seen: frozenset[int] = frozenset()) -> Iterator[torch.Generator]:
    """The generators in a call, in lists, tuples and dictionaries, too."""
    if isinstance(call, torch.Generator):
        yield call
    elif isinstance(call, Mapping | list | tuple) and id(call) not in seen:
        for each in call.values() if isinstance(call, Mapping) else call:
            yield from _generators_in(each, seen | {id(call)})
