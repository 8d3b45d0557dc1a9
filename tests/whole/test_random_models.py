"""Random models of what passes look for: fuse() against eager, with the GPU's passes on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shares import share
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.fusion import pass_manager
from graphwright.fusion.passes import epilogues, layout
from graphwright.fusion.passes.base import Pass
from graphwright.fusion.passes.epilogues import EPILOGUES

MODELS = 48

# Steps from images of (2, 8, 8, 8) to such images. In braces: {a} and {b}, images that are there.
STEPS = (
    "self.square({a})",
    "self.bare({a})",
    "self.pixels({a})",
    "self.bare_pixels({a})",
    "self.each({a})",
    "self.groups({a})",
    "self.norm({a})",
    "self.norm(self.square({a}))",
    "F.relu(self.square({a}))",
    "F.hardswish(self.pixels({a}))",
    "F.silu(self.each({a}))",
    "F.gelu(self.square({a}), approximate='tanh')",
    "F.relu6(self.norm(self.each({a})))",
    "F.relu(self.square({a}) + {b})",
    "self.pixels({a}) + {b}",
    "{a} + {b}",
    "{a} * 0.5",
    "F.max_pool2d(F.relu({a}), 3, 1, 1)",
    "F.max_pool2d(F.relu(self.square({a})), 2).repeat_interleave(2, 2).repeat_interleave(2, 3)",
    "{a} * torch.sigmoid(self.pixels(F.relu(self.few(F.adaptive_avg_pool2d({a}, 1)))))",
    "F.hardsigmoid({a}.mean((2, 3), keepdim=True)) * {b}",
    "F.pixel_shuffle(self.patches({a}), 2)",
    "torch.cat([{a}[:, :4], {b}[:, 4:]], 1)",
    "{a}.contiguous()",
    "{a}.contiguous(memory_format=torch.channels_last)",
    "{a}.flip(1)",
    "self.rows({a}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
    "self.linear(F.gelu(self.linear({a}.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)",
    "images(self.linear(self.rows(tokens({a}) + tokens({b}))))",
    "images(self.attention(tokens({a})))",
    "{a} * self.wide({b}.mean((2, 3)))[:, 3:11, None, None]",
    "{a}.clone().relu_()",
    "({a} + 1).mul_({b})",
)
RESULTS = (
    "{a}",
    "({a}, {b})",
    "({a}, {a})",
    "({a}, {a}[:, 2:5])",
    "({a}[:, :3], {a}[:, 3:])",
    "{a}.permute(0, 2, 3, 1)",
    "({a}.flatten(2), {b}.transpose(1, 2))",
    "{a}.reshape(2, -1)",
    "{a}.reshape(2, -1).split(256, 1)",
    "{a}.unsqueeze(1).expand(2, 3, 8, 8, 8)",
    "self.wide({a}.mean((2, 3)))",
    "(lambda y: (y, y[:, 5:9], y.t()))(self.wide({a}.mean((2, 3))))",
    "(lambda y: (self.q(y), self.k(y), self.v(y).transpose(1, 2)))(tokens({a}))",
    "{a}.mean((2, 3))",
    "({a}, x)",
    "({a}, self.square.weight)",
)


def tokens(image: torch.Tensor) -> torch.Tensor:
    return image.flatten(2).transpose(1, 2)


def images(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(1, 2).reshape(2, 8, 8, 8)


class Parts(nn.Module):
    """What the steps are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Conv2d(8, 8, 3, padding=1)
        self.bare = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.pixels, self.few = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.bare_pixels = nn.Conv2d(8, 8, 1, bias=False)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.patches = nn.Conv2d(8, 32, 2, stride=2)
        self.norm, self.rows = nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.linear, self.wide = nn.Linear(8, 8), nn.Linear(8, 2049)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mask", torch.rand(64, 64) > 0.3)
        assert self.norm.running_var is not None
        self.norm.running_var.uniform_(0.5, 2.0)
        self.eval()

    def attention(self, rows: torch.Tensor) -> torch.Tensor:
        """Two heads of it, under a mask."""
        q, k, v = (
            part(rows).unflatten(2, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(q, k, v, self.mask)
        return found.transpose(1, 2).flatten(2)


def random_model(seed: int) -> tuple[nn.Module, str]:
    """A model of some random steps, and its source."""
    dice = random.Random(seed)
    names = ["x"]

    def filled(template: str) -> str:
        # Late images are likelier: models are deep rather than wide.
        a, b = (dice.choice(names[-3:]) for _ in "ab")
        return template.format(a=a, b=b)

    lines = []
    for number in range(dice.randrange(1, 8)):
        lines.append(f"    v{number} = {filled(dice.choice(STEPS))}")
        names.append(f"v{number}")
    source = "\n".join(
        ["def forward(self, x):", *lines, f"    return {filled(dice.choice(RESULTS))}"]
    )
    known: dict[str, Any] = {"F": F, "torch": torch, "tokens": tokens, "images": images}
    exec(source, known)
    torch.manual_seed(seed)
    forward: Callable[..., Any] = known["forward"]
    return type("Model", (Parts,), {"forward": forward})(), source


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> tuple[Pass, ...]:
    """Those for the GPU too; cuDNN's own kernels are not there, so ours' references are taken."""
    monkeypatch.setattr(epilogues, "_cudnn_works", lambda conv: True)
    monkeypatch.setattr(layout, "_turns", layout.wants_channels_last)
    kernels = Pass(EPILOGUES.name, epilogues.on_gpu, starts=EPILOGUES.starts)
    everywhere = [Pass(each.name, each.rewrite, starts=each.starts) for each in pass_manager.PASSES]
    return tuple(kernels if each.name == EPILOGUES.name else each for each in everywhere)


def shared(results: list[torch.Tensor], others: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which results lie in the memory of each other, or of other tensors."""
    places = [t.untyped_storage().data_ptr() for t in (*results, *others)]
    return [
        (i, j) for i in range(len(results)) for j in range(len(places)) if places[i] == places[j]
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", share(range(MODELS), slow=2))
def test_fused_models_are_eagers(seed: int, dtype: torch.dtype, passes: tuple[Pass, ...]) -> None:
    model, source = random_model(seed)
    form = random.Random(seed).choice([torch.contiguous_format, torch.channels_last])
    model = model.to(dtype).to(memory_format=form)
    x = torch.randn(2, 8, 8, 8, dtype=dtype).to(memory_format=form)
    fused = gw.fuse(model, (x,), passes=passes, verify=False)
    # A model that writes in place is left alone as a whole; no pass may fail by itself.
    left = {name for region in fused.regions for name, _ in region.left_out}
    assert left <= {"others"}, source
    weights = list(model.parameters())
    for _ in range(2):
        y = torch.randn_like(x)
        with torch.no_grad():
            found, expected = (pytree.tree_leaves(call(y)) for call in (fused, model))
        near = 3e-2 if dtype is torch.float16 else 1e-4
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(
                mine,
                right,
                rtol=near,
                atol=near * (1 + float(right.detach().abs().max())),
                msg=source,
            )
            assert mine.stride() == right.stride(), source
        assert shared(found, [y, *weights]) == shared(expected, [y, *weights]), source
