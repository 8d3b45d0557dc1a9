"""check(): find what keeps a call from being captured, with the line and the fix of each obstacle.

It runs the call and captures nothing; capturing belongs to graphs. Begin with checker; obstacles
lists everything that can be found.
"""

from .checker import check as check
from .finding import Finding as Finding
from .finding import Place as Place
from .finding import Severity as Severity
from .report import CheckReport as CheckReport
