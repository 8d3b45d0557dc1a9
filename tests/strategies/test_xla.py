"""XLA through torchax: what the strategy promises, and how it says that it cannot run."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphwright.errors import StrategyFailed
from graphwright.strategies.base import probe
from graphwright.strategies.expected import Expected
from graphwright.strategies.registry import parse_candidates
from graphwright.strategies.xla import COSTS, XLA, Unusable, Xla, load

CPU = torch.device("cpu")
# Not asked when tests are collected: the answer changes the process that gives it.
works = pytest.mark.usefixtures("usable")


@pytest.fixture
def usable() -> None:
    """Skip where XLA cannot be used."""
    before = torch.random.get_rng_state()
    found = probe(XLA, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    if not found.available:
        pytest.skip(f"{found.reason}. {found.remedy}")


class Of(nn.Module):
    """A function as a model, with a parameter, a buffer and a tensor that is neither."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("count", torch.zeros(4))
        self.scale = torch.tensor(2.5)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def build(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the strategy makes of a function, and what eager makes of the sample."""
    model = Of(function).eval().to(args[0].device)
    model.scale = model.scale.to(args[0].device)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    (candidate,) = parse_candidates(["xla"], ())
    return candidate.build(model, args, kwargs).call, expected


SAMPLES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "weights": (lambda m, x: (x @ m.weight + m.count) * m.scale, torch.randn(3, 4)),
    "indices": (lambda m, x: {"best": x.argmax(1), "where": x > 0}, torch.randn(3, 4)),
    "beyond 32 bits": (lambda m, x: x + 2**40, torch.arange(4)),
    "double": (lambda m, x: x / 3, torch.randn(3, 4, dtype=torch.float64)),
    "bfloat16": (lambda m, x: x @ x.t(), torch.randn(3, 4).bfloat16()),
    "half": (lambda m, x: x @ x.t(), torch.randn(3, 4).half()),
    "bool": (lambda m, x: ~x, torch.tensor([True, False])),
    "uint8": (lambda m, x: x + 250, torch.arange(10, dtype=torch.uint8)),
    "transposed": (lambda m, x: (x.t(), x * 2), torch.randn(3, 4)),
    "expanded": (lambda m, x: (x * 2).expand(2, 3, 4), torch.randn(3, 4)),
    "channels last": (
        lambda m, x: x * 2,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "plain leaves": (lambda m, x: [x + 1, x.shape[0], None, "text"], torch.randn(3, 4)),
    "strided": (lambda m, x: x.sum(0), torch.randn(4, 6)[:, ::2]),
    "at an offset": (lambda m, x: x * 2, torch.randn(33)[1:]),
    "odd strides": (lambda m, x: x * 2, torch.randn(24).as_strided((4, 1, 3), (6, 7, 1))),
    "empty": (lambda m, x: x * 2, torch.randn(0, 3)),
    "scalar": (lambda m, x: x * 2, torch.tensor(3.0)),
    "made on the way": (
        lambda m, x: x + torch.arange(4, device=x.device) + torch.tensor(1.5),
        torch.randn(3, 4),
    ),
    "int to float": (lambda m, x: x / 2, torch.arange(4)),
}


@works
@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_eager_s_in_value_dtype_strides_and_tree(
    name: str, device: torch.device
) -> None:
    function, sample = SAMPLES[name]
    x = sample.to(device)
    call, expected = build(function, x)
    result = call(x)
    eager, spec = torch.utils._pytree.tree_flatten(expected)
    found, its_spec = torch.utils._pytree.tree_flatten(result)
    assert its_spec == spec
    for a, b in zip(eager, found, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
        else:
            torch.testing.assert_close(b, a)
            assert (a.dtype, a.stride(), a.device) == (b.dtype, b.stride(), b.device)
            assert not b.requires_grad


@works
def test_weights_of_two_names_are_one(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval().to(device)
    model[2].weight, x = model[0].weight, torch.randn(3, 4, device=device)
    torch.testing.assert_close(XLA.build(model, (x,), {}).call(x), model(x).detach())


@works
def test_arguments_by_name_and_plain_arguments(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    call, expected = build(
        lambda m, x, *, other, sign: (x - other["y"]) * sign, x, other={"y": x * 3}, sign=-1
    )
    torch.testing.assert_close(call(x, sign=-1, other={"y": x * 3}), expected)


@works
@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.TransformerEncoderLayer(16, 2, batch_first=True), torch.randn(2, 5, 16)),
        lambda: (nn.LSTM(4, 5, batch_first=True), torch.randn(2, 3, 4)),
        lambda: (nn.Embedding(10, 4), torch.randint(0, 10, (3, 4))),
    ],
)
def test_layers_that_take_other_ways_than_their_operations(
    make: Callable[[], Any], device: torch.device
) -> None:
    model, x = make()
    model, x = model.eval().to(device), x.to(device)
    with torch.no_grad():
        expected = model(x)
    # On a GPU eager itself computes recurrent layers in TF32.
    near = {"rtol": 1e-2, "atol": 1e-3} if device.type == "cuda" else {}
    torch.testing.assert_close(XLA.build(model, (x,), {}).call(x), expected, **near)


@works
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_operation_widens_what_follows_it(dtype: torch.dtype) -> None:
    """torchax's max_pool2d alone would make doubles of the rest of a network."""
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.GELU())
    model = nn.Sequential(*layers).eval().to(dtype)
    x = torch.randn(2, 3, 12, 12, dtype=dtype)
    built = XLA.build(model, (x,), {})
    (program,) = (cell.cell_contents for cell in built.call.__closure__)
    lines = [line for line in program._compiled.as_text().splitlines() if "jit(function)/" in line]
    assert any("gelu" in line for line in lines)
    assert not [line for line in lines if "f64[" in line and "max_pool2d" not in line]
    torch.testing.assert_close(built.call(x), model(x).detach(), rtol=0.02, atol=0.02)


