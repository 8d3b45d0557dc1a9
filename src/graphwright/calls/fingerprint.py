"""Fingerprints of tuning requests: model, calls, machine and options as text and as a digest.

The text is the same in every process: no address, hash, path or line number gets into it. A class
or function of the user's goes by the file that defines it, which has one name, although it may be
imported under several: by the command line, as part of a package, or as `__main__`. The text covers
what may change which candidate wins, which is less than what the model computes: a cached tuning
result is verified again before it is used.

Therefore it does not go by the walk of `dependencies`, which tells of this process: identities, in
the order in which a call's code reaches them. A key is a tree of limited depth that tells each
value by what it is: code and classes by their content, tensors without their values.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import json
import re
import struct
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .binding import in_one_order
from .code import codes
from .introspection import without_answers
from .leaves import SCALARS
from .modules import in_training
from .places import registered
from .signature import CallSignature
from .split import Args, Kwargs, argument_names, flatten
from .switches import read

# Levels of containers and objects that are described, and entries of one container.
_DEPTH = 3
_MAX_ITEMS = 1000
_MAX_TEXT = 400
# Levels of helpers that name helpers, and helpers in all.
_HELPER_DEPTH = 8
_MAX_HELPERS = 2000
# Packages that only change with their version, which is part of the environment.
_VERSIONED = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}
_OF_EVERY_MODULE = {*vars(nn.Module())}
# Where a model came from, and what transformers and torch.compile note in it: hashes and addresses.
_IGNORED = re.compile(r"_?name_or_path|.*_hash|_is_hf_initialized|_torchdynamo_.*id")
# In a ScriptModule's graph: where its classes are defined, how many were scripted before, and the
# values of small tensors.
_ITS_OWN = re.compile(
    r"(?s)(?<=__torch__\.)(?:\w+\.)+|(?<=\) = prim::Constant)\[value=.*?\](?=\(\))"
)


@dataclass(frozen=True)
class Fingerprint:
    """The key of a cached tuning result; equal if all parts are. `parts` are plain JSON."""

    digest: str
    parts: Mapping[str, Any] = field(compare=False, repr=False)


def key_of(
    module: nn.Module,
    calls: Sequence[tuple[Args, Kwargs]],
    device: torch.device | str,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
) -> Fingerprint:
    """The fingerprint of a tuning request, the same in every process.

    It covers a module's structure and modes; the code of its classes; helper functions that this
    code names as globals or as `module.function`, except those of torch, numpy and the standard
    library; plain attributes; shapes, dtypes and strides of its tensors. It covers neither the
    values of tensors nor classes that a method reaches as globals. The index of the tuned device is
    left out, since equal GPUs share a result.

    Args:
        module: the model; a plain function as a `FunctionModule`.
        calls: positional and keyword arguments of each sample call.
        device: where the model is tuned.
        environment: names and versions of hardware and software, from `report.environment`.
        options: objective, tolerance, names of strategies and so on.

    Raises:
        SignatureError: an argument is neither a tensor nor a plain value.
    """
    words = _Words(module, device := torch.device(device), _file_of)
    parts = {
        "model": {path: words.module(child) for path, child in module.named_modules()},
        "calls": [words.call(args, in_one_order(module, kwargs)) for args, kwargs in calls],
        "device": device.type,
        "environment": {name: str(value) for name, value in environment.items()},
        "options": {name: words.value(value) for name, value in options.items()},
        "objects": words.objects,
    }
    return Fingerprint(digest_of(parts), parts)


def digest_of(data: Any) -> str:
    """A digest of JSON data; lists and tuples are alike."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def described(value: Any) -> str:
    """A value as text: a function by its code, its closure and the helpers that it names."""
    return _Words(nn.Module(), torch.device("cpu")).value(value)


