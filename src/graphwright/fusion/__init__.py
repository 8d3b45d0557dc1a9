"""fuse(): passes that make a model's kernels fewer and fatter, each proved."""

from .fusing import PASSES as PASSES
from .fusing import Fused as Fused
from .fusing import Region as Region
from .fusing import fused_call as fused_call
from .module import FusedModule as FusedModule
from .module import fuse as fuse
from .passes import Change as Change
from .passes import Pass as Pass
from .passes import PassResult as PassResult
