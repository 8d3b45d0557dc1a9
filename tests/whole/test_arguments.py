"""What public functions are given: wrong types are refused by name, before any model runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw

CALLS = 500


class Idle(nn.Module):
    """A model that must not be run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.linear(x)


IDLE = Idle().eval()
X = torch.ones(2, 4)
# Each is wrong for most arguments.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-3": lambda: -3,
    "7": lambda: 7,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "10**400": lambda: 10**400,
    "1j": lambda: 1j,
    "''": lambda: "",
    "'frehs'": lambda: "frehs",
    "'1GiB'": lambda: "1GiB",
    "b'x'": lambda: b"x",
    "()": tuple,
    "[]": list,
    "{}": dict,
    "{1: 2}": lambda: {1: 2},
    "{'frehs': 2}": lambda: {"frehs": 2},
    "(1, 'a')": lambda: (1, "a"),
    "[None]": lambda: [None],
    "{3}": lambda: {3},
    "an iterator": lambda: iter((1, 2)),
    "an object": object,
    "a class": lambda: nn.Linear,
    "a function": lambda: lambda *args, **kwargs: None,
    "a module": lambda: IDLE,
    "a tensor": lambda: X,
    "a dtype": lambda: torch.float32,
    "a device": lambda: torch.device("cpu"),
    "a path": lambda: Path("no/such/file"),
    "a pool": gw.MemoryPool,
    "buckets": lambda: gw.Buckets(batch=[2]),
    "an error": lambda: ValueError("planted"),
    "a range": lambda: range(3),
}
# Names of values that are right for some kind of argument.
NONE = frozenset({"None"})
FLAG = frozenset({"True"})
COUNT = frozenset({"7", "10**400"})
POSITIVE = frozenset({"7", "1.5"})
FUNCTION = frozenset({"a function", "a module"})
LIST = frozenset({"()", "[]", "(1, 'a')", "[None]"})
ITERABLE = LIST | {"{3}", "an iterator", "a range"}
KWARGS = frozenset({"None", "{}", "{'frehs': 2}"})
LIMIT = COUNT | {"'1GiB'"}
POOL = frozenset({"None", "a pool"})
DEVICE = frozenset({"None", "a device"})
TEXT = frozenset({"'frehs'", "'1GiB'"})
EMPTY = frozenset({"()", "[]"})


@dataclass
class Public:
    """A public function: how it is called rightly, and which of the values are right for what."""

    call: Callable[..., Any]
    given: Mapping[str, Any]
    right: Mapping[str, frozenset[str]]
    # What its errors may call an argument besides its name.
    also: Mapping[str, str] = field(default_factory=dict)


