"""graphwright: make PyTorch models fast on the machine they run on, and prove them still right.

Importing it does no GPU work.
"""

import pathlib
import sys
import typing

from ._version import __version__ as __version__


def _is_command() -> bool:
    """Whether this process is the command line, whose help and version need no PyTorch."""
    program = "".join(getattr(sys, "argv", ())[:1])
    if program == "-m":  # The module to run is being looked for.
        return not {"graphwright", "-mgraphwright"}.isdisjoint(sys.orig_argv)
    return pathlib.Path(program).stem == "graphwright"


if typing.TYPE_CHECKING or not _is_command():
    from ._public import *
else:

    def __getattr__(name: str) -> typing.Any:
        """A public name; the first one that is asked for imports them all."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import _public

        globals().update({each: getattr(_public, each) for each in __all__ if each[0] != "_"})
        return globals()[name]


__all__ = [
    "Accelerated",
    "ArtifactError",
    "BackgroundModule",
    "Buckets",
    "CaptureError",
    "Decoded",
    "Diagnosis",
    "Extension",
    "ExtensionError",
    "FallbackWarning",
    "Finding",
    "FusedModule",
    "Graph",
    "GraphedCallable",
    "GraphedGenerator",
    "GraphedModule",
    "GraphedStep",
    "GraphwrightError",
    "MemoryBudgetExceeded",
    "MemoryPool",
    "ModelConfig",
    "ModelFailed",
    "Node",
    "Nodes",
    "OptionError",
    "PaddingError",
    "Prefetcher",
    "Profile",
    "ProgramInspection",
    "Report",
    "SignatureError",
    "StrategyFailed",
    "TargetError",
    "TunedModule",
    "VerificationError",
    "__version__",
    "accelerate",
    "capture",
    "capturing",
    "check",
    "decode",
    "diagnose",
    "extension",
    "fuse",
    "graph",
    "graph_generate",
    "graph_step",
    "inspect",
    "load",
    "make_graphed_callables",
    "predict_memory",
    "prefetch",
    "profile",
    "save",
    "serve",
    "triton_op",
    "tune",
]


def __dir__() -> list[str]:
    """The public names: the modules that they come from are left out."""
    return [*__all__]
