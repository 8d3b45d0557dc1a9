"""Models whose results are chosen by comparing numbers: rounding decides, where two are close."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw

Found = dict[str, torch.Tensor]


def detector(dtype: torch.dtype) -> tuple[nn.Module, list[torch.Tensor]]:
    """Mask R-CNN with random weights, and an image."""
    detection = pytest.importorskip("torchvision").models.detection
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "box_score_thresh": 0.0}
    model = detection.maskrcnn_resnet50_fpn(**options).to("cuda", dtype).eval()
    images = [torch.rand(3, 224, 224, device="cuda", dtype=dtype)]
    model(images)  # It notes the scales of its features at the first call.
    return model, images


def differing(found: list[Found], other: list[Found]) -> float:
    """The share of numbers in the results that differ by more than rounding."""
    apart, total = 0, 0
    for mine, theirs in zip(found, other, strict=True):
        for name, value in mine.items():
            if value.shape != theirs[name].shape:
                return 1.0
            close = torch.isclose(value.double(), theirs[name].double(), rtol=1e-3, atol=1e-4)
            apart += int((~close).sum())
            total += value.numel()
    return apart / total


@pytest.mark.gpu
@torch.no_grad()
def test_a_graphed_detector_gives_the_same_bits() -> None:
    """The same kernels run on the same numbers, so nothing is rounded in another way."""
    model, images = detector(torch.float32)
    want = model(images)
    graphed = gw.graph(model)
    for _ in range(3):
        for mine, theirs in zip(graphed(images), want, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert "answered by graphs" in graphed.explain()


@pytest.mark.gpu
@torch.no_grad()
def test_a_fused_detector_differs_by_rounding_alone() -> None:
    """What fusion rounds in another way moves boxes across a threshold, as a last bit does.

    In float64 the numbers near a threshold are far apart in units of rounding: nothing differs.
    """
    model, images = detector(torch.float64)
    fused = gw.fuse(model)
    found, want = fused(images), model(images)
    assert any(name.startswith("fused") for name in fused.calls)
    assert differing(found, want) == 0.0


@pytest.mark.gpu
@torch.no_grad()
def test_a_last_bit_moves_what_a_detector_finds() -> None:
    """In float32 eager differs from itself, where its input is off by a unit in the last place."""
    model, images = detector(torch.float32)
    want = model(images)
    near = [image * (1 + torch.finfo(image.dtype).eps) for image in images]
    assert differing(model(near), want) > 0.0