def on_x(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a call, as one whose arguments all have a name."""
    return lambda *, fn=IDLE, **options: verb(fn, X, **options)


def entered(**options: Any) -> None:
    with gw.capturing(**options):
        raise AssertionError("what is wrong was captured")


def step(x: torch.Tensor) -> torch.Tensor:
    return IDLE(x)


NOTHING: frozenset[str] = frozenset()
BUCKETS = {"fn": step, "buckets": gw.Buckets(batch=[2]), "dynamic_shapes": {"x": {0: "batch"}}}
PUBLIC = {
    "tune": Public(
        gw.tune,
        {"model": IDLE, "args": (X,)},
        {
            "model": FUNCTION,
            "args": LIST,
            "kwargs": KWARGS,
            "samples": NONE,
            "weights": NONE,
            "dynamic_shapes": NONE,
            "buckets": NONE | {"buckets"},
            "pad": NONE,
            "strategies": NONE | EMPTY,
            "objective": NOTHING,
            "tolerance": NONE | POSITIVE,
            "allow": EMPTY,
            "budget_s": NONE | POSITIVE,
            "timeout_s": POSITIVE,
            "memory_limit": NONE | LIMIT,
            "isolate": NONE | FLAG,
            "remember": FLAG,
            "fresh": FLAG,
            "audit": NONE | COUNT,
            "checks": NOTHING,
            "progress": NONE | FLAG,
        },
        {"strategies": "strategy", "memory_limit": "memory limit"},
    ),
    "tune of samples": Public(
        gw.tune,
        {"model": IDLE, "samples": [(X,), (X[:1],)]},
        {"samples": NONE, "weights": NONE | {"an iterator"}},
        {"samples": "call"},
    ),
    "tune of buckets": Public(
        lambda fn, **options: gw.tune(fn, (X,), **options),
        BUCKETS,
        {
            "fn": FUNCTION,
            "buckets": NONE | {"buckets"},
            "dynamic_shapes": NONE,
            "weights": NONE,
            "pad": KWARGS - {"{'frehs': 2}"} | LIST,
        },
        {"fn": "model", "buckets": "dynamic_shapes"},
    ),
    "graph": Public(
        gw.graph,
        {"fn": IDLE},
        {
            "fn": FUNCTION,
            "pool": POOL,
            "outputs": NOTHING,
            "on_miss": NOTHING,
            "max_graphs": COUNT,
            "audit": NONE | COUNT,
            "checks": NOTHING,
            "breaks": NOTHING,
            "dynamic_shapes": NONE,
            "buckets": NONE | {"buckets"},
            "pad": NONE,
            "split": FLAG,
        },
    ),
    "graph with buckets": Public(
        gw.graph,
        BUCKETS,
        {
            "fn": FUNCTION,
            "buckets": NONE | {"buckets"},
            "dynamic_shapes": NONE,
            "pad": KWARGS - {"{'frehs': 2}"} | LIST,
            "split": FLAG,
        },
        {"buckets": "dynamic_shapes"},
    ),
    "prepare": Public(
        lambda calls: gw.graph(IDLE).prepare(calls),
        {"calls": [(X,)]},
        {"calls": EMPTY},
        {"calls": "call"},
    ),
    "capture": Public(
        on_x(gw.capture),
        {},
        {"fn": FUNCTION, "pool": POOL, "warmup": COUNT, "outputs": NOTHING},
    ),
    "predict_memory": Public(on_x(gw.predict_memory), {}, {"fn": FUNCTION, "pool": POOL}),
    "capturing": Public(entered, {}, {"pool": POOL, "device": DEVICE}),
    "check": Public(
        gw.check,
        {"fn": IDLE, "args": (X,)},
        {"fn": FUNCTION, "args": LIST, "kwargs": KWARGS, "runs": COUNT},
    ),
    "fuse": Public(
        gw.fuse,
        {"fn_or_module": IDLE, "args": (X,)},
        {
            "fn_or_module": FUNCTION,
            "args": LIST,
            "kwargs": KWARGS,
            "passes": NONE | EMPTY,
            "verify": FLAG,
            "audit": NONE | COUNT,
            "checks": NOTHING,
            "budget_s": NONE | POSITIVE,
            "measure": NONE | FLAG,
        },
        {"passes": "pass"},
    ),
    "make_graphed_callables": Public(
        gw.make_graphed_callables,
        {"callables": IDLE, "sample_args": (X,)},
        {
            "callables": FUNCTION,
            "sample_args": LIST,
            "num_warmup_iters": COUNT | {"0"},
            "allow_unused_input": FLAG,
            "pool": POOL | {"()"},
            "sample_kwargs": KWARGS,
            "activation_sets": COUNT,
            "on_miss": NOTHING,
        },
        {"callables": "sample_args"},
    ),
    "graph_step": Public(
        gw.graph_step,
        {"step": step, "sample_batch": (X,)},
        {
            "step": FUNCTION,
            "optimizer": NONE | EMPTY,
            "scaler": NONE,
            "scheduler": NONE,
            "pool": POOL,
            "on_miss": NOTHING,
            "max_graphs": COUNT,
            "warmup": COUNT,
        },
    ),
    "MemoryPool": Public(
        gw.MemoryPool, {}, {"limit": NONE | LIMIT, "device": DEVICE, "evict": FLAG}
    ),
    "Buckets": Public(gw.Buckets, {}, {"batch": frozenset({"{3}", "an iterator"})}),
    "Buckets.powers_of_two": Public(
        gw.Buckets.powers_of_two, {}, {"batch": frozenset({"an iterator"})}
    ),
    "Buckets.from_points": Public(
        gw.Buckets.from_points,
        {"names": ["batch"], "points": [(1,)]},
        {"names": NOTHING, "points": NOTHING},
        {"points": "size"},
    ),
    "Buckets.from_sizes": Public(
        gw.Buckets.from_sizes,
        {"observed": [1, 2, 3]},
        {"observed": frozenset({"{1: 2}", "{3}", "an iterator"}), "max_graphs": COUNT},
        {"observed": "size"},
    ),
    "save": Public(gw.save, {"tuned": IDLE, "path": "x"}, {"tuned": NOTHING}, {"tuned": "save()"}),
    "load": Public(
        gw.load,
        {"path": "no/such/file"},
        {
            "path": NOTHING,
            "model": NONE | FUNCTION,
            "trust": FLAG,
            "audit": NONE | COUNT,
            "checks": NOTHING,
        },
        {"path": "file"},
    ),
    "extension": Public(
        gw.extension,
        {"name": "arguments", "cpp": "int f;", "functions": {"f": "(Tensor(a!) x) -> ()"}},
        {
            "name": TEXT - {"'1GiB'"},
            "cpp": TEXT,
            "cuda": NONE | TEXT,
            "functions": NOTHING,
            "cflags": EMPTY,
            "cuda_cflags": EMPTY,
            "ldflags": EMPTY,
            "include_dirs": EMPTY | TEXT | {"''", "a path"},
            "verbose": FLAG,
        },
        {"cpp": "source", "cuda": "source", "functions": "function"},
    ),
    "triton_op": Public(
        gw.triton_op,
        {"name": "arguments::f", "function": step},
        {
            "name": NOTHING,
            "function": FUNCTION,
            "mutates_args": EMPTY,
            "reference": NONE | FUNCTION,
            "backward": NONE | FUNCTION,
            "setup_context": NONE | FUNCTION,
            "samples": EMPTY,
        },
        {"name": "namespace", "samples": "sample"},
    ),
    "Report.from_json": Public(
        gw.Report.from_json, {"text": "{}"}, {"text": NOTHING}, {"text": "report"}
    ),
}


def every_wrong_value() -> list[tuple[str, str, str]]:
    """Function, argument and value."""
    return [
        (name, argument, value)
        for name, public in PUBLIC.items()
        for argument, right in public.right.items()
        for value in VALUES
        if value not in right
    ]


def problem_of(name: str, wrong: Mapping[str, str]) -> str | None:
    """What is wrong with how a call with some wrong arguments is refused; None if nothing is."""
    public = PUBLIC[name]
    case = f"{name}({', '.join(f'{argument}={value}' for argument, value in wrong.items())})"
    try:
        public.call(**{**public.given, **{a: VALUES[value]() for a, value in wrong.items()}})
    except gw.GraphwrightError as error:
        text = str(error)
        names = {*wrong, *(public.also[each] for each in wrong if each in public.also)}
        if not any(each in text.lower() for each in names):
            return f"{case} does not name the argument: {text}"
        if error.remedy is None and not any(w in text for w in (" not ", ": write", ": pass")):
            return f"{case} names no fix: {text}"
        if len(text) > 1000 or " object at 0x" in text:
            return f"{case} is unreadable: {text}"
        return None
    except Exception as error:
        return f"{case} raises {type(error).__name__}: {error!s:.100}"
    return f"{case} is accepted"


def test_each_wrong_argument_is_named_before_any_model_runs() -> None:
    calls = every_wrong_value()
    problems = [problem_of(name, {argument: value}) for name, argument, value in calls]
    assert len(calls) > CALLS
    found = [problem for problem in problems if problem is not None]
    assert not found, "\n".join(found)
    assert IDLE.runs == 0


def test_calls_with_several_wrong_arguments_are_refused() -> None:
    chance, calls = random.Random(0), every_wrong_value()
    problems = []
    for _ in range(CALLS):
        name = chance.choice([*PUBLIC])
        own = [(argument, value) for called, argument, value in calls if called == name]
        problems.append(problem_of(name, dict(chance.choices(own, k=3))))
    found = [problem for problem in problems if problem is not None]
    assert not found, "\n".join(found)
    assert IDLE.runs == 0


def test_what_an_error_says_helps() -> None:
    idle = IDLE
    for wrong, said in (
        (lambda: gw.graph(idle, pool="1GiB"), "write MemoryPool('1GiB')"),
        (lambda: gw.check(idle, X), "write (x,) for a single input"),
        (lambda: gw.tune(idle, {"x": X}), "write kwargs=inputs for inputs by name"),
        (lambda: gw.tune(Idle, (X,)), "pass an instance, Idle(…)"),
        (lambda: gw.tune(idle, (X,), strategies=["indcutor"]), "Did you mean 'inductor'?"),
        (lambda: gw.tune(idle, (X,), strategies=["eager+inductor"]), "'inductor' is one too many"),
        (lambda: gw.tune(idle, (X,), allow=("bf61",)), "Did you mean 'bf16'?"),
        (lambda: gw.tune(idle, (X,), objective="latncy"), "Did you mean 'latency'?"),
        (lambda: gw.fuse(idle, passes=["foldd"]), "Known passes: "),
        (lambda: gw.MemoryPool(device="cuda:99"), "this machine does not have"),
    ):
        with pytest.raises(gw.OptionError) as caught:
            wrong()
        assert said in str(caught.value)
    assert IDLE.runs == 0


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise FileNotFoundError("planted in forward")


@pytest.mark.parametrize(
    "call",
    [
        lambda model: gw.tune(model, (X,), progress=False, remember=False),
        lambda model: gw.graph(model).prepare([(X,)]),
        lambda model: gw.capture(model, X),
        lambda model: gw.predict_memory(model, X),
        lambda model: gw.check(model, (X,)),
        lambda model: gw.fuse(model, (X,)),
        lambda model: gw.make_graphed_callables(model, (X,)),
    ],
)
def test_a_model_s_own_error_is_the_cause_and_is_quoted(call: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(gw.GraphwrightError, match="planted in forward") as caught:
        call(Raising().eval())
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert __file__ in str(caught.value.where)


class Features(nn.Module):
    """It takes a dictionary of features and returns it with more, as SentenceTransformer does."""

    def __init__(self, more: Any = "a text") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.more = more

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["embedding"] = self.linear(features["x"])
        features["more"] = self.more
        return features


def test_a_model_that_adds_to_its_dictionary_is_tuned_by_nobody_and_captured() -> None:
    model, place = Features().eval(), r"adds args\[0\]\['embedding'\], args\[0\]\['more'\]"
    with pytest.raises(gw.SignatureError, match=place) as caught:
        gw.tune(model, ({"x": X},), strategies=[], remember=False)
    assert "model(dict(features))" in str(caught.value.remedy)
    with torch.no_grad(), gw.capture(model, {"x": X}) as graph:
        given = {"x": X}
        assert graph(given) is given
        assert given["more"] == "a text"
        torch.testing.assert_close(given["embedding"], model.linear(X))
    assert not [each for each in gw.check(model, ({"x": X},)) if each.severity.stops]
    fused = gw.fuse(model, ({"x": X},))
    given = {"x": X}
    assert fused(given) is given
    torch.testing.assert_close(given["embedding"], model.linear(X))


def test_a_copy_of_the_dictionary_makes_it_work() -> None:
    model = Features().eval()

    def copied(features: dict[str, Any]) -> Any:
        return model(dict(features))

    tuned = gw.tune(copied, ({"x": X},), strategies=["eager:no_grad"], remember=False)
    given = {"x": X}
    torch.testing.assert_close(tuned(given)["embedding"], model.linear(X))
    assert [*given] == ["x"]
    assert tuned(given)["more"] == "a text"


def test_an_object_in_the_result_is_refused_by_place() -> None:
    with pytest.raises(gw.SignatureError, match=r"output\['more'\] is an object of type") as caught:
        gw.tune(Features(object()).eval(), ({"x": X},), strategies=[], remember=False)
    assert str(caught.value.remedy).startswith("Return tensors")


def test_a_misspelt_name_for_a_model_with_kwargs_is_refused() -> None:
    def model(x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return x * kwargs.get("mask", x)

    shapes = {"x": {0: "batch"}, "maks": {0: "batch"}}
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]), dynamic_shapes=shapes)
    with pytest.raises(gw.OptionError, match=r"dynamic_shapes names 'maks'.*\n.*'mask'\?"):
        graphed(X, mask=X)
    with pytest.raises(gw.OptionError, match=r"dynamic_shapes names 'maks'"):
        gw.tune(model, (X,), {"mask": X}, buckets=gw.Buckets(batch=[4]), dynamic_shapes=shapes)
    # It may be one that this call leaves out: that is no error, and is said once.
    with pytest.warns(RuntimeWarning, match="'maks', which is no argument of this call"):
        torch.testing.assert_close(graphed(X), X * X)
    pad = gw.graph(model, buckets=gw.Buckets(batch=[4]), pad={"maks": 0})
    with pytest.raises(gw.OptionError, match="pad names 'maks'"):
        pad(X, mask=X)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dynamic_shapes": {"x": "batch"}}, r"dynamic_shapes\['x'\] is a dimension"),
        ({"dynamic_shapes": {"x": {"0": "batch"}}}, "the axis '0' for x"),
        ({"pad": {"x": "no"}}, "pad has 'no', not a number"),
    ],
)
def test_trees_that_name_no_axis_or_number_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(gw.OptionError, match=said):
        gw.graph(lambda x: x, buckets=gw.Buckets(batch=[4]), **options)(X)
