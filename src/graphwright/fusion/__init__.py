"""fuse(): passes over a model's graph that leave fewer kernels, each verified.

passes/ has one subject per file; pass_manager runs and verifies them. Kernels belong to ops. Begin
with fused_module, then pass_manager and passes/base.
"""

from .fused_module import FusedModule as FusedModule
from .fused_module import fuse as fuse
from .pass_manager import PASSES as PASSES
from .pass_manager import Fused as Fused
from .pass_manager import Region as Region
from .pass_manager import fused_call as fused_call
from .passes.base import Change as Change
from .passes.base import Pass as Pass
from .passes.base import PassResult as PassResult
