"""decode(): a step function's tokens and state are those of a plain loop, and graphs make them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.generation import decoding

WORDS, SIZE = 40, 16


class Recurrent(nn.Module):
    """The next token by a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.head = nn.Linear(SIZE, WORDS)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(4)

    def forward(self, token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        hidden = self.cell(self.embedding(token), state["hidden"])
        return self.head(hidden).argmax(-1), state | {"hidden": hidden}


def begin(batch: int = 3) -> dict[str, Any]:
    torch.manual_seed(batch)
    return {"hidden": torch.randn(batch, SIZE), "name": "plain"}


def first(batch: int = 3) -> torch.Tensor:
    return torch.arange(1, batch + 1)


def plain(step: Any, state: Any, token: torch.Tensor, steps: int) -> tuple[torch.Tensor, Any]:
    found = []
    with torch.no_grad():
        for _ in range(steps):
            token, state = step(token, state)
            found.append(token)
    return torch.stack(found, 1), state


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    for loop in decoding._KEPT.values():
        loop.close()
    decoding._KEPT.clear()


@pytest.mark.parametrize("steps", [1, 7, 8, 20])
def test_it_is_the_plain_loop(steps: int) -> None:
    step = Recurrent()
    state, token = begin(), first()
    before = state["hidden"].clone()
    made = gw.decode(step, state, token, max_steps=steps)
    tokens, after = plain(step, state, token, steps)
    assert torch.equal(made.tokens, tokens)
    assert made.lengths.tolist() == [steps] * 3
    assert torch.equal(made.state["hidden"], after["hidden"])
    assert made.state["name"] == "plain"
    assert torch.equal(state["hidden"], before)
    assert made.steps == steps


def test_a_later_call_runs_by_the_same_graphs_and_changes_no_earlier_result() -> None:
    step = Recurrent()
    one = gw.decode(step, begin(), first(), max_steps=12)
    kept = one.tokens.clone(), one.state["hidden"].clone()
    other = {"hidden": torch.randn(3, SIZE), "name": "plain"}
    two = gw.decode(step, other, first().flip(0), max_steps=10)
    assert len(decoding._KEPT) == 1
    assert torch.equal(two.tokens, plain(step, other, first().flip(0), 10)[0])
    assert torch.equal(one.tokens, kept[0])
    assert torch.equal(one.state["hidden"], kept[1])


@pytest.mark.parametrize("by", ["token", "tokens", "function"])
def test_sequences_end_at_different_steps(by: str) -> None:
    step = Recurrent()
    tokens, _ = plain(step, begin(), first(), 30)
    end = int(tokens[0, 9])
    until: Any = {"token": end, "tokens": [end, WORDS + 1], "function": lambda t: t == end}[by]
    made = gw.decode(step, begin(), first(), until=until, max_steps=30, pad=-1)
    for row, length, wanted in zip(made.tokens, made.lengths, tokens, strict=True):
        ends = (wanted == end).nonzero()
        true = int(ends[0]) + 1 if len(ends) else 30
        assert int(length) == true
        assert torch.equal(row[:true], wanted[:true])
        assert (row[true:] == -1).all()
    assert made.tokens.shape[1] == int(made.lengths.max())


def test_state_in_place_swapped_and_shifted() -> None:
    """What is returned may be what was given, in other places."""

    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        one, two, seen, at = state
        seen.index_copy_(1, at.view(1), token[:, None])
        token = (token * 5 + one[0].long() + seen[:, :2].sum(1)) % 31
        return token, (two, one + 1, seen, at + 1)

    def state() -> Any:
        return (
            torch.ones(2),
            torch.zeros(2),
            torch.zeros(3, 12, dtype=torch.int64),
            torch.tensor(0),
        )

    made = gw.decode(step, state(), first(), max_steps=12)
    tokens, after = plain(step, state(), first(), 12)
    assert torch.equal(made.tokens, tokens)
    for mine, its in zip(made.state, after, strict=True):
        assert torch.equal(mine, its)


def test_a_token_that_is_a_view_of_the_state() -> None:
    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        queue = state["queue"]
        return queue[:, 0], {"queue": torch.cat([queue[:, 1:], token[:, None] + 10], 1)}

    def state() -> Any:
        return {"queue": torch.arange(9).reshape(3, 3)}

    made = gw.decode(step, state(), first(), max_steps=9, steps_per_launch=2)
    assert torch.equal(made.tokens, plain(step, state(), first(), 9)[0])


def test_plain_values_that_are_equal_and_not_the_same() -> None:
    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return token + (
            100 if isinstance(state, bool) else 1 if isinstance(state, int) else 7
        ), state

    for state, wanted in ((1, 2), (True, 101), (1.0, 8), (1, 2)):
        made = gw.decode(step, state, first(), max_steps=1)
        assert int(made.tokens[0, 0]) == wanted


def test_leaves_that_share_memory_are_refused() -> None:
    whole = torch.zeros(3, 8)
    for state in ([whole, whole[:, :2]], {"a": whole, "b": whole}):
        with pytest.raises(gw.OptionError, match="leaves 0 and 1 of the state share memory"):
            gw.decode(lambda token, state: (token, state), state, first(), max_steps=2)
    rows = [whole[0], whole[1]]
    gw.decode(lambda token, state: (token, state), rows, first(), max_steps=2)


def test_a_state_of_other_things_is_refused_by_name() -> None:
    with pytest.raises(gw.OptionError, match="leaf 0 of the state is an object: pass a tensor"):
        gw.decode(lambda token, state: (token, state), [object()], first(), max_steps=2)


def test_many_forms_inside_of_a_step_that_runs_eagerly() -> None:
    """The table drops what runs just now."""

    def outer(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        count = int(token[0])
        inner = gw.decode(lambda t, s: (t + 1, s), [], first(1 + count % 11), max_steps=1)
        return token + 1 + 0 * inner.tokens[0, 0], state

    with pytest.warns(gw.FallbackWarning):
        made = gw.decode(outer, [], first(), max_steps=12, steps_per_launch=1)
    assert made.tokens[0].tolist() == list(range(2, 14))


def test_draws_differ_from_step_to_step_and_repeat_under_a_seed() -> None:
    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return torch.randint(0, 1000, token.shape), state

    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(gw.decode(step, [], first(), max_steps=16).tokens)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len(set(found[0].flatten().tolist())) > 40


def test_a_loop_inside_of_each_step() -> None:
    """A depth predictor: it generates inside of every step of another loop."""
    outer, inner = Recurrent(), Recurrent()
    with torch.no_grad():
        inner.head.bias.add_(torch.randn(WORDS))

    def deep(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        token, state = outer(token, state)
        depth = gw.decode(inner, {"hidden": state["hidden"], "name": "deep"}, token, max_steps=3)
        return depth.tokens[:, -1], state

    def by_hand(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        token, state = outer(token, state)
        tokens, _ = plain(inner, {"hidden": state["hidden"], "name": "deep"}, token, 3)
        return tokens[:, -1], state

    made = gw.decode(deep, begin(), first(), max_steps=9, steps_per_launch=3)
    tokens, after = plain(by_hand, begin(), first(), 9)
    assert torch.equal(made.tokens, tokens)
    assert torch.equal(made.state["hidden"], after["hidden"])


def test_inside_of_a_graph() -> None:
    step = Recurrent()

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        return gw.decode(step, {"hidden": hidden, "name": ""}, first(), max_steps=4).tokens

    graphed = gw.graph(whole)
    for seed in range(3):
        torch.manual_seed(seed)
        hidden = torch.randn(3, SIZE)
        wanted, _ = plain(step, {"hidden": hidden, "name": ""}, first(), 4)
        with torch.no_grad():
            assert torch.equal(graphed(hidden), wanted)
    assert graphed.statistics.hits == 3
    assert graphed.statistics.captures == 1


def test_weights_that_change_are_seen() -> None:
    step = Recurrent()
    gw.decode(step, begin(), first(), max_steps=8)
    with torch.no_grad():
        step.head.weight.mul_(-1)
    made = gw.decode(step, begin(), first(), max_steps=8)
    assert torch.equal(made.tokens, plain(step, begin(), first(), 8)[0])
    step.head = nn.Linear(SIZE, WORDS)
    made = gw.decode(step, begin(), first(), max_steps=8)
    assert torch.equal(made.tokens, plain(step, begin(), first(), 8)[0])


def test_calls_from_threads() -> None:
    step = Recurrent()
    found: dict[int, torch.Tensor] = {}

    def call(seed: int) -> None:
        hidden = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed))
        found[seed] = gw.decode(step, {"hidden": hidden, "name": ""}, first(), max_steps=9).tokens

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        hidden = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed))
        wanted, _ = plain(step, {"hidden": hidden, "name": ""}, first(), 9)
        assert torch.equal(found[seed], wanted)