class _Words:
    """Describes a model and its calls as text; what cannot be described gives only its type."""

    def __init__(
        self, module: nn.Module, device: torch.device, called: Callable[[str], str] = str
    ) -> None:
        """`called` gives what a module of Python's is called, from its name."""
        # Objects and unregistered modules by digest, since many modules may share one.
        self.objects: dict[str, dict[str, Any]] = {}
        self._device, self._called = device, called
        self._classes: dict[type, str] = {}
        self._functions: dict[types.FunctionType, str] = {}
        self._helper_depth = 0
        self._helpers = 0
        self._paths = {child: path for path, child in module.named_modules()}
        # Each tensor's first name: tied weights differ from two weights of one shape.
        self._tensors: dict[int, str] = {}
        for child, path in self._paths.items():
            for name, tensor in registered(child).items():
                if tensor is not None:
                    self._tensors.setdefault(id(tensor), f"{path}.{name}".lstrip("."))

    def call(self, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        signature = CallSignature.of(args, kwargs)
        leaves = zip(argument_names(args, kwargs), flatten(args, kwargs)[0], strict=True)
        return {
            "tree": self._tree(signature.spec),
            "leaves": [f"{name}: {self.value(leaf)}" for name, leaf in leaves],
            "aliases": [list(pair) for pair in signature.aliases],
            "switches": {name: self.value(value) for name, value in read().items()},
        }

    def _tree(self, spec: pytree.TreeSpec) -> str:
        if spec.is_leaf():
            return "*"
        children = ", ".join(map(self._tree, spec.children()))
        return f"{self._name(spec.type)} {self.value(spec.context)} ({children})"

    def module(self, module: nn.Module, depth: int = _DEPTH) -> dict[str, Any]:
        found = {
            "class": self._class(without_answers(type(module))),
            "training": in_training(module),
            "hooks": len(module._forward_hooks) + len(module._forward_pre_hooks),
            # A list, since their order is that of nn.Sequential's work.
            "modules": [f"{n}: {self.value(v, depth - 1)}" for n, v in module._modules.items()],
            "tensors": {name: self.value(each) for name, each in registered(module).items()},
        }
        if isinstance(module, torch.jit.ScriptModule):
            with contextlib.suppress(RuntimeError, AttributeError):  # It may have no forward.
                graph: Any = module.graph
                found["graph"] = _short(_ITS_OWN.sub("", graph.str(False)))
        else:
            found["attributes"] = self._members(module, depth)
        return found

    def _members(self, value: Any, depth: int) -> dict[str, Any]:
        without = _OF_EVERY_MODULE if isinstance(value, nn.Module) else ()
        return {
            name: self.value(member, depth)
            for name, member in list(vars(value).items())
            if not (name in without or _IGNORED.fullmatch(name))
            and (name == "__wrapped__" or not _is_dunder(name))
        }

    def value(self, value: Any, depth: int = _DEPTH) -> str:
        try:
            text = self._described(value, depth)
        except Exception:  # Foreign objects may raise anything, and some have no attributes.
            return self._name(type(value))
        return text if len(text) <= _MAX_TEXT else f"{text[:40]}… {_short(text)}"

    def _described(self, value: Any, depth: int) -> str:
        kind = self._name(type(value))
        for kinds, describe in _PLAIN.items():
            if isinstance(value, kinds):
                return describe(self, kind, value, depth)
        if isinstance(value, nn.Module) and value in self._paths:
            return f"the module {self._paths[value]!r}"
        if depth <= 0:
            return kind
        for kinds, describe in _NESTED.items():
            if isinstance(value, kinds):
                return describe(self, kind, value, depth)
        if kind.startswith("torch."):  # Its own machinery changes as it runs.
            return kind
        members = self._members(value, depth - 1)
        if callable(value):
            members["class"] = self._class(type(value))
        return self._object(kind, members)

    def _member(self, kind: str, value: enum.Enum, depth: int) -> str:
        return f"{kind} {self.value(value.value, depth)}"

    def _complex(self, kind: str, value: complex, depth: int) -> str:
        return f"{kind} {self.value(value.real)} {self.value(value.imag)}"

    def _cell(self, kind: str, value: types.CellType, depth: int) -> str:
        return self._described(value.cell_contents, depth)

    def _method(self, kind: str, value: types.MethodType, depth: int) -> str:
        return f"{self.value(value.__func__)} of {self.value(value.__self__, depth - 1)}"

    def _property(self, kind: str, value: property, depth: int) -> str:
        return f"{kind} {[self.value(each) for each in (value.fget, value.fset, value.fdel)]}"

    def _parts(self, kind: str, parts: tuple[Any, ...], depth: int) -> str:
        return f"{kind} {self.value(parts, depth)}"

    def _container(self, kind: str, value: Any, depth: int) -> str:
        if len(value) > _MAX_ITEMS:
            return f"{kind} of {len(value)}"
        if isinstance(value, dict):
            pairs = [f"{self.value(k, depth)}: {self.value(v, depth)}" for k, v in value.items()]
            return f"{kind} {{{', '.join(sorted(pairs))}}}"
        items = [self.value(item, depth) for item in value]
        return f"{kind} [{', '.join(sorted(items) if isinstance(value, AbstractSet) else items)}]"

    def _object(self, kind: str, members: dict[str, Any]) -> str:
        digest = _short(members)
        self.objects[digest] = members
        return f"{kind} {digest}"

    def _tensor(self, kind: str, tensor: torch.Tensor) -> str:
        strided = tensor.layout is torch.strided
        words = [
            f"{kind} {tuple(tensor.shape)} {tensor.dtype}",
            f"strides {tuple(tensor.stride())}" if strided else f"{tensor.layout}",
            f"on {self._place(tensor.device)}",
        ]
        if tensor.requires_grad:
            words.append("requires_grad")
        if id(tensor) in self._tensors:
            words.append(f"is {self._tensors[id(tensor)]}")
        return ", ".join(words)

    def _place(self, device: torch.device) -> str:
        mine = device.type == self._device.type and self._device.index in (None, device.index)
        return device.type if mine else str(device)

    def _name(self, kind: type) -> str:
        return f"{self._called(kind.__module__)}.{kind.__qualname__}".removeprefix("builtins.")

    def _class(self, kind: type) -> str:
        """Name of a class, and a digest of its code and constants and those of its bases."""
        if kind not in self._classes:
            self._classes[kind] = self._name(kind)  # For a member that leads back here.
            members = [
                (name, self.value(member))
                for base in kind.__mro__
                if base not in nn.Module.__mro__
                for name, member in sorted(vars(base).items())
                # Classes keep line numbers and the like under such names, beside methods.
                if isinstance(member, types.FunctionType) or not _is_dunder(name)
            ]
            self._classes[kind] = f"{self._name(kind)} {_short(members)}"
        return self._classes[kind]

    def _function(self, function: types.FunctionType) -> str:
        """A function by its code, defaults, closure, and the plain globals and helpers it names."""
        if function not in self._functions:
            title = f"function {self._called(function.__module__)}.{function.__qualname__}"
            self._functions[function] = title  # For one that calls itself.
            code, known = function.__code__, function.__globals__
            named = [name for name in code.co_names if name in known and not _is_dunder(name)]
            words = [
                self._code(code),
                self.value(function.__defaults__),
                self.value(function.__kwdefaults__),
                [self.value(cell) for cell in function.__closure__ or ()],
                [(n, self.value(known[n])) for n in named if isinstance(known[n], SCALARS)],
                self._named_helpers(function),
            ]
            self._functions[function] = f"{title} {_short(words)}"
        return self._functions[function]

    def _named_helpers(self, function: types.FunctionType) -> list[tuple[str, str]]:
        """Functions that a function names as globals, or as attributes of modules that it names."""
        if self._helper_depth >= _HELPER_DEPTH or not _is_followed(function.__module__):
            return []
        self._helper_depth += 1
        try:
            return [
                (name, self.value(helper))
                for name, helper in _helpers_of(function)
                if self._may_follow(helper)
            ]
        finally:
            self._helper_depth -= 1

    def _may_follow(self, helper: types.FunctionType) -> bool:
        if helper not in self._functions:
            self._helpers += 1
        return self._helpers <= _MAX_HELPERS

    def _code(self, code: types.CodeType) -> str:
        words = [
            (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
            [self.value(constant) for constant in code.co_consts],
            (code.co_code.hex(), code.co_exceptiontable.hex()),
        ]
        return f"code {_short(words)}"


# How each kind of value is described, whatever is around it; the first kind that fits counts.
_PLAIN: dict[Any, Callable[[_Words, str, Any, int], str]] = {
    (bool, type(None), torch.dtype, torch.layout, torch.memory_format): (
        lambda words, kind, value, depth: f"{kind} {value}"
    ),
    (torch._ops.OpOverload, torch._ops.OpOverloadPacket): (
        lambda words, kind, value, depth: f"{kind} {value}"
    ),
    enum.Enum: _Words._member,
    int: lambda words, kind, value, depth: f"{kind} {_digits(value)}",
    float: lambda words, kind, value, depth: (
        f"{kind} {float.__repr__(value)} {struct.pack('>d', value).hex()}"
    ),
    complex: _Words._complex,
    str: lambda words, kind, value, depth: f"{kind} {str.__repr__(value)}",
    bytes: lambda words, kind, value, depth: f"{kind} {bytes.__repr__(value)}",
    torch.device: lambda words, kind, value, depth: f"{kind} {words._place(value)}",
    torch.Tensor: lambda words, kind, value, depth: words._tensor(kind, value),
    type: lambda words, kind, value, depth: f"class {words._name(value)}",
    (types.BuiltinFunctionType, types.ModuleType): (
        lambda words, kind, value, depth: f"{kind} {value.__name__}"
    ),
    types.CodeType: lambda words, kind, value, depth: words._code(value),
    types.CellType: _Words._cell,
    types.FunctionType: lambda words, kind, value, depth: words._function(value),
    types.MethodType: _Words._method,
    (staticmethod, classmethod): (
        lambda words, kind, value, depth: f"{kind} {words.value(value.__func__)}"
    ),
    property: _Words._property,
}
# The same of what holds other values.
_NESTED: dict[Any, Callable[[_Words, str, Any, int], str]] = {
    nn.Module: lambda words, kind, value, depth: words._object(
        kind, words.module(value, depth - 1)
    ),
    functools.partial: lambda words, kind, value, depth: words._parts(
        kind, (value.func, value.args, value.keywords), depth
    ),
    (slice, range): lambda words, kind, value, depth: words._parts(
        kind, (value.start, value.stop, value.step), depth
    ),
    (list, tuple, deque, set, frozenset, dict): (
        lambda words, kind, value, depth: words._container(kind, value, depth - 1)
    ),
}


def _digits(value: int) -> str:
    """A whole number as text; Python refuses to write very long ones as decimals."""
    return int.__repr__(value) if value.bit_length() < 999 else hex(value)


def _helpers_of(function: types.FunctionType) -> list[tuple[str, types.FunctionType]]:
    names = sorted({name for code in codes(function.__code__) for name in code.co_names})
    found: dict[str, Any] = {}
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            found[name] = value
        elif _is_followed(value.__name__):
            # Any of the names may be an attribute of the module.
            found |= {f"{name}.{n}": vars(value).get(n) for n in names}
    helpers = []
    for name, value in found.items():
        wrapped = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
        for helper in dict.fromkeys((value, wrapped)):
            if isinstance(helper, types.FunctionType) and _is_followed(helper.__module__):
                helpers.append((name, helper))
    return helpers


def _is_followed(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _VERSIONED


def _short(data: Any) -> str:
    return f"#{digest_of(data)[:16]}"


def _file_of(name: str) -> str:
    """The file of a module of the user's, without its folder and suffix; else the module's name."""
    file = getattr(sys.modules.get(name), "__file__", None) if _is_followed(name) else None
    if file is None:
        return name
    path = PurePath(file)
    known = path.name.partition(".")[0]
    return path.parent.name if known == "__init__" else known


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
