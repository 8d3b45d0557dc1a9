"""prefetch(): the same batches as a plain loop, loaded ahead, and clean ends."""

from __future__ import annotations

import collections
import contextvars
import gc
import operator
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import graphwright as gw
from graphwright.data.prefetch import with_tensors


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "graphwright prefetch"]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert not threads()


class Batches:
    """Batches of numbers, and how far they were loaded."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.loaded, self.ended = 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        try:
            for n in range(self.count):
                if n == self.fails_at:
                    raise KeyError("the disk is gone")
                self.loaded += 1
                yield torch.full((3, 4), float(n))
        finally:
            self.ended += 1


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_batches_are_those_of_a_plain_loop(device: torch.device) -> None:
    data = TensorDataset(torch.randn(40, 3, 8, 8), torch.arange(40))
    loader = DataLoader(data, batch_size=6, shuffle=True)
    ahead = gw.prefetch(loader, device)
    assert len(ahead) == len(loader) == 7
    for epoch in range(2):
        torch.manual_seed(epoch)
        plain = list(loader)
        torch.manual_seed(epoch)
        found = list(ahead)
        assert len(found) == 7
        for (x, y), (a, b) in zip(plain, found, strict=True):
            assert a.device.type == b.device.type == device.type
            assert torch.equal(x, a.cpu())
            assert torch.equal(y, b.cpu())


def test_no_more_is_loaded_ahead_than_was_asked_for() -> None:
    batches = Batches(20)
    with iter(gw.prefetch(batches, depth=3)) as ahead:
        for n in range(5):
            assert float(next(ahead)[0, 0]) == n
            until(lambda n=n: batches.loaded == n + 4)
            time.sleep(0.02)
            assert batches.loaded == n + 4
    assert batches.ended == 1


def test_loading_and_computing_overlap() -> None:
    both = threading.Barrier(2, timeout=20)

    class Met(Batches):
        """Loads each batch but the first while the one before it is computed with."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            for n, batch in enumerate(super().__iter__()):
                if n:
                    both.wait()
                yield batch

    for n, _ in enumerate(gw.prefetch(Met(10))):
        if n < 9:
            both.wait()  # If they do not overlap, this one waits in vain and raises.


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_what_the_loader_raises_is_raised_in_its_place(fails_at: int) -> None:
    batches = Batches(9, fails_at)
    seen: list[float] = []
    ahead = gw.prefetch(batches)
    with pytest.raises(KeyError, match="the disk is gone") as raised:
        seen.extend(float(batch[0, 0]) for batch in ahead)
    assert seen == [float(n) for n in range(fails_at)]
    assert "__iter__" in {frame.name for frame in raised.traceback}
    assert batches.ended == 1


def test_a_batch_that_is_dropped_is_freed_while_the_next_one_is_loaded() -> None:
    goes_on = threading.Event()

    def batches() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        yield torch.zeros(2)
        goes_on.wait(60)

    with iter(gw.prefetch(batches())) as ahead:
        next(ahead)
        dropped = weakref.ref(next(ahead))
        try:
            until(lambda: dropped() is None)
        finally:
            goes_on.set()


def test_leaving_the_loop_ends_all() -> None:
    batches = Batches(100)
    for batch in gw.prefetch(batches):
        if float(batch[0, 0]) == 3:
            break
    gc.collect()
    assert not threads()
    assert batches.ended == 1
    assert batches.loaded < 10
    ahead = iter(gw.prefetch(batches))
    next(ahead)
    ahead.close()
    assert list(ahead) == []

    def fails() -> None:
        for _ in gw.prefetch(batches):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fails()


def test_a_loop_that_is_over_stays_over() -> None:
    ahead = iter(gw.prefetch(Batches(3)))
    assert len(list(ahead)) == 3
    assert list(ahead) == []
    assert not threads()
    assert list(gw.prefetch([])) == []


class Reader:
    """Iterates over itself and can be closed, as a file."""

    def __init__(self) -> None:
        self.closed, self.at = False, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.closed or self.at == 3:
            raise (ValueError if self.closed else StopIteration)
        self.at += 1
        return torch.tensor(self.at)

    def close(self) -> None:
        self.closed = True


def test_a_loader_that_can_be_closed_is_left_open() -> None:
    reader = Reader()
    for _ in range(2):
        assert [int(batch) for batch in gw.prefetch(reader)] == [1, 2, 3]
    for _ in gw.prefetch(reader):
        break
    assert not reader.closed


