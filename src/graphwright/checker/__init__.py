"""check(): what keeps a call from being captured, at which line, and the mend.

It runs the call and captures nothing. Begin with checker; obstacles lists what can be found.
"""

from .checker import check as check
from .finding import Finding as Finding
from .finding import Place as Place
from .finding import Severity as Severity
