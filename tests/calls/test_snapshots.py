"""What a module holds is put back, whatever was done to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphwright.calls.snapshots import ModuleState, checksum, checksums, same_bits


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
