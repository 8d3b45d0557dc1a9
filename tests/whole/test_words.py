"""Numbers agree with their nouns, wherever they are told."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
import torch
from torch import nn

import graphwright as gw
from bench.common.peers import compilations, compilations_since
from graphwright.calls.plurals import counted
from graphwright.checker.checker import check
from graphwright.checker.summary import summary
from graphwright.errors import OptionError
from graphwright.serving import http_codec, requests
from graphwright.serving.protocol import RequestError


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 graphs"), (1, "1 graph"), (2, "2 graphs"), (1234, "1,234 graphs")]
)
def test_a_number_with_its_noun(count: int, said: str) -> None:
    assert counted(count, "graph") == said


def test_a_plural_of_its_own() -> None:
    assert [counted(n, "launch", "launches") for n in (1, 2)] == ["1 launch", "2 launches"]


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        if x.sum() > 100:
            return x
        if times > 1 and x.sum() > 200:
            return -x
        return x + 1


@pytest.mark.parametrize(("times", "said"), [(1, "1 break. "), (2, "2 breaks. ")])
def test_findings_are_counted(times: int, said: str) -> None:
    found = check(Deciding().eval(), (torch.ones(2), times))
    assert summary("net", found).startswith(f"net: {said}")


def test_graphs_are_counted() -> None:
    graphed = gw.graph(torch.sin)
    for size, said in ((2, ": 1 graph in "), (3, ": 2 graphs in ")):
        graphed.prepare([(torch.ones(size),)])
        assert said in repr(graphed.pool)
    graphed.close()


def test_steps_are_counted() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with gw.graph_step(step, (torch.ones(2),)) as graphed:
        assert repr(graphed).endswith(": 1 graph>")
        graphed(torch.ones(2))
        assert "1 step replayed, 1 capture\n" in graphed.explain()


def test_samples_are_counted() -> None:
    with pytest.raises(OptionError, match=r"for each of 1 sample\."):
        gw.tune(torch.sin, samples=[(torch.ones(2),)], weights=[1.0, 2.0])


def test_bytes_are_counted() -> None:
    with pytest.raises(RequestError, match="has 1 byte of data, "):
        requests.numbers_from_bytes(b"1", "FP32", [1], "x")
    entry = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    body = json.dumps({"inputs": [entry]}).encode()
    for more, said in ((b"1", "has 1 byte after"), (b"12", "has 2 bytes after")):
        with pytest.raises(RequestError, match=said):
            http_codec.decode_infer(
                memoryview(bytearray(body + more)),
                len(body),
                model="m",
                version="",
                received=time.monotonic(),
                timeout_s=None,
            )


def test_what_torch_compile_has_counted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"graph_break": Counter(why=1), "inductor": Counter(fxgraph_cache_hit=2)}
    monkeypatch.setattr("torch._dynamo.utils.counters", counters)
    before = compilations()
    assert compilations_since(before) == []
    counters["graph_break"]["another"] += 1
    counters["inductor"]["fxgraph_cache_hit"] += 2
    assert compilations_since(before) == ["1 graph break", "2 graphs out of the compiler's cache"]
