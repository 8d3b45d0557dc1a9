"""diagnose(): planted faults are found, and named with module and line, on both recorders."""

from __future__ import annotations

import ctypes
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.diagnosis.faults import judged
from graphwright.diagnosis.recapture import stale_words
from graphwright.diagnosis.result import DifferenceCause
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.cpu import recorder

FILE = Path(__file__)


def line_with(text: str) -> str:
    """`file:line` of the first line of this file that ends with a comment."""
    for number, line in enumerate(FILE.read_text().splitlines(), 1):
        if line.rstrip().endswith(f"# {text}"):
            return f"{FILE}:{number}"
    raise AssertionError(text)


class Block(nn.Module):
    """Several operations in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return x + y * self.scale  # the scale


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plan:
    """What the operations of this file do wrong."""

    in_captures = False
    calls = 0


@torch.library.custom_op("graphwright_tests::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    """If so planned, it launches another kernel where it is captured."""
    wrong = Plan.in_captures and torch.cuda.is_current_stream_capturing()
    return x * 2 + 0.01 if wrong else x * 2


# Not a `custom_op`, whose code is watched: a call that counts in it would be refused.
torch.library.define("graphwright_tests::counting", "(Tensor x) -> Tensor")


@torch.library.impl("graphwright_tests::counting", "CPU")
def counting(x: torch.Tensor) -> torch.Tensor:
    """It keeps state on the host."""
    Plan.calls += 1
    return x + Plan.calls


class WithOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Stack(2), Stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = odd(self.before(x))  # the odd operation
        return self.after(y)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.rest = Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(ids)  # the look-up
        return self.rest(rows)


def sample(device: torch.device) -> torch.Tensor:
    return torch.randn(4, 16, device=device)


def test_a_graph_that_is_right_is_found_right(device: torch.device) -> None:
    model, x = Stack(3).eval().to(device), sample(device)
    found = gw.diagnose(gw.capture(model, x), (sample(device),), isolate=False)
    assert found.ok
    assert found.cause is DifferenceCause.NONE
    assert found.operation is None
    assert "agree" in str(found)


def test_a_graphed_module_is_captured_for_the_call(device: torch.device) -> None:
    with torch.no_grad():
        graphed = gw.graph(Stack(1).eval().to(device))
        assert gw.diagnose(graphed, (sample(device),), isolate=False).ok
        assert len(graphed.graphs) == 1
        graphed.close()


def test_a_stale_constant_is_named(device: torch.device) -> None:
    model, x = Stack(4).eval().to(device), sample(device)
    graph = gw.capture(model, x)
    model.blocks[2].scale = 3.0
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.cause is DifferenceCause.CONSTANT
    assert found.operation == "aten.mul.Tensor"
    assert found.module == "blocks.2"
    assert found.line == line_with("the scale")
    assert "2" in str(found)
    assert "3" in str(found)


def test_a_constant_tensor_that_was_replaced_is_named(device: torch.device) -> None:
    model, x = Stack(3).eval().to(device), sample(device)
    graph = gw.capture(model, x)
    with torch.no_grad():
        linear = model.blocks[1].linear
        linear.weight.data = linear.weight + 1
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.cause is DifferenceCause.CONSTANT
    assert found.operation == "aten.addmm.default"
    assert found.module == "blocks.1.linear"


def test_another_branch_is_named(device: torch.device) -> None:
    class Forks(nn.Module):
        way = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            x = x.sin() if self.way else x.cos()  # the fork
            return x + 1

    model, x = Forks().eval().to(device), sample(device)
    graph = gw.capture(model, x)
    model.way = False
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.cause is DifferenceCause.OPERATIONS
    assert found.operation == "aten.cos.default"
    assert found.line == line_with("the fork")


def test_a_wrong_kernel_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = WithOdd().eval().to(device), sample(device)
    graph = CapturedCall(model, (x,), {})
    graph.warm()
    if device.type == "cuda":
        # After warm-up, which compares captures with eager.
        monkeypatch.setattr(Plan, "in_captures", True)
    graph.record()
    if device.type == "cpu":
        spoil_replays(monkeypatch, "graphwright_tests.odd.default")
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.cause is DifferenceCause.RESULT, str(found)
    assert found.operation == "graphwright_tests.odd.default"
    assert found.module == ""
    assert found.line == line_with("the odd operation")
    assert found.error is not None
    assert "off by" in found.error
    assert found.index == 10
    assert (found.kernel is None) == (device.type == "cpu")


def spoil_replays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have an operation give a wrong result where a tape repeats it."""
    right = recorder._repeat

    def repeat(step: Any) -> Any:
        results = right(step)
        if str(step.func) == name:
            for target in step.results:
                target.add_(1e-3)
        return results

    monkeypatch.setattr(recorder, "_repeat", repeat)


