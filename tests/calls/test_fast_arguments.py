"""The fast check of a call's tensors, in Python and in C++: none that does not fit gets through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls import watch
from graphwright.calls.signature import CallSignature
from graphwright.dispatch import fast_path

Call = tuple[tuple[Any, ...], dict[str, Any]]
# Two arguments that are other views of one array's memory.
SHARED = torch.from_numpy(np.arange(12, dtype=np.float32))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + y


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


def other_calls(device: torch.device) -> dict[str, Call]:
    """Calls of `Sum` that differ from that with two plain tensors, of (2, 3) and (3,)."""
    x, y = torch.randn(2, 3, device=device), torch.randn(3, device=device)
    shared = SHARED.to(device)
    return {
        "the same": ((x.clone(),), {"y": y.clone()}),
        "positional": ((x, y), {}),
        "named": ((), {"y": y, "x": x}),
        "another size": ((torch.randn(5, 3, device=device),), {"y": y}),
        "more dimensions": ((x,), {"y": y.expand(2, 3)}),
        "other strides": ((torch.randn(3, 2, device=device).T,), {"y": y}),
        "double": ((x.double().float(),), {"y": y.double()}),
        "an expanded one": ((x,), {"y": y[:1].expand(3)}),
        "a parameter": ((nn.Parameter(x, requires_grad=False),), {"y": y}),
        "a subclass": ((x.as_subclass(Tagged),), {"y": y}),
        "an offset": ((torch.randn(7, device=device)[1:].view(2, 3),), {"y": y}),
        "requires grad": ((x.clone().requires_grad_(),), {"y": y}),
        "shared memory": ((shared[:6].view(2, 3),), {"y": shared[4:7]}),
        "a number": ((x,), {"y": 2.0}),
        "negative by a bit": ((torch._neg_view(x),), {"y": y}),
    }


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def graphed(device: torch.device) -> tuple[Sum, Any]:
    model = Sum().to(device).eval()
    x, y = torch.randn(2, 3, device=device), torch.randn(3, device=device)
    fast = gw.graph(model)
    with torch.no_grad():
        for _ in range(3):
            fast(x, y=y)
    assert fast.statistics.hits
    return model, fast


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", other_calls(torch.device("cpu")))
def test_a_call_of_another_kind_is_what_eager_says(
    name: str, context: str, device: torch.device
) -> None:
    model, fast = graphed(device)
    args, kwargs = other_calls(device)[name]
    with CONTEXTS[context]():
        for _ in range(2):
            expected, found = model(*args, **kwargs), fast(*args, **kwargs)
            assert found.dtype == expected.dtype
            assert found.requires_grad == expected.requires_grad
            torch.testing.assert_close(found, expected)


def test_tangents_of_forward_ad_are_not_lost(device: torch.device) -> None:
    model, fast = graphed(device)
    x, y = torch.randn(2, 3, device=device), torch.randn(3, device=device)
    captured = gw.capture(model, x, y=y)
    with torch.no_grad(), forward_ad.dual_level():
        given = forward_ad.make_dual(x, torch.ones_like(x))
        expected = forward_ad.unpack_dual(model(given, y=y)).tangent
        assert expected is not None
        found = forward_ad.unpack_dual(fast(given, y=y)).tangent
        torch.testing.assert_close(found, expected)
        with pytest.raises(gw.SignatureError, match="forward-mode AD"):
            captured(given, y=y)
    torch.testing.assert_close(fast(x, y=y), model(x, y=y))


def test_transforms_and_tracers_see_the_operations(device: torch.device) -> None:
    model, fast = graphed(device)
    x, y = torch.randn(4, 2, 3, device=device), torch.randn(3, device=device)
    mapped = torch.func.vmap(lambda each: fast(each, y=y))(x)
    torch.testing.assert_close(mapped, model(x, y))
    traced = make_fx(lambda each: fast(each, y=y))(x[0])
    assert any("addmm" in str(node.target) for node in traced.graph.nodes)


def test_what_gets_through_in_c_plus_plus_fits_the_signature(checks: str) -> None:
    if not watch.COMPILED_ARGUMENTS:
        pytest.skip("there is no check in C++ here")
    device = torch.device("cpu")
    calls = other_calls(device)
    for first, (args, kwargs) in calls.items():
        tensors = (*args, *(kwargs[name] for name in kwargs))
        try:
            signature = CallSignature.of(args, kwargs)
        except gw.SignatureError:
            continue
        if signature.guard is None or not all(map(torch.is_tensor, pytree.tree_leaves(tensors))):
            continue
        fits = watch.COMPILED_ARGUMENTS[0](tensors, tuple(kwargs), False, True)
        given = fits(args, kwargs)
        assert given is not None, first
        assert all(a is b for a, b in zip(given, tensors, strict=True))
        for second, other in calls.items():
            if fits(*other) is not None:
                assert signature.fits(*other), (first, second)


def test_names_that_are_missing_or_too_many_do_not_get_through(checks: str) -> None:
    if not watch.COMPILED_ARGUMENTS:
        pytest.skip("there is no check in C++ here")
    x, y = torch.randn(2, 3), torch.randn(3)
    fits = watch.COMPILED_ARGUMENTS[0]((x, y), ("y",), False, False)
    assert fits((x,), {"y": y}) is None  # Gradients may be wanted.
    with torch.no_grad():
        assert fits((x,), {"y": y}) is not None
        assert fits((x,), {}) is None
        assert fits((x,), {"z": y}) is None
        assert fits((x,), {"y": y, "z": y}) is None
        assert fits((x, y), {"y": y}) is None
    with pytest.raises(TypeError):
        fits(x)
    with pytest.raises(TypeError):
        watch.COMPILED_ARGUMENTS[0]((x, 3.0), (), False, True)


class Making(Sum):
    """Makes a tensor where the default device says."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + y + torch.ones(3).to(x.device)


