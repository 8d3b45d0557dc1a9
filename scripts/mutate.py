"""Delete one rule of graphwright's at a time, and see a named test turn red.

What must not go unseen is a list of rules: each comparison of two calls, each kind of place that is
watched, each reason to leave a call to eager code or to refuse it, each switch of PyTorch's. The
rules are read from the source, function by function, so that a new one is in the list at once;
`mutations.toml` has the functions, and names the test for each of their rules:

- "conditions": each condition of a function, and each operand of its `and` and `or`, is taken for
  one that decides nothing. An `if` never happens, an operand is left out, and a comparison that is
  returned holds;
- "steps": each statement that only calls something, or adds to something, is left out;
- "rows": each value of a dictionary is one that always holds;
- "switches": each row of the table of switches is left out where calls compare it, where other
  processes repeat it, and where saved files compare it.

In place of a test a rule may have a reason why nothing changes without it; it begins with "same: ".
"others" stands for all rules of a place that are not written out. Each edit is made in a copy of
the source, which the named test imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "graphwright"
TABLE = Path(__file__).with_suffix("").with_name("mutations.toml")
WIDTH = 80
# A test that a mutant keeps from ending.
TIMEOUT_S = 180
# So begins the reason why nothing changes without a rule.
SAME = "same: "
# The test or reason for all rules of a place that are not written out.
OTHERS = "others"
# Exit statuses of pytest: tests failed, as opposed to none found or none collected.
PASSED, FAILED = 0, 1
SWITCHES = "calls/switches.py"
# Processes that are forked from one that has imported PyTorch, which takes longer than most tests.
_PROCESSES = multiprocessing.get_context("forkserver")
# Where a row of the table of switches is used, with the code that lists the rows there, and which
# rows are meant.
USES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "calls": (
        "if switch.kind in ('call', 'everywhere')",
        lambda row: row.kind in ("call", "everywhere") and not row.name.startswith("autocast"),
    ),
    "processes": (
        "if switch.set is not None and switch.kind != 'call'",
        lambda row: row.set is not None and row.kind != "call",
    ),
    "files": (
        "if switch.kind in ('everywhere', 'saved')",
        lambda row: row.set is not None and row.kind in ("everywhere", "saved"),
    ),
}


@dataclass(frozen=True)
class Mutation:
    """One rule that can be deleted.

    Attributes:
        kind: "conditions", "steps", "rows" or "switches".
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

    def edited(self, source: str) -> str:
        """The source of the file without the rule."""
        tree = ast.parse(source)
        if self.kind == "switches":
            _without_switch(tree, self.place.partition(": ")[2], self.rule)
        else:
            node = _definition(tree, self.place.partition(":")[2])
            dict(_RULES[self.kind](node))[self.rule]()
        return ast.unparse(ast.fix_missing_locations(tree))


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
        elif isinstance(node, ast.If | ast.IfExp) and not _has_operands(node.test):
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


def _rows(table: Any) -> Rules:
    """The rows of a dictionary of functions, by their keys."""
    rows: ast.Dict = table.value
    for index, key in enumerate(rows.keys):
        always = ast.parse("lambda *_: True", mode="eval").body
        yield ast.unparse(key), lambda i=index, a=always: rows.values.__setitem__(i, a)


_RULES: dict[str, Callable[[Any], Rules]] = {
    "conditions": _conditions,
    "steps": _steps,
    "rows": _rows,
}


def _without_switch(tree: ast.Module, use: str, name: str) -> None:
    text = USES[use][0].removeprefix("if ")
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
            others = tests.get(OTHERS)
            rules = rules_of(kind, place)
            found += [Mutation(kind, place, rule, tests.get(rule, others)) for rule in rules]
    from graphwright.calls import switches

    for use, (_, is_meant) in USES.items():
        tests = table["switches"][use]
        for row in filter(is_meant, switches.TABLE):
            test = tests.get(row.name, tests.get(OTHERS))
            found.append(Mutation("switches", f"switches: {use}", row.name, test))
    return found


