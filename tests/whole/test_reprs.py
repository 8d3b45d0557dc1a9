"""What a notebook's last line shows: one line that says how it goes."""

from __future__ import annotations

import re

import torch
from chosen import choosing
from torch import nn

import graphwright as gw

X = torch.randn(2, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def test_graphs_say_how_many_they_are_and_what_they_answered() -> None:
    graphed = gw.graph(net())
    assert repr(graphed) == "GraphedModule(Sequential, 0 graphs, 0 B, 0 hits)"
    with torch.no_grad():
        for _ in range(3):
            graphed(X)
    assert re.fullmatch(r"GraphedModule\(Sequential, 1 graph, .*B, 3 hits\)", repr(graphed))
    graphed(X.clone().requires_grad_())
    assert repr(graphed).endswith(", 3 hits, 1 eager)")
    graphed.close()
    assert repr(graphed).endswith(", 3 hits, 1 eager, closed)")

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert repr(gw.graph(double)).startswith("GraphedCallable(double, 0 graphs, ")


def test_a_tuned_module_says_what_answers_and_how_fast() -> None:
    with choosing("torchscript"):
        tuned = gw.tune(
            net(), (X,), strategies=["torchscript"], remember=False, progress=False, isolate=False
        )
    with torch.no_grad():
        tuned(X)
    what = r"TunedModule\(Sequential, torchscript, [\d.]+× eager, 1 call\)"
    assert re.fullmatch(what, repr(tuned)), repr(tuned)


def test_a_fused_module_says_what_was_changed() -> None:
    fused = gw.fuse(net(), (X,))
    assert re.fullmatch(r"FusedModule\(Sequential, \d+ changes?, 0 calls\)", repr(fused))


def test_a_module_that_holds_one_shows_it_in_one_line() -> None:
    whole = nn.Sequential(gw.graph(net()), nn.Linear(8, 2))
    assert "(0): GraphedModule(Sequential, 0 graphs, " in repr(whole)


def test_notebooks_show_graphs_and_how_calls_went_as_tables() -> None:
    class Hostile(nn.Linear):
        pass

    Hostile.__name__ = "<img onerror=x>"
    graphed = gw.graph(Hostile(8, 8).eval())
    with torch.no_grad():
        graphed(X)
    graphed(X.clone().requires_grad_())
    shown = graphed._repr_html_()
    assert "<strong>GraphedModule of &lt;img onerror=x&gt;</strong>" in shown
    assert "<th>calls answered by graphs</th><td>1</td>" in shown
    assert "<th>eager calls: " in shown

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert "GraphedCallable of double" in gw.graph(double)._repr_html_()


def test_notebooks_show_what_a_tuned_module_runs() -> None:
    with choosing("torchscript"):
        tuned = gw.tune(
            net(), (X,), strategies=["torchscript"], remember=False, progress=False, isolate=False
        )
    with torch.no_grad():
        tuned(X)
    shown = tuned._repr_html_()
    assert "<strong>TunedModule of Sequential</strong>" in shown
    assert "<th>strategy</th><td>torchscript</td>" in shown
    assert "<th>as fast as eager</th>" in shown
    assert "2×8 float32" in shown
