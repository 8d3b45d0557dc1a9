"""Training with graphs: a whole step (step/), or forward and backward of parts (callables/).

Inference belongs to dispatch, recording to graphs. Begin with step/graphed_step or
callables/graphed_callables.
"""

from .callables.graphed_callables import make_graphed_callables as make_graphed_callables
from .callables.graphed_forward import TrainingCallStatistics as TrainingCallStatistics
from .step.graphed_step import GraphedStep as GraphedStep
from .step.graphed_step import StepStatistics as StepStatistics
from .step.graphed_step import graph_step as graph_step
