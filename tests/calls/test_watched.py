"""What a call depends on beside its arguments: changed after the capture, it is never ignored."""

from __future__ import annotations

import collections
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from chosen import choosing
from shares import share
from torch import nn
from torch.nn.utils import parametrize

import graphwright as gw

FREEZE = "torchscript:freeze"


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


GLOBAL_FACTOR = 1.0


class Adapted(nn.Module):
    """Holds its state the way that libraries do: in dictionaries, lists, objects and classes."""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.scaling = {"a": 1.0}
        self.merged: list[str] = []
        self.active = {"a"}
        self.history = collections.deque([1.0], maxlen=3)
        self.config = types.SimpleNamespace(double=False, nested={"levels": [1.0, [2.0]]})
        self.slotted = Slotted()
        self.others = [Scaled(1.0)]
        self.pair = (Scaled(1.0), 1.0)
        self.text: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x) + self.offset
        if self.text is not None:
            y = y + 0
        if not self.merged and "a" in self.active:
            y = y + self.up(self.down(x)) * self.scaling["a"]
        y = y * self.history[-1] * self.slotted.factor * self.helper() * GLOBAL_FACTOR
        y = self.pair[0](self.others[0](y)) * self.config.nested["levels"][1][0]
        return y * 2 if self.config.double else y

    def helper(self) -> float:
        return 1.0


