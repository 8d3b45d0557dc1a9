"""graph_generate() and decode(): loops that make one token after another, as a few graphs.

launches.py runs any step, several times in one graph. decoding.py does so for a step function of
one's own; generator.py for models of transformers: their prompts and first tokens go through
eager_loop.py, all others through decode_steps.py, on the static tensors of decoder.py and
static_cache.py; step_ways.py and attention_pass.py give them other kernels, and step_trial.py says
which may run. Capturing belongs to dispatch. Begin with launches, then generator.
"""

from .decoding import Decoded as Decoded
from .decoding import decode as decode
from .generator import GraphedGenerator as GraphedGenerator
from .generator import graph_generate as graph_generate
