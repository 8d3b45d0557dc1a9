"""Settings that change what a model computes or how fast: read in one process, set in another."""

from __future__ import annotations

import importlib
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch

from ...calls.signature import switches

_FLAGS = (
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.deterministic",
    "utils.deterministic.fill_uninitialized_memory",
)


def _get(name: str) -> Any:
    return operator.attrgetter(name)(torch)


def _set(name: str, value: Any) -> None:
    owner, _, flag = name.rpartition(".")
    setattr(operator.attrgetter(owner)(torch), flag, value)


@dataclass(frozen=True)
class Settings:
    """The settings of one process and thread.

    Attributes:
        switches: those of `signature.switches`: autocast, default dtype, back ends.
        device: the default device of new tensors.
        threads: how many threads operators on the CPU use.
        grad: whether gradients are on.
        inference: whether inference mode is on.
        warn_only: whether nondeterministic operators only warn.
        flags: other flags, by their names in torch.
        compilers: the options of torch.compile that were changed, as Python source by module.
    """

    switches: tuple[Any, ...]
    device: torch.device
    threads: int
    grad: bool
    inference: bool
    warn_only: bool
    flags: dict[str, Any]
    compilers: dict[str, str]

    @classmethod
    def current(cls) -> Settings:
        """The settings of this process and thread."""
        names = ("torch._dynamo.config", "torch._inductor.config")
        return cls(
            switches=switches(),
            device=torch.get_default_device(),
            threads=torch.get_num_threads(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            flags={name: _get(name) for name in _FLAGS},
            compilers={
                name: sys.modules[name].codegen_config() for name in names if name in sys.modules
            },
        )

    def apply(self) -> None:
        """Set them in this process and thread for good; entering inference mode is the caller's.

        Raises:
            RuntimeError: a setting cannot be set here.
        """
        # In the order of `switches`.
        cpu, cuda, dtype, deterministic, mkldnn, cudnn, benchmark, *rest = self.switches
        matmul, conv, mkldnn_matmul, flash, efficient, math, cudnn_sdp = rest
        for device, autocast in (("cpu", cpu), ("cuda", cuda)):
            if autocast:
                torch.set_autocast_enabled(device, True)
                torch.set_autocast_dtype(device, autocast)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=self.warn_only)
        c = torch._C
        c._set_mkldnn_enabled(mkldnn)
        c._set_cudnn_enabled(cudnn)
        c._set_cudnn_benchmark(benchmark)
        c._set_fp32_precision_setter("cuda", "matmul", matmul)
        c._set_fp32_precision_setter("cuda", "conv", conv)
        c._set_fp32_precision_setter("mkldnn", "matmul", mkldnn_matmul)
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
        torch.backends.cuda.enable_math_sdp(math)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_sdp)
        for name, value in self.flags.items():
            if _get(name) != value:
                _set(name, value)
        if self.device != torch.get_default_device():
            torch.set_default_device(self.device)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad)
        for name, statements in self.compilers.items():
            importlib.import_module(name)
            exec(statements, {"torch": torch})
        if switches() != self.switches or {name: _get(name) for name in _FLAGS} != self.flags:
            raise RuntimeError("a setting of torch.backends could not be repeated")
