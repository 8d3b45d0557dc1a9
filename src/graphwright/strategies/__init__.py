"""The candidates of tune(): a file for each compiler, and one each for rewrites and runners.

Choosing among them belongs to tuning. Begin with base, which says what a strategy is, then
registry, which lists them.
"""

from .base import Availability as Availability
from .base import Built as Built
from .base import Candidate as Candidate
from .base import Compiler as Compiler
from .base import Rewrite as Rewrite
from .base import Rewritten as Rewritten
from .base import Runner as Runner
from .base import probe as probe
from .registry import COMPILERS as COMPILERS
from .registry import default_candidates as default_candidates
from .registry import is_ours as is_ours
from .registry import parse_candidates as parse_candidates
