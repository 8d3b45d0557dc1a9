"""Hand-written operators: the user's own C++, CUDA and Triton as operators of PyTorch, and ours."""

from .activations import bias_gelu as bias_gelu
from .activations import bias_silu as bias_silu
from .activations import channel_activation as channel_activation
from .activations import swiglu as swiglu
from .channels import channel_gate as channel_gate
from .channels import channel_mean as channel_mean
from .channels import to_channels_last as to_channels_last
from .compiled import compile_for_cpu as compile_for_cpu
from .depthwise import depthwise_conv2d as depthwise_conv2d
from .extension import Extension as Extension
from .extension import extension as extension
from .norms import add_layer_norm as add_layer_norm
from .norms import add_rms_norm as add_rms_norm
from .norms import layer_norm as layer_norm
from .operator import Function as Function
from .operator import Operator as Operator
from .pooling import relu_max_pool2d as relu_max_pool2d
from .softmax import masked_softmax as masked_softmax
from .triton_operator import triton_op as triton_op
