"""Every attribute of every module of PyTorch's own: changed after the capture, it is never ignored.

The cases are made from the attributes themselves (`support/torch_modules.py`); one counts if eager
notices the change: by another result, or by raising.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shares import share
from torch import nn
from torch_modules import MODULES, WITHOUT, Built, Change, changes, classes, differ, run

import graphwright as gw

PYTHON = pytest.mark.parametrize("checks", ["python"], indirect=True)
# PyTorch warns of quantized modules, and graphs of what runs eagerly.
pytestmark = pytest.mark.filterwarnings("ignore")


def _tuned(model: nn.Module, args: tuple[Any, ...]) -> Any:
    return gw.tune(model, args, strategies=["torchscript"], isolate=False, remember=False)


WAYS: dict[str, Callable[[nn.Module, tuple[Any, ...]], Any]] = {
    "graph": lambda model, args: gw.graph(model),
    "fuse": lambda model, args: gw.fuse(model, args),
    "capture": lambda model, args: gw.capture(model, *args),
    "make_graphed_callables": lambda model, args: gw.make_graphed_callables(model, args),
    "tune": _tuned,
}
# Of each kind of state that a forward reads: lists, numbers, functions, tensors, packed weights.
SOME = [
    *("nn.Upsample", "nn.AvgPool2d", "nn.Fold", "nn.TransformerEncoderLayer", "nn.GRU"),
    *("dynamic.Linear", "dynamic.LSTM"),
]
MORE = [
    *("nn.ReLU", "nn.Softplus", "nn.MSELoss", "nn.TripletMarginWithDistanceLoss", "nn.Conv2d"),
    *("quantized.Linear", "quantized.Conv2d", "quantized.PReLU"),
]
TUNED = [
    *("nn.Linear", "nn.Conv2d", "nn.Upsample", "nn.MaxPool2d", "nn.AvgPool2d", "nn.LayerNorm"),
    *("nn.BatchNorm2d", "nn.ELU", "nn.Softplus", "nn.GELU", "nn.Softmax", "nn.GroupNorm"),
    *("nn.LeakyReLU", "nn.ConstantPad2d", "nn.PixelShuffle", "nn.Flatten", "nn.GRU"),
    *("dynamic.Linear", "quantized.Linear", "nn.MSELoss", "nn.CosineSimilarity", "nn.Hardtanh"),
]


@pytest.fixture(autouse=True)
def plain_attention() -> Any:
    """The fast path of the attention modules, in C++, ignores some attributes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def outcome(way: str, change: Change, of: Built | None = None) -> str:
    """What comes of a change of a module that a graph or another fast form was made of."""
    built = of or MODULES[change.module]
    model, twin, args = built.model(), built.model(), built.args()
    before = run(twin, args)
    try:
        fast = WAYS[way](model, copy.deepcopy(args))
    except gw.GraphwrightError:
        return "refused at once"
    now = run(fast, args)
    if isinstance(now, gw.GraphwrightError):
        return "refused at once"
    if isinstance(now, Exception) or differ(now, before):
        return f"wrong before the change: {now!r:.200}"
    change.apply(twin)
    change.apply(model)
    expected = run(twin, args)
    now = run(fast, args)
    if isinstance(now, gw.GraphwrightError):
        return "refused"
    if isinstance(expected, Exception) or isinstance(now, Exception):
        both = isinstance(expected, Exception) and isinstance(now, Exception)
        return "raises" if both else f"eager {expected!r:.200}, ours {now!r:.200}"
    return "wrong" if differ(now, expected) else "right"


def check(way: str, name: str) -> Counter[str]:
    found = [(change, outcome(way, change)) for change in changes(name)]
    good = ("right", "raises", "refused", "refused at once")
    assert not [f"{change}: {what}" for change, what in found if what not in good]
    return Counter(what for _, what in found)


@pytest.mark.parametrize(
    ("way", "name"),
    share(
        (pytest.param(*each) for each in itertools.product(["graph", "capture"], SOME)),
        slow=len(SOME),
    ),
)
@PYTHON
def test_a_changed_attribute_of_some_modules_is_noticed(way: str, name: str) -> None:
    found = check(way, name)
    if way == "graph":
        assert found["right"] + found["raises"] == found.total()


