"""An operator of one's own in C++, with its CUDA twin, against the same in plain PyTorch.

x + s·relu(gate)²: four operations of PyTorch, which read and write memory four times; as one
operator of one's own, once. `tune` verifies it and measures it beside what PyTorch has.

    python examples/extension.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.ops.custom.operator import Function
from graphwright.strategies.base import Availability, Built, Candidate
from graphwright.strategies.eager import EAGER
from graphwright.strategies.runners import GRAPH

CPP = """
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

at::Tensor gated_add(const at::Tensor& x, const at::Tensor& gate, double scale) {
  TORCH_CHECK(x.sizes() == gate.sizes(), "x and gate have different shapes");
  TORCH_CHECK(x.scalar_type() == at::kFloat && gate.scalar_type() == at::kFloat, "float32 only");
  const at::Tensor a = x.contiguous(), b = gate.contiguous();
  at::Tensor out = at::empty_like(a);
  const float *pa = a.const_data_ptr<float>(), *pb = b.const_data_ptr<float>();
  float *po = out.data_ptr<float>(), s = static_cast<float>(scale);
  at::parallel_for(0, a.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float g = pb[i] < 0 ? 0.0f : pb[i];
      po[i] = pa[i] + s * (g * g);
    }
  });
  return out;
}
"""

CUDA = """
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

__device__ float gated(float x, float g, float s) {
  g = g < 0 ? 0.0f : g;
  return x + s * (g * g);
}

__global__ void kernel(const float* x, const float* gate, float* out, float s, int64_t count) {
  const int64_t step = 4ll * gridDim.x * blockDim.x;
  int64_t i = 4ll * (blockIdx.x * blockDim.x + threadIdx.x);
  for (; i + 3 < count; i += step) {  // sixteen bytes at a time
    const float4 a = *reinterpret_cast<const float4*>(x + i);
    const float4 b = *reinterpret_cast<const float4*>(gate + i);
    *reinterpret_cast<float4*>(out + i) = {
        gated(a.x, b.x, s), gated(a.y, b.y, s), gated(a.z, b.z, s), gated(a.w, b.w, s)};
  }
  for (; i < count; ++i) out[i] = gated(x[i], gate[i], s);
}

at::Tensor gated_add(const at::Tensor& x, const at::Tensor& gate, double scale) {
  TORCH_CHECK(x.sizes() == gate.sizes(), "x and gate have different shapes");
  TORCH_CHECK(x.scalar_type() == at::kFloat && gate.scalar_type() == at::kFloat, "float32 only");
  const c10::cuda::CUDAGuard guard(x.device());
  // Clones begin at addresses that sixteen bytes divide; views may not.
  const auto whole = [](const at::Tensor& t) {
    const at::Tensor c = t.contiguous();
    return reinterpret_cast<uintptr_t>(c.const_data_ptr()) % 16 ? c.clone() : c;
  };
  const at::Tensor a = whole(x), b = whole(gate);
  at::Tensor out = at::empty_like(a);
  const int64_t count = a.numel();
  if (count == 0) return out;
  const int64_t blocks = std::min<int64_t>((count + 1023) / 1024, 132 * 16);
  kernel<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      a.const_data_ptr<float>(), b.const_data_ptr<float>(), out.data_ptr<float>(),
      static_cast<float>(scale), count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""


def fake(x: torch.Tensor, gate: torch.Tensor, scale: float) -> torch.Tensor:
    """What the result looks like: torch.compile and torch.export ask."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradients need."""
    _, gate, ctx.scale = inputs
    ctx.save_for_backward(gate)


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """A gradient for x and for the gate; the scale has none."""
    (gate,) = ctx.saved_tensors
    return gradient, gradient * (2 * ctx.scale) * gate.relu(), None


def operators(device: str = "cpu") -> gw.Extension:
    """Build the operator, or find what was built before."""
    x, gate = (torch.randn(5, 7, device=device, requires_grad=True) for _ in range(2))
    function = Function(
        "(Tensor x, Tensor gate, float scale) -> Tensor",
        fake=fake,
        backward=backward,
        setup_context=setup_context,
        samples=[(x, gate, 0.5)],  # torch.library.opcheck looks at these
    )
    return gw.extension(
        "gating",
        cpp=CPP,
        cuda=CUDA,
        functions={"gated_add": function},
        cflags=["-O3", "-march=native"],
    )


class Plain(nn.Module):
    """The same in PyTorch's own operations."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * gate.relu().square()


class Own(nn.Module):
    """By the operator."""

    def __init__(self, made: gw.Extension) -> None:
        super().__init__()
        self.gated_add = made.gated_add

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.gated_add(x, gate, 0.5)


@dataclass(frozen=True)
class OwnOperator:
    """A strategy of one's own: the operator in the place of the model."""

    module: Own
    name: str = "extension"
    complexity: int = 15

    def probe(self, device: torch.device) -> Availability:
        return Availability(True)

    def build(self, model: nn.Module, args: Any, kwargs: Any) -> Built:
        return Built(self.module, plain=True)


def main(size: tuple[int, int] = (4096, 4096), budget_s: float | None = None) -> str | None:
    """Measure on the GPU if there is one; the name of what was chosen."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, gate = torch.randn(size, device=device), torch.randn(size, device=device)
    own = OwnOperator(Own(operators(device)).eval())
    candidates = [EAGER.name, "inductor", own, Candidate(own, runner=GRAPH)]
    fast = gw.tune(Plain().eval(), (x, gate), strategies=candidates, budget_s=budget_s)
    print(fast.report)
    return fast.report.chosen


if __name__ == "__main__":
    main()
