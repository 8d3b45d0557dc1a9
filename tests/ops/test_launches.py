"""Launches of our kernels that are written down, and answer later calls: the kind of a call is all
that they depend on, and what they do not fit goes to Triton."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_artifacts import net, rewritten, tuned_with
from test_operators import INTERPRETED, NAMES, PUBLIC, of_names
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import CaptureError
from graphwright.graphs.cuda import driver
from graphwright.graphs.cuda.driver import KernelFunction
from graphwright.ops.fused import fused_operator, launch_cache
from graphwright.ops.fused import registry as operators
from graphwright.ops.fused.launch_cache import Binary, Launch

KIND = "i32"
SUM = (("input", 0), ("input", 1), ("result", 0), ("fp32", 2.0), ("i32", 5))
CODE = b"\x7fELF and so on"


class Kernel:
    """Stands for Triton's: result = x + factor * y, of vectors of float32."""

    def __init__(self, **facts: Any) -> None:
        plain = {"name": "k", "num_warps": 1, "num_ctas": 1, "shared": 16}
        self.facts = SimpleNamespace(**plain | facts)
        self.calls = 0

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(x: Any, y: Any, out: Any, factor: float, n: int, wide: bool = True) -> Any:
            self.calls += 1
            out.copy_(x + factor * y)
            kinds = dict.fromkeys(("x", "y", "out"), "*fp32")
            kinds |= {"factor": "fp32", "n": KIND, "wide": "constexpr"}
            source = SimpleNamespace(signature=kinds, fn=SimpleNamespace(arg_names=[*kinds]))
            return SimpleNamespace(metadata=self.facts, asm={"cubin": CODE}, src=source)

        return launch


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """What stands for the driver, compiled."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip(
            "there is no C compiler for tests/support/driver.c, which stands for the driver"
        )
    made = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parents[1] / "support" / "driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return driver.declared(ctypes.CDLL(str(made)))


@pytest.fixture
def cuda(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """PyTorch, and what we ask of the driver, with one that takes the host for a GPU."""
    library.reset()
    stream = SimpleNamespace(cuda_stream=0x7F0500000007)
    with (
        mock.patch.object(driver, "libcuda", return_value=library),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(fused_operator, "triton_works", return_value=True),
        mock.patch.object(launch_cache, "_LOADED", {}),
    ):
        yield library


def count(cuda: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(cuda, name).value


def operator(kernel: Kernel, made: Callable[..., torch.Tensor] = torch.empty_like) -> Any:
    """What defining.define makes, but for PyTorch's part in it."""

    def launch(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
        out = made(x)
        launch_cache.launched(kernel, (3,), x, y, out, factor, x.numel(), wide=True)
        return out

    def plain(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
        raise AssertionError("it is not asked for")

    return fused_operator.FusedOperator("sum", plain, plain, lambda *args: True, launch)


def noted(work: Any, *args: Any) -> dict[str, Launch]:
    with launch_cache.noting() as found:
        work.on_gpu(*args)
    return found


def test_a_launch_answers_calls_of_its_kind_and_no_others(cuda: ctypes.CDLL) -> None:
    kernel = Kernel()
    work = operator(kernel)
    found = noted(work, torch.zeros(5), torch.ones(5), 2.0)
    assert len(found) == kernel.calls == 1
    again = launch_cache.read(launch_cache.written(found))
    assert again == found
    x, y = torch.randn(5), torch.randn(5)
    memory = torch.randn(9)
    other = [
        (torch.randn(6), torch.randn(6), 2.0),  # another shape
        (x, y, 3.0),  # another number
        (x, y, 2),  # another type of it
        (memory[:5], memory[1:6], 2.0),  # not aligned
        (torch.randn(10)[::2], y, 2.0),  # other strides
        (x, x, 2.0),  # the same memory
    ]
    with launch_cache.answering(again):
        torch.testing.assert_close(work.on_gpu(x, y, 2.0), x + 2 * y)
        assert (kernel.calls, count(cuda, "launches"), count(cuda, "modules")) == (1, 1, 1)
        for number, args in enumerate(other):
            torch.testing.assert_close(work.on_gpu(*args), args[0] + args[2] * args[1])
            assert kernel.calls == 2 + number
        work = operator(kernel)
        work.name = "another"
        work.on_gpu(x, y, 2.0)
        assert kernel.calls == 2 + len(other)
    with launch_cache.answering({}):
        work.on_gpu(x, y, 2.0)
    assert kernel.calls == 3 + len(other)


@pytest.mark.usefixtures("cuda")
def test_one_tensor_twice_is_a_kind_of_its_own() -> None:
    # Noted from such a call, an argument could not be told from the other.
    work, x, y = operator(Kernel()), torch.randn(5), torch.randn(5)
    found = noted(work, x, x, 2.0)
    with launch_cache.answering(found):
        torch.testing.assert_close(work.on_gpu(y, y, 2.0), 3 * y)
        torch.testing.assert_close(work.on_gpu(x, y, 2.0), x + 2 * y)


@pytest.mark.usefixtures("cuda")
def test_threads_do_not_get_each_others_arguments_or_notes() -> None:
    kernel = Kernel()
    work = operator(kernel)
    found = noted(work, torch.zeros(5), torch.ones(5), 2.0)
    wrong: list[Any] = []

    def calls(seed: int) -> None:
        x, y = torch.full((5,), float(seed)), torch.full((5,), 1.0)
        with launch_cache.answering(found):
            for _ in range(300):
                if not torch.equal(work.on_gpu(x, y, 2.0), x + 2 * y):
                    wrong.append(seed)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(4)]
    with launch_cache.noting() as mine:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert (wrong, mine, kernel.calls) == ([], {}, 1)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "facts",
    [
        {"num_ctas": 2},
        {"shared": 1 << 16},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
    ],
    ids=str,
)
def test_what_is_more_than_a_simple_kernel_is_not_noted(facts: dict[str, Any]) -> None:
    assert noted(operator(Kernel(**facts)), torch.ones(5), torch.ones(5), 2.0) == {}


