"""graphwright: make PyTorch models fast on the machine they run on, and prove them still right.

Importing it does no GPU work.
"""

from ._version import __version__ as __version__
from .artifacts.loading import load as load
from .artifacts.saving import save as save
from .artifacts.tuned_module import TunedModule as TunedModule
from .checker.checker import check as check
from .checker.finding import Finding as Finding
from .data.prefetch import Prefetcher as Prefetcher
from .data.prefetch import prefetch as prefetch
from .diagnosis.diagnosing import diagnose as diagnose
from .diagnosis.result import Diagnosis as Diagnosis
from .dispatch.graphed_callable import GraphedCallable as GraphedCallable
from .dispatch.graphed_module import GraphedModule as GraphedModule
from .dispatch.graphed_module import graph as graph
from .errors import ArtifactError as ArtifactError
from .errors import CaptureError as CaptureError
from .errors import ExtensionError as ExtensionError
from .errors import FallbackWarning as FallbackWarning
from .errors import GraphwrightError as GraphwrightError
from .errors import MemoryBudgetExceeded as MemoryBudgetExceeded
from .errors import ModelFailed as ModelFailed
from .errors import OptionError as OptionError
from .errors import PaddingError as PaddingError
from .errors import SignatureError as SignatureError
from .errors import StrategyFailed as StrategyFailed
from .errors import TargetError as TargetError
from .errors import VerificationError as VerificationError
from .fusion.fused_module import FusedModule as FusedModule
from .fusion.fused_module import fuse as fuse
from .graphs.capture import capture as capture
from .graphs.capture import capturing as capturing
from .graphs.capture import predict_memory as predict_memory
from .graphs.graph import Graph as Graph
from .graphs.inspection.node import Node as Node
from .graphs.inspection.nodes import Nodes as Nodes
from .graphs.memory import MemoryPool as MemoryPool
from .ops.custom.extension import Extension as Extension
from .ops.custom.extension import extension as extension
from .ops.custom.triton_operator import triton_op as triton_op
from .profiler.profile import Profile as Profile
from .profiler.profiler import profile as profile
from .report.report import Report as Report
from .serving.launch import serve as serve
from .serving.model_config import ModelConfig as ModelConfig
from .shapes.buckets import Buckets as Buckets
from .training.callables.graphed_callables import make_graphed_callables as make_graphed_callables
from .training.step.graphed_step import GraphedStep as GraphedStep
from .training.step.graphed_step import graph_step as graph_step
from .tuning.background import BackgroundModule as BackgroundModule
from .tuning.tuner import tune as tune

__all__ = [
    "ArtifactError",
    "BackgroundModule",
    "Buckets",
    "CaptureError",
    "Diagnosis",
    "Extension",
    "ExtensionError",
    "FallbackWarning",
    "Finding",
    "FusedModule",
    "Graph",
    "GraphedCallable",
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
    "Report",
    "SignatureError",
    "StrategyFailed",
    "TargetError",
    "TunedModule",
    "VerificationError",
    "__version__",
    "capture",
    "capturing",
    "check",
    "diagnose",
    "extension",
    "fuse",
    "graph",
    "graph_step",
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
