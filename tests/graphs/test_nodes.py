"""nodes(): what a captured graph consists of, on both recorders, and how it is shown."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it

import graphwright as gw
from graphwright.graphs.cuda import driver
from graphwright.graphs.cuda.node_times import Span, spans_of, with_times
from graphwright.graphs.inspection.node import arranged
from graphwright.graphs.inspection.table import short_name

HERE = Path(__file__).name


class Branches(nn.Module):
    """Four heads of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        return torch.cat([head(x) for head in self.heads], 1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(2, 5, 16))


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), (3, 16)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 12, 12)),
    "residual": (Residual, (2, 3, 8, 8)),
    "branches": (Branches, (2, 16)),
    "attention": (Attention, (2, 5, 16)),
    "rnn": (lambda: nn.RNN(16, 8, batch_first=True), (2, 5, 16)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Softmax(-1)), (4, 16)),
    "sort": (lambda: lambda x: x.sort(-1).values.cumsum(-1), (4, 16)),
    "dropout": (lambda: lambda x: F.dropout(x, 0.5, training=True) * 2, (4, 16)),
    "fill": (lambda: lambda x: torch.zeros_like(x).index_fill_(1, torch.arange(
        2, device=x.device), 1.0) + x, (4, 16)),
}  # fmt: skip


def captured(name: str, device: torch.device) -> gw.Graph:
    make, shape = MODELS[name]
    model = make()
    if isinstance(model, nn.Module):
        model = model.eval().to(device)
    return gw.capture(model, torch.randn(shape, device=device))


@pytest.mark.parametrize("name", MODELS)
def test_nodes_are_those_of_the_recorder(name: str, device: torch.device) -> None:
    with captured(name, device) as graph:
        nodes = graph.nodes()
        assert len(nodes) == graph.node_count > 0
        for place, node in enumerate(nodes):
            assert node.index == place
            assert all(before < place for before in node.predecessors)
        if device.type == "cuda":
            raw = graph._ready()._graph.raw_cuda_graph()  # type: ignore[union-attr]  # the CUDA one
            assert len(nodes) == driver.node_count(raw)
            copies = [node for node in nodes if node.name.endswith((" in", " out"))]
            assert len(copies) >= 2
            for node in nodes:
                if node.kind == "kernel":
                    assert node.name
                    assert node.grid is not None
                    assert node.block is not None
                    assert node.registers is None or node.registers > 0


@pytest.mark.parametrize("name", MODELS)
def test_kernels_have_operations_and_lines(name: str, device: torch.device) -> None:
    with captured(name, device) as graph:
        nodes = graph.nodes()
        assert not nodes.notes
        work = [n for n in nodes if n.kind in ("kernel", "operation", "memset")]
        assert work
        assert all(node.operation for node in work)
        own = [node for node in work if node.line is not None and HERE in node.line]
        if name in ("residual", "branches", "attention", "sort", "dropout", "fill"):
            assert own == work


def test_modules_are_named_by_their_path(device: torch.device) -> None:
    with captured("branches", device) as graph:
        modules = {node.module for node in graph.nodes()}
    assert {"trunk", "", *(f"heads.{n}.{part}" for n in range(4) for part in (0, 1))} <= modules


def test_independent_branches_are_told_apart_on_the_cpu() -> None:
    """On a GPU one stream is captured: its nodes are one chain."""
    nodes = captured("branches", torch.device("cpu")).nodes()
    assert nodes.branches == 4
    last = nodes[len(nodes) - 1]
    assert last.name.startswith("aten.cat")
    assert len(last.predecessors) == 4
    assert {nodes[before].branch for before in last.predecessors} == {0, 1, 2, 3}
    for head in range(4):
        mine = [node for node in nodes if (node.module or "").startswith(f"heads.{head}")]
        assert len({node.branch for node in mine}) == 1


def test_a_write_comes_between_what_reads_before_and_after() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y + 1
        y.add_(z)
        return y.exp()

    nodes = gw.capture(work, torch.ones(3)).nodes()
    names = [node.name.split(".")[1] for node in nodes]
    assert names == ["mul", "add", "add_", "exp"]
    assert nodes[2].predecessors == (0, 1)
    assert nodes[3].predecessors == (2,)


def test_memory_that_is_used_again_makes_no_edge() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for _ in range(4):
            y = x * 2
            total = total + y.sum()
            del y
        return total

    nodes = gw.capture(work, torch.ones(1000)).nodes()
    for node in nodes:
        if node.name == "aten.mul.Tensor":
            assert node.predecessors == ()


