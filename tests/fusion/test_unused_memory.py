"""fuse() leaves memory alone that the model does not use, and puts back all that it does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphwright as gw
from graphwright.calls import snapshots
from graphwright.calls.snapshots import ModuleState, same_bits
from graphwright.fusion.nodes import calls
from graphwright.fusion.passes.base import Change, Pass
from graphwright.graphs.segments.observing_tracer import reads_of_arguments

# So many elements are more than a snapshot copies before they are used.
MANY = 1 << 18


class Large(TorchDispatchMode):
    """Notes operations on large memory, and those that make some; another name is no use."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                leaf = leaf.untyped_storage()
            if isinstance(leaf, torch.UntypedStorage) and leaf.device.type != "meta":
                large = leaf.nbytes() >= 4 * MANY and func is not torch.ops.aten.detach.default
                self.found += [str(func)] * large
        return result


class Model(nn.Module):
    """A few layers, and what a function of the module and the result does besides."""

    def __init__(self, work: Callable[[Model, torch.Tensor], Any] = lambda m, y: None) -> None:
        super().__init__()
        conv, norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(nn.Sequential(conv, norm, nn.ReLU()))
        self.work = work
        self.register_buffer("small", torch.randn(8))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        self.work(self, y)
        return y


def hold(model: nn.Module, kind: str, tensor: torch.Tensor) -> None:
    if kind == "buffer":
        model.register_buffer("big", tensor)
    else:
        model.big = nn.Parameter(tensor) if kind == "parameter" else tensor


def image(device: torch.device) -> torch.Tensor:
    return torch.randn(2, 3, 12, 12, device=device)


@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter"])
@pytest.mark.parametrize("verify", [True, False])
def test_unused_memory_is_neither_read_nor_copied(
    device: torch.device, kind: str, verify: bool
) -> None:
    model = Model().to(device)
    hold(model, kind, torch.randn(MANY, device=device))
    with Large() as large:
        fused = gw.fuse(model, (image(device),), verify=verify)
    assert fused.regions[0].done
    assert not large.found


def test_unused_memory_is_left_alone_where_parts_are_fused(device: torch.device) -> None:
    model = Model(lambda m, y: m.small.add_(float(y.sum().detach()))).to(device)
    hold(model, "parameter", torch.randn(MANY, device=device))
    small = model.small.clone()
    with Large() as large:
        fused = gw.fuse(model, (image(device),))
    assert [region.path for region in fused.regions] == ["layers"]
    assert not large.found
    assert same_bits(model.small, small)


def test_parts_are_verified_as_they_will_run(device: torch.device) -> None:
    """A part steps aside where a mode is on, but not for the one that sees to the copies."""

    def wrong(graph: fx.GraphModule, device: torch.device) -> list[Change]:
        for node in calls(graph, torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default
        return [Change("wrong", ("relu",))]

    model = Model(lambda m, y: m.small.add_(float(y.sum()))).to(device)
    hold(model, "buffer", torch.randn(MANY, device=device))
    fused = gw.fuse(model, (image(device),), passes=[Pass("wrong", wrong)], verify=False)
    assert not fused.regions
    assert "in parts it computes something else" in fused.untraced[-1][1]


def test_one_snapshot_is_enough_for_all_of_a_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, y: m.small.add_(m.big[0] + float(y.sum())))
    hold(model.layers, "parameter", torch.randn(MANY))
    model.big, kept, use = model.layers.big, [], snapshots._KeptValues.use

    def count(self: snapshots._KeptValues) -> None:
        kept.append(self.tensor.numel())
        use(self)

    monkeypatch.setattr(snapshots._KeptValues, "use", count)
    fused = gw.fuse(model, (image(torch.device("cpu")),))
    assert [region.path for region in fused.regions] == ["layers"]
    assert kept.count(MANY) == 1


@torch.library.custom_op("graphwright_tests::overwrite", mutates_args=("into",))
def overwrite(into: torch.Tensor, value: torch.Tensor) -> None:
    into.add_(value.mean())


HIDDEN: list[torch.Tensor] = []


@torch.library.custom_op("graphwright_tests::overwrite_hidden", mutates_args=())
def overwrite_hidden(value: torch.Tensor) -> torch.Tensor:
    HIDDEN[0].add_(value.mean())
    return value.clone()


def _through_pointer(model: Model, y: torch.Tensor) -> None:
    if model.big.device.type == "cpu":
        ctypes.memset(model.big.data_ptr(), 1, 4096)
    else:
        model.big.zero_()


