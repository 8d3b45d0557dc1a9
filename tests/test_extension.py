"""Operators of the user's own: extension() and triton_op()."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.ops import Function, building
from graphwright.ops.diagnosis import diagnosed
from graphwright.ops.sources import unit

ADD = """
#include <ATen/ATen.h>
at::Tensor scaled_add(const at::Tensor& x, const at::Tensor& y, double scale) {
  return x + y * scale;
}
void scale_(at::Tensor& x, double by) { x.mul_(by); }
"""
SCHEMA = "(Tensor x, Tensor y, float scale=1.0) -> Tensor"
X = torch.arange(12.0).reshape(3, 4)


def like_first(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(x)


def keep_scale(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale = inputs[2]


def of_both(ctx: Any, gradient: torch.Tensor) -> Any:
    return gradient, gradient * ctx.scale, None


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests of a worker, which build little twice."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("cache")
        patch.setenv("GRAPHWRIGHT_CACHE_DIR", str(place))
        yield place


def demo(name: str = "demo", **changes: Any) -> gw.Extension:
    options: dict[str, Any] = {
        "fake": like_first,
        "backward": of_both,
        "setup_context": keep_scale,
        "samples": [(X, X, 2.0), (X.clone().requires_grad_(), X, 0.5)],
    }
    functions = {
        "scaled_add": Function(SCHEMA, **(options | changes)),
        "scale_": "(Tensor(a!) x, float by) -> ()",
    }
    return gw.extension(name, cpp=ADD, functions=functions, cflags=["-O0"])


def test_a_source_becomes_an_operator() -> None:
    made = demo()
    assert torch.equal(made.scaled_add(X, X, scale=3.0), 4 * X)
    assert torch.equal(torch.ops.demo.scaled_add(X, X), 2 * X)
    mine = X.clone()
    assert made.scale_(mine, 2.0) is None
    assert torch.equal(mine, 2 * X)
    made.scale_.check(X.clone(), 2.0)
    assert "Tensor(a!) x" in made.scale_.schema
    assert "scaled_add" in dir(made)
    with pytest.raises(AttributeError, match="it has scaled_add, scale_"):
        made.other  # noqa: B018  # the look is what is tested


def test_its_gradients_are_the_given_backward_s() -> None:
    made = demo()
    x, y = (X.double().requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: made.scaled_add(a, b, 0.5), (x, y))


def test_a_gradient_that_nobody_gave_is_an_error() -> None:
    made = demo("no_gradient", backward=None, setup_context=None, samples=[(X, X, 2.0)])
    x = X.clone().requires_grad_()
    loss = made.scaled_add(x, x).sum()
    with pytest.raises(gw.ExtensionError, match="has no backward"):
        loss.backward()
    with pytest.raises(gw.ExtensionError, match="autograd cannot follow"):
        made.scale_(x, 2.0)
    with torch.no_grad():
        made.scale_(x, 2.0)


class Net(nn.Module):
    def __init__(self, made: gw.Extension) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = x.clone()
        self.made.scale_(mine, 2.0)
        return self.made.scaled_add(mine, x, 3.0).relu()


def test_it_is_captured() -> None:
    net = Net(demo()).eval()
    graph = gw.capture(net, X)
    for x in (X + 1, X - 5):
        assert torch.equal(graph(x), net(x))


def test_it_is_compiled_and_exported() -> None:
    net = Net(demo()).eval()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X - 5), net(X - 5))
    exported = torch.export.export(net, (X,))
    assert torch.equal(exported.module()(X - 5), net(X - 5))


@pytest.mark.long
def test_it_is_tuned() -> None:
    net = Net(demo()).eval()
    report = gw.tune(net, (X,), strategies=["aot_autograd", "eager:no_grad"]).report
    assert report.notes == [note for note in report.notes if "in this process" not in note]
    assert not [row for row in report.rows if row.status in ("failed", "wrong", "crashed")]


def test_what_was_pickled_or_copied_is_the_same() -> None:
    made = demo()
    back, operator = pickle.loads(cloudpickle.dumps((made, made.scaled_add)))
    assert back is made
    assert torch.equal(operator(X, X), 2 * X)
    assert copy.deepcopy(Net(made)).made is made
    assert copy.deepcopy(made.scaled_add) is made.scaled_add


def test_under_the_same_name_another_takes_its_place() -> None:
    first = demo("again")
    assert demo("again") is not None
    source = ADD.replace("y * scale", "y * scale + 1")
    function = Function(SCHEMA, fake=like_first)
    other = gw.extension("again", cpp=source, functions={"scaled_add": function}, cflags=["-O0"])
    assert torch.equal(torch.ops.again.scaled_add(X, X), 2 * X + 1)
    assert not hasattr(torch.ops.again, "scale_")
    first.close()
    assert torch.equal(other.scaled_add(X, X), 2 * X + 1)
    other.close()
    assert not hasattr(torch.ops.again, "scaled_add")


def test_files_headers_and_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "factor.h").write_text("inline double factor() { return 2; }\n")
    source = tmp_path / "twice.cpp"
    source.write_text(
        '#include "factor.h"\n#include <ATen/core/Tensor.h>\n#include <ATen/ops/mul.h>\n'
        "namespace mine {\n"
        "at::Tensor twice(const at::Tensor& x) { return at::mul(x, factor()); }\n"
        "}\n"
    )
    function = Function("(Tensor x) -> Tensor", fake=like_first, symbol="mine::twice")

    def made() -> gw.Extension:
        return gw.extension("files", cpp=source, functions={"double": function}, cflags=["-O0"])

    before = made()
    assert torch.equal(before.double(X), 2 * X)
    (tmp_path / "factor.h").write_text("inline double factor() { return 3; }\n")
    after = made()
    assert torch.equal(after.double(X), 3 * X)
    assert before.libraries != after.libraries
    after.close()


BUILDER = """
import sys
import torch
import graphwright as gw
from graphwright.ops import Function
source = open({source!r}).read()
functions = {{"scaled_add": Function({schema!r}, fake=lambda x, y, scale: torch.empty_like(x))}}
print("begun", flush=True)
made = gw.extension("shared", cpp=source, functions=functions, cflags=["-O0"])
x = torch.ones(3)
print(float(made.scaled_add(x, x).sum()))
"""


def builder(cache: Path, source: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "GRAPHWRIGHT_CACHE_DIR": str(cache),
        "PYTHONPATH": str(Path(gw.__file__).parent.parent),
    }
    text = BUILDER.format(source=str(source), schema=SCHEMA)
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
def test_a_killed_build_and_two_at_once_leave_a_cache_that_works(tmp_path: Path) -> None:
    source = tmp_path / "add.cpp"
    source.write_text(ADD)
    place = tmp_path / "extensions"
    with builder(tmp_path, source) as killed:
        while not list(place.glob("*.new/source.cpp")):  # It is under way.
            assert killed.poll() is None
        os.killpg(killed.pid, signal.SIGKILL)
    assert list(place.glob("*.new"))
    both = [builder(tmp_path, source) for _ in range(2)]
    assert [p.communicate(timeout=240)[0].split() for p in both] == [["begun", "6.0"]] * 2
    (library,) = place.glob("*/library.so")
    assert not list(place.glob("*.new"))
    # It was built once: who comes second finds it, and nobody writes to it again.
    written = library.stat().st_mtime_ns
    third = builder(tmp_path, source)
    assert third.communicate(timeout=60)[0].split() == ["begun", "6.0"]
    assert library.stat().st_mtime_ns == written
    # Half of a library is none.
    library.write_bytes(library.read_bytes()[:5000])
    fourth = builder(tmp_path, source)
    assert fourth.communicate(timeout=240)[0].split() == ["begun", "6.0"]


# What is wrong before anything is built: what is passed, and what the error says.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name with a hyphen": ({"name": "my-ops"}, "no name for an extension"),
    "a namespace of PyTorch's": ({"name": "aten"}, "a namespace of PyTorch's"),
    "a function with a space": ({"functions": {"f g": SCHEMA}}, "no name for a function"),
    "no functions": ({"functions": {}}, "has no functions"),
    "no source": ({"cpp": None}, "has no source"),
    "an empty source": ({"cpp": "\n"}, "is empty"),
    "a file that is not there": ({"cpp": "nowhere.cpp"}, "cannot be read: No such file"),
    "a schema that cannot be read": (
        {"functions": {"f": Function("(Tensr x) -> Tensor", fake=like_first)}},
        "schema of f cannot be read",
    ),
    "a schema without results": (
        {"functions": {"f": Function("(Tensor x)", fake=like_first)}},
        "schema of f cannot be read",
    ),
    "a schema of another name": (
        {"functions": {"f": Function("g(Tensor x) -> Tensor", fake=like_first)}},
        "has another name: 'g'",
    ),
    "a result that is an argument": (
        {"functions": {"f": Function("(Tensor(a!) x) -> Tensor(a!)", fake=like_first)}},
        "returns one of its arguments",
    ),
    "no fake": ({"functions": {"f": "(Tensor x) -> Tensor"}}, "has no fake"),
    "a fake of other arguments": (
        {"functions": {"f": Function("(Tensor x) -> Tensor", fake=lambda: None)}},
        "does not take what its schema says",
    ),
    "a fake that is no function": (
        {"functions": {"f": Function("(Tensor x) -> Tensor", fake=3)}},
        "fake of f is no function",
    ),
    "a setup_context alone": (
        {"functions": {"f": Function("(Tensor x) -> Tensor", like_first, None, keep_scale)}},
        "a setup_context and no backward",
    ),
    "a backward of what writes": (
        {"functions": {"f": Function("(Tensor(a!) x) -> ()", backward=of_both)}},
        "writes to an argument, and has a backward",
    ),
    "CUDA without a GPU": ({"cpp": None, "cuda": "\nvoid f() {}"}, "a source for CUDA alone"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_told_before_it_is_built(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    changes, said = WRONG[case]
    options: dict[str, Any] = {
        "name": "wrong",
        "cpp": ADD,
        "functions": {"scaled_add": Function(SCHEMA, fake=like_first)},
    }
    options |= changes
    with pytest.raises((gw.ExtensionError, gw.OptionError), match=said):
        gw.extension(options.pop("name"), **options)
    assert not hasattr(torch.ops.wrong, "f")


def one(body: str, schema: str = "(Tensor x) -> Tensor", **options: Any) -> dict[str, Any]:
    cpp = f"#include <ATen/core/Tensor.h>\n#include <ATen/ops/empty_like.h>\n{body}\n"
    function = Function(schema, **({"fake": like_first} | options))
    return {"cpp": cpp, "functions": {"f": function}}


PLAIN = "at::Tensor f(const at::Tensor& x) { return at::empty_like(x).fill_(1); }"
# What the compiler, the loader, PyTorch or the check finds.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a syntax error": (
        one("at::Tensor f(const at::Tensor& x) {\n  return x\n}"),
        ["does not compile: expected ‘;’|expected ';'", "C\\+\\+ of bad:4", "return x"],
    ),
    "a header that is not there": (
        one(f'#include "nowhere.h"\n{PLAIN}'),
        ["nowhere.h: No such file", "in include_dirs"],
    ),
    "a function that is not there": (
        one(PLAIN.replace(" f(", " g(")),
        ["functions names f, and the C\\+\\+ source of bad has no such function"],
    ),
    "a function that is not defined": (
        one("at::Tensor f(const at::Tensor& x);"),
        ["uses f\\(at::Tensor const&\\) and does not define it"],
    ),
    "an int for a number": (
        one(
            "at::Tensor f(const at::Tensor& x, int n) { return x; }", "(Tensor x, int n) -> Tensor"
        ),
        ["has a type that no schema has", "Please use int64_t"],
    ),
    "a float for a number": (
        one(
            "at::Tensor f(const at::Tensor& x, float n) { return x; }",
            "(Tensor x, float n) -> Tensor",
        ),
        ["has a type that no schema has", "Please use double"],
    ),
    "an overloaded function": (
        one(f"{PLAIN}\nat::Tensor f(double x);"),
        [
            "f in the C\\+\\+ source of bad cannot be registered",
            "neither a template nor overloaded",
        ],
    ),
    "fewer arguments than the schema": (
        one(PLAIN, "(Tensor x, Tensor y) -> Tensor", fake=lambda x, y: x),
        ["f in the C\\+\\+ source of bad is not what its schema says", "Let both say the same"],
    ),
    "another type than the schema": (
        one("at::Tensor f(double x) { return {}; }"),
        ["is not what its schema says", "float arg0"],
    ),
    "an option that no compiler knows": (
        one(PLAIN) | {"cflags": ["-fno-such-option"]},
        ["does not know an option", "fno-such-option"],
    ),
    "a library that is not there": (
        one(PLAIN) | {"ldflags": ["-lnowhere"]},
        ["cannot be linked: cannot find -lnowhere"],
    ),
    "a fake of another shape": (
        one(PLAIN, fake=lambda x: x.new_empty(7), samples=[(X,)]),
        ["bad::f has a fake that returns something else"],
    ),
    "a result that is an argument after all": (
        one("at::Tensor f(const at::Tensor& x) { return x; }", samples=[(X,)]),
        ["bad::f does something that its schema does not say"],
    ),
    "an argument that is written to": (
        one(
            "at::Tensor f(const at::Tensor& x) { x.fill_(3); return at::empty_like(x).fill_(1); }",
            samples=[(X,)],
        ),
        ["bad::f does something that its schema does not say"],
    ),
    "a backward of too few gradients": (
        one(PLAIN, backward=lambda ctx, g: (g, g), samples=[(X.clone().requires_grad_(),)]),
        ["bad::f does not do under torch.compile what it does by itself"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BAD)
def test_bad_sources_have_errors_of_their_own(case: str) -> None:
    options, said = BAD[case]
    with pytest.raises(gw.ExtensionError) as raised:
        gw.extension("bad", **({"cflags": ["-O0"]} | options))
    text = str(raised.value)
    for pattern in said:
        assert raised.match(pattern), text
    assert "\n" in text, "it has a remedy"
    assert not hasattr(torch.ops.bad, "f")
    assert not list(building.folder().glob("*.new"))


TOOLS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "C++": (lambda patch: patch.setenv("CXX", "no-such-compiler"), "no C\\+\\+ compiler"),
    "CUDA": (lambda patch: patch.setattr(building, "_nvcc", lambda: None), "no CUDA compiler"),
    "ninja": (
        lambda patch: patch.setattr(
            building.shutil, "which", lambda name, **k: None if name == "ninja" else name
        ),
        "Ninja, which builds tools, is not installed",
    ),
    "setuptools": (
        lambda patch: patch.setattr(building.importlib.util, "find_spec", lambda name: None),
        "setuptools, which helps",
    ),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_is_missing_is_named(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide, said = TOOLS[tool]
    hide(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: tool == "CUDA")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    source = {"cuda" if tool == "CUDA" else "cpp": ADD + f"// {tool}"}
    functions = {"scaled_add": Function(SCHEMA, fake=like_first)}
    with pytest.raises(gw.ExtensionError, match=said) as raised:
        gw.extension("tools", functions=functions, **source)
    assert "nstall" in str(raised.value)


def test_tensors_on_a_device_without_a_source_are_told() -> None:
    made = demo("devices")
    with pytest.raises(gw.ExtensionError, match="has no source in CUDA"):
        torch.ops.devices.scaled_add.default._op_dk(torch._C.DispatchKey.CUDA, X, X, 1.0)
    made.close()


# triton_op().


def add_one(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("this is for GPUs")


def add_one_plainly(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_triton_operator_has_its_reference_on_the_cpu() -> None:
    made = gw.triton_op("tritons::add_one", add_one, reference=add_one_plainly)
    assert torch.equal(made(X), X + 1)
    again = pickle.loads(cloudpickle.dumps(made))
    assert torch.equal(again(X), X + 1)
    graph = gw.capture(lambda x: made(x) * 2, X)
    assert torch.equal(graph(X + 3), 2 * X + 8)
    x = X.clone().requires_grad_()
    with pytest.raises(gw.ExtensionError, match="has no backward"):
        made(x).sum().backward()


def test_triton_operators_that_make_no_sense() -> None:
    with pytest.raises(gw.OptionError, match="has no namespace"):
        gw.triton_op("add_one", add_one)
    with pytest.raises(gw.ExtensionError, match="Annotate each argument"):
        gw.triton_op("tritons::bare", lambda x: x)
    made = gw.triton_op("tritons::gpu_only", add_one)
    with pytest.raises(gw.ExtensionError, match="Triton has no kernels"):
        made(X)


# On a GPU.

NVCC = """[1/2] /usr/local/cuda/bin/nvcc ... -c source.cu
CUDA of mine(2): error: identifier "gatedd" is undefined
    out[i] = gatedd(x[i]);
             ^

