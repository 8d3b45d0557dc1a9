"""Work of ours leaves torch.compile as it was: what was compiled stays so, and more can be."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shares import share
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphwright as gw
from graphwright.calls.modes import OperationMode, compilers_off


class Counting:
    """A backend that counts what it compiles, and how often that runs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + 1


class Around(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_graph(compiled: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        gw.graph(compiled)(x)


def by_buckets(compiled: Any, x: torch.Tensor) -> None:
    graphed = gw.graph(
        compiled, dynamic_shapes={"x": {0: "batch"}}, buckets=gw.Buckets(batch=[2, 4])
    )
    with torch.no_grad():
        graphed(x)
        graphed(x[:3])


def by_graph_around(compiled: Any, x: torch.Tensor) -> None:
    by_graph(Around(compiled).eval(), x)


def by_capture(compiled: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        gw.capture(compiled, x)


def by_capturing(compiled: Any, x: torch.Tensor) -> None:
    with torch.no_grad(), gw.capturing():
        compiled(x)


def by_fuse(compiled: Any, x: torch.Tensor) -> None:
    try:
        fused = gw.fuse(Around(compiled).eval(), (x,))
    except gw.GraphwrightError:
        return
    with torch.no_grad():
        fused(x)


def by_tune(compiled: Any, x: torch.Tensor) -> None:
    tuned = gw.tune(
        compiled,
        (x,),
        strategies=["eager", "graph", "fused", "torchscript:freeze"],
        progress=False,
        remember=False,
    )
    with torch.no_grad():
        tuned(x)


def by_tune_around(compiled: Any, x: torch.Tensor) -> None:
    by_tune(Around(compiled).eval(), x)


def by_check(compiled: Any, x: torch.Tensor) -> None:
    list(gw.check(compiled, (x,)))


def by_graphed_callables(compiled: Any, x: torch.Tensor) -> None:
    inside = Around(compiled)
    graphed: Any = gw.make_graphed_callables(inside, (x,))
    graphed(x).sum().backward()


def by_graph_step(compiled: Any, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.0)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(batch).sum()
        loss.backward()
        optimizer.step()
        return loss

    gw.graph_step(step, x)(x)


WAYS = [
    by_graph,
    by_buckets,
    by_graph_around,
    by_capture,
    by_capturing,
    by_fuse,
    by_tune,
    by_tune_around,
    by_check,
    by_graphed_callables,
    by_graph_step,
]


@pytest.mark.parametrize(
    ("before", "way"),
    share(
        pytest.param(before, way, id=f"{way.__name__}-compiled_{'before' if before else 'after'}")
        for before in (True, False)
        for way in WAYS
    ),
)
def test_compiled_module_is_compiled_afterwards(
    way: Callable[[Any, torch.Tensor], None], before: bool, device: torch.device
) -> None:
    trains = way in (by_graphed_callables, by_graph_step)
    backend = Counting()
    module = Small().to(device).train(trains)
    compiled: Any = torch.compile(module, backend=backend, dynamic=False)
    x = torch.randn(4, 4, device=device)
    with torch.set_grad_enabled(trains):
        if before:
            compiled(x)
        known = backend.compiled
        way(compiled, x)
        backend.compiled, backend.runs = known, 0
        compiled(x)
        assert backend.runs == 1
        assert backend.compiled == 1 or not before

        another: Any = torch.compile(Small().to(device).train(trains), backend=backend)
        backend.runs = 0
        another(x)
        assert backend.runs == 1


@pytest.mark.parametrize("way", [by_graph, by_capture, by_check, by_tune])
def test_compiled_function_is_compiled_afterwards(
    way: Callable[[Any, torch.Tensor], None], device: torch.device
) -> None:
    backend = Counting()
    module = Small().to(device).eval()

    def function(x: torch.Tensor) -> torch.Tensor:
        return module(x).exp()

    compiled: Any = torch.compile(function, backend=backend, dynamic=False)
    x = torch.randn(4, 4, device=device)
    with torch.no_grad():
        compiled(x)
        way(compiled, x)
        backend.runs = 0
        compiled(x)
    assert backend.runs == 1


@pytest.mark.parametrize("way", [by_graph, by_capture, by_check])
def test_what_is_recorded_on_the_cpu_is_not_compiled_for_it(
    way: Callable[[Any, torch.Tensor], None],
) -> None:
    # It would count against the number of recompilations that TorchDynamo allows.
    backend = Counting()
    compiled: Any = torch.compile(Small().eval(), backend=backend, dynamic=False)
    for size in range(1, 5):
        way(compiled, torch.randn(size, 4))
    assert not backend.compiled


class Seeing(OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.append(func._opname)
        return func(*args, **kwargs)


def test_mode_sees_the_parts_of_what_was_compiled() -> None:
    backend = Counting()
    compiled: Any = torch.compile(Small().eval(), backend=backend)
    x = torch.randn(4, 4)
    with torch.no_grad():
        compiled(x)
        with Seeing() as seeing:
            compiled(x)
        assert "relu" in seeing.seen
        assert backend.runs == 1
        compiled(x)
    assert backend.runs == 2


def test_modes_within_each_other_put_the_stance_back_at_the_last_end() -> None:
    backend = Counting()
    compiled: Any = torch.compile(torch.sin, backend=backend)
    x = torch.randn(4)
    outer, inner = Seeing(), Seeing()
    with outer:
        with inner, compilers_off(), outer:
            compiled(x)
        compiled(x)
    assert not backend.runs
    compiled(x)
    assert backend.runs == 1


def test_stance_that_the_user_has_set_is_put_back() -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        with Seeing():
            pass
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            torch.compile(Small(), backend="eager")(torch.randn(4, 4))


def test_mode_that_fails_to_begin_leaves_the_stance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(mode: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TorchDispatchMode, "__enter__", fails)
        with pytest.raises(KeyboardInterrupt), Seeing():
            pass
    backend = Counting()
    torch.compile(torch.sin, backend=backend)(torch.randn(4))
    assert backend.runs == 1


def test_another_thread_compiles_after_a_mode_of_this_one() -> None:
    backend = Counting()
    module = Small().eval()
    x = torch.randn(4, 4)
    compiled: Any = torch.compile(module, backend=backend)

    def elsewhere() -> None:
        with torch.no_grad():
            compiled(x)

    with Seeing():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not backend.runs
    elsewhere()
    assert backend.runs == 1


LATE = """
import sys
import torch
import graphwright as gw

assert "torch._dynamo" not in sys.modules
runs = []


def backend(graph, inputs):
    def run(*args):
        runs.append(1)
        return graph.forward(*args)

    return run


class Late(torch.nn.Module):
    compiled = []

    def part(self, x):
        return x.sin() + 1

    def forward(self, x):
        if not self.compiled:
            Late.compiled.append(torch.compile(self.part, backend=backend))
        return self.compiled[0](x) * 2


original, late, x = torch.compile, Late().eval(), torch.randn(4)
with torch.no_grad():
    list(gw.check(late, (x,)))
    assert torch.compile is original
    runs.clear()
    late(x)
    assert len(runs) == 1, runs
"""


@pytest.mark.slow
def test_compilation_begun_for_the_first_time_inside_of_a_call_that_is_seen() -> None:
    # Before that, TorchDynamo is not even imported.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LATE], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# torch.compile around what is ours: it breaks its graph there, and ours runs as it is.


def graphed_of(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.graph(model)


def graphed_function_of(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.graph(lambda y: model(y))


def fused_of(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.fuse(model, (x,))


def captured_of(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.capture(model, x)


def tuned_of(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.tune(model, (x,), strategies=["eager:no_grad"], progress=False, remember=False)


def callables_of(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.make_graphed_callables(model, (x,))


OURS = [graphed_of, graphed_function_of, fused_of, captured_of, tuned_of, callables_of]


@pytest.mark.parametrize("around", [True, False], ids=["part", "whole"])
@pytest.mark.parametrize("make", OURS)
def test_ours_is_compiled_around_and_never_through(
    make: Callable[[nn.Module, torch.Tensor], Any], around: bool, device: torch.device
) -> None:
    model, x = Small().to(device).eval(), torch.randn(4, 4, device=device)
    backend = Counting()
    with torch.no_grad():
        expected = model(x) * (2 if around else 1)
        ours = make(model, x)
        compiled: Any = torch.compile(Around(ours) if around else ours, backend=backend)
        for _ in range(12):  # Counters of ours change with each call.
            torch.testing.assert_close(compiled(x), expected)
        # Only what is around ours is compiled, once.
        assert backend.compiled == (1 if around else 0)
        if make is captured_of:
            return
        # TorchDynamo does not see this; what is ours does.
        model.linear.forward = lambda y: y  # type: ignore[method-assign]
        torch.testing.assert_close(compiled(x), (x.relu() + 1) * (2 if around else 1))


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("make", [graphed_of, fused_of, tuned_of])
def test_ours_of_what_is_compiled_may_be_compiled(
    make: Callable[[Any, torch.Tensor], Any], function: bool
) -> None:
    model, x = Small().eval(), torch.randn(4, 4)
    with torch.no_grad():
        of: Any = (lambda y: model(y)) if function else model
        inner: Any = torch.compile(of, backend="eager")
        twice: Any = torch.compile(make(inner, x), backend="eager")
        for _ in range(2):
            torch.testing.assert_close(twice(x), model(x))
        model.linear.bias.fill_(5.0)
        torch.testing.assert_close(twice(x), model(x))


def test_a_compiled_object_is_watched() -> None:
    gain, x = [1.0], torch.randn(4, 4)
    graphed: Any = gw.make_graphed_callables(lambda y: y * gain[0], (x,))
    ours = gw.graph(torch.compile(graphed, backend="eager"))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), x)
        gain[0] = 3.0
        torch.testing.assert_close(ours(x), 3 * x)


@pytest.mark.parametrize("make", [graphed_of, fused_of, tuned_of])
@pytest.mark.parametrize("grad", [True, False])
def test_ours_may_be_compiled_in_place(
    make: Callable[[nn.Module, torch.Tensor], Any], grad: bool
) -> None:
    model, x = Small().eval(), torch.randn(4, 4)
    expected = model(x)
    with torch.set_grad_enabled(grad):
        ours = make(model, x)
        ours.compile(backend="eager")
        for each in (ours, model, ours):
            torch.testing.assert_close(each(x), expected)


@pytest.mark.parametrize("make", [graphed_of, fused_of, tuned_of])
def test_forward_of_ours_may_be_wrapped(make: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    model, x = Small().eval(), torch.randn(4, 4)
    with torch.no_grad():
        expected = model(x) + 1
        ours = make(model, x)
        before = ours.forward
        ours.forward = lambda y: before(y) + 1
        for each in (ours, model, ours):
            torch.testing.assert_close(each(x), expected)
