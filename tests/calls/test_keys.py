"""Keys of choices: the same in every process, another where anything changes that may matter."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from graphwright.calls.fingerprint import Fingerprint, _Words, described, key_of
from graphwright.calls.leaves import describe
from graphwright.calls.modules import FunctionModule
from graphwright.errors import SignatureError

ENVIRONMENT = {"torch": "2.13.0", "gpu": "a GPU", "driver": "580.1"}
OPTIONS = {"objective": "latency", "tolerance": None, "allow": ("tf32",), "strategies": ["eager"]}
SOURCE = """
import torch
from torch import nn

SCALE = 1.0

def helper(x):
    return x

class Config:
    def __init__(self):
        self.heads, self.names, self._original_object_hash = 2, {"q", "k", "v"}, hash("q")

class Net(nn.Module):
    order = {"first", "second", "third"}

    def __init__(self, width=8):
        super().__init__()
        self.lin = nn.Linear(4, width)
        self.drop = nn.Dropout(0.5)
        self.eps, self.sizes, self.mode = 1e-5, [1, 2], "same"
        self.config = Config()
        self.act = helper
        self.kinds = {"a", "b", "c"}
        self.loose = [nn.Linear(2, 2)]

    def forward(self, x, flag=1):
        if x.dim() in {2, 3, 5}:
            x = [row for row in (x, x) if str(x.dtype) not in {"int", "uint", "bool"}][0]
        return self.act(self.drop(torch.relu(self.lin(x)))) * SCALE + 1.0
