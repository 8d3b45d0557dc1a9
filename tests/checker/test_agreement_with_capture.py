"""check() and capture() agree: what check finds nothing against is captured and replays right, and
what capture refuses is an obstacle for check, for the same reason."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import random
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from shares import share
from test_check import CLEAN, OBSTACLES
from tiny_architectures import CASES, Case
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls.objects import apart

# Makes a function or module, and the arguments of a call of it.
Make = Callable[[torch.device], tuple[Callable[..., Any], tuple[Any, ...]]]
CALLS: dict[str, Make] = {}


def call(make: Make) -> Make:
    CALLS[make.__name__] = make
    return make


def of_x(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one tensor."""
    CALLS[fn.__name__] = lambda device: (fn, (torch.randn(3, 4, device=device),))
    return fn


def module(cls: type[nn.Module]) -> type[nn.Module]:
    """A module in eval mode that takes one tensor."""
    CALLS[cls.__name__] = lambda device: (
        cls().to(device).eval(),
        (torch.randn(3, 4, device=device),),
    )
    return cls


# --- state that Python keeps ---


@module
class CountsCalls(nn.Module):
    n = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.n += 1
        return x.exp() * 2 + 1


@module
class CountsInTheResult(nn.Module):
    n = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.n += 1
        return x.exp() * self.n + 1


@module
class CountsToTwo(nn.Module):
    n = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.n = min(self.n + 1, 2)
        return x.exp() * 2 + 1


@module
class CountsInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.n.add_(1)
        return x.exp() * self.n + 1


@module
class ReplacesABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.n = self.n + 1
        return x.exp() * self.n + 1


@module
class KeepsTheLastResult(nn.Module):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.last = x.exp()
        return self.last * 2 + 1


@module
class AppendsToAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.append(x.shape[0])
        return x.exp() * 2 + 1


@module
class FillsADictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, int] = {}

    def forward(self, x: torch.Tensor) -> Any:
        self.seen[len(self.seen)] = 1
        return x.exp() * 2 + 1