@works
def test_conversions_that_a_model_asks_for_are_made() -> None:
    x = torch.rand(3, 4)
    for function in (
        lambda m, x: (x.double() + 1e-12 - 1).float() + 1,
        lambda m, x: (x.to(torch.float64) + 1e-12).sub(x).float() * 1e12,
        lambda m, x: x.sum(dtype=torch.float64),
    ):
        call, expected = build(function, x)
        torch.testing.assert_close(call(x), expected)
    call, expected = build(lambda m, x: (x.bfloat16() + x.half(), x.bfloat16().mul_(x)), x)
    torch.testing.assert_close(call(x), expected, rtol=0.02, atol=0.02)


@works
def test_tensors_cross_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is compared: 64 bytes aligned, as torch gives it, is what JAX takes as it is."""
    jax, _ = load(CPU)
    taken = []
    hand_over = jax.dlpack.from_dlpack

    def seen(tensor: torch.Tensor) -> Any:
        array = hand_over(tensor)
        taken.append((tensor.data_ptr(), array.unsafe_buffer_pointer()))
        return array

    x = torch.randn(64, 4)
    with monkeypatch.context() as patch:
        patch.setattr(jax.dlpack, "from_dlpack", seen)
        call, _ = build(lambda m, x: x @ m.weight, x)
        call(x)
    assert len(taken) == 5  # Three weights, the sample, the call.
    assert all(there == here for there, here in taken)
    assert taken[-1][0] == x.data_ptr()


@works
def test_results_belong_to_the_caller(device: torch.device) -> None:
    """Inputs, weights and constants handed through, and one result twice, are apart."""
    x = torch.randn(16, 4, device=device)
    call, _ = build(lambda m, x: (x, m.weight, x + 1, x + 1, torch.arange(4.0)), x)
    kept = x.clone()
    first, second = call(x), call(x)
    after = [tensor.clone() for tensor in second]
    for tensor in first:
        tensor.fill_(7)
    for tensor, before in zip(second, after, strict=True):
        torch.testing.assert_close(tensor, before)
    torch.testing.assert_close(call(x), tuple(after))
    torch.testing.assert_close(x, kept)
    del call
    gc.collect()
    assert first[0].eq(7).all()


@works
def test_inputs_may_be_written_at_once_after_the_call(device: torch.device) -> None:
    x = torch.randn(512, 512, device=device)
    call, expected = build(lambda m, x: x @ x @ x @ x, x)
    sample = x.clone()
    for _ in range(20):
        x.copy_(sample)
        result = call(x)
        x.zero_()
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-1)


@works
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: x.add_(1), "in place"),
        (lambda m, x: (m.count.add_(1), x + m.count)[1], "in place"),
        (lambda m, x: x + torch.rand(4), "random numbers"),
        (lambda m, x: x[x > 0], "could not build"),
        (lambda m, x: x.as_strided((2, 3), (1, 1)), "overlap"),
        (lambda m, x: x + OUTSIDE, "could not build"),
    ],
)
def test_what_xla_would_get_wrong_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(StrategyFailed, match=reason):
        build(function, torch.randn(3, 4))


OUTSIDE = torch.tensor(3.0)


@works
def test_nothing_of_torch_is_changed_or_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    held = dict(vars(model[0])["_parameters"])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    built = XLA.build(model, (torch.randn(3, 4),), {})
    assert built.holds_weights
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.get_default_device() == CPU
    assert model[0].weight is held["weight"]
    torch.testing.assert_close(dict(model.state_dict()), state)
    import jax

    assert not jax.config.jax_enable_x64
    gone = weakref.ref(model)
    del model, built, held
    gc.collect()
    assert gone() is None


@works
def test_torch_compile_still_works_beside_torchax(device: torch.device) -> None:
    load(device)
    (candidate,) = parse_candidates(["aot_autograd"], ())
    x = torch.randn(2, 4, device=device)
    model = nn.Linear(4, 4).eval().to(device)
    torch.testing.assert_close(candidate.build(model, (x,), {}).call(x), model(x).detach())


@works
@pytest.mark.gpu
def test_what_it_costs_the_process_is_told() -> None:
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    built = XLA.build(nn.Linear(4, 4).eval().to("cuda"), (x.detach(),), {})
    assert COSTS in built.notes
    with pytest.raises(RuntimeError, match="jax devices"):
        (x * 2).sum().backward()
    with pytest.raises(RuntimeError, match="PrivateUse1"):
        torch.randn(4).pin_memory()


@works
def test_calls_are_refused_where_their_work_would_not_be_seen() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    x = torch.randn(3, 4)
    call, _ = build(lambda m, x: x + 1, x)
    with TorchDispatchMode(), pytest.raises(StrategyFailed, match="seen"):
        call(x)


class Breaking(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages: one that imports, and one whose import fails half-way."""

    def __init__(self, failing: str, error: Exception) -> None:
        self.failing, self.error = failing, error

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in ("jax", "torchax", "torchax.ops"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "torchax":
            torch.backends.mha.set_fastpath_enabled(False)
            importlib.import_module("torchax.ops")
        if module.__name__ == self.failing:
            raise self.error


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if neither JAX nor torchax had been imported."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("jax", "jaxlib", "torchax"):
            monkeypatch.delitem(sys.modules, name)
    return monkeypatch


@pytest.mark.parametrize("failing", ["jax", "torchax", "torchax.ops"])
def test_an_import_that_fails_is_told_and_leaves_nothing(
    failing: str, unloaded: pytest.MonkeyPatch
) -> None:
    error = AttributeError("The underlying op of 'aten.prod' has no overload name\nand so on")
    unloaded.setattr(sys, "meta_path", [Breaking(failing, error), *sys.meta_path])
    unloaded.setattr("graphwright.strategies.xla._version", lambda name: "0.0.13")
    unloaded.delenv("ENABLE_RUNTIME_UPTIME_TELEMETRY", raising=False)
    unloaded.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = Xla().probe(CPU)
    assert not found.available
    assert found.reason == (
        f"torchax 0.0.13 cannot be imported beside jax 0.0.13 and torch {torch.__version__}: "
        "AttributeError: The underlying op of 'aten.prod' has no overload name"
    )
    assert "torch 2.11" in found.remedy
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchax"]
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch.overrides._get_current_function_mode_stack()
    unloaded.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(Unusable, match="cannot be imported"):
        XLA.build(nn.Linear(2, 2), (torch.randn(1, 2),), {})
    unloaded.delitem(sys.modules, "jax", raising=False)


@pytest.mark.parametrize(
    ("missing", "reason", "remedy"),
    [
        (("jax",), "jax is not installed", "pip install jax"),
        (("torchax",), "torchax is not installed", "pip install torchax"),
        (("jax", "torchax"), "jax and torchax are not installed", "pip install jax torchax"),
    ],
)
def test_what_is_missing_is_named_with_its_command(
    missing: tuple[str, ...], reason: str, remedy: str, unloaded: pytest.MonkeyPatch
) -> None:
    unloaded.setattr(sys, "meta_path", [Breaking("none", OSError()), *sys.meta_path])
    for name in missing:
        unloaded.setitem(sys.modules, name, None)
    found = Xla().probe(CPU)
    assert (found.available, found.reason, found.remedy) == (False, reason, remedy)


@works
def test_a_device_that_jax_lacks_is_told_with_the_package_that_has_it() -> None:
    jax, _ = load(CPU)
    if any(place.platform != "cpu" for place in jax.local_devices()):
        pytest.skip("JAX has a GPU here")
    from graphwright.strategies.xla import _jax_device

    with pytest.raises(Unusable, match="no cuda device") as caught:
        _jax_device(jax, torch.device("cuda", 0))
    assert 'pip install "jax[cuda' in str(caught.value.remedy)


def test_results_are_laid_out_as_eager_s() -> None:
    sample = torch.randn(3, 4)
    model = Of(lambda m, x: (x.t(), x[:1].expand(5, 4), x[:, ::2], x.shape[0])).eval()
    expected = Expected.of(model, (sample,), {})
    eager = model(sample)
    plain = [leaf.contiguous() for leaf in eager if isinstance(leaf, torch.Tensor)]
    restored = expected.restored(plain)
    torch.testing.assert_close(restored, eager)
    for a, b in zip(restored[:3], eager[:3], strict=True):
        assert a.stride() == b.stride()
    with pytest.raises(StrategyFailed, match="another structure"):
        expected.tensors(list(eager))
    with pytest.raises(StrategyFailed, match="other places"):
        expected.tensors((*eager[:3], sample))
    with pytest.raises(StrategyFailed, match=r"\(3, 4\) for"):
        expected.tensors((sample, *eager[1:]))