@pytest.mark.usefixtures("cuda")
def test_results_that_are_not_their_own_memory_are_not_noted() -> None:
    x, y = torch.ones(5), torch.ones(5)
    for made in (lambda x: x, lambda x: torch.empty(9)[:5], lambda x: torch.empty(9)[4:]):
        assert noted(operator(Kernel(), made), x, y, 2.0) == {}
    with mock.patch(f"{__name__}.KIND", "u8"):  # A number that launches do not know.
        assert noted(operator(Kernel()), x, y, 2.0) == {}


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_the_driver_refuses_is_not_noted() -> None:
    with mock.patch(f"{__name__}.CODE", b"no ELF"):
        assert noted(operator(Kernel()), torch.ones(5), torch.ones(5), 2.0) == {}


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_a_second_device_refuses_is_triton_s_there() -> None:
    kernel = Kernel()
    work, x, y = operator(kernel), torch.randn(5), torch.randn(5)
    found = noted(work, x, y, 2.0)
    [(kind, launch)] = found.items()
    other = {kind: replace(launch, binary=replace(launch.binary, code=b"no ELF"))}
    with launch_cache.answering(other):
        torch.testing.assert_close(work.on_gpu(x, y, 2.0), x + 2 * y)
    assert kernel.calls == 2
    with launch_cache.answering(found):  # A refusal is for that kernel, and for now.
        work.on_gpu(x, y, 2.0)
    assert kernel.calls == 2


def test_a_kernel_is_loaded_once_and_where_it_is_wanted(cuda: ctypes.CDLL) -> None:
    launch = Launch(Binary("k", CODE, 32, 16), 3, SUM, (), False)
    for number in (0, 1):
        device = torch.device("cuda", number)
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: launch.function(device), range(8)))  # noqa: B023  # done by then
        assert len(found) == 1
        assert (count(cuda, "modules"), count(cuda, "device")) == (number + 1, number)


def test_another_thread_that_compiles_changes_nothing_here(cuda: ctypes.CDLL) -> None:
    """PyTorch's is_compiling is true of the whole process then."""
    kernel = Kernel()
    work, x, y = operator(kernel), torch.randn(5), torch.randn(5)
    found = noted(work, x, y, 2.0)
    inside, go = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        inside.set()
        go.wait(60)
        return graph

    def compiles() -> None:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))

    torch._dynamo.reset()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(compiles)
        assert inside.wait(60)
        with launch_cache.answering(found):
            work.on_gpu(x, y, 2.0)
        go.set()
        other.result()
    assert (kernel.calls, count(cuda, "launches")) == (1, 1)


