"""capture() and capturing(): their interface, on both recorders. Dangers are in hazards.py."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it

import graphwright as gw
from graphwright.graphs import call_spec
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.graph import GraphClosed, GraphState
from graphwright.graphs.journal import Journal
from graphwright.training.callables import captured_pair


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_a_graph_goes_through_its_states(device: torch.device) -> None:
    graph = CapturedCall(torch.neg, (torch.ones(3, device=device),), {})
    assert graph.state is GraphState.NEW
    graph.warm()
    assert graph.state is GraphState.WARMING
    graph.record()
    assert graph.state == "ready"
    assert "neg(3), ready" in repr(graph)
    graph.close()
    graph.close()
    assert graph.state == "closed"
    with pytest.raises(gw.CaptureError, match=r"neg\(3\) is closed"):
        graph(torch.ones(3, device=device))


@pytest.mark.parametrize("maker", ["capture", "make_graphed_callables"])
def test_one_that_fails_to_begin_is_let_go_without_an_error(
    maker: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise gw.CaptureError("on purpose")

    monkeypatch.setattr(call_spec if maker == "capture" else captured_pair, "device_of", fails)
    x = torch.ones(3, device=device)
    with pytest.raises(gw.CaptureError, match="on purpose"):  # noqa: PT012  # one of two calls
        if maker == "capture":
            gw.capture(torch.neg, x)
        else:
            gw.make_graphed_callables(torch.neg, (x.requires_grad_(),))
    gc.collect()  # An error in __del__ would be a warning.


def test_static_inputs_and_outputs_are_the_graph_s_own(device: torch.device) -> None:
    a, b = torch.ones(3, device=device), torch.ones(3, device=device)
    with gw.capture(lambda a, b: {"sum": a + b}, a, b=b) as graph:
        assert [tuple(t.shape) for t in graph.inputs] == [(3,), (3,)]
        graph.inputs[0].fill_(2)
        graph.inputs[1].fill_(5)
        graph.replay()
        assert torch.equal(graph.outputs["sum"], torch.full((3,), 7.0, device=device))
        assert graph(a, b=b)["sum"].data_ptr() != graph.outputs["sum"].data_ptr()
        graph.replay()
        assert torch.equal(graph.outputs["sum"], torch.full((3,), 2.0, device=device))
    assert graph.state == "closed"


def test_static_outputs_are_handed_out_when_asked_for(device: torch.device) -> None:
    graph = gw.capture(torch.exp, torch.zeros(3, device=device), outputs="static")
    first = graph(torch.zeros(3, device=device))
    second = graph(torch.ones(3, device=device))
    assert first is second is graph.outputs
    assert torch.equal(second, torch.ones(3, device=device).exp())


@pytest.mark.parametrize(
    "result",
    [
        lambda x: Pair(x + 1, x.sum()),
        lambda x: {"b": [x * 2, None], "a": (1, "text", 2.5, True)},
        lambda x: [],
        lambda x: None,
        lambda x: (x > 0, x.to(torch.float16), x.to(torch.int64), x.double(), x.bfloat16()),
        lambda x: torch.fft.fft(x).conj(),
        lambda x: torch.fft.fft(x).conj().imag,
        lambda x: x.view(torch.int32)[1:],
        lambda x: (lambda y: (y, y.view(torch.int32), y[::2], y.unsqueeze(0).expand(3, 6)))(x * 2),
        lambda x: x.new_empty(0),
        lambda x: x[:0],
        lambda x: x.sum(),
    ],
)
def test_results_are_eager_s_in_all(device: torch.device, result: Any) -> None:
    graph = gw.capture(result, torch.randn(6, device=device))
    x = torch.randn(6, device=device)
    mine, theirs = graph(x), result(x)
    leaves, tree = torch.utils._pytree.tree_flatten(mine)
    expected, expected_tree = torch.utils._pytree.tree_flatten(theirs)
    assert tree == expected_tree
    for a, b in zip(leaves, expected, strict=True):
        if isinstance(b, torch.Tensor):
            plain = b.resolve_conj().resolve_neg()
            torch.testing.assert_close(a, plain)
            assert a.stride() == plain.stride()
        else:
            assert type(a) is type(b)
            assert a == b


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]),
)
def test_any_layout_of_an_input_is_kept(
    shape: list[int], order: Any, step: int, dtype: torch.dtype
) -> None:
    def sample() -> torch.Tensor:
        big = torch.randint(0, 2, [n * step for n in shape]).to(dtype)
        view = big[tuple(slice(None, None, step) for _ in shape)]
        return view.permute(axes)

    axes = list(range(len(shape)))
    order.shuffle(axes)
    seen: list[tuple[int, ...]] = []
    graph = gw.capture(lambda t: t.logical_not(), sample())
    x = sample()
    assert torch.equal(graph(x), x.logical_not())
    assert graph.inputs[0].stride() == x.stride()
    assert not seen


def test_a_block_is_captured_and_replayed(device: torch.device) -> None:
    model, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    with torch.no_grad():
        model(x)
    pool = gw.MemoryPool(device=device)
    with gw.capturing(pool=pool) as graph:
        y = model(x).relu()
    assert graph.state == "ready"
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, model(x).relu().detach())
    with pytest.raises(gw.CaptureError, match="takes no arguments"):
        graph(x)
    graph.close()
    assert pool.graphs == []


def test_a_failing_block_leaves_nothing(device: torch.device) -> None:
    pool, x = gw.MemoryPool(device=device), torch.ones(4, device=device)
    kept = gw.capture(torch.neg, x, pool=pool)
    before = pool.in_use

    def block() -> None:
        with gw.capturing(pool=pool):
            torch.neg(x)
            raise ValueError("mine")

    with pytest.raises(gw.CaptureError, match=r"ValueError: mine.*test_capture\.py"):
        block()
    assert pool.in_use == before
    assert torch.equal(kept(x), -x)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.tensor(x.tolist()), "tolist|scalar_dense|stream is capturing|Cannot copy"),
        (lambda x: x.resize_(7), "resize_"),
        (lambda x: object(), "object of type object"),
        (lambda x: x.to_sparse(), "parse|nonzero"),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(
    device: torch.device, work: Any, words: str
) -> None:
    x = torch.randn(6, device=device)
    with pytest.raises(gw.CaptureError, match=words):
        gw.capture(work, x)
    assert torch.equal(gw.capture(torch.neg, x)(x), -x)


class Counting(nn.Module):
    """State of Python's in every form."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.seen = kind, 0, []
        self.table: dict[int, int] = {}
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "attribute count":
            self.count += 1
            x = x * self.count
        elif self.kind == "attribute seen":
            self.seen.append(x)
        elif self.kind == "attribute table":
            self.table[len(self.table)] = 1
        else:
            self.total = self.total + x
        return x + self.total