@module
class SetsAnAttributeOnce(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        self.shape_seen = x.shape
        return x.exp() * 2 + 1


@module
class DeletesAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scratch = 1

    def forward(self, x: torch.Tensor) -> Any:
        if hasattr(self, "scratch"):
            del self.scratch
        return x.exp() * 2 + 1


@module
class TogglesAnAttribute(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if hasattr(self, "flag"):
            del self.flag
        else:
            self.flag = 1
        return x.exp() * 2 + 1


@module
class KeepsATable(nn.Module):
    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.table is None:
            self.table = torch.arange(4, device=x.device).float().cos()
        return (x * self.table).exp()


@module
class GoesOnFromATensorOfTheFirstRun(nn.Module):
    total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.total is None:
            self.total = torch.zeros(4, device=x.device)
        self.total += 1
        return x.exp() * 2 + self.total


@module
class SetsUpABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.is_set_up = False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_set_up:
            self.table.copy_(torch.arange(4, device=x.device).cos())
            self.is_set_up = True
        return (x * self.table).exp()


@module
class ReadsAndCounts(nn.Module):
    n = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.n += 1
        return x * x.max().item()


@module
class SetsUpABufferAndReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.is_set_up = False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_set_up:
            self.table.copy_(torch.arange(4, device=x.device).cos())
            self.is_set_up = True
        return (x * self.table).exp() * x.max().item()


TOTAL = 0
SEEN: list[int] = []
NUMBERS = itertools.count()
SCALE = 3.0


@of_x
def changes_a_global(x: torch.Tensor) -> Any:
    global TOTAL
    TOTAL += 1
    return x.exp() * 2 + 1


@of_x
def appends_to_a_global(x: torch.Tensor) -> Any:
    SEEN.append(1)
    return x.exp() * 2 + 1


@of_x
def takes_the_next_number(x: torch.Tensor) -> Any:
    return x.exp() * next(NUMBERS) + 1


@of_x
def takes_the_next_number_for_nothing(x: torch.Tensor) -> Any:
    next(NUMBERS)
    return x.exp() * 2 + 1


@of_x
def makes_a_tensor_of_the_next_number(x: torch.Tensor) -> Any:
    return x.exp() + torch.full_like(x, float(next(NUMBERS)))


@of_x
def moves_a_tensor_of_the_next_number(x: torch.Tensor) -> Any:
    return x.exp() + torch.tensor(float(next(NUMBERS)), device=x.device)


@of_x
def shows_the_next_number(x: torch.Tensor) -> Any:
    return x.exp() * 2 + 1, next(NUMBERS)


@of_x
def reads_a_global(x: torch.Tensor) -> Any:
    return x.exp() * SCALE + 1


@call
def counts_in_a_closure(device: torch.device) -> Any:
    n = 0

    def counting(x: torch.Tensor) -> Any:
        nonlocal n
        n += 1
        return x.exp() * n + 1

    return counting, (torch.randn(3, 4, device=device),)


@call
def reads_a_closure(device: torch.device) -> Any:
    weight, scale = torch.randn(4, device=device), 3
    return lambda x: (x * weight).exp() * scale, (torch.randn(3, 4, device=device),)


@call
def counts_in_a_default(device: torch.device) -> Any:
    def counting(x: torch.Tensor, seen: list[int] = []) -> Any:  # noqa: B006  # that is the point
        seen.append(1)
        return x.exp() * 2 + 1

    return counting, (torch.randn(3, 4, device=device),)


@call
def counts_in_an_attribute_of_the_function(device: torch.device) -> Any:
    def counting(x: torch.Tensor) -> Any:
        counting.n = getattr(counting, "n", 0) + 1  # type: ignore[attr-defined]
        return x.exp() * 2 + 1

    return counting, (torch.randn(3, 4, device=device),)


@call
def is_an_object_that_counts(device: torch.device) -> Any:
    class Counting:
        def __init__(self) -> None:
            self.n = 0

        def __call__(self, x: torch.Tensor) -> Any:
            self.n += 1
            return x.exp() * self.n

    return Counting(), (torch.randn(3, 4, device=device),)


@call
def is_a_method_that_counts(device: torch.device) -> Any:
    class Counting:
        n = 0

        def count(self, x: torch.Tensor) -> Any:
            self.n += 1
            return x.exp() * 2 + 1

    return Counting().count, (torch.randn(3, 4, device=device),)


@call
def is_a_partial(device: torch.device) -> Any:
    linear = functools.partial(F.linear, weight=torch.randn(5, 4, device=device))
    return linear, (torch.randn(3, 4, device=device),)


@call
def has_an_iterator(device: torch.device) -> Any:
    words = itertools.cycle([1.0, 2.0])
    return lambda x: x.exp() * next(words), (torch.randn(3, 4, device=device),)


@functools.lru_cache
def table_of(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device).float()


@of_x
def has_a_cached_table(x: torch.Tensor) -> Any:
    return x.exp() + table_of(4, x.device)


@call
def changes_the_list_it_is_given(device: torch.device) -> Any:
    def appending(x: torch.Tensor, seen: list[Any]) -> Any:
        seen.append(x)
        return x.exp() * 2 + 1

    return appending, (torch.randn(3, 4, device=device), [])


@call
def changes_the_dictionary_it_is_given(device: torch.device) -> Any:
    def storing(x: torch.Tensor, kept: dict[str, Any]) -> Any:
        kept["y"] = x.exp()
        return x.exp() * 2 + 1

    x = torch.randn(3, 4, device=device)
    return storing, (x, {"y": torch.zeros(3, 4, device=device)})


@call
def is_given_a_generator_of_numbers(device: torch.device) -> Any:
    def taking(x: torch.Tensor, numbers: Iterator[int]) -> Any:
        return x.exp() * next(numbers)

    return taking, (torch.randn(3, 4, device=device), itertools.count())


# --- results ---


@dataclasses.dataclass
class Out:
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenOut:
    y: torch.Tensor


@dataclasses.dataclass(slots=True)
class SlotsOut:
    y: torch.Tensor


class NamedOut(NamedTuple):
    y: torch.Tensor
    n: int


class Box:
    def __init__(self, y: Any) -> None:
        self.y = y


class Words(dict[str, Any]):
    """A dictionary of its own class."""


class Numbers(list[Any]):
    """A list of its own class."""


class MyTensor(torch.Tensor):
    """A tensor of its own class."""


def returns(name: str, make: Callable[[torch.Tensor], Any]) -> None:
    def returning(x: torch.Tensor) -> Any:
        return make(x.exp() * 2 + 1)

    CALLS[f"returns_{name}"] = lambda device: (returning, (torch.randn(3, 4, device=device),))


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a_dataclass": Out,
    "a_frozen_dataclass": FrozenOut,
    "a_dataclass_with_slots": SlotsOut,
    "a_list_of_dataclasses": lambda y: [y, {"out": Out(y)}],
    "a_generator": lambda y: (row for row in y),
    "a_map": lambda y: map(torch.exp, [y]),
    "an_iterator": lambda y: iter([y]),
    "a_set": lambda y: {y},
    "a_frozenset": lambda y: frozenset([y]),
    "a_set_of_numbers": lambda y: {1, 2},
    "a_namedtuple": lambda y: NamedOut(y, 3),
    "a_simple_namespace": lambda y: types.SimpleNamespace(y=y),
    "an_object": Box,
    "an_array": lambda y: np.zeros(3),
    "a_number_of_numpy": lambda y: np.float32(3),
    "a_deque": lambda y: collections.deque([y]),
    "an_ordered_dictionary": lambda y: collections.OrderedDict(y=y),
    "a_default_dictionary": lambda y: collections.defaultdict(list, y=y),
    "a_dictionary_of_its_own_class": lambda y: Words(y=y),
    "a_list_of_its_own_class": lambda y: Numbers([y]),
    "a_dictionary_with_numbers_for_keys": lambda y: {1: y, 2: y + 1},
    "a_dictionary_with_mixed_keys": lambda y: {1: y, "b": y + 1, (2, 3): 1, None: 2},
    "a_dictionary_with_an_object_for_a_key": lambda y: {FrozenOut: y},
    "a_dictionary_with_a_tensor_for_a_key": lambda y: {y: 1},
    "none": lambda y: None,
    "nothing_in_a_tuple": lambda y: (None, y),
    "an_empty_tuple": lambda y: (),
    "a_number": lambda y: 3,
    "a_string": lambda y: "done",
    "plain_values": lambda y: (1, 2.5, True, "a", None, 1j, b"b"),
    "a_dtype": lambda y: (y, y.dtype),
    "a_device": lambda y: (y, y.device),
    "a_size": lambda y: (y, y.shape),
    "a_slice": lambda y: (y, slice(1, 2)),
    "a_range": lambda y: (y, range(3)),
    "a_function": lambda y: (y, torch.exp),
    "a_lambda": lambda y: (y, lambda: y),
    "a_module": lambda y: (y, nn.ReLU()),
    "a_parameter": lambda y: nn.Parameter(y),
    "a_tensor_of_its_own_class": lambda y: y.as_subclass(MyTensor),
    "a_sparse_tensor": lambda y: y.to_sparse(),
    "a_nested_tensor": lambda y: torch.nested.as_nested_tensor([y, y]),
    "a_conjugate": lambda y: torch.view_as_complex(y.view(3, 2, 2)).conj(),
    "a_view_of_a_result": lambda y: (y, y[0], y.T),
    "the_same_tensor_twice": lambda y: (y, y),
    "an_empty_tensor": lambda y: (y, y[:0]),
    "an_expanded_tensor": lambda y: y[:1].expand(5, 4),
    "an_exception": lambda y: (y, ValueError("no")),
    "a_type": lambda y: (y, torch.Tensor),
    "a_generator_of_torch": lambda y: (y, torch.Generator()),
    "a_return_type_of_torch": lambda y: y.max(dim=0),
}
for _name, _make in RESULTS.items():
    returns(_name, _make)


@of_x
def returns_its_argument(x: torch.Tensor) -> Any:
    return x, x[0], x.exp() * 2 + 1


@of_x
def yields(x: torch.Tensor) -> Any:
    yield x.exp() * 2 + 1


@of_x
def has_no_result(x: torch.Tensor) -> Any:
    x.exp().mul_(2)


@module
class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x).exp(), self.linear.weight, self.linear.weight[0]


