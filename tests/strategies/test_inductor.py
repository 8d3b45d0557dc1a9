"""What Inductor's builds do around torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import guards

from graphwright.strategies.inductor import FREEZE, unprinted_weights


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo as it is before 2.13, where a guard prints what it compares by identity."""
    monkeypatch.delattr(guards, "_safe_type_repr", raising=False)


@pytest.mark.usefixtures("older")
def test_guards_do_not_print_weights() -> None:
    weight = nn.Parameter(torch.ones(2))
    with unprinted_weights():
        assert guards.repr(weight) == "<Parameter>"
        assert guards.repr("a") == "'a'"
    assert "repr" not in vars(guards)


@pytest.mark.usefixtures("older")
def test_it_ends_with_an_error_and_where_two_do_it_at_once() -> None:
    with pytest.raises(ValueError, match="no"), unprinted_weights(), unprinted_weights():
        raise ValueError("no")
    assert "repr" not in vars(guards)


@pytest.mark.skipif(not hasattr(guards, "_safe_type_repr"), reason="this PyTorch prints them")
def test_where_nothing_is_printed_nothing_is_changed() -> None:
    with unprinted_weights():
        assert "repr" not in vars(guards)


def test_a_build_with_freezing_prints_no_weight(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[type] = []
    plain = torch.Tensor.__repr__

    def noted(tensor: torch.Tensor, **options: object) -> str:
        printed.append(type(tensor))
        return plain(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "__repr__", noted)
    model, x = nn.Linear(4, 3).eval().to(device), torch.ones(2, 4, device=device)
    FREEZE.build(model, (x,), {})
    assert nn.Parameter not in printed
