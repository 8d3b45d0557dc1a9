"""Models that are spread over several processes, which are refused."""

from __future__ import annotations

from torch import nn

from ..errors import CaptureError

# What talks to other GPUs around forward and backward, by name, so that none has to be imported.
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
    """Refuse what talks to other GPUs around forward and backward.

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
