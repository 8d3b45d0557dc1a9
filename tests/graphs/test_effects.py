"""What a call does to objects and attributes, and what keeps it from being captured.

What goes wrong is in hazards_of_objects.py, random programs in test_random_objects.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import threading
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    note: Any = None


def test_an_object_is_built_again_without_its_init(device: torch.device) -> None:
    made = []

    class Counted:
        def __init__(self, x: torch.Tensor) -> None:
            made.append(1)
            self.x = x

    graph = gw.capture(lambda batch: Counted(batch.x * 2), Batch(torch.ones(2, device=device)))
    count = len(made)
    result = graph(Batch(torch.full((2,), 3.0, device=device)))
    assert type(result) is Counted
    torch.testing.assert_close(result.x, torch.full((2,), 6.0, device=device))
    assert len(made) == count


@pytest.mark.parametrize(
    ("note", "what"),
    [
        (threading.Lock(), r"args\[0\].note is an object of type lock"),
        ((n for n in ()), r"args\[0\].note is an object of type generator"),
        (nn.Linear(1, 1), r"args\[0\].note is an object of type Linear"),
        ([{"deep": open}], r"args\[0\].note\[0\]\['deep'\] is an object of type builtin"),
    ],
)
def test_what_cannot_be_seen_into_is_refused_by_name(note: Any, what: str) -> None:
    with pytest.raises(gw.CaptureError, match=what):
        gw.capture(lambda batch: batch.x * 2, Batch(torch.ones(2), note))


def test_an_object_that_holds_itself_is_refused_by_name() -> None:
    batch = Batch(torch.ones(2))
    batch.note = {"back": [batch]}
    with pytest.raises(gw.CaptureError, match=r"note\[0\]\[0\] refers back to \[0\]"):
        gw.capture(lambda batch: batch.x * 2, batch)


def test_an_object_with_a_finalizer_is_refused_by_name() -> None:
    class Closing(Batch):
        def __del__(self) -> None:
            pass

    with pytest.raises(gw.CaptureError, match=r"args\[0\] is an object of type .*Closing"):
        gw.capture(lambda batch: batch.x * 2, Closing(torch.ones(2)))


def test_a_registered_container_that_the_call_changes_is_refused() -> None:
    class Own:
        def __init__(self, items: list[Any]) -> None:
            self.items = items

    torch.utils._pytree.register_pytree_node(
        Own, lambda own: (own.items, None), lambda items, _: Own(list(items))
    )

    def grows(own: Own) -> torch.Tensor:
        own.items.append(own.items[0])
        return own.items[0] * 2

    with pytest.raises(gw.CaptureError, match="a Own, in a way of its own"):
        gw.capture(grows, Own([torch.ones(2)]))


def test_the_first_call_with_objects_is_eager_and_nobody_is_warned(device: torch.device) -> None:
    graphed = gw.graph(lambda batch: batch.x * 2)
    for n in range(3):
        graphed(Batch(torch.full((2,), float(n), device=device)))
    assert graphed.statistics.hits == 2
    assert graphed.statistics.eager == {"the first call with objects of these shapes": 1}
    assert "1 call eager: the first call with objects" in graphed.explain()


def test_a_container_that_was_given_comes_back_as_itself(device: torch.device) -> None:
    def adds(kept: dict[str, Any], rows: collections.deque[Any]) -> Any:
        kept["y"] = kept["x"] * 2
        rows.append(kept["y"] + 1)
        return kept, rows

    def given() -> tuple[Any, Any]:
        return {"x": torch.ones(2, device=device)}, collections.deque([1])

    graphed = gw.graph(adds)
    graphed.prepare([given()])
    kept, rows = given()
    one, other = graphed(kept, rows)
    assert one is kept
    assert other is rows
    torch.testing.assert_close(rows[1], torch.full((2,), 3.0, device=device))


def test_a_state_that_the_call_reads_is_refused_and_stays_right(device: torch.device) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(1, 4, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.state = self.state, x * 2
            return torch.where(x.sum() > 100, before, x)

    model, its = Recurrent().eval(), Recurrent().eval()
    with pytest.raises(gw.CaptureError, match="attribute state of Recurrent changes"):
        gw.capture(model, torch.ones(1, 4, device=device))
    graphed = gw.graph(model)
    for scale in (0.0, 1.0, 1000.0, 2000.0):
        x = torch.full((1, 4), scale, device=device)
        torch.testing.assert_close(graphed(x), its(x))
        torch.testing.assert_close(model.state, its.state)


def test_hooks_that_keep_what_they_see(device: torch.device) -> None:
    seen: dict[str, torch.Tensor] = {}
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval().to(device)
    model[0].register_forward_hook(lambda module, args, result: seen.__setitem__("out", result))
    graphed = gw.graph(model)
    with torch.no_grad():
        for n in range(3):
            x = torch.full((2, 4), float(n), device=device)
            graphed(x)
            torch.testing.assert_close(seen["out"], model[0](x))
    assert graphed.statistics.hits == 3
    assert graphed.statistics.captures == 1
    assert "sets the variable seen['out']" in graphed.explain()


def test_captures_leave_attributes_as_they_were(device: torch.device) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return x + 1

    model = Keeps().eval()
    graph = gw.capture(model, torch.ones(2, device=device))
    assert model.last is None
    graph(torch.full((2,), 4.0, device=device))
    torch.testing.assert_close(model.last, torch.full((2,), 8.0, device=device))


# What one call does that another has to know of.


class Chosen(nn.Module):
    """Does what a function says, with itself."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.does = does
        self.last: Any = None
        self.cache = Batch(torch.ones(2))

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