def test_an_operation_that_keeps_state_is_named() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.graphwright_tests.counting(x * 2) + 1  # the count

    x = torch.ones(4)
    graph = CapturedCall(Counts().eval(), (x,), {})
    Plan.calls = 1_000_000  # One more is nothing beyond rounding, as long as it is captured.
    graph.warm()
    graph.record()
    Plan.calls = 1
    found = gw.diagnose(graph, (x,))
    assert found.cause is DifferenceCause.RESULT, str(found)
    assert found.operation == "graphwright_tests.counting.default"
    assert found.line == line_with("the count")
    assert "each time" in str(found)


def test_an_index_out_of_range_is_named_on_the_cpu() -> None:
    model, ids = Table().eval(), torch.tensor([[1, 2, 3]])
    graph = gw.capture(model, ids)
    found = gw.diagnose(graph, (torch.tensor([[1, 2, 30]]),))
    assert found.cause is DifferenceCause.ERROR
    assert found.operation == "aten.embedding.default"
    assert found.module == "embedding"
    assert found.line == line_with("the look-up")
    assert found.error is not None
    assert "IndexError" in found.error


@pytest.mark.gpu
def test_an_index_out_of_range_is_named_on_a_gpu() -> None:
    """In a child: this process can go on to use its device."""
    model, ids = Table().eval().cuda(), torch.tensor([[1, 2, 3]], device="cuda")
    graph = gw.capture(model, ids)
    found = gw.diagnose(graph, (torch.tensor([[1, 2, 30]], device="cuda"),))
    assert found.cause is DifferenceCause.FAULT, str(found)
    assert found.operation == "aten.embedding.default"
    assert found.module == "embedding"
    assert found.line == line_with("the look-up")
    assert torch.equal(graph(ids), model(ids))


@torch.library.custom_op("graphwright_tests::trusting", mutates_args=())
def trusting(x: torch.Tensor) -> torch.Tensor:
    """A kernel that trusts its input: a large one leads it out of its memory."""
    address = x.data_ptr() if float(x[0]) < 100 else 0
    return torch.full_like(x, ctypes.c_float.from_address(address).value)


class Trusts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return trusting(x * 2) + 1  # the trust


@pytest.mark.slow
@pytest.mark.long
def test_what_ends_the_process_is_found_in_a_child() -> None:
    x = torch.ones(4)
    graph = CapturedCall(Trusts().eval(), (x,), {})
    graph.warm()
    graph.record()
    found = gw.diagnose(graph, (x * 100,), isolate=True, timeout_s=60)
    assert found.cause is DifferenceCause.FAULT, str(found)
    assert found.operation == "graphwright_tests.trusting.default"
    assert found.line == line_with("the trust")
    assert found.error is not None
    assert "SIGSEGV" in found.error


def test_a_call_that_cannot_be_pickled_is_not_isolated() -> None:
    lock = threading.Lock()

    def work(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if lock else 3)

    x = torch.ones(4)
    found = gw.diagnose(gw.capture(work, x), (x,), isolate=True)
    assert found.ok
    assert "cannot be pickled" in found.notes[0]


# In segments.


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if bool((x.abs() < 1e6).all()):
            x = self.second(x)
        return x - 1


def test_a_stale_constant_in_a_later_segment_is_named(device: torch.device) -> None:
    model, x = Asks().eval().to(device), sample(device)
    graph = CapturedCall(model, (x,), {}, breaks="auto")
    graph.warm()
    graph.record()
    graph(x)
    model.second.scale = 3.0
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.cause is DifferenceCause.CONSTANT, str(found)
    assert found.module == "second"
    assert found.line == line_with("the scale")


# What runs leave as it was.