@pytest.mark.usefixtures("cuda")
def test_what_another_triton_gives_is_not_noted() -> None:
    kernel = Kernel()
    del kernel.facts.num_ctas
    assert noted(operator(kernel), torch.ones(5), torch.ones(5), 2.0) == {}
    assert kernel.calls == 1


@pytest.mark.parametrize(
    ("code", "symbol", "sizes", "why"),
    [
        (b"no ELF", "k", (8, 8, 8, 4, 4), r"cuModuleLoadData failed.*\(200\)"),
        (CODE, "another", (8, 8, 8, 4, 4), r"cuModuleGetFunction failed.*\(500\)"),
        (CODE, "k", (8, 8, 8, 4, 8), "The kernel takes"),
        (CODE, "k", (8, 8, 8), "The kernel takes"),
        (CODE, "k", (8, 8, 8, 4, 4, 8, 8, 8), "The kernel takes"),
    ],
    ids=["code", "symbol", "another size", "too few", "too many"],
)
def test_what_is_no_kernel_leaves_nothing_behind(
    cuda: ctypes.CDLL, code: bytes, symbol: str, sizes: Any, why: str
) -> None:
    before = count(cuda, "modules")
    with pytest.raises(CaptureError, match=why):
        KernelFunction(code, symbol, sizes, torch.device("cuda", 0))
    assert count(cuda, "modules") == before


@pytest.mark.usefixtures("cuda")
def test_a_launch_of_other_arguments_is_refused() -> None:
    function = KernelFunction(CODE, "k", (8, 8, 8, 4, 4), torch.device("cuda", 0))
    with pytest.raises(CaptureError, match="takes 5 arguments, and not 1"):
        function.launch(3, 32, 16, [ctypes.c_uint64(0)])
    values = [*[ctypes.c_uint64(0)] * 3, ctypes.c_float(0), ctypes.c_int32(0)]
    with pytest.raises(CaptureError, match=r"launch failed.*\(1\)"):
        function.launch(4, 32, 16, values)
    function.launch(3, 32, 16, values)


def test_arguments_on_several_devices_are_of_no_kind() -> None:
    assert launch_cache.kind_of("sum", (torch.ones(2), torch.ones(2, device="meta"))) == ""


def some_launch() -> dict[str, Launch]:
    binary = Binary("k", b"\0code", 32, 0)
    results = (((2,), (1,), torch.float16),)
    launch = Launch(binary, 3, (("result", 0),), results, True)
    return {"a kind": launch, "another": replace(launch, binary=replace(binary, code=b"other"))}


def test_kernels_of_another_edition_are_left_alone() -> None:
    text = launch_cache.written(some_launch())
    assert launch_cache.read(text) == some_launch()
    for other in ("another", None):
        with mock.patch.object(launch_cache, "EDITION", other):
            assert launch_cache.read(text) == {}
    without = {name: part for name, part in json.loads(text).items() if name != "edition"}
    assert launch_cache.read(json.dumps(without)) == {}


def test_an_edition_is_of_all_sources_and_nothing_else(tmp_path: Path) -> None:
    assert launch_cache.edition_of(tmp_path) is None
    (tmp_path / "kernels").mkdir()
    (tmp_path / "a.py").write_text("1")
    known = {launch_cache.edition_of(tmp_path)}
    (tmp_path / ".#a.py").symlink_to("nowhere")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "a.pyc").write_text("2")
    assert {launch_cache.edition_of(tmp_path)} == known
    for name, text in (("a.py", "2"), ("kernels/b.py", "1"), ("b.py", "1"), ("b.py", "")):
        (tmp_path / name).write_text(text)
        edition = launch_cache.edition_of(tmp_path)
        assert edition not in known
        known.add(edition)
    with mock.patch.object(launch_cache, "__version__", "another"):
        assert launch_cache.edition_of(tmp_path) not in known
    with mock.patch.object(Path, "read_bytes", side_effect=PermissionError):
        assert launch_cache.edition_of(tmp_path) is None