def test_a_generator_that_the_caller_holds_goes_on() -> None:
    batches = iter(Batches(20))
    with iter(gw.prefetch(batches)) as ahead:
        assert float(next(ahead)[0, 0]) == 0
    assert next(batches, None) is not None


def test_closing_ends_the_wait_of_other_threads() -> None:
    asked, goes_on = threading.Event(), threading.Event()

    class Slow(Batches):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for batch in super().__iter__():
                yield batch
                asked.set()
                goes_on.wait(20)

    ahead = iter(gw.prefetch(Slow(20)))
    next(ahead)
    asked.wait(20)
    ended: list[bool] = []
    waiting = [
        threading.Thread(target=lambda: ended.append(next(ahead, None) is None), daemon=True)
        for _ in range(3)
    ]
    closing = threading.Thread(target=ahead.close)
    for thread in waiting:
        thread.start()
        until(lambda thread=thread: _is_in(thread, "take"))
    closing.start()
    until(ahead._ahead._closing.is_set)
    goes_on.set()
    for thread in (closing, *waiting):
        thread.join(20)
    assert len(ended) == 3
    assert sum(ended) >= 2  # One may get the batch that was being loaded.


def _is_in(thread: threading.Thread, name: str) -> bool:
    assert thread.ident is not None
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def test_loading_has_the_modes_of_the_loop() -> None:
    seen: list[tuple[bool, bool]] = []

    class Modes(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return torch.zeros(2)

    for mode, expected in (
        (torch.no_grad, (False, False)),
        (torch.inference_mode, (False, True)),
        (torch.enable_grad, (True, False)),
    ):
        seen.clear()
        with mode():
            list(gw.prefetch(DataLoader(Modes())))
        assert seen == [expected] * 4


def test_loading_is_under_the_autocast_of_the_loop() -> None:
    seen: list[tuple[Any, ...]] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(3):
            seen.append(
                (
                    torch.is_autocast_enabled("cpu"),
                    torch.get_autocast_dtype("cpu"),
                    torch.is_autocast_cache_enabled(),
                )
            )
            yield torch.ones(2, 2) @ torch.ones(2, 2)

    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        found = list(gw.prefetch(batches()))
    assert seen == [(True, torch.float16, False)] * 3
    assert {batch.dtype for batch in found} == {torch.float16}
    seen.clear()
    assert {batch.dtype for batch in gw.prefetch(batches())} == {torch.float32}
    assert not any(enabled for enabled, *_ in seen)


def test_loading_sees_the_context_variables_of_the_loop() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    before = variable.set(7)
    assert list(gw.prefetch(variable.get() for _ in range(3))) == [7, 7, 7]
    variable.reset(before)


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Labelled:
    image: torch.Tensor
    label: int


def test_all_that_holds_tensors_is_followed(device: torch.device) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    lock, same = threading.Lock(), object()
    batch = {
        "pair": Pair(image, "cat"),
        "object": Labelled(image[:1], 3),
        "list": [torch.arange(4), None, "text", 2.5, lock, same],
        "again": image,
        "odd": torch.randn(6)[::2],
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "ordered": collections.OrderedDict(a=torch.randn(3, dtype=torch.bfloat16)),
    }
    (found,) = gw.prefetch([batch], device)
    assert type(found["pair"]) is Pair
    assert found["pair"].name == "cat"
    assert type(found["object"]) is Labelled
    assert found["object"].label == 3
    assert found["list"][1:4] == [None, "text", 2.5]
    assert found["list"][4] is lock
    assert found["list"][5] is same
    assert found["again"] is found["pair"].image
    assert found["pair"].image.is_contiguous(memory_format=torch.channels_last)
    mine = _tensors(found)
    theirs = _tensors(batch)
    assert len(mine) == len(theirs) == 8
    for a, b in zip(mine, theirs, strict=True):
        assert a.device.type == device.type
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with_tensors(batch, lambda t: (found.append(t), t)[1])
    return found


class Row(tuple[Any, ...]):
    """A tuple that PyTorch's trees do not know."""

    name: str


class Slim(tuple[Any, ...]):
    __slots__ = ()


def test_subclasses_of_tuples_are_followed() -> None:
    image = torch.zeros(2)
    row = Row((image, 3))
    row.name = "cat"
    found = with_tensors({"row": row, "slim": Slim((Labelled(image, 1),))}, lambda t: t + 1)
    assert type(found["row"]) is Row
    assert found["row"].name == "cat"
    assert found["row"][1] == 3
    assert type(found["slim"]) is Slim
    held = with_tensors(Labelled(row, 1), lambda t: t + 1).image  # type: ignore[arg-type]
    assert type(held) is Row
    for new in (found["row"][0], found["slim"][0].image, held[0]):
        assert torch.equal(new, torch.ones(2))
    plain = Slim((1, 2))
    assert with_tensors(plain, lambda t: t + 1) is plain


def test_packed_sequences_keep_their_sizes_on_the_cpu(device: torch.device) -> None:
    packed = pack_sequence([torch.randn(n, 4) for n in (5, 3, 1)])
    (found,) = gw.prefetch([packed], device)
    assert isinstance(found, PackedSequence)
    assert found.batch_sizes.device.type == "cpu"
    rnn = nn.GRU(4, 6).to(device)
    with torch.no_grad():
        result, _ = rnn(found)
        expected, _ = rnn.cpu()(packed)
    torch.testing.assert_close(result.data.cpu(), expected.data, rtol=1e-3, atol=1e-3)


def test_a_batch_is_never_overwritten_by_later_ones(device: torch.device) -> None:
    """Buffers and memory are used again, while the consumer still reads and keeps batches."""
    batches = [torch.full((1 << 18,), float(n)) for n in range(40)]
    kept, sums = [], []
    for n, batch in enumerate(gw.prefetch(batches, device, depth=2)):
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)  # The reader below is late.
        sums.append(batch.sum())
        if n % 7 == 0:
            kept.append((n, batch))
        del batch
    assert [float(total) for total in sums] == [float(n) * (1 << 18) for n in range(40)]
    assert all(bool((batch == n).all()) for n, batch in kept)


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_loader_that_fills_one_tensor_again_is_copied_in_time(
    device: torch.device, pinned: bool
) -> None:
    shared = torch.empty(1 << 20, pin_memory=pinned)

    def batches() -> Iterator[torch.Tensor]:
        for n in range(10):
            yield shared.fill_(float(n))

    found = list(gw.prefetch(batches(), device))
    assert all(bool((batch == n).all()) for n, batch in enumerate(found))


