"""What the environment says to graphwright: variables of its own, and the folder of its caches.

Variables of others are read where they matter.
"""

from __future__ import annotations

import os
from pathlib import Path

# The folder of all caches; by default the user's cache directory.
CACHE_DIR = "GRAPHWRIGHT_CACHE_DIR"
# Marks the processes that candidates run in.
CANDIDATE = "GRAPHWRIGHT_CANDIDATE"
# "0" turns the checks in C++ off.
COMPILED_CHECKS = "GRAPHWRIGHT_COMPILED_CHECKS"
# "1" puts NVTX ranges around replays.
NVTX = "GRAPHWRIGHT_NVTX"


def cache_folder(name: str) -> Path:
    """The folder of one cache: under $GRAPHWRIGHT_CACHE_DIR, else in the user's cache directory."""
    if chosen := os.environ.get(CACHE_DIR):
        return Path(chosen).expanduser() / name
    import platformdirs  # Needed only when something is kept.

    return platformdirs.user_cache_path("graphwright") / name


def is_on(variable: str, *, by_default: bool) -> bool:
    """Whether a variable turns something on: "1", or anything but "0" by default."""
    value = os.environ.get(variable)
    return value != "0" if by_default else value == "1"
