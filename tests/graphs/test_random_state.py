"""cuDNN's RNNs keep a state of their own for dropout, which seeding a generator makes anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.graphs.random_state import put_seed, put_state
from graphwright.graphs.reads import Reads


def recurrent() -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True).cuda().train()


def run(model: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x)[0]
    return found


def test_a_generator_takes_seeds_and_states(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(1)
    state = generator.get_state()
    drawn = torch.rand(4, device=device, generator=generator)
    put_state(generator, state)
    assert torch.equal(torch.rand(4, device=device, generator=generator), drawn)
    put_seed(generator, 1)
    assert generator.initial_seed() == 1
    assert torch.equal(torch.rand(4, device=device, generator=generator), drawn)


@pytest.mark.parametrize(("dropout", "train"), [(0.5, True), (0.0, True), (0.5, False)])
def test_only_an_rnn_that_drops_reads_the_state(dropout: float, train: bool) -> None:
    x, state, reads = torch.ones(2, 3), torch.zeros(8, dtype=torch.uint8), Reads()
    args = (x, [x], 4, None, x, None, 2, 4, 0, 1, False, dropout, train, False, [], state)
    reads.before(torch.ops.aten._cudnn_rnn.default, (args, {}), lambda tensor: False)
    found = [read.value is state for read in reads.left([]) if read.is_state]
    assert found == [True] * (dropout > 0 and train)


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [True, False])
def test_a_block_holds_an_rnn_with_dropout(grad: bool) -> None:
    model, x = recurrent(), torch.randn(2, 5, 16, device="cuda")
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            run(model, x)
        with gw.capturing() as graph:
            y = run(model, x)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    graph.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ran", [False, True])
def test_a_graph_drops_what_eager_calls_would(ran: bool) -> None:
    def outputs(graphed: bool) -> list[torch.Tensor]:
        model, x = recurrent(), torch.ones(2, 5, 16, device="cuda")  # It seeds.
        with torch.no_grad():
            if ran:
                run(model, x)
            call = gw.capture(lambda x: run(model, x), x) if graphed else (lambda x: run(model, x))
            return [call(x) for _ in range(4)]

    mine, want = outputs(True), outputs(False)
    assert not torch.equal(want[0], want[1])
    for one, other in zip(mine, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_captures_do_not_begin_eager_dropout_again() -> None:
    x = torch.randn(2, 5, 16, device="cuda")

    def outputs(between: bool) -> list[torch.Tensor]:
        model = recurrent()
        found = []
        for _ in range(3):
            found.append(run(model, x).detach())
            if between:
                gw.capture(lambda x: torch.rand_like(x) + x, x).close()
                with gw.capturing() as graph:
                    x + 1
                graph.close()
        return found

    for mine, want in zip(outputs(True), outputs(False), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["graph", "graph_step"])
def test_a_seed_begins_dropout_anew_as_in_eager(way: str) -> None:
    def outputs(graphed: bool) -> list[torch.Tensor]:
        model, x = recurrent(), torch.ones(2, 5, 16, device="cuda")

        def step(x: torch.Tensor) -> torch.Tensor:
            return run(model, x).detach()

        call: Any = step
        if graphed:
            call = gw.graph(step) if way == "graph" else gw.graph_step(step, x)
        found = []
        with torch.no_grad():
            for seed in (1, 1, 2, 1):
                torch.manual_seed(seed)
                found += [call(x).clone() for _ in range(3)]
        if graphed:
            statistics = call.statistics
            assert (statistics.hits if way == "graph" else statistics.replays) >= 8
        return found

    mine, want = outputs(True), outputs(False)
    assert torch.equal(want[0], want[3])
    assert not torch.equal(want[0], want[6])
    for one, other in zip(mine, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_graph_of_a_call_is_refused_after_a_seed() -> None:
    model, x = recurrent(), torch.ones(2, 5, 16, device="cuda")
    with torch.no_grad():
        captured = gw.capture(lambda x: run(model, x), x)
        captured(x)
        torch.manual_seed(0)
        for _ in range(2):
            with pytest.raises(gw.SignatureError, match="random numbers were seeded"):
                captured(x)
