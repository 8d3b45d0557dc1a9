"""Tensors that are no plain dense ones, as weights and inputs: right, or refused by name."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.fusion.pass_manager import _LOCK

X = torch.linspace(-1, 1, 32).view(4, 8)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*runs eagerly:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


class Metres(torch.Tensor):
    """Carries its class through all functions."""


class Quantised(torch.Tensor):
    """Eight bits and a scale, made dense for each operation, as torchao's older weights."""

    q: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.q, self.scale = q, scale

    def dense(self) -> torch.Tensor:
        return self.q.float() * self.scale

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].scale)
        args, kwargs = pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


class Answering(Quantised):
    """Leaves linear layers to plain tensors, as torchao's newer weights do."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            x, weight, *rest = args
            return func(x, weight.dense(), *rest)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Scaled(nn.Module):
    """A linear layer, times a weight."""

    def __init__(self, weight: Any, kind: str = "attribute") -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if kind == "buffer":
            self.register_buffer("weight", weight)
        elif kind == "parameter":
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.weight = weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * self.weight


class Dequantizing(nn.Module):
    """Works on the dense form of its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (
            self.weight.dequantize() if self.weight.is_quantized else self.weight.to_dense()
        )


def _eight_bits(kind: type[Quantised] = Quantised, *shape: int) -> Quantised:
    q = torch.arange(-4, 4, dtype=torch.int8).expand(*shape, 8).contiguous()
    return kind(q, torch.tensor(0.1))


def _leaked(transform: Callable[..., Any]) -> torch.Tensor:
    found = []

    def keep(weight: torch.Tensor) -> torch.Tensor:
        found.append(weight)
        return weight.sum()

    transform(keep)(torch.ones(3, 8) if transform is torch.func.vmap else torch.ones(8))
    return found[0]


def _fake() -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones(8)


# Weights that no graph can hold, and what is said of them.
UNHOLDABLE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (lambda: TwoTensor(torch.ones(8), torch.ones(8)), "a TwoTensor, a subclass"),
    "quantised": (_eight_bits, "a Quantised, a subclass"),
    "fake": (_fake, "a FakeTensor, a subclass"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(8)), "a functional tensor"),
    "vmapped": (lambda: _leaked(torch.func.vmap), "a tensor of a torch.func transform"),
    "differentiated": (lambda: _leaked(torch.func.grad), "a tensor of a torch.func transform"),
    "zeros": (lambda: torch._efficientzerotensor(8), "a tensor of zeros without memory"),
    "meta": (lambda: torch.ones(8, device="meta"), "a meta tensor"),
}
KINDS = ["attribute", "buffer"]


HELD = [
    "wrapper",
    "quantised",
    "fake",
    "functional",
    "zeros",
    "differentiated",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNHOLDABLE)
def test_a_weight_that_no_graph_can_hold_is_refused_by_name(name: str, kind: str) -> None:
    make, said = UNHOLDABLE[name]
    model = Scaled(make(), kind).eval()
    with pytest.raises(gw.CaptureError, match=f"The weight weight is {said}"):
        gw.capture(model, X)


@pytest.mark.parametrize("name", HELD)
def test_graph_runs_such_a_model_eagerly_and_says_why(name: str) -> None:
    make, said = UNHOLDABLE[name]
    model = Scaled(make()).eval()
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(2):
            assert type(graphed(X)) is type(model(X))
    assert sum(graphed.statistics.eager.values()) == 2
    assert f"The weight weight is {said}" in graphed.explain()


@pytest.mark.parametrize("name", ["meta", "vmapped"])
def test_graph_raises_what_eager_raises(name: str) -> None:
    graphed = gw.graph(Scaled(UNHOLDABLE[name][0]()).eval())
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        graphed(X)
    assert not isinstance(caught.value, gw.GraphwrightError | NotImplementedError)


