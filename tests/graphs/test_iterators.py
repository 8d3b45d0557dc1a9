"""Iterators that a call would advance: refused by name, as a rule before that, and never replaced.

An iterator that a call only holds is no reason to refuse it.
"""

from __future__ import annotations

import csv
import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from planted import iterators_are_advanced
from torch import nn
from torch.utils.data import DataLoader

import graphwright as gw
from graphwright import errors

CALLS = 5
NUMBERS = [float(n) for n in range(1, 200)]


def generated() -> Iterator[float]:
    n = 0.0
    while True:
        n += 1
        yield n


FILES: list[IO[str]] = []


@pytest.fixture(autouse=True)
def files_closed() -> Iterator[None]:
    yield
    while FILES:
        FILES.pop().close()


def opened(folder: Path) -> Any:
    folder.joinpath("numbers").write_text("\n".join(map(str, NUMBERS)), encoding="ascii")
    FILES.append((folder / "numbers").open(encoding="ascii"))
    return FILES[-1]


KINDS: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: iter(NUMBERS),
    "tuple": lambda _: iter(tuple(NUMBERS)),
    "range": lambda _: iter(range(1, 200)),
    "reversed": lambda _: reversed(NUMBERS),
    "deque": lambda _: iter(deque(NUMBERS)),
    "dictionary": lambda _: iter(dict.fromkeys(NUMBERS)),
    "values": lambda _: iter(dict(enumerate(NUMBERS)).values()),
    "set": lambda _: iter(set(NUMBERS)),
    "count": lambda _: itertools.count(1.0),
    "cycle": lambda _: itertools.cycle([1.0, 2.0, 3.0]),
    "chain": lambda _: itertools.chain([1.0], NUMBERS),
    "islice": lambda _: itertools.islice(NUMBERS, 100),
    "accumulate": lambda _: itertools.accumulate(NUMBERS),
    "generator": lambda _: generated(),
    "expression": lambda _: (n + 1 for n in NUMBERS),
    "map": lambda _: map(float, range(1, 200)),
    "filter": lambda _: filter(None, NUMBERS),
    "zip": lambda _: zip(NUMBERS, NUMBERS, strict=True),
    "enumerate": lambda _: enumerate(NUMBERS),
    "sentinel": lambda _: iter(functools.partial(next, iter(NUMBERS)), None),
    "file": opened,
    "csv": lambda folder: csv.reader(opened(folder)),
    "loader": lambda _: iter(DataLoader(torch.tensor(NUMBERS))),
}
# Whose position cannot be seen from outside.
UNSEEN = ("sentinel",)


def number(item: Any) -> float:
    return number(item[0]) if isinstance(item, tuple | list) else float(item)


def by_next(it: Any) -> Any:
    return next(it)


def by_next_with_a_default(it: Any) -> Any:
    return next(it, [None, 1.0][1])


def by_name(it: Any) -> Any:
    return it.__next__()


def by_loop(it: Any) -> Any:
    for item in it:
        return item
    return 0.0


def by_loop_over_pairs(it: Any) -> Any:
    for item, _ in zip(it, [0], strict=False):
        return item
    return 0.0


def by_comprehension(it: Any) -> Any:
    return [number(item) for item in itertools.islice(iter(it), 2)][-1]


def by_star(it: Any) -> Any:
    return [None, *itertools.islice(it, 1)][-1]


def by_sum(it: Any) -> Any:
    return len(list(zip(range(3), it, strict=False)))


def by_membership(it: Any) -> Any:
    return 2.0 if "never" in itertools.islice(it, 2) else 3.0


USES: list[Callable[[Any], Any]] = [
    *(by_next, by_next_with_a_default, by_name, by_loop, by_loop_over_pairs),
    *(by_comprehension, by_star, by_sum, by_membership),
]


class OfClass:
    it: Any = None


