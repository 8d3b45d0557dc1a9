"""Ways to call a compiled model: captured as a graph, on one stream or on several."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from ..calls.split import Args, Kwargs
from ..errors import StrategyFailed, in_words, levels_above
from ..graphs.capture import capture
from ..graphs.captured_call import CapturedCall
from .base import AVAILABLE, Availability, Built, Runner, tiny_model

# How many streams independent operations are captured on.
STREAMS = 4


def _probe(device: torch.device) -> Availability:
    if device.type != "cuda":
        # The CPU recorder repeats the same operations one by one: it is there to test with.
        return Availability(False, "CUDA graphs need a GPU", "Run on a GPU.")
    model, x = tiny_model(device)
    with capture(model, x) as graph:
        graph(x)
    return AVAILABLE


def _wrap(built: Built, args: Args, kwargs: Kwargs) -> Built:
    graph = CapturedCall(
        built.call,
        args,
        kwargs,
        breaks="auto" if built.plain else "never",
        trusted=_is_trusted(built),
    )
    return _wrapped(built, graph)


def _wrap_on_streams(built: Built, args: Args, kwargs: Kwargs) -> Built:
    graph = CapturedCall(built.call, args, kwargs, streams=STREAMS, trusted=_is_trusted(built))
    made = _wrapped(built, graph)
    branches = graph.branches
    if branches < 2:
        graph.close()
        raise StrategyFailed(
            "its operations are one chain: there is nothing to run side by side",
            remedy="Use graph.",
        )
    return replace(made, notes=[*made.notes, f"captured on {branches} streams"])


def _is_trusted(built: Built) -> bool:
    """Whether all that it reads is looked at already.

    What was built of the model holds constants of its own, and its owner watches the model.
    """
    return built.self_contained or not built.plain


def _wrapped(built: Built, graph: CapturedCall) -> Built:
    """Warm a call up, capture it, and call it by its graph."""
    graph.warm()
    if graph.places:
        names = ", ".join(place.name for place in graph.places)
        graph.close()
        raise StrategyFailed(
            f"each call sets {names}, which what is tuned would take for a change of the model; "
            "graphwright.graph() sets it after each replay"
        )
    graph.record()

    warned: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        # The caller has checked that the call fits.
        result = graph.run(args, kwargs)
        if graph.given_up is not None and not warned:
            warned.append(in_words(graph.given_up)[0])
            warnings.warn(
                f"{graph.name} runs eagerly by now: {warned[0]}",
                RuntimeWarning,
                stacklevel=levels_above(),
            )
        return result

    notes = [*built.notes, *_segments(graph)]
    # A part inside of the model may have been captured with copies of weights.
    holds = built.holds_weights or bool(graph.parts.names)
    return Built(
        call,
        notes,
        holds,
        graph.launcher(),
        save=built.save,
        inner=built,
        self_contained=graph.tree is None,  # Between segments, the model's Python runs.
        depends=graph.parts if graph.parts.watches or graph.tree is not None else None,
    )


def _segments(graph: CapturedCall) -> list[str]:
    """A note on a call that is not a single graph."""
    if graph.tree is None:
        return []
    first = graph.tree.root
    stop = None if first is None else first.break_
    where = "" if stop is None or stop.place is None else f", first at {stop.place}"
    return [f"in segments, divided where values are read{where}"]


GRAPH = Runner("graph", 5, _probe, _wrap)
GRAPH_STREAMS = Runner("graph:streams", 6, _probe, _wrap_on_streams)
