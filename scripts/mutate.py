"""Delete one rule of graphwright's at a time, and see a named test turn red.

What must not go unseen is a list of rules: each comparison of two calls, each kind of place that is
watched, each reason to leave a call to eager code or to refuse it, each switch of PyTorch's. The
rules are read from the source, function by function, so that a new one is in the list at once;
`mutations.toml` has the functions, and names the test for each of their rules:

- "conditions": each condition of a function decides nothing any more. An `if` never happens, an
  operand of `and` or `or` is left out, and a comparison that is returned holds;
- "steps": each statement that only calls something, or adds to something, is left out;
- "fields": each element of a tuple that a function returns is None;
- "rows": each value of a dictionary is one that always holds;
- "switches": each row of the table of switches is left out where calls compare it, where other
  processes repeat it, and where saved files compare it.

In place of a test a rule may have a reason why nothing changes without it; it begins with "same: ".
Of switches, "others" stands for all that are not written out. No file is edited: each mutant is a
fork of one process that has collected the tests, with the code of the edited source in memory.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "graphwright"
TABLE = Path(__file__).with_suffix("").with_name("mutations.toml")
WIDTH = 80
# A test that a mutant keeps from ending.
TIMEOUT_S = 180
# So begins the reason why nothing changes without a rule.
SAME = "same: "
# The test for all switches that are not written out.
OTHERS = "others"
SWITCHES = "calls/switches.py"
# Where a row of the table of switches is used: the condition that picks the rows, the function or
# table that it stands in, and which rows are meant.
USES: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "calls": (
        "switch.kind in ('call', 'everywhere')",
        "_at_calls",
        lambda row: row.kind in ("call", "everywhere") and not row.name.startswith("autocast"),
    ),
    "processes": (
        "switch.set is not None and switch.kind != 'call'",
        "CARRIED",
        lambda row: row.set is not None and row.kind != "call",
    ),
    "files": (
        "switch.kind in ('everywhere', 'saved')",
        "saved",
        lambda row: row.set is not None and row.kind in ("everywhere", "saved"),
    ),
}


@dataclass(frozen=True)
class Mutation:
    """One rule that can be deleted.

    Attributes:
        kind: "conditions", "steps", "fields", "rows" or "switches".
        place: the file and function, or the use of switches.
        rule: the rule's own code, or the switch.
        test: the test that turns red, or the reason why none does; None if the table has neither.
    """

    kind: str
    place: str
    rule: str
    test: str | None

    @property
    def name(self) -> str:
        """The file, the function and the rule."""
        return f"{self.place} | {self.rule}"

    @property
    def file(self) -> str:
        """Where the edit is made, below the package."""
        return SWITCHES if self.kind == "switches" else self.place.partition(":")[0]

    def edited(self) -> ast.Module:
        """The file without the rule."""
        tree = ast.parse((SOURCE / self.file).read_text())
        if self.kind == "switches":
            _without_switch(tree, self.place.partition(": ")[2], self.rule)
        else:
            node = _definition(tree, self.place.partition(":")[2])
            dict(_RULES[self.kind](node))[self.rule]()
        return ast.fix_missing_locations(tree)

    def apply(self) -> None:
        """Delete the rule in this process: give the function other code, or make the table anew."""
        tree = self.edited()
        name = f"graphwright.{self.file.removesuffix('.py').replace('/', '.')}"
        module, file = importlib.import_module(name), str(SOURCE / self.file)
        use = self.place.partition(": ")[2]
        path = USES[use][1] if self.kind == "switches" else self.place.partition(":")[2]
        node, owner = _definition(tree, path.partition(".")[0]), vars(module)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            exec(compile(ast.Module([node], []), file, "exec"), owner)  # type: ignore[arg-type]
            return
        # Of functions inside of functions, the outermost one gets other code.
        code: Any = compile(tree, file, "exec")
        for part in path.split("."):
            code = next(c for c in code.co_consts if getattr(c, "co_name", None) == part)
            function = inspect.unwrap(getattr(owner[part], "__func__", owner[part]))
            if isinstance(function, property):
                function = function.fget
            if not isinstance(function, type):
                function.__code__ = code
                return
            owner = vars(function)


# The rules of a piece of code, and what deletes each.
Rules = Iterator[tuple[str, Callable[[], object]]]


def rules_of(kind: str, place: str) -> list[str]:
    """The rules in a function or table that is named as `file:name`."""
    file, _, name = place.partition(":")
    node = _definition(ast.parse((SOURCE / file).read_text()), name)
    return [rule for rule, _ in _RULES[kind](node)]


def _definition(tree: ast.Module, path: str) -> ast.AST:
    """A function or an assigned name, by its path, such as `Class.method.inner`."""
    node: Any = tree
    for name in path.split("."):
        found = [
            each
            for each in _below(node)
            if getattr(each, "name", None) == name
            or (isinstance(each, ast.Assign | ast.AnnAssign) and _target(each) == name)
        ]
        if len(found) != 1:
            raise KeyError(f"{path}: {len(found)} definitions of {name}")
        node = found[0]
    return node


def _target(node: Any) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """The statements and expressions of a function, without those of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _below(child)


