"""The structure of arguments and results as text: containers and objects, with classes by name.

Reading executes nothing, and imports nothing unless `imports=True` allows it. An object is built
again without its `__init__`, but what its class does later is code: so `objects` has to name the
package that it is of, and then only classes that are imported already are taken.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArtifactError
from .objects import (
    NODES,
    Again,
    Constant,
    GivenNode,
    Kind,
    ObjectNode,
    SetKind,
    SetNode,
    Shared,
    has_nodes,
    layout_of,
)

Json = Any

_LEAF = "*"
_OURS = {node.__name__: node for node in NODES}
# Classes of objects that were allowed in the file that is being read, by name.
_ALLOWED: ContextVar[set[str] | None] = ContextVar("_ALLOWED", default=None)


def tree_text(spec: pytree.TreeSpec, *, given: int = 0) -> str:
    """A tree as text.

    Args:
        spec: of what a call takes or returns.
        given: how many objects of the caller it may name, by their position.

    Raises:
        ArtifactError: a node's class is not known by name, or the text could not be read without
            importing what it names.
    """
    try:
        text = json.dumps(_written(spec)) if has_nodes(spec) else pytree.treespec_dumps(spec)
        if _read(json.loads(text), given) != spec:
            raise ValueError("it comes back as another one")
        return text
    except Exception as error:
        raise ArtifactError(
            f"The structure of arguments or results cannot be saved: {error}.",
            remedy="Take and return tuples, lists, dictionaries by text, objects of classes that a "
            "module names, or classes that are registered with torch.utils._pytree under a "
            "serialized_type_name.",
        ) from error


@contextlib.contextmanager
def one_file() -> Iterator[None]:
    """Read one file inside the block: what one part of it may make, others may make too."""
    token = _ALLOWED.set(set())
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def tree_of(
    text: str, *, imports: bool = False, objects: Collection[str] | None = None, given: int = 0
) -> pytree.TreeSpec:
    """The tree that `tree_text` wrote.

    Args:
        text: of the tree.
        imports: whether modules that define the tree's classes may be imported.
        objects: packages that are trusted to define what may be built of classes that are imported
            here; none by default.
        given: how many objects of the caller it may name.

    Raises:
        ArtifactError: the text is no tree, or names a class that may not be used.
    """
    try:
        known = json.loads(text)
        named, registered = _classes(known)
        if imports:
            _import(named, registered)
        unknown = set() if imports else registered - _imported()
        missing = {name for name in named if _class_of(name) is None}
        allowed = _allowed(named if imports else _of_packages(named, objects or ()))
        forbidden = named - missing - allowed
        if not (unknown or missing or forbidden):
            return _read(known, given)
    except Exception as error:
        raise ArtifactError(
            f"The structure of arguments or results cannot be made: {error!s:.300}."
        ) from error
    if unknown or missing:
        names = ", ".join(sorted({*unknown, *(name.replace(":", ".") for name in missing)}))
        raise ArtifactError(
            f"Arguments or results are made of {names}, which is not imported here.",
            remedy="Import it first, pass the model, or load with trust=True.",
        )
    names = ", ".join(sorted(forbidden)).replace(":", ".")
    raise ArtifactError(
        f"Arguments or results are objects of {names}, and a file may not make these by itself.",
        remedy="Pass the model, or load with trust=True.",
    )


def _import(named: Collection[str], registered: set[str]) -> None:
    """Import the modules that define some classes, those that are registered first."""
    for name in sorted(registered - _imported()):
        importlib.import_module(name.rpartition(".")[0])
    for name in sorted(named):
        importlib.import_module(name.partition(":")[0])


def _imported() -> set[str]:
    """The names of registered classes that are imported here."""
    return set(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE)


def _of_packages(named: set[str], packages: Collection[str]) -> set[str]:
    """Those classes that some packages define."""
    return {name for name in named if _package_of(name) in packages}


def _allowed(more: set[str]) -> set[str]:
    """What may be built by now, in the file that is read, with some more."""
    known = _ALLOWED.get()
    if known is None:
        return more
    _ALLOWED.set(known | more)
    return known | more


# Objects.


def _written(spec: pytree.TreeSpec) -> Json:
    """A tree with objects, as JSON.

    Raises:
        ValueError: it holds something that has no name.
    """
    if spec.is_leaf():
        return _LEAF
    children = spec.children()
    if spec.type in NODES:
        written = {"node": spec.type.__name__, "context": _context_of(spec)}
    else:
        leaves: list[pytree.TreeSpec] = [pytree.tree_structure(0)] * len(children)
        alone = pytree.TreeSpec(spec.type, spec.context, leaves)
        written = {"plain": json.loads(pytree.treespec_dumps(alone))}
    return written | {"children": list(map(_written, children))}


def _context_of(spec: pytree.TreeSpec) -> Json:
    context = spec.context
    if spec.type is ObjectNode:
        return [_name_of(context.cls), list(context.names), context.holds]
    if spec.type in (Shared, Again, GivenNode):
        return context
    if spec.type is SetNode:
        values = [value for _, value in context.values]
        if any(type(value) not in (bool, int, str, type(None)) for value in values):
            raise ValueError("a set holds other values than numbers and text")
        return [context.cls.__name__, values]
    value = context[1] if spec.type is Constant else None
    if isinstance(value, type):
        return {"class": _name_of(value)}
    if isinstance(value, enum.Enum):
        return {"member": _name_of(type(value)), "name": value.name}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    raise ValueError("an object in it is the model's or the caller's own")


def _read_context(node: type, known: Json, given: int) -> Any:
    """Inverse of `_context_of`; raises for anything else."""
    read = _CONTEXTS.get(node)
    if read is None:
        raise ValueError(f"there is no {node.__name__} in a file")
    return read(known, given)


def _read_kind(known: Json, given: int) -> Kind:
    name, names, holds = known
    cls = _class_of(name)
    layout = None if cls is None else layout_of(cls)
    if cls is None or layout is None or layout.holds is not holds:
        raise ValueError(f"{name} cannot be built")
    slots = {slot for slot, _ in layout.slots}
    named = all(type(n) is str and not n.startswith("__") for n in names)
    if not named or not all(layout.has_dict or n in slots for n in names):
        raise ValueError(f"{name} has no such attributes")
    return Kind(cls, tuple(names), holds)


def _read_shared(known: Json, given: int) -> tuple[int, int]:
    number, places = map(int, known)
    return number, places


def _read_given(known: Json, given: int) -> int:
    if type(known) is not int or not 0 <= known < given:
        raise ValueError(f"the caller gives no object {known!r:.20}")
    return known


def _read_set(known: Json, given: int) -> SetKind:
    kind, values = known
    cls = {"set": set, "frozenset": frozenset}[kind]
    return SetKind(cls, tuple([(type(value), value) for value in values]))


def _read_constant(known: Json, given: int) -> tuple[type, Any]:
    ((kind, name), *more) = known.items()
    if kind == "size":
        return torch.Size, torch.Size(map(int, name))
    if kind == "torch":
        value = vars(torch).get(name)  # getattr might import something.
        if not isinstance(value, torch.layout | torch.memory_format):
            raise ValueError(f"torch has no {name!r:.40}")
        return type(value), value
    cls = _class_of(name)
    if cls is None:
        raise ValueError(f"there is no {name!r:.60}")
    if kind == "member" and issubclass(cls, enum.Enum):
        return cls, cls.__members__[dict(more)["name"]]
    if kind == "class":
        return type(cls), cls
    raise ValueError(f"there is no constant of kind {kind!r:.40}")


_CONTEXTS: dict[type, Callable[[Json, int], Any]] = {
    ObjectNode: _read_kind,
    Shared: _read_shared,
    Again: lambda known, given: int(known),
    GivenNode: _read_given,
    SetNode: _read_set,
    Constant: _read_constant,
}


def _package_of(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _class_of(name) is not cls:
        raise ValueError(f"no module names the class {cls.__qualname__}")
    return name


def _class_of(name: str) -> type | None:
    """A class by its name, if it is imported; None if it is not."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # getattr might import something.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


