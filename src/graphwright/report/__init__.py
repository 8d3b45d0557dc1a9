"""Results: what a run found, and how it is shown and saved."""

from .result import Report as Report
from .result import Row as Row
from .result import Status as Status
