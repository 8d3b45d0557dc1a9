"""graphwright: make PyTorch models fast on the machine they run on, and prove them still right.

Importing it does no GPU work.
"""

from ._version import __version__ as __version__
from .artifacts import load as load
from .artifacts import save as save
from .checker import Finding as Finding
from .checker import Severity as Severity
from .checker import check as check
from .dispatch import GraphedCallable as GraphedCallable
from .errors import ArtifactError as ArtifactError
from .errors import CaptureError as CaptureError
from .errors import ExtensionError as ExtensionError
from .errors import GraphwrightError as GraphwrightError
from .errors import MemoryBudgetExceeded as MemoryBudgetExceeded
from .errors import ModelFailed as ModelFailed
from .errors import OptionError as OptionError
from .errors import PaddingError as PaddingError
from .errors import SignatureError as SignatureError
from .errors import StrategyFailed as StrategyFailed
from .errors import TargetError as TargetError
from .errors import VerificationError as VerificationError
from .fusion import FusedModule as FusedModule
from .fusion import fuse as fuse
from .graphed import GraphedModule as GraphedModule
from .graphed import graph as graph
from .graphs.capture import capture as capture
from .graphs.capture import capturing as capturing
from .graphs.graph import Graph as Graph
from .graphs.memory import GraphMemory as GraphMemory
from .graphs.memory import MemoryPool as MemoryPool
from .graphs.memory import Prediction as Prediction
from .ops import Extension as Extension
from .ops import extension as extension
from .ops import triton_op as triton_op
from .report import Report as Report
from .shapes.buckets import Buckets as Buckets
from .shapes.buckets import SizesSeen as SizesSeen
from .tally import BucketStatistics as BucketStatistics
from .tally import GraphStatistics as GraphStatistics
from .training import GraphedStep as GraphedStep
from .training import StepStatistics as StepStatistics
from .training import graph_step as graph_step
from .training import make_graphed_callables as make_graphed_callables
from .tuned import TunedModule as TunedModule
from .tuner import tune as tune

__all__ = [
    "ArtifactError",
    "BucketStatistics",
    "Buckets",
    "CaptureError",
    "Extension",
    "ExtensionError",
    "Finding",
    "FusedModule",
    "Graph",
    "GraphMemory",
    "GraphStatistics",
    "GraphedCallable",
    "GraphedModule",
    "GraphedStep",
    "GraphwrightError",
    "MemoryBudgetExceeded",
    "MemoryPool",
    "ModelFailed",
    "OptionError",
    "PaddingError",
    "Prediction",
    "Report",
    "Severity",
    "SignatureError",
    "SizesSeen",
    "StepStatistics",
    "StrategyFailed",
    "TargetError",
    "TunedModule",
    "VerificationError",
    "__version__",
    "capture",
    "capturing",
    "check",
    "extension",
    "fuse",
    "graph",
    "graph_step",
    "load",
    "make_graphed_callables",
    "save",
    "triton_op",
    "tune",
]
