"""Answering calls: graph() finds a graph for each call by signature and bucket, else goes eager.

It keeps the graphs, decides when to capture, and counts how calls went. How a graph is recorded
belongs to graphs, padding and its proof to shapes. Begin with graphed_callable.
"""

from .graphed_callable import GraphedCallable as GraphedCallable
from .graphed_module import GraphedModule as GraphedModule
from .graphed_module import graph as graph
from .statistics import BucketStatistics as BucketStatistics
from .statistics import CallStatistics as CallStatistics