def _named(found: Iterator[tuple[ast.AST, Callable[[], object]]]) -> Rules:
    """Rules with their code as names; of equal ones, the later ones are numbered."""
    seen: dict[str, int] = {}
    for node, delete in found:
        text = ast.unparse(node)
        seen[text] = seen.get(text, 0) + 1
        yield (text if seen[text] == 1 else f"{text} ({seen[text]})"), delete


def _conditions(function: ast.AST) -> Rules:
    return _named(_all_conditions(function))


def _all_conditions(function: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], object]]]:
    def put(owner: Any, value: bool, field: str, index: int | None = None) -> Callable[[], object]:
        def delete() -> None:
            constant = ast.Constant(value)
            if index is None:
                setattr(owner, field, constant)
            else:
                getattr(owner, field)[index] = constant

        return delete

    for node in _below(function):
        if isinstance(node, ast.BoolOp):
            for index, operand in enumerate(node.values):
                if not _has_operands(operand):
                    yield operand, put(node, isinstance(node.op, ast.And), "values", index)
        elif isinstance(node, ast.If | ast.IfExp) and not _is_either(node.test):
            yield node.test, put(node, False, "test")
        elif isinstance(node, ast.comprehension):
            for index, test in enumerate(node.ifs):
                if not _has_operands(test):
                    yield test, put(node, True, "ifs", index)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Compare):
            yield node.value, put(node, True, "value")


def _has_operands(test: ast.AST) -> bool:
    """Whether a condition is made of others, which are rules of their own."""
    if isinstance(test, ast.UnaryOp):
        test = test.operand
    return isinstance(test, ast.BoolOp)


def _is_either(test: ast.AST) -> bool:
    """Whether a condition holds as soon as one of others does, which are rules of their own."""
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)


def _steps(function: ast.AST) -> Rules:
    return _named(_all_steps(function))


