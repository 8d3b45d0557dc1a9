"""`python -m graphwright.cli.ray_task_main PARENT WORD…`: the command, ended with its parent.

A task of `tune --ray` runs it; words are those of the command line.
"""

from __future__ import annotations

import signal
import sys

from ..processes.linux import end_with_parent
from .main import main

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    main(sys.argv[2:], prog_name="graphwright")