@module
class ReturnsItself(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.exp() * 2, self


# --- arguments ---


def given(name: str, use: Callable[..., Any], make: Callable[[torch.device], Any]) -> None:
    CALLS[f"is_given_{name}"] = lambda device: (
        use,
        (torch.randn(3, 4, device=device), make(device)),
    )


def uses_x(x: torch.Tensor, other: Any) -> Any:
    return x.exp() * 2 + 1


def uses_y(x: torch.Tensor, other: Any) -> Any:
    return x.exp() * 2 + other.y


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[torch.device], Any]]] = {
    "a_dataclass": (uses_y, lambda d: Out(torch.ones(4, device=d))),
    "an_object": (uses_y, lambda d: Box(torch.ones(4, device=d))),
    "an_object_of_numbers": (uses_y, lambda d: types.SimpleNamespace(y=3)),
    "a_namedtuple": (uses_y, lambda d: NamedOut(torch.ones(4, device=d), 1)),
    "a_set": (uses_x, lambda d: {1}),
    "an_array": (uses_x, lambda d: np.zeros(3)),
    "a_function": (lambda x, f: f(x).exp() + 1, lambda d: torch.relu),
    "a_module": (lambda x, f: f(x).exp() + 1, lambda d: nn.Linear(4, 4).to(d).eval()),
    "a_string": (lambda x, how: x.exp() * 2 if how == "twice" else x.exp(), lambda d: "twice"),
    "none": (uses_x, lambda d: None),
    "a_dtype": (lambda x, dtype: x.to(dtype).exp() * 2, lambda d: torch.float64),
    "a_dictionary": (lambda x, d: x.exp() * d["a"] + d["b"], lambda d: {"b": 1, "a": 2.0}),
    "a_dictionary_with_odd_keys": (
        lambda x, d: x.exp() * d[1] + d["b"] + d[None],
        lambda d: {1: 1.0, "b": torch.ones(4, device=d), None: 2},
    ),
    "a_dictionary_of_its_own_class": (lambda x, d: x.exp() * d["a"], lambda d: Words(a=2.0)),
    "a_sparse_tensor": (uses_x, lambda d: torch.eye(3, device=d).to_sparse()),
    "a_conjugate": (uses_x, lambda d: torch.ones(3, dtype=torch.complex64, device=d).conj()),
    "a_tensor_of_its_own_class": (uses_x, lambda d: torch.ones(3).to(d).as_subclass(MyTensor)),
    "a_parameter": (lambda x, w: (x * w).exp() + 1, lambda d: nn.Parameter(torch.ones(4).to(d))),
    "a_tensor_that_requires_grad": (
        lambda x, w: (x * w).exp() + 1,
        lambda d: torch.ones(4, device=d, requires_grad=True),
    ),
    "an_empty_tensor": (uses_x, lambda d: torch.ones(0, 4, device=d)),
    "an_expanded_tensor": (
        lambda x, y: x.exp() * 2 + y,
        lambda d: torch.ones(1, 4, device=d).expand(3, 4),
    ),
}
for _name, (_use, _argument) in ARGUMENTS.items():
    given(_name, _use, _argument)