def _statistics(model: Model, y: torch.Tensor) -> None:
    wide = y.flatten()[:2].reshape(2, 1).expand(2, MANY)
    F.batch_norm(wide, model.big.detach(), torch.ones_like(model.big), training=True)


def _in_numpy(model: Model, y: torch.Tensor) -> None:
    if model.big.device.type == "cpu":
        model.big.detach().numpy()[:8] = float(y.sum().detach())
    else:
        model.big[:8] = float(y.sum().detach())


def _through_storage(model: Model, y: torch.Tensor) -> None:
    model.big.untyped_storage().fill_(1)


def _replaced(model: Model, y: torch.Tensor) -> None:
    model.big.data = model.big.data + 1
    model.big.data.add_(1)


def _in_inference_mode(model: Model, y: torch.Tensor) -> None:
    with torch.inference_mode():
        model.big.mul_(2)


def _after_a_branch(model: Model, y: torch.Tensor) -> None:
    """Not on the sample: only on other values."""
    if float(y.sum().detach()) != model.expected:
        model.big.add_(1)


WRITES: dict[str, Callable[[Model, torch.Tensor], Any]] = {
    "in place": lambda m, y: m.big.add_(y.mean()),
    "to a view": lambda m, y: m.big.view(4, -1)[1, 3:9].copy_(y.flatten()[:6]),
    "to an earlier view": lambda m, y: m.view.copy_(y.flatten()[: len(m.view)]),
    "as out": lambda m, y: torch.mul(m.big.data, 2, out=m.big.data),
    "as out of its own shape": lambda m, y: torch.add(m.big.detach(), 1, out=m.big.detach()),
    "by index": lambda m, y: m.big.index_add_(
        0, torch.zeros(1, dtype=int, device=y.device), y[0, 0, 0, :1]
    ),
    "through data": lambda m, y: m.big.data.mul_(2),
    "by a list": lambda m, y: torch._foreach_add_([m.big], 1.0),
    "by a custom operator": lambda m, y: overwrite(m.big, y),
    "by an operator that hides it": lambda m, y: overwrite_hidden(y),
    "random": lambda m, y: m.big.normal_(),
    "statistics": _statistics,
    "NumPy": _in_numpy,
    "a pointer": _through_pointer,
    "its storage": _through_storage,
    "replaced": _replaced,
    "inference mode": _in_inference_mode,
    "after a branch": _after_a_branch,
}


def written_model(kind: str, write: str, device: torch.device) -> tuple[Model, torch.Tensor]:
    def work(model: Model, y: torch.Tensor) -> None:
        with torch.no_grad():
            WRITES[write](model, y)

    x = image(device)
    model = Model(work).to(device)
    hold(model, kind, torch.rand(MANY, device=device) + 0.5)
    model.view = model.big.detach()[5:13]
    HIDDEN[:] = [model.big.detach()]
    model.expected = float(model.layers(x).sum().detach())
    return model, x


@pytest.fixture
def as_it_was() -> Iterator[Callable[[Model], None]]:
    """Takes down what a model holds; at the end it holds the same, bit for bit."""
    kept: list[tuple[Model, torch.Tensor, torch.Tensor, int]] = []

    def watch(model: Model) -> None:
        kept.append((model, model.big, model.big.detach().clone(), model.big.data_ptr()))

    yield watch
    for model, big, values, address in kept:
        assert model.big is big
        assert big.data_ptr() == address
        assert same_bits(big.detach(), values)


@pytest.mark.parametrize(
    ("kind", "write"),
    [*itertools.product(["buffer"], WRITES), ("attribute", "in place"), ("parameter", "in place")],
)
def test_what_the_model_writes_to_is_put_back(
    device: torch.device, kind: str, write: str, as_it_was: Callable[[Model], None]
) -> None:
    model, x = written_model(kind, write, device)
    as_it_was(model)
    gw.fuse(model, (x,))


def test_a_numpy_view_made_before_is_put_back(as_it_was: Callable[[Model], None]) -> None:
    model, x = written_model("buffer", "in place", torch.device("cpu"))
    model.array = model.big.detach().numpy()
    model.work = lambda m, y: m.array.__iadd__(1)
    as_it_was(model)
    gw.fuse(model, (x,))


class Stop(BaseException):
    """Stands for KeyboardInterrupt where pytest would take that for its own."""