def _all_steps(function: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], object]]]:
    def leave_out(body: list[Any], index: int) -> Callable[[], object]:
        return lambda: body.__setitem__(index, ast.Pass())

    for node in (function, *_below(function)):
        if node is not function and isinstance(node, ast.FunctionDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            for index, each in enumerate(body if isinstance(body, list) else ()):
                if isinstance(each, ast.AugAssign) or (
                    isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
                ):
                    yield each, leave_out(body, index)


def _fields(function: ast.AST) -> Rules:
    return _named(_all_fields(function))


def _all_fields(function: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], object]]]:
    def empty(elements: list[Any], index: int) -> Callable[[], object]:
        return lambda: elements.__setitem__(index, ast.Constant(None))

    for node in _below(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            for index, each in enumerate(node.value.elts):
                if not isinstance(each, ast.Constant):
                    yield each, empty(node.value.elts, index)


def _rows(table: Any) -> Rules:
    """The rows of a dictionary of functions, by their keys."""
    rows: ast.Dict = table.value
    for index, key in enumerate(rows.keys):
        always = ast.parse("lambda *_: True", mode="eval").body
        yield ast.unparse(key), lambda i=index, a=always: rows.values.__setitem__(i, a)


_RULES: dict[str, Callable[[Any], Rules]] = {
    "conditions": _conditions,
    "steps": _steps,
    "fields": _fields,
    "rows": _rows,
}


def _without_switch(tree: ast.Module, use: str, name: str) -> None:
    text = USES[use][0]
    found = [
        (node, index)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for index, test in enumerate(node.ifs)
        if ast.unparse(test).startswith(text)
    ]
    if len(found) != 1:
        raise KeyError(f"{SWITCHES}: {text} is {len(found)} times there")
    node, _ = found[0]
    node.ifs.append(ast.parse(f"switch.name != {name!r}", mode="eval").body)


def mutations() -> list[Mutation]:
    """All mutations: what the source has, with the tests that the table has for them."""
    table = tomllib.loads(TABLE.read_text())
    found = []
    for kind in _RULES:
        for place, tests in table.get(kind, {}).items():
            found += [Mutation(kind, place, r, tests.get(r)) for r in rules_of(kind, place)]
    from graphwright.calls import switches

    for use, (_, _, is_meant) in USES.items():
        tests = table["switches"][use]
        for row in filter(is_meant, switches.TABLE):
            test = tests.get(row.name, tests.get(OTHERS))
            found.append(Mutation("switches", f"switches: {use}", row.name, test))
    return found


class Reports:
    """A plugin of pytest's: whether a test failed, and whether one passed."""

    def __init__(self) -> None:
        self.failed = self.passed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Look at what came of a test's set-up, call or clean-up."""
        self.failed |= report.failed
        self.passed |= report.when == "call" and report.passed


class Forks:
    """A plugin of pytest's: each mutant is a fork of the process that has collected the tests.

    Nothing on disk is changed. In the fork the function gets the code that the source without the
    rule compiles to, or the table is made anew, and then its test runs.

    Args:
        work: the mutations to run; None for a test without one.
    """

    def __init__(self, work: Sequence[tuple[str, Mutation | None]]) -> None:
        self.work = work
        self.rows: list[dict[str, Any]] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        """In place of pytest's own: run what there is to run, one after the other."""
        for test, mutation in self.work:
            items = [each for each in session.items if _is_of(each.nodeid, test)]
            began = time.monotonic()
            outcome, red = _in_fork(items, mutation) if items else ("there is no such test", [])
            self.rows.append({"test": test, "outcome": outcome, "red": red})
            self.rows[-1]["seconds"] = round(time.monotonic() - began, 2)
            if mutation is not None:
                _show(mutation, self.rows[-1])
            elif outcome != "survived":
                print(f"without a mutation: {test}\n    {outcome} {red}", flush=True)
        return True


def _is_of(identity: str, test: str) -> bool:
    """Whether a test is the one that is named, with any parameters, or in the file that is."""
    return identity == test or identity.startswith((f"{test}[", f"{test}::"))


def _in_fork(items: Sequence[Any], mutation: Mutation | None) -> tuple[str, list[str]]:
    """What comes of tests without a rule: "red", "survived" or what else; and those that failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            found = _run_items(items, mutation)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}", []
        os.write(writer, json.dumps(found).encode())
        os._exit(0)  # What a mutant has broken may keep the process from ending.
    os.close(writer)
    with open(reader, "rb") as answer:
        if not select.select([answer], [], [], TIMEOUT_S)[0]:
            os.kill(child, signal.SIGKILL)
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return f"it ended with status {status}", []
    outcome, red = json.loads(text)
    return outcome, red


def _run_items(items: Sequence[Any], mutation: Mutation | None) -> tuple[str, list[str]]:
    if mutation is not None:
        mutation.apply()
    seen = Reports()
    items[0].config.pluginmanager.register(seen)
    for item in items:
        # As pytest's own loop does, so that warnings are errors here too.
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        if seen.failed:
            return "red", [item.nodeid]
    return ("survived" if seen.passed else "all skipped"), []


def _show(mutation: Mutation, row: dict[str, Any]) -> None:
    text = " ".join(mutation.name.split())
    shown = textwrap.shorten(text, WIDTH - 16, placeholder="…")
    print(f"{row['outcome'][:8]:<9}{shown:<{WIDTH - 17}}{row['seconds']:6.1f} s", flush=True)
    if row["outcome"] != "red":
        print(f"    {row['test']}\n    {row['outcome']}", flush=True)


def run(work: Sequence[tuple[str, Mutation | None]]) -> list[dict[str, Any]]:
    """Run mutants, in this process, which must not have run a test before; a row for each."""
    import pytest

    plugin = Forks(work)
    tests = sorted({test.partition("::")[0] for test, _ in work})
    # That plugin warns beside xdist, and warnings are errors.
    options = ["-qq", "-s", "-n0", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAPHWRIGHT_CACHE_DIR"] = folder
        pytest.main([*options, f"--basetemp={folder}/tests", *tests], plugins=[plugin])
    return plugin.rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations; 1 if one survives, 2 if the tests fail without them."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all mutations if none is given")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--output", type=Path, help="a file for the outcome as JSON")
    options = parser.parse_args(arguments)
    chosen = [m for m in mutations() if all(part in m.name for part in options.names)]
    if options.list:
        for each in chosen:
            print(f"{each.name}\n    {each.test or 'no test'}")
        return 0
    unnamed = [each.name for each in chosen if each.test is None]
    if unnamed:
        print(f"{TABLE.name} has no test for:", *unnamed, sep="\n  ")
        return 2
    wanted = [each for each in chosen if not str(each.test).startswith(SAME)]
    if not wanted:
        print("there is no such mutation")
        return 2
    tests = list(dict.fromkeys(str(each.test) for each in wanted))
    work = [(test, None) for test in tests] + [(str(each.test), each) for each in wanted]
    done = _in_processes(work, options.jobs)
    if any(row["outcome"] != "survived" for row in done[: len(tests)]):
        print("Without a mutation not all tests pass.")
        return 2
    rows = [
        {"kind": each.kind, "place": each.place, "rule": each.rule, **row}
        for each, row in zip(wanted, done[len(tests) :], strict=True)
    ]
    survived = [row for row in rows if row["outcome"] != "red"]
    print(f"{len(rows) - len(survived)} of {len(rows)} mutants are seen by their test.")
    same = [each for each in chosen if str(each.test).startswith(SAME)]
    print(f"{len(same)} rules have no consequence alone, for reasons that {TABLE.name} has.")
    if options.output is not None:
        _write(options.output, rows, same)
    return int(bool(survived))


def _in_processes(work: Sequence[tuple[str, Mutation | None]], jobs: int) -> list[dict[str, Any]]:
    """As `run`, in some processes."""
    shares = [work[job::jobs] for job in range(jobs)]
    rows: list[Any] = [None] * len(work)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for job, done in enumerate(pool.map(run, shares)):
            rows[job::jobs] = done
    return rows


def _write(file: Path, rows: Sequence[dict[str, Any]], same: Sequence[Mutation]) -> None:
    import torch

    from bench.common import record
    from graphwright.report.environment import environment

    result = {
        "schema": "graphwright.mutations",
        "schema_version": 1,
        "commit": record.commit(),
        "environment": environment(torch.device("cpu")),
        "mutants": len(rows),
        "seen": sum(row["outcome"] == "red" for row in rows),
        "without_consequence": {each.name: str(each.test).removeprefix(SAME) for each in same},
        "rows": list(rows),
    }
    record.write(file, result)
    print(f"wrote {file}")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
