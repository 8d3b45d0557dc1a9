"""graph(): answer each call by the graph for its signature or bucket, else run it eagerly.

This room caches graphs, decides when to capture, and counts how calls went. Why a call is eager is
in decision, and what becomes of it in fallback: all that answers calls uses these two. How a graph
is recorded belongs to graphs; padding and its proof belong to shapes. What others ask of whatever
answers calls is in answerer. Begin with graphed_callable.
"""

from .graphed_callable import GraphedCallable as GraphedCallable
from .graphed_module import GraphedModule as GraphedModule
from .graphed_module import graph as graph
from .statistics import BucketStatistics as BucketStatistics
from .statistics import CallStatistics as CallStatistics