# CI has each module in every other way.
@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=pytest.mark.exhaustive if (m + n) % 2 else pytest.mark.slow)
        for m, way in enumerate(["fuse", "make_graphed_callables", "graph", "capture"])
        for n, name in enumerate([*SOME, *MORE])
        if name in MORE or way not in ("graph", "capture")
    ],
)
@PYTHON
def test_a_changed_attribute_of_some_modules_is_noticed_in_all_ways(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", ["graph", "fuse", "capture", "make_graphed_callables"])
@PYTHON
def test_a_changed_attribute_is_noticed(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TUNED)
@PYTHON
def test_a_changed_attribute_is_noticed_by_a_tuned_model(name: str) -> None:
    check("tune", name)


@pytest.mark.exhaustive
@PYTHON
def test_enough_cases_count() -> None:
    counted = {name: len(changes(name)) for name in MODULES}
    assert classes() - MODULES.keys() == WITHOUT.keys()
    assert len(MODULES) >= 120
    assert sum(counted.values()) >= 900
    assert {name for name, count in counted.items() if not count} == WITHOUT_A_CASE


# Their forward reads no attribute, or none whose change eager notices.
WITHOUT_A_CASE = {
    *("nn.Bilinear", "nn.Identity", "nn.LazyLinear", "nn.Linear", "nn.LogSigmoid", "nn.PReLU"),
    *("nn.Sequential", "nn.Sigmoid", "nn.Softmax2d", "nn.Softsign", "nn.Tanh", "nn.Tanhshrink"),
    *("nn.TransformerEncoder", "quantized.Dropout", "quantized.Hardswish"),
}


class Kept(nn.Module):
    """A module of the user's around one of PyTorch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


DERIVED = ["nn.Upsample", "nn.GRU", "nn.TransformerEncoderLayer", "nn.MaxPool2d"]


def _derived(model: nn.Module, *, with_forward: bool) -> nn.Module:
    """Make all parts of a model instances of subclasses."""
    for part in model.modules():
        kind: Any = type(part)

        def forward(self: Any, *args: Any, kind: Any = kind, **kwargs: Any) -> Any:
            return kind.forward(self, *args, **kwargs)

        part.__class__ = type(
            f"My{kind.__name__}", (kind,), {"forward": forward} if with_forward else {}
        )
    return model


@pytest.mark.parametrize(
    ("name", "with_forward"),
    share(
        [
            *(pytest.param(n, False, id=f"{n} inherits") for n in DERIVED),
            *(pytest.param(n, True, id=f"{n} with its own forward") for n in reversed(DERIVED)),
        ]
    ),
)
@PYTHON
def test_a_changed_attribute_of_a_subclass_is_noticed(name: str, with_forward: bool) -> None:
    built = MODULES[name]
    derived = Built(lambda: Kept(_derived(built.make(), with_forward=with_forward)), built.inputs)
    found = Counter(
        outcome(
            "graph", dataclasses.replace(change, path=f"inner.{change.path}".rstrip(".")), derived
        )
        for change in changes(name)
    )
    assert found.keys() <= {"right", "raises"}
    assert found["right"]


class Plain(nn.Module):
    """Reads what others attach to it: its code names none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def test_what_no_code_reads_may_change(device: torch.device) -> None:
    model, x = Plain().to(device).eval(), torch.randn(1, 2, device=device)
    model.layer.notes = ["a"]  # type: ignore[assignment]  # what a training loop may do
    graphed = gw.graph(model)
    with torch.no_grad():
        for step in range(4):
            graphed(x)
            model.losses.append(float(step))
            model.layer.notes.append("b")  # type: ignore[operator]  # as above
    assert graphed.statistics.captures == 1


def _quantized(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}).eval()


def _load(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(other.state_dict()))


def _set_weight_bias(model: Any, other: Any) -> None:
    model[0].set_weight_bias(other[0].weight(), other[0].bias())


@pytest.mark.parametrize("put", [_load, _set_weight_bias])
@pytest.mark.parametrize("way", WAYS)
@PYTHON
def test_new_packed_weights_are_noticed(
    way: str, put: Callable[[nn.Module, nn.Module], None]
) -> None:
    model, x = _quantized(0), torch.randn(3, 4)
    fast = WAYS[way](model, (x,))
    before = run(fast, (x,))
    put(model, _quantized(1))
    expected, now = run(model, (x,)), run(fast, (x,))
    assert differ(expected, before)
    if way == "capture":
        assert isinstance(now, gw.SignatureError)
    else:
        assert not differ(now, expected)


@pytest.mark.parametrize("name", ["dynamic.Linear", "dynamic.Conv2d", "dynamic.LSTM"])
@PYTHON
def test_packed_weights_do_not_change_in_place(name: str) -> None:
    """They have one method that might: PyTorch's own modules go on with the old weights."""
    built = MODULES[name]
    model, other, args = built.model(), built.model(seed=1), built.args()
    before = run(model, args)
    for mine, others in zip(_packed(model), _packed(other), strict=True):
        mine.__setstate__(others.__getstate__())
    assert _packed(model)
    assert not differ(run(model, args), before)


def _packed(model: nn.Module) -> list[Any]:
    held = [value for part in model.modules() for value in vars(part).values()]
    return [value for value in held if isinstance(value, torch.ScriptObject)]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def test_a_changed_attribute_of_a_hook_of_pytorch_is_noticed(device: torch.device) -> None:
    model, x = Hooked().to(device).eval(), torch.randn(2, 4, device=device)
    graphed = gw.graph(model)
    with torch.no_grad():
        before = graphed(x)
        hook: Any = next(iter(model.layer._forward_pre_hooks.values()))
        hook.name, hook.dim = hook.name, 1
        hook.eps = 10.0
        torch.testing.assert_close(graphed(x), model(x))
    assert graphed.statistics.captures == 2
    assert before.shape == x.shape
