"""What operations read and no walk over the module finds: watched where it is held, or refused."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import enum
import functools
import gc
import itertools
import logging
import queue
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls import holders
from graphwright.graphs import reads
from graphwright.strategies.base import AVAILABLE
from graphwright.strategies.runners import GRAPH
from graphwright.tuning.tuner import Tuning

# Names of globals are computed here, of which a warning tells once for each function.
pytestmark = pytest.mark.filterwarnings("ignore:Not watched:RuntimeWarning")

Read = Callable[[], torch.Tensor]
Replace = Callable[[torch.Tensor], object]
Place = tuple[Read, Replace]


@dataclass
class Store:
    """What the functions below keep: no code of a call names it."""

    value: Any = None


@pytest.fixture(autouse=True)
def nothing_thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches look at what tests have made alone, which is faster by far."""
    monkeypatch.setattr(reads, "thaw", lambda: None)
    monkeypatch.setitem(sys.modules, "kept_by_a_test", types.ModuleType("kept_by_a_test"))


class InC(ctypes.Structure):
    _fields_ = (("value", ctypes.py_object),)


class Slots:
    __slots__ = ("value",)


def hidden(store: Any) -> Callable[[], Any]:
    """Finds an object under a name that is computed."""
    name = f"kept_{id(store)}"
    module = sys.modules["kept_by_a_test"]
    module.__dict__.update({name: store, "__builtins__": {}})
    parts = name[:4], name[4:]
    return lambda: sys.modules["kept_by" + "_a_test"].__dict__["".join(parts)]


def in_a_namespace(first: torch.Tensor) -> Place:
    namespace: dict[str, Any] = {"value": first}
    exec('def read(): return globals()["".join(["val", "ue"])]', namespace)
    return namespace["read"], lambda new: namespace.update(value=new)


def in_an_object(first: torch.Tensor) -> Place:
    find = hidden(Store(first))
    return lambda: find().value, lambda new: setattr(find(), "value", new)


def in_an_object_that_is_replaced(first: torch.Tensor) -> Place:
    outer = Store(Store(first))
    find = hidden(outer)
    return lambda: find().value.value, lambda new: setattr(outer, "value", Store(new))


def in_slots(first: torch.Tensor) -> Place:
    slots = Slots()
    slots.value = first
    find = hidden(slots)
    return lambda: find().value, lambda new: setattr(slots, "value", new)


def in_a_dictionary(first: torch.Tensor) -> Place:
    kept = {1: first}
    find = hidden(kept)
    return lambda: find()[1], lambda new: kept.update({1: new})


def in_a_list(first: torch.Tensor) -> Place:
    kept = [first]
    find = hidden(kept)
    return lambda: find()[0], lambda new: kept.__setitem__(0, new)


def at_another_place_of_a_list(first: torch.Tensor) -> Place:
    kept = [first, first + 1]
    find = hidden(kept)
    return lambda: find()[0], lambda new: kept.reverse()


def in_a_long_list(first: torch.Tensor) -> Place:
    kept = [first] + [torch.zeros(())] * 2000
    return lambda: kept[0], lambda new: kept.__setitem__(0, new)


def in_a_bounded_cache(first: torch.Tensor) -> Place:
    store = Store(first)
    find = hidden(store)

    @functools.lru_cache(maxsize=4)
    def cached(key: int) -> torch.Tensor:
        made: torch.Tensor = find().value.clone()
        return made

    def replace(new: torch.Tensor) -> None:
        store.value = new
        cached.cache_clear()

    return lambda: cached(1), replace


def in_a_cache(first: torch.Tensor) -> Place:
    store = Store(first)
    find = hidden(store)

    @functools.cache
    def cached(key: int) -> torch.Tensor:
        made: torch.Tensor = find().value.clone()
        return made

    def replace(new: torch.Tensor) -> None:
        store.value = new
        cached.cache_clear()

    return lambda: cached(1), replace


def in_a_cache_of_objects(first: torch.Tensor) -> Place:
    """As in_a_bounded_cache, with the tensor in an object that the cache holds."""
    store = Store(first)
    find = hidden(store)

    @functools.lru_cache(maxsize=4)
    def cached(key: int) -> Store:
        return Store(find().value.clone())

    def replace(new: torch.Tensor) -> None:
        store.value = new
        cached.cache_clear()

    return lambda: cached(1).value, replace  # type: ignore[no-any-return]  # a Store's value


