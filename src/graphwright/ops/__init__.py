"""Hand-written operators: yours in C++, CUDA and Triton (custom/), ours with kernels (fused/).

Rewriting a model to use them belongs to fusion. Begin with custom/extension or fused/registry.
"""

from .custom.extension import Extension as Extension
from .custom.extension import extension as extension
from .custom.operator import Function as Function
from .custom.operator import Operator as Operator
from .custom.triton_operator import triton_op as triton_op
from .fused.activations import bias_gelu as bias_gelu
from .fused.activations import bias_silu as bias_silu
from .fused.activations import channel_activation as channel_activation
from .fused.activations import swiglu as swiglu
from .fused.channels import channel_gate as channel_gate
from .fused.channels import channel_mean as channel_mean
from .fused.channels import to_channels_last as to_channels_last
from .fused.cpu_kernels import compile_for_cpu as compile_for_cpu
from .fused.depthwise import depthwise_conv2d as depthwise_conv2d
from .fused.norms import add_layer_norm as add_layer_norm
from .fused.norms import add_rms_norm as add_rms_norm
from .fused.norms import layer_norm as layer_norm
from .fused.pooling import relu_max_pool2d as relu_max_pool2d
from .fused.softmax import masked_softmax as masked_softmax
