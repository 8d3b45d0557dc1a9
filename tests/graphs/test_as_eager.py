"""What libraries read in eager mode and not in captures: one graph, or segments between reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.errors import CaptureError
from graphwright.graphs import as_eager
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.segments.tree import SegmentTree


def asked() -> bool:
    """Whether a capture is under way, as libraries ask."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a build without CUDA
        return False


def one_graph(graphed: Any) -> CapturedCall:
    [graph] = graphed.graphs
    assert isinstance(graph, CapturedCall)
    return graph


@pytest.fixture
def chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_eager, "TRIED_ON", {"cpu", "cuda"})


@pytest.fixture
def always_chosen(chosen_by_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_eager, "_BELOW", float("inf"))


def looks(x: torch.Tensor, mask: torch.Tensor, slow: int) -> torch.Tensor:
    """Where the mask masks nothing, it is left out, as transformers does it outside of captures."""
    if not asked() and mask.all():
        return x @ x
    for _ in range(slow):
        x = x + 0 * (x @ x)
    return x * mask @ x


# Many, so that nothing else on the device makes one graph of these faster. A GPU that others share
# is theirs for milliseconds after each wait.
@pytest.mark.usefixtures("chosen_by_time")
@pytest.mark.parametrize("slow", [0, 160])
def test_what_is_faster_by_what_eager_code_reads_is_captured_so(
    slow: int, device: torch.device
) -> None:
    slow = slow * 20 if device.type == "cuda" else slow
    x = torch.rand(192, 192, device=device)
    ones, some = torch.ones_like(x), (torch.rand_like(x) > 0.5).float()
    graphed = gw.graph(looks)
    for mask in (ones, ones, some, ones, some, some):
        torch.testing.assert_close(graphed(x, mask, slow), looks(x, mask, slow))
    assert (one_graph(graphed).tree is not None) == bool(slow)
    assert graphed.statistics.hits == 6


