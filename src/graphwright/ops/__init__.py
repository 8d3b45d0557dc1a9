"""Hand-written operators: the user's own C++, CUDA and Triton as operators of PyTorch, and ours."""

from .extension import Extension as Extension
from .extension import extension as extension
from .operator import Function as Function
from .operator import Operator as Operator
from .triton_operator import triton_op as triton_op
