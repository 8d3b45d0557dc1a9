"""Dynamic sizes: buckets, padding, and the proof that padding changes nothing.

Which sizes occur, which buckets suit them best, how inputs are padded and outputs sliced. Graphs
and their memory belong to graphs. Begin with buckets, then family and proof.
"""

from .buckets import Buckets as Buckets
from .buckets import SizesSeen as SizesSeen