@pytest.mark.parametrize("name", HELD)
def test_fuse_leaves_such_a_model_alone_and_says_why(name: str) -> None:
    make, said = UNHOLDABLE[name]
    model = Scaled(make()).eval()
    fused = gw.fuse(model, (X,))
    with torch.no_grad():
        assert type(fused(X)) is type(model(X))
    assert f"the weight weight is {said}" in fused.explain()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(8).as_subclass(Metres),
        lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8),
        lambda: torch.ones(8).to_sparse(),
    ],
    ids=["subclass", "quantized", "sparse"],
)
def test_fuse_names_a_weight_that_no_pass_knows(make: Callable[[], torch.Tensor]) -> None:
    weight = make()
    model = (Scaled if type(weight) is Metres else Dequantizing)(weight).eval()
    fused = gw.fuse(model, (X,))
    with torch.no_grad():
        expected = model(X)
        got = fused(X)
    assert type(got) is type(expected)
    assert torch.equal(got, expected)
    assert "the weight weight is" in fused.explain()


def test_a_lazy_module_is_refused_until_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU()).eval()
    with pytest.raises(gw.CaptureError, match=r"0\.weight is an Uninitialized.*lazy") as caught:
        gw.capture(model, X)
    assert caught.value.remedy == "Run the model once before."
    model(X)
    with gw.capture(model, X) as graph:
        assert torch.equal(graph(X), model(X))


def test_a_lazy_module_is_graphed_after_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU()).eval()
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graphed(X), model(X))
    assert graphed.statistics.hits == 2


def test_a_quantised_weight_that_leaves_the_work_to_plain_tensors_is_captured() -> None:
    model = nn.Linear(8, 4).eval()
    weight = _eight_bits(Answering, 4)
    model.weight = nn.Parameter(weight, requires_grad=False)
    graphed = gw.graph(model)
    with torch.no_grad():
        for scale in (0.1, 0.5):
            model.weight.scale.fill_(scale)
            assert torch.equal(graphed(X), model(X))
    assert graphed.statistics.hits == 2


def test_a_quantized_tensor_as_weight_is_read_where_it_is() -> None:
    model = Dequantizing(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)).eval()
    graphed = gw.graph(model)
    for value in (1.0, 2.0):
        model.weight.copy_(torch.full((8,), value))
        assert torch.equal(graphed(X), model(X))
    assert graphed.statistics.hits == 2


def test_quantized_results_are_refused_by_name() -> None:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)

    with (
        pytest.raises(gw.CaptureError, match=r"quantize_per_tensor.* makes a quantized tensor"),
        gw.capturing(),
    ):
        quantize(X)
    graphed = gw.graph(quantize)
    assert torch.equal(graphed(X).int_repr(), quantize(X).int_repr())
    assert sum(graphed.statistics.eager.values()) == 1


def test_a_block_names_the_tensor_that_it_cannot_hold() -> None:
    two = TwoTensor(X, X)
    with (
        pytest.raises(gw.CaptureError, match=r"aten\.mul.* works on a TwoTensor, a subclass"),
        gw.capturing(),
    ):
        two * 2


@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter"])
@pytest.mark.parametrize(
    "weight",
    [torch.ones(8, dtype=torch.complex64).mul(1j).conj(), torch.ones(8).mul(1j).conj().imag],
    ids=["conjugated", "negated"],
)
def test_lazily_conjugated_weights_are_right(weight: torch.Tensor, kind: str) -> None:
    model = Scaled(weight, kind).eval()
    with torch.no_grad():
        expected = model(X)
        for call in (gw.graph(model), gw.capture(model, X), gw.fuse(model, (X,))):
            torch.testing.assert_close(call(X).resolve_neg(), expected.resolve_neg())


INPUTS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "subclass": (lambda: X.as_subclass(Metres), "a Metres"),
    "wrapper": (lambda: TwoTensor(X, X), "a TwoTensor"),
    "functional": (lambda: torch._to_functional_tensor(X), "a functional tensor"),
    "leaked": (lambda: _leaked(torch.func.grad), "a tensor of a torch.func transform"),
    "jagged": (
        lambda: torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged),
        "a NestedTensor",
    ),
    "sparse": (lambda: X.to_sparse(), "a torch.sparse_coo tensor"),
    "conjugated": (lambda: torch.complex(X, X).conj(), "a lazily conjugated"),
    "zeros": (lambda: torch._efficientzerotensor(4, 8), "a tensor of zeros without memory"),
}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_is_no_plain_tensor_is_refused_by_name(name: str) -> None:
    make, said = INPUTS[name]
    x = make()
    with pytest.raises(gw.CaptureError, match=rf"args\[0\] is {said}"):
        gw.capture(double, x)
    graphed = gw.graph(double)
    with torch.no_grad():
        assert type(graphed(x)) is type(double(x))
    assert f"args[0] is {said}" in graphed.explain()
    with pytest.raises(gw.SignatureError, match=rf"args\[0\] is {said}"):
        gw.fuse(double, (x,))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_without_a_shape_runs_eagerly() -> None:
    x = torch.nested.nested_tensor([X[:1], X[1:]])
    graphed = gw.graph(double)
    assert graphed(x).is_nested
    assert "args[0] is a nested tensor" in graphed.explain()


