"""Capturing a call and replaying it: capture(), the recorders, memory pools, calls in segments.

Two recorders meet one contract: cuda/ makes CUDA graphs, cpu/ tapes of operations. A transaction
around each capture undoes one that fails; segments/ holds calls that one graph cannot; parts is
what a capture runs of fused and tuned modules inside of it. Which call is captured when, and which
graph answers it, belong to dispatch. Begin with capture, then captured_call and transaction.
"""

from .graph import Graph as Graph
from .memory import GraphMemory as GraphMemory
from .memory import MemoryPool as MemoryPool
from .memory import MemoryPrediction as MemoryPrediction
