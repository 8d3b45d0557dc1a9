"""extension(): turn a source in C++ or CUDA into PyTorch operators."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...calls.fingerprint import described
from ...calls.options import (
    flag_problem,
    in_brief,
    items_problem,
    names_checked,
    refuse,
    texts_problem,
)
from ...errors import ExtensionError, OptionError
from .build_errors import not_loaded, not_registered
from .building import Flags, forget, is_current, library
from .operator import Function, Operator, Token, check_name
from .registration import known_to_caches, register, suffix_of, validate
from .sources import Source, Unit, unit

_KEYS = {"C++": "CPU", "CUDA": "CUDA"}


@dataclass(frozen=True)
class _ExtensionRecipe:
    """All that an extension is made of, as it was read: another process makes the same of it."""

    name: str
    units: tuple[Unit, ...]
    functions: Mapping[str, Function]
    flags: Flags
    verbose: bool = field(default=False, compare=False)
    token: Token = field(default_factory=Token, compare=False)

    @property
    def digest(self) -> str:
        """Of the sources and of the code of all functions: for caches that outlive the process."""
        texts = [(unit.text, unit.digests) for unit in self.units]
        functions = {name: one.without_samples() for name, one in self.functions.items()}
        return hashlib.sha256(f"{texts} {described(functions)}".encode()).hexdigest()


class _Held:
    """What an extension has of this process: nothing of what it is."""

    __slots__ = ("definitions", "loaded")

    def __init__(self, name: str) -> None:
        self.definitions = torch.library.Library(name, "FRAGMENT")
        self.loaded: list[ctypes.CDLL] = []

    def let_go(self) -> None:
        """Take back what was registered."""
        for loaded in self.loaded:
            loaded.graphwright_take_back()
        self.definitions._destroy()


class Extension:
    """Operators that were made of a source. Each is an attribute, and one of `torch.ops`.

    They stay for as long as the process does, since models, graphs and compiled code may hold them.

    Attributes:
        name: the namespace of its operators.
        libraries: what was built, by "C++" and "CUDA". CUDA sources are left out on a machine
            without a GPU.
    """

    def __init__(self, recipe: _ExtensionRecipe, suffix: str) -> None:
        """`suffix` is what operators of this name have in addition, if there were others before."""
        self.name = recipe.name
        self.libraries: dict[str, Path] = {}
        self._recipe = recipe
        self._digest = recipe.digest
        self._suffix = suffix
        self._operators: dict[str, Operator] = {}
        # Built before anything is registered: what fails leaves nothing.
        paths = [
            library(u, recipe.name, recipe.flags, verbose=recipe.verbose) for u in recipe.units
        ]
        self._held = _Held(recipe.name)
        try:
            for name, function in recipe.functions.items():
                register(self._held.definitions, recipe.name, name + suffix, function)
            for one, path in zip(recipe.units, paths, strict=True):
                self._add(one, path)
            self._say_what_is_missing()
            for name in recipe.functions:
                again = functools.partial(_operator, _unchecked(recipe), name)
                full = f"{recipe.name}::{name}{suffix}"
                self._operators[name] = Operator(full, again, self._digest)
            for name, function in recipe.functions.items():
                for sample in function.samples:
                    self._operators[name].check(*sample)
        except BaseException:
            self._held.let_go()
            raise

    def _add(self, one: Unit, path: Path) -> None:
        """Load a library, and register its functions."""
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            forget(path)
            raise not_loaded(error, one, self.name) from error
        loaded.graphwright_register.restype = ctypes.c_char_p
        loaded.graphwright_register.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        said = loaded.graphwright_register(self.name.encode(), self._suffix.encode())
        if said is not None:
            raise not_registered(said.decode(errors="replace"), one, self.name)
        self._held.loaded.append(loaded)
        self.libraries[one.language] = path

    def _say_what_is_missing(self) -> None:
        """Have calls on a device that there is no source for say so."""
        for language in _KEYS.keys() - self.libraries.keys():
            for name in self._recipe.functions:
                say = functools.partial(_missing, f"{self.name}::{name}", language)
                self._held.definitions.impl(name + self._suffix, say, _KEYS[language])

    def _is_current(self) -> bool:
        """Whether the same sources would be built to the same: a header may have changed."""
        paths = self.libraries.values()
        return all(path.is_file() and is_current(path.parent) for path in paths)

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

    def __copy__(self) -> Extension:
        return self

    def __deepcopy__(self, memo: Any) -> Extension:
        return self

    def __repr__(self) -> str:
        built = " and ".join(self.libraries) or "nothing"
        return f"<Extension {self.name}: {', '.join(self._recipe.functions)}; {built} built>"


class _All:
    """The extensions of this process, by name, with a lock for each."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.locks: dict[str, threading.RLock] = {}
        self.made: dict[str, list[Extension]] = {}

    def lock(self, name: str) -> threading.RLock:
        with self.guard:
            return self.locks.setdefault(name, threading.RLock())

    def after_fork(self) -> None:
        """A thread that held a lock is none of the child's."""
        self.guard, self.locks = threading.Lock(), {}