@pytest.mark.parametrize(
    "kind", ["attribute count", "attribute seen", "attribute table", "total of Counting"]
)
def test_state_that_python_keeps_is_refused_by_name_and_put_back(
    device: torch.device, kind: str
) -> None:
    model, x = Counting(kind).to(device).eval(), torch.ones(3, device=device)
    buffer = model.total
    with pytest.raises(gw.CaptureError, match=kind):
        gw.capture(model, x)
    assert (model.count, model.seen, model.table) == (0, [], {})
    assert model.total is buffer
    assert torch.equal(buffer, torch.zeros(3, device=device))


def test_what_is_made_once_may_stay(device: torch.device) -> None:
    class Lazy(nn.Module):
        scale: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.scale is None:
                self.scale = torch.full_like(x, 3.0)
            return x * self.scale

    model, x = Lazy().eval(), torch.ones(3, device=device)
    graphed = gw.graph(model)
    for _ in range(3):
        assert torch.equal(graphed(x), x * 3)
    assert graphed.statistics.captures == 1


def asked() -> bool:
    """Whether a capture is under way, as libraries ask."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a build without CUDA
        return False


def test_what_asks_whether_a_capture_is_under_way_must_not_answer_otherwise() -> None:
    with pytest.raises(gw.CaptureError, match="computes something else"):
        gw.capture(lambda x: x * 2 if asked() else x * 3, torch.ones(2))
    assert not asked()


def longer_in_captures(x: torch.Tensor) -> torch.Tensor:
    """The same result by another operation more, as transformers' attention masks are."""
    return (x * 2).relu() if asked() else x * 2


