"""What code reads: the attributes, globals and files that functions and methods name.

Names come from code objects, so that they hold for code without a source. A name that a string
spells counts like one that is written out: `globals()["SCALE"]`, `getattr(settings, "SCALE")`,
`eval("SCALE * 2")`. Names that are computed cannot be known; `read_by` describes them. What these
names hold, and what of it is watched, `dependencies` decides.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib.util
import inspect
import linecache
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .introspection import StandIn, original_of

# Packages whose objects hold only their own machinery, which is no state of the call.
MACHINERY = frozenset(
    (
        *("torch", "graphwright", "triton", "logging", "threading", "_thread", "concurrent"),
        *("multiprocessing", "asyncio", "queue", "_queue", "weakref", "_weakref", "abc", "inspect"),
        *("pathlib", "io", "_io", "ctypes", "random", "contextlib", "warnings", "importlib"),
        *("_frozen_importlib", "_frozen_importlib_external", "datetime", "decimal", "fractions"),
        *("uuid", "unittest", "_pytest", "pytest", "sqlite3", "socket", "ssl", "select"),
        *("subprocess", "tqdm"),
    )
)
# Packages of PyTorch's with objects that a call reads: hooks that make weights.
_READ_OF_PYTORCH = ("torch.nn.", "torch.ao.nn.", "torch._library.custom_ops")
# What a call runs of ours, as if the user had written it: decode steps and their caches.
_STEPS = tuple(
    f"graphwright.generation.{name}" for name in ("decoder", "processors", "static_cache", "steps")
)
# Code that names one of these may read attributes that it does not name.
_DYNAMIC = frozenset(
    ("getattr", "setattr", "vars", "__dict__", "attrgetter", "asdict", "fields", "__getattribute__")
)
# Code that names one of these may look up globals of its file by their names.
_OF_FILE = frozenset(
    ("globals", "vars", "locals", "eval", "exec", "__dict__", "__globals__", "f_globals")
)
# Code that names one of these may look up files by their names.
_OF_FILES = frozenset(("modules", "import_module", "__import__"))
_LOOK_UP = _OF_FILE | _OF_FILES | {"getattr", "attrgetter"}
_EVALUATES = frozenset(("eval", "exec"))
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class Read(NamedTuple):
    """What a function reads by name.

    Attributes:
        names: that it names, in strings too: what it reads of files, classes and objects.
        globals: of its own file.
        files: that it imports or looks up, by their names.
        computed: what it looks up by names that it computes, in words.
    """

    names: frozenset[str]
    globals: tuple[str, ...]
    files: tuple[types.ModuleType, ...]
    computed: str | None


def closure(
    classes: Sequence[type], functions: Sequence[Any], *, entries: Sequence[str]
) -> tuple[frozenset[str], bool]:
    """Names and strings in the code of a call, including methods and functions that it names.

    Args:
        classes: of modules, and of the object that is called.
        functions: further functions that are called.
        entries: names of the methods that are called.

    Returns:
        the names, and whether the code may read attributes that it does not name.
    """
    reading = _Reading(classes, functions, entries)
    reading.read_all()
    return frozenset(reading.names), reading.dynamic


class _Reading:
    """Reads the code of a call, and what that names, until it names nothing new.

    Attributes:
        names: those that were found.
        dynamic: whether the code may read attributes that it does not name.
    """

    def __init__(
        self, classes: Sequence[type], functions: Sequence[Any], entries: Sequence[str]
    ) -> None:
        self.names = set(entries)
        self.dynamic = False
        # PyTorch's own modules are code like any other; what all modules share names everything.
        bases = {id(base): base for cls in classes for base in cls.__mro__}
        self._classes = list(filter(_is_read, bases.values()))
        self._waiting = list(functions)
        self._read: dict[int, Any] = {}

    def read_all(self) -> None:
        """Read all code that can be reached."""
        self._read_members()
        while self._waiting:
            while self._waiting:
                self._read_value(self._waiting.pop())
            self._read_members()

    def _read_members(self) -> None:
        """Go on with what classes define under the names that were found."""
        for base in self._classes:
            for key, value in list(vars(base).items()):
                if (key in self.names or is_operator(key)) and id(value) not in self._read:
                    self._read[id(value)] = value
                    self._waiting.append(function_of(value))

    def _read_value(self, value: Any) -> None:
        while isinstance(value, functools.partial):
            self._waiting += [*value.args, *value.keywords.values()]
            value = value.func
        if _is_user_callable(value):
            known = (object, *self._classes)
            self._classes += [base for base in type(value).__mro__ if base not in known]
        for function in _functions_in(value):
            if id(function.__code__) not in self._read:
                self._read_function(function)

    def _read_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._read[id(code)] = code
        named = None if is_library(function) else read_by(function)
        names = names_of(code) if named is None else named.names
        self.names |= names
        if not is_machinery_s(function):
            self.dynamic = self.dynamic or bool(names & _DYNAMIC)
        self._waiting += [value for _, value in cells(function)]
        if named is not None:
            self._waiting += [function.__globals__.get(name) for name in named.globals]
            self._waiting += [vars(file).get(n) for file in named.files for n in names]


def _is_read(cls: type) -> bool:
    """Whether the code of a class counts: of PyTorch's, that of modules and of their weights."""
    if cls in (object, nn.Module):
        return False
    of_library = cls.__module__.partition(".")[0] in ("torch", "builtins")
    return not of_library or (
        issubclass(cls, nn.Module) or cls.__module__.startswith(_READ_OF_PYTORCH)
    )


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The function behind something callable; none if it has no Python code."""
    if isinstance(value, StandIn) and not isinstance(value, nn.Module):
        value = original_of(value)
    if isinstance(value, types.MethodType):
        value = value.__func__
    function = function_of(value)
    if function is None and _is_user_callable(value):
        function = function_of(inspect.getattr_static(type(value), "__call__", None))
    return [] if function is None else [function]


def _is_user_callable(value: Any) -> bool:
    """Whether something is an object with `__call__` whose class is a user's."""
    if isinstance(value, type | nn.Module) or not callable(value):
        return False
    return not is_machinery(value) and type(value).__module__ != "builtins"


