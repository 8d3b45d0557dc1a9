"""Signatures differ where calls differ; the watch sees what makes built work out of date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import Small
from torch import nn

from graphwright.calls.modules import FunctionModule
from graphwright.calls.signature import CallSignature
from graphwright.calls.split import argument_names, flatten, unflatten
from graphwright.calls.watch import ModuleWatch
from graphwright.errors import SignatureError

X = torch.randn(4, 8)


def differs(a: tuple[Any, ...], b: tuple[Any, ...]) -> str | None:
    return CallSignature.of(a, {}).differences(b, {})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((X,), (torch.randn(1, 8),)),
        ((X,), (X.double(),)),
        ((X,), (torch.randn(8, 4).t(),)),
        ((X,), (X, X)),
        ((X,), ()),
        ((X,), ([X],)),
        ((X,), (X.clone().requires_grad_(),)),
        ((X, 1), (X, 1.0)),
        ((X, 1), (X, True)),
        ((X, 0.0), (X, -0.0)),
        ((X, "a"), (X, "b")),
        ((X, None), (X, 0)),
        ((X, X), (X, X.clone())),
        ((X.clone(), X), (X, X)),
    ],
)
def test_calls_that_differ(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert differs(first, second)


def test_equal_calls_have_equal_signatures() -> None:
    nan = float("nan")
    assert differs((X, nan, 2j, [None]), (torch.randn(4, 8), nan, 2j, [None])) is None


def test_all_differences_are_named_at_once() -> None:
    signature = CallSignature.of((X,), {"scale": 1.0})
    text = signature.differences((torch.randn(1, 8),), {"scale": 2.0})
    assert text is not None
    assert "args[0] is (1, 8)" in text
    assert "scale is float 2.0" in text


def test_an_opaque_object_is_refused_by_name() -> None:
    with pytest.raises(SignatureError, match=r"cache\['k'\] is an object of type object"):
        CallSignature.of((X,), {"cache": {"k": object()}})


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(SignatureError, match="sparse_coo"):
        CallSignature.of((torch.eye(3).to_sparse(),), {})


def test_autocast_and_backend_switches_count() -> None:
    signature = CallSignature.of((X,), {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in (signature.differences((X,), {}) or "")
    torch.use_deterministic_algorithms(True)
    try:
        assert "switch" in (signature.differences((X,), {}) or "")
    finally:
        torch.use_deterministic_algorithms(False)
    assert signature.differences((X,), {}) is None


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(trees, max_size=3), st.dictionaries(st.text(min_size=1, max_size=3), trees))
def test_flatten_round_trip_and_names(args: list[Any], kwargs: dict[str, Any]) -> None:
    flat, spec = flatten(tuple(args), kwargs)
    assert unflatten(flat, spec) == (tuple(args), kwargs)
    assert len(argument_names(tuple(args), kwargs)) == len(flat)


def rebind(model: Small) -> None:
    model.first.weight = nn.Parameter(torch.zeros(16, 16))


def point_elsewhere(model: Small) -> None:
    model.first.weight.data = torch.zeros(16, 16)


def assign(model: Small) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def replace(model: Small) -> None:
    model.first = nn.Linear(16, 16)


def add_hook(model: Small) -> None:
    model.second.register_forward_hook(lambda *_: None)


def train(model: Small) -> None:
    model.second.train()


def rename_attribute(model: Small) -> None:
    model.first.in_features = 17


def drop_buffer(model: Small) -> None:
    model.offset = None


@pytest.mark.parametrize(
    "change",
    [
        rebind,
        point_elsewhere,
        assign,
        replace,
        add_hook,
        train,
        rename_attribute,
        drop_buffer,
        lambda m: m.double(),
    ],
)
def test_the_watch_notices(change: Any) -> None:
    model = Small().eval()
    watch = ModuleWatch(model, values=False)
    assert watch.changed() is None
    change(model)
    assert watch.changed()


def test_in_place_changes_count_only_for_held_values() -> None:
    model = Small().eval()
    holds, reads = ModuleWatch(model, values=True), ModuleWatch(model, values=False)
    model.load_state_dict(Small().state_dict())
    assert reads.changed() is None
    assert "holds a copy" in (holds.changed() or "")


def test_a_function_s_modules_and_tensors_are_found() -> None:
    model, scale = Small().train(), torch.ones(16)

    def forward(x: torch.Tensor, net: nn.Module = model) -> torch.Tensor:
        return net(x) * scale

    wrapped = FunctionModule(forward)
    assert wrapped.training
    assert len(list(wrapped.parameters())) == 4
    assert any(b is scale for b in wrapped.buffers())
    assert len(list(FunctionModule(model.forward).parameters())) == 4


def test_where_arguments_overlap_counts() -> None:
    buffer = torch.randn(2, 4)
    assert not CallSignature.of((buffer[0], buffer[0]), {}).fits((buffer[0], buffer[1]), {})
    assert not CallSignature.of((buffer[0], buffer[1]), {}).fits((buffer[0], buffer[0]), {})
    assert CallSignature.of((buffer[0], buffer[1]), {}).fits((buffer[0], buffer[1]), {})


class Loud(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.randn(3).as_subclass(Loud), "subclass"),
        (lambda: torch.randn(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_more_than_their_bits_are_refused(make: Any, text: str) -> None:
    tensor = make()
    with pytest.raises(SignatureError, match=text):
        CallSignature.of(([tensor],), {})
    signature = CallSignature.of((X,), {})
    assert not signature.fits((tensor,), {})
    assert text in (signature.differences((tensor,), {}) or "")


def test_calls_inside_a_transform_do_not_fit() -> None:
    signature = CallSignature.of((X[0], X[0].clone()), {})

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert not signature.fits((a, b), {})
        assert "torch.func" in (signature.differences((a, b), {}) or "")
        return a + b

    torch.vmap(call)(X, X.clone())


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.zero, self.scale, self.mask = 1, 0.0, 2.0, torch.ones(3)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "k", 1.0),
        lambda m: setattr(m, "k", True),
        lambda m: setattr(m, "zero", -0.0),
        lambda m: setattr(m, "scale", torch.tensor([2.0, 3.0])),
        lambda m: setattr(m, "mask", torch.ones(3)),
        lambda m: m.mask.add_(1),
        lambda m: setattr(m, "forward", lambda x: x),
    ],
)
def test_the_watch_notices_attributes_by_type_and_bits(change: Any) -> None:
    model = Attributes().eval()
    watch = ModuleWatch(model, values=True)
    change(model)
    assert watch.changed()


def test_an_equal_value_in_another_object_is_no_change() -> None:
    model = Attributes().eval()
    watch = ModuleWatch(model, values=True)
    model.scale = float("2.0")
    model.eval()
    assert watch.changed() is None


reached_by_name = Small().eval()


def test_the_watch_sees_what_a_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ModuleWatch(FunctionModule(lambda x: reached_by_name(x)), values=False)
    assert watch.changed() is None
    monkeypatch.setitem(globals(), "reached_by_name", Small().eval())
    assert watch.changed() == "the variable reached_by_name was replaced"


class Pipeline:
    def __init__(self) -> None:
        self.net = Small().eval()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_objects_that_own_modules_are_searched() -> None:
    pipeline = Pipeline()
    for function in (pipeline, pipeline.run):
        wrapped = FunctionModule(function)
        assert len(list(wrapped.parameters())) == 4
        watch = ModuleWatch(wrapped, values=False)
        kept, pipeline.net = pipeline.net, Small().eval()
        assert watch.changed()
        pipeline.net = kept

    def defaulted(x: torch.Tensor, *, net: nn.Module = pipeline.net) -> torch.Tensor:
        return net(x)

    assert len(list(FunctionModule(defaulted).parameters())) == 4