"""


def loaded(source: str = SOURCE, file: str = "net.py") -> types.SimpleNamespace:
    names: dict[str, Any] = {"__name__": "net"}
    exec(compile(source, file, "exec"), names)
    return types.SimpleNamespace(**names)


def net(source: str = SOURCE, **options: Any) -> nn.Module:
    model: nn.Module = loaded(source).Net(**options).eval()
    return model


def key(
    model: nn.Module | None = None,
    *args: Any,
    options: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **kwargs: Any,
) -> Fingerprint:
    call = (args or (torch.ones(2, 4),), kwargs)
    return key_of(
        model or net(),
        [call],
        torch.device("cpu"),
        ENVIRONMENT | (environment or {}),
        OPTIONS | (options or {}),
    )


def changed(change: Callable[[Any], Any]) -> Fingerprint:
    model = net()
    change(model)
    return key(model)


def rewritten(old: str, new: str) -> Fingerprint:
    assert SOURCE.count(old) == 1
    return key(net(SOURCE.replace(old, new)))


def other_defaults(model: Any) -> None:
    forward = type(model).forward
    forward.__defaults__ = (2,)


OTHERS: dict[str, Callable[[], Fingerprint]] = {
    "a layer more": lambda: changed(lambda m: m.add_module("more", nn.ReLU())),
    "a layer replaced by none": lambda: changed(lambda m: m.register_module("drop", None)),
    "another width": lambda: key(net(width=16)),
    "a layer of another class": lambda: changed(lambda m: setattr(m, "drop", nn.Identity())),
    "an attribute": lambda: changed(lambda m: setattr(m, "eps", 1e-6)),
    "an attribute of another type": lambda: changed(lambda m: setattr(m.drop, "p", "0.5")),
    "an attribute more": lambda: changed(lambda m: setattr(m, "extra", None)),
    "an item of a list": lambda: changed(lambda m: m.sizes.append(3)),
    "an item of a set": lambda: changed(lambda m: m.kinds.add("d")),
    "a list that became a tuple": lambda: changed(lambda m: setattr(m, "sizes", (1, 2))),
    "a field of a config": lambda: changed(lambda m: setattr(m.config, "heads", 4)),
    "a module in a list": lambda: changed(lambda m: m.loose.append(nn.ReLU())),
    "weights in a list": lambda: changed(lambda m: m.loose.__setitem__(0, nn.Linear(2, 3))),
    "the code of forward": lambda: rewritten("torch.relu", "torch.tanh"),
    "a constant in forward": lambda: rewritten("+ 1.0", "+ 2.0"),
    "a constant within a comprehension": lambda: rewritten('"uint"', '"bfloat"'),
    "the type of a constant": lambda: rewritten("+ 1.0", "+ 1"),
    "a global constant": lambda: rewritten("SCALE = 1.0", "SCALE = 2.0"),
    "a constant of the class": lambda: rewritten('"third"}', '"fourth"}'),
    "a default of forward": lambda: changed(other_defaults),
    "a function in an attribute": lambda: rewritten("return x\n", "return x + x\n"),
    "forward put in place": lambda: changed(lambda m: setattr(m, "forward", m.lin.forward)),
    "dtype": lambda: changed(lambda m: m.double()),
    "dtype of one parameter": lambda: changed(
        lambda m: setattr(m.lin, "bias", nn.Parameter(torch.ones(8).half()))
    ),
    "strides of a parameter": lambda: changed(
        lambda m: setattr(m.lin, "weight", nn.Parameter(torch.ones(4, 8).t()))
    ),
    "requires_grad": lambda: changed(lambda m: m.requires_grad_(False)),
    "a buffer": lambda: changed(lambda m: m.register_buffer("table", torch.ones(2))),
    "train": lambda: changed(lambda m: m.drop.train()),
    "a hook": lambda: changed(lambda m: m.lin.register_forward_hook(lambda *a: None)),
    "the shape of an input": lambda: key(None, torch.ones(3, 4)),
    "the dtype of an input": lambda: key(None, torch.ones(2, 4, dtype=torch.float64)),
    "the strides of an input": lambda: key(None, torch.ones(4, 2).t()),
    "an input that requires grad": lambda: key(None, torch.ones(2, 4, requires_grad=True)),
    "flag 1": lambda: key(None, torch.ones(2, 4), 1),
    "flag 1.0": lambda: key(None, torch.ones(2, 4), 1.0),
    "flag True": lambda: key(None, torch.ones(2, 4), True),
    "flag by name": lambda: key(None, torch.ones(2, 4), flag=1),
    "inputs in a list": lambda: key(None, [torch.ones(2, 4)]),
    "the objective": lambda: key(options={"objective": "memory"}),
    "the tolerance": lambda: key(options={"tolerance": 1e-3}),
    "what is allowed": lambda: key(options={"allow": ("tf32", "bf16")}),
    "the strategies": lambda: key(options={"strategies": ["eager", "inductor"]}),
    "the driver": lambda: key(environment={"driver": "580.2"}),
    "torch": lambda: key(environment={"torch": "2.13.1"}),
    "another library": lambda: key(environment={"triton": "3.5"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_key_changes_with(what: str) -> None:
    assert OTHERS[what]() != key()


def test_all_changes_have_keys_of_their_own() -> None:
    digests = {what: other().digest for what, other in OTHERS.items()}
    assert len(set(digests.values())) == len(digests)


def test_key_changes_with_a_switch() -> None:
    before = key()
    with torch.autocast("cpu", torch.bfloat16):
        assert key() != before
    assert key() == before


def test_key_changes_with_the_device() -> None:
    model = net()
    on = [key_of(model, [], device, {}, {}) for device in ("cpu", "cuda")]
    assert on[0] != on[1]


def test_equal_devices_share_a_key() -> None:
    def on(index: int) -> Fingerprint:
        model = nn.Identity()
        model.home = torch.device("cuda", index)
        return key_of(model, [], torch.device("cuda", index), {}, {})

    assert on(0) == on(1)
    model = nn.Identity()
    model.home = torch.device("cuda", 1)  # Not where the model is tuned.
    assert key_of(model, [], torch.device("cuda", 0), {}, {}) != on(1)


def test_key_changes_when_weights_are_tied() -> None:
    def pair(tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if tied:
            model[1].weight = model[0].weight
        return model

    assert key(pair(True)) == key(pair(True))
    assert key(pair(True)) != key(pair(False))


def test_key_changes_with_the_order_of_layers() -> None:
    a, b = nn.ReLU(), nn.Dropout()
    one, two = nn.ModuleDict({"a": a, "b": b}), nn.ModuleDict({"b": b, "a": a})
    assert key(one) != key(two)


def test_key_is_the_same_for_other_values_of_weights_and_inputs() -> None:
    torch.manual_seed(1)
    model = net()
    torch.manual_seed(2)
    other = net()
    assert not torch.equal(model.lin.weight, other.lin.weight)
    assert key(model) == key(other, torch.randn(2, 4))


def test_key_is_the_same_after_a_call() -> None:
    model = net()
    before = key(model)
    model(torch.ones(2, 4))
    assert key(model) == before


def test_key_is_the_same_for_the_same_source_elsewhere() -> None:
    other = loaded("\n" * 30 + SOURCE, "/else/where.py").Net().eval()
    assert key(other) == key()


def test_key_of_a_class_that_was_called_often_is_the_same() -> None:
    model = net()
    for _ in range(100):  # The interpreter rewrites code that is hot.
        model(torch.ones(2, 4))
    assert key(model) == key()


def test_parts_are_json_that_tells_what_differs() -> None:
    one, two = key().parts, key(net(width=16)).parts
    assert set(one) == {"model", "calls", "device", "environment", "options", "objects"}
    assert {name for name in one if one[name] != two[name]} == {"model"}
    assert one["model"]["lin"]["attributes"]["out_features"] == "int 8"
    assert two["model"]["lin"]["attributes"]["out_features"] == "int 16"


def test_parts_hold_no_values_of_tensors() -> None:
    def frozen(value: float) -> Fingerprint:
        model = nn.BatchNorm1d(2).eval()
        model.weight.data.fill_(value)
        return key(torch.jit.freeze(torch.jit.script(model)), torch.full((2, 2), value))

    assert frozen(123.25) == frozen(321.5)


def test_scripts_that_compute_something_else_have_other_keys() -> None:
    relu, tanh = (
        torch.jit.script(nn.Sequential(nn.Linear(4, 4), a)) for a in (nn.ReLU(), nn.Tanh())
    )
    assert key(relu) != key(tanh)
    wide = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    assert key(torch.jit.freeze(relu.eval())) != key(torch.jit.freeze(wide.eval()))


def function(scale: float, width: int = 4, *, gelu: bool = False) -> Any:
    weight = torch.ones(width, 4)
    if gelu:
        return lambda x: torch.nn.functional.gelu(x @ weight.t()) * scale
    return lambda x: torch.relu(x @ weight.t()) * scale


def test_functions_are_told_apart_by_code_and_closure() -> None:
    kinds = [function(1.0), function(2.0), function(1.0, 8), function(1.0, gelu=True)]
    kinds += [functools.partial(kinds[0]), functools.partial(kinds[1])]
    assert len({key(FunctionModule(f)).digest for f in kinds}) == len(kinds)
    assert key(FunctionModule(function(1.0))) == key(FunctionModule(kinds[0]))


class Odd:
    """Raises for whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Odd
        raise RuntimeError(name)


