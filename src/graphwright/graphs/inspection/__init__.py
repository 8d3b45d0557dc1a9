"""What a captured graph consists of: its nodes as data, and as a table, JSON, DOT and SVG.

The recorders read their own graphs (cuda/reading, cpu/reading); what is here knows neither. Begin
with node; origins tells which operation, module and line a node came from.
"""

from .node import Node as Node
from .nodes import Nodes as Nodes
