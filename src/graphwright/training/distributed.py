"""Refusing models that are spread over several GPUs."""

from __future__ import annotations

from torch import nn

from ..errors import CaptureError

# Classes that communicate with other GPUs; by name, so that none has to be imported.
_DISTRIBUTED = frozenset(
    {
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "FSDPModule",
        "DTensor",
    }
)


def refuse_distributed(module: nn.Module) -> None:
    """Refuse a module that communicates with other GPUs around forward and backward.

    Raises:
        CaptureError: a module is wrapped for several GPUs, or a parameter is divided among them.
    """
    for path, part in (*module.named_modules(), *module.named_parameters()):
        kinds = [cls for cls in type(part).__mro__ if cls.__module__.startswith("torch.")]
        kind = next((cls.__name__ for cls in kinds if cls.__name__ in _DISTRIBUTED), None)
        if kind is not None:
            raise CaptureError(
                f"{kind}{f' ({path})' if path else ''} talks to other GPUs around forward and "
                "backward, which graphwright does not capture so far.",
                remedy="Train the plain module on one GPU, or graph parts of it that need no "
                "communication.",
            )