def test_what_the_call_writes_is_put_back(device: torch.device) -> None:
    with torch.no_grad():
        norm = nn.BatchNorm1d(16).to(device).train()
        x = sample(device)
        graph = gw.capture(norm, x)
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        state = torch.get_rng_state()
        found = gw.diagnose(graph, (x,), isolate=False)
        assert found.ok, str(found)
        for name, value in norm.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert torch.equal(torch.get_rng_state(), state)
        norm.eps = 0.5
        found = gw.diagnose(graph, (x,), isolate=False)
        assert found.cause is DifferenceCause.CONSTANT, str(found)
        assert "batch_norm" in str(found.operation)
        for name, value in norm.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_random_numbers_are_the_same_in_both(device: torch.device) -> None:
    class Drops(nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x, 0.5, training=True)
            return x * self.scale  # after the dropout

    model, x = Drops().eval(), sample(device)
    graph = gw.capture(model, x)
    assert gw.diagnose(graph, (x,), isolate=False).ok
    model.scale = 4.0
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.line == line_with("after the dropout"), str(found)


def test_arguments_that_are_written_to_are_compared(device: torch.device) -> None:
    class Adds(nn.Module):
        step = 1.0

        def forward(self, x: torch.Tensor) -> None:
            x.add_(self.step)  # the step

    model, x = Adds().eval(), sample(device)
    graph = gw.capture(model, x)
    model.step = 2.0
    held = x.clone()
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.cause is DifferenceCause.CONSTANT, str(found)
    assert found.line == line_with("the step")
    assert torch.equal(x, held)


def test_one_of_400_nodes_is_found(device: torch.device) -> None:
    model, x = Stack(100).eval().to(device), sample(device)
    graph = gw.capture(model, x)
    assert graph.node_count >= 400
    model.blocks[90].scale = 3.0
    found = gw.diagnose(graph, (x,), isolate=False)
    assert found.module == "blocks.90"
    assert found.cause is DifferenceCause.CONSTANT


# What it refuses.


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(gw.OptionError, match="graphed is"):
        gw.diagnose(torch.sin, ())  # type: ignore[arg-type]  # on purpose
    with gw.capturing(device="cpu") as block:
        pass
    with pytest.raises(gw.OptionError, match="`with` block"):
        gw.diagnose(block)
    graph = gw.capture(torch.sin, torch.ones(3))
    with pytest.raises(gw.SignatureError, match="another call"):
        gw.diagnose(graph, (torch.ones(4),))


# What a child's end means.


def told(*messages: str) -> str:
    return "".join(f"{message}\n" for message in messages)


EAGER = '{"say": "phase", "phase": "eager"}'
FIRST = '{"say": "operation", "name": "aten.mul.Tensor", "index": 0, "module": "a", "line": "m:1"}'


def test_a_child_that_says_nothing_of_faults_found_none() -> None:
    assert judged(told(EAGER, FIRST, '{"say": "over"}'), 0, "", 9.0) == (None, None)


def test_an_assertion_of_the_device_names_its_kernel() -> None:
    said = (
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1369: indexSelectSmallIndex: block: "
        "[0,0,0], thread: [32,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    )
    error = '{"say": "error", "error": "AcceleratorError: CUDA error: device-side assert"}'
    fault, note = judged(told(EAGER, FIRST, error), 0, said, 9.0)
    assert note is None
    assert fault is not None
    assert fault.died
    assert (fault.operation, fault.module, fault.line) == ("aten.mul.Tensor", "a", "m:1")
    assert fault.kernel == "indexSelectSmallIndex"
    assert "srcIndex < srcSelectDimSize" in fault.error


def test_a_child_that_hangs_is_stopped_and_named() -> None:
    fault, _ = judged(told(EAGER, FIRST), None, "", 9.0)
    assert fault is not None
    assert "9 s" in fault.error


def test_a_child_that_never_began_is_a_note() -> None:
    fault, note = judged("", 1, "ModuleNotFoundError: No module named 'mine'", 9.0)
    assert fault is None
    assert note is not None
    assert "No module named 'mine'" in note


# Constants of kernels.


def words(*values: float | int) -> bytes:
    return b"".join(
        struct.pack("<f", v) + bytes(4) if isinstance(v, float) else struct.pack("<q", v)
        for v in values
    )


def test_words_that_two_captures_agree_on_are_constants() -> None:
    pool, other, third = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000
    was, now, too = ((words(2.0, pool),), (words(3.0, other),), (words(3.0, third),))
    (stale,) = stale_words(was, now, too)
    assert str(stale) == "2 in the graph, and 3 in a new capture"
    assert (stale.argument, stale.start) == (0, 0)
    assert not [*stale_words(now, now, too)]
    assert not [*stale_words(None, now, too)]
    weight, moved = 0x7F1200001000, 0x7F3400005000
    (stale,) = stale_words((words(weight),), (words(moved),), (words(moved),))
    assert hex(weight) in str(stale)
