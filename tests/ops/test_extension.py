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
from torch.autograd import forward_ad

import graphwright as gw
from graphwright.ops.custom import building
from graphwright.ops.custom.build_errors import diagnosed
from graphwright.ops.custom.operator import Function
from graphwright.ops.custom.sources import unit

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


@pytest.mark.slow
def test_a_gradient_that_nobody_gave_is_an_error() -> None:
    made = demo("no_gradient", backward=None, setup_context=None, samples=[(X, X, 2.0)])
    x = X.clone().requires_grad_()
    loss = made.scaled_add(x, x).sum()
    with pytest.raises(gw.ExtensionError, match="has no backward"):
        loss.backward()
    with pytest.raises(gw.ExtensionError, match="cannot be followed by autograd"):
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


@pytest.mark.slow
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


def plus_one(**options: Any) -> gw.Extension:
    """Another source under the name of demo(), unless it is told otherwise."""
    source = ADD.replace("y * scale", "y * scale + 1")
    function = Function(SCHEMA, **({"fake": like_first} | options))
    return gw.extension("demo", cpp=source, functions={"scaled_add": function}, cflags=["-O0"])


@pytest.mark.slow
def test_under_a_name_that_was_used_another_lies_beside_it() -> None:
    first = demo()
    graph = gw.capture(lambda x: first.scaled_add(x, x), X)
    packed = cloudpickle.dumps(first)
    other = plus_one()
    assert demo() is first
    assert other.scaled_add.name != first.scaled_add.name
    assert torch.equal(other.scaled_add(X, X), 2 * X + 1)
    for still in (first.scaled_add, pickle.loads(packed).scaled_add, torch.ops.demo.scaled_add):
        assert torch.equal(still(X, X), 2 * X)
    assert torch.equal(graph(X + 1), 2 * X + 2)


@pytest.mark.slow
def test_what_fails_takes_nothing_away() -> None:
    first = demo()
    known = len([name for name in dir(torch.ops.demo) if "scaled_add" in name])
    with pytest.raises(gw.ExtensionError, match="has a fake that returns something else"):
        plus_one(fake=lambda x, y, scale: x.new_empty(7), samples=[(X, X)])
    assert torch.equal(first.scaled_add(X, X), 2 * X)
    assert len([name for name in dir(torch.ops.demo) if "scaled_add" in name]) == known
    assert torch.equal(plus_one(samples=[(X, X)]).scaled_add(X, X), 2 * X + 1)