def is_operator(key: Any) -> bool:
    """Whether a method can run without being named: `__getitem__`, `__add__`."""
    return (
        isinstance(key, str)
        and key.startswith("__")
        and key.endswith("__")
        and key not in ("__init__", "__new__", "__repr__", "__setstate__", "__getstate__")
        and key not in ("__reduce__", "__deepcopy__", "__copy__", "__del__", "__setattr__")
    )


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of its inner functions."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from codes(value)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Names and strings in a code, including inner functions and what it evaluates."""
    found: set[str] = set()
    strings: set[str] = set()
    for each in codes(code):
        found |= set(each.co_names)
        for value in each.co_consts:
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, str):
                    strings.add(part)
    evaluates = bool(found & _EVALUATES)
    found |= strings
    for string in strings:
        if evaluates:
            found.update(_IDENTIFIER.findall(string))
        elif "." in string:  # As attrgetter("inner.scale") reads it.
            found.update(string.split("."))
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code names, including inner functions."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
    return tuple(sorted({str(s.argval) for s in _steps(code) if s.opname in loads}))


@functools.lru_cache(maxsize=4096)
def stored_names(code: types.CodeType) -> frozenset[str]:
    """The globals that code assigns to, including inner functions."""
    return frozenset(str(s.argval) for s in _steps(code) if s.opname == "STORE_GLOBAL")


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[str]:
    """Names that code imports from, as they are written: `.settings`, `json`."""
    found, level = set(), 0
    for each in codes(code):
        for step in dis.get_instructions(each):
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(step.argval) is int:
                level = step.argval
            elif step.opname == "IMPORT_NAME":
                found.add("." * level + str(step.argval))
    return frozenset(found)


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    for each in codes(code):
        yield from dis.get_instructions(each)


def read_by(function: types.FunctionType) -> Read:
    """What a user's function reads by name, as things are now."""
    code, owner = function.__code__, function.__globals__
    names, plain, imports = names_of(code), global_names(code), _imports(code)
    computed = None
    if not names.isdisjoint(_LOOK_UP):
        computed = _computed(function)
        names |= set(_strings(function).values())
    if not imports and names.isdisjoint(_OF_FILE | _OF_FILES):
        return Read(names, plain, (), computed)
    files = _imported(imports, str(owner.get("__package__") or owner.get("__name__") or ""))
    if not names.isdisjoint(_OF_FILES):
        files |= names & sys.modules.keys()
        if "__name__" in plain:
            files.add(str(owner.get("__name__")))
    here = owner.get("__name__")
    if here in files or not names.isdisjoint(_OF_FILE):
        plain = tuple(sorted({*plain, *(names & owner.keys())}))
    found = [sys.modules.get(name) for name in sorted(files) if name != here]
    modules = tuple(m for m in found if isinstance(m, types.ModuleType) and not is_library(m))
    return Read(names, plain, modules, computed)


def _strings(function: types.FunctionType) -> dict[str, str]:
    """Strings that a function's globals and closure hold: the names of something else, maybe."""
    owner = function.__globals__
    held = {n: v for n in global_names(function.__code__) if isinstance(v := owner.get(n), str)}
    return held | {name: value for name, value in cells(function) if isinstance(value, str)}


def cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, by name; without what is still empty."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # It is still empty.
            yield name, cell.cell_contents