# Reading.


def _read(known: Json, given: int) -> pytree.TreeSpec:
    """The tree of imported classes; raises if it is none, or if reading might import."""
    if known == _LEAF:
        return pytree.tree_structure(0)
    if isinstance(known, list):
        return _parse_tree(known)
    children = [_read(child, given) for child in known["children"]]
    if "plain" in known:
        alone = _parse_tree(known["plain"])
        if len(alone.children()) != len(children):
            raise ValueError("a container holds another number of values")
        return pytree.TreeSpec(alone.type, alone.context, children)
    node = _OURS[known["node"]]
    context = _read_context(node, known["context"], given)
    count = len(context.names) + context.holds if node is ObjectNode else int(node is Shared)
    if len(children) != count:
        raise ValueError(f"a {node.__name__} holds another number of values")
    return pytree.TreeSpec(node, context, children)


def _classes(known: Json) -> tuple[set[str], set[str]]:
    """The names of all classes in a tree: those of objects and constants, and registered ones."""
    if known == _LEAF:
        return set(), set()
    if isinstance(known, list):
        return set(), _registered(known[1])
    named: set[str] = set()
    registered = _registered(known["plain"][1]) if "plain" in known else set()
    context = known.get("context")
    if known.get("node") == ObjectNode.__name__:
        named.add(str(context[0]))
    elif isinstance(context, dict):
        named |= {str(context[kind]) for kind in ("class", "member") if kind in context}
    for child in known["children"]:
        mine, its = _classes(child)
        named |= mine
        registered |= its
    return named, registered


_NAMED_TUPLE = "collections.namedtuple"


def _registered(schema: Json) -> set[str]:
    """The names of registered classes in a tree; a named tuple's is in its context."""
    inner = set().union(*map(_registered, schema["children_spec"]))
    name = schema["context" if schema["type"] == _NAMED_TUPLE else "type"]
    return inner | ({name} if name is not None else set())


def _parse_tree(known: Json) -> pytree.TreeSpec:
    """Parse a tree of imported classes; raises if it is none, or if reading might import."""
    protocol, schema = known
    _refuse_imports(schema)
    # Only what was checked, whatever else the text may contain.
    return pytree.treespec_loads(json.dumps([protocol, schema]))


def _refuse_imports(schema: Json) -> None:
    """Raise ValueError if PyTorch would import what a tree names in order to read it.

    It does so for the factory of a defaultdict, and for each object in a context that claims to be
    an enumeration's member. What other classes do to read a context is unknown.
    """
    name, context = schema["type"], schema["context"]
    if name == _NAMED_TUPLE:
        if not pytree.is_namedtuple_class(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[context]):
            raise ValueError(f"{context} is no named tuple")
    elif name is not None:
        kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name]
        reader = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
        if name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND or reader is not None:
            raise ValueError(f"reading a {name} may import whatever it names")
        # Even of a text that is no valid JSON PyTorch would make the first objects.
        if _holds_object(json.loads(context)):
            raise ValueError(f"the context of a {name} names what would be imported")
    for child in schema["children_spec"]:
        _refuse_imports(child)


def _holds_object(value: Json) -> bool:
    """Whether a value contains a JSON object, also inside of texts."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
        return _holds_object(value)
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))
