"""fuse(): every pass fires where it should, and nowhere else; numbers and contracts stay."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.utils._pytree import tree_leaves

import graphwright as gw
from graphwright.calls.snapshots import same_bits
from graphwright.fusion import pass_manager
from graphwright.fusion.nodes import add_constant, calls
from graphwright.fusion.passes import epilogues, layout, linears
from graphwright.fusion.passes.attention import ATTENTION, MASKS
from graphwright.fusion.passes.base import Change, Pass
from graphwright.fusion.passes.epilogues import EPILOGUES
from graphwright.fusion.passes.folding import BATCH_NORM, CLEAN, CONSTANTS, SCALES
from graphwright.fusion.passes.idioms import BY_HAND
from graphwright.fusion.passes.layout import CHANNELS_LAST, restored
from graphwright.fusion.passes.linears import ACTIVATIONS, GATES, PADDED, PATCHES, PROJECTIONS
from graphwright.fusion.passes.norms import NORMS, RESIDUALS
from graphwright.fusion.passes.pooling import CHANNEL_GATES, MEANS, POOLS
from graphwright.fusion.sharing import share_constants
from graphwright.fusion.tracing import NotTraced, trace

aten = torch.ops.aten
CPU = torch.device("cpu")


class Model(nn.Module):
    """A forward from a function of the module and its inputs."""

    def __init__(self, work: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.work = work
        for name, member in members.items():
            setattr(self, name, member)
        trained(self)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.work(self, *args)


def trained(model: nn.Module) -> None:
    """Give batch norms statistics as training would, and go to eval."""
    for child in model.modules():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d) and child.running_mean is not None:
            child.running_mean.normal_()
            assert child.running_var is not None
            child.running_var.uniform_(0.5, 2.0)
            if child.affine:
                nn.init.normal_(child.weight)
                nn.init.normal_(child.bias)
    model.eval()


def everywhere(each: Pass) -> Pass:
    """A pass for the GPU, on the CPU too: its operations are there."""
    return Pass(each.name, each.rewrite, starts=each.starts)


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def after(model: nn.Module, args: tuple[Any, ...], *passes: Pass) -> tuple[list[Any], list[str]]:
    """All changes that passes make, and what is left; the numbers are eager's."""
    traced = trace(model, args, {})
    graph, changes = traced.graph, []
    for each in passes:
        result = everywhere(each)(graph, CPU)
        assert (result.model is graph) == (not result.changes)
        graph, changes = result.model, [*changes, *result.changes]
    left = targets(graph)
    restored(graph, traced.strides, *args)
    graph.recompile()
    with torch.no_grad():
        same(traced.call(graph)(*args), model(*args))
    return changes, left


def same(actual: Any, expected: Any) -> None:
    near = 2e-5 if expected.dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(actual, expected, rtol=near, atol=near)
    assert actual.stride() == expected.stride()


def images(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(sizes or (2, 4, 9, 9)), dtype=dtype)


# Batch norms.

CONV = nn.Conv2d
FOLDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Sequential(CONV(4, 6, 3), nn.BatchNorm2d(6)), (2, 4, 9, 9)),
    "without bias": (
        lambda: nn.Sequential(CONV(4, 6, 3, bias=False), nn.BatchNorm2d(6)),
        (2, 4, 9, 9),
    ),
    "grouped": (
        lambda: nn.Sequential(CONV(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
        (2, 4, 9, 9),
    ),
    "not affine": (
        lambda: nn.Sequential(CONV(4, 6, 3), nn.BatchNorm2d(6, affine=False)),
        (2, 4, 9, 9),
    ),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 9)),
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), (5, 4)),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_batch_norm_is_folded(name: str) -> None:
    make, shape = FOLDS[name]
    model = make()
    trained(model)
    changes, left = after(model, (torch.randn(shape),), BATCH_NORM)
    assert len(changes) == 1
    assert not any("batch_norm" in target for target in left)


def test_weights_are_folded_in_float32_and_rounded_once() -> None:
    model = nn.Sequential(CONV(4, 6, 3), nn.BatchNorm2d(6))
    trained(model)
    half = copy.deepcopy(model).bfloat16()
    graph = BATCH_NORM(trace(half, (images(dtype=torch.bfloat16),), {}).graph, CPU).model
    kept = [b for name, b in graph.named_buffers() if b.dim() == 4]
    wide = copy.deepcopy(half).float()
    exact = torch.nn.utils.fuse_conv_bn_eval(wide[0], wide[1]).weight
    assert torch.equal(kept[0], exact.to(torch.bfloat16))


def shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.conv(x)) + self.conv(x)


UNFOLDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "another use": (
        lambda: Model(
            lambda self, x: (lambda y: self.norm(y) + y)(self.conv(x)),
            conv=CONV(4, 4, 3),
            norm=nn.BatchNorm2d(4),
        ),
        (2, 4, 9, 9),
    ),
    "returned": (
        lambda: Model(
            lambda self, x: (lambda y: (self.norm(y), y))(self.conv(x)),
            conv=CONV(4, 4, 3),
            norm=nn.BatchNorm2d(4),
        ),
        (2, 4, 9, 9),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)),
        (2, 4, 9, 9),
    ),
    "statistics of the batch": (
        lambda: nn.Sequential(CONV(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)),
        (2, 4, 9, 9),
    ),
    "training, by the function": (
        lambda: Model(
            lambda self, x: F.batch_norm(
                self.conv(x), self.norm.running_mean, self.norm.running_var, training=True
            ),
            conv=CONV(4, 6, 3),
            norm=nn.BatchNorm2d(6),
        ),
        (2, 4, 9, 9),
    ),
    "something between": (
        lambda: nn.Sequential(CONV(4, 6, 3), nn.ReLU(), nn.BatchNorm2d(6)),
        (2, 4, 9, 9),
    ),
    "channels elsewhere": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)),
        (2, 5, 4),
    ),
    "weights that are computed": (
        lambda: Model(
            lambda self, x: self.norm(F.conv2d(x, x[:1, :, :3, :3].expand(6, -1, -1, -1))),
            norm=nn.BatchNorm2d(6),
        ),
        (2, 4, 9, 9),
    ),
}


@pytest.mark.parametrize("name", UNFOLDED)
def test_a_batch_norm_is_not_folded(name: str) -> None:
    make, shape = UNFOLDED[name]
    model = make()
    trained(model)
    x = torch.randn(shape)
    traced = trace(model, (x,), {})
    assert BATCH_NORM(traced.graph, CPU).changes == ()
    fused = gw.fuse(model, (x,))
    with torch.no_grad():
        expected, found = model(x), fused(x)
    for a, b in zip(
        *((v if isinstance(v, tuple) else (v,)) for v in (found, expected)), strict=True
    ):
        same(a, b)


def test_a_batch_norm_in_training_mode_is_not_folded_and_goes_on_learning() -> None:
    model = nn.Sequential(CONV(4, 6, 3), nn.BatchNorm2d(6))
    trained(model)
    model[1].train()
    twin, x = copy.deepcopy(model), images()
    before = copy.deepcopy(model.state_dict())
    fused = gw.fuse(model, (x,))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        for _ in range(2):
            y = images()
            same(fused(y), twin(y))
    assert not any("batch norm" in str(c) for region in fused.regions for _, c in region.done)
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)


def test_other_dtypes_are_not_folded() -> None:
    model = nn.Sequential(CONV(4, 6, 3), nn.BatchNorm2d(6))
    trained(model)
    model[0].bfloat16()
    x = images(dtype=torch.bfloat16)
    changes, _ = after(model, (x,), BATCH_NORM)
    assert changes == []


def test_weights_that_are_shared_or_reused_stay_right() -> None:
    one = CONV(4, 4, 3, padding=1)
    twice = Model(lambda self, x: self.norm(self.conv(self.norm(self.conv(x)))), conv=one,
                  norm=nn.BatchNorm2d(4))  # fmt: skip
    other = Model(lambda self, x: self.a(x) + self.conv(x),
                  a=nn.Sequential(one, nn.BatchNorm2d(4)), conv=one)  # fmt: skip
    before = one.weight.detach().clone()
    for model in (twice, other):
        trained(model)
        changes, _ = after(model, (images(),), BATCH_NORM, EPILOGUES)
        assert changes
        x = images()
        with torch.no_grad():
            same(gw.fuse(model, (x,))(x), model(x))
    assert torch.equal(one.weight, before)


# Convolutions.

AFTER: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(-0.3, 0.4),
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "gelu": nn.GELU,
    "tanh_gelu": lambda: nn.GELU("tanh"),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_convolution_takes_its_activation_along(name: str) -> None:
    activation = AFTER[name]()
    for inplace in (False, True) if hasattr(activation, "inplace") else (False,):
        activation.inplace = inplace
        model = nn.Sequential(CONV(4, 6, 3, 2, 1), activation)
        trained(model)
        _, left = after(model, (images(),), CLEAN, EPILOGUES)
        rest = left[left.index("mkldnn._convolution_pointwise.default") + 1 :]
        # oneDNN's own would make 0 of NaN.
        assert len(rest) == (name in ("relu", "relu6", "hardtanh", "hardsigmoid"))
        assert name != "relu" or rest == ["aten.relu_.default"]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_takes_a_sum_along(relu: bool, groups: int) -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y += x
        return F.relu(y) if relu else y

    model = Model(work, conv=CONV(4, 4, 3, padding=1, groups=groups))
    _, left = after(model, (images(),), CLEAN, EPILOGUES)
    assert left == ["mkldnn._convolution_pointwise.binary", *["aten.relu_.default"] * relu]