def test_segments_are_listed_side_by_side(device: torch.device) -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            if bool((x > 0).all()):
                x = x + 1
            return x - 3

    graphed = gw.graph(Asks().eval())
    graphed(torch.ones(4, device=device))
    (graph,) = graphed.graphs
    nodes = graph.nodes()
    assert {node.segment for node in nodes} == {0, 1}
    assert any(node.line and HERE in node.line for node in nodes)
    assert "2 segments" in str(nodes)
    graphed.close()


def test_a_block_has_lines_if_it_is_annotated(device: torch.device) -> None:
    x = torch.ones(8, device=device)
    with gw.capturing(device=device, annotate=True) as graph:
        y = x * 2
        y.exp()
    nodes = graph.nodes()
    work = [node for node in nodes if node.operation]
    assert [node.operation for node in work] == ["aten.mul.Tensor", "aten.exp.default"]
    assert all(node.line is not None and HERE in node.line for node in work)
    with gw.capturing(device=device) as plain:
        _ = x * 2
    assert "annotate=True" in plain.nodes().notes[0]
    assert all(node.line is None for node in plain.nodes())


def test_ordinary_captures_observe_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a capture looked for lines")

    monkeypatch.setattr("graphwright.graphs.inspection.origins.Origins.of", refuse)
    with captured("mlp", device) as graph:
        assert graph.node_count


def test_nodes_leave_graph_and_model_alone(device: torch.device) -> None:
    norm = nn.BatchNorm1d(4).to(device)
    x = torch.randn(8, 4, device=device)
    with torch.no_grad():
        graph = gw.capture(norm.train(), x)
        before, held = norm.running_mean.clone(), graph.pool.reserved  # type: ignore[union-attr]  # a tensor
        graph.nodes()
        assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]  # a tensor
        assert graph.pool.reserved == held
        expected = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        assert torch.allclose(graph(x), expected, atol=1e-5)


def test_a_closed_graph_has_no_nodes(device: torch.device) -> None:
    graph = captured("mlp", device)
    graph.close()
    with pytest.raises(gw.CaptureError, match="closed"):
        graph.nodes()


def test_the_driver_s_own_dump_is_written_on_a_gpu(device: torch.device, tmp_path: Path) -> None:
    with captured("mlp", device) as graph:
        if device.type == "cpu":
            with pytest.raises(gw.CaptureError, match="no driver"):
                graph.dump(tmp_path / "graph.dot")
        else:
            graph.dump(tmp_path / "graph.dot")
            assert "digraph" in (tmp_path / "graph.dot").read_text()


