"""The list of our operators: chains of PyTorch's operations in one pass over memory.

Each is torch.ops.graphwright.NAME with a fake implementation and gradients, so torch.compile and
torch.export take it as one node, and a capture as one operation. On CUDA it is a Triton kernel if
Triton is installed and the kernel applies, elsewhere PyTorch's own operations. On the CPU some of
them are C++, once `compile_for_cpu` has built that.
"""

from __future__ import annotations

from .activations import BIAS_GELU, BIAS_SILU, CHANNELS, SWIGLU
from .activations import bias_gelu as bias_gelu
from .activations import bias_silu as bias_silu
from .activations import channel_activation as channel_activation
from .activations import swiglu as swiglu
from .channels import GATE, MEAN, TO_LAST
from .channels import channel_gate as channel_gate
from .channels import channel_mean as channel_mean
from .channels import to_channels_last as to_channels_last
from .depthwise import DEPTHWISE
from .depthwise import depthwise_conv2d as depthwise_conv2d
from .fused_operator import FusedOperator
from .norms import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM
from .norms import add_layer_norm as add_layer_norm
from .norms import add_rms_norm as add_rms_norm
from .norms import layer_norm as layer_norm
from .pooling import POOL
from .pooling import relu_max_pool2d as relu_max_pool2d
from .softmax import MASKED_SOFTMAX
from .softmax import masked_softmax as masked_softmax

OPERATORS: dict[str, FusedOperator] = {
    operator.name: operator
    for operator in (
        LAYER_NORM,
        ADD_LAYER_NORM,
        ADD_RMS_NORM,
        BIAS_GELU,
        BIAS_SILU,
        CHANNELS,
        GATE,
        MEAN,
        TO_LAST,
        DEPTHWISE,
        SWIGLU,
        POOL,
        MASKED_SOFTMAX,
    )
}
