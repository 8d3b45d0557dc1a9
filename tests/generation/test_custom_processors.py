"""Logits processors of a caller's own: which run inside of a graph, and that the others do not."""

from __future__ import annotations

import functools
import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.generation import custom_processors
from graphwright.generation.custom_processors import of_scores_alone
from graphwright.generation.processors import Tokens, static

transformers = pytest.importorskip("transformers")
from transformers import LogitsProcessor  # noqa: E402 (behind importorskip)

SEEN: list[int] = []
COUNT = 0
FLOOR = -4.0
BIAS = torch.ones(())


class Base(LogitsProcessor):
    """Attributes of all kinds."""

    step = 1.5

    def __init__(self, **more: Any) -> None:
        self.scale, self.tokens, self.none = 2.0, [1, 2], None
        self.bias, self.named = torch.arange(7.0), {"a": (1, 0.5)}
        self.count = torch.zeros(())
        vars(self).update(more)


def accepted(kind: type) -> type:
    ACCEPTED.append(kind)
    return kind


def refused(kind: type) -> type:
    REFUSED.append(kind)
    return kind


ACCEPTED: list[type] = []
REFUSED: list[type] = []


@accepted
class Scaled(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * self.scale + self.bias


@accepted
class InPlace(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 3] = -float("inf")
        for token in self.tokens:
            scores[:, token] += self.named["a"][1]
        return scores


@accepted
class Branching(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        if self.none is None and scores.shape[-1] > len(self.tokens):
            return self.clamped(scores) * self.step
        return scores[ids]

    def clamped(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(scores).clamp(min=FLOOR, max=math.pi)


@accepted
class Inherited(Scaled):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(ids, scores).log_softmax(dim=-1)


@accepted
class MyTopK(transformers.TopKLogitsWarper):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__(3)


@accepted
class ByTokenOfNoBase:
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores > 0, scores, -scores)


@refused
class ReadsLength(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * ids.shape[1]


@refused
class ReadsTokens(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, ids, 0.0)


@refused
class AsksForTokens(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1 if ids == 3 else scores


@refused
class HidesThatItReads(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        try:
            return scores * ids.shape[1]
        except Exception:
            return scores


@refused
class KeepsTokens(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.none = ids
        return scores


@refused
class Counts(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.scale += 1
        return scores * self.scale


@refused
class CountsInATensor(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return scores * self.count


@refused
class CountsInAList(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.tokens.append(1)
        return scores * len(self.tokens)


@refused
class CountsInItsClass(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.__class__.step += 1
        return scores * self.step


@refused
class CountsInAGlobal(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return scores * COUNT


@refused
class CountsInAGlobalList(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        SEEN.append(1)
        return scores * len(SEEN)


@refused
class SharesAList(Base):
    shared: list[int] = []  # noqa: RUF012 (the fault that is planted)

    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.shared.append(1)
        return scores * len(self.shared)


@refused
class CountsInADefault(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * self.counted()

    def counted(self, seen: list[int] = []) -> int:  # noqa: B006 (the fault that is planted)
        seen.append(1)
        return len(seen)


@refused
class AddsAGlobalTensor(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores + BIAS


@refused
class LooksAtTheClock(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * time.time()


@refused
class DrawsOnTheHost(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * random.random()


@refused
class Draws(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand_like(scores)


@refused
class Asks(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2 if scores.max() > 0 else scores


@refused
class ReadsAnItem(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * scores[0, 0].item()


@refused
class ReadsAList(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * scores.tolist()[0][0]


@refused
class ReadsAnArray(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * float(scores.numpy()[0, 0])


@refused
class ReadsAnAttribute(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * float(self.bias.tolist()[1])


@refused
class AsksWhere(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores + len(scores.nonzero())


@refused
class CopiesFromTheHost(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores[:, [1, 2]] = 0
        return scores


@refused
class UsesNumPy(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * np.pi


@refused
class Prints(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        print("called")
        return scores


@refused
class Imports(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        from os import getpid

        return scores * getpid()


@refused
class CallsAFunctionOfItsOwn(Base):
    def __init__(self) -> None:
        super().__init__(scale=lambda: 3)

    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * self.scale()


@refused
class ReturnsOther(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.double()


@refused
class ReturnsNothing(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> None:
        scores += 1


@refused
class Fails(Base):
    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.ones(3)


def closing_over() -> Any:
    total = 0

    class Closes(Base):
        def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += 1
            return scores * total

    return Closes


REFUSED.append(closing_over())


def drawn_scores() -> torch.Tensor:
    return torch.randn(2, 7)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_follows_from_scores_alone_has_a_form(kind: Any) -> None:
    form = static(kind(), drawn_scores())
    assert form is not None
    assert static(kind(), None) is None
    ids, scores = torch.zeros(2, 9, dtype=torch.int64), drawn_scores()
    mine = form.apply(Tokens(ids, torch.tensor(3)), scores.clone(), torch.zeros(0))
    assert torch.equal(mine, kind()(ids[:, :3], scores.clone()))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_more_has_none(kind: Any) -> None:
    assert of_scores_alone(kind(), drawn_scores()) is None


class Slotted:
    __slots__ = ()

    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    "processor",
    [
        lambda ids, scores: scores,
        functools.partial(lambda ids, scores: scores),
        Scaled().__call__,
        torch.add,
        torch.nn.Identity(),
        Slotted(),
    ],
)
def test_what_no_class_of_the_callers_describes_has_no_form(processor: Any) -> None:
    assert of_scores_alone(processor, drawn_scores()) is None


@pytest.mark.parametrize("kind", [*ACCEPTED, *REFUSED])
def test_the_trial_leaves_no_trace(kind: Any) -> None:
    processor, scores = kind(), drawn_scores()
    before, seen, count = dict(vars(processor)), list(SEEN), COUNT
    state, values = torch.get_rng_state(), scores.clone()
    host, output = random.getstate(), Base.step
    of_scores_alone(processor, scores)
    assert vars(processor) == before
    assert before.get("tokens", [1, 2]) == [1, 2]
    assert float(before.get("count", torch.zeros(()))) == 0
    assert (seen, count, host, output) == (SEEN, COUNT, random.getstate(), Base.step)
    assert not vars(SharesAList)["shared"]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(scores, values)


def test_one_trial_is_enough_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    trial = custom_processors._runs_without_more
    monkeypatch.setattr(custom_processors, "_ALLOWED", {})
    monkeypatch.setattr(
        custom_processors, "_runs_without_more", lambda *given: tried.append(1) or trial(*given)
    )

    def trials(processor: Any, scores: torch.Tensor) -> int:
        before = len(tried)
        of_scores_alone(processor, scores)
        return len(tried) - before

    first = Branching()
    assert trials(first, drawn_scores()) == 1
    assert trials(first, drawn_scores()) == 0
    assert trials(first, torch.randn(2, 8)) == 1
    first.none = 3
    assert trials(first, drawn_scores()) == 1
    assert of_scores_alone(first, drawn_scores()) is None
    first.none = None
    assert trials(first, drawn_scores()) == 0
    first.bias = torch.zeros(8)
    assert trials(first, drawn_scores()) == 1
    monkeypatch.setattr(Base, "step", 3)
    assert trials(first, drawn_scores()) == 1
    monkeypatch.setitem(globals(), "FLOOR", -5.0)
    assert trials(first, drawn_scores()) == 1
    monkeypatch.setattr(Branching, "clamped", ReadsLength.__call__)
    assert trials(first, drawn_scores()) == 1
    assert len(custom_processors._ALLOWED) == len(tried)
    monkeypatch.setattr(custom_processors, "_KEPT", 1)
    assert trials(Branching(), drawn_scores()) == 1
    assert len(custom_processors._ALLOWED) == 1


def key(processor: Any) -> Any:
    found = of_scores_alone(processor, drawn_scores())
    assert found is not None
    return found[0]


def test_equal_attributes_make_an_equal_key() -> None:
    bias = torch.arange(7.0)
    tensors = {"bias": bias, "count": bias}
    one = Scaled(**tensors)
    assert key(one) == key(Scaled(**tensors))
    hash(key(one))
    for other in (
        Inherited(**tensors),
        Scaled(bias=bias.clone(), count=bias),
        Scaled(**tensors, scale=2),
        Scaled(**tensors, scale=2.5),
        Scaled(**tensors, tokens=[1, 3]),
        Scaled(**tensors, tokens=(1, 2)),
        Scaled(**tensors, named={"a": (1, 0.25)}),
        Scaled(**tensors, more=None),
    ):
        assert key(one) != key(other)


def test_a_form_stays_when_its_processor_changes() -> None:
    processor = InPlace()
    form = static(processor, drawn_scores())
    assert form is not None
    scores = drawn_scores()
    expected = processor(None, scores.clone())
    processor.tokens.append(5)
    processor.named["a"] = (1, 7.0)
    tokens = Tokens(torch.zeros(2, 9, dtype=torch.int64), torch.tensor(3))
    assert torch.equal(form.apply(tokens, scores.clone(), torch.zeros(0)), expected)


def test_the_graph_runs_it_or_transformers_does() -> None:
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=8, n_layer=1, n_head=1, n_positions=64, initializer_range=0.4
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.update(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    graphed = gw.graph_generate(model, steps_per_launch=2)
    prompt = torch.randint(1, 7, (2, 3))

    def check(mine: Any, same: Any) -> None:
        asked = {"max_new_tokens": 5, "do_sample": False}
        made = graphed.generate(prompt, **asked, logits_processor=[mine])
        assert torch.equal(made, model.generate(prompt, **asked, logits_processor=[same]))

    check(Scaled(scale=-1.0), Scaled(scale=-1.0))
    assert graphed.statistics.outside == {}
    check(Scaled(scale=-2.0), Scaled(scale=-2.0))
    assert graphed.statistics.outside == {}
    counts = Counts()
    check(counts, Counts())
    assert counts.scale == 7
    assert graphed.statistics.outside == {"Counts looks at each token": 1}
    assert graphed.statistics.eager == {}