@pytest.mark.parametrize(
    ("kind", "error", "at"),
    [
        ("buffer", ValueError, 1),
        ("buffer", KeyboardInterrupt, 2),
        ("attribute", KeyboardInterrupt, 4),
        ("parameter", KeyboardInterrupt, 7),
        ("parameter", Stop, 9),
    ],
)
def test_what_the_model_writes_to_is_put_back_after_an_error(
    kind: str, error: type[BaseException], at: int, as_it_was: Callable[[Model], None]
) -> None:
    model, x = written_model(kind, "in place", torch.device("cpu"))
    write = model.work
    calls = functools.cache(itertools.count)  # Nobody can reach it, or put it back.

    def work(model: Model, y: torch.Tensor) -> None:
        write(model, y)
        if next(calls(1)) == at:
            raise error("in the middle")

    model.work = work
    as_it_was(model)
    with contextlib.suppress(error, gw.GraphwrightError):
        gw.fuse(model, (x,))
    assert next(calls(1)) > at
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_interruption_leaves_the_model_as_it_was(as_it_was: Callable[[Model], None]) -> None:
    """A pass is interrupted; afterwards the model is fused as ever."""
    model, x = written_model("buffer", "in place", torch.device("cpu"))
    model.work = lambda m, y: y.add_(m.big[0])
    as_it_was(model)

    def interrupted(graph: Any, device: torch.device) -> list[Change]:
        with torch.no_grad():
            model.big.zero_()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gw.fuse(model, (x,), passes=[Pass("interrupted", interrupted)])
    assert gw.fuse(model, (x,)).regions[0].done


def test_a_write_on_another_thread_is_no_silent_one() -> None:
    model, x = written_model("buffer", "in place", torch.device("cpu"))

    def work(model: Model, y: torch.Tensor) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: model.big.add_(1)).result()

    model.work = work
    with pytest.raises(gw.VerificationError, match="big was written to"):
        gw.fuse(model, (x,))


def test_a_storage_is_identified_without_its_bytes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's recurrent layers pass all their weights as one storage."""
    storage, printed = torch.randn(MANY, device=device).untyped_storage(), []
    monkeypatch.setattr(
        torch.UntypedStorage, "__str__", lambda self: printed.append(self.nbytes()) or "its bytes"
    )

    def work(leaves: list[Any]) -> torch.Tensor:
        whole = torch.empty(0, device=device).set_(storage, 0, (MANY,), (1,))
        return leaves[0] + whole[0]

    assert reads_of_arguments(work, [image(device)], device) is None
    assert not printed


class TestState:
    """The snapshot itself."""

    def test_memory_in_use_is_copied_before_its_first_use(self, device: torch.device) -> None:
        model = Model().to(device)
        hold(model, "buffer", torch.randn(MANY, device=device))
        before = model.big.clone()
        state = ModuleState(model, lazily=True)
        with state.watching():
            model.big.add_(1)
        assert list(state.changes()) == ["buffer big after the call"]
        state.restore()
        assert same_bits(model.big, before)
        assert not state.changes()

    @pytest.mark.parametrize(("rest", "waits"), [(MANY, False), (4 * MANY, True)])
    def test_a_rest_waits_only_where_it_is_most_of_the_memory(
        self, device: torch.device, rest: int, waits: bool
    ) -> None:
        """Else a mode would slow all that follows."""
        model = Model().to(device)
        hold(model, "buffer", torch.randn(2 * MANY, device=device))
        model.register_buffer("rest", torch.randn(rest, device=device))
        state = ModuleState(model, lazily=True)
        with state.watching():
            model.big.add_(1)
        assert [tensor is model.rest for tensor in state.unused()] == [True]
        with state.watching():
            assert bool(state.unused()) == waits
            before = model.rest.clone()
            model.rest.add_(1)
        state.restore()
        assert same_bits(model.rest, before)

    def test_all_is_copied_at_once_beside_a_graph(self) -> None:
        """Its operations are seen by nobody."""
        model = nn.Sequential(gw.graph(nn.Linear(4, 4).eval()))
        hold(model, "buffer", torch.randn(MANY))
        assert not ModuleState(model, lazily=True).unused()

    def test_a_part_shares_the_copies_of_the_whole(self) -> None:
        model = nn.Sequential(Model())
        hold(model[0], "buffer", torch.randn(MANY))
        before = model[0].big.clone()
        state = ModuleState(model, lazily=True)
        part = ModuleState(model[0], shared=state)
        with state.watching():
            model[0].big.add_(1)
        part.restore()
        assert same_bits(model[0].big, before)
        model[0].big.add_(1)
        state.restore()
        assert same_bits(model[0].big, before)
