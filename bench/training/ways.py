"""The ways to a training step that the training benchmark sets beside each other.

A way is made of a task and gives a `Trainer`: a call from a batch to its loss, and the model and
the optimizer of its own behind it. They differ in nothing but what makes them fast.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import graphwright as gw

from ..common.peers import SETTLED
from .cases import Task

Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Trainer:
    """A training step with the model and the optimizer that it works on."""

    step: Step
    model: nn.Module
    optimizer: torch.optim.Optimizer
    # What a reader ought to know of it.
    notes: list[str] = field(default_factory=list)
    # The object behind the step, where there is one to be asked.
    graphed: Any = None

    def start_again(self, weights: Mapping[str, torch.Tensor]) -> None:
        """The first weights and an optimizer that has seen nothing, all in place."""
        self.model.load_state_dict(weights)
        # Zeros are what the optimizers here begin with, a momentum that is not there yet included.
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def eager(task: Task) -> Trainer:
    model = task.copy_of_model()
    return _trainer(task, model, model)


def compiled(task: Task) -> Trainer:
    model = task.copy_of_model()
    return _trainer(task, model, torch.compile(model))


def reduce_overhead(task: Task) -> Trainer:
    model = task.copy_of_model()
    found = _trainer(task, model, torch.compile(model, mode="reduce-overhead"))

    def step(*batch: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return found.step(*batch)

    notes = ["the loss is the graph's own: the next step overwrites it"]
    return Trainer(step, model, found.optimizer, notes)


def torch_make_graphed_callables(task: Task) -> Trainer:
    """torch.cuda's, of the model with its loss; the optimizer stays eager."""
    model = task.copy_of_model()
    # The warm-up of torch's works on the statistics of batch norms: put back by start_again().
    # What it is given becomes its static inputs: later batches are copied over it.
    sample = tuple(tensor.clone() for tensor in task.batches[0])
    torch.cuda.make_graphed_callables(model, sample, allow_unused_input=True)
    found = _trainer(task, model, model)
    return Trainer(
        found.step,
        model,
        found.optimizer,
        [
            "the model with its loss is graphed, the optimizer is not",
            "the loss is the graph's own: the next step overwrites it",
        ],
    )


def make_graphed_callables(task: Task) -> Trainer:
    """graphwright's, in the place of torch.cuda's."""
    model = task.copy_of_model()
    graphed = gw.make_graphed_callables(model, task.batches[0], allow_unused_input=True)
    return _trainer(task, model, graphed)


def graph_step(task: Task) -> Trainer:
    model = task.copy_of_model()
    return _graphed(task, model, model)


def compiled_graph_step(task: Task) -> Trainer:
    model = task.copy_of_model()
    return _graphed(task, model, torch.compile(model))


def _trainer(task: Task, model: nn.Module, loss_of: Step) -> Trainer:
    """A plain training step, whose loss is what `loss_of` says of a batch."""
    optimizer = task.optimizer(model.parameters())

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trainer(step, model, optimizer)


def _graphed(task: Task, model: nn.Module, loss_of: Step) -> Trainer:
    """The plain training step under gw.graph_step."""
    plain = _trainer(task, model, loss_of)
    graphed = gw.graph_step(plain.step, task.batches[0], optimizer=plain.optimizer)
    return Trainer(graphed, model, plain.optimizer, graphed=graphed)


def settle(task: Task, trainer: Trainer) -> None:
    """Steps after which what happens at first calls is over."""
    for number in range(SETTLED + 1):
        trainer.step(*task.batches[number % len(task.batches)])


EAGER = "eager"
PLAIN, FUSED = "graphwright.graph_step", "graphwright.inductor+graph_step"
CALLABLES = "graphwright.make_graphed_callables"
# In the order in which they are set up. Inductor clears cuBLAS's workspaces meanwhile: a graph
# that was captured by torch's own means before would work in memory that is no longer its own.
WAYS: Mapping[str, Callable[[Task], Trainer]] = {
    EAGER: eager,
    "torch.compile": compiled,
    "reduce-overhead": reduce_overhead,
    FUSED: compiled_graph_step,
    PLAIN: graph_step,
    CALLABLES: make_graphed_callables,
    "torch.cuda.make_graphed_callables": torch_make_graphed_callables,
}
COMPILED = ("torch.compile", "reduce-overhead", FUSED)
# The CPU's recorder records operators: it would never come to see compiled kernels.
NEED_CUDA = (FUSED, "reduce-overhead", "torch.cuda.make_graphed_callables")


def left_out(way: str, device: torch.device, without: Container[str] = ()) -> str | None:
    """Why a way is not tried; None where it is. What is in `without` is left out as was asked."""
    if way in without:
        return "left out as was asked"
    if way in NEED_CUDA and device.type != "cuda":
        return "needs a CUDA device"
    needed = {PLAIN: "graph_step", FUSED: "graph_step", CALLABLES: "make_graphed_callables"}
    if way in needed and not hasattr(gw, needed[way]):
        return f"this graphwright has no {needed[way]}"
    return None