def test_a_kernel_takes_bias_sum_and_activation_of_a_convolution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cuDNN has no fused convolution for; the kernel's reference is there on the CPU too."""
    monkeypatch.setattr(epilogues, "_cudnn_works", lambda conv: True)
    kernel = Pass("kernel", epilogues.on_gpu)
    both = ["aten.conv2d.default", "graphwright.channel_activation.default"]
    for work, taken in (
        (lambda self, x: F.hardswish(self.conv(x)), True),
        (lambda self, x: F.relu6(self.conv(x)), True),
        (lambda self, x: F.gelu(self.conv(x), approximate="tanh"), True),
        (lambda self, x: self.conv(x) + x, True),
        (lambda self, x: F.silu(x + self.conv(x)), True),
        (lambda self, x: self.conv(x), True),
        (lambda self, x: F.hardtanh(self.conv(x), -1, 6), True),
        (lambda self, x: (lambda y: F.hardswish(y) * y)(self.conv(x)), True),
        (lambda self, x: F.hardswish(self.bare(x)), False),
    ):
        model = Model(work, conv=CONV(4, 4, 3, padding=1), bare=CONV(4, 4, 3, bias=False))
        model.to(memory_format=torch.channels_last)
        x = images().contiguous(memory_format=torch.channels_last)
        changes, left = after(model, (x,), CLEAN, kernel)
        assert (len(changes) == 1) == taken
        assert not taken or left[:2] == both
        plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
        assert after(plain, (images(),), CLEAN, kernel)[0] == []


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """The GPU's pass over convolutions; all of its operations but cuDNN's are there on the CPU."""
    monkeypatch.setattr(epilogues, "_cudnn_works", lambda conv: True)
    return Pass("kernel", epilogues.on_gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_depthwise_convolution_is_a_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = on_gpu(monkeypatch)
    for options, work in (
        ({"padding": 1}, lambda self, x: self.conv(x)),
        ({"stride": 2}, lambda self, x: F.hardswish(self.conv(x))),
        ({"bias": False}, lambda self, x: F.relu(self.conv(x))),
    ):
        model = Model(work, conv=CONV(4, 4, 3, groups=4, **options)).to(dtype)
        model.to(memory_format=torch.channels_last)
        x = images(dtype=dtype).contiguous(memory_format=torch.channels_last)
        changes, left = after(model, (x,), CLEAN, kernel)
        assert len(changes) == 1
        assert left == ["graphwright.depthwise_conv2d.default"]


@pytest.mark.parametrize(
    "conv",
    [
        CONV(4, 4, 3, groups=2),
        CONV(4, 8, 3, groups=4),
        CONV(4, 4, 3, groups=4, dilation=2),
        CONV(4, 4, 9, groups=4),
        CONV(4, 4, 3, groups=4, padding="same", padding_mode="reflect"),
    ],
)
def test_other_grouped_convolutions_are_no_kernel(
    conv: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(lambda self, x: self.conv(x), conv=conv)
    changes, left = after(model, (images(),), CLEAN, on_gpu(monkeypatch))
    if conv.padding_mode == "zeros":
        assert not any("depthwise" in change.what for change in changes)
        assert "graphwright.depthwise_conv2d.default" not in left


def test_a_convolution_of_single_pixels_is_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_gpu(monkeypatch)
    x = images(dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    for conv, work, taken in (
        (CONV(4, 6, 1), lambda self, x: self.conv(x), True),
        (CONV(4, 4, 1), lambda self, x: self.conv(x) * x, True),
        (CONV(4, 4, 1), lambda self, x: self.conv(x) + x, False),
        (CONV(4, 6, 1), lambda self, x: F.hardswish(self.conv(x)), False),
        (CONV(4, 6, 1, bias=False), lambda self, x: self.conv(x), False),
        (CONV(4, 6, 1, stride=2), lambda self, x: self.conv(x), False),
        (CONV(4, 6, 1, padding=1), lambda self, x: self.conv(x), False),
        (CONV(4, 6, 1, groups=2), lambda self, x: self.conv(x), False),
        (CONV(4, 6, (1, 3)), lambda self, x: self.conv(x), False),
    ):
        model = Model(work, conv=conv).half().to(memory_format=torch.channels_last)
        _, left = after(model, (x,), CLEAN, kernel)
        assert ("aten.linear.default" in left) == taken
    # cuDNN may compute float32 in TF32.
    model = Model(lambda self, x: self.conv(x), conv=CONV(4, 6, 1))
    assert "aten.linear.default" not in after(model, (images(),), CLEAN, kernel)[1]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_windows_side_by_side_are_a_linear_layer(form: torch.memory_format) -> None:
    x = images(2, 4, 8, 12, dtype=torch.float16).contiguous(memory_format=form)
    for conv in (CONV(4, 6, 4, stride=4), CONV(4, 6, (2, 3), stride=(2, 3), bias=False)):
        model = Model(lambda self, x: self.conv(x), conv=conv).half().to(memory_format=form)
        changes, left = after(model, (x,), PATCHES)
        assert len(changes) == 1
        assert "aten.conv2d.default" not in left


@pytest.mark.parametrize(
    "conv",
    [
        CONV(4, 6, 4, stride=2),
        CONV(4, 6, 4, stride=4, padding=2),
        CONV(4, 6, 2, stride=2, groups=2),
        CONV(4, 6, 2, stride=2, dilation=2),
        CONV(4, 6, 3, stride=3),
        CONV(4, 6, 1),
        nn.ConvTranspose2d(4, 6, 2, stride=2),
    ],
)
def test_other_windows_stay(conv: nn.Module) -> None:
    model = Model(lambda self, x: self.conv(x), conv=conv).half()
    changes, _ = after(model, (images(2, 4, 8, 8, dtype=torch.float16),), PATCHES)
    assert changes == []


def test_windows_in_float32_stay() -> None:
    """In TF32 they may be faster as they are."""
    model = Model(lambda self, x: self.conv(x), conv=CONV(4, 6, 2, stride=2))
    assert after(model, (images(2, 4, 8, 8),), PATCHES)[0] == []


# Squeeze and excitation.


def test_squeeze_and_excitation() -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        factors = self.up(F.relu(self.down(self.pool(x))))
        return getattr(F, self.name)(factors) * x

    for name in ("sigmoid", "hardsigmoid"):
        parts = {"up": CONV(2, 4, 1), "down": CONV(4, 2, 1), "pool": nn.AdaptiveAvgPool2d(1)}
        changes, left = after(Model(work, name=name, **parts), (images(),), MEANS, CHANNEL_GATES)
        assert len(changes) == 2
        assert left.count("graphwright.channel_mean.default") == 1
        assert left.count("graphwright.channel_gate.default") == 1
        assert left.count("aten.conv2d.default") == 2
        assert not any(name in target for target in left)


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x: F.adaptive_avg_pool2d(x, 1),
        lambda self, x: F.adaptive_avg_pool2d(x, (1, 1)),
        lambda self, x: x.mean((2, 3), keepdim=True),
        lambda self, x: x.mean((-1, -2), True),
    ],
)
def test_means_of_channels(work: Callable[..., Any]) -> None:
    assert len(after(Model(work), (images(),), MEANS)[0]) == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x: F.adaptive_avg_pool2d(x, 2),
        lambda self, x: F.adaptive_avg_pool2d(x[0], 1),
        lambda self, x: x.mean((1, 3), keepdim=True),
        lambda self, x: x.mean((2, 3)),
        lambda self, x: x.mean((2, 3), keepdim=True, dtype=torch.float64),
        lambda self, x: x[:1, :1].mean(keepdim=True, dim=(0, 1, 2, 3)),
        lambda self, x: x.double().mean((2, 3), keepdim=True),
        lambda self, x: torch.sigmoid(x) * x,
        lambda self, x: torch.sigmoid(x[:, :1, :1, :1]) * x,
        lambda self, x: torch.sigmoid(x[:1, :, :1, :1]) * x,
        lambda self, x: torch.tanh(x[:, :, :1, :1]) * x,
        lambda self, x: (lambda g: g * x + g)(torch.sigmoid(x[:, :, :1, :1])),
        lambda self, x: torch.sigmoid(x[:, :, :1, :1]) * x.double(),
    ],
)
def test_other_means_and_factors_stay(work: Callable[..., Any]) -> None:
    changes, _ = after(Model(work), (images(),), MEANS, CHANNEL_GATES)
    assert changes == []


UNMERGED: dict[str, Callable[..., Any]] = {
    "the convolution is used again": lambda self, x: (lambda y: F.relu(y) * y)(self.conv(x)),
    "the sum broadcasts": lambda self, x: self.conv(x) + x[:1],
    "the convolution is broadcast": lambda self, x: x + self.conv(x[:1]),
    "the sum is scaled": lambda self, x: torch.add(self.conv(x), x, alpha=2.0),
    "the sum is with itself": lambda self, x: (lambda y: y + y)(self.conv(x)),
    "the sum is a number": lambda self, x: self.conv(x) + 1.0,
}


@pytest.mark.parametrize("name", UNMERGED)
def test_a_convolution_takes_nothing_along(name: str) -> None:
    model = Model(UNMERGED[name], conv=CONV(4, 4, 3, padding=1))
    changes, _ = after(model, (images(),), CLEAN, EPILOGUES)
    assert [c.what for c in changes if "oneDNN" in c.what] == ["packed convolution by oneDNN"]


def test_two_convolutions_that_are_added() -> None:
    """The later one takes the sum along."""
    model = Model(lambda self, x: F.relu(self.a(x) + self.b(x)), a=CONV(4, 4, 3), b=CONV(4, 4, 3))
    _, left = after(model, (images(),), CLEAN, EPILOGUES)
    both = [f"mkldnn._convolution_pointwise.{n}" for n in ("default", "binary")]
    assert left == [*both, "aten.relu_.default"]


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose2d(4, 4, 3),
        nn.Conv1d(4, 4, 3),
        CONV(4, 4, 3, padding="same"),
        CONV(4, 4, 3).double(),
    ],
    ids=["transposed", "one dimension", "padded by name", "float64"],
)
def test_other_convolutions_stay(model: nn.Module) -> None:
    model.eval()
    x = images(2, 4, 9) if isinstance(model, nn.Conv1d) else images()
    x = x.to(next(model.parameters()).dtype)
    changes, _ = after(model, (x,), EPILOGUES)
    assert changes == []


def test_an_image_without_a_batch_stays() -> None:
    changes, _ = after(CONV(4, 4, 3).eval(), (images(4, 9, 9),), EPILOGUES)
    assert changes == []