def test_what_eager_code_runs_is_captured_where_it_reads_nothing(device: torch.device) -> None:
    x = torch.rand(4, device=device)
    with gw.capture(longer_in_captures, x) as graph:
        work = [node for node in graph.nodes() if node.kind in ("kernel", "operation")]
        assert len(work) == 1
        other = torch.rand(4, device=device)
        assert torch.equal(graph(other), other * 2)
    assert not asked()


def test_what_reads_in_eager_code_is_captured_as_libraries_do_in_captures(
    device: torch.device,
) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        if not asked() and x.min() >= 0:  # as transformers looks for padding in a mask
            return x * 2
        return (x * 2).relu()

    x = torch.rand(4, device=device)
    with gw.capture(reads, x) as graph:
        other = torch.rand(4, device=device)
        assert torch.equal(graph(other), other * 2)
        assert len([n for n in graph.nodes() if n.kind in ("kernel", "operation")]) == 2


def test_what_no_capture_takes_as_eager_code_is_captured_the_other_way(
    device: torch.device,
) -> None:
    def lists(x: torch.Tensor) -> torch.Tensor:
        if not asked() and x.tolist():  # no operation shows this read
            return x * 2
        return (x * 2).relu()

    x = torch.rand(4, device=device)
    with gw.capture(lists, x) as graph:
        other = torch.rand(4, device=device)
        assert torch.equal(graph(other), other * 2)


def test_what_draws_random_numbers_is_told_of_its_capture(device: torch.device) -> None:
    def drops(x: torch.Tensor) -> torch.Tensor:
        seed = torch.rand(4, device=device) if asked() else torch.full((4,), 0.5, device=device)
        return x * 2 + 0 * (seed + torch.rand(4, device=device))

    x = torch.rand(4, device=device)
    with gw.capture(drops, x) as graph:
        drawn = [node for node in graph.nodes() if "rand" in node.name or "unif" in node.name]
        assert device.type == "cuda" or len(drawn) == 2
        assert torch.equal(graph(x), x * 2)


def test_pytorch_itself_is_told_of_captures() -> None:
    from graphwright.graphs.conditions import answering_as_eager, pretend_capturing

    code = "def asks():\n    import torch\n    return torch.cuda.is_current_stream_capturing()"
    names: dict[str, Any] = {"__name__": "torch.optim.some"}
    exec(code, names)
    with pretend_capturing(), answering_as_eager():
        assert names["asks"]()
        assert not asked()


def test_a_model_of_transformers_is_captured_without_masks_that_eager_code_leaves_out(
    device: torch.device,
) -> None:
    transformers = pytest.importorskip("transformers")
    small: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(intermediate_size=64, **small))
    model = model.eval().to(device)
    ids = torch.randint(5, 1000, (2, 16), device=device)
    padded = torch.ones_like(ids)
    padded[1, 10:] = 0

    def operations(**more: torch.Tensor) -> int:
        with gw.capture(model, ids, **more) as graph, torch.no_grad():
            torch.testing.assert_close(graph(ids, **more)[0], model(ids, **more)[0])
            return sum(node.kind in ("kernel", "operation") for node in graph.nodes())

    with_mask = operations(attention_mask=padded)
    assert operations() <= with_mask - 6
    # A mask that pads nothing is looked into in eager code, and used in a graph.
    assert operations(attention_mask=torch.ones_like(ids)) == with_mask


def test_training_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(gw.CaptureError, match="training mode"):
        gw.capture(nn.Linear(3, 3), x)
    with pytest.raises(gw.CaptureError, match="requires grad"):
        gw.capture(torch.neg, x.requires_grad_())
    result = gw.capture(nn.Linear(3, 3).eval(), torch.ones(2, 3))(torch.ones(2, 3))
    assert not result.requires_grad


def test_wrong_options_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(gw.OptionError, match="outputs"):
        gw.capture(torch.neg, x, outputs="old")  # type: ignore[arg-type]
    with pytest.raises(gw.OptionError, match="warmup"):
        gw.capture(torch.neg, x, warmup=0)
    with pytest.raises(gw.CaptureError, match="an object of type object"):
        gw.capture(torch.neg, object())


