"""The order of keywords, dictionaries, attributes and sets: each callable sees that of the caller.

Callables that depend on the order are made into each of our parts and called in random orders, bit
for bit against eager. Where Python alone binds the arguments, a call in any order keeps the gain.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from shares import share
from torch import fx, nn

import graphwright as gw
from graphwright.artifacts.tuned_module import TunedModule
from graphwright.calls import signature as signatures
from graphwright.calls.binding import sees_order
from graphwright.calls.objects import SetKind
from graphwright.calls.signature import CallSignature
from graphwright.dispatch.graphed_callable import GraphedCallable

Named = dict[str, Any]
Call = tuple[tuple[Any, ...], Named]
NAMES = ("b", "aa", "c")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::graphwright.FallbackWarning"),
]


# ---------------------------------------------------------------- callables that see the order


def folded(y: Any, values: Any) -> Any:
    """A value that depends on the order of others."""
    for value in values:
        y = y * 1.5 + value
    return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class AnyKeywords(Layer):
    def forward(self, x: torch.Tensor, **parts: Any) -> torch.Tensor:
        return folded(self.linear(x), parts.values())


class KeywordOnly(Layer):
    def forward(self, x: torch.Tensor, *, b: Any, aa: Any, c: Any) -> torch.Tensor:
        return self.linear(x + aa) * c - b


def logged(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, x: torch.Tensor, **named: Any) -> Any:
        return folded(forward(self, x, **named), named.values())

    return wrapper


class Decorated(KeywordOnly):
    forward = logged(KeywordOnly.forward)  # type: ignore[assignment]  # what the decorator made


class OfDictionary(Layer):
    def forward(self, x: torch.Tensor, inputs: Named) -> torch.Tensor:
        return folded(self.linear(x), inputs.values())


class Batch:
    """An object whose attributes, dictionary and set all have an order."""

    def __init__(self, parts: Named, flags: Any) -> None:
        self.parts, self.flags = parts, flags


class OfObject(Layer):
    def forward(self, x: torch.Tensor, *, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        y = folded(folded(self.linear(x), batch.parts.values()), batch.flags)
        return folded(y, [len(name) for name in vars(batch)]) * scale


class OfSet(Layer):
    def forward(self, x: torch.Tensor, flags: Any) -> torch.Tensor:
        return folded(self.linear(x), flags)


def hooked() -> nn.Module:
    model = KeywordOnly()
    model.register_forward_pre_hook(
        lambda m, args, named: ((folded(args[0], named.values()),), named), with_kwargs=True
    )
    return model


class Holder:
    def __init__(self) -> None:
        self.model = AnyKeywords().eval()

    def run(self, x: torch.Tensor, **parts: Any) -> Any:
        return self.model(x, **parts)


def function() -> Callable[..., Any]:
    model = AnyKeywords().eval()
    return lambda x, **parts: model(x, **parts) * 2


def with_keywords() -> Callable[..., Any]:
    return functools.partial(function(), first=0.5)


# By name: what makes it, and how it takes three values.
OBSERVERS: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "any keywords": (AnyKeywords, "keywords"),
    "keywords alone": (KeywordOnly, "keywords"),
    "a decorator": (Decorated, "keywords"),
    "a hook with keywords": (hooked, "keywords"),
    "a function": (function, "keywords"),
    "a partial with keywords": (with_keywords, "keywords"),
    "a method": (lambda: Holder().run, "keywords"),
    "a dictionary": (OfDictionary, "dictionary"),
    "an ordered dictionary": (OfDictionary, "ordered"),
    "an object": (OfObject, "object"),
    "a set": (OfSet, "set"),
}


def shuffled(draw: random.Random, values: Named) -> Named:
    names = [*values]
    draw.shuffle(names)
    return {name: values[name] for name in names}


def set_of(draw: random.Random) -> set[int]:
    """Both orders of a set whose values go to one place of its table."""
    made: set[int] = set()
    for value in draw.sample((0, 8, 16), 3):
        made.add(value)
    return made


def call_of(how: str, draw: random.Random, device: torch.device) -> Call:
    x = torch.randn(2, 4, device=device)
    parts = {name: torch.randn(2, 4, device=device) for name in NAMES}
    if draw.random() < 0.3:
        parts["c"] = 2.5  # type: ignore[assignment]  # a plain value beside tensors
    parts = shuffled(draw, parts)
    if how == "keywords":
        return (x,), parts
    if how == "dictionary":
        return (x, parts), {}
    if how == "ordered":
        ordered = OrderedDict(parts)
        ordered.move_to_end(draw.choice(NAMES))
        return (x,), {"inputs": ordered}
    if how == "set":
        return (x, draw.choice((set, frozenset))(set_of(draw))), {}
    batch = Batch(parts, set_of(draw))
    if draw.random() < 0.5:
        batch.parts = vars(batch).pop("parts")
    return (x,), shuffled(draw, {"batch": batch, "scale": 2.0})


# ---------------------------------------------------------------- parts

Make = Callable[[Any, Call, Path], Any]


def tuned_by(strategy: str) -> Make:
    def make(target: Any, call: Call, folder: Path) -> Any:
        options: dict[str, Any] = {"isolate": False, "remember": False, "progress": False}
        with choosing(strategy):
            return gw.tune(target, *call, strategies=[strategy], **options)

    return make


def loaded(target: Any, call: Call, folder: Path) -> Any:
    gw.save(tuned_by("torchscript")(target, call, folder), folder / "saved.gw")
    return gw.load(folder / "saved.gw", target, trust=True)


def loaded_alone(target: Any, call: Call, folder: Path) -> Any:
    gw.save(tuned_by("fused")(target, call, folder), folder / "saved.gw")
    return gw.load(folder / "saved.gw", trust=True)


PARTS: dict[str, Make] = {
    "graph": lambda target, call, _: gw.graph(target),
    "graph that was prepared": lambda target, call, _: prepared(target, call),
    "buckets": lambda target, call, _: gw.graph(target, buckets=gw.Buckets(batch=[2])),
    "capture": lambda target, call, _: gw.capture(target, *call[0], **call[1]),
    "fuse": lambda target, call, _: gw.fuse(target, *call),
    "tune": tuned_by("eager+graph"),
    "tune for fused kernels": tuned_by("fused"),
    "load": loaded,
    "load without the model": loaded_alone,
    "make_graphed_callables": lambda target, call, _: gw.make_graphed_callables(
        target, call[0], sample_kwargs=call[1]
    ),
}
# Where calls of another kind are refused.
REFUSE = ("capture", "load without the model")
SLOW = ("tune", "tune for fused kernels", "load", "load without the model")


def prepared(target: Any, call: Call) -> GraphedCallable:
    made = gw.graph(target)
    made.prepare([call], progress=False)
    return made


def bits(value: Any) -> bytes:
    return value.detach().cpu().numpy().tobytes()


def compared(
    part: str, observer: str, seed: int, count: int, device: torch.device, at: Path
) -> int:
    """Call something in random orders, and eager too; how many calls were answered."""
    draw = random.Random(f"{part} {observer} {seed}")
    torch.manual_seed(seed)
    make, how = OBSERVERS[observer]
    target = make()
    if isinstance(target, nn.Module):
        target.to(device).eval()
    twin = copy.deepcopy(target) if isinstance(target, nn.Module) else target
    if not isinstance(target, nn.Module):
        for module in models_in(target):
            module.to(device)
    answered = 0
    with torch.no_grad():
        sample = call_of(how, draw, device)
        try:
            mine = PARTS[part](target, copy.deepcopy(sample), at)
        except gw.GraphwrightError:
            return 0  # An object that this part takes none of, say.
        calls = [sample] + [call_of(how, draw, device) for _ in range(count)]
        for args, named in calls + calls:
            expected = twin(*args, **named)
            try:
                found = mine(*args, **named)
            except gw.SignatureError:
                assert part in REFUSE
                continue
            answered += 1
            if part.startswith(("tune", "load", "fuse")):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            else:
                assert bits(found) == bits(expected), (part, observer, seed, [*named])
    return answered


def models_in(target: Any) -> list[nn.Module]:
    target = target.func if isinstance(target, functools.partial) else target
    if isinstance(target, types.MethodType):
        return [target.__self__.model]
    return [cell.cell_contents for cell in target.__closure__]


PAIRS = [pytest.param(p, o, id=f"{p}-{o}") for p in PARTS if p not in SLOW for o in OBSERVERS]
ALL = [pytest.param(p, o, id=f"{p}-{o}") for p in PARTS for o in OBSERVERS]


@pytest.mark.parametrize(("part", "observer"), share(PAIRS))
def test_a_callable_sees_the_caller_s_order(
    part: str, observer: str, device: torch.device, tmp_path: Path
) -> None:
    compared(part, observer, 0, 3, device, tmp_path)


@pytest.mark.parametrize(
    "observer",
    [
        "an object",
        *(
            pytest.param(o, marks=pytest.mark.slow)
            for o in ("any keywords", "a hook with keywords")
        ),
    ],
)
@pytest.mark.parametrize("part", SLOW)
def test_what_is_tuned_sees_the_caller_s_order(
    part: str, observer: str, device: torch.device, tmp_path: Path
) -> None:
    compared(part, observer, 0, 2, device, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("part", "observer"), ALL)
def test_a_callable_sees_many_orders(
    part: str, observer: str, device: torch.device, tmp_path: Path
) -> None:
    for seed in range(1, 4 if part in SLOW else 11):
        compared(part, observer, seed, 6, device, tmp_path)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_answers_calls_that_see_their_order(
    part: str, device: torch.device, tmp_path: Path
) -> None:
    # The loop above would pass for a part that refuses everything.
    assert compared(part, "any keywords", 0, 1, device, tmp_path) >= 2


@pytest.mark.parametrize("observer", ["any keywords", "a hook with keywords", "keywords alone"])
def test_steps_of_training_see_the_caller_s_order(observer: str, device: torch.device) -> None:
    draw = random.Random(observer)
    make, how = OBSERVERS[observer]
    torch.manual_seed(0)
    models = [make().to(device)]  # type: ignore[attr-defined]  # all three are modules
    models.append(copy.deepcopy(models[0]))
    steps = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps.append(step_of(model, optimizer))
    x = torch.randn(2, 4, device=device)
    fast = gw.graph_step(steps[0], (x,))
    for _ in range(8):
        args, named = call_of(how, draw, device)
        assert bits(fast(*args, **named)) == bits(steps[1](*args, **named))
    assert fast.statistics.replays
    for mine, its in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert bits(mine) == bits(its)


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, **named: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, **(named or dict.fromkeys(NAMES, 1.0))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_gradients_are_those_of_the_caller_s_order(device: torch.device) -> None:
    model = AnyKeywords().to(device)
    twin = copy.deepcopy(model)
    x, b, a = (torch.randn(2, 4, device=device) for _ in range(3))
    gw.make_graphed_callables(model, (x,), sample_kwargs={"b": b, "a": a})
    for named in ({"b": b, "a": a}, {"a": a, "b": b}):
        model.zero_grad()
        twin.zero_grad()
        model(x, **named).square().sum().backward()
        twin(x, **named).square().sum().backward()
        assert bits(model.linear.weight.grad) == bits(twin.linear.weight.grad)


# ---------------------------------------------------------------- what is gained stays


def both_orders(device: torch.device) -> tuple[torch.Tensor, Named, Named]:
    x = torch.randn(2, 4, device=device)
    named = {
        "b": torch.randn(2, 4, device=device),
        "aa": torch.randn(2, 4, device=device),
        "c": 2.0,
    }
    return x, named, dict(reversed(named.items()))


def plain(device: torch.device) -> nn.Module:
    return KeywordOnly().to(device).eval()


@pytest.mark.parametrize("plain_value", [2.0, "tensor"])
def test_one_graph_answers_a_plain_forward_in_any_order(
    plain_value: Any, device: torch.device
) -> None:
    model = plain(device)
    x, one, other = both_orders(device)
    if plain_value == "tensor":
        one["c"] = other["c"] = torch.randn(2, 4, device=device)
    graphed = gw.graph(model, on_miss="capture")
    with torch.no_grad():
        for named in (one, other) * 4:
            assert bits(graphed(x, **named)) == bits(model(x, **named))
    assert (graphed.statistics.captures, graphed.statistics.hits) == (1, 8)
    captured = gw.capture(model, x, **one)
    assert bits(captured(x, **other)) == bits(model(x, **other))


def test_one_graph_answers_a_plain_forward_with_objects_in_any_order(device: torch.device) -> None:
    model = OfObject().to(device).eval()
    batch = Batch({"b": torch.randn(2, 4, device=device)}, {1})
    x = torch.randn(2, 4, device=device)
    captured = gw.capture(model, x, batch=batch, scale=2.0)
    assert bits(captured(x, scale=2.0, batch=batch)) == bits(model(x, batch=batch, scale=2.0))
    graphed = gw.graph(model)
    with torch.no_grad():
        for named in ({"batch": batch, "scale": 2.0}, {"scale": 2.0, "batch": batch}) * 3:
            assert bits(graphed(x, **named)) == bits(model(x, **named))
    assert graphed.statistics.captures == 1


def test_buckets_answer_a_plain_forward_in_any_order(device: torch.device) -> None:
    model = plain(device)
    x, one, other = both_orders(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for named in (one, other) * 4:
            torch.testing.assert_close(graphed(x, **named), model(x, **named))
    assert graphed.statistics.captures == 1
    assert graphed.statistics.padded == 8


def test_fused_kernels_answer_a_plain_forward_in_any_order(device: torch.device) -> None:
    model = plain(device)
    x, one, other = both_orders(device)
    fused = gw.fuse(model, (x,), one)
    with torch.no_grad():
        for named in (one, other) * 2:
            torch.testing.assert_close(fused(x, **named), model(x, **named))
    assert fused.calls == {"fused": 4}


@pytest.mark.parametrize("part", SLOW)
def test_what_was_tuned_answers_a_plain_forward_in_any_order(
    part: str, device: torch.device, tmp_path: Path
) -> None:
    model = plain(device)
    x, one, other = both_orders(device)
    tuned = PARTS[part](model, ((x,), one), tmp_path)
    assert isinstance(tuned, TunedModule)
    with torch.no_grad():
        for named in (one, other) * 2:
            torch.testing.assert_close(tuned(x, **named), model(x, **named))
    assert tuned.calls == {"tuned": 4}


def test_one_pair_of_graphs_answers_a_plain_forward_in_any_order(device: torch.device) -> None:
    model = plain(device).train()
    twin = copy.deepcopy(model)
    x, one, other = both_orders(device)
    gw.make_graphed_callables(model, (x,), sample_kwargs=one)
    for named in (one, other, one):
        assert bits(model(x, **named)) == bits(twin(x, **named))
    forward: Any = model.forward
    assert (forward.statistics.captures, forward.statistics.replays) == (1, 3)


def test_one_graph_answers_a_plain_step_in_any_order(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: Any = 1.0, z: Any = 2.0) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((model(x) - y) * z).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(2, 4, device=device)
    fast = gw.graph_step(step, (x,))
    for _ in range(2):
        fast(x, y=3.0, z=4.0)
        fast(x, z=4.0, y=3.0)
    assert fast.statistics.captures == 2  # One without the keywords, one with them.


# ---------------------------------------------------------------- who sees it


def bound(x: Any, *, y: Any = None) -> Any:
    return x


def any_keywords(x: Any, **named: Any) -> Any:
    return x


class OwnCall(KeywordOnly):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return super().__call__(*args, **named)


class Replaced(KeywordOnly):
    def __init__(self) -> None:
        super().__init__()
        self.forward = any_keywords  # type: ignore[assignment]  # another one's


class Methods:
    def plain(self, x: Any, y: Any) -> Any:
        return x

    def any_keywords(self, x: Any, **named: Any) -> Any:
        return x


def test_it_is_known_who_may_see_the_order() -> None:
    hooked_after = nn.Sequential()
    hooked_after.register_forward_hook(lambda m, args, named, y: None, with_kwargs=True)
    see = [
        any_keywords, AnyKeywords(), Decorated(), hooked(), hooked_after, OwnCall(), Replaced(),
        Methods().any_keywords, functools.partial(any_keywords, 1), functools.lru_cache(bound),
        torch.no_grad()(bound), dict, torch.compile(KeywordOnly(), backend="eager"),
    ]  # fmt: skip
    blind = [
        bound, KeywordOnly(), Methods().plain, functools.partial(bound, y=1),
        functools.partial(functools.partial(Methods().plain, 1)), fx.symbolic_trace(nn.ReLU()),
        torch.jit.script(nn.ReLU()), gw.fuse(nn.Sequential(nn.Linear(2, 2)).eval()),
    ]  # fmt: skip
    for each in see:
        assert sees_order(each), each
    for each in blind:
        assert not sees_order(each), each


def test_a_hook_that_comes_later_sees_the_order(device: torch.device) -> None:
    model = plain(device)
    x, one, other = both_orders(device)
    graphed, fused = gw.graph(model), gw.fuse(model, (x,), one)
    with torch.no_grad():
        for named in (one, other) * 3:
            graphed(x, **named)
        handle = model.register_forward_hook(
            lambda m, args, named, y: folded(y, named.values()), with_kwargs=True
        )
        for named in (one, other) * 3:
            for each in (graphed, fused):
                torch.testing.assert_close(each(x, **named), model(x, **named))
        handle.remove()
        for named in (one, other) * 3:
            assert bits(graphed(x, **named)) == bits(model(x, **named))


@pytest.mark.parametrize("value", ["tensor", 2.0, [2.0]])
def test_a_signature_fits_the_orders_that_it_was_made_for(value: Any) -> None:
    x = torch.randn(3)
    value = torch.randn(3) if value == "tensor" else value
    one, other = {"b": x, "a": value}, {"a": value, "b": x}
    strict = CallSignature.of((), one)
    assert strict.fits((), one)
    assert not strict.fits((), other)
    assert "another order" in (strict.differences((), other) or "")
    for either in (CallSignature.of((), one, any_order=True), strict.in_any_order()):
        assert either.fits((), one)
        assert either.fits((), other)
        assert either.differences((), other) is None
        assert [*either.in_order(other)] == [*one]
        assert not either.fits((), {"a": value, "c": x})
        assert not either.fits((), {"b": x})
    with signatures_without_guards():
        assert not strict.fits((), other)


class signatures_without_guards:  # noqa: N801  # a context manager reads like a function
    """The check of tensors that PyTorch makes in C++ fits nothing, as under another mode."""

    def __enter__(self) -> None:
        self.before = signatures.fitting
        signatures.fitting = lambda guard, values: False

    def __exit__(self, *_: object) -> None:
        signatures.fitting = self.before


# ---------------------------------------------------------------- sets and dictionaries


@pytest.mark.parametrize("values", [(0, 8), (8, 0), (16, 0, 8), (0, 16, 8), tuple("edcba"), ()])
@pytest.mark.parametrize("shrunk", [False, True])
def test_a_set_is_made_again_in_its_order(values: tuple[Any, ...], shrunk: bool) -> None:
    made: set[Any] = set()
    for value in values:
        made.add(value)
    if shrunk:  # Its table stays as large as it was.
        made.update(range(100, 150))
        for value in range(100, 150):
            made.discard(value)
    for each in (made, frozenset(made)):
        kind = SetKind.of(each)
        assert [*kind.build()] == [*each]
        assert type(kind.build()) is type(each)
        assert kind == SetKind.of(each)
        from_file = SetKind(kind.cls, kind.values)
        assert [*from_file.build()] == [*each]


def test_sets_of_other_orders_are_other_sets() -> None:
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    assert SetKind.of(one) != SetKind.of(other)
    assert SetKind.of({1}) != SetKind.of({True})


class Rotating(Layer):
    """Turns a dictionary of its own at each call, without a use for its order."""

    def __init__(self, table: Named) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = next(iter(self.table))
        self.table[first] = self.table.pop(first)
        return self.linear(x)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_call_that_turns_a_dictionary_leaves_it_as_eager_does(
    kind: type, device: torch.device
) -> None:
    model = Rotating(kind(a=1, b=2, c=3)).to(device).eval()
    twin, x = copy.deepcopy(model), torch.randn(2, 4, device=device)
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(4):
            assert bits(graphed(x)) == bits(twin(x))
            assert [*model.table] == [*twin.table]
    with pytest.raises(gw.CaptureError, match="the order of attribute table"):
        gw.capture(model, x)
    assert [*model.table] == [*twin.table]
