"""What a module holds is put back, whatever was done to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphwright.calls.modules import FunctionModule
from graphwright.calls.snapshots import Call, ModuleState, checksum, checksums, run, same_bits


class Holder(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("a", torch.randn(3, 4, device=device))
        self.register_buffer("b", torch.tensor([1.0, float("nan"), -0.0], device=device))
        self.register_buffer("c", torch.randn(4, 3, device=device).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("empty", torch.empty(0, 3, device=device))
        self.register_buffer("z", torch.randn(3, dtype=torch.complex64, device=device).conj())
        self.d = torch.randn(5, device=device).half()


def written_by_data(module: Holder) -> None:
    module.a.data.mul_(2)
    module.d.data = torch.zeros_like(module.d)


CHANGES: dict[str, Callable[[Holder], object]] = {
    "in place": lambda module: module.a.add_(1),
    "a sign of zero": lambda module: module.b.abs_(),
    "transposed": lambda module: module.c.zero_(),
    "counted": lambda module: module.count.add_(1),
    "conjugate": lambda module: module.z.mul_(2),
    "by data": written_by_data,
    "replaced": lambda module: setattr(module, "d", torch.zeros(7)),
    "nothing": lambda module: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_put_back(name: str, device: torch.device) -> None:
    module = Holder(device)
    before = {key: value.clone() for key, value in vars(module).items() if key == "d"}
    before |= {key: value.clone() for key, value in module.named_buffers()}
    state = ModuleState(module)
    for _ in range(2):
        CHANGES[name](module)
        assert bool(state.changes()) == (name != "nothing")
        state.restore()
        assert not state.changes()
        for key, value in before.items():
            assert same_bits(getattr(module, key), value), key


class Box:
    """An object with a tensor."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class Slotted:
    """An object with a tensor in a slot."""

    __slots__ = ("held",)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class Holds(nn.Module):
    """Writes to a tensor that something holds."""

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.held = HOLDERS[kind](tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.inner.held
        if isinstance(held, Box | Slotted):
            return x + held.held.add_(1)
        tensor: torch.Tensor = next(iter(held))
        return x + tensor.add_(1)


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "list": lambda tensor: [tensor],
    "tuple": lambda tensor: (tensor,),
    "set": lambda tensor: {tensor},
    "object": Box,
    "slot": Slotted,
}
# How another tensor takes the place of the held one.
REPLACED: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "list": lambda held, new: held.__setitem__(0, new),
    "object": lambda held, new: setattr(held, "held", new),
    "slot": lambda held, new: setattr(held, "held", new),
}


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_that_no_module_has_are_put_back(
    kind: str, lazily: bool, device: torch.device
) -> None:
    tensor, x = torch.zeros(3, device=device), torch.ones(3, device=device)
    module = Holds(tensor, kind)
    state = ModuleState(module, lazily=lazily)
    with state.watching():
        for _ in range(2):
            outcome = run(module, Call("it", (x,), {}), state)
            assert outcome.outputs["output"].tolist() == [2, 2, 2]
            (name,) = outcome.written
            assert "held" in name
            assert outcome.buffers[f"buffer {name} after the call"].tolist() == [1, 1, 1]
        state.restore()
    assert tensor.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", REPLACED)
def test_what_takes_the_place_of_a_tensor_is_a_change(kind: str, device: torch.device) -> None:
    tensor = torch.zeros(3, device=device)
    module = Holds(tensor, kind)
    state = ModuleState(module)
    before = state.marks()
    REPLACED[kind](module.inner.held, tensor + 1)
    assert len(state.changes()) == 1
    assert state.changed() is not None
    assert state.marks() != before
    state.restore()
    assert not state.changes()
    assert state.changed() is None
    assert state.marks() == before


def test_what_a_function_and_a_script_write_to_is_put_back(device: torch.device) -> None:
    tensor, more = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + tensor.add_(1)

    norm = torch.jit.script(nn.BatchNorm1d(3).to(device).train())
    call = Call("it", (torch.ones(2, 3, device=device),), {})
    for module in (FunctionModule(function), FunctionModule(lambda x: x + more.add_(1)), norm):
        state = ModuleState(module)
        first, second = (run(module, call, state) for _ in range(2))
        assert first.written
        assert first.buffers
        assert first.buffers.keys() == second.buffers.keys()
        assert all(same_bits(first.buffers[name], second.buffers[name]) for name in first.buffers)


def test_a_weight_that_is_not_registered_is_found_and_put_back(device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(3, device=device))
    state = ModuleState(Holds(weight, "list"))
    with torch.no_grad():
        weight.add_(1)
    assert state.corrupted() is not None
    assert state.corrupted() is None
    assert weight.tolist() == [0, 0, 0]


def test_varied_buffers_are_what_is_put_back(device: torch.device) -> None:
    module = Holder(device)
    state = ModuleState(module)
    state.restore()
    before = module.a.clone()
    state.vary([module.a.untyped_storage()._cdata])
    state.restore()
    assert not same_bits(module.a, before)
    varied = module.a.clone()
    module.a.zero_()
    state.restore()
    assert same_bits(module.a, varied)


def test_checksums_of_several_tensors_are_those_of_each(device: torch.device) -> None:
    tensors = [
        torch.randn(5, device=device),
        torch.arange(7, dtype=torch.uint8),
        torch.empty(0, device=device),
        torch.randn(3, 4, device=device).half().t(),
        torch.tensor([-1], dtype=torch.int64, device=device),
    ]
    assert checksums(tensors) == list(map(checksum, tensors))
    assert len({*checksums(tensors)}) == len(tensors)
    assert checksums([]) == []


@pytest.mark.parametrize("lazily", [False, True])
def test_a_changed_weight_is_found_and_put_back(device: torch.device, lazily: bool) -> None:
    module = nn.Sequential(nn.Linear(600, 600), nn.Linear(3, 3)).to(device)
    before = [p.detach().clone() for p in module.parameters()]
    state = ModuleState(module, lazily=lazily)
    with state.watching(), torch.no_grad():
        module[0].weight[5, 7] += 1
        assert state.corrupted() == "0.weight"
    assert state.corrupted() is None
    assert all(map(same_bits, before, module.parameters()))