class Runner:
    """Runs tests with a copy of the source in place of the source.

    Args:
        folder: for the copies, one a job.
        jobs: how many tests run at a time.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self._copies: SimpleQueue[Path] = SimpleQueue()
        ignored = shutil.ignore_patterns("__pycache__")
        for job in range(jobs):
            copy = folder / f"copy{job}"
            shutil.copytree(SOURCE, copy / "graphwright", ignore=ignored)
            self._copies.put(copy)

    def run(self, tests: Sequence[str], mutation: Mutation | None = None) -> tuple[int, str, float]:
        """Run tests without a rule, or with all of them.

        Returns:
            pytest's exit status, its output, and the seconds that it took.
        """
        copy = self._copies.get()
        began = time.monotonic()
        try:
            if mutation is None:
                return *_pytest(copy, tests), time.monotonic() - began
            file = copy / "graphwright" / mutation.file
            source = file.read_text()
            file.write_text(mutation.edited(source))
            try:
                return *_pytest(copy, [*tests, "-x"]), time.monotonic() - began
            finally:
                file.write_text(source)
        finally:
            self._copies.put(copy)


def _pytest(copy: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a process of its own, which has PyTorch already."""
    output = copy / "output"
    process = _PROCESSES.Process(target=_run_pytest, args=(copy, arguments, output))
    process.start()
    process.join(TIMEOUT_S if "-x" in arguments else None)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -1, f"no end after {TIMEOUT_S} s"
    return process.exitcode, output.read_text(errors="replace")


def _run_pytest(copy: Path, arguments: Sequence[str], output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # All that a mutant leaves behind is in its own folders.
    os.environ |= {"PYTHONPATH": str(copy), "GRAPHWRIGHT_CACHE_DIR": str(copy / "cache")}
    sys.path.insert(0, str(copy))
    os.chdir(ROOT)
    options = ["-q", "-rA", "--tb=no", "-n0", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    options += ["-m", "not gpu", f"--basetemp={copy / 'tmp'}"]
    import pytest

    status = pytest.main([*options, *arguments])
    sys.stdout.flush()
    os._exit(status)  # What a mutant has broken may keep the process from ending.


def reds(output: str) -> list[str]:
    """The tests that failed, from pytest's output."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def greens(output: str) -> list[str]:
    """The tests that passed."""
    return re.findall(r"^PASSED (.+?)(?: - .*)?$", output, re.MULTILINE)


def _verdict(status: int, output: str) -> str:
    """What came of a mutant: "red" if its test failed."""
    if status == FAILED and reds(output):
        return "red"
    if status == PASSED:
        return "survived"
    lines = output.strip().splitlines()
    return f"not run: {lines[-1] if lines else 'no output'}"


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
    run = [each for each in chosen if not str(each.test).startswith(SAME)]
    if not run:
        print("there is no such mutation")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), options.jobs)
        tests = list(dict.fromkeys(str(each.test) for each in run))
        status, output, took = runner.run(tests)
        passed = greens(output)
        missing = [t for t in tests if not any(p == t or p.startswith(f"{t}[") for p in passed)]
        if status != PASSED or missing:
            print("Without a mutation these do not pass:", *(reds(output) or missing), sep="\n  ")
            return 2
        print(f"{len(tests)} tests pass without a mutation, in {took:.0f} s", flush=True)
        rows = _run_all(runner, run, options.jobs)
    survived = [row for row in rows if row["outcome"] != "red"]
    print(f"{len(rows) - len(survived)} of {len(rows)} mutants are seen by their test.")
    same = [each for each in chosen if str(each.test).startswith(SAME)]
    print(f"{len(same)} rules have no consequence alone, for reasons that {TABLE.name} has.")
    if options.output is not None:
        _write(options.output, rows, same)
    return int(bool(survived))


def _run_all(runner: Runner, run: Sequence[Mutation], jobs: int) -> list[dict[str, Any]]:
    def one(mutation: Mutation) -> dict[str, Any]:
        status, output, took = runner.run([str(mutation.test)], mutation)
        row = {
            "kind": mutation.kind,
            "place": mutation.place,
            "rule": mutation.rule,
            "test": mutation.test,
            "outcome": _verdict(status, output),
            "red": reds(output),
            "seconds": round(took, 1),
        }
        text = " ".join(mutation.name.split())
        shown = textwrap.shorten(text, WIDTH - 16, placeholder="…")
        print(f"{row['outcome'][:8]:<9}{shown:<{WIDTH - 16}}{took:5.1f} s", flush=True)
        if row["outcome"] != "red":
            print(f"    {mutation.test}\n    {row['outcome']}", flush=True)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, run))


def _write(file: Path, rows: Sequence[dict[str, Any]], same: Sequence[Mutation]) -> None:
    import torch

    from bench.common.record import commit
    from graphwright.report.environment import environment

    result = {
        "schema": "graphwright.mutations",
        "schema_version": 1,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(torch.device("cpu")),
        "mutants": len(rows),
        "seen": sum(row["outcome"] == "red" for row in rows),
        "without_consequence": {each.name: str(each.test).removeprefix(SAME) for each in same},
        "rows": list(rows),
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    _PROCESSES.set_forkserver_preload(["torch.export", "pytest", "hypothesis"])
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