def writes_or_reads(m: Any, x: torch.Tensor, write: bool) -> Any:
    if write:
        m.last = x * 2
        return x + 1
    return m.last + x


def sets_or_clears(m: Any, x: torch.Tensor, keep: bool) -> Any:
    m.last = x * 2 if keep else None
    return x + 1


def writes_on_one_path(m: Any, x: torch.Tensor, _: bool) -> Any:
    h = x * 2
    if h.sum() > 0:
        m.last = h + 0
        return h
    return h + m.last


def starts_otherwise(m: Any, x: torch.Tensor, _: bool) -> Any:
    m.last = x * 2 if m.last is None else x * 3
    return x + 1


def asks_what_it_held(m: Any, x: torch.Tensor, _: bool) -> Any:
    twice = getattr(m, "last", None) is not None and m.last.dim() == 2
    m.last = x[0]
    return x * 2 if twice else x * 3


def returns_what_it_has(m: Any, x: torch.Tensor, _: bool) -> Any:
    m.last = {"cache": m.cache, "y": x * 2}
    return {"y": x * 2, "cache": m.cache}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "does",
    [
        writes_or_reads,
        sets_or_clears,
        writes_on_one_path,
        starts_otherwise,
        asks_what_it_held,
        returns_what_it_has,
    ],
)
def test_attributes_that_calls_of_several_kinds_set_and_read(
    does: Any, prepared: bool, device: torch.device
) -> None:
    model, its = (Chosen(does).eval().to(device) for _ in range(2))
    graphed = gw.graph(model)
    with torch.no_grad():
        if prepared and does in (writes_or_reads, sets_or_clears):
            model.last = its.last = torch.ones(2, 2, device=device)
            with contextlib.suppress(gw.CaptureError):
                sample = torch.ones(2, 2, device=device)
                graphed.prepare([(sample, True), (sample, False)])
        for n, flag in enumerate([True, True, False, True, False, False, True, False] * 2):
            x = torch.full((2, 2), (n + 1.0) * (1 if flag else -1), device=device)
            result, wanted = graphed(x, flag), its(x, flag)
            if does is returns_what_it_has:
                assert result["cache"] is model.cache
                assert model.last["cache"] is model.cache
                result, wanted = result["y"], wanted["y"]
                continue
            torch.testing.assert_close(result, wanted)
            assert (model.last is None) == (its.last is None)
            if its.last is not None:
                torch.testing.assert_close(model.last, its.last)


def test_a_module_that_sets_an_attribute_has_graphs_of_all_shapes(device: torch.device) -> None:
    model = Chosen(sets_or_clears).eval().to(device)
    graphed = gw.graph(model)
    with torch.no_grad():
        graphed.prepare([(torch.ones(n, 2, device=device), True) for n in (64, 8, 1)])
        for _ in range(20):
            for n in (64, 8, 1):
                x = torch.randn(n, 2, device=device)
                graphed(x, True)
                torch.testing.assert_close(model.last, x * 2)
    assert graphed.statistics.hits >= 57
    assert graphed.statistics.eager == {}


def test_what_was_replaced_is_kept_alive_by_nobody(device: torch.device) -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, Any] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table["v"] = x * 2
            return x + 1

    model = Filling().eval()
    graphed, x = gw.graph(model), torch.ones(2, device=device)
    held = []
    for _ in range(6):
        model.table = {"large": torch.zeros(5, device=device)}
        held.append(weakref.ref(model.table["large"]))
        graphed(x)
        graphed(x)
    graphed.release()
    gc.collect()
    assert sum(each() is not None for each in held) <= 1