@pytest.mark.slow
def test_every_process_knows_it_by_the_same_words() -> None:
    text = CACHED.format(source=ADD, schema=SCHEMA, factor=2.0).partition("x = torch")[0]
    text += (
        "from graphwright.calls.fingerprint import described; from torch.compiler import config\n"
    )
    text += "print(described(made), described(made.scaled_add), config.cache_key_tag, sep='|')"
    environment = {**os.environ, "PYTHONPATH": str(Path(gw.__file__).parent.parent)}
    command = [sys.executable, "-c", text]
    runs = [subprocess.run(command, env=environment, capture_output=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.count(b"|") == 2, runs[0].stderr
    other = subprocess.run(
        [*command[:2], text.replace("2.0", "3.0")], env=environment, capture_output=True
    )
    for here, there in zip(runs[0].stdout.split(b"|"), other.stdout.split(b"|"), strict=True):
        assert here != there


def times(factor: float) -> Callable[..., Any]:
    return lambda ctx, gradient: (gradient * factor, None, None)


@pytest.mark.slow
def test_compiled_code_has_the_backward_of_its_own_extension(tmp_path: Path) -> None:
    # PyTorch's cache on disk knows an operator by its name.
    for factor in (2.0, 7.0):
        text = CACHED.format(source=ADD, schema=SCHEMA, factor=factor)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": str(Path(gw.__file__).parent.parent),
        }
        done = subprocess.run(
            [sys.executable, "-c", text], env=environment, capture_output=True, text=True
        )
        assert done.stdout.split() == [str(factor)], done.stdout + done.stderr


CACHED = """
import torch
import graphwright as gw
from graphwright.ops import Function
function = Function(
    {schema!r},
    fake=lambda x, y, scale: torch.empty_like(x),
    backward=lambda ctx, g: (g * {factor}, None, None),
)
made = gw.extension("demo", cpp={source!r}, functions={{"scaled_add": function}}, cflags=["-O0"])
x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: made.scaled_add(x, x.detach()).sum(), fullgraph=True)(x).backward()
print(float(x.grad[0]))
"""


def test_defaults_reach_the_fake() -> None:
    made = demo()
    compiled = torch.compile(lambda x: made.scaled_add(x, x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), 2 * X)
    made.scaled_add.check(X, X)


@pytest.mark.slow
def test_without_a_backward_it_is_compiled_and_the_gradient_is_an_error() -> None:
    made = demo("no_gradient", backward=None, setup_context=None, samples=[(X, X, 2.0)])
    compiled = torch.compile(made.scaled_add, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    result = compiled(x, x, 2.0)
    assert torch.equal(result, 3 * X)
    with pytest.raises(gw.ExtensionError, match="has no backward"):
        result.sum().backward()


def test_forward_mode_is_refused() -> None:
    made = demo()
    with pytest.raises(gw.ExtensionError, match="no derivative in forward mode"):
        torch.func.jvp(lambda x: made.scaled_add(x, x), (X,), (torch.ones_like(X),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X.clone(), torch.ones_like(X))
        with pytest.raises(gw.ExtensionError, match="no derivative in forward mode"):
            made.scale_(dual, 2.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_calls_it_for_each() -> None:
    made = demo("no_gradient", backward=None, setup_context=None, samples=[(X, X, 2.0)])
    assert torch.equal(torch.vmap(made.scaled_add)(X, X), 2 * X)


def test_what_is_written_to_has_a_new_version() -> None:
    made = demo()
    weight, buffer = torch.ones(3, requires_grad=True), torch.full((3,), 3.0)
    loss = (weight * buffer).sum()
    made.scale_(buffer, 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_a_result_that_is_an_argument_is_seen_when_it_happens() -> None:
    cpp = "#include <ATen/core/Tensor.h>\n"
    cpp += "at::Tensor whole(const at::Tensor& x) { return x.contiguous(); }\n"
    function = Function("(Tensor x) -> Tensor", fake=like_first)
    made = gw.extension("whole", cpp=cpp, functions={"whole": function}, cflags=["-O0"])
    assert torch.equal(made.whole(X.t()), X.t())
    with pytest.raises(gw.ExtensionError, match="returned one of its arguments"):
        made.whole(X)


@pytest.mark.slow
def test_two_calls_of_a_random_operator_are_not_one() -> None:
    cpp = "#include <ATen/core/Tensor.h>\n#include <ATen/ops/rand_like.h>\n"
    cpp += "at::Tensor noise(const at::Tensor& x) { return at::rand_like(x); }\n"
    function = Function("(Tensor x) -> Tensor", fake=like_first, random=True)
    made = gw.extension("noise", cpp=cpp, functions={"noise": function}, cflags=["-O0"])
    compiled = torch.compile(
        lambda x: (made.noise(x) - made.noise(x)) * x, fullgraph=True, backend="aot_eager"
    )
    assert compiled(torch.ones(9, requires_grad=True)).detach().abs().sum() > 0


@pytest.mark.slow
def test_headers_are_those_that_the_compiler_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b", "shared", "path"):
        (tmp_path / folder).mkdir()

    def write(a: int, b: int, shared: int, path: int) -> None:
        for folder, number in {"a": a, "b": b, "shared": shared, "path": path}.items():
            text = f"#define OWN_{folder.upper()} {number}\n"
            name = "own.h" if folder in "ab" else f"{folder}.h"
            (tmp_path / folder / name).write_text(text)

    one = '#include "own.h"\n#include <shared.h>\n#include <ATen/core/Tensor.h>\n'
    one += "#define NAME <path.h>\n#include NAME\n"
    one += "inline int one() { return OWN_A + OWN_SHARED + OWN_PATH; }\n"
    two = '#include "own.h"\n#include <ATen/ops/mul.h>\nnamespace mine {\n'
    two += (
        "at::Tensor scaled(const at::Tensor& x) { return at::mul(x, one() + 1000 * OWN_B); }\n}\n"
    )
    (tmp_path / "a" / "one.cpp").write_text(one)
    (tmp_path / "b" / "two.cpp").write_text(two)
    monkeypatch.setenv("CPATH", str(tmp_path / "path"))
    function = Function("(Tensor x) -> Tensor", fake=like_first, symbol="mine::scaled")

    def made() -> gw.Extension:
        return gw.extension(
            "files",
            cpp=[tmp_path / "a" / "one.cpp", str(tmp_path / "b" / "two.cpp")],
            functions={"scaled": function},
            cflags=["-O0"],
            include_dirs=[tmp_path / "shared"],
        )

    for numbers in ((1, 2, 10, 100), (1, 2, 20, 100), (1, 2, 20, 300), (5, 6, 20, 300)):
        write(*numbers)
        a, b, shared, path = numbers
        latest = made()
        assert latest.scaled(torch.ones(1)).item() == a + shared + path + 1000 * b
        assert made() is latest


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    demo("read_only")
    monkeypatch.setattr(building, "_build", None)
    monkeypatch.setattr(Path, "mkdir", None)
    demo("read_only", backward=times(3.0))


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


@pytest.mark.slow
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
    (library,) = place.glob("*/*.so")
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
    "a function that is an attribute": ({"functions": {"name": SCHEMA}}, "an attribute of every"),
    "functions in a list": ({"functions": ["f"]}, "functions is a list, not a dictionary"),
    "flags in a text": ({"cflags": "-O0 -g"}, "cflags is one text"),
    "a sample that is no tuple": (
        {"functions": {"f": Function("(Tensor x) -> Tensor", like_first, samples=(X,))}},
        "sample of f is no tuple",
    ),
    "no tensor": (
        {"functions": {"f": Function("(int n) -> Tensor", fake=lambda n: torch.empty(n))}},
        "takes no tensor",
    ),
    "a tensor by keyword with a backward": (
        {"functions": {"f": Function("(*, Tensor x) -> Tensor", lambda *, x: x, of_both)}},
        "by keyword alone, and has a backward",
    ),
    "a source that registers itself": (
        {"cpp": ADD + 'TORCH_LIBRARY(wrong, m) { m.def("f", &f); }'},
        "registers operators itself, by TORCH_LIBRARY. \\(at C\\+\\+ of wrong:7\\)",
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
    assert not hasattr(torch.ops.wrong, "scaled_add")


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
    "a brace that is not closed": (
        one(PLAIN.replace("}", "")),
        ["ends before it is complete", "a brace that is not closed"],
    ),
    "a sample of other arguments": (
        one(PLAIN, samples=[(X, X)]),
        ["A sample is no call of bad::f"],
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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.exhaustive if n % 4 else pytest.mark.slow)
        for n, case in enumerate(BAD)
    ],
)
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
    "CUDA": (
        lambda patch: patch.setattr(building, "cuda_compiler", lambda: None),
        "no CUDA compiler",
    ),
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


@pytest.mark.slow
def test_tensors_on_a_device_without_a_source_are_told() -> None:
    demo("devices")
    with pytest.raises(gw.ExtensionError, match="has no source in CUDA"):
        torch.ops.devices.scaled_add.default._op_dk(torch._C.DispatchKey.CUDA, X, X, 1.0)


# triton_op().


def add_one(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("this is for GPUs")


def traced_plus_one(x: torch.Tensor) -> torch.Tensor:
    """In the place of a kernel: what FakeTensor sees."""
    return x + 1


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


def double_(x: torch.Tensor) -> None:
    raise AssertionError("this is for GPUs")


def double_plainly(x: torch.Tensor) -> None:
    x.data.mul_(2)


def test_a_triton_operator_that_writes_loses_no_gradient() -> None:
    made = gw.triton_op("tritons::double_", double_, mutates_args=["x"], reference=double_plainly)
    mine = X.clone()
    made(mine)
    assert torch.equal(mine, 2 * X)
    weight = X.clone().requires_grad_()
    with pytest.raises(gw.ExtensionError, match="cannot be followed by autograd"):
        made(weight * 1)
    loss = (weight * mine).sum()
    made(mine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_another_triton_operator_of_the_same_name_lies_beside_it() -> None:
    made = gw.triton_op("tritons::again", add_one, reference=add_one_plainly)
    packed = cloudpickle.dumps(made)
    other = gw.triton_op("tritons::again", add_one, reference=lambda x: x + 2)
    assert gw.triton_op("tritons::again", add_one, reference=add_one_plainly) is made
    assert torch.equal(other(X), X + 2)
    assert torch.equal(made(X), X + 1)
    assert torch.equal(pickle.loads(packed)(X), X + 1)


def test_a_triton_operator_that_fails_its_check_leaves_its_name() -> None:
    def other_shape(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(7)

    with pytest.raises(gw.ExtensionError, match="tritons::checked"):
        gw.triton_op("tritons::checked", add_one, reference=other_shape, samples=[(X,)])
    made = gw.triton_op(
        "tritons::checked", traced_plus_one, reference=add_one_plainly, samples=[(X,)]
    )
    assert made.name == "tritons::checked"
    assert torch.equal(made(X), X + 1)


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
    import extension as example

    made, plain = example.operators("cuda"), example.Plain()
    for count in (0, 1, 5, 1024, 4099, 1 << 20):
        x, gate = torch.randn(2, count + 1, device="cuda")
        # The second begins where sixteen bytes do not divide the address.
        for a, b in ((x, gate), (x[1:], gate[1:])):
            torch.testing.assert_close(made.gated_add(a, b, 0.5), plain(a, b))
    own = example.Own(made).eval()
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