def test_a_graph_is_neither_copied_nor_pickled() -> None:
    graph = gw.capture(torch.neg, torch.ones(2))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(gw.CaptureError, match="memory addresses"):
            attempt(graph)


def test_a_graph_is_not_called_inside_a_capture(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    inner = gw.capture(torch.neg, x)
    with pytest.raises(gw.CaptureError, match="while another one is being captured"):
        gw.capture(lambda t: inner(t) + 1, x)
    graphed = gw.graph(torch.neg)
    graphed(x)
    outer = gw.capture(lambda t: graphed(t) + 1, x)
    assert torch.equal(outer(x), 1 - x)


def test_compiled_functions_are_captured_as_compiled_and_recorded_as_written() -> None:
    linear = nn.Linear(4, 4).eval()
    compiled = torch.compile(lambda x: torch.relu(linear(x)) * 2, backend="eager")
    graph = gw.capture(compiled, torch.randn(2, 4))
    x = torch.randn(2, 4)
    torch.testing.assert_close(graph(x), (torch.relu(linear(x)) * 2).detach())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor's advice on precision
def test_compiled_functions_keep_their_kernels_in_a_cuda_graph() -> None:
    linear = nn.Linear(64, 64).cuda().eval()
    compiled = torch.compile(lambda x: torch.relu(linear(x)).sin().cos() * 2)
    x = torch.randn(8, 64, device="cuda")
    graph = gw.capture(compiled, x)
    torch.testing.assert_close(graph(x), (torch.relu(linear(x)).sin().cos() * 2).detach())


def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def seeds_in_between(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.rand_like(x)
    torch.manual_seed(0)
    return y + torch.rand_like(x)


def seeds_for_a_moment(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return x + torch.rand_like(x)


def seeds_at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.rand_like(x)
    torch.manual_seed(5)
    return y


def draws_for_a_moment(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return x + torch.rand_like(x)


def has_a_generator_of_its_own(x: torch.Tensor) -> torch.Tensor:
    own = torch.Generator(x.device).manual_seed(0)
    return x + torch.rand(x.shape, generator=own, device=x.device)


@pytest.mark.usefixtures("one_thread")
def test_who_seeds_random_numbers_in_the_call_is_refused(device: torch.device) -> None:
    one = torch.Generator(device)

    def seeds_a_generator(x: torch.Tensor) -> torch.Tensor:
        one.manual_seed(3)
        return x + torch.rand(x.shape, generator=one, device=x.device)

    x = torch.zeros(3, device=device)

    def puts_back(x: torch.Tensor) -> torch.Tensor:
        state = one.get_state()
        noise = torch.rand(x.shape, generator=one, device=x.device)
        one.set_state(state)
        return x + noise

    seeding = (seeds, seeds_in_between, seeds_for_a_moment, seeds_a_generator)
    seeding = (*seeding, seeds_at_the_end, draws_for_a_moment, puts_back)
    for fn in (*seeding, has_a_generator_of_its_own):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with pytest.raises(gw.CaptureError, match="random"):
            gw.capture(fn, x)
        assert torch.equal(before, torch.get_rng_state())
    # A generator from outside that goes on is none of these.
    graph = gw.capture(lambda x: x + torch.rand(x.shape, generator=one, device=x.device), x)
    one.manual_seed(1)
    first = graph(x)
    assert not torch.equal(first, graph(x))
    one.manual_seed(1)
    assert torch.equal(first, graph(x))


@pytest.mark.gpu
def test_a_cpu_tensor_that_eager_refuses_is_refused() -> None:
    with pytest.raises(gw.CaptureError, match=r"same device.*cuda:0 and cpu"):
        gw.capture(torch.add, torch.ones(2, device="cuda"), torch.ones(2))
    with pytest.raises(gw.CaptureError, match="generator on the cpu"):
        gw.capture(lambda x: x * float(torch.rand(())), torch.ones(2, device="cuda"))


def test_memory_that_is_taken_as_a_whole_is_not_new(device: torch.device) -> None:
    weight = torch.ones(4, device=device)
    journal = Journal()
    with journal:
        whole = torch.empty(0, device=device).set_(weight.untyped_storage(), 0, (4,), (1,))
        weight.add_(whole)
    assert weight[0] == 2
    journal.undo()
    assert weight[0] == 1


def test_other_elements_dropped_is_not_something_else(device: torch.device) -> None:
    """Libraries choose another attention kernel when told of a capture: it drops other elements."""

    def drops(x: torch.Tensor, factor: float) -> torch.Tensor:
        if asked():
            return F.dropout(x.t() * factor, 0.5).t()
        return F.dropout(x, 0.5)

    x = torch.randn(64, 32, device=device)
    result = gw.capture(drops, x, 1.0)(x, 1.0)
    kept = result != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(result[kept], 2 * x[kept])
    with pytest.raises(gw.CaptureError, match="computes something else"):
        gw.capture(drops, x, 1.5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_block_takes_attention_without_dropout(
    device: torch.device, masked: bool, dtype: torch.dtype
) -> None:
    # It may draw random numbers, says its schema, and draws none.
    q, k, v = (torch.randn(2, 4, 16, 32, device=device, dtype=dtype) for _ in range(3))
    mask = torch.randn(16, 16, device=device, dtype=dtype) if masked else None
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        expected = attention(q, k, v, mask)
        with gw.capturing() as graph:
            found = attention(q, k, v, mask)
        graph.replay()
        torch.testing.assert_close(found, expected)
    graph.close()


def test_a_close_on_another_thread_waits_for_the_call(device: torch.device) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    wide = torch.rand(64, 256, device=device)
    calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = [
        (lambda x: x * 2 + 1, wide[:, ::4], wide[:, ::4] * 2 + 1),  # copied in by element
        (reads, wide, wide + 1),  # in segments
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for work, x, expected in calls * 10:
            graph = CapturedCall(work, (x,), {}, breaks="auto", warmup=1)
            graph.warm()
            graph.record()
            closing = threading.Timer(0.002 * random.random(), graph.close)
            closing.start()
            try:
                while True:
                    assert torch.equal(graph(x), expected)
            except GraphClosed:
                closing.join()
    finally:
        sys.setswitchinterval(interval)


def test_a_check_without_a_result_is_made_at_every_replay() -> None:
    def checks(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((~torch.isnan(x)).all())
        return x * 2

    graph = gw.capture(checks, torch.ones(3))
    assert torch.equal(graph(torch.zeros(3)), torch.zeros(3))
    with pytest.raises(RuntimeError):
        graph(torch.full((3,), torch.nan))
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 2.0))
    graph = gw.capture(torch.linalg.cholesky, torch.eye(3))
    with pytest.raises(torch.linalg.LinAlgError):
        graph(-torch.eye(3))


@pytest.mark.parametrize(
    ("work", "bad"),
    [
        (lambda x: torch.arange(4.0)[x], torch.tensor([0, 9])),
        (lambda x: F.embedding(x, torch.ones(4, 2)), torch.tensor([0, 9])),
        (lambda x: torch.linalg.cholesky(x), -torch.eye(3)),
        (lambda x: torch.linalg.inv(x), torch.zeros(3, 3)),
        (lambda x: torch.bernoulli(x), torch.full((3,), 2.0)),
    ],
)
def test_an_error_of_values_that_the_call_catches_is_refused(work: Any, bad: torch.Tensor) -> None:
    def careful(x: torch.Tensor) -> torch.Tensor:
        try:
            return work(x) + 1  # type: ignore[no-any-return]  # a tensor
        except (RuntimeError, IndexError):
            return torch.zeros(1)

    with pytest.raises(gw.CaptureError, match="goes on after an error"):
        gw.capture(careful, bad)
    assert torch.equal(gw.graph(careful)(bad), torch.zeros(1))


def test_an_error_of_shapes_that_the_call_catches_is_no_obstacle(device: torch.device) -> None:
    def flat(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.view(-1) * 2
        except RuntimeError:
            return x.reshape(-1) * 2

    x = torch.rand(3, 4, device=device).T
    with gw.capture(flat, x) as graph:
        other = torch.rand(3, 4, device=device).T
        assert torch.equal(graph(other), flat(other))
