"""extension(): a source in C++ or CUDA becomes operators of PyTorch in one call."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ExtensionError, OptionError
from .building import Flags, forget, library
from .diagnosis import not_loaded, not_registered
from .operator import Function, Operator, check_name, register
from .sources import Source, Unit, unit

_LOCK = threading.RLock()
_KEYS = {"C++": "CPU", "CUDA": "CUDA"}


@dataclass(frozen=True)
class _Recipe:
    """All that an extension is made of, as it was read: another process makes the same of it."""

    name: str
    units: tuple[Unit, ...]
    functions: Mapping[str, Function]
    flags: Flags
    verbose: bool = field(default=False, compare=False)
    # Functions that come back from a pickle are others, and stand for the same.
    token: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)


class Extension:
    """Operators that were made of a source. Each is an attribute, and `torch.ops.<name>.<it>`.

    Attributes:
        name: the namespace of its operators.
        libraries: what was built, by "C++" and "CUDA". CUDA sources are left out on a machine
            without a GPU.
    """

    def __init__(self, recipe: _Recipe) -> None:
        self.name = recipe.name
        self.libraries: dict[str, Path] = {}
        self._recipe = recipe
        self._loaded: list[ctypes.CDLL] = []
        self._definitions = torch.library.Library(recipe.name, "FRAGMENT")
        try:
            for name, function in recipe.functions.items():
                register(self._definitions, recipe.name, name, function)
            for one in recipe.units:
                self._add(one)
            self._say_what_is_missing()
        except BaseException:
            self.close()
            raise
        self._operators = {
            name: Operator(f"{recipe.name}::{name}", functools.partial(_operator, recipe, name))
            for name in recipe.functions
        }

    def _add(self, one: Unit) -> None:
        """Build and load a unit, and register its functions."""
        path = library(one, self.name, self._recipe.flags, verbose=self._recipe.verbose)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            forget(path)
            raise not_loaded(error, one, self.name) from error
        loaded.graphwright_register.restype = ctypes.c_char_p
        loaded.graphwright_register.argtypes = [ctypes.c_char_p]
        said = loaded.graphwright_register(self.name.encode())
        if said is not None:
            raise not_registered(said.decode(errors="replace"), one, self.name)
        self._loaded.append(loaded)
        self.libraries[one.language] = path

    def _say_what_is_missing(self) -> None:
        """Have calls on a device that there is no source for say so."""
        for language in _KEYS.keys() - self.libraries.keys():
            for name in self._recipe.functions:
                self._definitions.impl(
                    name,
                    functools.partial(_missing, f"{self.name}::{name}", language),
                    _KEYS[language],
                )

    def __getattr__(self, name: str) -> Operator:
        operators: dict[str, Operator] = self.__dict__.get("_operators", {})
        if name in operators:
            return operators[name]
        raise AttributeError(
            f"The extension has no function {name!r}; it has {', '.join(operators) or 'none'}."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._operators]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (_unchecked(self._recipe),)

    def __deepcopy__(self, memo: Any) -> Extension:
        return self

    def __repr__(self) -> str:
        built = " and ".join(self.libraries) or "nothing"
        return f"<Extension {self.name}: {', '.join(self._recipe.functions)}; {built} built>"

    def close(self) -> None:
        """Take its operators away. Graphs that were captured with them go on."""
        with _LOCK:
            for loaded in self._loaded:
                loaded.graphwright_unregister()
            self._loaded = []
            self._definitions._destroy()
            if _ALL.get(self.name) is self:
                del _ALL[self.name]


_ALL: dict[str, Extension] = {}


def extension(
    name: str,
    *,
    cpp: Source | None = None,
    cuda: Source | None = None,
    functions: Mapping[str, str | Function],
    cflags: Sequence[str] = ("-O3",),
    cuda_cflags: Sequence[str] = ("-O3",),
    ldflags: Sequence[str] = (),
    include_dirs: Iterable[str | os.PathLike[str]] = (),
    verbose: bool = False,
) -> Extension:
    """Make operators of PyTorch of functions in C++ and CUDA.

    The sources hold plain functions of tensors, with neither bindings nor registrations; where a
    function is for the CPU and for the GPU, both sources have one of that name. They are compiled
    once (torch.utils.cpp_extension) and kept, by their content, the flags, the compiler and
    PyTorch's version. The operators can be captured, compiled by torch.compile, exported, tuned
    and pickled. Under a name that was used before they take the place of the earlier ones.

    Args:
        name: the namespace of the operators.
        cpp: source for the CPU: a text, a file, or a list of these.
        cuda: source for CUDA devices, likewise. It is left out on a machine without a GPU, if
            there is one for the CPU.
        functions: by the name of the operator what is to be known of it: a `Function`, or a schema
            alone for one that returns nothing.
        cflags: options of the C++ compiler.
        cuda_cflags: options of nvcc.
        ldflags: options of the linker.
        include_dirs: where headers are looked for beside the folders of the files.
        verbose: whether the commands of the build are shown.

    Raises:
        ExtensionError: the sources do not compile, are not what the schemas say or fail
            torch.library.opcheck on the samples; or there is no compiler.
        OptionError: a name or an option makes no sense.
    """
    check_name(name, "an extension")
    if not functions:
        raise OptionError(
            f"{name} has no functions.",
            remedy="Name them: functions={'f': Function('(Tensor x) -> Tensor', fake=…)}.",
        )
    known: dict[str, Function] = {}
    for own, function in functions.items():
        check_name(own, "a function")
        known[own] = Function(function) if isinstance(function, str) else function
        if not isinstance(known[own], Function):
            raise OptionError(f"functions[{own!r}] is neither a schema nor a Function.")
    if cpp is None and cuda is None:
        raise OptionError(f"{name} has no source.", remedy="Pass cpp, cuda or both.")
    symbols = {own: function.symbol or own for own, function in known.items()}
    units = []
    if cpp is not None:
        units.append(unit("C++", cpp, name, symbols, include_dirs))
    if cuda is not None:
        there = unit("CUDA", cuda, name, symbols, include_dirs)
        if torch.cuda.is_available():
            units.append(there)
        elif cpp is None:
            raise ExtensionError(
                f"{name} has a source for CUDA alone, and there is no GPU that PyTorch can use.",
                remedy="Pass cpp too, to have it on the CPU.",
            )
    flags = Flags(tuple(cflags), tuple(cuda_cflags), tuple(ldflags))
    made = _made(_Recipe(name, tuple(units), known, flags, verbose))
    try:
        for own, function in known.items():
            for sample in function.samples:
                getattr(made, own).check(*sample)
    except BaseException:
        made.close()
        raise
    return made


def _made(recipe: _Recipe) -> Extension:
    """The extension of a recipe: the one that there is, if it is the same."""
    with _LOCK:
        there = _ALL.get(recipe.name)
        if there is not None:
            if recipe.token == there._recipe.token or recipe == there._recipe:
                return there
            there.close()
        made = _ALL[recipe.name] = Extension(recipe)
        return made


def _operator(recipe: _Recipe, name: str) -> Operator:
    operator: Operator = getattr(_made(_unchecked(recipe)), name)
    return operator


def _unchecked(recipe: _Recipe) -> _Recipe:
    """The same for another process, where it need not be checked once more."""
    functions = {name: function.without_samples() for name, function in recipe.functions.items()}
    return replace(recipe, functions=functions, verbose=False)


def _missing(name: str, language: str, *args: Any, **kwargs: Any) -> Any:
    device, option = ("the CPU", "cpp") if language == "C++" else ("a CUDA device", "cuda")
    raise ExtensionError(
        f"{name} was called with tensors on {device}, and has no source in {language}.",
        remedy=f"Pass {option} to extension(), or move the tensors.",
    )
