"""Feeding the device: prefetch() loads and copies batches ahead.

What runs a model belongs to dispatch. Begin with prefetch.
"""

from .prefetch import Prefetcher as Prefetcher
from .prefetch import prefetch as prefetch