def test_strides_that_can_be_seen_are_eagers() -> None:
    """Packed convolutions give channels_last, which views do not take and callers do not expect."""
    model = Model(lambda self, x: (lambda y: (y.view(2, -1), y))(self.conv(x)), conv=CONV(4, 4, 3))
    x = images()
    fused = gw.fuse(model, (x,))
    with torch.no_grad():
        for found, expected in zip(fused(x), model(x), strict=True):
            same(found, expected)
    assert "packed convolution" in fused.explain()


def test_a_pool_takes_the_relu_before_it_along() -> None:
    for work, left in (
        (lambda self, x: F.max_pool2d(F.relu(x), 3, 2, 1), 1),
        (lambda self, x: F.max_pool2d(F.relu(self.conv(x)), 2), 3),
        (lambda self, x: (lambda y: F.max_pool2d(y, 2).sum() + y.sum())(F.relu(x)), 5),
    ):
        changes, found = after(Model(work, conv=CONV(4, 4, 3)), (images(),), POOLS)
        assert len(changes) == 1
        assert len(found) == left
        assert "graphwright.relu_max_pool2d.default" in found


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x: F.max_pool2d(x, 2),
        lambda self, x: F.max_pool2d(F.relu(x), 2, ceil_mode=True),
        lambda self, x: F.max_pool2d(F.relu(x), 2, dilation=2),
        lambda self, x: F.max_pool2d(F.relu(x), 2, return_indices=True)[0],
        lambda self, x: F.avg_pool2d(F.relu(x), 2),
    ],
)
def test_other_pools_stay(work: Callable[..., Any]) -> None:
    changes, _ = after(Model(work), (images(),), POOLS)
    assert changes == []


# Linear layers.


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_come_in_eights(bias: bool) -> None:
    model = nn.Linear(6, 2049, bias=bias).half()
    for shape in ((5, 6), (2, 5, 6), (6,)):
        changes, left = after(model, (torch.randn(shape).half(),), PADDED)
        assert len(changes) == 1
        assert "aten.narrow.default" in left


def test_other_widths_stay() -> None:
    for model in (nn.Linear(6, 2056).half(), nn.Linear(6, 2041).half(), nn.Linear(6, 2049)):
        x = torch.randn(5, 6).to(model.weight)
        assert after(model, (x,), PADDED)[0] == []


def test_projections_of_one_input_are_merged() -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.view(2, 5, 2, -1).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, -1)

    for bias in (True, False):
        model = Model(work, **{n: nn.Linear(6, 8, bias=bias) for n in "qkv"})
        changes, left = after(model, (torch.randn(2, 5, 6),), PROJECTIONS)
        assert len(changes) == 1
        assert left.count("aten.linear.default") == 1


def test_projections_of_other_kinds_are_not_merged() -> None:
    for work in (
        lambda self, x: self.q(x) + self.k(x + 1),
        lambda self, x: self.q(x) + self.b(x),
        lambda self, x: self.q(x) + F.linear(x, x[0]),
    ):
        parts = {"q": nn.Linear(6, 6), "k": nn.Linear(6, 6), "b": nn.Linear(6, 6, bias=False)}
        changes, _ = after(Model(work, **parts), (torch.randn(6, 6),), PROJECTIONS)
        assert changes == []


def test_projections_that_are_handed_out_are_not_merged() -> None:
    """They would lie in each other's memory."""
    model = Model(lambda self, x: (self.q(x), self.k(x).view(6, 2, 3)), q=nn.Linear(6, 6),
                  k=nn.Linear(6, 6))  # fmt: skip
    graph = trace(model, (torch.randn(6, 6),), {}).graph
    assert everywhere(PROJECTIONS)(graph, CPU).changes == ()


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (6,)])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_a_linear_layer_takes_its_activation_along(
    activation: type[nn.Module], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), activation()).eval()
    changes, left = after(model, (torch.randn(shape),), ACTIVATIONS)
    assert len(changes) == 1
    assert not any(name in " ".join(left) for name in ("aten.relu", "aten.gelu", "aten.silu"))


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x: self.free(x).relu(),
        lambda self, x: (lambda y: y.relu() + y)(self.full(x)),
        lambda self, x: self.full(x).sigmoid(),
        lambda self, x: F.linear(x, x, self.full.bias[:5]).relu(),
    ],
)
def test_a_linear_layer_takes_nothing_along(work: Callable[..., Any]) -> None:
    model = Model(work, free=nn.Linear(6, 8, bias=False), full=nn.Linear(6, 8))
    changes, _ = after(model, (torch.randn(5, 6),), ACTIVATIONS)
    assert changes == []


def test_gates() -> None:
    model = Model(lambda self, x: F.silu(self.a(x)) * self.b(x), a=nn.Linear(6, 8),
                  b=nn.Linear(6, 8))  # fmt: skip
    _, left = after(model, (torch.randn(5, 6),), PROJECTIONS, GATES)
    assert left == [
        "aten.linear.default",
        *["aten.narrow.default"] * 2,
        "graphwright.swiglu.default",
    ]
    for work in (lambda self, x: F.silu(x) * x[:1], lambda self, x: (lambda y: y * y)(F.silu(x))):
        changes, _ = after(Model(work), (torch.randn(5, 6),), GATES)
        assert changes == []


# Norms.


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def test_a_residual_connection_takes_its_norm_along() -> None:
    parts = {"norm": nn.LayerNorm(6), "rms": nn.RMSNorm(6, eps=1e-6)}
    for work, name in (
        (lambda self, x, y: self.norm(x + y), "add_layer_norm"),
        (lambda self, x, y: (lambda z: self.norm(z) * z)(x + y), "add_layer_norm"),
        (lambda self, x, y: self.rms(x + y), "add_rms_norm"),
        (lambda self, x, y: rms(x + y, self.rms.weight), "add_rms_norm"),
        (lambda self, x, y: F.layer_norm(x + y, (6,)), "add_layer_norm"),
        (lambda self, x, y: F.layer_norm(x + y, (6,), bias=self.norm.bias), "add_layer_norm"),
    ):
        args = torch.randn(5, 6), torch.randn(5, 6)
        changes, left = after(Model(work, **parts), args, CLEAN, BY_HAND, RESIDUALS)
        assert f"graphwright.{name}.default" in left, changes


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x, y: self.norm(x + y[:1]),
        lambda self, x, y: self.norm(torch.add(x, y, alpha=2)),
        lambda self, x, y: self.norm(x * y),
        lambda self, x, y: F.layer_norm(x + y, (5, 6)),
        lambda self, x, y: F.layer_norm(x + y, (6,), y[0], x[0]),
    ],
)
def test_other_norms_stay(work: Callable[..., Any]) -> None:
    model = Model(work, norm=nn.LayerNorm(6))
    changes, _ = after(model, (torch.randn(5, 6), torch.randn(5, 6)), RESIDUALS)
    assert changes == []


def test_a_norm_alone_is_a_kernel() -> None:
    norm, bare = nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False)
    for work, taken in (
        (lambda self, x: self.norm(x), True),
        (lambda self, x: self.bare(x), True),
        (lambda self, x: F.layer_norm(x, (6,), self.norm.weight), True),
        (lambda self, x: F.layer_norm(x, (6,), x[0]), False),
        (lambda self, x: F.layer_norm(x, (5, 6)), False),
    ):
        model = Model(work, norm=norm, bare=bare)
        changes, _ = after(model, (torch.randn(5, 6),), NORMS)
        assert (len(changes) == 1) == taken
    mixed = Model(lambda self, x: F.layer_norm(x, (6,), self.w), w=nn.Parameter(torch.ones(6)))
    assert after(mixed, (torch.randn(5, 6).bfloat16(),), NORMS)[0] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_written_out_by_hand_is_pytorchs(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(6, dtype=dtype))
    model = Model(lambda self, x: rms(x, self.weight), weight=weight)
    traced = trace(model, (torch.randn(5, 6, dtype=dtype),), {})
    result = BY_HAND(CLEAN(traced.graph, CPU).model, CPU)
    assert targets(result.model) == ["aten.rms_norm.default"]
    for work in (
        lambda self, x: self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)),
        lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
        lambda self, x: self.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, True) + 1e-6)),
        lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, True) + self.weight)),
    ):
        graph = trace(Model(work, weight=weight), (torch.randn(5, 6).abs().to(dtype),), {}).graph
        assert BY_HAND(graph, CPU).changes == ()


def gelu_by_hand(x: torch.Tensor, root: float = 0.7978845608028654) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3.0))))


def test_gelu_written_out_by_hand_is_pytorchs() -> None:
    x = torch.randn(5, 6)
    _, left = after(Model(lambda self, x: gelu_by_hand(x)), (x,), BY_HAND)
    assert left == ["aten.gelu.default"]
    for work in (
        lambda self, x: gelu_by_hand(x, 0.8),
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(x)),
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + x))),
        lambda self, x: 0.4 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**2))),
        lambda self, x: 0.5 * -x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    ):
        changes, _ = after(Model(work), (x,), BY_HAND)
        assert changes == []


def test_transformers_conv1d_takes_its_activation_along() -> None:
    weight, bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))

    def conv1d(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(2, 5, 8)

    for activation, name in ((F.relu, "aten._addmm_activation"), (F.gelu, "graphwright.bias_gelu")):
        model = Model(
            lambda self, x, activation=activation: activation(conv1d(self, x)),
            weight=weight,
            bias=bias,
        )
        changes, left = after(model, (torch.randn(2, 5, 6),), ACTIVATIONS)
        assert len(changes) == 1
        assert f"{name}.default" in left


def test_constant_factors_are_folded() -> None:
    scale, rows = nn.Parameter(torch.randn(6, 1, 1)), nn.Parameter(torch.randn(6))
    parts = {"conv": CONV(4, 6, 3), "bare": CONV(4, 6, 3, bias=False), "linear": nn.Linear(9, 6),
             "scale": scale, "rows": rows}  # fmt: skip
    for work in (
        lambda self, x: self.conv(x) * self.scale,
        lambda self, x: self.scale * self.bare(x),
        lambda self, x: self.linear(x) * self.rows,
        lambda self, x: self.scale * self.linear(x).permute(0, 3, 1, 2),
        lambda self, x: self.linear(x) * torch.tensor(2.5),
    ):
        changes, left = after(Model(work, **parts), (images(),), CLEAN, CONSTANTS, SCALES)
        assert [c.what for c in changes if c.what == "scale folded"] == ["scale folded"]
        assert "aten.mul.Tensor" not in left


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x: self.linear(x) * self.scale,
        lambda self, x: (lambda y: y * self.rows + y)(self.linear(x)),
        lambda self, x: self.linear(x)[:, :, :6] * self.rows,
        lambda self, x: self.linear(x[0, 0, :1]) * self.scale,
        lambda self, x: self.linear(x) * x[0, 0, 0, :6],
        lambda self, x: self.linear(x).permute(0, 1, 3, 2) * self.rows,
    ],
)
def test_other_factors_stay(work: Callable[..., Any]) -> None:
    parts = {"linear": nn.Linear(9, 6), "scale": nn.Parameter(torch.randn(6, 1)),
             "rows": nn.Parameter(torch.randn(6))}  # fmt: skip
    x = torch.randn(2, 4, 6, 9)
    changes, _ = after(Model(work, **parts), (x,), SCALES)
    assert changes == []


