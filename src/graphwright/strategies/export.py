"""A model as a function from tensors to tensors, as tracers and exporters need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ..calls.objects import flatten_result
from ..calls.serialization import TreeTemplate
from ..calls.split import Args, Kwargs, flatten
from ..errors import StrategyFailed, user_frame
from ..shapes.dimensions import Dimensions, named


class Flat(nn.Module):
    """A model from tensors to tensors; after a call, `out` is the tree of its results."""

    def __init__(self, model: nn.Module, call: TreeTemplate) -> None:
        super().__init__()
        self.training = False  # eval() would reach into the user's own submodules.
        self.model = model
        self.call = call
        self.out: TreeTemplate | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.call.fill(tensors)
        leaves, spec = flatten_result(self.model(*args, **kwargs))
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            raise StrategyFailed("an output is a number that depends on a dynamic size")
        self.out = TreeTemplate.of(leaves, spec)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def dims_of(
    dynamic_shapes: Any, model: nn.Module, args: Args, kwargs: Kwargs
) -> list[dict[int, Any]] | None:
    """For each tensor of a call, its dynamic dimensions as torch.export takes them; None for none.

    `dynamic_shapes` mirrors the call's arguments with `torch.export.Dim`s.

    Raises:
        OptionError: it makes no sense.
        SignatureError: the call does not have these dimensions.
    """
    if dynamic_shapes is None:
        return None
    dimensions = Dimensions(model, named(dynamic_shapes), dynamic_shapes)
    dims = {
        name: Dim(name, min=bounds.low, max=bounds.high)
        for name, bounds in dimensions.bounds.items()
    }
    leaves, _ = flatten(args, kwargs)
    return [
        {axis: size.factor * dims[size.name] + size.offset for axis, size in axes.items()}
        for axes, leaf in zip(dimensions.axes(args, kwargs), leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]


def exported(
    flat: Flat, samples: Sequence[torch.Tensor], dims: list[dict[int, Any]] | None
) -> ExportedProgram:
    """The model's graph, which answers all sizes of the dimensions that are to be dynamic.

    Raises:
        StrategyFailed: there is none, since it goes by such a size.
        Exception: torch.export's own, where there is no graph at all.
    """
    shapes = None if dims is None else {"tensors": tuple(dims)}
    try:
        return torch.export.export(flat, tuple(samples), dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError as error:
        reasons = [line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")]
        if not reasons:
            raise
        raise StrategyFailed(
            "the model's code depends on a size that is declared dynamic: "
            f"{reasons[0].split('. ')[0]}",
            where=user_frame(error),
            remedy="Leave it out of dynamic_shapes, or write the model for any size.",
        ) from error