@call
def is_given_one_tensor_twice(device: torch.device) -> Any:
    x = torch.randn(3, 4, device=device)
    return lambda x, y: (x.exp() + y, x), (x, x)


@call
def is_given_a_tensor_and_a_view_of_it(device: torch.device) -> Any:
    x = torch.randn(3, 4, device=device)
    return lambda x, y: x.add_(1) * y, (x, x[0])


@call
def is_given_no_tensor(device: torch.device) -> Any:
    return lambda n: torch.ones(n, device=device).exp() * 2, (3,)


@call
def is_given_nothing(device: torch.device) -> Any:
    return lambda: torch.ones(3, device=device).exp() * 2, ()


@call
def computes_without_tensors(device: torch.device) -> Any:
    return lambda n: n * 2, (3,)


@call
def is_given_its_own_weight(device: torch.device) -> Any:
    weight = torch.ones(3, 4, device=device)
    return lambda x: x.add_(1) * weight, (weight,)


# --- in place ---


@of_x
def writes_to_its_argument(x: torch.Tensor) -> Any:
    x.add_(1)
    return x * 2


@of_x
def returns_what_it_wrote_to(x: torch.Tensor) -> Any:
    return x.mul_(2).add_(1)


@of_x
def gives_its_argument_another_shape(x: torch.Tensor) -> Any:
    return x.t_().exp() * 2


@of_x
def gives_its_argument_other_memory(x: torch.Tensor) -> Any:
    x.set_(x.exp() * 2)
    return x + 1


@of_x
def gives_its_argument_other_data(x: torch.Tensor) -> Any:
    x.data = x.exp() * 2
    return x + 1


@of_x
def resizes_its_argument(x: torch.Tensor) -> Any:
    return x.resize_(2, 2).exp() * 2


@of_x
def resizes_what_it_made(x: torch.Tensor) -> Any:
    y = x.exp()
    y.resize_(2, 2)
    return y * 2


@of_x
def writes_into_out(x: torch.Tensor) -> Any:
    y = torch.empty_like(x)
    torch.add(x.exp(), 1, out=y)
    return y


@module
class WritesToAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.weight.mul_(0.5)
        return x.exp() * self.weight


@module
class GivesAWeightOtherData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.weight.data = self.weight.data * 0.5
        return x.exp() * self.weight