# Identity, order and classes.


class Remembers(nn.Module):
    last: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        before, self.last = self.last, x * 2
        return x + 1, before


@pytest.mark.filterwarnings("ignore")
def test_what_an_attribute_of_the_class_held_before_is_not_lost(device: torch.device) -> None:
    graphed, eager = gw.graph(Remembers().eval()), Remembers().eval()
    found = []
    with torch.no_grad():
        for n in range(4):
            x = torch.full((2,), float(n), device=device)
            found.append((graphed(x)[1], eager(x)[1]))
    for mine, its in found:
        torch.testing.assert_close(mine, its)


class Sentinel:
    pass


SENTINEL = Sentinel()


def is_sentinel(x: torch.Tensor, batch: Any) -> Any:
    return x * 2 if batch is SENTINEL else x * 3


def test_an_argument_that_the_function_knows_is_no_copy(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    graphed = gw.graph(is_sentinel)
    for batch in (Sentinel(), Sentinel(), SENTINEL, SENTINEL, Sentinel()):
        torch.testing.assert_close(graphed(x, batch), is_sentinel(x, batch))

    model = Chosen(lambda m, x, batch: (setattr(batch, "x", x * 2), m.cache.x + 1)[1]).eval()
    graphed = gw.graph(model.to(device))
    for n in range(4):
        x = torch.full((2,), float(n), device=device)
        torch.testing.assert_close(graphed(x, model.cache), x * 2 + 1)


def test_objects_of_the_function_s_own_come_back_as_themselves(device: torch.device) -> None:
    def marks(x: torch.Tensor, batch: Batch) -> Any:
        batch.note = SENTINEL
        return {"x": x * 2, "mark": SENTINEL}

    graphed, x = gw.graph(marks), torch.ones(2, device=device)
    graphed.prepare([(x, Batch(x))])
    batch = Batch(x)
    assert graphed(x, batch)["mark"] is SENTINEL
    assert batch.note is SENTINEL


def rebinds(x: torch.Tensor, one: Batch, other: Batch) -> torch.Tensor:
    one.note = list(one.note)
    one.x, other.x = other.x, one.x
    return x * 2


def test_equal_lists_are_two_lists(device: torch.device) -> None:
    def given() -> tuple[Any, ...]:
        shared = [1, 2]
        return (
            torch.ones(2, device=device),
            Batch(torch.ones(2, device=device), shared),
            Batch(torch.zeros(2, device=device), shared),
        )

    graphed = gw.graph(rebinds)
    graphed.prepare([tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in given())])
    x, one, other = given()
    before, its = one.x, other.x
    graphed(x, one, other)
    assert one.note is not other.note
    assert one.x is its
    assert other.x is before


def reorders(x: torch.Tensor, kept: dict[str, Any], first: bool) -> torch.Tensor:
    if first:
        value = kept.pop("a")
        kept["b"] = x
        kept["a"] = value * 2
    else:
        before = dict(kept)
        kept.clear()
        kept["new"] = x * 2
        kept.update(before)
    return x


