"""Settings that change what a model computes or how fast: read in one process, set in another."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...calls import switches

THREADS = "torch.set_num_threads"


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of one process and thread.

    Attributes:
        switches: those of `switches.TABLE` that another process can repeat, by name.
        grad: whether gradients are on.
        inference: whether inference mode is on.
        compilers: the options of torch.compile that were changed, as Python source by module.
    """

    switches: Mapping[str, Any]
    grad: bool
    inference: bool
    compilers: dict[str, str]

    @property
    def threads(self) -> int:
        """How many threads operators on the CPU use."""
        return int(self.switches[THREADS])

    def with_threads(self, threads: int) -> ProcessSettings:
        """The same with another number of threads."""
        return dataclasses.replace(self, switches={**self.switches, THREADS: threads})

    @classmethod
    def current(cls) -> ProcessSettings:
        """The settings of this process and thread."""
        names = ("torch._dynamo.config", "torch._inductor.config")
        return cls(
            switches=switches.read(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            compilers={
                name: sys.modules[name].codegen_config() for name in names if name in sys.modules
            },
        )

    def apply(self) -> None:
        """Set them in this process and thread for good, but for `inference_mode`.

        Raises:
            RuntimeError: a setting cannot be set here.
        """
        switches.apply(self.switches)
        torch.set_grad_enabled(self.grad)
        for name, statements in self.compilers.items():
            importlib.import_module(name)
            exec(statements, {"torch": torch})

    def inference_mode(self) -> AbstractContextManager[object]:
        """Inference mode if it is on, else nothing, to be entered by the caller."""
        return torch.inference_mode() if self.inference else contextlib.nullcontext()