# What a loader holds of a tensor, how it gets at it, and what it hands out.
WAYS: dict[
    str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any], Callable[[Any], Any]]
] = {
    "itself": (lambda t: t, lambda held: held, lambda held: held),
    "slice": (lambda t: t, lambda held: held, lambda held: held[1]),
    "transposed": (lambda t: t, lambda held: held, lambda held: [held.t()]),
    "detached": (lambda t: t, lambda held: held, lambda held: {"image": held.detach()}),
    "beside new ones": (lambda t: t, lambda held: held, lambda held: (torch.zeros(2), held)),
    "array": (torch.Tensor.numpy, torch.from_numpy, torch.from_numpy),
    "storage": (
        torch.Tensor.untyped_storage,
        lambda held: torch.empty(0).set_(held),
        lambda held: torch.empty(0).set_(held),
    ),
    "named tuple": (lambda t: Pair(t, "cat"), lambda held: held.image, lambda held: held),
    "subclass of tuple": (lambda t: Row((t,)), lambda held: held[0], lambda held: [held]),
    "object": (lambda t: Labelled(t, 1), lambda held: held.image, lambda held: held),
    "dictionary": (lambda t: {"a": [t]}, lambda held: held["a"][0], lambda held: held),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inference", [False, True])
def test_what_the_loader_holds_is_copied_before_it_goes_on(way: str, inference: bool) -> None:
    hold, reach, hand_out = WAYS[way]

    def batches() -> Iterator[Any]:
        held = hold(torch.zeros(2, 3))
        for n in range(6):
            reach(held).fill_(n)
            yield hand_out(held)

    with torch.inference_mode(inference):
        found = list(gw.prefetch(batches()))
        assert [max(float(t.max()) for t in _tensors(batch)) for batch in found] == [*range(6)]


def test_a_loader_that_fills_an_entry_anew_gets_batches_of_their_own() -> None:
    def batches() -> Iterator[Any]:
        batch: dict[str, torch.Tensor] = {}
        for n in range(6):
            batch["image"] = torch.full((2,), n)
            yield batch

    assert [int(batch["image"][0]) for batch in list(gw.prefetch(batches()))] == [*range(6)]


def test_new_tensors_are_not_copied() -> None:
    made: list[int] = []

    def new(shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
        tensor = torch.zeros(shape)
        made.append(tensor.data_ptr())
        return tensor

    def collate(items: list[int]) -> dict[str, Any]:
        return {"image": new(), "label": (new(), items)}

    makers: list[Callable[[], Any]] = [
        new,
        lambda: new().t(),
        lambda: [new(), {"a": (new(), "text")}],
        lambda: Labelled(new(), 1),
        lambda: Pair(new(), "cat"),
        lambda: new().split(2),
    ]
    for make in makers:
        made.clear()
        found = list(gw.prefetch(make() for _ in range(4)))
        assert made == _places(found)
    made.clear()
    found = list(gw.prefetch(DataLoader(range(8), batch_size=2, collate_fn=collate)))  # type: ignore[arg-type]
    assert made == _places(found)


def _places(batches: list[Any]) -> list[int]:
    """Where the memory of batches lies, each once."""
    tensors = _tensors(batches)
    return [*dict.fromkeys(tensor.untyped_storage().data_ptr() for tensor in tensors)]


def test_what_a_worker_sends_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    module = sys.modules[with_tensors.__module__]
    monkeypatch.setattr(module, "kept_from_the_loader", lambda *given: copied.append(given))
    data = TensorDataset(torch.randn(8, 3), torch.arange(8))
    list(gw.prefetch(DataLoader(data, batch_size=2, num_workers=1)))
    assert copied == []


def test_items_of_a_list_and_variables_are_handed_out_as_they_are() -> None:
    items = [torch.zeros(2) for _ in range(4)]
    assert all(map(operator.is_, gw.prefetch(items), items))
    model = nn.Linear(3, 4)
    assert all(map(operator.is_, gw.prefetch(model.parameters()), model.parameters()))


def test_an_object_that_refers_to_itself_is_handed_out_as_it_is() -> None:
    batch = types.SimpleNamespace(image=torch.zeros(2))
    batch.itself = batch
    (found,) = gw.prefetch(each for each in [batch])
    assert found is batch
    del batch.itself


@pytest.mark.gpu
def test_pinned_buffers_are_few_and_the_loaders_own_are_left_alone() -> None:
    own = [torch.full((1000,), n, dtype=torch.uint8).pin_memory() for n in range(6)]
    for n, batch in enumerate(gw.prefetch(own, "cuda")):
        assert bool((batch == n).all())
    assert all(bool((tensor == n).all()) for n, tensor in enumerate(own))
    made: list[int] = []
    ahead = iter(gw.prefetch([torch.randn(1000) for _ in range(50)], "cuda", depth=2))
    assert ahead._copies is not None
    whole = ahead._copies._buffer
    ahead._copies._buffer = lambda size: made.append(size) or whole(size)  # type: ignore[method-assign,func-returns-value]  # counts
    list(ahead)
    assert len(made) == 50
    assert len({buffer.data_ptr() for buffer in ahead._copies._free}) <= 3


@pytest.mark.gpu
def test_another_stream_of_the_consumer_waits_too() -> None:
    stream = torch.cuda.Stream()
    batches = [torch.full((1 << 22,), float(n)) for n in range(8)]
    with torch.cuda.stream(stream):
        for n, batch in enumerate(gw.prefetch(batches, "cuda")):
            assert bool((batch == n).all())


def test_a_graphed_model_is_fed(device: torch.device) -> None:
    model = nn.Linear(16, 4).to(device).eval()
    graphed = gw.graph(model)
    xs = [torch.randn(8, 16) for _ in range(12)]
    with torch.no_grad():
        found = [graphed(x).cpu() for x in gw.prefetch(xs, device)]
        expected = [model(x.to(device)).cpu() for x in xs]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loader": 3}, "loader is 3, no iterable"),
        ({"depth": 0}, "depth is 0, not a whole number of at least 1"),
        ({"device": "gpu"}, "knows no device"),
        ({"device": "meta"}, "not for meta"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], text: str) -> None:
    loader = given.pop("loader", [])
    with pytest.raises(gw.OptionError, match=text):
        gw.prefetch(loader, **given)


def test_without_a_gpu_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gw.OptionError, match="there is no GPU here"):
        gw.prefetch([], "cuda")
    assert repr(gw.prefetch([], depth=4)) == "<Prefetcher of list for cpu, 4 ahead>"


@pytest.mark.slow
@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_ends_the_loop_and_the_process() -> None:
    program = """
import time
import graphwright as gw

def batches():
    for n in range(10_000):
        time.sleep(0.01)
        yield n

try:
    for batch in gw.prefetch(batches()):
        if batch == 0:
            print("begun", flush=True)
        time.sleep(0.02)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    command = [sys.executable, "-c", program]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert out == "interrupted\n"
    assert process.returncode == 0