def test_a_step_that_the_host_reads_runs_eagerly_and_is_told() -> None:
    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return (token + 1 if int(token[0]) % 2 else token + 3) % 50, state

    with pytest.warns(gw.FallbackWarning, match="runs eagerly"):
        made = gw.decode(step, [], first(), max_steps=9)
    assert torch.equal(made.tokens, plain(step, [], first(), 9)[0])


def test_a_step_that_reads_what_changes_in_every_step_captures_nothing_anew() -> None:
    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        if state.sum().item() > 3:
            token = token + 1
        return token, state + 1

    before = torch.zeros(2)
    with pytest.warns(gw.FallbackWarning, match="reads a value on the host"):
        made = gw.decode(step, before, first(), max_steps=9, steps_per_launch=1)
    assert torch.equal(made.tokens, plain(step, before, first(), 9)[0])
    (loop,) = decoding._KEPT.values()
    assert loop._graphs.counts.graphed == 0


def test_the_graphs_of_few_forms_are_kept() -> None:
    for size in range(decoding._MOST_KEPT + 2):
        gw.decode(lambda token, state: (token + 1, state), [], first(size + 1), max_steps=2)
    assert len(decoding._KEPT) == decoding._MOST_KEPT


def wider(token: torch.Tensor, state: Any) -> Any:
    return token, torch.cat([state, state])


def other_form(token: torch.Tensor, state: Any) -> Any:
    return token, [state]


def counts(token: torch.Tensor, state: Any) -> Any:
    return token, state + 1


@pytest.mark.parametrize(
    ("step", "state", "message"),
    [
        (wider, torch.ones(3), r"leaf 0 of the state as \(6,\) of float32 on cpu, and was given"),
        (other_form, torch.ones(3), "a state of another form"),
        (counts, 3, "changes leaf 0 of the state from 3 to 4: a graph would freeze it"),
        (lambda token, state: (token.float(), state), 1, "the token as .* of float32"),
    ],
)
def test_a_step_that_changes_the_form_is_refused(step: Any, state: Any, message: str) -> None:
    with pytest.raises(gw.OptionError, match=message):
        gw.decode(step, state, first(), max_steps=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_steps": 3, "steps_per_launch": -1}, "steps_per_launch is -1"),
        ({"max_steps": 3, "stop": 1}, "there is no stop"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gw.OptionError, match=message):
        gw.decode(Recurrent(), begin(), first(), **options)
