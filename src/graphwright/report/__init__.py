"""Results as data, and how they are shown and saved; nothing is decided here.

Begin with result, then report and terminal.
"""

from .report import Report as Report
from .result import Row as Row
from .result import Status as Status
