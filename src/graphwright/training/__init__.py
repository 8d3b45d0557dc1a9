"""Training under graphs: the whole step, or forward and backward of parts of it."""

from .callables import make_graphed_callables as make_graphed_callables
from .step import GraphedStep as GraphedStep
from .step import StepStatistics as StepStatistics
from .step import graph_step as graph_step