@pytest.mark.usefixtures("cuda")
def test_nothing_is_noted_where_sources_have_changed_since_they_were_imported() -> None:
    with mock.patch.object(launch_cache, "EDITION", "another"):
        assert noted(operator(Kernel()), torch.ones(5), torch.ones(5), 2.0) == {}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("binaries", 1), "no code"),
        (("binaries", 2), 2048),
        (("binaries", 2), "32"),
        (("binaries", 3), -1),
        (("binaries", 3), 1 << 20),
        (("launches", 0), "another"),
        (("launches", 1), 0),
        (("launches", 1), -3),
        (("launches", 1), 1.0),
        (("launches", 2), [["result", 1]]),
        (("launches", 2), [["result", -1]]),
        (("launches", 2), [["input", -1]]),
        (("launches", 2), [["i32", 2**31]]),
        (("launches", 2), [["i32", 1.5]]),
        (("launches", 2), [["fp32", None]]),
        (("launches", 2), [["i8", 1]]),
        (("launches", 3), [[[2], [1], "load"]]),
        (("launches", 3), [[[-2], [1], "float16"]]),
    ],
    ids=str,
)
def test_launches_that_make_no_sense_are_refused(place: tuple[str, int], value: Any) -> None:
    given = json.loads(launch_cache.written(some_launch()))
    entry = next(iter(given[place[0]].values()))
    entry[place[1]] = value
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError, zlib.error)):
        launch_cache.read(json.dumps(given))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.long
def test_what_torch_compile_makes_goes_on_in_a_new_thread() -> None:
    """Its guards watch the state of the thread, which must be as it was after the first call."""
    model, x = net()
    tuned = tuned_with("fused", model, (x,), {"scale": 3.0})
    [built] = tuned._choice.origin.builts
    built.save.args[0].launches = some_launch()

    def calls() -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(built.call, backend="eager")
        with torch.no_grad():
            return [compiled(x, scale=3.0)["y"] for _ in range(3)]

    with ThreadPoolExecutor(1) as pool:
        for y in pool.submit(calls).result():
            torch.testing.assert_close(y, model(x, scale=3.0)["y"])


def saved_with_kernels(path: Path) -> None:
    model, x = net()
    tuned = tuned_with("fused", model, (x,), {"scale": 3.0})
    [built] = tuned._choice.origin.builts
    built.save.args[0].launches = some_launch()
    gw.save(tuned, path)


def test_kernels_are_code_and_used_of_those_alone_who_are_trusted(tmp_path: Path) -> None:
    path = tmp_path / "net.gw"
    saved_with_kernels(path)
    model, x = net()
    for trust in (False, True):
        with mock.patch.object(launch_cache, "_loaded", return_value=object()):
            loaded = gw.load(path, trust=trust)
        [built] = loaded._choice.origin.builts
        assert built.save.args[0].launches == (some_launch() if trust else {})
        torch.testing.assert_close(loaded(x, scale=3.0)["y"], model(x, scale=3.0)["y"])


def test_kernels_are_left_alone_if_the_gpu_refuses_one(tmp_path: Path) -> None:
    path = tmp_path / "net.gw"
    saved_with_kernels(path)

    def but_one(code: bytes, *others: Any) -> object | None:
        return object() if code == b"\0code" else None

    with mock.patch.object(launch_cache, "_loaded", but_one):
        loaded = gw.load(path, trust=True)
    [built] = loaded._choice.origin.builts
    assert built.save.args[0].launches == {}