@pytest.mark.parametrize("first", [True, False])
def test_keys_are_in_the_order_of_eager(first: bool, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    mine, its = {"a": x, "c": 1}, {"a": x, "c": 1}
    graph = gw.capture(reorders, x, dict(its), first)
    graph(x, mine, first)
    reorders(x, its, first)
    assert [*mine] == [*its]


def test_another_class_or_a_weight_in_an_object_is_refused(device: torch.device) -> None:
    class Other(Batch):
        pass

    linear = nn.Linear(2, 2).to(device)

    def becomes(batch: Batch) -> torch.Tensor:
        batch.__class__ = Other
        return batch.x * 2

    def takes_a_weight(batch: Batch) -> torch.Tensor:
        batch.note = linear.weight
        return batch.x * 2

    for fn in (becomes, takes_a_weight):
        with pytest.raises(gw.CaptureError, match="changes a container"), torch.no_grad():
            gw.capture(fn, Batch(torch.ones(2, device=device)))


def test_static_outputs_and_effects_are_refused(device: torch.device) -> None:
    def shifts(x: torch.Tensor, batch: Batch) -> torch.Tensor:
        batch.x = torch.cat([batch.x[1:], x])
        return x * 2

    x = torch.ones(1, device=device)
    with pytest.raises(gw.CaptureError, match="the next replay overwrites"):
        gw.capture(shifts, x, Batch(torch.ones(3, device=device)), outputs="static")


def test_deep_objects_are_eager() -> None:
    chain: Any = None
    for _ in range(400):
        chain = Batch(torch.ones(1), chain)
    graphed = gw.graph(lambda x, chain: x * 2 + chain.x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(graphed(torch.ones(1), chain), torch.full((1,), 3.0))


class Base(nn.Module):
    """Counts its calls in its class, and keeps what it computed there."""

    calls = 0
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cls = type(self)
        cls.calls += 1
        before = 0.0 if cls.last is None else cls.last
        cls.last = self.linear(x) + before
        return cls.last * cls.calls


def test_a_refused_capture_leaves_attributes_of_classes_alone(device: torch.device) -> None:
    class Inherits(Base):
        pass

    class Own(Base):
        calls = 0

    class Other(Base):
        calls = 0

    for cls in (Inherits, Own):
        torch.manual_seed(0)
        model = cls().eval().to(device)
        its = Other().eval().to(device)
        its.load_state_dict(model.state_dict())
        Other.calls, Other.last = 0, None
        graphed = gw.graph(model)
        with torch.no_grad():
            for n in range(1, 5):
                x = torch.randn(2, 4, device=device)
                torch.testing.assert_close(graphed(x), its(x))
                assert cls.calls == n
    assert Base.calls == 0
    assert Base.last is None


class Lazily(nn.Module):
    """Counts, and makes what it counts in when it is first needed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.ready = how, False
        self.items: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n: int = getattr(self, "n", 0)
        if self.how == "attribute":
            self.n = n + 1
        elif self.how == "item":
            self.items["n"] = self.items.get("n", 0) + 1
        elif self.how == "set up once":
            if not self.ready:
                self.n, self.ready = 100, True
            self.n += 1
        else:
            try:
                self.n += 1
            except AttributeError:
                self.n = 1
        return x * 2


@pytest.mark.parametrize("how", ["attribute", "item", "set up once", "try"])
def test_a_counter_that_the_first_call_makes_counts_on(how: str, device: torch.device) -> None:
    model, plain, x = Lazily(how).eval(), Lazily(how).eval(), torch.ones(3, device=device)
    graphed = gw.graph(model)
    for _ in range(40):
        assert torch.equal(graphed(x), plain(x))
        assert getattr(model, "n", 0) == getattr(plain, "n", 0)
        assert model.items == plain.items
    assert graphed.statistics.hits >= 16
    with gw.capture(plain := Lazily(how).eval(), x) as graph:
        graph(x)
        graph(x)
        assert (plain.items.get("n") or plain.n) == (102 if how == "set up once" else 2)


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {}
        self.held = types.SimpleNamespace(mean=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stats["mean"] = self.held.mean = x.mean()
        return x * 2


@pytest.mark.parametrize("name", ["stats", "held"])
def test_effects_reach_what_took_the_place_of_a_container(name: str, device: torch.device) -> None:
    model, x = Collects().eval(), torch.ones(3, device=device)
    graphed = gw.graph(model)
    for n in range(4):
        for k in range(3):
            graphed(x * (n + k))
            assert model.stats["mean"] == model.held.mean == n + k
        setattr(model, name, {} if name == "stats" else types.SimpleNamespace(mean=None))
    assert graphed.statistics.hits
    captured = gw.capture(model, x)
    captured(x)
    setattr(model, name, {} if name == "stats" else types.SimpleNamespace(mean=None))
    with pytest.raises(gw.SignatureError, match=r"replaced|added"):
        captured(x)


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "set":
            self.items["h"] = x * 2
        elif how == "forget":
            self.items.pop("h", None)
        elif "h" in self.items:
            return x + self.items["h"]
        return x + 1


def test_what_another_kind_of_call_left_is_removed(device: torch.device) -> None:
    model, plain, x = Forgets().eval(), Forgets().eval(), torch.ones(3, device=device)
    graphed = gw.graph(model)
    for how in ("set", "forget", "set", "forget", "get", "set", "get", "forget", "get") * 3:
        assert torch.equal(graphed(x, how), plain(x, how))
        assert model.items.keys() == plain.items.keys()


@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_that_holds_itself_is_eager_s_or_refused(kind: type) -> None:
    held: Any = kind()
    held.append(held) if kind is list else held.update(me=held)
    x = torch.randn(3)
    for options in ({}, {"buckets": gw.Buckets(batch=[4])}):
        graphed = gw.graph(lambda x, held: x * len(held), **options)
        for _ in range(3):
            assert torch.equal(graphed(x, held), x)
    for maker in (gw.fuse, gw.tune):
        with pytest.raises(gw.SignatureError, match="holds itself"):
            maker(nn.Identity().eval(), (x, held))