_ALL = _All()
os.register_at_fork(after_in_child=_ALL.after_fork)


@names_checked
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
    """Turn functions in C++ and CUDA into PyTorch operators.

    The sources hold plain functions of tensors, without bindings or registrations. A function for
    both the CPU and the GPU has the same name in both sources. They are compiled once
    (torch.utils.cpp_extension) and cached by their content, the flags, the compiler and PyTorch's
    version. The operators can be captured, compiled by torch.compile, exported, tuned and pickled.

    The same call again returns the same extension. If a name is used again in this process with
    other sources or functions, both exist side by side: the second `f` is `torch.ops.<name>.f__2`,
    and whatever was made with the first one keeps it.

    Args:
        name: the namespace of the operators.
        cpp: source for the CPU: a text, a file, or a list of these.
        cuda: source for CUDA devices, likewise. It is left out on a machine without a GPU, if
            there is one for the CPU.
        functions: for each operator, by its name, a `Function`; for one that returns nothing, a
            schema is enough.
        cflags: options of the C++ compiler.
        cuda_cflags: options of nvcc.
        ldflags: options of the linker.
        include_dirs: folders to search for headers, in addition to those of the files.
        verbose: show the commands of the build.

    Raises:
        ExtensionError: the sources do not compile, are not what the schemas say or fail
            torch.library.opcheck on the samples; or there is no compiler.
        OptionError: a name or an option makes no sense.
    """
    check_name(name, "an extension")
    if isinstance(include_dirs, str | os.PathLike):
        include_dirs = [include_dirs]
    refuse(
        "extension",
        _source_problem("cpp", cpp),
        _source_problem("cuda", cuda),
        None
        if isinstance(functions, Mapping)
        else f"functions is {in_brief(functions)}, not a dictionary: write "
        "{'f': Function('(Tensor x) -> Tensor', fake=…)}",
        texts_problem("cflags", cflags),
        texts_problem("cuda_cflags", cuda_cflags),
        texts_problem("ldflags", ldflags),
        items_problem("include_dirs", include_dirs, "folders"),
        flag_problem("verbose", verbose),
    )
    include_dirs = list(include_dirs)
    if not all(isinstance(folder, str | os.PathLike) for folder in include_dirs):
        raise OptionError("include_dirs holds what is no path.", remedy="Write texts or Paths.")
    if not functions:
        raise OptionError(
            f"{name} has no functions.",
            remedy="Name them: functions={'f': Function('(Tensor x) -> Tensor', fake=…)}.",
        )
    known = {own: _valid(own, function) for own, function in functions.items()}
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
    return _made(_ExtensionRecipe(name, tuple(units), known, flags, verbose))


def _valid(name: str, function: Any) -> Function:
    """A function as it was given, or by its schema alone.

    Raises:
        ExtensionError: its parts do not belong together.
        OptionError: it is none, or its name makes no sense.
    """
    check_name(name, "a function")
    found = Function(function) if isinstance(function, str) else function
    if not isinstance(found, Function):
        raise OptionError(
            f"functions[{name!r}] is {in_brief(function)}, neither a schema nor a Function.",
            remedy="Write Function('(Tensor x) -> Tensor', fake=…).",
        )
    validate(found, name)
    return found


def _source_problem(name: str, source: Any) -> str | None:
    """What is wrong with a source, in words."""
    parts = source if isinstance(source, tuple | list) else [source]
    wrong = [part for part in parts if not isinstance(part, str | os.PathLike)]
    if source is None or not wrong:
        return None
    return f"{name} is {in_brief(wrong[0])}, not a source: write a text, a file, or a list of these"


def _made(recipe: _ExtensionRecipe) -> Extension:
    """The extension of a recipe: the one that there is, if it is the same."""
    with _ALL.lock(recipe.name):
        others = _ALL.made.setdefault(recipe.name, [])
        for there in others:
            same = recipe == there._recipe and there._is_current()
            if same or recipe.token == there._recipe.token:
                return there
        made = Extension(recipe, suffix_of(len(others)))
        others.append(made)
        known_to_caches(made._digest)
        return made


def _operator(recipe: _ExtensionRecipe, name: str) -> Operator:
    operator: Operator = getattr(_made(recipe), name)
    return operator


def _unchecked(recipe: _ExtensionRecipe) -> _ExtensionRecipe:
    """The same for another process, where it need not be checked once more."""
    functions = {name: function.without_samples() for name, function in recipe.functions.items()}
    return replace(recipe, functions=functions, verbose=False)


def _missing(name: str, language: str, *args: Any, **kwargs: Any) -> Any:
    device, option = ("the CPU", "cpp") if language == "C++" else ("a CUDA device", "cuda")
    raise ExtensionError(
        f"{name} was called with tensors on {device}, and has no source in {language}.",
        remedy=f"Pass {option} to extension(), or move the tensors.",
    )


# Its name in files that were pickled before.
_Recipe = _ExtensionRecipe