class Places(nn.Module):
    """Takes its iterator out of one of several places."""

    def __init__(self, it: Any, place: int, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.it = it if place == 0 else None
        self.several = [[it]] if place == 1 else [[None]]
        self.named = {"it": it if place == 2 else None}
        self.taken = (lambda: it) if place == 3 else None
        OfClass.it = it if place == 4 else None
        self.place, self.use = place, use

    def item(self) -> Any:
        if self.place == 0:
            return self.use(self.it)
        if self.place == 1:
            return self.use(self.several[0][0])
        if self.place == 2:
            return self.use(self.named["it"])
        if self.place == 4:
            return self.use(OfClass.it)
        assert self.taken is not None
        return self.use(self.taken())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * number(self.item())


class Direct(Places):
    """Takes items in its own code, without a function of the user's in between."""

    def item(self) -> Any:
        return next(self.several[0][0]) if self.place == 1 else next(self.it)


def by_graph(model: Places, x: torch.Tensor, expected: Callable[[], float]) -> None:
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(graphed(x), x * expected())
    assert graphed.statistics.eager == {"it cannot be captured": CALLS}
    assert "advances" in graphed.explain()


def by_capture(model: Places, x: torch.Tensor, _: Any) -> None:
    with pytest.raises(gw.CaptureError, match=r"The call advances .* which a graph would not"):
        gw.capture(model, x)


def by_check(model: Places, x: torch.Tensor, _: Any) -> None:
    assert any("The call advances" in finding.what for finding in gw.check(model, (x,)))


def by_tune(model: Places, x: torch.Tensor, _: Any) -> None:
    with pytest.raises(gw.CaptureError, match="The call advances"):
        gw.tune(model, (x,), strategies=["torchscript"], isolate=False, progress=False)


def by_profile(model: Places, x: torch.Tensor, _: Any) -> None:
    with pytest.raises(gw.CaptureError, match="The call advances"):
        gw.profile(model, (x,))


def by_fuse(model: Places, x: torch.Tensor, expected: Callable[[], float]) -> None:
    fused = gw.fuse(model, (x,))
    assert "The call advances" in str(fused.explain())
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(fused(x), x * expected())


def by_buckets(model: Places, x: torch.Tensor, expected: Callable[[], float]) -> None:
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(graphed(x), x * expected())
    assert graphed.statistics.captures == 0


def by_graphed_callables(model: Places, x: torch.Tensor, _: Any) -> None:
    with pytest.raises(gw.CaptureError, match="The call advances"):
        gw.make_graphed_callables(model, (x.clone().requires_grad_(),))


def by_graph_step(model: Places, x: torch.Tensor, _: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(gw.CaptureError, match="The call advances"):
        gw.graph_step(step, x)


WAYS = {
    way.__name__.removeprefix("by_"): way
    for way in (
        *(by_graph, by_capture, by_check, by_tune, by_profile, by_fuse, by_buckets),
        *(by_graphed_callables, by_graph_step),
    )
}


def refused_before(
    kind: str, place: int, use: Any, way: str, device: torch.device, folder: Path
) -> None:
    """Check that a call is refused, and that eager calls then get all items, the first one too."""
    its, mine = KINDS[kind](folder), KINDS[kind](folder)
    model = Places(its, place, use) if use is not None else Direct(its, place, by_next)
    model.to(device).train(way in ("graphed_callables", "graph_step"))
    take = by_next if use is None else use
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # An item is lost.
        warnings.simplefilter("ignore", gw.FallbackWarning)
        WAYS[way](model, torch.ones(3, 2, device=device), lambda: number(take(mine)))
    assert number(model.item()) == number(take(mine)), "an item was lost"


def wrong_in(
    cases: Iterable[tuple[str, int, Any, str]], device: torch.device, folder: Path
) -> list[str]:
    """What is wrong in each of some cases."""
    found = []
    for kind, place, use, way in cases:
        try:
            refused_before(kind, place, use, way, device, folder)
        except (Exception, pytest.fail.Exception) as error:
            used = "itself" if use is None else use.__name__
            found.append(f"{kind} in place {place} {used}, {way}: {error!r:.200}")
    return found


PLACES = range(5)
SOME = [
    *(
        (kind, place, use, "graph")
        for kind, place, use in zip(
            KINDS, itertools.cycle(PLACES), itertools.cycle([*USES, None]), strict=False
        )
    ),
    *((k, 0, by_next, "capture") for k in KINDS),
    *((k, p, u, "capture") for u, k, p in zip(USES, KINDS, itertools.cycle(PLACES), strict=False)),
    *(("generator", p, by_loop, way) for p, way in itertools.product((0, 3), WAYS)),
    *(("loader", 1, None, way) for way in WAYS),
    *(("file", 2, by_next, way) for way in WAYS),
]
SOME = [each for each in SOME if each[3] != "profile"]
# `None` takes items in the model's own code, out of two of the places.
EVERY = [
    *itertools.product(KINDS, PLACES, USES, WAYS),
    *itertools.product(KINDS, (0, 1), (None,), WAYS),
]


def test_what_would_be_advanced_is_refused_before(device: torch.device, tmp_path: Path) -> None:
    cases = [(k, p % 2 if u is None else p, u, w) for k, p, u, w in SOME]
    assert len(cases) > 80
    assert not wrong_in(cases, device, tmp_path)


# Every seventeenth case, or all of them.
@pytest.mark.parametrize(
    "step",
    [pytest.param(17, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_would_be_advanced_is_refused_before(
    way: str, step: int, device: torch.device, tmp_path: Path
) -> None:
    cases = [each for each in EVERY if each[3] == way]
    assert not wrong_in(cases[::17] if way == "profile" else cases[::step], device, tmp_path)


@pytest.mark.parametrize("way", ["graph", "capture", "tune", "fuse", "buckets"])
def test_items_are_lost_without_the_protection(
    way: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterators_are_advanced(monkeypatch)
    assert wrong_in([("chain", 0, by_next, way)], device, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_only_held_is_captured(kind: str, device: torch.device, tmp_path: Path) -> None:
    def use(it: Any) -> float:
        return 2.0 if it is not None and hasattr(it, "__iter__") else 3.0

    its = KINDS[kind](tmp_path)
    model, x = Places(its, 0, use).to(device).eval(), torch.ones(3, 2, device=device)
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(graphed(x), 2 * x)
    assert graphed.statistics.captures == 1
    assert not graphed.statistics.eager
    assert number(next(its)) == number(next(KINDS[kind](tmp_path)))


def test_what_only_training_advances_is_captured_in_eval_mode(device: torch.device) -> None:
    class Augmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise = iter(NUMBERS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x = x + next(self.noise)
            mine = iter([1.0, 2.0])
            return x * next(mine) * sum(iter([1.0]))

    model, x = Augmented().to(device).eval(), torch.ones(2, device=device)
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(graphed(x), x)
        assert graphed.statistics.captures == 1
        graphed.train()
        torch.testing.assert_close(graphed(x), x + 1)
        torch.testing.assert_close(graphed(x), x + 2)


def hidden(it: Any) -> Any:
    """Advances it where no code of Python's shows that."""
    return functools.partial(next, it)()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNSEEN])
def test_what_was_advanced_unseen_is_refused_afterwards(
    kind: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    its, mine = KINDS[kind](tmp_path), KINDS[kind](tmp_path)
    model, x = Places(its, 0, hidden).to(device).eval(), torch.ones(3, 2, device=device)
    with pytest.warns(RuntimeWarning, match=r"attribute it of Places .* cannot be put back"):
        with pytest.raises(gw.CaptureError, match="cannot be put back"):
            gw.capture(model, x)
    next(mine)
    assert number(model.item()) == number(next(mine)), "it was advanced again"


def test_an_error_that_is_caught_does_not_hide_the_refusal(device: torch.device) -> None:
    its = iter(NUMBERS)

    def call(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * next(its)
        except Exception:
            return x

    with pytest.raises(gw.CaptureError, match="The call advances the variable its"):
        gw.capture(call, torch.ones(2, device=device))
    assert next(its) == 1.0


def test_the_place_in_the_code_is_named(device: torch.device) -> None:
    its = iter(NUMBERS)
    with pytest.raises(gw.CaptureError, match=r"test_iterators\.py:\d+") as caught:
        gw.capture(lambda x: x * next(its), torch.ones(2, device=device))
    assert caught.value.remedy == "Take the next item outside of the call, and pass it in."


def test_a_step_that_takes_its_own_batches_is_refused(device: torch.device) -> None:
    data = [torch.full((2, 2), n) for n in NUMBERS[:6]]
    batches, model = iter(DataLoader(data, batch_size=None)), nn.Linear(2, 1).to(device)  # type: ignore[arg-type]  # a list is a data set
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(scale: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(next(batches).to(device)) * scale).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(gw.CaptureError, match="The call advances the variable batches"):
        gw.graph_step(step, torch.ones((), device=device))
    assert torch.equal(next(batches), data[0])


def test_a_class_of_python_s_own_is_no_reason(device: torch.device) -> None:
    class Constant:
        def __iter__(self) -> Constant:
            return self

        def __next__(self) -> float:
            return 2.0

    model, x = Places(Constant(), 0, by_next).to(device).eval(), torch.ones(3, 2, device=device)
    torch.testing.assert_close(gw.capture(model, x)(x), 2 * x)