def test_kernels_that_make_no_sense_are_told_where_they_would_be_used(tmp_path: Path) -> None:
    path = tmp_path / "net.gw"
    saved_with_kernels(path)

    def nonsense(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        members["strategy/0/kernels.json"] = json.dumps({"edition": launch_cache.EDITION}).encode()

    rewritten(path, nonsense)
    with pytest.raises(gw.ArtifactError, match="fused could not be loaded: KeyError"):
        gw.load(path, trust=True)
    gw.load(path)

    def folder(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        members["strategy/0/kernels.json/inside"] = members.pop("strategy/0/kernels.json")

    rewritten(path, folder)
    for trust in (False, True):
        with pytest.raises(gw.ArtifactError, match="directory"):
            gw.load(path, trust=trust)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_operator_is_launched_again_as_it_was(name: str, dtype: torch.dtype) -> None:
    for shape in ((4, 768), (2, 3, 129), (2, 8, 20, 16)):
        options = {"dtype": dtype, "device": "cuda"}
        with launch_cache.noting() as found:
            PUBLIC[name](*of_names(name, shape, **options))
        assert len(found) == 1, shape
        found = launch_cache.read(launch_cache.written(found))
        args = of_names(name, shape, **options)
        expected = pytree.tree_leaves(PUBLIC[name](*args))
        for each in expected:
            torch.full_like(each, float("nan"))  # What is given memory next, finds that.
        with without_triton(name):
            actual = again(found, name, args)
            torch.cuda.synchronize()
            with ThreadPoolExecutor(1) as pool:  # A thread that has no context of CUDA's.
                other = pool.submit(again, found, name, args, torch.cuda.Stream()).result()
            torch.cuda.synchronize()
        for mine, theirs, right in zip(actual, other, expected, strict=True):
            assert mine.stride() == right.stride()
            assert torch.equal(mine, right)
            assert torch.equal(theirs, right)


def again(
    found: dict[str, Launch], name: str, args: Any, stream: torch.cuda.Stream | None = None
) -> list[torch.Tensor]:
    with launch_cache.answering(found), torch.cuda.stream(stream):
        return pytree.tree_leaves(PUBLIC[name](*args))


def without_triton(name: str) -> Any:
    def refused(*args: Any) -> Any:
        raise AssertionError("Triton was asked")

    return mock.patch.object(operators.OPERATORS[name], "launch", refused)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_tensors_that_are_not_aligned_go_to_triton() -> None:
    weight = torch.randn(768, device="cuda")
    with launch_cache.noting() as found:
        operators.layer_norm(torch.randn(4, 768, device="cuda"), weight, weight)
    x = torch.randn(4 * 768 + 1, device="cuda")[1:].view(4, 768)
    right = operators.layer_norm(x, weight, weight)
    with launch_cache.answering(found):
        assert torch.equal(operators.layer_norm(x, weight, weight), right)
        with without_triton("layer_norm"), pytest.raises(AssertionError):
            operators.layer_norm(x, weight, weight)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_what_is_no_kernel_or_takes_other_arguments_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(CaptureError, match="cuModuleLoadData"):
        KernelFunction(b"\0" * 64, "k", (8,), device)
    weight = torch.randn(768, device="cuda")
    with launch_cache.noting() as found:
        operators.layer_norm(torch.randn(4, 768, device="cuda"), weight, weight)
    [launch] = found.values()
    code, symbol = launch.binary.code, launch.binary.symbol
    sizes = launch.sizes
    for wrong in (sizes[:-1], (*sizes, 8, 8, 8), (4, *sizes[1:])):
        with pytest.raises(CaptureError, match="The kernel takes"):
            KernelFunction(code, symbol, wrong, device)
    with pytest.raises(CaptureError, match="cuModuleGetFunction"):
        KernelFunction(code, "another", sizes, device)
    function = KernelFunction(code, symbol, sizes, device)
    with pytest.raises(CaptureError, match="arguments, and not 1"):
        function.launch(1, 32, 0, [ctypes.c_uint64(0)])


class Block(torch.nn.Module):
    """What fusion makes our kernels of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)
        self.norm = torch.nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        return self.norm(x + y)


LOADED = """
import json, sys
import torch
import graphwright as gw
trusted = json.loads(sys.argv[2])
loaded = gw.load(sys.argv[1] + "/block.gw", trust=trusted)
x = torch.load(sys.argv[1] + "/x.pt")
with torch.no_grad():
    torch.save(loaded(x), sys.argv[1] + "/y.pt")
print(json.dumps([loaded.explain(), "triton.compiler" in sys.modules]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["fused", "fused+graph"])
def test_another_process_needs_no_triton_for_what_was_saved(name: str, tmp_path: Path) -> None:
    model, x = Block().eval().cuda().half(), torch.randn(8, 256, device="cuda").half()
    tuned = tuned_with(name, model, (x,))
    gw.save(tuned, tmp_path / "block.gw")
    other = torch.randn_like(x)
    torch.save(other, tmp_path / "x.pt")
    with torch.no_grad():
        expected = tuned(other)
    absent = tmp_path / "absent"
    (absent / "triton").mkdir(parents=True)
    (absent / "triton" / "__init__.py").write_text("raise ImportError('it is not there')\n")
    plain = [*filter(None, sys.path)]
    for trusted, paths in ((True, [str(absent), *plain]), (False, plain)):
        result = subprocess.run(
            [sys.executable, "-c", LOADED, str(tmp_path), json.dumps(trusted)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        told, imported = json.loads(result.stdout.splitlines()[-1])
        assert imported is not trusted
        assert "as it was saved" in told
        assert torch.equal(torch.load(tmp_path / "y.pt"), expected)
