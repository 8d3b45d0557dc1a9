"""A step that is compiled for one token uses our attention, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generating import agree, gpt2, mistral, prompts, without_ends
from torch import fx

import graphwright as gw
from graphwright.generation import step_ways
from graphwright.generation.attention_pass import use_decode_attention
from graphwright.generation.step_ways import GEMV, StepWay

transformers = pytest.importorskip("transformers")

ASKED = {"max_new_tokens": 24, "do_sample": False}
sdpa = torch.nn.functional.scaled_dot_product_attention


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0)
    return without_ends(transformers.T5ForConditionalGeneration(config).eval())


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many attentions of each compiled step were replaced; what is left runs as it is."""
    counts: list[int] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        counts.append(use_decode_attention(graph))
        return graph.forward

    def make(step: Callable[[], None]) -> Any:
        return step_ways._compiled(step, backend=backend)

    monkeypatch.setitem(step_ways.WAYS, GEMV, StepWay(make))
    return counts


@pytest.mark.parametrize(
    ("make", "layers"), [(gpt2, 2), (mistral, 2), pytest.param(t5, 4, marks=pytest.mark.slow)]
)
def test_each_attention_of_a_step_is_replaced(
    make: Callable[[], Any], layers: int, found: list[int]
) -> None:
    torch._dynamo.reset()
    model = make()
    generator = gw.graph_generate(model, strategies=[GEMV])
    asked = prompts(2) | ASKED
    row = generator.tune(**asked).row(GEMV)
    assert row.reason == ""
    assert row.agreement == 1.0
    assert found == [layers]
    agree(model, generator, asked)


def attention(change: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, **change)

    return attend


@pytest.mark.parametrize(
    ("attend", "queries", "count"),
    [
        (attention({}), 1, 1),
        (attention({"scale": 0.5, "enable_gqa": True}), 1, 1),
        (attention({"attn_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)}), 1, 1),
        (attention({"attn_mask": torch.ones(1, 9, dtype=torch.bool)}), 1, 0),
        (attention({"is_causal": True}), 1, 0),
        (attention({"dropout_p": 0.1}), 1, 0),
        (attention({}), 3, 0),
    ],
)
def test_what_computes_something_else_stays(attend: Any, queries: int, count: int) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 4, n, 16) for n in (queries, 9, 9))
    counts = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        counts.append(use_decode_attention(graph))
        return graph.forward

    compiled = torch.compile(lambda *x: attend(*x) + 1, backend=backend)
    torch.manual_seed(0)
    mine = compiled(q, k, v)
    torch.manual_seed(0)
    torch.testing.assert_close(mine, attend(q, k, v) + 1)
    assert counts == [count]


@pytest.mark.parametrize("repeats", [1, 4])
def test_keys_that_were_repeated_for_heads_are_read_once(repeats: int) -> None:
    torch._dynamo.reset()
    q, k, v = torch.randn(2, 8, 1, 16), *torch.randn(2, 2, 8 // repeats, 9, 16)
    seen = []

    def repeated(x: torch.Tensor) -> torch.Tensor:
        batch, groups, positions, width = x.shape
        x = x[:, :, None].expand(batch, groups, repeats, positions, width)
        return x.reshape(batch, groups * repeats, positions, width)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, repeated(k), repeated(v))

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        use_decode_attention(graph)
        (node,) = graph.graph.find_nodes(
            op="call_function", target=torch.ops.graphwright.decode_attention.default
        )
        seen.extend(each.meta["example_value"].shape[1] for each in node.args[1:3])
        return graph.forward

    torch.testing.assert_close(torch.compile(attend, backend=backend)(q, k, v), attend(q, k, v))
    assert seen == [8 // repeats, 8 // repeats]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [gpt2, mistral])
@pytest.mark.parametrize("batch", [1, 2])
def test_inductor_s_step_for_one_token_is_right(make: Callable[[], Any], batch: int) -> None:
    model = make().cuda()
    generator = gw.graph_generate(model, strategies=[GEMV])
    asked = {name: value.cuda() for name, value in prompts(batch).items()} | ASKED
    row = generator.tune(**asked).row(GEMV)
    assert row.reason == ""
    assert row.agreement == 1.0
    agree(model, generator, asked)