def test_a_default_device_keeps_calls_on_the_fast_path(
    checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Making().eval()
    fast, x, y = gw.graph(model), torch.randn(2, 3), torch.randn(3)
    slow = [0]
    fitting = fast_path.fitting

    def counted(*given: Any) -> bool:
        slow[0] += 1
        return fitting(*given)

    monkeypatch.setattr(fast_path, "fitting", counted)
    with torch.no_grad():
        for device in ("cpu", "cpu", None, "cpu"):
            torch.set_default_device(device)
            try:
                for _ in range(4):
                    fast(x, y)
                slow[0] = 0
                assert torch.equal(fast(x, y), model(x, y))
                assert slow[0] == (checks == "python")
            finally:
                torch.set_default_device(None)
        assert fast.statistics.captures <= 2
        for _ in range(10):  # Another mode each time.
            with torch.device("cpu"):
                assert torch.equal(fast(x, y), model(x, y))
        with torch.device("meta"), pytest.raises(NotImplementedError):
            fast(x, y)
        with Looking() as looking:
            assert torch.equal(fast(x, y), model(x, y))
        assert looking.seen


class Looking(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_names_in_another_order_get_through_only_where_they_may(checks: str) -> None:
    if not watch.COMPILED_ARGUMENTS:
        pytest.skip("there is no check in C++ here")
    x, y, z = torch.randn(3), torch.randn(3), torch.randn(3)
    for any_order in (False, True):
        fits = watch.COMPILED_ARGUMENTS[0]((x, y, z), ("y", "z"), any_order, True)
        assert fits((x,), {"y": y, "z": z}) is not None
        given = fits((x,), {"z": z, "y": y})
        assert (given is not None) is any_order
        assert given is None or (given[1] is y and given[2] is z)
        equal = {"".join(["k", name])[1:]: value for name, value in (("y", y), ("z", z))}
        assert fits((x,), equal) is not None  # Names that are equal, and other objects.
