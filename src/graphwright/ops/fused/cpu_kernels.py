"""Implementations of operators in C++ for the CPU, built on request."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch

from ..custom.build_errors import not_registered
from ..custom.building import Flags, library
from ..custom.sources import unit
from . import norms, softmax
from .activations import SWIGLU

_NAME = "graphwright"
_SOURCE = Path(__file__).parent / "kernels" / "cpu.cpp"
# Those for which C++ is faster than PyTorch's own operations in float32; other calls it hands on to
# them. On two cores with AVX-512, from 128 rows on: layer norm 1.2 to 1.5 times as fast, root-mean-
# square norm 2.3 and more, SwiGLU 1.2 to 1.8, softmax under a mask 1.9 and more.
OPERATORS = (norms.ADD_LAYER_NORM, norms.ADD_RMS_NORM, SWIGLU, softmax.MASKED_SOFTMAX)
# ATen's vectors are as wide as these macros say, whatever the compiler could do.
_VECTORS = {
    "AVX512": (
        *("-DCPU_CAPABILITY_AVX512", "-DCPU_CAPABILITY=AVX512"),
        *("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
    ),
    "AVX2": ("-DCPU_CAPABILITY_AVX2", "-DCPU_CAPABILITY=AVX2", "-mavx2", "-mfma", "-mf16c"),
}
_LOCK = threading.Lock()
_LOADED: list[ctypes.CDLL] = []


def compile_for_cpu(*, verbose: bool = False) -> Path:
    """Build the operators that are faster in C++, and have calls on the CPU go to them.

    It takes a C++ compiler and half a minute, once for a machine and a version of PyTorch. Until
    then PyTorch's own operations compute them.

    Args:
        verbose: whether the commands of the build are shown.

    Returns:
        The library.

    Raises:
        ExtensionError: there is no compiler, or the build fails.
    """
    with _LOCK:
        there = unit("C++", _SOURCE, _NAME, {one.name: one.name for one in OPERATORS}, ())
        capability = torch.backends.cpu.get_cpu_capability()
        flags = Flags(cpp=("-O3", *_VECTORS.get(capability, ())))
        path = library(there, _NAME, flags, verbose=verbose)
        if not _LOADED:
            loaded = ctypes.CDLL(str(path))
            loaded.graphwright_register.restype = ctypes.c_char_p
            loaded.graphwright_register.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
            said = loaded.graphwright_register(_NAME.encode(), b"")
            if said is not None:
                raise not_registered(said.decode(errors="replace"), there, _NAME)
            _LOADED.append(loaded)
        return path


def runs_compiled() -> bool:
    """Whether calls on the CPU go to C++."""
    return bool(_LOADED)
