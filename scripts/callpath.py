"""The way of a call of a known shape: which files it passes, and how many Python frames it makes.

    scripts/callpath            print the table
    scripts/callpath --paths    print also the files in their order
    scripts/callpath --check    fail if docs/explanation/architecture.md shows another table
    scripts/callpath --write    put the table there

The calls are answered by what was captured for them on the CPU recorder, which stands for a
device: what is below it is left out. With another version's sources in PYTHONPATH it tells of that.

Files are those of graphwright that a call has entered when the recorder begins, and the
recorder's. A climb is a call into a file that waits for the calling one, such as a callback. Frames
are those of graphwright's functions, of generated ones too, until the call returns; checks are made
in Python. Comprehensions do not count, since newer versions of Python make no frames of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["GRAPHWRIGHT_COMPILED_CHECKS"] = "0"

import torch
from torch import nn

import graphwright as gw
from graphwright.artifacts.tuned_module import Origin, assemble
from graphwright.calls.signature import CallSignature
from graphwright.strategies.registry import parse_candidates

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- scripts/callpath -->", "<!-- /scripts/callpath -->"
SOURCE = str(Path(gw.__file__).parent) + os.sep
RECORDER = os.path.join("graphs", "cpu", "")
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
# Calls before the one that is looked at: by then every table knows it.
_WARM = 6


@dataclass
class CallPath:
    """The way of one call.

    Attributes:
        files: that it has entered when the recorder begins, in their order.
        climbs: calls into a file that waits for the calling one: from which, and to which.
        frames: of Python functions until it returns.
        recorded: whether the recorder has run.
    """

    files: list[str] = field(default_factory=list)
    climbs: list[tuple[str, str]] = field(default_factory=list)
    frames: int = 0
    recorded: bool = False

    @property
    def depth(self) -> int | None:
        """How many files it passes, the recorder's too; None if there is none below."""
        return len(self.files) + 1 if self.recorded else None


def path_of(call: Callable[[], object]) -> CallPath:
    """The way of a call that was made before."""
    found = CallPath()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        generated = code.co_filename.startswith("<")
        ours = generated or code.co_filename.startswith(SOURCE)
        if event != "call" or not ours or code.co_name in _COMPREHENSIONS:
            return
        files = _files_of(frame)
        if not files or any(file.startswith(RECORDER) for file in files[1 - generated :]):
            return
        file = files[0]
        if file.startswith(RECORDER):
            found.recorded = True
            return
        found.frames += 1
        if not found.recorded and file not in found.files:
            found.files.append(file)
        if not generated and len(files) > 1 and file != files[1] and file in files[1:]:
            found.climbs.append((files[1], file))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def _files_of(frame: FrameType) -> list[str]:
    """Our files of a frame and of those that wait for it; generated code has none."""
    files: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        if name.startswith(SOURCE):
            files.append(name.removeprefix(SOURCE))
        at = at.f_back
    return files


def calls() -> dict[str, Callable[[], object]]:
    """A call of each kind, by what answers it."""
    torch.manual_seed(0)
    x, less = torch.randn(4, 8), torch.randn(3, 8)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()

    graphed = gw.graph(model())
    with torch.no_grad():
        buckets = gw.graph(model(), buckets=gw.Buckets(batch=[4, 8]))
    fused = gw.fuse(model(), (x,))
    tuned = _tuned(model(), x)
    trained = gw.make_graphed_callables(model().train(), (x,))
    quiet = torch.no_grad()
    return {
        "graph()": lambda: quiet_call(quiet, graphed, x),
        "graph(buckets=), a bucket's size": lambda: quiet_call(quiet, buckets, x),
        "graph(buckets=), padded": lambda: quiet_call(quiet, buckets, less),
        "fuse()": lambda: quiet_call(quiet, fused, x),
        "tune(), fused+graph": lambda: quiet_call(quiet, tuned, x),
        "make_graphed_callables()": lambda: trained(x),
    }


def quiet_call(quiet: Any, function: Callable[..., Any], x: torch.Tensor) -> Any:
    """A call without gradients."""
    with quiet:
        return function(x)


def _tuned(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    """What tune() gives where `fused+graph` is chosen, as it is on GPUs."""
    (candidate,) = parse_candidates(["fused+graph"], ())
    report = gw.tune(model, (x,), strategies=["eager"], isolate=False, remember=False).report
    return assemble(
        model,
        dataclasses.replace(report, chosen=candidate.name),
        [CallSignature.of((x,), {})],
        Origin(candidate, [candidate.build(model, (x,), {})], (), x.device),
        pure=True,
        same_under_no_grad=True,
    )


def paths() -> dict[str, CallPath]:
    """The way of a call of each kind."""
    found = {}
    for name, call in calls().items():
        for _ in range(_WARM):
            call()
        found[name] = path_of(call)
    return found


def table(found: dict[str, CallPath]) -> str:
    """All ways, in Markdown."""
    lines = ["| a call that is answered by | files down to the recorder | climbs | frames |"]
    lines += ["|---|---:|---:|---:|"]
    for name, path in found.items():
        files = "–" if path.depth is None else str(path.depth)
        lines.append(f"| `{name}` | {files} | {len(path.climbs)} | {path.frames} |")
    return "\n".join(lines)


def main() -> int:
    """Print, check or write the table; 1 if the page shows another one."""
    parser = argparse.ArgumentParser(prog="scripts/callpath")
    for option, text in (
        ("paths", "print the files, too"),
        ("check", "only see whether the page shows this table"),
        ("write", "put it into the page"),
    ):
        parser.add_argument(f"--{option}", action="store_true", help=text)
    options, found = parser.parse_args(), paths()
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    shown, _, behind = rest.partition(END)
    if options.write:
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{behind}", encoding="utf-8")
    if options.check:
        if shown.strip() == table(found):
            return 0
        print(f"{PAGE.name} shows another table; run scripts/callpath --write")
        return 1
    print(table(found))
    for name, path in found.items() if options.paths else ():
        print(f"\n{name}: {', '.join(path.files)}")
        print("\n".join(f"  from {a} up to {b}" for a, b in path.climbs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
