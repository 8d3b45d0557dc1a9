"""Results as data, tables, Markdown and JSON, and progress on a terminal; nothing is decided here.

Measuring belongs to evaluation, choosing to tuning. Begin with result, then report and terminal.
"""

from .report import Report as Report
from .result import Row as Row
from .result import Status as Status