# Attention.


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: str
) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    if how == "divided":
        scores = scores / 2.5
    if how == "multiplied":
        scores = scores * 0.3
    if mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), 0.1, training=False) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_are_made_once(dtype: torch.dtype) -> None:
    """Of true and false; a row that is masked altogether comes out as eager's."""

    def work(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attention = F.scaled_dot_product_attention
        y = attention(x, x, x, mask)
        y = attention(y, y, y, attn_mask=mask)
        return attention(y, y, y, mask.expand(2, 3, 5, 5))

    x = torch.randn(2, 3, 5, 4, dtype=dtype)
    mask = (torch.rand(2, 1, 5, 5) > 0.4) | torch.eye(5, dtype=torch.bool)
    mask[1, 0, 2] = False
    changes, left = after(Model(work), (x, mask), MASKS)
    assert len(changes) == 3
    assert left.count("aten.where.ScalarOther") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_that_are_masked_altogether_are_eagers(
    dtype: torch.dtype, device: torch.device
) -> None:
    """What is added where a mask is false depends on whose attention it is: cuDNN's has its own."""

    def work(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attention = F.scaled_dot_product_attention
        return attention(attention(x, x, x, mask), x, x, mask)

    x = torch.randn(2, 3, 16, 64, dtype=dtype, device=device)
    mask = torch.rand(2, 1, 16, 16, device=device) > 0.4
    mask[1, 0, 2] = False
    model = Model(work)
    fused = gw.fuse(model, (x, mask), passes=["masks"], verify=False)
    with torch.no_grad():
        assert same_bits(fused(x, mask), model(x, mask))
    assert "2 × mask made once" in fused.explain()


def test_masks_that_turn_out_otherwise_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.fusion.passes.attention.same_bits", lambda a, b: False)
    x, mask = torch.randn(2, 3, 4, 4), torch.ones(4, 4, dtype=torch.bool)
    model = Model(lambda self, x, mask: F.scaled_dot_product_attention(x, x, x, mask))
    assert after(model, (x, mask), MASKS)[0] == []


@pytest.mark.parametrize(
    "work",
    [
        lambda self, x: F.scaled_dot_product_attention(x, x, x),
        lambda self, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda self, x: F.scaled_dot_product_attention(x, x, x, x[..., :1]),
    ],
)
def test_other_masks_stay(work: Callable[..., Any]) -> None:
    assert after(Model(work), (torch.randn(2, 3, 4, 4),), MASKS)[0] == []


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("how", ["plain", "divided", "multiplied"])
def test_attention_written_out_by_hand_is_pytorchs(how: str, masked: bool) -> None:
    mask = torch.zeros(2, 1, 1, 5).masked_fill(torch.rand(2, 1, 1, 5) > 0.7, -1e4)
    args = *(torch.randn(2, 3, 5, 4) for _ in range(3)), *([mask] if masked else [])
    model = Model(lambda self, q, k, v, m=None: attention(q, k, v, m, how))
    _, left = after(model, args, CLEAN, ATTENTION)
    assert "aten.scaled_dot_product_attention.default" in left
    assert not any("softmax" in target for target in left)


@pytest.mark.parametrize(
    "work",
    [
        lambda self, q, k, v: (lambda w: (w @ v).sum() + w.sum())((q @ k.mT).softmax(-1)),
        lambda self, q, k, v: (q @ k.mT).softmax(-2) @ v,
        lambda self, q, k, v: (q @ k.mT).softmax(-1)[0] @ v[0],
        lambda self, q, k, v: (q @ k.mT * q.mean()).softmax(-1) @ v,
        lambda self, q, k, v: ((q @ k.mT).relu()).softmax(-1) @ v,
        lambda self, q, k, v: (q @ k.mT)[0].softmax(-1) @ v[0],
        lambda self, q, k, v: (q[:, :, :1] @ k.mT + torch.ones(2, 3, 5, 5)).softmax(-1) @ v,
    ],
)
def test_other_products_stay(work: Callable[..., Any]) -> None:
    args = tuple(torch.randn(2, 3, 5, 4) for _ in range(3))
    model = Model(lambda self, *a: work(self, *a).contiguous())
    changes, _ = after(model, args, ATTENTION)
    assert changes == []


# What does nothing, and what is always the same.


def test_constants_are_computed_once() -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(9.0).exp() + (self.weight * 2).sum()

    changes, left = after(Model(work, weight=nn.Parameter(torch.randn(4))), (images(),), CONSTANTS)
    assert len(changes) == 2
    assert left == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_constants_that_are_handed_out_are_made_anew() -> None:
    def work(self: Any, x: torch.Tensor) -> Any:
        expanded = (torch.arange(9.0) * 2).expand_as(x)
        return x + 1, torch.arange(4.0) * 2, (torch.ones(2, 3) * 3).view(6), expanded

    model = Model(work)
    x = images()
    fused = gw.fuse(model, (x,), verify=False)
    with torch.no_grad():
        for result in fused(x):
            result.fill_(-1.0)
        for found, expected in zip(fused(x), model(x), strict=True):
            same(found, expected)


def test_random_numbers_are_drawn_anew() -> None:
    model = Model(lambda self, x: x + torch.rand(9) * 0 + torch.rand(9).sign())
    changes, _ = after(model, (images(),), CONSTANTS)
    assert not any("rand" in str(change) for change in changes)


def test_what_is_written_in_place_and_seen_stays_so() -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y[0]
        view += 1
        z = self.conv(y)
        y.mul_(3)
        return F.relu(z) + y

    model = Model(work, conv=CONV(4, 4, 3, padding=1))
    x = images()
    with torch.no_grad():
        same(gw.fuse(model, (x,))(x), model(x))


# The whole.


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = CONV(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = CONV(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(
                CONV(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


def resnet() -> nn.Sequential:
    model = nn.Sequential(
        CONV(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Block(8, 8),
        Block(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    trained(model)
    return model


def test_a_resnet_is_convolutions_and_little_else(device: torch.device) -> None:
    model, x = resnet().to(device), torch.randn(2, 3, 32, 32, device=device)
    fused = gw.fuse(model, (x,))
    (region,) = fused.regions
    assert region.left_out == []
    assert fused.untraced == []
    assert region.operations[0] > region.operations[1]
    assert {name for name, _ in region.done} >= {"clean", "batch_norm", "convolutions"}
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3, 32, 32, device=device)
            torch.testing.assert_close(fused(x), model(x), rtol=2e-3, atol=2e-3)
    assert fused.calls["fused"] == 3
    assert not fused(x).requires_grad
    text = fused.explain()
    assert "batch norm folded" in text
    assert "3 calls fused" in text or "4 calls fused" in text


class Layer(nn.Module):
    """A transformer's layer; like Llama's, or like BERT's."""

    def __init__(self, width: int, *, llama: bool) -> None:
        super().__init__()
        self.llama = llama
        self.q, self.k, self.v = (nn.Linear(width, width, bias=not llama) for _ in range(3))
        self.out = nn.Linear(width, width, bias=not llama)
        self.norm1, self.norm2 = (
            nn.RMSNorm(width, eps=1e-6) if llama else nn.LayerNorm(width) for _ in range(2)
        )
        self.up, self.gate = (nn.Linear(width, 4 * width, bias=not llama) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=not llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (p(x).view(batch, length, 4, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(self.out(y) + x)
        inner = self.up(x)
        inner = F.silu(self.gate(x)) * inner if self.llama else F.gelu(inner)
        return self.norm2(self.down(inner) + x)


ON_GPU = {
    "llama": {"projections", "gates", "residuals"},
    "bert": {"projections", "activations", "residuals"},
    "block": {"batch_norm", "channels_last", "convolutions"},
    "pool": {"pools", "convolutions"},
    "hand": {"by_hand", "activations"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_what_each_device_fuses(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Verified against float64; and what a GPU's passes are for is found there."""
    x = torch.randn(2, 8, 64) if name in ("llama", "bert", "hand") else images(2, 16, 12, 12)
    makers: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: Layer(64, llama=True),
        "bert": lambda: Layer(64, llama=False),
        "block": lambda: Block(16, 16),
        "pool": lambda: nn.Sequential(CONV(16, 16, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        "hand": lambda: Model(lambda self, x: gelu_by_hand(self.up(x)), up=nn.Linear(64, 128)),
    }
    model = makers[name]()
    trained(model)
    model, x = model.to(device, dtype), x.to(device, dtype)
    fused = gw.fuse(model, (x,))
    (region,) = fused.regions
    assert region.left_out == []
    if device.type == "cuda" and (dtype is not torch.float32 or name != "block"):
        assert {each for each, _ in region.done} >= ON_GPU[name]
    with torch.no_grad():
        y = torch.randn_like(x)
        found, expected = fused(y), model(y)
        y.view(-1)[5] = torch.nan
        found_special = torch.isnan(fused(y))
        special = torch.isnan(copy.deepcopy(model).double()(y.double()))
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < 8 * torch.finfo(dtype).eps if dtype is not torch.float32 else error < 2e-3
    assert found.stride() == expected.stride()
    # Eager itself may lose NaN: cuDNN's bfloat16 convolution of 16 contiguous channels does.
    assert torch.equal(found_special, special)


def with_relu(channels: tuple[int, int, int]) -> nn.Module:
    """A convolution with ReLU, one with a sum too, and a linear layer with ReLU."""
    inputs, outputs, window = channels

    def work(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu(self.conv(x))
        return y, F.relu(self.again(x) + self.conv(x)), F.relu(self.linear(x.flatten(2)))

    convs = (CONV(inputs, outputs, window, padding=window // 2) for _ in range(2))
    return Model(work, conv=next(convs), again=next(convs), linear=nn.Linear(144, outputs))


def loses_nan(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether NaN in every element leaves something else, where eager has NaN."""
    fused = gw.fuse(model, (x,), verify=False)
    nothing = torch.full_like(x, torch.nan)
    with torch.no_grad():
        pairs = zip(fused(nothing), model(nothing), strict=True)
        return any(bool((right.isnan() & ~mine.isnan()).any()) for mine, right in pairs)


WITH_RELU = [(3, 64, 7), (16, 16, 3), (64, 64, 3), (64, 256, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", WITH_RELU, ids=str)
def test_the_libraries_kernels_that_are_taken_keep_nan(
    channels: tuple[int, int, int], dtype: torch.dtype, form: torch.memory_format
) -> None:
    model = with_relu(channels).to("cuda", dtype).to(memory_format=form)
    x = torch.randn(2, channels[0], 12, 12).to("cuda", dtype).contiguous(memory_format=form)
    assert not loses_nan(model, x)


@pytest.mark.gpu
def test_unasked_some_of_them_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would have to be asked."""
    for module in (epilogues, linears):
        monkeypatch.setattr(module, "keeps_nan", lambda x, eager, fused: True)
    lost = []
    for channels in WITH_RELU:
        for form in (torch.channels_last, torch.contiguous_format):
            model = with_relu(channels).to("cuda").to(memory_format=form)
            x = torch.randn(2, channels[0], 12, 12).to("cuda").contiguous(memory_format=form)
            lost.append(loses_nan(model, x))
    assert any(lost)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_kernel_that_loses_nan_is_not_taken(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def relu(x: torch.Tensor) -> torch.Tensor:
        return x.relu() if keeps else x.nan_to_num().relu()

    def alone(x: torch.Tensor, *given: Any) -> torch.Tensor:
        return relu(torch.conv2d(x, *given))

    def summed(x: torch.Tensor, weight: Any, other: Any, alpha: float, *given: Any) -> torch.Tensor:
        return relu(alpha * other + torch.conv2d(x, weight, *given))

    def linear(bias: Any, x: Any, weight: Any, use_gelu: bool) -> torch.Tensor:
        return relu(torch.addmm(bias, x, weight))

    monkeypatch.setattr(torch, "cudnn_convolution_relu", alone)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", summed)
    monkeypatch.setattr(torch, "_addmm_activation", linear)

    def work(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.relu(self.conv(x)), F.relu(self.conv(x) + x), F.relu(self.linear(x))

    model = Model(work, conv=CONV(4, 4, 3, padding=1), linear=nn.Linear(9, 5))
    graph = trace(model, (images(),), {}).graph
    for each in (CLEAN, on_gpu(monkeypatch), everywhere(ACTIVATIONS)):
        graph = each(graph, CPU).model
    left = targets(graph)
    taken = ("cudnn_convolution_relu", "cudnn_convolution_add_relu", "_addmm_activation")
    assert [any(name in each for each in left) for name in taken] == [keeps] * 3


def test_other_calls_are_fused_when_they_come() -> None:
    model = resnet()
    fused = gw.fuse(model)
    assert fused.regions == []
    with torch.no_grad():
        for size in (32, 48, 32):
            x = torch.randn(1, 3, size, size)
            same(fused(x), model(x))
    assert fused.calls == {"fused": 3}


def test_a_module_that_changes_is_called_itself() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,))
    with torch.no_grad():
        model[8].weight.mul_(2)
        same(fused(x), model(x))
    assert fused.calls == {"eager: the module changed": 1}
    assert "fuse() again" in fused.explain()


def test_gradients_are_not_lost() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,))
    fused(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert fused.calls == {"eager: gradients are wanted": 1}


def test_what_is_fused_can_be_captured_while_gradients_are_on(device: torch.device) -> None:
    model, x = nn.Linear(4, 4).eval().to(device), torch.randn(3, 4, device=device)
    call = pass_manager.fused_call(model, (x,), {}, pass_manager.PASSES, check=False).call
    assert torch.is_grad_enabled()
    with gw.capture(call, x) as graph:
        torch.testing.assert_close(graph(x), model(x).detach())


def test_it_is_a_module_like_the_original() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,))
    assert list(fused.state_dict()) == list(model.state_dict())
    assert fused.module is model
    assert repr(fused).startswith("FusedModule(Sequential, ")
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        with torch.no_grad():
            same(other(x), model(x))
        assert other.calls == {"fused": 1}
        assert other.module is not model


def test_a_function_is_fused() -> None:
    weight = torch.randn(4, 4, 3, 3)
    fused = gw.fuse(lambda x: F.relu(F.conv2d(x, weight)), (images(),))
    x = images()
    same(fused(x), F.relu(F.conv2d(x, weight)))
    assert fused.calls == {"fused": 1}


def test_keyword_arguments_plain_values_and_trees() -> None:
    def work(self: Any, x: dict[str, torch.Tensor], *, scale: float, deep: bool) -> dict[str, Any]:
        y = F.relu(self.conv(x["image"]))
        return {"y": y * scale if deep else y, "n": 3, "none": None}

    class Named(Model):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            return work(self, x, **kwargs)

    model = Named(work, conv=CONV(4, 4, 3))
    x = {"image": images()}
    fused = gw.fuse(model, (x,), {"scale": 2.0, "deep": True})
    with torch.no_grad():
        for scale, deep in ((2.0, True), (3.0, True), (2.0, False)):
            found, expected = (m(x, scale=scale, deep=deep) for m in (fused, model))
            same(found["y"], expected["y"])
            assert (found["n"], found["none"]) == (3, None)
    assert fused.calls == {"fused": 3}


# What is no graph.


def test_hooks_run_at_every_call() -> None:
    model, seen = resnet(), []
    model[4].conv1.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,))
    assert any("hooks" in why for _, why in fused.untraced)
    assert {region.path for region in fused.regions} == {"5"}
    seen.clear()
    with torch.no_grad():
        same(fused(x), model(x))
    assert seen == [1, 1]
    assert fused.calls == {"fused": 1}


def test_reads_of_the_host_are_left_as_they_are() -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y * 2 if y.sum() > 0 else y

    for read in (work, lambda self, x: self.body(x) * self.body(x).sum().item(),
                 lambda self, x: self.body(x) * max(self.body(x).flatten().tolist()),
                 lambda self, x: self.body(x) * float(self.body(x).sum().numpy())):  # fmt: skip
        model = Model(read, body=nn.Sequential(CONV(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
        x = images()
        fused = gw.fuse(model, (x,), verify=False)
        assert fused.untraced[0][0] == ""
        assert [region.path for region in fused.regions] == ["body"]
        with torch.no_grad():
            for y in (x, -x, images()):
                same(fused(y), model(y))
        assert fused.calls == {"fused": 3}
        assert "no graph" in fused.explain()


def test_what_writes_to_its_arguments_is_left_as_it_is() -> None:
    for work in (lambda self, x: x.mul_(2) + 1, lambda self, x: self.count.add_(1) + x):
        model = Model(work)
        model.register_buffer("count", torch.zeros(1))
        with pytest.raises(NotTraced, match="writes to what is not the call's own"):
            trace(model, (images(),), {})
        assert model.count == 0
        twin, x = copy.deepcopy(model), images()
        fused = gw.fuse(model, (x.clone(),))
        with torch.no_grad():
            same(fused(x.clone()), twin(x.clone()))


SPECIAL = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("name", [*AFTER, "sum", "sum and relu", "pool"])
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_come_through(name: str, value: float) -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if name == "pool":
            return F.max_pool2d(y.relu(), 2)
        if "sum" in name:
            y = y + x
            return y.relu() if "relu" in name else y
        return self.activation(y)

    model = Model(work, conv=CONV(4, 4, 3, padding=1), activation=AFTER.get(name, nn.Identity)())
    x = images()
    fused = gw.fuse(model, (x,), verify=False)
    x[0, 1, 4, 4] = value
    with torch.no_grad():
        found, expected = fused(x), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert fused.calls == {"fused": 1}


def test_attention_has_to_be_asked_for() -> None:
    """PyTorch's gives 0 for rows that are masked altogether, where eager gives NaN."""
    args = tuple(torch.randn(2, 3, 5, 4) for _ in range(3))
    model = Model(lambda self, q, k, v: attention(q, k, v, None, "plain"))
    for passes, names in ((None, set()), (["attention"], {"attention"})):
        fused = gw.fuse(model, args, passes=passes)
        assert {n for n, _ in fused.regions[0].done} - {"clean"} == names


# Python around the operations.


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return self.body(x)


def keeping(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = self.body(x)
    return self.last * 2


def logging(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.log.append(1)
    return self.body(x)


@pytest.mark.parametrize("work", [counting, keeping, logging])
def test_what_python_does_at_every_call_it_goes_on_doing(work: Callable[..., Any]) -> None:
    model = Model(work, body=nn.Sequential(CONV(4, 4, 3), nn.ReLU()))
    model.count, model.last, model.log = 0, None, []
    x = images()
    fused = gw.fuse(model, (x,))
    assert (model.count, model.last, model.log) == (0, None, [])
    with torch.no_grad():
        for _ in range(2):
            same(fused(x), model(x))
    assert model.count == (4 if work is counting else 0)
    assert len(model.log) == (4 if work is logging else 0)
    assert (model.last is not None) == (work is keeping)
    assert "with every call" in fused.explain()


def test_a_cache_that_the_first_call_fills_is_no_hindrance() -> None:
    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(9.0)
        return F.relu(self.conv(x + self.table))

    model = Model(work, conv=CONV(4, 4, 3))
    model.table = None
    x = images()
    fused = gw.fuse(model, (x,))
    assert model.table is None
    with torch.no_grad():
        same(fused(x), model(x))


def test_global_hooks_run() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,))
    seen: list[int] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        with torch.no_grad():
            fused(x)
        assert seen
        assert gw.fuse(model, (x,)).regions == []
    finally:
        handle.remove()


def mask_by_pieces(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros((8, 8))
    for count, rows in enumerate((slice(0, -3), slice(-3, None))):
        mask[rows, 2:] = count + 1
    parts = mask.view(2, 4, 8).permute(1, 0, 2).reshape(4, -1)
    return torch.relu(x + (parts.unsqueeze(1) - parts.unsqueeze(2)).sum())


def read_between(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros(8)
    mask[:2] = 3
    before = x * mask
    mask[2:] = 5
    return torch.relu(before + mask)


def written_with_input(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(x)
    mask[1:] = 2
    mask[:1] = x[:1]
    return torch.relu(mask * 2)


def returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.full_like(x, 2.5)
    mask[1:] = 2
    return mask, torch.relu(x * mask)


def of_a_weight(x: torch.Tensor) -> torch.Tensor:
    row = torch.arange(8.0, device=x.device).expand(8)
    other = row * 2
    other[3] = 100
    return torch.relu(x + row + other)


@pytest.mark.parametrize(
    "function", [mask_by_pieces, read_between, written_with_input, returned, of_a_weight]
)
def test_what_is_written_piece_by_piece_is_a_constant_where_it_is_one(
    function: Callable[..., Any], device: torch.device
) -> None:
    x = torch.randn(8, 8, device=device)
    fused = gw.fuse(function, (x,), verify=False)
    for _ in range(2):
        results = fused(x)
        for found, expected in zip(tree_leaves(results), tree_leaves(function(x)), strict=True):
            same(found, expected)
            found.add_(1)  # It is the caller's own.
    fixed = function in (mask_by_pieces, of_a_weight)
    writes = "memory that it sees elsewhere" in fused.explain()
    assert writes != fixed


def test_tensors_in_containers_are_constants_that_are_watched() -> None:
    model = Model(lambda self, x: self.body(x) * self.held["a"][0], body=nn.Sequential(nn.ReLU()))
    model.held = {"a": [torch.randn(9)]}
    x = images()
    fused = gw.fuse(model, (x,))
    assert fused.untraced == []
    same(fused(x), model(x))
    for change in (model.held["a"][0].zero_, lambda: model.held.update(a=[torch.randn(9)])):
        fused = gw.fuse(model, (x,))
        same(fused(x), model(x))
        change()
        same(fused(x), model(x))
        assert fused.calls["eager: the module changed"] == 1


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_on_the_module_is_no_hindrance(filled: bool) -> None:
    def biased(self: Model, x: torch.Tensor) -> torch.Tensor:
        key = str(x.device)
        if key not in self.cache:
            self.cache[key] = self.weight[:, torch.arange(8).flip(0)]
        return torch.relu(self.body(x) + self.cache[key])

    model = Model(biased, body=nn.Linear(5, 8))
    model.weight = nn.Parameter(torch.randn(1, 8))
    model.cache = {}
    x = torch.randn(3, 5)
    with torch.no_grad():
        expected = model(x)
    if not filled:
        model.cache.clear()
    fused = gw.fuse(model, (x,))
    assert fused.untraced == []
    assert len(model.cache) == filled
    same(fused(x), expected)
    with torch.no_grad():
        model.weight.mul_(2)
    model.cache.clear()
    same(fused(x), model(x))


def test_tensors_whose_changes_go_unnoticed_are_no_constants() -> None:
    held = functools.lru_cache(lambda: torch.randn(9))
    model = Model(lambda self, x: self.body(x) * held(), body=nn.Sequential(nn.ReLU()))
    x = images()
    fused = gw.fuse(model, (x,))
    assert any("neither the model nor what it holds" in why for _, why in fused.untraced)


def test_weights_that_are_handed_out_stay_as_they_are() -> None:
    def work(self: Any, x: torch.Tensor) -> Any:
        return self.conv(x).relu(), self.conv.weight.flatten(1).t()

    model = Model(work, conv=CONV(4, 4, 3))
    before, x = copy.deepcopy(model.state_dict()), images()
    gw.fuse(model, (x,))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_parts_are_what_they_stand_for() -> None:
    """Containers iterate over them, and ask what they are."""

    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            x = layer(x) if isinstance(layer, Block) else x * 0
        for inner in self.more:
            x = inner(x)
        return x * max(x.flatten().tolist())

    model = Model(work, blocks=nn.ModuleList([Block(4, 4), Block(4, 4)]),
                  more=nn.Sequential(CONV(4, 4, 3), nn.ReLU()))  # fmt: skip
    x = images()
    fused = gw.fuse(model, (x,))
    assert {region.path for region in fused.regions} == {"blocks.0", "blocks.1"}
    with torch.no_grad():
        for y in (x, images()):
            same(fused(y), model(y))
    assert fused.calls == {"fused": 2}


def test_a_fused_module_inside_another() -> None:
    inner, x = resnet(), torch.randn(2, 3, 32, 32)
    outer = nn.Sequential(gw.fuse(inner, (x,)), nn.Softmax(-1)).eval()
    fused = gw.fuse(outer, (x,))
    with torch.no_grad():
        same(fused(x), outer(x))
    reads = Model(lambda self, x: self.inner(x) * self.inner(x).sum().item(), inner=outer)
    with torch.no_grad():
        same(gw.fuse(reads, (x,))(x), reads(x))


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same but for the kernels of other shapes and layouts, TF32 among them."""
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def test_a_capture_holds_what_was_fused_until_a_weight_changes(device: torch.device) -> None:
    model, x = resnet().to(device), torch.randn(2, 3, 32, 32, device=device)
    fused = gw.fuse(model, (x,))
    graph, again = gw.capture(fused, x), gw.graph(fused)
    with torch.no_grad():
        for call in (graph, again):
            near(call(x), model(x))
        assert set(fused.calls) == {"fused, inside of a capture"}
        model[8].weight.mul_(2)
        near(again(x), model(x))
        assert again.statistics.captures == 2
        with pytest.raises(gw.SignatureError, match="changed in place, and what was built holds"):
            graph(x)


def test_a_graph_fuses_first_what_has_not_been_fused(device: torch.device) -> None:
    model, x = resnet().to(device), torch.randn(2, 3, 32, 32, device=device)
    fused = gw.fuse(model)
    graphed = gw.graph(fused)
    with torch.no_grad():
        for size in (2, 3, 2):
            x = torch.randn(size, 3, 32, 32, device=device)
            near(graphed(x), model(x))
    assert graphed.statistics.captures == 2
    assert set(fused.calls) == {"fused, inside of a capture"}
    assert "its graphs hold what fuse() made of Sequential" in graphed.explain()


def test_gradients_inside_of_a_capture_go_through_the_model(device: torch.device) -> None:
    """Half a gradient would be a wrong one: what is fused has none."""
    model, x = resnet().to(device), torch.randn(2, 3, 32, 32, device=device)
    for part in (gw.fuse(model), tuned_to_fused(model, x)):

        def slope(x: torch.Tensor, part: Any) -> torch.Tensor:
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                found = part(given).sum() + given.square().sum()
                return torch.autograd.grad(found, given)[0]

        graphed = gw.graph(functools.partial(slope, part=part))
        for _ in range(3):
            x = torch.randn(2, 3, 32, 32, device=device)
            with torch.no_grad():
                near(graphed(x), slope(x, model))


def tuned_to_fused(model: nn.Module, x: torch.Tensor) -> gw.TunedModule:
    with choosing("fused"):
        return gw.tune(model, (x,), strategies=["fused"], remember=False, progress=False)


def test_a_kind_of_call_that_only_a_later_path_brings(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device).eval()
    x = torch.randn(4, 8, device=device)
    fused = gw.fuse(model)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return fused(x) if x.sum() > 0 else fused(x[:2])

    graphed = gw.graph(branches)
    with torch.no_grad():
        for given in (x.abs(), -x.abs(), x.abs() + 1, -x.abs() - 1):
            near(graphed(given), model(given if given.sum() > 0 else given[:2]))


def test_parts_inside_of_a_fused_model_are_warned_of(device: torch.device) -> None:
    body, x = resnet().to(device), torch.randn(2, 3, 32, 32, device=device)
    whole = nn.Sequential(gw.graph(body), nn.ReLU()).eval()
    with pytest.warns(RuntimeWarning, match="holds a GraphedModule: the module itself runs"):
        fused = gw.fuse(whole, (x,))
    with torch.no_grad():
        near(fused(x), body(x).relu())


def test_other_parts_are_fused_before_and_not_after(device: torch.device) -> None:
    model, x = resnet().to(device), torch.randn(2, 3, 32, 32, device=device)
    with pytest.raises(gw.OptionError, match="GraphedModule, which it cannot look into"):
        gw.fuse(gw.graph(model), (x,))
    inner = gw.fuse(model, (x,), passes=["attention"])
    outer = gw.fuse(inner, (x,))
    with torch.no_grad():
        near(outer(x), model(x))
    assert outer.module is model
    assert outer.calls["fused"] == 1
    assert not inner.calls


def test_threads_that_come_first_together() -> None:
    model = resnet()
    fused = gw.fuse(model)
    xs = [torch.randn(1, 3, size, size) for size in (32, 40) for _ in range(4)]
    with torch.no_grad():
        expected = [model(x) for x in xs]
    with ThreadPoolExecutor(8) as threads:
        for found, right in zip(threads.map(fused, xs), expected, strict=True):
            same(found, right)
    assert fused.calls == {"fused": 8}
    assert len(fused._fusion.table) == 2


def test_what_cannot_be_fused_is_tried_once() -> None:
    model = nn.Sequential(CONV(4, 4, 3), nn.Dropout(0.5)).eval()
    model[1].train()
    fused, count = gw.fuse(model), [0]
    model[0].forward = lambda x: (count.__setitem__(0, count[0] + 1), CONV.forward(model[0], x))[1]
    fused = gw.fuse(model)
    with torch.no_grad():
        fused(images())
        tries = count[0]
        fused(images())
    assert count[0] == tries + 1


def test_results_are_tensors_of_their_own() -> None:
    model, x = Model(lambda self, x: x.detach()), images()
    fused = gw.fuse(model, (x,))
    with torch.no_grad():
        fused(x).unsqueeze_(0)
    assert x.dim() == 4


def test_a_pass_of_ones_own_is_pickled_with_the_module() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,), passes=["batch_norm", Pass("mine", nothing)])
    other = pickle.loads(pickle.dumps(fused))
    with torch.no_grad():
        same(other(x), model(x))


def nothing(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    return []


WRITES: list[Callable[..., Any]] = [
    lambda self, t: (lambda y: (t.add_(5), y.relu())[1])(self.conv(t)),
    lambda self, t: (lambda y: (t.add_(5), y + t)[1])(self.conv(t)),
    lambda self, t: (lambda y: (y.view(2, -1).add_(1), y * 2)[1])(self.conv(t)),
    lambda self, t: (lambda y, z: (z.__setitem__((slice(None), 0), 7), y * 2)[1])(
        *(lambda y: (y, y.reshape(2, -1)))(self.conv(t))
    ),
    lambda self, t: (lambda y: (y[0].add_(1), self.norm(y))[1])(self.conv(t)),
    lambda self, t: (lambda z: (z[0].add_(1), t[..., :9] + z)[1])(torch.zeros(9)),
    lambda self, t: t.add_(torch.ones(9, dtype=torch.float64) / 3),
    lambda self, t: t.gt_(0.5),
]


@pytest.mark.parametrize("work", WRITES)
def test_writes_between_what_would_be_fused(work: Callable[..., Any]) -> None:
    """By the passes' own conditions, without verification."""
    parts = {"conv": CONV(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}
    model = Model(lambda self, x: work(self, x * 2), **parts)
    x = images()
    fused = gw.fuse(model, (x,), verify=False)
    with torch.no_grad():
        for _ in range(2):
            same(fused(x), model(x))
    assert fused.calls == {"fused": 2}


def test_batch_norms_that_would_overflow_or_mean_other_channels_are_not_folded() -> None:
    half = nn.Sequential(CONV(4, 4, 3), nn.BatchNorm2d(4))
    trained(half)
    half.bfloat16()
    with torch.no_grad():
        half[0].weight.fill_(3e38)
        half[1].weight.fill_(100.0)
    graph = trace(half, (images(dtype=torch.bfloat16),), {}).graph
    assert BATCH_NORM(graph, CPU).changes == ()
    alone = nn.Sequential(nn.Conv1d(4, 5, 3), nn.BatchNorm1d(5))
    trained(alone)
    changes, _ = after(alone, (torch.randn(4, 7),), BATCH_NORM)
    assert changes == []


def test_a_pass_whose_numbers_are_off_is_left_out() -> None:
    def wrong(graph: fx.GraphModule, device: torch.device) -> list[Change]:
        for node in calls(graph, aten.relu.default):
            node.target = aten.sigmoid.default
        return [Change("nonsense", ("relu",))]

    def failing(graph: fx.GraphModule, device: torch.device) -> list[Change]:
        raise IndexError("of no matter")

    model = nn.Sequential(CONV(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    trained(model)
    x = images()
    fused = gw.fuse(
        model, (x,), passes=[Pass("wrong", wrong), Pass("failing", failing), "batch_norm"]
    )
    (region,) = fused.regions
    assert [name for name, _ in region.left_out] == ["wrong", "failing"]
    assert "off by" in region.left_out[0][1]
    assert "IndexError: of no matter" in region.left_out[1][1]
    assert [name for name, _ in region.done] == ["batch_norm"]
    with torch.no_grad():
        same(fused(x), model(x))


def test_a_pass_keeps_what_goes_in_and_comes_out() -> None:
    def loses(graph: fx.GraphModule, device: torch.device) -> list[Change]:
        last = next(iter(reversed(graph.graph.nodes)))
        last.args = ([],)
        return [Change("loses", ("all",))]

    graph = trace(nn.ReLU(), (images(),), {}).graph
    with pytest.raises(ValueError, match="what goes in or comes out"):
        Pass("loses", loses)(graph, CPU)


def test_passes_are_named() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    fused = gw.fuse(model, (x,), passes=["batch_norm"])
    assert {name for name, _ in fused.regions[0].done} == {"clean", "batch_norm"}
    with pytest.raises(gw.OptionError, match="no pass 'folding'"):
        gw.fuse(model, (x,), passes=["folding"])
    with pytest.raises(gw.OptionError, match="a text"):
        gw.fuse(model, (x,), passes="clean")
    names = [each.name for each in pass_manager.PASSES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: gw.fuse(3), "cannot be called"),
        (lambda: gw.fuse(nn.ReLU().eval(), images()), "write \\(x,\\)"),
        (lambda: gw.fuse(nn.ReLU(), (images(),)), "training mode"),
    ],
)
def test_bad_calls_are_named(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(gw.OptionError, match=message):
        wrong()


def test_autocast_is_left_to_the_model() -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fused = gw.fuse(model, (x,))
        assert fused.regions == []
        assert "autocast" in fused.explain()
        same(fused(x), model(x))


# In half precision, as on the GPU, where convolutions turn what comes contiguous.
LAID_OUT: dict[str, tuple[Callable[..., Any], dict[str, nn.Module]]] = {
    "single pixels": (lambda self, x: self.conv(x), {"conv": CONV(4, 6, 1, bias=False)}),
    "single pixels, viewed": (
        lambda self, x: self.conv(x).view(2, -1),
        {"conv": CONV(4, 6, 1, bias=False)},
    ),
    "depthwise": (lambda self, x: self.conv(x), {"conv": CONV(4, 4, 3, groups=4)}),
    "depthwise, flat": (
        lambda self, x: F.silu(self.conv(x)).flatten(1),
        {"conv": CONV(4, 4, 3, groups=4)},
    ),
    "an image without a batch": (lambda self, x: self.conv(x[0]), {"conv": CONV(4, 6, 3)}),
    "two convolutions of one": (
        lambda self, x: self.conv(x) + self.other(x),
        {"conv": CONV(4, 6, 3), "other": CONV(4, 6, 3)},
    ),
    "patches with more behind": (
        lambda self, x: self.conv(x).flatten(2),
        {"conv": CONV(4, 2049, 2, stride=2)},
    ),
    "pooled": (
        lambda self, x: F.max_pool2d(F.relu(self.conv(x) * 2), 2),
        {"conv": CONV(4, 6, 3, padding=1)},
    ),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """All passes, those for the GPU too; without cuDNN's own operations."""
    monkeypatch.setattr(layout, "_turns", layout.wants_channels_last)
    kernel = on_gpu(monkeypatch)
    return [kernel if each is EPILOGUES else everywhere(each) for each in pass_manager.PASSES]


@pytest.mark.parametrize("name", LAID_OUT)
def test_results_lie_as_eagers(name: str, as_on_a_gpu: list[Pass]) -> None:
    work, parts = LAID_OUT[name]
    model = Model(work, **parts).half()
    x = torch.randn(2, 4, 8, 8).half()
    for form in (torch.contiguous_format, torch.channels_last):
        if form is torch.channels_last and "viewed" in name:
            continue  # Eager cannot.
        model.to(memory_format=form)
        fused = gw.fuse(model, (x.to(memory_format=form),), passes=as_on_a_gpu, verify=False)
        with torch.no_grad():
            y = torch.randn_like(x).to(memory_format=form)
            same(fused(y), model(y))
        assert fused.calls == {"fused": 1}


def test_a_turned_image_is_not_kept_over_a_write(as_on_a_gpu: list[Pass]) -> None:
    def work(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 1
        before = self.conv(y)
        y[:, :2].add_(5.0)
        return before, self.conv(y)

    model = Model(work, conv=CONV(4, 6, 3)).half().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).half()
    fused = gw.fuse(model, (x,), passes=as_on_a_gpu, verify=False)
    with torch.no_grad():
        for mine, right in zip(fused(x), model(x), strict=True):
            same(mine, right)


@pytest.mark.parametrize(
    "ends",
    [
        lambda y: (y, y[:, 3:9]),
        lambda y: (y.t(), y.view(-1)),
        lambda y: y.split(1024, 1),
        lambda y: (y.unsqueeze(1).expand(5, 3, 2049),),
        lambda y: (y[1:4].unflatten(1, (3, 683)).transpose(1, 2), y),
    ],
)
def test_results_that_share_memory_go_on_sharing_it(
    ends: Callable[..., Any], as_on_a_gpu: list[Pass]
) -> None:
    model = Model(lambda self, x: ends(self.linear(x)), linear=nn.Linear(6, 2049)).half()
    x = torch.randn(5, 6).half()
    fused = gw.fuse(model, (x,), passes=as_on_a_gpu, verify=False)
    with torch.no_grad():
        found, expected = fused(x), model(x)
    for mine, right in zip(found, expected, strict=True):
        same(mine, right)
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1
    assert "outputs in eights" in fused.explain()


def test_a_pass_that_fails_is_left_out_without_verification_too() -> None:
    """What it has done to the graph until then is gone."""

    def breaks(graph: fx.GraphModule, device: torch.device) -> list[Change]:
        for node in calls(graph, aten.relu.default):
            node.target = aten.neg.default
        raise RuntimeError("half done")

    breaks.__module__ = "graphwright.fusion.passes.folding"  # It is given the graph itself.
    model = nn.Sequential(nn.Linear(4, 2049), nn.Dropout(), nn.ReLU()).eval()
    fused = gw.fuse(
        model, (torch.randn(3, 4),), passes=[CLEAN, Pass("breaks", breaks)], verify=False
    )
    assert [name for name, _ in fused.regions[0].left_out] == ["breaks"]
    assert [name for name, _ in fused.regions[0].done] == ["clean"]
    x = torch.randn(3, 4)
    with torch.no_grad():
        same(fused(x), model(x))


def test_a_pass_of_ones_own_may_run_and_copy_what_it_changes() -> None:
    seen = []

    def look(graph: fx.GraphModule, device: torch.device) -> list[Change]:
        seen.extend([graph(torch.ones(3, 4)), copy.deepcopy(graph)(torch.ones(3, 4)), graph.code])
        return []

    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU()).eval()
    fused = gw.fuse(model, (torch.randn(3, 4),), passes=[Pass("look", look)])
    assert fused.regions[0].left_out == []
    assert len(seen) == 3


def test_numbers_of_ones_own_operation_are_reads() -> None:
    """PyTorch's attention returns lengths; another operation of that name may return anything."""
    name = "fusion_tests::counting_attention"
    if not hasattr(torch.ops.fusion_tests, "counting_attention"):
        torch.library.define(name, "(Tensor x) -> (Tensor, SymInt)")
        torch.library.impl(name, "CPU", lambda x: (x.clone(), int((x > 0).sum())))

    def work(self: Any, x: torch.Tensor) -> torch.Tensor:
        y, count = torch.ops.fusion_tests.counting_attention(self.linear(x))
        return y.relu() * count

    model = Model(work, linear=nn.Linear(6, 6))
    fused = gw.fuse(model, (torch.randn(5, 6),), verify=False)
    assert fused.regions == []
    assert fused.untraced


def test_weights_in_channels_last() -> None:
    model = nn.Sequential(CONV(4, 6, 3), nn.ReLU(), CONV(6, 4, 3)).eval().bfloat16()
    x = images(dtype=torch.bfloat16)
    traced = trace(model, (x,), {})
    result = everywhere(CHANNELS_LAST)(traced.graph, CPU)
    assert len(result.changes) == 2
    graph = result.model
    restored(graph, traced.strides, x)
    graph.recompile()
    with torch.no_grad():
        found, expected = traced.call(graph)(x), model(x)
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
    assert found.stride() == expected.stride()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would make a benchmark of this")
def test_the_benchmark_runs_and_writes_every_sample(tmp_path: Path) -> None:
    from bench.common.record import SCHEMA
    from bench.fusion.run import benchmark

    assert benchmark(tmp_path, ["conv_relu_pool"], quick=True) == 0
    found = json.loads((tmp_path / "fusion.json").read_text("utf-8"))
    (row,) = found["models"]
    assert row["skipped"] == {}
    assert len(row["ways"]["fused"]["samples"]) == 5
    assert set(row["cold_s"]) == set(row["ways"])
    assert found["schema"] == SCHEMA == "graphwright.bench"


def held(fused: Any) -> dict[int, torch.Tensor]:
    """The constants of a fused call that passes have made, by address."""
    graph = fused.call.graph
    return {t.data_ptr(): t for name, t in graph.named_buffers() if name.startswith("constant_")}


def test_graphs_of_a_model_share_what_they_fold() -> None:
    model = Model(lambda self, x: self.norm(self.conv(x)), conv=nn.Conv2d(3, 8, 3)).eval()
    model.norm = nn.BatchNorm2d(8).eval()
    trained(model)
    fold = [BATCH_NORM]
    one, two = (
        pass_manager.fused_call(model, (images(n, 3, 8, 8),), {}, fold, check=False) for n in (1, 2)
    )
    assert held(one).keys() == held(two).keys()
    assert len(held(one)) == 2
    with torch.no_grad():
        model.conv.weight.mul_(2)
        x = images(3, 3, 8, 8)
        three = pass_manager.fused_call(model, (x,), {}, fold, check=False)
        assert len(held(three).keys() & held(one).keys()) == 1  # The bias is as it was.
        assert three.call is not None
        same(three.call(x), model(x))
    alive = [weakref.ref(tensor) for tensor in (*held(one).values(), *held(three).values())]
    del one, two, three
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("how", ["folded", "shown", "written to", "not made by a pass"])
def test_what_may_be_written_to_is_not_shared(how: str) -> None:
    def graph() -> fx.GraphModule:
        made = fx.GraphModule(nn.Module(), fx.Graph())
        x = made.graph.placeholder("x")
        total = made.graph.call_function(aten.neg.default, (x,))
        constant = add_constant(made, torch.ones(3), total)
        total = made.graph.call_function(aten.relu_.default, (total,))  # It is the graph's own.
        if how == "not made by a pass":
            made.register_buffer("other", made.constant_0)
            constant.target = "other"
        if how == "written to":
            view = made.graph.call_function(aten.view.default, (constant, [3]))
            made.graph.call_function(aten.add_.Tensor, (view, 1))
        total = made.graph.call_function(aten.add.Tensor, (total, constant))
        view = made.graph.call_function(aten.view.default, (constant, [3, 1]))
        made.graph.output((total, view) if how == "shown" else (total,))
        return fx.GraphModule(made, made.graph)

    model, graphs = nn.Linear(1, 1), [graph(), graph()]
    for each in graphs:
        share_constants(each, model)
    assert len({id(each) for one in graphs for each in one.buffers()}) == 1 + (how != "folded")


def test_the_models_own_memory_is_not_shared() -> None:
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    made = []
    for tensor in (torch.eye(4), model.weight.detach().view(4, 4)):
        graph = fx.GraphModule(nn.Module(), fx.Graph())
        x = graph.graph.placeholder("x")
        total = graph.graph.call_function(aten.neg.default, (x,))
        constant = add_constant(graph, tensor, total)
        graph.graph.output(graph.graph.call_function(aten.mm.default, (total, constant)))
        made.append(fx.GraphModule(graph, graph.graph))
        share_constants(made[-1], model)
    assert made[0].constant_0 is not made[1].constant_0


# A budget.


def _slow(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    clock.now += 10
    return []


class clock:  # noqa: N801  # stands for the module time
    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


def test_what_there_is_no_time_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_manager, "time", clock)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval()
    x = images()
    fused = gw.fuse(model, (x,), passes=[Pass("slow", _slow), "batch_norm"], budget_s=5)
    assert fused.regions[0].left_out == [("batch_norm", "not tried: the budget of 5 s was spent")]
    assert "batch_norm   left out: not tried" in fused.explain()
    with torch.no_grad():
        same(fused(x), model(x))
    assert fused.calls["fused"] == 1
    again = pickle.loads(pickle.dumps(gw.fuse(model, (x,), budget_s=7)))
    assert again._fusion.budget_s == copy.deepcopy(again)._fusion.budget_s == 7


def test_parts_that_there_is_no_time_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def part() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    monkeypatch.setattr(pass_manager, "time", clock)
    work = lambda m, x: m.b(m.a(x)) if x.sum() else x  # noqa: E731
    model = Model(work, a=part(), b=part())
    fused = gw.fuse(model, (images(),), passes=[Pass("slow", _slow)], budget_s=5)
    assert [region.path for region in fused.regions] == ["a"]
    assert ("b", "not tried: the budget of 5 s was spent") in fused.untraced


@pytest.mark.parametrize("budget_s", [0, -1.0, float("nan"), True, "5"])
def test_a_budget_is_a_positive_number(budget_s: Any) -> None:
    with pytest.raises(gw.OptionError, match="budget_s"):
        gw.fuse(nn.ReLU().eval(), budget_s=budget_s)


def test_no_full_collection_of_garbage_takes_place_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program with a large model has many objects: one collection takes as long as a trace."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)]).eval()
    generations: list[int] = []
    work = pass_manager._fuse

    def watched(*args: Any) -> None:
        gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
        try:
            work(*args)
        finally:
            gc.callbacks.pop()

    monkeypatch.setattr(pass_manager, "_fuse", watched)
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    try:
        gw.fuse(model, (torch.randn(2, 8),), measure=True)
    finally:
        gc.set_threshold(*thresholds)
    assert 2 not in generations
    assert gc.isenabled()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "stride", (2, 2)),
        lambda m: setattr(m[0], "dilation", (2, 2)),
        lambda m: setattr(m[2], "output_size", (2, 1)),
        lambda m: setattr(m[3], "normalized_shape", torch.Size((4, 2, 2))),
    ],
)
def test_options_of_pytorch_s_own_modules_are_watched(change: Callable[[Any], None]) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 2)), nn.LayerNorm((2, 2))
    ).eval()
    model[3].normalized_shape = (2, 2)
    x = torch.randn(2, 3, 9, 9)
    fused, graphed = gw.fuse(model, (x,)), gw.graph(model)
    with torch.no_grad():
        for _ in range(3):
            same(fused(x), model(x))
            same(graphed(x), model(x))
        change(model)
        try:
            expected = model(x)
        except RuntimeError as error:
            for fast in (fused, graphed):
                with pytest.raises(type(error)):
                    fast(x)
            return
        for _ in range(3):
            same(fused(x), expected)
            same(graphed(x), expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_s_step_is_seen(kind: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, 3, 8, 8)
    fused = gw.fuse(model, (x,))
    same(fused(x), model(x).detach())
    model(x).sum().backward()
    optimizer.step()
    same(fused(x), model(x).detach())


@torch.library.custom_op("graphwright_tests::notes", mutates_args=())
def notes(x: torch.Tensor) -> None:
    """Notes that it ran."""
    NOTED.append(x.shape)


@notes.register_fake
def _(x: torch.Tensor) -> None:
    return None


NOTED: list[Any] = []


def test_what_is_there_for_its_effect_stays() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() < 1e3)
        torch.ops.graphwright_tests.notes(x)
        return x * 2

    x = torch.randn(4, 6)
    fused = gw.fuse(work, (x,))
    NOTED.clear()
    same(fused(x), x * 2)
    assert len(NOTED) == 1
    with pytest.raises(RuntimeError):
        fused(torch.full((4, 6), 1e4))


def test_a_slope_that_is_nothing_as_a_float_is_no_epilogue() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LeakyReLU(1e-46)).eval()
    x = torch.randn(1, 3, 4, 4)
    fused = gw.fuse(model, (x,))
    x[0, 0, 0, 0] = float("nan")
    with torch.no_grad():
        assert torch.equal(fused(x).isnan(), model(x).isnan())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_modules_that_get_nested_tensors_run_as_they_are() -> None:
    """nn.TransformerEncoder packs padded sequences so, whose sizes nobody can read."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x, src_key_padding_mask=mask)
            return y

    model, x = Padded().eval(), torch.randn(2, 8, 16)
    mask = torch.arange(8) >= torch.tensor([[8], [5]])
    with torch.no_grad():
        assert torch.equal(gw.fuse(model, (x, mask))(x, mask), model(x, mask))
