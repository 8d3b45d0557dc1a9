"""tune() and the choice cache: the second run answers from it, and verifies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import planted
import pytest
import torch
from planted import Planted, Small
from torch import nn

import graphwright as gw
from graphwright.report.result import Status
from graphwright.strategies import torchscript
from graphwright.tuning import choice_cache

NAMES = ["eager:no_grad", "torchscript:freeze"]


def entries() -> list[Path]:
    return sorted(choice_cache.folder().glob("*.json"))


def test_the_second_run_recalls_the_choice_and_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    first = gw.tune(model, (x,), strategies=NAMES).report
    assert not first.recalled
    timed = mock.Mock(side_effect=AssertionError("nothing is timed again"))
    for where in ("trial.interleave_until_steady", "final_rounds.interleave_until_steady"):
        monkeypatch.setattr(f"graphwright.tuning.{where}", timed)
    second = gw.tune(model, (x,), strategies=NAMES)
    timed.assert_not_called()
    assert second.report.recalled == first.created
    assert second.report.rows == first.rows
    assert second.report.chosen == first.chosen
    assert "From the choice cache" in str(second.report)
    torch.testing.assert_close(second(x), model(x).detach())
    assert second.calls == {"tuned": 1}


@pytest.mark.slow
def test_other_weights_are_no_other_model_but_another_width_or_input_is() -> None:
    x = torch.randn(4, 16)
    gw.tune(Small().eval(), (x,), strategies=NAMES)
    assert gw.tune(Small().eval(), (x,), strategies=NAMES).report.recalled
    assert not gw.tune(Small().eval(), (x[:3],), strategies=NAMES).report.recalled
    wide = torch.randn(4, 8)
    assert not gw.tune(Small(8).eval(), (wide,), strategies=NAMES).report.recalled
    assert not gw.tune(Small().eval(), (x,), strategies=NAMES[:1]).report.recalled
    with torch.no_grad():
        assert not gw.tune(Small().eval(), (x,), strategies=NAMES).report.recalled
    assert len(entries()) == 5


@pytest.mark.slow
def test_nothing_is_remembered_where_that_is_not_wanted() -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    gw.tune(model, (x,), strategies=NAMES, remember=False)
    # A strategy of the user's own has no name that says what it does.
    gw.tune(model, (x,), strategies=[Planted("own", lambda m: torch.no_grad()(m))])
    assert not entries()


def test_a_choice_that_is_wrong_by_now_is_tuned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    first = gw.tune(model, (x,), strategies=["torchscript:freeze"]).report
    (entry,) = entries()
    chosen = f'"chosen": "{first.chosen}"'
    entry.write_text(entry.read_text().replace(chosen, '"chosen": "torchscript:freeze"'))
    build = torchscript.TorchScript.build

    def spoiled(self: object, module: nn.Module, args: object, kwargs: object) -> object:
        built = build(self, module, args, kwargs)  # type: ignore[arg-type]  # as it was
        call = built.call
        built.call = lambda *a, **k: call(*a, **k) * 1.01
        return built

    monkeypatch.setattr(torchscript.TorchScript, "build", spoiled)
    again = gw.tune(model, (x,), strategies=["torchscript:freeze"]).report
    assert not again.recalled
    assert again.chosen == "eager"
    assert any("no longer right" in note for note in again.notes)
    row = again.row("torchscript:freeze")
    assert row is not None
    assert row.status is Status.WRONG


class Masked(nn.Module):
    """A mean of what is not masked: NaN where nothing is left."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask[:, None]).sum(0) / mask.sum()


def test_a_choice_that_was_verified_with_less_is_no_choice_for_what_can_be_verified() -> None:
    x, ones = torch.randn(8, 16), torch.ones(8, dtype=torch.long)
    first = gw.tune(Masked().eval(), (x, ones), strategies=NAMES).report
    assert first.left_out == ["args[1] of zeros"]
    assert gw.tune(Masked().eval(), (x, ones), strategies=NAMES).report.recalled
    mixed = ones.clone()
    mixed[5:] = 0
    second = gw.tune(Masked().eval(), (x, mixed), strategies=NAMES).report
    assert not second.recalled
    assert second.left_out == []
    assert "The cached choice was not verified with args[1] of zeros: tuned again." in second.notes
    # What was verified with everything is good for both.
    assert gw.tune(Masked().eval(), (x, mixed), strategies=NAMES).report.recalled
    assert gw.tune(Masked().eval(), (x, ones), strategies=NAMES).report.recalled


@pytest.mark.slow
def test_a_broken_entry_is_ignored_with_a_warning() -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    gw.tune(model, (x,), strategies=NAMES)
    (entry,) = entries()
    entry.write_text(entry.read_text()[:1000])
    with pytest.warns(RuntimeWarning, match=entry.name):
        assert not gw.tune(model, (x,), strategies=NAMES).report.recalled
    assert gw.tune(model, (x,), strategies=NAMES).report.recalled


def test_an_interrupted_run_is_not_remembered() -> None:
    class Interrupts(Planted):
        pass

    def stop(_: nn.Module) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gw.tune(Small().eval(), (torch.randn(4, 16),), strategies=[Interrupts("stop", stop)])
    assert not entries()


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import graphwright.evaluation.measurement, torch
from planted import Small
import graphwright as gw
gw.evaluation.measurement.WARMUP_S = 0.0
gw.tuning.tuner.SCREENING_S = gw.tuning.tuner.FINAL_S_EACH = 0.0
while True:
    x = torch.randn(4, 16)
    gw.tune(Small().eval(), (x,), strategies=["eager:no_grad"], isolate=False)
    for entry in gw.tuning.choice_cache.folder().glob("*.json"):
        entry.unlink(missing_ok=True)
    print("tuned", flush=True)
"""


@pytest.mark.slow
def test_a_caller_that_is_killed_leaves_no_broken_entry() -> None:
    path = [str(Path(gw.__file__).parent.parent), str(Path(planted.__file__).parent)]
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(path=path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        # Any warning is an error here.
        gw.tune(Small().eval(), (torch.randn(4, 16),), strategies=["eager:no_grad"])
