"""Make the files, cached choices and pickles of a version, to be read by later versions.

Run it over a checkout of that version, whose own support for tests it uses, with PyTorch for CPUs:

    git worktree add /tmp/then VERSION
    export PYTHONPATH=/tmp/then/src:/tmp/then/tests/support:tests/artifacts
    python -m old_files.make tests/artifacts/old_files/VERSION

It writes `files`, `choices` and `pickles`. All numbers follow from formulas, so that only timings
differ from run to run, and the hashes of what holds them. Compilers write the paths of sources and
of the environment into files: run it where these say nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from chosen import choosing
from old_files import models, pickles

import graphwright as gw

# Machine code that any processor of the kind can run, so that no test of it crashes; and little.
_PORTABLE = {
    "cpp.march": "x86-64",
    "cpp.simdlen": 1,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.compile_wrapper_opt_level": "Os",
}
# As few timings as there can be, since a report holds them all.
_QUICK = {
    "graphwright.evaluation.measurement": {
        "MAX_CALLS_PER_BLOCK": 1,
        "MAX_ROUNDS": 5,
        "PAUSES_S": (),
        "PLACINGS_S": 0.0,
    },
    "graphwright.tuning.tuner": {"SCREENING_S": 0.001, "FINAL_S_EACH": 0.001},
    # What was timed on a busy machine would not be cached.
    "graphwright.report.result.Row": {"unsteady": property(lambda row: "", lambda row, why: None)},
}


def tuned(asked: models.Request) -> gw.TunedModule:
    """The model with the strategy chosen, whatever its time is; the choice is cached."""
    known = _PORTABLE if asked.strategy == "aot_inductor" else {}
    with contextlib.ExitStack() as stack:
        for place, values in _QUICK.items():
            stack.enter_context(mock.patch.multiple(place, **values))
        stack.enter_context(choosing(asked.strategy))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._inductor.config.patch(known))
        found = gw.tune(
            asked.model,
            strategies=[asked.strategy],
            isolate=False,
            progress=False,
            **asked.options,
        )
    assert found.report.chosen == asked.strategy, found.report.row(asked.strategy)
    return found


def write(out: Path, caches: Path) -> None:
    """Write everything to a folder that is not there yet; both caches are in an empty one."""
    for name in ("files", "choices"):
        (out / name).mkdir(parents=True)
    for kind, strategy in models.KINDS.items():
        assert gw.save(tuned(models.request(kind)), out / "files" / f"{kind}.gw") == strategy
        shutil.move(caches / "choices", out / "choices" / kind)
    pickles.write(out)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # What the machine's own caches hold would be written too.
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "GRAPHWRIGHT_CACHE_DIR": folder}
        write(Path(sys.argv[1]), Path(folder))
