"""Finding what keeps a call from being captured: check(), each obstacle with its line and its fix.

It runs the call and captures nothing; capturing belongs to graphs. Begin with checker; obstacles
lists what can be found.
"""

from .checker import check as check
from .finding import Finding as Finding
from .finding import Place as Place
from .finding import Severity as Severity