def test_what_cannot_be_described_gives_its_type() -> None:
    def holding(value: Any) -> Fingerprint:
        model = nn.Identity()
        model.held = value
        return key(model)

    for value in (Odd(), object(), iter([1]), 10**5000, "\ud800", list(range(10**5))):
        assert holding(value) == holding(value)
        assert holding(value) != holding(None)
    assert holding(object()) == holding(object())
    assert holding([0] * 10**5) == holding([1] * 10**5) != holding([0] * (10**5 + 1))


def test_what_leads_back_to_itself_has_an_end() -> None:
    def again(x: torch.Tensor, n: int = 2) -> torch.Tensor:
        return x if n == 0 else again(x, n - 1)

    def deeper(levels: int) -> Fingerprint:
        return key(model) if levels == 0 else deeper(levels - 1)

    model = FunctionModule(again)
    model.endless = [model]
    model.endless.append(model.endless)
    # Were there none, the error of too deep a recursion would come at another level.
    assert deeper(0) == deeper(50)


def test_an_argument_that_cannot_be_described_is_refused() -> None:
    with pytest.raises(SignatureError, match=r"args\[0\]"):
        key(None, object())


SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0, math.nan]),
    st.sampled_from([0j, -0j, 1j]), st.text(max_size=2), st.binary(max_size=2),
    st.sampled_from([torch.float32, torch.float16, "torch.float32", "None", "1", "int 1"]),
)  # fmt: skip


@example(math.nan, -math.nan)
@example(0.0, -0.0)
@given(SCALAR, SCALAR)
@settings(max_examples=300)
def test_keys_of_plain_values_are_equal_as_their_descriptions_are(a: Any, b: Any) -> None:
    model = nn.Identity()
    keys = [key_of(model, [], "cpu", {}, {"value": [value]}) for value in (a, b)]
    assert (keys[0] == keys[1]) == (describe(a) == describe(b))


PRINTING = """
if __name__ == "__main__":
    import sys
    sys.modules["net"], Net.__module__ = sys.modules["__main__"], "net"
    from graphwright.calls.fingerprint import key_of
    from graphwright.calls.modules import FunctionModule
    names = {"tf32", "bf16", "fp16"}
    model = Net().eval()
    print(key_of(model, [((torch.ones(2, 4),), {"flag": 1})], "cpu", {}, {"a": names}).digest)
    weight = torch.ones(4)
    print(key_of(FunctionModule(lambda x: x * weight), [], "cpu", {}, {}).digest)
    print(hash("q"))
"""