def in_a_generator(first: torch.Tensor) -> Place:
    def generate() -> Iterator[Any]:
        held = first
        while True:
            new = yield held
            held = held if new is None else new

    running: Any = generate()
    next(running)
    find = hidden(running)
    return lambda: find().send(None), lambda new: running.send(new)  # type: ignore[no-any-return]


def behind_a_weak_reference(first: torch.Tensor) -> Place:
    kept = [first]
    store = Store(weakref.ref(first))
    find = hidden(store)

    def replace(new: torch.Tensor) -> None:
        kept.append(new)
        store.value = weakref.ref(new)

    return lambda: find().value(), replace  # type: ignore[no-any-return]  # a weak reference


def among_weak_values(first: torch.Tensor) -> Place:
    kept = [first]
    weak = weakref.WeakValueDictionary({1: first})
    find = hidden((weak, kept))

    def replace(new: torch.Tensor) -> None:
        kept.append(new)
        weak[1] = new

    return lambda: find()[0][1], replace


def in_a_context_variable(first: torch.Tensor) -> Place:
    variable = contextvars.ContextVar[torch.Tensor](f"kept_{id(first)}")
    variable.set(first)
    return variable.get, variable.set


def in_an_object_in_a_context_variable(first: torch.Tensor) -> Place:
    variable = contextvars.ContextVar[Store](f"kept_{id(first)}")
    variable.set(Store(first))
    return lambda: variable.get().value, lambda new: variable.set(Store(new))  # type: ignore[no-any-return]


def in_a_thread_local(first: torch.Tensor) -> Place:
    local = threading.local()
    local.value = first
    return lambda: local.value, lambda new: setattr(local, "value", new)


def in_a_logger(first: torch.Tensor) -> Place:
    logger: Any = logging.Logger("kept")
    logger.value = first
    return lambda: logger.value, lambda new: setattr(logger, "value", new)


def in_a_queue(first: torch.Tensor) -> Place:
    waiting: queue.Queue[torch.Tensor] = queue.Queue()
    waiting.put(first)
    return lambda: waiting.queue[0], lambda new: waiting.queue.__setitem__(0, new)


def in_a_future(first: torch.Tensor) -> Place:
    box: list[Any] = [Future()]
    box[0].set_result(first)
    find = hidden(box)

    def replace(new: torch.Tensor) -> None:
        box[0] = Future()
        box[0].set_result(new)

    return lambda: find()[0].result(), replace  # type: ignore[no-any-return]  # a Future's


def in_an_event_loop(first: torch.Tensor) -> Place:
    lock: Any = asyncio.Lock()
    lock.value = first
    return lambda: lock.value, lambda new: setattr(lock, "value", new)


def in_an_enumeration(first: torch.Tensor) -> Place:
    made: Any = enum.Enum("made", "ONE")
    made.ONE.held = first
    find = hidden(made)
    return lambda: find().ONE.held, lambda new: setattr(made.ONE, "held", new)


def at_a_function(first: torch.Tensor) -> Place:
    def function() -> None:
        pass

    marked: Any = function
    marked.value = first
    find = hidden(marked)
    return lambda: find().value, lambda new: setattr(marked, "value", new)


def in_a_closure(first: torch.Tensor) -> Place:
    value = first

    def get() -> torch.Tensor:
        return value

    def put(new: torch.Tensor) -> None:
        nonlocal value
        value = new

    find = hidden(get)
    return lambda: find()(), put  # type: ignore[no-any-return]  # it is `get`


def in_a_module(first: torch.Tensor) -> Place:
    made: Any = types.ModuleType("json.of_a_test")
    made.value = first
    find = hidden(made)
    return lambda: find().value, lambda new: setattr(made, "value", new)


def in_a_class(first: torch.Tensor) -> Place:
    made: Any = type("Made", (), {"value": first})
    find = hidden(made)
    return lambda: find().value, lambda new: setattr(made, "value", new)


def in_an_iterator(first: torch.Tensor) -> Place:
    box: list[Any] = [itertools.repeat(first)]
    find = hidden(box)
    return lambda: next(find()[0]), lambda new: box.__setitem__(0, itertools.repeat(new))


