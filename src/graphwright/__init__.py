"""graphwright: make PyTorch models fast on the machine they run on, and prove them still right.

Importing it does no GPU work.
"""

from ._version import __version__ as __version__
from .errors import CaptureError as CaptureError
from .errors import GraphwrightError as GraphwrightError
from .errors import ModelFailed as ModelFailed
from .errors import OptionError as OptionError
from .errors import SignatureError as SignatureError
from .errors import StrategyFailed as StrategyFailed
from .errors import TargetError as TargetError
from .errors import VerificationError as VerificationError
from .report import Report as Report
from .tuned import TunedModule as TunedModule
from .tuner import tune as tune

__all__ = [
    "CaptureError",
    "GraphwrightError",
    "ModelFailed",
    "OptionError",
    "Report",
    "SignatureError",
    "StrategyFailed",
    "TargetError",
    "TunedModule",
    "VerificationError",
    "__version__",
    "tune",
]
