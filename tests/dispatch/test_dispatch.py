"""graph(): policies, statistics, prepare, audit. What goes wrong is in hazards.py."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import nn

import graphwright as gw


def model(device: torch.device | str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device).eval()


def test_one_graph_per_signature(device: torch.device) -> None:
    net = model(device)
    graphed = gw.graph(net)
    for n in (1, 2, 1, 3, 2, 1):
        x = torch.randn(n, 8, device=device)
        torch.testing.assert_close(graphed(x), net(x).detach())
    assert graphed.statistics.captures == graphed.statistics.graphs == 3
    assert graphed.statistics.hits == 6
    assert graphed.statistics.eager == {}
    text = graphed.explain()
    assert "3 graphs" in text
    assert "Sequential(2×8)" in text


@pytest.mark.parametrize("policy", ["eager", "error"])
def test_only_what_was_prepared_is_answered(policy: Any) -> None:
    net = model()
    graphed = gw.graph(net, on_miss=policy).prepare([(torch.randn(2, 8),)], progress=True)
    x = torch.randn(2, 8)
    torch.testing.assert_close(graphed(x), net(x).detach())
    other = torch.randn(3, 8)
    if policy == "error":
        with pytest.raises(gw.SignatureError, match=r"args\[0\] is \(3, 8\)"):
            graphed(other)
    else:
        torch.testing.assert_close(graphed(other), net(other).detach())
        assert graphed.statistics.eager == {"no graph fits": 1}
        assert "(3, 8)" in graphed.explain()


def test_prepare_takes_positional_and_keyword_arguments() -> None:
    graphed = gw.graph(lambda a, *, b: a - b)
    a, b = torch.ones(2), torch.zeros(2)
    graphed.prepare([((a,), {"b": b}), ((a,), {"b": b})])
    assert graphed.statistics.graphs == 1
    graphed(a, b=b)
    assert graphed.statistics.captures == 1
    named = gw.graph(lambda a, b: a - b)
    named.prepare([{"a": a, "b": b}, (a, b)])
    assert named.statistics.graphs == 2
    with pytest.raises(gw.OptionError, match=r"write \(x,\)"):
        graphed.prepare([a])  # type: ignore[list-item]


def test_a_failing_prepare_captures_nothing() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] < 3 else x * x.sum().item()

    pool = gw.MemoryPool()
    graphed = gw.graph(work, pool=pool, breaks="never")
    with pytest.raises(gw.CaptureError, match="item"):
        graphed.prepare([(torch.ones(2),), (torch.ones(3),)])
    assert graphed.statistics.graphs == 0
    assert pool.in_use == pool.reserved == 0


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x * x.sum().item(), breaks="never")
    x = torch.ones(3, device=device)
    with pytest.warns(RuntimeWarning, match="runs eagerly for this kind of call"):
        assert torch.equal(graphed(x), x * 3)
    for _ in range(3):
        assert torch.equal(graphed(x), x * 3)
    assert graphed.statistics.eager == {"it cannot be captured": 4}
    assert "_local_scalar_dense" in graphed.explain()


def test_plain_values_beside_tensors_take_the_short_way(device: torch.device) -> None:
    def fn(x: torch.Tensor, n: int, y: torch.Tensor, *, flag: Any = None, z: Any = None) -> Any:
        result = x * n + y
        result = result - 1 if flag else result
        return (result, x[:1]) if z is None else (result * z, x[:1])

    graphed = gw.graph(fn)
    x, y, z = (torch.randn(2, 4, device=device) for _ in range(3))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 2, y), {}),
        ((x, 2, y), {"flag": True}),
        ((x, 2, y), {"flag": 1}),
        ((x, 2, y), {"flag": "yes"}),
        ((x, 2, y), {"z": z, "flag": False}),
        ((x, 2.0, y), {"flag": False, "z": z}),
        ((x, True, y), {"flag": None}),
        ((x, 2), {"y": y, "flag": True}),
        ((x, 2, x), {"flag": True}),
        ((x[:1], 2, y[:1]), {"flag": True}),
    ]
    for args, kwargs in [*calls, *calls]:
        for _ in range(3):
            result, expected = graphed(*args, **kwargs), fn(*args, **kwargs)
            assert torch.equal(result[0], expected[0])
            assert result[0].dtype == expected[0].dtype
            assert result[1].data_ptr() == args[0].data_ptr()  # A view of the caller's own.
    assert graphed.statistics.captures == len(calls)
    assert graphed._short is not None


def test_numbers_of_numpy_are_no_numbers_of_python() -> None:
    graphed = gw.graph(lambda x, s: torch.tensor([s, 1.0]) * x)
    for value in (0.5, np.float64(0.5), 0.5):
        assert graphed(torch.ones(2), value).dtype == torch.tensor([value, 1.0]).dtype


def test_calls_that_do_not_fit_are_not_warmed_up_again_and_again() -> None:
    runs = 0

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal runs
            runs += 1
            return x * 2

    graphed = gw.graph(Counted().eval(), pool=gw.MemoryPool("1KiB"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(3):
            before = runs
            for n in (1, 2):
                graphed(torch.ones(n, 3))
            assert turn == 0 or runs - before == 2


def test_a_refused_call_holds_no_argument() -> None:
    graphed = gw.graph(lambda x: x.to_sparse().to_dense())
    x = torch.ones(100, 100)
    alive = weakref.ref(x)
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        graphed(x)
    del x
    gc.collect()
    assert alive() is None


def test_errors_of_the_function_are_the_function_s() -> None:
    graphed = gw.graph(model())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        graphed(torch.ones(2, 3))
    with pytest.raises(TypeError):
        graphed()
    torch.testing.assert_close(graphed(torch.ones(2, 8)).shape, torch.Size([2, 4]))


def test_no_gradient_is_lost() -> None:
    net = model()
    graphed = gw.graph(net)
    x = torch.randn(2, 8, requires_grad=True)
    graphed(x).sum().backward()
    assert x.grad is not None
    net[2].train()  # A part is enough.
    assert graphed(torch.randn(2, 8)).requires_grad
    net.eval()
    assert not graphed(torch.randn(2, 8)).requires_grad
    assert graphed.statistics.eager == {"gradients are wanted": 2}


def test_an_audit_finds_what_is_not_watched(device: torch.device) -> None:
    scales = numpy.full(2_000, 1.0)  # too long to be watched
    graphed = gw.graph(lambda x: x * float(scales[0]), audit=3)
    x = torch.randn(4, device=device)
    for _ in range(4):
        assert torch.equal(graphed(x), x)
    assert graphed.statistics.audits == 1
    scales[0] = 2.0
    graphed(x)
    with pytest.raises(gw.VerificationError, match="audit"):
        graphed(x)
    graphed.release()
    assert torch.equal(graphed(x), x * 2)


def test_at_most_so_many_graphs_are_kept() -> None:
    net = model()
    graphed = gw.graph(net, max_graphs=2)
    for n in (1, 2, 3, 2, 3, 1):
        x = torch.randn(n, 8)
        torch.testing.assert_close(graphed(x), net(x).detach())
    assert graphed.statistics.graphs == 2
    assert graphed.statistics.captures == 4


def test_closing_sends_calls_to_the_function() -> None:
    net = model()
    graphed = gw.graph(net)
    x = torch.randn(2, 8)
    graphed(x)
    graphed.close()
    torch.testing.assert_close(graphed(x), net(x).detach())
    assert graphed.statistics.graphs == 0
    assert graphed.statistics.eager == {"closed": 1}


def test_a_graphed_module_can_be_a_part_of_another_one() -> None:
    whole = nn.Sequential(nn.Linear(8, 8), model()).eval()
    x = torch.randn(2, 8)
    expected = whole(x).detach()
    whole[1] = gw.graph(whole[1])
    with torch.no_grad():
        torch.testing.assert_close(whole(x), expected)
    assert whole[1].statistics.hits == 1
    assert len(list(whole.parameters())) == 6


def test_the_grad_mode_counts_where_numbers_depend_on_it() -> None:
    # Without gradients it leaves padded places at 0, by nested tensors, which cannot be captured.
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 4, 8)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[:, 3] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphed = gw.graph(encoder)
        for _ in range(2):
            expected = encoder(x, src_key_padding_mask=mask).detach()
            torch.testing.assert_close(graphed(x, src_key_padding_mask=mask), expected)
            with torch.no_grad():
                expected = encoder(x, src_key_padding_mask=mask)
                torch.testing.assert_close(graphed(x, src_key_padding_mask=mask), expected)


def test_wrong_options_are_all_named() -> None:
    with pytest.raises(gw.OptionError, match=r"cannot be called.*outputs.*on_miss.*max_gr.*audit"):
        gw.graph(3, outputs="x", on_miss="y", max_graphs=0, audit=0)  # type: ignore[call-overload]


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y

    def generate(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        """What calls the module itself."""
        for _ in range(times):
            x = self(x)
        return x


def test_generate_is_answered_by_graphs() -> None:
    model, x = Generating().eval(), torch.randn(2, 4)
    graphed = gw.graph(model)
    torch.testing.assert_close(graphed.generate(x, times=3), model.generate(x, times=3))
    assert graphed.statistics.hits == 3


@dataclass
class Batch:
    """No tree that torch knows of."""

    x: torch.Tensor


def test_gradients_of_tensors_in_unknown_objects_are_not_lost() -> None:
    model = nn.Linear(4, 4).eval()
    graphed = gw.graph(lambda batch: model(batch.x))
    x = torch.randn(2, 4, requires_grad=True)
    graphed(Batch(x)).sum().backward()
    assert x.grad is not None
    assert graphed.statistics.eager == {"gradients are wanted": 1}
    with torch.no_grad():
        assert not graphed(Batch(x)).requires_grad
