"""FLOPs of operators that hold several products are those of the products one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from test_profile import shorten
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import graphwright as gw
from graphwright.profiler.flops import formulas, holds_products
from graphwright.profiler.observation import ObservedOperation, WorkObserver


@pytest.fixture(autouse=True)
def quick_profile(monkeypatch: pytest.MonkeyPatch, quick: None, one_thread: None) -> None:
    shorten(monkeypatch)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def observed(call: Callable[[], object]) -> list[ObservedOperation]:
    observer = WorkObserver({})
    with torch.no_grad(), observer:
        call()
    return [operation for operation in observer.operations if operation.flops]


def counted(call: Callable[[], object]) -> int:
    """By PyTorch's own counter, with every operator taken to pieces."""
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns where its own flags are set.
        whole = torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-untyped-call]
        with whole, sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), counter:
            call()
    return int(counter.get_total_flops())


X = torch.randn(3, 7, 16)
ATTENTION = nn.MultiheadAttention(16, 2, batch_first=True).eval()
FUSED = {
    "_transformer_encoder_layer_fwd": (encoder(), (X,)),
    "_native_multi_head_attention": (lambda x: ATTENTION(x, x, x, need_weights=False), (X,)),
    "_scaled_dot_product_flash_attention_for_cpu": (
        nn.functional.scaled_dot_product_attention,
        (torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)),
    ),
    "mkldnn_rnn_layer": (nn.LSTM(16, 8, 2, bidirectional=True).eval(), (X,)),
}


@pytest.mark.parametrize("name", FUSED)
def test_products_inside_of_one_operator_are_counted(name: str) -> None:
    model, args = FUSED[name]
    found = observed(lambda: model(*args))
    assert {operation.name for operation in found} == {f"aten::{name}"}
    assert sum(operation.flops or 0 for operation in found) == counted(lambda: model(*args))


def test_a_recurrent_network_of_cudnn_counts_all_its_layers() -> None:
    lstm = nn.LSTM(16, 8, 2, bidirectional=True)
    weights = [weight for group in lstm.all_weights for weight in group]
    found = formulas()[torch.ops.aten._cudnn_rnn](X, weights, 4, None, None, None, 2, 8, 0, 2)
    assert found == counted(lambda: lstm(X))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sequences_in_a_nested_tensor_count_by_their_own_lengths() -> None:
    model, lengths = encoder(), [7, 4, 2]
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    found = observed(lambda: model(X, src_key_padding_mask=padding))
    alone = sum(counted(lambda n=n: model(X[:1, :n])) for n in lengths)
    assert sum(operation.flops or 0 for operation in found) == alone


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padded_encoder_is_profiled() -> None:
    padding = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    found = gw.profile(encoder(), (X,), {"src_key_padding_mask": padding})
    assert "aten::_transformer_encoder_layer_fwd" in str(found.to_dict())


def test_the_products_of_a_float32_transformer_are_seen() -> None:
    found = gw.profile(encoder(), (X,))
    why = found.remedy("bf16").why
    assert "no products" not in why
    assert "products timed one by one" in why or "_transformer_encoder_layer_fwd" in why


def test_other_operators_hold_no_hidden_products() -> None:
    assert holds_products("aten::_transformer_encoder_layer_fwd")
    assert not holds_products("aten::addmm")
    assert not holds_products("other::_cudnn_rnn")
