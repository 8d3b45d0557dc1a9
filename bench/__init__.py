"""The benchmarks of graphwright, a folder for each. Run by `python -m bench NAME`.

cases has the reference models, common/ what several benchmarks share, results/ the figures that
docs/ shows.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# Models of examples/ and tests/support/ are benchmarked too, and are imported by their bare names.
for _folder in ("examples", "tests/support"):
    if str(_ROOT / _folder) not in sys.path:
        sys.path.insert(0, str(_ROOT / _folder))
