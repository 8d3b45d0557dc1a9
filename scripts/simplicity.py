"""What keeps the code simple: four gates, and the exceptions that are left.

    scripts/simplicity            fails for what scripts/simplicity.toml does not list, or need not
    scripts/simplicity --write    write the list as it is now: it only gets shorter

A class has a name of its own in the package. Nobody reads a private attribute of another file's
class. A function has at most 15 branches, boolean operators and handlers. A class has at most 20
attributes.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "graphwright"
TABLE = ROOT / "scripts" / "simplicity.toml"
MOST_BRANCHES, MOST_ATTRIBUTES = 15, 20

Found = dict[str, dict[str, int]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension,
    ast.match_case, ast.Assert,
)  # fmt: skip


def found_in(files: Mapping[str, str]) -> Found:
    """What each gate finds.

    Args:
        files: the text of each, by its path.

    Returns:
        For each gate, how much by where.
    """
    trees = {name: ast.parse(text) for name, text in files.items()}
    found: Found = {"class names": {}, "private attributes": {}, "branches": {}, "attributes": {}}
    classes: dict[str, int] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = classes.get(node.name, 0) + 1
    found["class names"] = {name: count for name, count in classes.items() if count > 1}
    own = {name: _private_names(tree) for name, tree in trees.items()}
    functions = {name: _private_functions(tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        others, modules, imported = _others(own, name), _others(functions, name), _imported(tree)
        foreign = sum(
            _is_foreign(node, others) or _is_of_module(node, modules, imported)
            for node in ast.walk(tree)
        )
        if foreign:
            found["private attributes"][name] = foreign
        for place, node in _definitions(tree):
            size, gate, most = (
                (branches(node), "branches", MOST_BRANCHES)
                if isinstance(node, _FUNCTIONS)
                else (len(attributes(node)), "attributes", MOST_ATTRIBUTES)
            )
            if size > most:
                found[gate][f"{name}:{place}"] = size
    return found


def _definitions(
    tree: ast.AST, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            inner = (*path, node.name)
            yield ".".join(inner), node
            yield from _definitions(node, inner)
        else:
            yield from _definitions(node, path)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a function or class, but for functions and classes inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield child
            yield from _inside(child)


def branches(function: ast.AST) -> int:
    """The branches, boolean operators and handlers of a function, and one."""
    count = 1
    for node in _inside(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, _BRANCHES):
            count += 1
    return count


def attributes(cls: ast.ClassDef) -> set[str]:
    """The attributes that a class declares, or gives its instances."""
    declared = {
        target.id
        for node in cls.body
        for target in (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if isinstance(target, ast.Name)
    }
    given = {node.attr for node in ast.walk(cls) if _is_given(node)}
    return declared | given


def _private_names(tree: ast.Module) -> set[str]:
    """Private names that a file's classes define: of methods and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node not in tree.body:
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif _is_given(node):
            found.add(node.attr)
    return set(filter(_is_private, found))


def _private_functions(tree: ast.Module) -> set[str]:
    """Private functions and classes of a file's own, which are no attributes but the module's."""
    found = (node.name for node in tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef)))
    return set(filter(_is_private, found))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _others(names: Mapping[str, set[str]], mine: str) -> set[str]:
    """What the other files define and a file itself does not."""
    return set().union(*(each for file, each in names.items() if file != mine)) - names[mine]


def _imported(tree: ast.AST) -> set[str]:
    """What a file imports, by the names that it gives it."""
    imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {each.asname or each.name for node in imports for each in node.names}


def _is_given(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether a node gives an object an attribute of its own."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


# Modules of other libraries, whose private names are theirs.
_LIBRARIES = frozenset(("torch", "np", "sys", "os", "pytree", "dynamo", "inductor"))


# PyTorch's own names, which a class of ours that stands for a module has too.
_OF_PYTORCH = frozenset(("_version",))


def _is_foreign(node: ast.AST, others: set[str]) -> bool:
    """Whether a node reads or writes a private attribute that only other files define."""
    if not isinstance(node, ast.Attribute) or node.attr not in others - _OF_PYTORCH:
        return False
    root: ast.AST = node.value
    while isinstance(root, ast.Attribute):
        root = root.value
    name = root.id if isinstance(root, ast.Name) else ""
    return name not in _LIBRARIES and not (name in ("self", "cls") and root is node.value)


def _is_of_module(node: ast.AST, modules: set[str], imported: set[str]) -> bool:
    """Whether a node reads a private function of a module that the file imports."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in modules
        and isinstance(node.value, ast.Name)
        and node.value.id in imported - _LIBRARIES
    )


def listed() -> Found:
    """The exceptions."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def problems(found: Found, known: Found) -> list[str]:
    """What the exceptions do not cover, and those that are no longer needed, in words."""
    told = []
    for gate, places in found.items():
        for place, size in places.items():
            most = known.get(gate, {}).get(place, 0)
            if size > most:
                told.append(f"{gate}: {place} has {size}; {most or 'none'} may stay")
    for gate, places in known.items():
        for place, most in places.items():
            size = found.get(gate, {}).get(place, 0)
            if size < most:
                told.append(f"{gate}: {place} has {size or 'none'}; lower its {most}")
    return told


def written(found: Found) -> str:
    """The exceptions as a file."""
    lines = ["# What the gates of scripts/simplicity.py let pass as yet. It may only get shorter."]
    for gate, places in found.items():
        lines += ["", f'["{gate}"]  # {len(places)}, {sum(places.values())} in all']
        lines += [f'"{place}" = {size}' for place, size in sorted(places.items())]
    return "\n".join([*lines, ""])


def main() -> int:
    """Look at the package; 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the exceptions as they are")
    options = parser.parse_args()
    found = found_in(
        {
            file.relative_to(SOURCE).as_posix(): file.read_text(encoding="utf-8")
            for file in sorted(SOURCE.rglob("*.py"))
        }
    )
    if options.write:
        TABLE.write_text(written(found), encoding="utf-8")
    told = problems(found, listed())
    print("\n".join(told), end="\n" if told else "")
    for gate, places in found.items():
        print(f"{gate:20}{len(places):5} places, {sum(places.values())} in all")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