def _imported(imports: frozenset[str], package: str) -> set[str]:
    """Names in `sys.modules` of what is imported, packages around it included."""
    found: set[str] = set()
    for name in imports:
        with contextlib.suppress(ImportError):
            whole = importlib.util.resolve_name(name, package) if name[0] == "." else name
            parts = whole.split(".")
            found |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return found


def _computed(function: types.FunctionType) -> str | None:
    """What a function looks up by names that it computes, in words; None if it does not.

    Without its source, it is taken for one that does not.
    """
    code, owner = function.__code__, function.__globals__
    if names_of(code).isdisjoint(_OF_FILE | _OF_FILES):  # Then only these have attributes.
        held = [owner.get(name) for name in global_names(code)]
        held += [value for _, value in cells(function)]
        if not any(map(is_users_namespace, held)):
            return None
    for node in _nodes(code.co_filename):
        if _begins(node, code):
            found = _Lookups(node, function).found
            if found is not None:
                return f"{found} that {function.__qualname__} looks up by a computed name"
    return None


def is_users_namespace(value: Any) -> bool:
    """Whether a value is a file or class of the user's, whose attributes count."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] not in MACHINERY and not is_library(value)
    if isinstance(value, type):
        return value.__module__.partition(".")[0] not in MACHINERY and not is_library(value)
    return False


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> tuple[ast.AST, ...]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    with warnings.catch_warnings():  # What it warns of was told when the file was imported.
        warnings.simplefilter("ignore")
        return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))


def _nodes(file: str) -> tuple[ast.AST, ...]:
    """The functions in a source file."""
    try:
        return _parsed("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()


def _begins(node: Any, code: types.CodeType) -> bool:
    """Whether a function in a source file is the one that was compiled to a code."""
    if isinstance(node, ast.Lambda):
        return bool(code.co_name == "<lambda>" and node.lineno == code.co_firstlineno)
    lines = {node.lineno, *(each.lineno for each in node.decorator_list)}
    return bool(node.name == code.co_name and code.co_firstlineno in lines)


class _Lookups:
    """Goes through a function's source for names that it looks up and that are computed.

    Attributes:
        found: what is looked up by the first such name, in words.
    """

    def __init__(self, root: ast.AST, function: types.FunctionType) -> None:
        self.found: str | None = None
        self._globals = function.__globals__
        self._strings = _strings(function)
        self._cells = dict(cells(function))
        self._parents = {
            id(child): node for node in ast.walk(root) for child in ast.iter_child_nodes(node)
        }
        # What local variables are given, and None for what cannot be told.
        self._given: dict[str, list[ast.AST | None]] = {}
        for node in ast.walk(root):
            self._note(node)
        for node in ast.walk(root):
            what = self._look(node)
            if what is not None:
                self.found = what
                return

    def _note(self, node: ast.AST) -> None:
        """Note what a node gives to a variable."""
        if isinstance(node, ast.arg):
            self._given.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            parent = self._parents.get(id(node))
            value = parent.value if isinstance(parent, ast.Assign | ast.NamedExpr) else None
            if isinstance(parent, ast.For | ast.comprehension) and parent.target is node:
                value = parent.iter
            self._given.setdefault(node.id, []).append(value)

    def _is_known(self, node: ast.AST | None) -> bool:
        """Whether the strings that an expression can give stand in the code or are watched."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return all(map(self._is_known, node.elts))
        if isinstance(node, ast.IfExp):
            return self._is_known(node.body) and self._is_known(node.orelse)
        if isinstance(node, ast.Name):
            if node.id in self._given:
                return all(
                    isinstance(v, ast.Constant | ast.Tuple | ast.List) and self._is_known(v)
                    for v in self._given[node.id]
                )
            return node.id in self._strings or node.id == "__name__"
        return False

    def _value(self, node: ast.AST | None) -> Any:
        """What a name stands for, if that can be told; else None."""
        if not isinstance(node, ast.Name) or node.id in self._given:
            return None
        if node.id in self._cells:
            return self._cells[node.id]
        builtins = self._globals.get("__builtins__", {})
        known = builtins if isinstance(builtins, dict) else vars(builtins)
        return self._globals.get(node.id, known.get(node.id))

    def _name(self, node: ast.AST | None) -> str | None:
        """How a function is called that an expression names: `getattr`, `import_module`."""
        if isinstance(node, ast.Attribute):
            return node.attr
        value = self._value(node)
        return getattr(value, "__name__", None) if callable(value) else None

    def _is_file(self, node: ast.AST | None) -> bool:
        """Whether an expression gives a file or class of the user's."""
        if is_users_namespace(self._value(node)):
            return True
        if isinstance(node, ast.Call):
            return self._name(node.func) in ("import_module", "__import__")
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute) and node.value.attr == "modules"
        return False

    def _is_namespace(self, node: ast.AST) -> bool:
        """Whether an expression gives the globals of a file as a dictionary."""
        if isinstance(node, ast.Attribute):
            if node.attr == "__dict__":
                return self._is_file(node.value)
            return node.attr in ("__globals__", "f_globals")
        if isinstance(node, ast.Call):
            name = self._name(node.func)
            if name == "vars":
                return len(node.args) == 1 and self._is_file(node.args[0])
            return name == "globals" and not node.args
        return False

    def _look(self, node: ast.AST) -> str | None:
        """What a node looks up by a name that is computed."""
        if isinstance(node, ast.Attribute) and node.attr == "modules":
            is_sys = self._value(node.value) is sys
            return "a file" if is_sys and not self._is_used_by_name(node) else None
        if self._is_namespace(node):
            return None if self._is_used_by_name(node) else "a global"
        return self._look_at_call(node) if isinstance(node, ast.Call) else None

    def _look_at_call(self, node: ast.Call) -> str | None:
        getter, first = node.func, node.args[0] if node.args else None
        match self._name(getter):
            case "import_module" | "__import__":
                return None if self._is_known(first) else "a file"
            case "eval" | "exec" if self._value(getter) in (eval, exec):
                return None if self._is_known(first) else "a global"
            case "getattr" if len(node.args) > 1 and self._is_file(first):
                return None if self._is_known(node.args[1]) else "a global"
        if isinstance(getter, ast.Call) and self._name(getter.func) == "attrgetter":
            known = all(map(self._is_known, getter.args))
            return "a global" if self._is_file(first) and not known else None
        return None

    def _is_used_by_name(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether of a dictionary only items are used whose names are known."""
        parent = self._parents.get(id(node))
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return self._is_known(parent.slice)
        if isinstance(parent, ast.Attribute):
            return self._is_method_by_name(parent)
        if isinstance(parent, ast.Call):
            # As in eval("SCALE", globals()), whose names are read where it is evaluated.
            return self._name(parent.func) in ("eval", "exec", "id", "len")
        if isinstance(parent, ast.Assign | ast.NamedExpr) and depth == 0:
            return self._is_variable_by_name(parent)
        return isinstance(parent, ast.Compare | ast.Expr)

    def _is_method_by_name(self, method: ast.Attribute) -> bool:
        """Whether a dictionary's method gives only items whose names are known."""
        call = self._parents.get(id(method))
        if method.attr == "keys":
            return True
        if not isinstance(call, ast.Call) or call.func is not method:
            return False
        return bool(call.args) and self._is_known(call.args[0])

    def _is_variable_by_name(self, node: ast.Assign | ast.NamedExpr) -> bool:
        """Whether of the variable that a dictionary is given to only such items are used."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if len(names) < len(targets) or any(len(self._given[name]) > 1 for name in names):
            return False
        return all(self._is_used_by_name(use, 1) for use in self._uses if use.id in names)

    @functools.cached_property
    def _uses(self) -> list[ast.Name]:
        nodes = {id(n): n for p in self._parents.values() for n in ast.iter_child_nodes(p)}
        return [
            n for n in nodes.values() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        ]


def function_of(value: Any) -> types.FunctionType | None:
    """The function behind a method, property, class method or static method."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value if isinstance(value, types.FunctionType) else None


def is_library(value: Any) -> bool:
    """Whether a function, class or file belongs to an installed library."""
    if isinstance(value, types.FunctionType):
        return _in_library(value.__code__.co_filename)
    if isinstance(value, types.ModuleType):
        file = value.__dict__.get("__file__")
        known = value.__name__.partition(".")[0] in sys.stdlib_module_names
        return known if file is None else _in_library(file)
    if value.__module__ in ("types", "argparse", "collections", "__main__"):
        return False
    module = sys.modules.get(value.__module__)
    return _in_library(getattr(module, "__file__", None) or "<")


def is_machinery_s(function: types.FunctionType) -> bool:
    """Whether a function's code belongs to machinery, whatever a decorator says."""
    module = str(function.__globals__.get("__name__", ""))
    return module.partition(".")[0] in MACHINERY and not module.startswith(_STEPS)


@functools.lru_cache(maxsize=4096)
def _in_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD_LIBRARY)


def is_machinery(value: Any) -> bool:
    """Whether what an object holds is its own machinery, and no state of the call."""
    if isinstance(value, Optimizer | LRScheduler | GradScaler):  # Those of users too.
        return True
    module = type(value).__module__
    read = (*_READ_OF_PYTORCH, *_STEPS)
    return module.partition(".")[0] in MACHINERY and not module.startswith(read)