def test_key_is_the_same_under_all_names_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net.py"
    file.write_text(SOURCE)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())

    def imported(name: str) -> nn.Module:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model: nn.Module = module.Net().eval()
        return model

    models = [imported(name) for name in ("net", "package.net", "_target_net")]
    assert len({key(model) for model in models}) == 1
    # The keys of compilers' caches tell them apart: what a function reaches may differ.
    assert len({described(model.act) for model in models}) == 3


@pytest.mark.slow
def test_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    running = []
    for seed in ("1", "2"):
        script = tmp_path / seed / "net.py"
        script.parent.mkdir()
        script.write_text("\n" * int(seed) + SOURCE + PRINTING)
        environment = os.environ | {"PYTHONHASHSEED": seed}
        running.append(
            subprocess.Popen(
                [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    (one, two), codes = ([p.communicate()[0].split() for p in running], [p.wait() for p in running])
    assert codes == [0, 0]
    assert one[:2] == two[:2]
    assert one[2] != two[2]  # The processes do hash in their own ways.


HELPERS = """
import math
import torch

def deepest(x):
    return x + 1.0

def deeper(x, n=3):
    return deepest(x) if n == 0 else deeper(x, n - 1)

def around(function):
    import functools
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@around
def wrapped(x):
    return x * 5.0
"""
USING = """
import math
import torch
from torch import nn
import helpers
from helpers import deeper, wrapped

def own(x):
    return deeper(x) * math.floor(1.5)

class Net(nn.Module):
    def forward(self, x):
        return [own(row) for row in x]
"""


def using(helpers: str = HELPERS, source: str = USING) -> Fingerprint:
    module = types.ModuleType("helpers")
    exec(compile(helpers, "helpers.py", "exec"), vars(module))
    before = sys.modules.get("helpers")
    sys.modules["helpers"] = module
    try:
        return key(loaded(source).Net().eval())
    finally:
        sys.modules.pop("helpers")
        if before is not None:
            sys.modules["helpers"] = before


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        ("own(row)", "x + 1.0", "x + 2.0"),
        ("helpers.deeper(row)", "x + 1.0", "x + 2.0"),
        ("helpers.deepest(row)", "x + 1.0", "torch.relu(x + 1.0)"),
        ("wrapped(row)", "x * 5.0", "x * 6.0"),
        ("own(row)", "n == 0", "n <= 0"),
    ],
)
def test_key_changes_with_a_helper(call: str, old: str, new: str) -> None:
    source = USING.replace("own(row)", call)
    assert HELPERS.count(old) == 1
    changed = using(HELPERS.replace(old, new), source)
    assert changed != using(HELPERS, source)
    moved = using("\n# Moved.\n\n" + HELPERS, "\n\n" + source)
    assert moved == using(HELPERS, source)


def test_key_is_the_same_for_helpers_that_are_not_named() -> None:
    assert using(HELPERS.replace("x * 5.0", "x * 6.0")) == using()


def test_helpers_of_a_plain_function_are_followed() -> None:
    def of(source: str) -> Fingerprint:
        return key(FunctionModule(loaded(source).own))

    source = "def first(x):\n    return x + 1\n\ndef own(x):\n    return first(x)\n"
    assert of(source) == of("\n" + source)
    assert of(source) != of(source.replace("+ 1", "+ 2"))


def test_helpers_that_lead_on_and_on_have_an_end() -> None:
    def chain(last: str) -> Fingerprint:
        lines = [f"def f{n}(x):\n    return f{n + 1}(x), f{n // 2}(x)\n" for n in range(3000)]
        return key(FunctionModule(loaded("".join(lines) + last).f0))

    assert chain("def f3000(x):\n    return x\n") == chain("def f3000(x):\n    return -x\n")


def test_torch_is_not_followed() -> None:
    words = _Words(nn.Identity(), torch.device("cpu"))
    words.value(torch.nn.functional.gumbel_softmax)
    words.value(functools.partial(torch.nn.functional.relu))
    assert not words._helpers


def test_helpers_of_transformers_are_few_enough() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(
        transformers.BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16)
    )
    words = _Words(model, torch.device("cpu"))
    for module in model.modules():
        words.module(module)
    assert 0 < words._helpers < 1000
