"""FLOPs of operators that hold several products in one, for which PyTorch has no formula.

Formulas are called as those of `torch.utils.flop_counter` are: with the operator's own arguments. A
product of m × k by k × n counts 2·m·k·n; nothing else is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def formulas() -> dict[Any, Callable[..., int]]:
    """PyTorch's own formulas and those of this module, by operator."""
    from torch.utils import flop_counter  # It imports Triton.

    return {**flop_counter.flop_registry, **_by_operator()}


def holds_products(name: str) -> bool:
    """Whether an operator, such as "aten::_cudnn_rnn", holds products that nothing can get at."""
    space, _, short = name.partition("::")
    return space == "aten" and short in _FORMULAS


def _encoder_layer(
    src: torch.Tensor, embed_dim: int, num_heads: int, qkv_weight: Any, *others: Any, **named: Any
) -> int:
    """nn.TransformerEncoderLayer: attention of a sequence to itself, and two linear layers."""
    lengths = _lengths(src)
    hidden: torch.Tensor = others[10]  # ffn_weight_1
    return _attention(lengths, lengths, embed_dim) + 4 * sum(lengths) * hidden.numel()


def _multi_head_attention(
    query: torch.Tensor, key: torch.Tensor, value: Any, embed_dim: int, *others: Any, **named: Any
) -> int:
    return _attention(_lengths(query), _lengths(key), embed_dim)


def _attention(queries: Sequence[int], keys: Sequence[int], width: int) -> int:
    """Projections of queries, keys, values and results, and the two products between them."""
    projected = 2 * sum(queries) + 2 * sum(keys)
    pairs = sum(n * m for n, m in zip(queries, keys, strict=True))
    return 2 * projected * width**2 + 4 * pairs * width


def _lengths(tensor: torch.Tensor) -> list[int]:
    """The lengths of a batch's sequences, which a nested tensor holds one by one."""
    if tensor.is_nested:
        return [int(part.shape[0]) for part in tensor.unbind()]
    return [int(tensor.shape[1])] * int(tensor.shape[0])


def _flash_for_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
) -> int:
    from torch.utils import flop_counter

    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _recurrent_layer(
    given: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor, *others: Any, **named: Any
) -> int:
    steps = given.numel() // int(given.shape[-1])
    return 2 * steps * (of_input.numel() + of_state.numel())


def _recurrent(
    given: torch.Tensor, weights: Sequence[torch.Tensor], *others: Any, **named: Any
) -> int:
    """All layers and directions; biases are no products."""
    steps = given.numel() // int(given.shape[-1])
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


_FORMULAS: Mapping[str, Callable[..., int]] = {
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _multi_head_attention,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
    "mkldnn_rnn_layer": _recurrent_layer,
    "_cudnn_rnn": _recurrent,
    "miopen_rnn": _recurrent,
}


def _by_operator() -> dict[Any, Callable[..., int]]:
    return {getattr(torch.ops.aten, name): formula for name, formula in _FORMULAS.items()}