@module
class Casts(nn.Module):
    """Changes its own dtype in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        self.linear.double()
        return self.linear(x.double()).exp()


# --- random numbers and clocks ---


@of_x
def draws_with_torch(x: torch.Tensor) -> Any:
    return x + torch.rand_like(x) + torch.randn(4, device=x.device)


@of_x
def draws_on_the_host_for_nothing(x: torch.Tensor) -> Any:
    for _ in range(3):
        torch.rand([])
    torch.randint(7, (2,))
    return x.exp() * 2 + 1


@of_x
def lists_what_the_host_has_drawn(x: torch.Tensor) -> Any:
    torch.rand([])
    torch.rand(2).tolist()
    return x.exp() * 2 + 1


@of_x
def returns_what_the_host_has_drawn(x: torch.Tensor) -> Any:
    return x.exp() * 2 + 1, torch.rand(2)


@of_x
def draws_with_numpy(x: torch.Tensor) -> Any:
    return x.exp() * np.random.rand() + 1


@of_x
def draws_with_a_new_generator_of_numpy(x: torch.Tensor) -> Any:
    return x.exp() * np.random.default_rng().random() + 1


@of_x
def draws_with_a_seeded_generator_of_numpy(x: torch.Tensor) -> Any:
    return x.exp() * np.random.default_rng(1).random() + 1


@of_x
def draws_with_python_for_nothing(x: torch.Tensor) -> Any:
    random.random()
    return x.exp() * 2 + 1


@of_x
def makes_an_id(x: torch.Tensor) -> Any:
    uuid.uuid4()
    os.urandom(3)
    return x.exp() * 2 + 1


@of_x
def computes_with_an_id(x: torch.Tensor) -> Any:
    return x.exp() * os.urandom(7)[0] * os.urandom(7)[1] + os.urandom(1)[0]


@of_x
def draws_with_a_new_random_of_python(x: torch.Tensor) -> Any:
    return x.exp() * random.Random(3).random() + 1


@call
def draws_with_a_random_of_its_own(device: torch.device) -> Any:
    numbers = random.Random(3)
    return lambda x: x.exp() * numbers.random() + 1, (torch.randn(3, 4, device=device),)


@call
def draws_with_a_generator_of_numpy_of_its_own(device: torch.device) -> Any:
    numbers = np.random.default_rng(3)
    return lambda x: x.exp() * numbers.random() + 1, (torch.randn(3, 4, device=device),)


@call
def draws_with_a_generator(device: torch.device) -> Any:
    generator = torch.Generator(device)

    def draws(x: torch.Tensor) -> Any:
        return x.exp() * 2 + torch.empty_like(x).normal_(generator=generator)

    return draws, (torch.randn(3, 4, device=device),)


@of_x
def draws_with_a_new_generator(x: torch.Tensor) -> Any:
    generator = torch.Generator(x.device)
    return x.exp() * 2 + torch.empty_like(x).normal_(generator=generator)


@of_x
def seeds_and_draws(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return x.exp() * 2 + torch.rand_like(x)


@of_x
def forks_and_draws(x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        y = torch.rand_like(x)
    return x.exp() * 2 + y


@of_x
def drops(x: torch.Tensor) -> Any:
    return F.dropout(x, 0.5) * 2 + F.dropout(x, 0.5)


@of_x
def takes_its_time(x: torch.Tensor) -> Any:
    time.perf_counter()
    return x.exp() * 2 + 1


@of_x
def computes_with_the_time(x: torch.Tensor) -> Any:
    return x.exp() * (time.perf_counter_ns() % 1_000_003)


@of_x
def returns_the_time(x: torch.Tensor) -> Any:
    return x.exp() * 2 + 1, time.perf_counter()


# --- what else Python does ---


@of_x
def prints_a_word(x: torch.Tensor) -> Any:
    print("here")
    return x.exp() * 2 + 1


@of_x
def prints_a_tensor(x: torch.Tensor) -> Any:
    word = f"{x}"
    return x.exp() * len(word)


@of_x
def branches_on_a_shape(x: torch.Tensor) -> Any:
    return x.exp() * 2 if x.shape[0] > 1 else x + 1


@of_x
def casts_automatically(x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return (x @ x.T).float().exp()


@of_x
def turns_gradients_on(x: torch.Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(y.exp().sum(), y)
    return slope * 2


@of_x
def works_in_inference_mode(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return x.exp() * 2 + 1


@of_x
def catches_a_read(x: torch.Tensor) -> Any:
    try:
        return x * x.max().item()
    except RuntimeError:
        return x.exp() * 2 + 1


@of_x
def runs_a_numpy_function(x: torch.Tensor) -> Any:
    return x.exp() + torch.from_numpy(np.ones(4, "f")).to(x.device)


@of_x
def uses_sparse_tensors(x: torch.Tensor) -> Any:
    return torch.sparse.mm(x.to_sparse(), x.T)


@of_x
def maps(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: row * row.sum())(x).exp()


@of_x
def checkpoints(x: torch.Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(torch.exp, x, use_reentrant=False, preserve_rng_state=False) * 2 + 1


# --- modules of PyTorch ---


@module
class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x).exp()


@call
def trains(device: torch.device) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).to(device).train()
    return net, (torch.randn(3, 4, device=device),)


@call
def trains_a_function_s_module(device: torch.device) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device).train()
    return lambda x: net(x) * 2, (torch.randn(3, 4, device=device),)


@call
def norms_a_batch(device: torch.device) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).to(device).eval()
    return net, (torch.randn(3, 4, device=device),)


@module
class TakesGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            self.linear(x).sum().backward()
        return x.exp() * 2


@call
def attends(device: torch.device) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device).eval()
    mask = torch.zeros(2, 5, dtype=torch.bool, device=device)
    mask[0, 3:] = True

    def encode(x: torch.Tensor, mask: torch.Tensor) -> Any:
        return layer(x, src_key_padding_mask=mask)

    return encode, (torch.randn(2, 5, 8, device=device), mask)


@call
def encodes(device: torch.device) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).to(device).eval()
    mask = torch.zeros(2, 5, dtype=torch.bool, device=device)
    mask[0, 3:] = True
    return (lambda x, m: net(x, src_key_padding_mask=m)), (
        torch.randn(2, 5, 8, device=device),
        mask,
    )


@call
def is_an_lstm(device: torch.device) -> Any:
    net = nn.LSTM(4, 4, batch_first=True).to(device).eval()
    return net, (torch.randn(2, 3, 4, device=device),)


@call
def is_quantized(device: torch.device) -> Any:
    return lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255) * 2 + 1, (
        torch.randn(3, 4, device=device),
    )


@call
def is_lazy(device: torch.device) -> Any:
    return nn.LazyLinear(4).to(device).eval(), (torch.randn(3, 4, device=device),)


@call
def is_scripted(device: torch.device) -> Any:
    return torch.jit.script(nn.Linear(4, 4).to(device).eval()), (torch.randn(3, 4, device=device),)


# --- ours inside ---


def linear(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(device).eval()


@call
def calls_a_graphed_module(device: torch.device) -> Any:
    inner = gw.graph(linear(device))
    return lambda x: inner(x).exp() * 2 + 1, (torch.randn(3, 4, device=device),)


@call
def is_a_graphed_module(device: torch.device) -> Any:
    return gw.graph(linear(device)), (torch.randn(3, 4, device=device),)


@call
def calls_a_graphed_function(device: torch.device) -> Any:
    inner = gw.graph(torch.nn.functional.gelu)
    return lambda x: inner(x).exp() * 2 + 1, (torch.randn(3, 4, device=device),)


@call
def calls_a_warm_graphed_module(device: torch.device) -> Any:
    inner = gw.graph(linear(device))
    for _ in range(3):
        inner(torch.randn(3, 4, device=device))
    return lambda x: inner(x).exp() * 2 + 1, (torch.randn(3, 4, device=device),)


@call
def calls_a_captured_graph(device: torch.device) -> Any:
    inner = gw.capture(linear(device), torch.randn(3, 4, device=device))
    return lambda x: inner(x).exp() * 2 + 1, (torch.randn(3, 4, device=device),)


@call
def is_a_captured_graph(device: torch.device) -> Any:
    x = torch.randn(3, 4, device=device)
    return gw.capture(linear(device), x), (x,)


@call
def calls_a_fused_module(device: torch.device) -> Any:
    x = torch.randn(3, 4, device=device)
    inner = gw.fuse(linear(device), (x,))
    return lambda x: inner(x).exp() * 2 + 1, (x,)


@call
def is_a_fused_module(device: torch.device) -> Any:
    x = torch.randn(3, 4, device=device)
    return gw.fuse(linear(device), (x,)), (x,)


@call
def captures_inside(device: torch.device) -> Any:
    net = linear(device)
    return lambda x: gw.capture(net, x)(x) * 2, (torch.randn(3, 4, device=device),)


@call
def graphs_inside(device: torch.device) -> Any:
    net = linear(device)
    return lambda x: gw.graph(net)(x) * 2, (torch.randn(3, 4, device=device),)


@of_x
def asks_for_a_capture(x: torch.Tensor) -> Any:
    return x.exp() + (1 if torch.cuda.is_current_stream_capturing() else 2) + x


@of_x
def fails_in_a_capture(x: torch.Tensor) -> Any:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("not here")
    return x.exp() * 2


@of_x
def rounds_otherwise_in_a_capture(x: torch.Tensor) -> Any:
    if torch.cuda.is_current_stream_capturing():
        return (x.half() * (1 + 1e-3)).float().exp()
    return (x.half()).float().exp()


# --- verdicts ---

for _fn in (*OBSTACLES, *CLEAN):
    CALLS[f"check_{_fn.__name__}"] = lambda device, fn=_fn: (  # type: ignore[misc]
        fn,
        (torch.randn(3, 4, device=device),),
    )

# An obstacle that keeps a call from being captured; the others can be captured.
STOPPED = {
    **dict.fromkeys(
        (
            "CountsInTheResult",
            "CountsToTwo",
            "ReplacesABuffer",
            "AppendsToAList",
            "FillsADictionary",
            "TogglesAnAttribute",
            "GoesOnFromATensorOfTheFirstRun",
            "SetsUpABuffer",
            "changes_a_global",
            "appends_to_a_global",
            "takes_the_next_number",
            "takes_the_next_number_for_nothing",
            "moves_a_tensor_of_the_next_number",
            "makes_a_tensor_of_the_next_number",
            "shows_the_next_number",
            "counts_in_a_closure",
            "counts_in_a_default",
            "is_an_object_that_counts",
            "has_an_iterator",
            "GivesAWeightOtherData",
            "draws_with_a_random_of_its_own",
            "draws_with_a_generator_of_numpy_of_its_own",
        ),
        "changing state",
    ),
    **dict.fromkeys(
        (
            "returns_a_generator",
            "returns_a_map",
            "returns_an_iterator",
            "returns_a_set",
            "returns_a_frozenset",
            "returns_an_array",
            "returns_a_number_of_numpy",
            "returns_a_slice",
            "returns_a_range",
            "returns_a_function",
            "returns_a_lambda",
            "returns_a_module",
            "returns_a_tensor_of_its_own_class",
            "returns_a_sparse_tensor",
            "returns_a_nested_tensor",
            "returns_an_exception",
            "returns_a_generator_of_torch",
            "yields",
            "ReturnsItself",
            "is_given_an_array",
            "is_given_a_function",
            "is_given_a_module",
            "is_given_a_generator_of_numbers",
            "is_given_a_sparse_tensor",
            "is_given_a_conjugate",
            "is_given_a_tensor_of_its_own_class",
            "is_given_a_parameter",
            "is_given_a_tensor_that_requires_grad",
            "is_given_its_own_weight",
            "gives_its_argument_another_shape",
            "gives_its_argument_other_data",
            "draws_with_a_new_generator",
            "forks_and_draws",
            "trains",
            "trains_a_function_s_module",
            "TakesGradients",
            "is_lazy",
        ),
        "refused",
    ),
    **dict.fromkeys(
        (
            "lists_what_the_host_has_drawn",
            "returns_what_the_host_has_drawn",
            "draws_with_numpy",
            "draws_with_a_new_generator_of_numpy",
            "draws_with_python_for_nothing",
            "computes_with_an_id",
            "check_draws_with_python",
            "check_draws_with_torch_on_the_host",
        ),
        "host randomness",
    ),
    **dict.fromkeys(
        ("gives_its_argument_other_memory", "resizes_its_argument", "uses_sparse_tensors"),
        "memory",
    ),
    **dict.fromkeys(
        ("calls_a_captured_graph", "is_a_captured_graph"),
        "nested capture",
    ),
    **dict.fromkeys(
        ("ReadsAndCounts", "SetsUpABufferAndReads", "prints_a_tensor", "catches_a_read"), "read"
    ),
    **dict.fromkeys(("asks_for_a_capture", "fails_in_a_capture"), "another way"),
    "captures_inside": "read",
    "seeds_and_draws": "seeding",
    "computes_with_the_time": "clock",
    "returns_the_time": "clock",
    "runs_a_numpy_function": "copy of a constant",
    **{
        f"check_{fn.__name__}": kind for fn, (kind, severity) in OBSTACLES.items() if severity.stops
    },
}
# check judges a model on the CPU as on a GPU, where these copy, wait, or read.
JUDGED_AS_ON_A_GPU = {
    "runs_a_numpy_function",
    "rounds_otherwise_in_a_capture",
    "check_decomposes",
    "check_goes_to_the_host",
    "check_goes_to_the_host_by_name",
    "check_writes_by_a_mask",
    "check_writes_a_mean_by_a_mask",
    "check_multiplies_groups",
    "check_draws_with_torch_on_the_host",
    "lists_what_the_host_has_drawn",
    "returns_what_the_host_has_drawn",
    "check_moves_what_came_from_there",
    *(
        f"check_{fn.__name__}"
        for fn, (kind, _) in OBSTACLES.items()
        if kind in ("copy of a constant", "synchronisation")
    ),
    # On a GPU, reads of the host's tensors and other memory for a tensor of the call's own work.
    "check_branches_on_the_host",
    "resizes_what_it_made",
}
# They draw or compute something else each time, or return what cannot be compared: a key that is a
# tensor, and a size, which PyTorch's trees give back as a tuple.
NOT_COMPARED = {
    "returns_a_dictionary_with_a_tensor_for_a_key",
    "returns_a_size",
    "draws_with_torch",
    "draws_with_a_generator",
    "drops",
    "check_made_there",
    "takes_its_time",
}


def assert_same(found: Any, expected: Any, *, near: bool = False) -> None:
    mine, tree = pytree.tree_flatten(apart(found))
    theirs, expected_tree = pytree.tree_flatten(apart(expected))
    assert tree == expected_tree
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            rounding = {"rtol": 5e-3, "atol": 5e-3} if near else {}
            torch.testing.assert_close(a, b.detach(), **rounding)
        else:
            assert (type(a), a) == (type(b), b)


def fresh(name: str, device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch.manual_seed(0)
    return CALLS[name](device)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", share(CALLS, of=3))
def test_what_check_says_of_a_capture_is_what_capture_does(name: str, device: torch.device) -> None:
    fn, args = fresh(name, device)
    found = gw.check(fn, args)
    stops = [finding for finding in found if finding.severity.stops]
    kinds = [finding.kind for finding in stops]
    assert STOPPED[name] in kinds if name in STOPPED else kinds == []
    assert all(finding.what and finding.fix for finding in stops)
    if device.type == "cpu" and name in JUDGED_AS_ON_A_GPU:
        return
    fn, args = fresh(name, device)
    if stops:
        with pytest.raises(gw.CaptureError) as caught:
            gw.capture(fn, *args)
        told = {f.what: f.fix for f in stops if f.kind == "refused"}
        assert told in ({}, {caught.value.what: caught.value.remedy})
        return
    eager, _ = fresh(name, device)
    with gw.capture(fn, *args) as graph:
        for _ in range(2):
            (_, args), (_, mine) = fresh(name, device), fresh(name, device)
            result, expected = graph(*args), eager(*mine)
            if name not in NOT_COMPARED:
                assert_same(result, expected, near=name == "rounds_otherwise_in_a_capture")
                assert_same(args, mine)


# The call itself is at fault there, or the function is none of the test's.
WITHOUT_PLACE = ("is_given", "is_lazy", "trains", "is_a")


@pytest.mark.parametrize("name", sorted(n for n in STOPPED if not n.startswith(WITHOUT_PLACE)))
def test_an_obstacle_has_a_place(name: str) -> None:
    found = gw.check(*fresh(name, torch.device("cpu")))
    assert all(f.place.file and f.place.line for f in found if f.severity.stops)


def test_what_a_call_changes_is_put_back_though_capture_was_asked(device: torch.device) -> None:
    model = CountsCalls().to(device)
    x = torch.randn(3, 4, device=device)
    gw.check(model, (x,))
    assert "n" not in vars(model)
    total = TOTAL
    gw.check(changes_a_global, (x,))
    assert total == TOTAL
    kept = x.clone()
    for fn in (gives_its_argument_another_shape, gives_its_argument_other_data):
        gw.check(fn, (x,))
        assert torch.equal(x, kept)
    seen: list[Any] = []
    gw.check(lambda x, seen: seen.append(x) or x * 2, (x, seen))
    assert seen == []


def test_state_is_found_in_a_model_that_names_a_gpu() -> None:
    counts = CountsInTheResult().eval()
    found = gw.check(lambda x: counts(x.to("cuda:0")), (torch.randn(3, 4),))
    assert "changing state" in [f.kind for f in found if f.severity.stops]


def test_all_refusals_of_a_call_are_told_at_once(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device).train()
    counts = CountsInTheResult().to(device).eval()

    def everything(x: torch.Tensor) -> Any:
        return net(counts(x)) * x.max().item()

    found = gw.check(everything, (torch.randn(3, 4, device=device),))
    kinds = [f.kind for f in found if f.severity.stops]
    assert kinds == ["refused", "read", "changing state"]


QUICK = (
    *("BertModel", "DistilBertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "ViTModel"),
    "DebertaV2Model",  # It calls functions of TorchScript's.
)


@pytest.mark.parametrize(
    "case",
    [
        case
        if case.model in QUICK
        else pytest.param(case, marks=pytest.mark.exhaustive if n % 3 else pytest.mark.slow)
        for n, case in enumerate(CASES)
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_architectures_are_judged_as_they_are_captured(case: Case, device: torch.device) -> None:
    model = case.build().to(device)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), case.inputs(0))
    stops = [f for f in gw.check(model, (), inputs) if f.severity.stops]
    refused = None
    try:
        gw.capture(model, **inputs).close()
    except gw.CaptureError as error:
        refused = error
    if device.type == "cpu" and "made anew" in case.refused:
        assert stops == []  # The tape does not see what TorchScript makes; a GPU does it by itself.
    elif device.type == "cpu" and refused is None:
        assert {f.kind for f in stops} <= {"copy of a constant", "read", "host randomness"}
    else:
        assert bool(stops) == bool(refused), refused


def test_a_cache_among_the_results_of_a_language_model(device: torch.device) -> None:
    case = next(case for case in CASES if case.model == "LlamaForCausalLM")
    model = case.build().to(device)
    ids = case.inputs(0)["input_ids"].to(device)
    assert not [f for f in gw.check(model, (ids,), {"use_cache": True}) if f.severity.stops]
    with torch.no_grad(), gw.capture(model, ids, use_cache=True) as graph:
        assert_same(graph(ids, use_cache=True), model(ids, use_cache=True))
