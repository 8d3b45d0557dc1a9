"""The package as a whole: what it exports, what importing it costs, how its errors read."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright import errors
from graphwright.programs.accelerated import InstalledParts, PartLearner

ROOT = Path(__file__).parents[2]


def test_all_is_what_the_package_shows() -> None:
    shown = {
        name
        for name, value in vars(gw).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert shown | {"__version__"} == set(gw.__all__)
    assert list(gw.__all__) == sorted(gw.__all__)


def test_dir_shows_what_is_public() -> None:
    assert sorted(dir(gw)) == gw.__all__


# What each class shows beside what it has of nn.Module and Exception, attributes included.
_ERROR = "remedy what where"
_CALLABLE = "close explain graphs prepare release statistics pool"
FACES = {
    "Accelerated": "after_s before_s explain inspection learn parts speedup to_json undo",
    "BackgroundModule": "calls cancel close done explain module report wait",
    "Buckets": "from_points from_sizes holding largest names points powers_of_two smallest waste",
    "Decoded": "lengths state steps tokens",
    "Diagnosis": "cause compared error graph index kernel line module notes ok operation seconds "
    "what",
    "Extension": "libraries name",
    "Finding": "count fix kind operation place replacement severity to_dict what",
    "FusedModule": "calls explain module regions untraced",
    "Graph": "branches close dump inputs memory mutates name nbytes node_count nodes outputs pool "
    "random replay state",
    "GraphedCallable": f"{_CALLABLE} counts fn graph_for on_miss reference sizes",
    "GraphedGenerator": "close explain generate model pool release statistics tune",
    "GraphedModule": f"{_CALLABLE} module",
    "GraphedStep": "close explain pool release statistics",
    "MemoryPool": "close closed device evict evictions graphs high_water in_use limit release "
    "reserved",
    "FallbackWarning": "",
    "ModelConfig": "buckets dynamic_shapes inputs instances kwargs model outputs pad postprocess "
    "preprocess",
    "Node": "block branch bytes duration_us grid index kind line module name operation "
    "predecessors registers segment shape shared_bytes start_us",
    "Nodes": "branches idle_us kinds name notes to_dot to_json to_svg",
    "Prefetcher": "depth device loader",
    "Profile": "call_s compare device environment figures name notes remedies remedy roofs save "
    "save_roofline save_timeline save_trace seconds table times to_dict to_html to_json training "
    "verdict",
    "ProgramInspection": "left_out name parts program_calls rows save seconds share to_json",
    "Report": "break_even budget_s check chosen chosen_row cost created curve eager_error "
    "environment figure from_json host_s input_bytes inputs interrupted left_out model "
    "notes objective own_error predictions ratios reason recalled row rows save seconds "
    "shapes speedup to_dict to_frame to_html to_json",
    "TunedModule": "calls explain module report",
}


def shown(kind: type, instance: object | None) -> set[str]:
    """The public names that graphwright gives a class, and what an instance has of its own."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("graphwright")]
    names = {name for each in own for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    if not isinstance(instance, nn.Module):
        names |= {*getattr(instance, "__dict__", ())}
    inherited = {*dir(nn.Module)} if issubclass(kind, nn.Module) else {*dir(Exception)}
    torch_s = {"get_compiler_config"}  # ModuleProxy hides it.
    return {name for name in names - inherited - torch_s if not name.startswith("_")}


def test_classes_show_their_public_names_only() -> None:
    with gw.capturing(device="cpu") as graph:
        pass
    parameter = nn.Parameter(torch.ones(2))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter * parameter).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.SGD([parameter], lr=0.1)
    inspection = gw.ProgramInspection("program", [], [])
    instances: dict[str, object] = {
        "Accelerated": gw.Accelerated(inspection, InstalledParts(), PartLearner({})),
        "Graph": graph,
        "GraphedCallable": gw.graph(torch.sin),
        "GraphedGenerator": gw.graph_generate(SimpleNamespace(_prefill=None, generate=None)),
        "GraphedStep": gw.graph_step(step, ()),
        "MemoryPool": graph.pool,
        "Prefetcher": gw.prefetch([]),
        "ProgramInspection": inspection,
    }
    for name in gw.__all__:
        kind = getattr(gw, name)
        if inspect.isclass(kind):
            is_error = issubclass(kind, gw.GraphwrightError)
            instance = gw.GraphwrightError("It broke.") if is_error else instances.get(name)
            extra = {"name", "libraries"} if kind is gw.Extension else set()
            expected = {*(_ERROR if is_error else FACES[name]).split()}
            assert shown(kind, instance) | extra == expected, name


def takes_keywords_of_others(name: str) -> bool:
    """Whether a function hands keywords on: to the model, or to an options' class."""
    parameters = inspect.signature(getattr(gw, name)).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in gw.__all__
        if inspect.isfunction(getattr(gw, name)) and not takes_keywords_of_others(name)
    ],
)
def test_every_public_function_names_all_unknown_keywords_at_once(name: str) -> None:
    function = getattr(gw, name)
    known = next(iter(inspect.signature(function).parameters))
    with pytest.raises(gw.OptionError) as raised:
        function(nonsense=1, **{f"{known}x": 2})
    assert str(raised.value).startswith(f"Bad arguments of {name}(): there is no nonsense; ")
    assert f"there is no {known}x (Did you mean {known!r}?)" in str(raised.value)


def test_a_budget_is_one_of_seconds() -> None:
    with pytest.raises(gw.OptionError, match=r"no budget \(Did you mean 'budget_s'\?\)"):
        gw.tune(nn.Identity(), (torch.ones(2),), budget="10s")  # type: ignore[call-arg]  # the mistake


def test_every_public_thing_has_a_docstring() -> None:
    for name in gw.__all__:
        value = getattr(gw, name)
        if callable(value):
            assert inspect.getdoc(value), name


def test_importing_initialises_no_cuda_and_is_quick() -> None:
    """By the interpreter's own account, the best of five: other load cannot shorten it."""
    # What is asked for counts as imported: it may be missing here, and be there elsewhere.
    code = (
        "import sys, torch; a = {*sys.modules}; asked = set();"
        "finder = type('Asked', (), {'find_spec': lambda name, *rest: asked.add(name)});"
        "sys.meta_path.insert(0, finder);"
        "import graphwright; print({*sys.modules} - a | asked);"
        "import graphwright.strategies, graphwright.ops.fused, graphwright.serving.ray;"
        "print({*sys.modules} | asked)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    package, rooms = result.stdout.splitlines()
    unwanted = ("rich", "click", "transformers", "torch._inductor", "triton", "ray", "matplotlib")
    unwanted += ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
    for name in unwanted:
        assert f"'{name}'" not in package
    for name in ("triton", "jax", "torchax", "ray"):
        assert f"'{name}'" not in rooms


def tree() -> list[type[errors.GraphwrightError]]:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in classes if issubclass(value, errors.GraphwrightError)]


def test_every_error_is_exported_and_documented() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    documented = re.findall(r"^### `(\w+)`", text, re.MULTILINE)
    assert documented == [e.__name__ for e in tree()]
    assert all(e.__name__ in gw.__all__ for e in tree())


@pytest.mark.parametrize("kind", tree())
def test_errors_say_what_where_and_the_remedy(kind: type[errors.GraphwrightError]) -> None:
    error = kind("It broke.", where="model.py:3", remedy="Mend it.")
    assert str(error) == "It broke. (at model.py:3)\nMend it."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.where, again.remedy) == ("It broke.", "model.py:3", "Mend it.")
    assert str(kind("It broke.")) == "It broke."