def test_a_subclass_that_the_call_makes_itself_runs_eagerly() -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        return TwoTensor(x * 2, x + 1) * 2

    graphed = gw.graph(made)
    assert type(graphed(X)) is TwoTensor


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_weight_without_elements_is_fused() -> None:
    model = nn.Linear(8, 0).eval()
    assert gw.fuse(model, (X,))(X).shape == (4, 0)


@pytest.mark.parametrize("name", ["quantised", "fake", "functional", "differentiated"])
def test_tune_refuses_a_weight_that_no_graph_can_hold_by_name(name: str) -> None:
    make, said = UNHOLDABLE[name]
    options: Any = {"isolate": False, "remember": False, "progress": False}
    with pytest.raises(gw.GraphwrightError, match=f"weight is {said}"):
        gw.tune(Scaled(make()).eval(), (X,), strategies=["eager+graph"], **options)


def test_a_lazy_module_is_refused_for_training() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    with pytest.raises(gw.GraphwrightError, match="lazy"):
        gw.make_graphed_callables(model, (X,))


@pytest.fixture
def alone_in_the_world() -> Any:
    """A process group of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("no process group can be made here")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_distributed_weight_is_refused_by_name(alone_in_the_world: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    weight = distribute_tensor(torch.ones(8), alone_in_the_world, [Replicate()])
    with pytest.raises(gw.CaptureError, match="The weight weight is a DTensor"):
        gw.capture(Scaled(weight).eval(), X)
    with pytest.raises(gw.CaptureError, match=r"args\[0\] is a DTensor"):
        gw.capture(double, weight)
    graphed = gw.graph(double)
    assert type(graphed(weight)) is type(weight)


def test_a_fully_sharded_model_runs_eagerly_though_its_weights_are_there(
    alone_in_the_world: Any,
) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    fully_shard(model, mesh=alone_in_the_world)
    with torch.no_grad():
        model(X)
        graphed, fused = gw.graph(model), gw.fuse(model, (X,))
        for _ in range(2):
            expected = model(X)
            assert torch.equal(graphed(X), expected)
            assert torch.equal(fused(X), expected)
            model.reshard()
    assert "is an FSDPModule" in graphed.explain()
    assert "is an FSDPModule" in fused.explain()


def _in_child(work: Callable[[], object], seconds: int = 20) -> str:
    """What some work returns in a forked process, which is ended after so many seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            said = str(work())
        except BaseException as error:
            said = repr(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    return said or f"ended with {status}"


forks = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="CUDA cannot be forked"
)


@forks
@pytest.mark.parametrize("part", ["graph", "capture", "fuse"])
def test_a_graph_of_the_parent_is_right_in_a_forked_child(part: str, one_thread: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with torch.no_grad():
        call: Any = {
            "graph": lambda: gw.graph(model),
            "capture": lambda: gw.capture(model, X),
            "fuse": lambda: gw.fuse(model, (X,)),
        }[part]()
        call(X)
        assert _in_child(lambda: torch.allclose(call(X + 1), model(X + 1))) == "True"
        assert torch.allclose(call(X + 1), model(X + 1))


@forks
def test_a_child_fuses_though_another_thread_did_so_at_the_fork(one_thread: None) -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with _LOCK:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        held.wait()
        said = _in_child(lambda: gw.fuse(double, (X,)).calls)
    finally:
        over.set()
        thread.join()
    assert said == "Counter()"


@forks
def test_a_child_replays_though_another_thread_did_so_at_the_fork(one_thread: None) -> None:
    graphed = gw.graph(double)
    graphed(X)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with graphed.pool._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        held.wait()
        said = _in_child(lambda: torch.equal(graphed(X), double(X)), seconds=3)
    finally:
        over.set()
        thread.join()
    assert said == "True"