1 error detected in the compilation of "source.cu".
"""


def test_errors_of_nvcc_are_read() -> None:
    source = unit("CUDA", "#include <a.h>\n  out[i] = gatedd(x[i]);\n", "mine", {}, ())
    error = diagnosed(RuntimeError(NVCC), source, "mine")
    assert (
        error.what == 'The CUDA source of mine does not compile: identifier "gatedd" is undefined'
    )
    assert error.where == "CUDA of mine:2"
    assert error.remedy is not None
    assert "2 | out[i] = gatedd(x[i]);" in error.remedy


@pytest.mark.gpu
def test_a_cuda_twin_does_the_same() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import extension as example

    made, plain = example.operators("cuda"), example.Plain()
    for count in (0, 1, 5, 1024, 4099, 1 << 20):
        x, gate = torch.randn(2, count + 1, device="cuda")
        # The second begins where sixteen bytes do not divide the address.
        for a, b in ((x, gate), (x[1:], gate[1:])):
            torch.testing.assert_close(made.gated_add(a, b, 0.5), plain(a, b))
    own = example.Own(made)
    x, gate = torch.randn(2, 33, 65, device="cuda")
    graph = gw.capture(own, x, gate)
    compiled = torch.compile(own, fullgraph=True)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x, gate = torch.randn(2, 33, 65, device="cuda")
        torch.testing.assert_close(graph(x, gate), plain(x, gate))
        torch.testing.assert_close(compiled(x, gate), plain(x, gate))
    with pytest.raises(gw.ExtensionError, match="does not compile") as raised:
        gw.extension(
            "bad_cuda",
            cuda=example.CUDA.replace("gated(x[i]", "gatedd(x[i]"),
            functions={"gated_add": Function("(Tensor x) -> Tensor", fake=like_first)},
        )
    assert "gatedd(x[i]" in str(raised.value)


TRITON = """
import sys
import torch
import triton
import triton.language as tl
import graphwright as gw

@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + 1, at < n)

def add_one(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    torch.library.wrap_triton(kernel)[grid](x, out, x.numel(), BLOCK=256)
    return out

if __name__ == "__main__":
    x = torch.randn(1000, device="cuda")
    made = gw.triton_op("mine::add_one", add_one, reference=lambda x: x + 1, samples=[(x,)])
    class Net(torch.nn.Module):
        def forward(self, x):
            return made(x) * 2
    net = Net().eval()
    graph = gw.capture(net, x)
    compiled = torch.compile(net, fullgraph=True)
    for y in (x + 1, x - 3):
        for call in (net, graph, compiled):
            torch.testing.assert_close(call(y), 2 * y + 2)
    torch.testing.assert_close(made(x.cpu()), x.cpu() + 1)
    report = gw.tune(net, (x,), strategies=["eager+graph", "inductor"]).report
    print([row.reason for row in report.rows if row.status in ("failed", "crashed", "wrong")])
"""


@pytest.mark.gpu
def test_a_triton_kernel_becomes_an_operator(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRITON)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