@pytest.mark.usefixtures("chosen_by_time")
def test_what_is_timed_keeps_to_the_limit_of_the_pool(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = []
    begin = gw.MemoryPool.__init__

    def noted(self: gw.MemoryPool, limit: Any = None, device: Any = None, **more: Any) -> None:
        limits.append(limit)
        begin(self, limit, device, **more)

    x = torch.rand(192, 192, device=device)
    call = x, torch.ones_like(x), 40
    pool = gw.MemoryPool("64MiB")
    graphed = gw.graph(looks, pool=pool)
    monkeypatch.setattr(gw.MemoryPool, "__init__", noted)
    for _ in range(2):
        torch.testing.assert_close(graphed(*call), looks(*call))
    assert limits == [64 << 20]


@pytest.mark.usefixtures("chosen_by_time")
def test_capture_makes_one_graph_of_what_eager_code_reads(device: torch.device) -> None:
    x = torch.rand(8, 8, device=device)
    with gw.capture(looks, x, torch.ones_like(x), 40) as graph:
        assert graph.tree is None
        mask = (torch.rand_like(x) > 0.5).float()
        torch.testing.assert_close(graph(x, mask, 40), looks(x, mask, 40))


@pytest.mark.usefixtures("chosen_by_time")
def test_what_changes_with_what_it_reads_is_not_timed(device: torch.device) -> None:
    def counts(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen += 1
        return looks(x, x, 40)

    x, seen = torch.rand(8, 8, device=device), torch.zeros(1, device=device)
    graphed = gw.graph(counts)
    for _ in range(3):
        torch.testing.assert_close(graphed(x, seen), looks(x, x, 40))
    assert seen.item() == 3


@pytest.mark.usefixtures("always_chosen")
def test_masks_that_mask_nothing_are_left_out_where_that_is_faster(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    small: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(intermediate_size=64, **small))
    model = model.eval().to(device)
    ids = torch.randint(5, 1000, (2, 16), device=device)
    graphed = gw.graph(model)
    for pads in (0, 0, 6, 6, 3, 0, 16):
        mask = torch.ones_like(ids)
        mask[1, 16 - pads :] = 0
        with torch.no_grad():
            found, expected = graphed(ids, attention_mask=mask), model(ids, attention_mask=mask)
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert one_graph(graphed).tree is not None
    assert "all" in graphed.explain()


def slow_with(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return looks(x, mask, 5)


class Marks(nn.Module):
    """Leaves something behind where it leaves the mask out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        if asked() or not mask.all():
            return slow_with(x, mask)
        if self.how == "counts":
            self.calls += 1
        elif self.how == "keeps":
            self.last = x + 1
        elif self.how == "draws":
            return x @ x + 0 * torch.rand_like(x)
        elif self.how == "writes":
            seen += 1
        return x @ x


@pytest.mark.usefixtures("always_chosen")
@pytest.mark.parametrize("how", ["counts", "keeps", "draws", "writes"])
def test_what_changes_only_in_eager_mode_is_not_timed(how: str, device: torch.device) -> None:
    x, seen = torch.rand(64, 64, device=device), torch.zeros(1, device=device)
    mask = torch.ones_like(x)
    left = []
    for _ in range(2):
        model, state = Marks(how).eval(), torch.get_rng_state()
        graphed = gw.graph(model)
        seen.zero_()
        for count in range(1, 4):
            with torch.no_grad():
                torch.testing.assert_close(graphed(x, mask, seen), x @ x)
            assert how != "writes" or seen.item() == count
        for graph in graphed.graphs:
            assert isinstance(graph, CapturedCall)
            assert graph.tree is None
        left.append((model.calls, torch.equal(torch.get_rng_state(), state)))
        as_eager.TRIED_ON = frozenset()  # type: ignore[misc]  # the fixture puts it back
    assert left[0] == left[1]


@pytest.mark.usefixtures("always_chosen")
def test_what_reads_more_than_truth_values_is_one_graph(device: torch.device) -> None:
    def unpads(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not asked() and int(mask.sum()) == mask.numel():
            return x @ x
        return slow_with(x, mask)

    x = torch.rand(64, 64, device=device)
    graphed = gw.graph(unpads)
    for count in range(40):
        mask = (torch.arange(64 * 64, device=device).view(64, 64) >= count).float()
        torch.testing.assert_close(graphed(x, mask), unpads(x, mask))
    assert graphed.statistics.hits == 40
    assert one_graph(graphed).tree is None


@pytest.mark.usefixtures("always_chosen")
def test_what_only_checks_its_arguments_in_eager_mode_is_not_timed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(x: torch.Tensor) -> torch.Tensor:
        if not asked() and not (x >= 0).all():
            raise ValueError("below 0")
        return x @ x

    monkeypatch.setattr(as_eager, "is_faster_as_eager", lambda *given: pytest.fail("It was timed."))
    x = torch.rand(8, 8, device=device)
    graphed = gw.graph(checks)
    for _ in range(3):
        torch.testing.assert_close(graphed(x), x @ x)
    assert graphed.statistics.hits == 3


@pytest.mark.usefixtures("always_chosen")
def test_segments_that_are_given_up_give_way_to_one_graph(device: torch.device) -> None:
    x = torch.rand(64, 64, device=device)
    ones, some = torch.ones_like(x), (torch.rand_like(x) > 0.5).float()
    graphed = gw.graph(slow_with)
    graphed(x, ones)
    tree = one_graph(graphed).tree
    assert tree is not None
    tree.given_up = CaptureError("For a test.")
    for mask in (ones, some, ones, some):
        torch.testing.assert_close(graphed(x, mask), slow_with(x, mask))
    assert one_graph(graphed).tree is None
    assert graphed.statistics.hits == 4


@pytest.mark.usefixtures("always_chosen")
def test_segments_that_cannot_be_recorded_give_way_to_one_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, times = SegmentTree.record, [0]

    def fails(self: SegmentTree, *given: Any) -> Any:
        times[0] += 1
        if times[0] > 1:  # Not where it is timed.
            raise CaptureError("For a test.")
        return record(self, *given)

    x = torch.rand(64, 64, device=device)
    monkeypatch.setattr(SegmentTree, "record", fails)
    graphed = gw.graph(slow_with)
    for mask in (torch.ones_like(x), (torch.rand_like(x) > 0.5).float()):
        torch.testing.assert_close(graphed(x, mask), slow_with(x, mask))
    assert times[0] == 2
    assert one_graph(graphed).tree is None
    assert graphed.statistics.hits == 2


@pytest.mark.usefixtures("always_chosen")
def test_where_nothing_is_captured_on_the_way_one_graph_serves_all_values(
    device: torch.device,
) -> None:
    x = torch.rand(64, 64, device=device)
    ones, some = torch.ones_like(x), (torch.rand_like(x) > 0.5).float()
    graphed = gw.graph(slow_with, on_miss="error")
    graphed.prepare([(x, ones)])
    for mask in (ones, some):
        torch.testing.assert_close(graphed(x, mask), slow_with(x, mask))
    assert graphed.statistics.captures == 1
    assert one_graph(graphed).tree is None


@pytest.mark.usefixtures("always_chosen")
def test_nothing_is_left_of_what_was_timed(device: torch.device) -> None:
    x = torch.rand(64, 64, device=device)
    pools: list[gw.MemoryPool] = []
    begin = gw.MemoryPool.__init__

    def noted(self: gw.MemoryPool, *given: Any, **more: Any) -> None:
        pools.append(self)
        begin(self, *given, **more)

    pool = gw.MemoryPool()
    graphed = gw.graph(slow_with, pool=pool)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gw.MemoryPool, "__init__", noted)
        graphed(x, torch.ones_like(x))
    [trial] = pools
    assert trial.closed
    assert trial.reserved == 0


def test_other_writes_in_eager_mode_than_in_a_capture_are_refused(device: torch.device) -> None:
    def notes(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        if not asked():
            seen += 1
        return x * 2

    x, seen = torch.rand(4, device=device), torch.zeros(1, device=device)
    with pytest.raises(CaptureError, match="writes to other arguments"):
        gw.capture(notes, x, seen)
    assert seen.item() == 0