def test_a_timed_replay_says_when_each_node_ran(device: torch.device) -> None:
    with captured("mlp", device) as graph:
        nodes = graph.nodes(timed=True)
        work = [n for n in nodes if n.kind in ("kernel", "operation")]
        assert all(node.duration_us is not None and node.duration_us > 0 for node in work)
        starts = [node.start_us for node in work]
        assert starts == sorted(starts)  # type: ignore[type-var]  # all are numbers
        assert nodes.idle_us is not None
        assert "µs idle" in str(nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_nodes_agree_with_a_trace_of_cupti(name: str) -> None:
    device = torch.device("cuda")
    with captured(name, device) as graph:
        nodes = graph.nodes(timed=True)
        assert not nodes.notes
        traces = [spans_of(graph.replay, device) for _ in range(3)]
        spans = traces[-1]
        timed = [node for node in nodes if node.duration_us is not None]
        totals = [sum(span.duration_us for span in trace) for trace in traces]
        mine = sum(node.duration_us or 0.0 for node in timed)
        assert mine == pytest.approx(statistics.median(totals), rel=0.1), totals
        assert [node.kind for node in timed] == [span.kind for span in spans]
        for node, span in zip(timed, spans, strict=True):
            if node.kind == "kernel":
                assert node.name.split() == span.name.split() or short_name(
                    node.name
                ) == short_name(span.name)


@pytest.mark.gpu
def test_streams_of_the_user_are_branches() -> None:
    x = torch.randn(256, 256, device="cuda")
    side = torch.cuda.Stream()
    with gw.capturing(annotate=True) as graph:
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = (y + 1).exp()
        w = (y - 1).cos()
        torch.cuda.current_stream().wait_stream(side)
        _ = z + w
    nodes = graph.nodes()
    assert nodes.branches == 2
    assert len({n.branch for n in nodes if n.operation in ("aten.exp.default",)}) == 1
    graph.replay()


# How they are shown.


def made(*edges: tuple[int, ...], **more: Any) -> list[gw.Node]:
    """Nodes with these predecessors."""
    return [gw.Node(n, "kernel", f"k{n}", before, **more) for n, before in enumerate(edges)]


def test_branches_are_chains_that_meet() -> None:
    diamond = arranged(made((), (0,), (0,), (1,), (2,), (3, 4)))
    assert [node.branch for node in diamond] == [0, 0, 1, 0, 1, 0]
    unordered = [gw.Node(0, "kernel", "last", (1,)), gw.Node(1, "kernel", "first")]
    assert [node.name for node in arranged(unordered)] == ["first", "last"]
    assert [node.predecessors for node in arranged(unordered)] == [(), (0,)]


def test_numbers_of_branches_that_ended_are_used_again() -> None:
    twice = arranged(made((), (0,), (0,), (1, 2), (3,), (3,), (4, 5)))
    assert [node.branch for node in twice] == [0, 0, 1, 0, 0, 1, 0]


def test_what_depends_on_nothing_begins_a_branch() -> None:
    towers = arranged(made((), (0,), (), (2,), ()))
    assert [node.branch for node in towers] == [0, 0, 1, 1, 2]


def test_a_table_is_80_columns_wide() -> None:
    nodes = captured("attention", torch.device("cpu")).nodes(timed=True)
    lines = str(nodes).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == len(nodes) + 2
    assert "branch" in lines[1]
    assert f"{HERE}:" in str(nodes)


def test_json_holds_every_node() -> None:
    nodes = captured("mlp", torch.device("cpu")).nodes()
    read = json.loads(nodes.to_json())
    assert (read["schema"], read["version"]) == ("graphwright.nodes", 1)
    assert [each["operation"] for each in read["nodes"]] == [node.operation for node in nodes]
    assert read["nodes"][1]["predecessors"] == [0]
    assert read["nodes"][0]["registers"] is None


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_svg_is_laid_out_by_graphviz() -> None:
    nodes = captured("branches", torch.device("cpu")).nodes()
    picture = nodes.to_svg()
    assert picture.count('class="node"') == len(nodes)
    assert picture.count('class="edge"') == sum(len(node.predecessors) for node in nodes)
    assert "heads.3.0" in picture


def test_a_name_with_quotes_is_drawn() -> None:
    odd = gw.Nodes('a "b" \\', [gw.Node(0, "kernel", 'k<"x">(int)', line="a\\b.py:1")])
    assert '\\"b\\" \\\\' in odd.to_dot()


def test_without_graphviz_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(gw.GraphwrightError, match="graphviz"):
        captured("mlp", torch.device("cpu")).nodes().to_svg()


def test_idle_gaps_are_shown() -> None:
    one = gw.Node(0, "kernel", "a", start_us=0.0, duration_us=2.0)
    two = gw.Node(1, "kernel", "b", (0,), start_us=5.0, duration_us=1.0)
    nodes = gw.Nodes("two", [one, two])
    assert nodes.idle_us == 3.0
    assert "3.0 µs idle" in nodes.to_dot()
    assert "3.0 µs at work, 3.0 µs idle" in str(nodes)


# Times of a trace, matched to nodes.


def spans(*names: str) -> list[Span]:
    return [Span("kernel", name, 10.0 + n, 0.5) for n, name in enumerate(names)]


def test_a_trace_is_matched_by_name_and_edges() -> None:
    nodes = [
        gw.Node(0, "kernel", "f<a, b>(int)"),
        gw.Node(1, "kernel", "g", (0,)),
        gw.Node(2, "kernel", "g", (0,)),
        gw.Node(3, "empty", "empty", (1, 2)),
        gw.Node(4, "kernel", "g", (3,)),
    ]
    timed = with_times(nodes, spans("f<a,b>(int)", "g", "g", "g"))
    assert timed is not None
    assert [node.start_us for node in timed] == [0.0, 1.0, 2.0, None, 3.0]


def test_a_trace_that_does_not_match_gives_no_times() -> None:
    nodes = made((), (0,))
    assert with_times(nodes, spans("k0")) is None
    assert with_times(nodes, spans("k0", "other")) is None
    timed = with_times(nodes, spans("k1"), {0})
    assert timed is not None
    assert [node.start_us for node in timed] == [None, 0.0]


def test_short_names_leave_templates_out() -> None:
    names = [
        "void at::native::vectorized_elementwise_kernel<4, at::F<float>>(int, at::F<float>)",
        "void (anonymous namespace)::softmax_warp<float, 7>(float*, int)",
        "triton_poi_fused_0",
    ]
    short = ["vectorized_elementwise_kernel", "softmax_warp", "triton_poi_fused_0"]
    assert [short_name(name) for name in names] == short
    assert all(a != b for a, b in pairwise(short))