def in_an_array(first: torch.Tensor) -> Place:
    array = np.empty(1, dtype=object)
    array[0] = first
    find = hidden(array)
    return lambda: find()[0], lambda new: array.__setitem__(0, new)


def in_a_structure_of_c(first: torch.Tensor) -> Place:
    structure = InC(first)
    find = hidden(structure)
    return lambda: find().value, lambda new: setattr(structure, "value", new)


KINDS = [
    in_a_namespace,
    in_an_object,
    in_an_object_that_is_replaced,
    in_slots,
    in_a_dictionary,
    in_a_list,
    at_another_place_of_a_list,
    in_a_long_list,
    in_a_bounded_cache,
    in_a_cache,
    in_a_cache_of_objects,
    in_a_generator,
    behind_a_weak_reference,
    among_weak_values,
    in_a_context_variable,
    in_an_object_in_a_context_variable,
    in_a_thread_local,
    in_a_logger,
    in_a_queue,
    in_a_future,
    in_an_event_loop,
    in_an_enumeration,
    at_a_function,
    in_a_closure,
    in_a_module,
    in_a_class,
    in_an_iterator,
    in_an_array,
    in_a_structure_of_c,
]
# Held by what the collector does not look into.
REFUSED = (in_an_array,)


class Scaled(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.read()
        return y


def made(kind: Callable[[torch.Tensor], Place], device: torch.device) -> tuple[Scaled, Replace]:
    """A module that reads a tensor from a place, and what puts another there."""
    read, replace = kind(torch.full((4,), 2.0, device=device))
    return Scaled(read).to(device), replace


def other(device: torch.device) -> torch.Tensor:
    return torch.full((4,), 3.0, device=device)


def graphed(module: Scaled) -> Callable[[torch.Tensor], torch.Tensor]:
    """By gw.graph."""
    made = gw.graph(module.eval())

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = made(x)
        return result

    return call


def captured(module: Scaled) -> Callable[[torch.Tensor], torch.Tensor]:
    """By gw.capture, which says what has changed."""
    x = torch.randn(2, 4, device=module.layer.weight.device)
    with torch.no_grad():
        made = gw.capture(module.eval(), x)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            try:
                result: torch.Tensor = made(x)
            except gw.SignatureError as error:
                if "was replaced" not in error.what:
                    raise
                return module(x)  # type: ignore[no-any-return]  # a tensor
        return result

    return call


def graphed_for_training(module: Scaled) -> Callable[[torch.Tensor], torch.Tensor]:
    """By gw.make_graphed_callables, with the gradient of the weight."""
    twin = Scaled(module.read)
    twin.layer = module.layer
    x = torch.randn(2, 4, device=module.layer.weight.device)
    made = gw.make_graphed_callables(twin, (x,))
    return functools.partial(with_gradient, made)


def with_gradient(module: Scaled, x: torch.Tensor) -> torch.Tensor:
    y = module(x)
    return torch.cat([y.detach(), *torch.autograd.grad(y.sum(), [module.layer.weight])])


def step_with(module: Scaled) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of training."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]  # a tensor

    return step


def stepped(module: Scaled) -> Callable[[torch.Tensor], torch.Tensor]:
    """By gw.graph_step, on other weights of the same values."""
    twin = Scaled(module.read).to(module.layer.weight.device)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(2, 4, device=module.layer.weight.device)
    return gw.graph_step(step_with(twin), x)


Call = Callable[[torch.Tensor], torch.Tensor]
# How it is captured, and what eager code does.
WAYS: dict[str, tuple[Callable[[Scaled], Call], Callable[[Scaled], Call]]] = {
    "graph": (graphed, lambda module: torch.no_grad()(module)),
    "capture": (captured, lambda module: torch.no_grad()(module)),
    "make_graphed_callables": (
        graphed_for_training,
        lambda module: functools.partial(with_gradient, module),
    ),
    "graph_step": (stepped, step_with),
}


def keeps_pace(
    way: str, kind: Callable[[torch.Tensor], Place], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Results of calls before and after the tensor is replaced, and eager's."""
    module, replace = made(kind, device)
    by_graph, by_eager = WAYS[way]
    call, eager = by_graph(module), by_eager(module)
    for _ in range(3):
        x = torch.randn(2, 4, device=device)
        yield call(x), eager(x)
    replace(other(device))
    for _ in range(2):
        x = torch.randn(2, 4, device=device)
        yield call(x), eager(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_tensor_that_is_replaced_where_no_name_leads_is_noticed(
    kind: Callable[[torch.Tensor], Place], way: str, device: torch.device
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # A step that is refused runs eagerly.
        if kind in REFUSED and way != "graph":
            with pytest.raises(gw.CaptureError, match="nobody could see replaced"):
                list(keeps_pace(way, kind, device))
            return
        for mine, its in keeps_pace(way, kind, device):
            torch.testing.assert_close(mine, its)


def nothing_is_unseen(patch: pytest.MonkeyPatch) -> None:
    """What operations read from elsewhere is not looked at."""
    patch.setattr(reads, "_unseen", lambda read, watch, used: [])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_shows_without_the_protection(
    kind: Callable[[torch.Tensor], Place],
    way: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing_is_unseen(monkeypatch)
    wrong = [not torch.allclose(mine, its) for mine, its in keeps_pace(way, kind, device)]
    assert wrong[:3] == [False] * 3
    assert wrong[3], "the check passes without its protection"


def test_what_is_refused_names_the_operation_and_the_line(device: torch.device) -> None:
    module, _ = made(in_an_array, device)
    with torch.no_grad(), pytest.raises(gw.CaptureError) as caught:
        gw.capture(module.eval(), torch.randn(2, 4, device=device))
    error = caught.value
    assert error.what.startswith("aten.mul.Tensor reads a tensor (4, float32)")
    assert error.where is not None
    assert __file__ in error.where
    assert "argument" in (error.remedy or "")


def test_an_array_is_noticed_though_a_list_holds_its_tensor_too(device: torch.device) -> None:
    """A holder that is found need not be the one that the call asks."""
    first = torch.full((4,), 2.0, device=device)
    hidden([first])
    read, _ = in_an_array(first)
    with torch.no_grad(), pytest.raises(gw.CaptureError, match="nobody could see replaced"):
        gw.capture(Scaled(read).to(device).eval(), torch.randn(2, 4, device=device))


def test_what_the_program_has_frozen_is_searched_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "thaw", holders.thaw)
    module, replace = made(in_an_object, device)
    gc.freeze()
    made_of_it, x = gw.graph(module.eval()), torch.randn(2, 4, device=device)
    with torch.no_grad():
        torch.testing.assert_close(made_of_it(x), module(x))
        replace(other(device))
        torch.testing.assert_close(made_of_it(x), module(x))
    assert made_of_it.statistics.captures == 2


def test_a_call_that_takes_another_tensor_each_time_is_eager(device: torch.device) -> None:
    held = [torch.full((4,), float(i), device=device) for i in range(12)]
    find = hidden((held, []))  # and how often it was asked

    def read() -> torch.Tensor:
        tensors, asked = find()
        asked.append(None)
        return tensors[len(asked) % 12]  # type: ignore[no-any-return]  # a tensor

    module = Scaled(read).to(device).eval()
    call, x = gw.graph(module), torch.randn(2, 4, device=device)
    with torch.no_grad():
        for _ in range(3):
            mine = call(x)
            find()[1].pop()  # The very same again.
            torch.testing.assert_close(mine, module(x))
    assert call.statistics.captures == 0


def test_another_view_of_a_watched_tensor_is_noticed(device: torch.device) -> None:
    module = Scaled(lambda: torch.empty(0)).to(device).eval()
    store = Store(module.layer.weight.detach()[0])
    find = hidden(store)
    module.read = lambda: find().value  # type: ignore[no-any-return]  # a Store's
    call, x = graphed(module), torch.randn(2, 4, device=device)
    for row in (0, 1, 0):
        store.value = module.layer.weight.detach()[row]
        torch.testing.assert_close(call(x), torch.no_grad()(module)(x))


def test_a_gradient_that_a_call_reads_is_watched(device: torch.device) -> None:
    module = Scaled(lambda: torch.empty(0)).to(device).eval()
    weight = module.layer.weight
    module.read = lambda: weight.grad[0]  # type: ignore[index,return-value]  # it has one
    made, x = gw.graph(module), torch.randn(2, 4, device=device)
    with torch.no_grad():
        for value in (2.0, 3.0):
            weight.grad = torch.full((4, 4), value, device=device)
            torch.testing.assert_close(made(x), module(x))
    assert made.statistics.captures == 2


def test_each_thread_has_what_its_own_variables_hold(device: torch.device) -> None:
    local = threading.local()
    module = Scaled(lambda: local.value).to(device).eval()  # type: ignore[no-any-return]  # below
    call, x = graphed(module), torch.randn(2, 4, device=device)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(value: float) -> None:
        local.value = torch.full((4,), value, device=device)
        found.append((call(x), torch.no_grad()(module)(x)))

    run(2.0)
    thread = threading.Thread(target=run, args=(3.0,))
    thread.start()
    thread.join()
    found.append((call(x), torch.no_grad()(module)(x)))
    assert len(found) == 3
    for mine, its in found:
        torch.testing.assert_close(mine, its)


def test_a_new_path_through_segments_is_looked_at_too(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * read()

    read, replace = in_an_object(torch.full((4,), 2.0, device=device))
    call, x = gw.graph(fn), torch.rand(2, 4, device=device) + 1
    for given in (x, -x, -x):
        torch.testing.assert_close(call(given), fn(given))
    replace(other(device))
    for given in (x, -x, -x, x):
        torch.testing.assert_close(call(given), fn(given))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_new_path_that_nobody_could_watch_is_eager(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * read()

    read, replace = in_an_array(torch.full((4,), 2.0, device=device))
    call, x = gw.graph(fn), torch.rand(2, 4, device=device) + 1
    for given in (x, -x, -x):
        torch.testing.assert_close(call(given), fn(given))
    assert "nobody could see replaced" in call.explain()
    replace(other(device))
    for given in (x, -x, -x, x):
        torch.testing.assert_close(call(given), fn(given))


def test_a_cache_that_the_first_call_fills_costs_one_capture(device: torch.device) -> None:
    @functools.lru_cache(maxsize=4)
    def positions(length: int) -> torch.Tensor:
        return torch.arange(float(length), device=device)

    call = gw.graph(lambda x: x * positions(x.shape[-1]))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(call(x), x * positions(4))
        for length in (5, 6):  # Others in the cache are no change.
            x = torch.randn(2, length, device=device)
            torch.testing.assert_close(call(x), x * positions(length))
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(call(x), x * positions(4))
    assert call.statistics.captures == 3


def packed(scale: float) -> Any:
    """The weights of a quantized layer, as its operation takes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecation
        layer = torch.ao.nn.quantized.dynamic.Linear(4, 4)
        weight = torch.quantize_per_tensor(torch.eye(4) * scale, 0.1, 0, torch.qint8)
        layer.set_weight_bias(weight, torch.zeros(4))
    return layer._packed_params._packed_params


@pytest.mark.parametrize(
    "kind",
    [in_an_object, in_a_dictionary, in_a_list, in_a_context_variable, in_an_array],
    ids=lambda kind: kind.__name__,
)
def test_an_object_of_torchscript_s_is_looked_at_like_a_tensor(
    kind: Callable[[Any], Place],
) -> None:
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("this PyTorch has no quantized operators")
    read, replace = kind(packed(1.0))
    fn = functools.partial(multiplied, read)
    call = gw.graph(fn)
    with torch.no_grad():
        for scale in (None, 2.0):
            if scale is not None:
                replace(packed(scale))
            x = torch.randn(2, 4)
            torch.testing.assert_close(call(x), fn(x))
    assert call.statistics.captures == (0 if kind in REFUSED else 2)


def multiplied(read: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.quantized.linear_dynamic(x, read(), False)
    return result


def test_constants_of_a_frozen_script_are_its_own(device: torch.device) -> None:
    """Nothing but TorchScript can replace them."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device).eval()
    x = torch.randn(2, 4, device=device)
    frozen = torch.jit.freeze(torch.jit.trace(module, x))
    with torch.no_grad():
        torch.testing.assert_close(gw.capture(lambda x: frozen(x) * 2, x)(x), module(x) * 2)


def test_constants_in_the_code_are_no_reads(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(reads, "holders_of", lambda things, *known: searched.append(things))

    def fn(x: torch.Tensor) -> torch.Tensor:
        limits = torch.tensor([0.5, 2.0], device=device)
        y = torch.where(x > limits[0], x, 1.0).clamp(max=limits[1])
        return torch.masked_fill(y, y > 1, float("inf")) + torch.ones((), device=device)

    x = torch.rand(2, 4, device=device)
    with torch.no_grad():
        torch.testing.assert_close(gw.graph(fn)(x), fn(x))
    assert not searched


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_can_be_watched_is_captured_again(
    kind: Callable[[torch.Tensor], Place], device: torch.device
) -> None:
    module, replace = made(kind, device)
    call, x = gw.graph(module.eval()), torch.randn(2, 4, device=device)
    with torch.no_grad():
        for _ in range(3):
            call(x)
        assert call.statistics.captures == (0 if kind in REFUSED else 1)
        replace(other(device))
        for _ in range(3):
            call(x)
    assert call.statistics.captures == (0 if kind in REFUSED else 2)


class Marked(dict[int, torch.Tensor]):
    """A dictionary with attributes."""


@pytest.mark.parametrize("kind", ["item", "attribute", "set", "ordered", "subclass of tuple"])
def test_links_of_containers_see_what_is_replaced(kind: str) -> None:
    first, new = torch.zeros(2), torch.ones(2)
    held: Any = {"set": {first}, "ordered": OrderedDict(a=0, b=first)}.get(kind, Marked())
    if kind == "subclass of tuple":
        held = type("Pair", (tuple,), {})((1,))
    if kind in ("attribute", "subclass of tuple"):
        held.value = first
    elif kind == "item":
        held[1] = first
    links, leads = holders.holders_of([first], [], {id(held)})
    watch = holders.Held([first], links)
    assert leads == [True]
    assert watch.unchanged()
    if kind == "set":
        held.update(torch.zeros(1) for _ in range(100))  # moves all of its items
    elif kind == "ordered":
        held.move_to_end("a")
        held["c"] = 1
    assert watch.unchanged()
    if kind == "set":
        held.remove(first)
    elif kind == "ordered":
        held["b"] = new
    elif kind == "item":
        held[1] = new
    else:
        held.value = new
    assert not watch.unchanged()
    assert "was replaced" in (watch.changed() or "")


def test_a_search_leaves_the_variables_of_running_code_alone() -> None:
    held = [torch.zeros(2)]
    find = hidden(held)
    variable = torch.ones(3)
    reference = weakref.ref(variable)
    assert holders.holders_of(list(find()), [], {})[1] == [True]
    del variable
    assert reference() is None


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_kept_alive_once_the_graph_is_closed(way: str, device: torch.device) -> None:
    first = torch.full((4,), 2.0, device=device)
    read, replace = in_an_object(first)
    reference = weakref.ref(first)
    del first
    module = Scaled(read).to(device)
    x = torch.randn(2, 4, device=device)
    if way in ("graph", "capture"):
        made_of_it: Any = gw.graph(module.eval()) if way == "graph" else None
        with torch.no_grad():
            made_of_it = made_of_it or gw.capture(module.eval(), x)
            made_of_it(x)
    elif way == "graph_step":
        made_of_it = gw.graph_step(step_with(module), x)
    else:
        made_of_it = gw.make_graphed_callables(module, (x,)).forward
    replace(other(device))
    assert reference() is not None
    (made_of_it.release if way == "graph" else made_of_it.close)()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("kind", [in_an_object, in_a_bounded_cache, in_an_array])
def test_what_tune_captures_of_the_model_itself_is_looked_at_too(
    kind: Callable[[torch.Tensor], Place], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = {(id(GRAPH), device.type): (GRAPH, AVAILABLE)}
    monkeypatch.setattr("graphwright.strategies.base._probed", probed)
    module, replace = made(kind, device)
    x = torch.randn(2, 4, device=device)
    tuning = Tuning(module.eval(), (x,), strategies=["eager+graph"], remember=False)
    tuning.run()
    candidate = next(c for c in tuning.asked.candidates if c.name == "eager+graph")
    if kind in REFUSED:
        with pytest.raises(gw.StrategyFailed, match="nobody could see replaced"):
            candidate.build(module, (x,), {})
        return
    tuned = tuning._tuned("eager+graph", [candidate.build(module, (x,), {})])
    with torch.no_grad():
        torch.testing.assert_close(tuned(x), module(x))
        replace(other(device))
        torch.testing.assert_close(tuned(x), module(x))
    assert tuned.calls == {"tuned": 1, "eager: the module changed": 1}