class Other(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 5


Undo = Callable[[], Any]
CHANGES: dict[str, Callable[[Adapted, pytest.MonkeyPatch], Any]] = {}


def change(function: Callable[[Adapted, pytest.MonkeyPatch], Any]) -> Callable[..., Any]:
    CHANGES[function.__name__] = function
    return function


@change
def a_value_in_a_dictionary(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.scaling["a"] = 3.0


@change
def another_key_with_the_same_value(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.scaling = {"a": 1.0, "b": 2.0}
    model.active.discard("a")
    model.active.add("b")


@change
def an_item_of_a_list(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.merged.append("a")


@change
def an_item_of_a_deque(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.history.append(2.0)


@change
def an_attribute_of_an_object(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.config.double = True


@change
def a_slot_of_an_object(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.slotted.factor = 2.0


@change
def a_list_in_a_dictionary_in_an_object(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.config.nested["levels"][1][0] = 3.0


@change
def an_attribute_of_a_module_in_a_list(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.others[0].by = 2.0


@change
def a_module_in_a_list(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.others[0] = Scaled(3.0)


@change
def an_attribute_of_a_module_in_a_tuple(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.pair[0].by = 2.0


@change
def the_class_of_the_model(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.__class__ = Other


@change
def the_class_of_a_part(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    model.base.__class__ = Halved


@change
def forward_of_the_class(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    forward = Adapted.forward
    patch.setattr(Adapted, "forward", lambda self, x: forward(self, x) + 1)


@change
def forward_of_a_class_of_pytorch(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 1)


@change
def the_code_of_forward(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.offset + 7

    patch.setattr(Adapted.forward, "__code__", forward.__code__)


@change
def a_method_that_forward_calls(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapted, "helper", lambda self: 2.0)


@change
def an_attribute_of_the_class(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapted, "offset", 1.0)


@change
def a_global_of_the_file(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "GLOBAL_FACTOR", 2.0)


@change
def forward_of_the_model_itself(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    forward = model.forward
    model.forward = lambda x: forward(x) + 1  # type: ignore[method-assign]  # it is the point


@change
def a_hook_for_all_modules(model: Adapted, patch: pytest.MonkeyPatch) -> Undo:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return output + 1 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    return handle.remove


@change
def a_parametrization(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    parametrize.register_parametrization(model.base, "weight", Doubled())


@change
def all_attributes_at_once(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.others[0].__dict__ = {**model.others[0].__dict__, "by": 2.0}


@change
def merged_as_peft_does_it(model: Adapted, patch: pytest.MonkeyPatch) -> None:
    model.base.weight.data += 2 * model.up.weight @ model.down.weight
    model.merged.append("a")


def graphed(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return gw.graph(model)


def captured(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    with torch.no_grad():
        graph = gw.capture(model, x)

    def call(x: torch.Tensor) -> Any:
        try:
            return graph(x)
        except gw.SignatureError:  # It refuses, which is right.
            with torch.no_grad():
                return model(x)

    return call


def fused(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return gw.fuse(model, (x,))


def tuned(model: nn.Module, x: torch.Tensor, strategy: str, **options: Any) -> Any:
    with warnings.catch_warnings(), choosing(strategy):
        warnings.simplefilter("ignore")  # TorchScript is deprecated.
        fast = gw.tune(
            model,
            (x,),
            strategies=[strategy],
            isolate=False,
            remember=False,
            progress=False,
            **options,
        )
    assert fast.report.chosen == strategy
    return fast


def frozen(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return tuned(model, x, FREEZE)  # type: ignore[no-any-return]


def without_copies(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    """Tuned by what reads the weights where they are."""
    strategy = "eager+graph" if x.is_cuda else "aot_autograd"
    return tuned(model, x, strategy)  # type: ignore[no-any-return]


def trained(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return gw.make_graphed_callables(model, (x,))


PARTS: dict[str, Callable[[nn.Module, torch.Tensor], Callable[..., Any]]] = {
    "graph": graphed,
    "capture": captured,
    "fuse": fused,
    "frozen": frozen,
    "without copies": without_copies,
    "make_graphed_callables": trained,
}


def each_change() -> Iterator[Any]:
    """Each with each part; what tune() makes is watched as the others are, and takes longer."""
    for number, name in enumerate(CHANGES):
        tuned = ("frozen", "without copies")
        for part in PARTS:
            due = tuned[number % 2] == part
            marks = [pytest.mark.slow if due else pytest.mark.exhaustive] * (part in tuned)
            yield pytest.param(name, part, marks=marks)


@pytest.mark.parametrize(("name", "part"), [*each_change()])
def test_a_change_is_noticed(
    name: str, part: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Adapted().to(device).eval()
    x = torch.randn(4, 8, device=device)
    call = PARTS[part](model, x)
    with torch.no_grad():
        before = model(x)
        for _ in range(2):
            torch.testing.assert_close(call(x), before)
        undo = CHANGES[name](model, monkeypatch)
        try:
            expected = eagerly(model, x)
            assert not torch.allclose(expected, before)
            for _ in range(3):
                torch.testing.assert_close(call(x), expected)
        finally:
            if undo is not None:
                undo()


def eagerly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's answer without what make_graphed_callables has put in place of its forward."""
    attributes = vars(model)
    forward = attributes.get("forward")
    if hasattr(forward, "statistics"):
        del attributes["forward"]
    try:
        answer: torch.Tensor = model(x)
    finally:
        if forward is not None:
            attributes["forward"] = forward
    return answer


@pytest.mark.parametrize("part", share(PARTS))
def test_what_was_changed_and_put_back_is_no_change(part: str, device: torch.device) -> None:
    model = Adapted().to(device).eval()
    x = torch.randn(4, 8, device=device)
    call = PARTS[part](model, x)
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            model.scaling["a"] = 3.0
            call(x)
            model.scaling["a"] = float("1.0")
            model.merged.append("a")
            model.merged.clear()
            torch.testing.assert_close(call(x), expected)
    if isinstance(call, gw.TunedModule | gw.FusedModule):
        assert call.calls["eager: the module changed"] == 3


@pytest.mark.parametrize("part", ["fuse", "frozen"])
@pytest.mark.parametrize("audit", [1, 3])
def test_an_audit_finds_values_that_pytorch_does_not_report(
    part: str, audit: int, device: torch.device
) -> None:
    model = Adapted().to(device).eval()
    x = torch.randn(4, 8, device=device)
    if part == "fuse":
        call: Any = gw.fuse(model, (x,), audit=audit)
    else:
        call = tuned(model, x, FREEZE, audit=audit)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
        kept = model.base.weight.clone()
        model.base.weight.data.mul_(2)
        right = [torch.allclose(call(x), model(x)) for _ in range(2 * audit)]
        assert all(right[audit - 1 :])
        assert sum(right) >= audit + 1
        assert "does not report" in call.explain()
        model.base.weight.data.copy_(kept)
        count = sum(n for way, n in call.calls.items() if not way.startswith("eager"))
        torch.testing.assert_close(call(x), model(x))
        assert sum(n for way, n in call.calls.items() if not way.startswith("eager")) == count + 1


def test_an_audit_is_a_number_of_calls() -> None:
    with pytest.raises(gw.OptionError, match="audit"):
        gw.fuse(nn.Linear(2, 2).eval(), audit=0)
    with pytest.raises(gw.OptionError, match="audit"):
        gw.tune(nn.Linear(2, 2).eval(), (torch.ones(1, 2),), audit=-1)
    with pytest.raises(gw.OptionError, match="audit"):
        gw.load("nothing.gw", audit=0)


def test_explain_names_what_cannot_be_looked_into() -> None:
    model = Adapted().eval()
    model.text = iter("abc")
    x = torch.randn(4, 8)
    with torch.no_grad():
        for call in (gw.graph(model), gw.fuse(model, (x,)), tuned(model, x, FREEZE)):
            call(x)
            assert "not looked into: attribute text of Adapted" in call.explain()


# Callables that are no modules.


class Holder:
    def __init__(self, model: nn.Module) -> None:
        self.models = {"only": [model]}

    def method(self, x: torch.Tensor) -> Any:
        return self.models["only"][0](x)

    __call__ = method


def from_a_lambda(model: nn.Module) -> Callable[..., Any]:
    models = [model]
    return lambda x: models[0](x)


def through_a_helper(model: nn.Module) -> Callable[..., Any]:
    def helper(x: torch.Tensor) -> Any:
        return model(x)

    return lambda x: helper(x)


CALLABLES: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "partial": lambda model: functools.partial(model),
    "partial of a partial": lambda model: functools.partial(functools.partial(model)),
    "bound method": lambda model: Holder(model).method,
    "object": Holder,
    "lambda": from_a_lambda,
    "helper": through_a_helper,
}


@pytest.mark.parametrize("part", ["graph", "capture", "fuse", "frozen"])
@pytest.mark.parametrize("kind", share(CALLABLES))
def test_the_modules_of_a_callable_are_watched(kind: str, part: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device).eval()
    x = torch.randn(4, 8, device=device)
    fn = CALLABLES[kind](model)
    call = PARTS[part](fn, x)  # type: ignore[arg-type]  # a callable as good as a module
    with torch.no_grad():
        call(x)
        model[0].weight.data = torch.zeros(8, 8, device=device)
        torch.testing.assert_close(call(x), model(x))
        model[0] = nn.Linear(8, 8).to(device)
        torch.testing.assert_close(call(x), model(x))
    model.train()
    assert call(x).requires_grad is (part in ("graph", "fuse", "frozen"))


def test_a_number_that_a_function_names_is_watched(device: torch.device) -> None:
    factor, options = 1.0, {"add": 0.0}
    graphed = gw.graph(lambda x: x * factor + options["add"])
    x = torch.ones(3, device=device)
    assert torch.equal(graphed(x), x)
    factor = 2.0
    assert torch.equal(graphed(x), x * 2)
    options["add"] = 1.0
    assert torch.equal(graphed(x), x * 2 + 1)


# Refusals leave nothing behind.

RUNS = 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly.*:RuntimeWarning")
def test_a_refused_capture_leaves_closures_globals_and_objects_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "RUNS", 0)
    closed, seen, keeper = 0, [0], types.SimpleNamespace(count=0, last={"n": 0})

    def count(x: torch.Tensor) -> torch.Tensor:
        global RUNS
        nonlocal closed
        RUNS += 1
        closed += 1
        seen.append(len(seen))
        keeper.count += 1
        keeper.last["n"] += 1
        return x * closed

    graphed = gw.graph(count)
    x = torch.ones(1, device=device)
    assert [float(graphed(x)) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert (RUNS, closed, seen, keeper.count, keeper.last["n"]) == (3, 3, [0, 1, 2, 3], 3, 3)
    with pytest.raises(gw.CaptureError, match="changes with every call"):
        gw.capture(count, x)
    assert (RUNS, closed, seen, keeper.count, keeper.last["n"]) == (3, 3, [0, 1, 2, 3], 3, 3)


def test_tune_leaves_lists_of_the_model_as_they_were() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.seen: list[int] = [1]
            self.state = types.SimpleNamespace(calls=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(x))
            self.state.calls += 1
            return self.layer(x)  # type: ignore[no-any-return]

    model = Remembering().eval()
    gw.tune(
        model,
        (torch.randn(2, 4),),
        strategies=["eager", "aot_autograd"],
        isolate=False,
        remember=False,
        progress=False,
    )
    assert model.seen == [1]
    assert model.state.calls == 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly.*:RuntimeWarning")
def test_eager_calls_of_eight_threads_lose_no_update(device: torch.device) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.layer(self.layer(x))  # type: ignore[no-any-return]

    model = Counting().to(device).eval()
    graphed = gw.graph(model)

    def work() -> None:
        with torch.no_grad():
            for n in range(25):
                graphed(torch.randn(n % 3 + 1, 64, device=device))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.count == 200


def test_state_that_changes_with_every_call_is_not_observed_at_each(device: torch.device) -> None:
    observed = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            observed.extend([] if self.count < 0 else [len(x)])
            return x + self.count

    model = Counting().eval()
    graphed, x = gw.graph(model), torch.ones(2, device=device)
    with pytest.warns(RuntimeWarning, match="changes with every call"):
        results = [float(graphed(x)[0]) for _ in range(50)]
    assert results == [float(n) for n in range(2, 52)]
    assert graphed.statistics.captures == 0


# Gradients.


@pytest.mark.parametrize("headed", [True, False])
def test_a_graph_inside_a_training_step_is_trained(headed: bool, device: torch.device) -> None:
    def made() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        body, head = nn.Linear(8, 8).to(device), nn.Linear(8, 1).to(device)
        parameters = [*body.parameters(), *(head.parameters() if headed else [])]
        return body, head, torch.optim.SGD(parameters, lr=0.1)

    def step_of(body: Any, head: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            y = body(x)
            loss: torch.Tensor = (head(torch.relu(y)) if headed else y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    x = torch.randn(4, 8, device=device)
    body, head, optimizer = made()
    ours = gw.graph_step(step_of(gw.graph(body), head, optimizer), (x,), optimizer=optimizer)
    other, other_head, other_optimizer = made()
    eager = step_of(other, other_head, other_optimizer)
    for _ in range(4):
        torch.testing.assert_close(ours(x), eager(x).detach())
    torch.testing.assert_close(dict(body.named_parameters()), dict(other.named_parameters()))
    assert ours.statistics.replays >= 2


def test_a_graph_inside_make_graphed_callables_is_trained(device: torch.device) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)
            self.fast = [gw.graph(self.body)]

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(torch.relu(self.fast[0](x)))

    model = Outer().to(device)
    x = torch.randn(4, 8, device=device)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    gw.make_graphed_callables(model, (x,), allow_unused_input=True)(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_transforms_of_every_part_give_the_gradients_of_eager(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device).eval()
    x = torch.randn(2, 4, device=device)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}

    def loss(module: nn.Module, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, values, (x,)).square().sum()

    wanted = torch.func.grad(functools.partial(loss, model))(parameters)
    _, tangent = torch.func.jvp(functools.partial(loss, model), (parameters,), (tangents,))
    parts = [
        gw.graph(model),
        gw.fuse(model, (x,)),
        tuned(model, x, FREEZE),
        tuned(model, x, "eager"),
    ]
    for part in parts:
        got = torch.func.grad(functools.partial(loss, part))(parameters)
        torch.testing.assert_close(got, wanted)
        found = torch.func.jvp(functools.partial(loss, part), (parameters,), (tangents,))[1]
        torch.testing.assert_close(found, tangent)


@pytest.mark.filterwarnings("ignore:.*what was gained is lost:RuntimeWarning")
@pytest.mark.parametrize("kind", ["graph", "buckets", "fuse", "tune"])
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_inside_of_a_capture_give_the_gradients_of_eager(
    kind: str, transform: str, device: torch.device
) -> None:
    model, x = nn.Linear(4, 4).to(device).eval(), torch.randn(2, 4, device=device)
    batch = {"dynamic_shapes": ({0: "batch"},), "buckets": gw.Buckets(batch=[2])}
    part: Any = gw.graph(model, **batch) if kind == "buckets" else MAKERS[kind](model, x)

    def of(module: Any) -> Callable[[torch.Tensor], Any]:
        def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(module, values, (x,)).square().sum()

        def call(x: torch.Tensor) -> Any:
            values = {name: p.detach() for name, p in module.named_parameters()}
            if transform == "grad":
                return torch.func.grad(loss)(values, x)
            ones = {name: torch.ones_like(p) for name, p in values.items()}
            return torch.func.jvp(lambda v: loss(v, x), (values,), (ones,))[1]

        return call

    wanted = of(model)(x)
    with torch.no_grad():
        graphed = gw.graph(of(part))
        for _ in range(3):
            torch.testing.assert_close(graphed(x), wanted)


MAKERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "graph": lambda model, x: gw.graph(model),
    "fuse": lambda model, x: gw.fuse(model, (x,)),
    "tune": lambda model, x: tuned(model, x, FREEZE),
    "graph of a function": lambda model, x: gw.graph(lambda y: model(y)),
}


@pytest.mark.filterwarnings("ignore:.*what was gained is lost:RuntimeWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_graphed_callables_of_our_own_are_trained(kind: str, device: torch.device) -> None:
    model, x = nn.Linear(4, 4).to(device).eval(), torch.randn(2, 4, device=device)
    ours = MAKERS[kind](model, x)
    trained = gw.make_graphed_callables(ours, (x,))
    for each in (trained, model):
        for size in (2, 3, 2):
            model.zero_grad()
            y = torch.randn(size, 4, device=device)
            result = each(y)
            assert result.requires_grad
            result.sum().backward()
            torch.testing.assert_close(
                model.bias.grad, torch.full((4,), float(size), device=device)
            )
    with torch.no_grad():
        torch.testing.assert_close(ours(x), torch.nn.functional.linear(x, model.weight, model.bias))


# What PyTorch does to a module for itself.


def compiled(model: nn.Module, x: torch.Tensor) -> None:
    torch.compile(model, backend="eager")(x)


def compiled_in_place(model: nn.Module, x: torch.Tensor) -> None:
    model.compile(backend="eager")
    model.__dict__["_compiled_call_impl"] = None


def exported(model: nn.Module, x: torch.Tensor) -> None:
    torch.export.export(model, (x,))


def scripted(model: nn.Module, x: torch.Tensor) -> None:
    torch.jit.script(model)


def called_functionally(model: nn.Module, x: torch.Tensor) -> None:
    torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def tuned_again(model: nn.Module, x: torch.Tensor) -> None:
    tuned(model, torch.cat([x, x]), FREEZE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize(
    "use",
    share([compiled, compiled_in_place, scripted, exported, called_functionally, tuned_again]),
)
def test_what_pytorch_attaches_to_a_module_is_no_change(
    use: Callable[[nn.Module, torch.Tensor], None], device: torch.device
) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model.to(device).eval()
    x = torch.randn(1, 3, 8, 8, device=device)
    with torch.no_grad():
        fast, fused_, graph = tuned(model, x, FREEZE), gw.fuse(model, (x,)), gw.graph(model)
        graph(x)
        use(model, x)
        for call in (fast, fused_, graph):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-4)
    assert dict(fast.calls) == {"tuned": 1}
    assert dict(fused_.calls) == {"fused": 1}
    assert graph.statistics.captures == 1


class Positions(nn.Module):
    """Reads what is named elsewhere, so that every attribute of its tensors may count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(8.0))
        self.positions: torch.Tensor
        vars(self.positions)["scale"] = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions * getattr(self.positions, "sca" + "le")


def test_what_a_compiler_notes_on_a_tensor_is_no_change(device: torch.device) -> None:
    model, x = Positions().to(device).eval(), torch.randn(2, 8, device=device)
    vars(model.positions)["scale"] = 2.0  # A copy on another device lacks it.
    with torch.no_grad():
        fast, graph = tuned(model, x, FREEZE), gw.graph(model)
        graph(x)
        # What Inductor does to the buffers of a model that it compiles, and users to inputs.
        torch._dynamo.mark_static_address(model.positions)
        torch._dynamo.mark_dynamic(model.positions, 0)
        for call in (fast, graph):
            torch.testing.assert_close(call(x), model(x))
        assert dict(fast.calls) == {"tuned": 1}
        assert graph.statistics.captures == 1
        vars(model.positions)["scale"] = 3.0
        for call in (fast, graph):
            torch.testing.assert_close(call(x), model(x))
    assert dict(fast.calls) == {"tuned": 1, "eager: the module changed": 1}
    assert graph.statistics.captures == 2
