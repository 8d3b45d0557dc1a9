"""The command line as a person meets it: results, sentences, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chosen import choosing
from click import unstyle
from click.testing import CliRunner, Result
from rich.console import Console

from graphwright.cli.main import main
from graphwright.cli.output_files import Unpadded
from graphwright.cli.targets import load_target, parse_input
from graphwright.errors import GraphwrightError, TargetError
from graphwright.report.terminal import printing
from graphwright.strategies import base
from graphwright.strategies.aot_inductor import AOT_INDUCTOR
from graphwright.strategies.inductor import INDUCTOR
from graphwright.strategies.onnxruntime.strategy import ONNXRUNTIME
from graphwright.strategies.xla import XLA
from graphwright.tuning.tuner import Tuning

CPU = torch.device("cpu")
SOURCE = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x):
        return self.linear(x)

def pair():
    return Net().eval(), (torch.randn(2, 8),)

def triple():
    return Net().eval(), (), {"x": torch.randn(2, 8)}

def mapping():
    return Net().eval(), {"x": torch.randn(2, 8)}

def single():
    return Net().eval(), torch.randn(2, 8)

def training():
    return Net(), (torch.randn(2, 8),)

def only_model():
    return Net().eval()

def fails():
    raise RuntimeError("no weights here")

def number():
    return 3

def reads():
    return torch.load("no/such/weights.pt")

def on_a_gpu():
    raise AssertionError("Torch not compiled with CUDA enabled")

def turned():
    return torch.randn(2, 8), Net()

def four():
    return Net(), 1, 2, 3

def meta():
    return Net().to("meta").eval(), (torch.randn(2, 8),)

def takes(x):
    return x

def wrong_shape():
    return Net().eval(), (torch.randn(2, 9),)

def bad_inputs():
    return Net().eval(), 7

class Deciding(Net):
    def forward(self, x):
        scale = torch.tensor(2.0, device=x.device)
        if x.sum() > 0:
            return self.linear(x) * scale
        return self.linear(-x) + scale

def deciding():
    return Deciding().eval(), (torch.randn(2, 8),)

class Endless(Net):
    calls = 0

    def forward(self, x):
        if torch.is_inference_mode_enabled():
            Endless.calls += 1
            if Endless.calls > 50:  # It is set up by now, and timed.
                time.sleep(1000)
        return self.linear(x)

def endless():
    return Endless().eval(), (torch.randn(2, 8),)

class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 5)

instance = Net().eval()
constant = 5
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(SOURCE)
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


QUICK = ("--strategies", "eager:no_grad", "--device", "cpu")


def test_tune_prints_a_table_and_saves_what_is_asked_for(source: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "svg")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = invoke("tune", f"{source}:pair", *QUICK, *options)
    assert result.exit_code == 0, result.output
    assert "eager:no_grad" in result.stdout
    assert "was chosen" in result.stdout
    assert json.loads(files["json"].read_text())["schema"] == "graphwright.tune"
    assert files["markdown"].read_text().startswith("### pair, latency: args[0]: 2×8 float32")
    assert "<svg" in files["svg"].read_text()
    shown = invoke("report", files["json"])
    assert shown.exit_code == 0
    assert "was chosen" in shown.stdout
    markdown = invoke("report", files["json"], "--markdown")
    assert markdown.stdout == files["markdown"].read_text()


@pytest.mark.parametrize("name", ["pair", "triple", "mapping", "single", "training"])
def test_the_forms_that_a_target_may_take(source: Path, name: str) -> None:
    target = load_target(f"{source}:{name}", (), CPU)
    assert target.model(*target.args, **target.kwargs).shape == (2, 4)
    assert bool(target.notes) == (name == "training")
    assert not target.model.training  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Net", "only_model", "instance"])
def test_a_model_without_inputs_takes_them_from_the_command_line(source: Path, name: str) -> None:
    target = load_target(f"{source}:{name}", ["2x8:float32"], CPU)
    assert target.args[0].shape == (2, 8)
    with pytest.raises(TargetError, match="--input"):
        load_target(f"{source}:{name}", (), CPU)


def test_a_package_s_function_is_found(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    assert load_target("models:pair", (), CPU).name == "pair"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("absent", (), "has no 'absent'"),
        ("singel", (), "Did you mean 'single'? It has: Net, "),
        ("reads", (), "FileNotFoundError: [Errno 2] No such file or directory"),
        ("reads", (), "Relative paths begin in "),
        ("fails", (), "Call it by itself in Python first"),
        ("fails", (), "RuntimeError: no weights here"),
        ("number", (), "returned an int"),
        ("constant", (), "is an int"),
        ("turned", (), "returned a tuple of 2 (Tensor, Net), which does not begin with a model"),
        ("four", (), "returned a tuple of 4 (Net, int, int, int), not of 2 or 3."),
        ("meta", (), "cannot be put on cpu: NotImplementedError"),
        ("takes", (), "called without arguments"),
        ("bad_inputs", (), "no tuple or dictionary"),
        ("wrong_shape", (), "fails in eager"),
        ("only_model", (), "gives a model and no inputs"),
        ("Net", ("--input", "2x9:float32"), "fails in eager"),
        ("Net", ("--input", "2x8:float33"), "'float33' is no dtype"),
        ("Net", ("--input", "2xtwo:float32"), "no such shape"),
        ("Net", ("--input", "-2x8:float32"), "must be positive"),
        ("Net", ("--input", "999999x999999:float32"), "larger than 16 GiB"),
        ("Net", ("--input", "2x8:quint8"), "cannot be made"),
        ("Net", ("--input", "2x8:int8:1000"), "does not fit"),
        ("Net", ("--input", "2x8:int64:99999999999999999999"), "does not fit"),
        ("pair", ("--tolerance", "inf"), "tolerance"),
        ("pair", ("--device", "tpu"), "--device 'tpu'"),
        ("pair", ("--allow", "int4"), "int4"),
        ("pair", ("--strategies", "warp"), "Unknown strategy 'warp'"),
        ("pair", ("--strategies", "indcutor"), "Did you mean 'inductor'?"),
        ("pair", ("--strategies", "warp,indcutor+grap"), "Did you mean 'inductor'? Did you mean"),
        ("pair", ("--strategies", "warp,indcutor+grap"), "'indcutor+grap': 'grap' is no rewrite"),
        ("pair", ("--exclude", "warp", "--exclude", "weft"), "'weft' is no rewrite"),
        ("pair", ("--exclude", "warp"), "Unknown strategy 'warp'"),
        ("pair", ("--json", "/no/such/folder/out.json"), "there is no folder /no/such/folder"),
        ("pair", ("--tolerance", "-1"), "tolerance"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    source: Path, name: str, options: tuple[str, ...], sentence: str
) -> None:
    result = invoke("tune", f"{source}:{name}", "--device", "cpu", *options)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 3


def test_check_prints_lines_for_editors_and_exits_with_1(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = invoke("check", f"{source}:deciding", "--device", "cpu", "--json", file)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{source}:")
    assert ": hoisted: tensor() copies a constant" in lines[0]
    assert ": breaks: bool(tensor) decides" in lines[1]
    assert (
        lines[2] == "deciding: 1 break, 1 hoisted. A plain capture fails; graph() divides the call."
    )
    saved = json.loads(file.read_text())
    assert [f["place"]["source"] for f in saved["findings"]] == [
        "scale = torch.tensor(2.0, device=x.device)",
        "if x.sum() > 0:",
    ]


def test_check_exits_with_0_where_nothing_breaks_and_2_where_the_model_fails(source: Path) -> None:
    result = invoke("check", f"{source}:pair", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "A plain capture works." in result.stdout
    result = invoke("check", f"{source}:wrong_shape", "--device", "cpu")
    assert result.exit_code == 2
    assert "raises by itself" in result.stderr


def test_inspect_prints_a_table_and_saves_the_nodes(source: Path, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "nodes.json", tmp_path / "nodes.dot"
    files = ("--json", saved, "--dot", drawn)
    result = invoke("inspect", f"{source}:pair", "--device", "cpu", "--timed", *files)
    assert result.exit_code == 0, result.output
    assert "operation" in result.stdout.splitlines()[0]
    assert json.loads(saved.read_text())["schema"] == "graphwright.nodes"
    assert drawn.read_text().startswith("digraph nodes {")
    result = invoke("inspect", f"{source}:wrong_shape", "--device", "cpu")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("models.py", "names no function"),
        ("/no/such/file.py:f", "There is no file"),
        ("no_such_package:f", "No module named"),
        (":", "names no function"),
        ("math:pi", "is a float"),
        ("folder:f", "folder is a folder.\nName a file in it: folder/file.py:function."),
        ("folder/:f", "folder/ is a folder.\nName a file in it: folder/file.py:function."),
        ("folder/models:f", "ends in .py"),
        ("models.txt:f", "cannot be imported: ModuleNotFoundError"),
        ("models.txt:f", "ends in .py"),
    ],
)
def test_bad_targets_are_one_sentence_and_exit_code_2(
    target: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("models.txt").touch()
    result = invoke("tune", target)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "importlib" not in result.stderr


def test_a_file_that_does_not_import_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\nraise ValueError('at import')\n")
    result = invoke("tune", f"{path}:f")
    assert result.exit_code == 2
    assert "ValueError: at import" in result.stderr
    assert "broken.py:2" in result.stderr


@pytest.mark.parametrize("way", ["import sys\nsys.exit(0)", "def f():\n    raise SystemExit('x')"])
def test_a_target_that_exits_does_not_end_the_command(tmp_path: Path, way: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(way)
    result = invoke("tune", f"{path}:f")
    assert result.exit_code == 2
    assert "ends with sys.exit(" in result.stderr
    assert f"(at {path}:2)" in result.stderr
    assert '`if __name__ == "__main__":`' in result.stderr


def test_python_s_own_frames_are_not_where_a_target_fails(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import json\njson.loads('{')")
    assert f"(at {path}:2)" in invoke("tune", f"{path}:f").stderr


def test_a_target_without_function_lists_those_of_its_file(source: Path) -> None:
    for target in (source, f"{source}:"):
        result = invoke("check", target)
        assert result.exit_code == 2
        assert f"Write {source}:Net." in result.stderr
        assert "has: Net, pair, triple, mapping" in result.stderr


def test_without_cuda_no_error_tells_to_use_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*size: object, device: torch.device) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = invoke("check", f"{source}:on_a_gpu", "--device", "cpu")
    assert "CUDA enabled" in result.stderr
    assert "make the model on the CPU" in result.stderr
    assert "without arguments" not in result.stderr
    monkeypatch.setattr(torch, "empty", empty)
    result = invoke("check", f"{source}:pair", "--device", "cuda")
    assert result.exit_code == 2
    assert "Write cpu: there is no CUDA device here." in result.stderr


def test_a_gpu_without_room_is_a_sentence(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: torch.nn.Module, *place: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    result = invoke("tune", f"{source}:pair", "--device", "cpu")
    assert result.exit_code == 2
    assert "CUDA out of memory.\nFree memory there" in result.stderr


def test_bad_options_are_click_s_own_errors(source: Path) -> None:
    for options in (
        ("--budget", "soon"),
        ("--budget", "0s"),
        ("--timeout", "-1m"),
        ("--objective", "speed"),
        ("--strategies", ""),
        ("--strategies", " , "),
    ):
        result = invoke("tune", f"{source}:pair", *options)
        assert result.exit_code == 2
        assert options[0] in result.stderr


def test_report_refuses_what_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert invoke("report", path).exit_code == 2
    path.write_text("{}")
    result = invoke("report", path)
    assert result.exit_code == 2
    assert "not a report" in result.stderr
    markdown = tmp_path / "report.md"
    markdown.write_text("# A report")
    result = invoke("report", markdown)
    assert f"{markdown} cannot be shown" in result.stderr
    assert "tune --json FILE" in result.stderr


@pytest.mark.parametrize(
    ("spec", "shape", "dtype"),
    [
        ("2x3:float16", (2, 3), torch.float16),
        ("4:bool", (4,), torch.bool),
        ("2x2:int64:100", (2, 2), torch.int64),
        ("5", (5,), torch.float32),
        ("2:complex64", (2,), torch.complex64),
        ("0x4:float32", (0, 4), torch.float32),
    ],
)
def test_inputs_from_text(spec: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = parse_input(spec)
    assert tensor.shape == shape
    assert tensor.dtype is dtype


def test_integers_span_their_range() -> None:
    values = parse_input("1000:int64:10")
    assert (int(values.min()), int(values.max())) == (0, 9)


@pytest.mark.slow
def test_strategies_lists_all_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = invoke("strategies", "--device", "cpu")
    assert result.exit_code == 0
    for name in ("channels_last", "eager:inference_mode", "torchscript:fuser", "aot_autograd"):
        assert name in result.stdout
    assert "CUDA graphs need a GPU" in result.stdout


@pytest.mark.slow
def test_strategies_says_what_loading_takes_and_what_is_tried_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = invoke("strategies", "--device", "cpu")
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("│")] for line in result.stdout.splitlines()]
    needs = {line[1]: line[3] for line in lines if len(line) > 4 and line[1]}
    assert needs["fused"] == needs["onnxruntime"] == "nothing"
    assert needs["torchscript"] == needs["aot_inductor"] == "trust"
    assert needs["inductor"] == "model, trust"
    assert needs["eager"] == needs["aot_autograd"] == "model"
    assert needs["xla"] == needs["tensorrt"] == needs["inductor:freeze"] == "never"
    assert needs["aot_inductor:freeze"] == "trust"
    text = " ".join(" ".join(line) for line in lines).split()
    assert "aot_inductor:freeze is saved in its place" in " ".join(text)
    only = {line[1]: line[4] for line in lines if len(line) > 4 and line[1]}
    assert only["tf32"] == only["bf16"] == only["fp16"] == "allowed"
    assert only["inductor:max-autotune"] == only["aot_inductor"] == only["xla"] == "named"
    assert only["channels_last"] == only["inductor"] == only["graph"] == ""


def test_strategies_says_how_to_get_what_is_missing_on_any_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("onnxruntime", "jax"):
        monkeypatch.setitem(sys.modules, package, None)
    again = (ONNXRUNTIME, XLA)
    known = {key: told for key, told in base._probed.items() if told[0] not in again}
    # To try these takes half a minute of compiling.
    known |= {(id(each), "cpu"): (each, base.AVAILABLE) for each in (INDUCTOR, AOT_INDUCTOR)}
    monkeypatch.setattr(base, "_probed", known)
    monkeypatch.setenv("TERM", "vt100")
    monkeypatch.setenv("COLUMNS", "60")
    for terminal in ("0", "1"):
        monkeypatch.setenv("TTY_COMPATIBLE", terminal)
        result = invoke("strategies", "--device", "cpu")
        assert result.exit_code == 0, result.output
        lines = unstyle(result.stdout).splitlines()
        assert "…" not in result.stdout
        if terminal == "1":
            assert max(map(len, lines)) == 60
        else:
            assert sum("pip install jax torchax" in line for line in lines) == 1
        text = " ".join(line.strip() for line in lines)
        assert "pip install jax torchax." in text
        assert text.count("pip install") >= 2
        assert "Not to be saved: XLA's compiled programs belong to their process" in text


def test_what_tune_saves_runs(source: Path, tmp_path: Path) -> None:
    file, alone = tmp_path / "net.gw", ("--strategies", "torchscript", "--device", "cpu")
    with choosing("torchscript"):
        result = invoke("tune", f"{source}:pair", *alone, "--fresh", "--save", file)
    assert result.exit_code == 0, result.output
    assert f"Saved as {file}" in result.stdout.replace("\n", "")
    refused = invoke("run", file)
    assert refused.exit_code == 2
    assert "is code" in refused.stderr
    assert "--trust" in refused.stderr
    for more, how in (((), "as it was saved"), (("--model", f"{source}:Net"), "as it was saved")):
        result = invoke("run", file, "--trust", "--calls", 3, "--device", "cpu", *more)
        assert result.exit_code == 0, result.output
        assert "net.gw: pair by torchscript" in result.stdout
        assert how in result.stdout
        assert "was chosen" in result.stdout
        assert "first answer" in result.stdout
        assert "args[0]: 2×8 float32" in result.stdout
        *lines, last = result.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        given = " ".join([*map(str, more), "--trust"])
        assert last == f"Serve it:  graphwright serve {file} {given} --device cpu"
    other = invoke("run", file, "--trust", "--model", f"{source}:Other")
    assert other.exit_code == 2
    assert "another model" in other.stderr


def test_what_needs_the_model_says_so_and_is_built_again(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.gw"
    with choosing("eager:no_grad"):
        result = invoke("tune", f"{source}:pair", *QUICK, "--fresh", "--save", file)
    assert result.exit_code == 0, result.output
    refused = invoke("run", file)
    assert refused.exit_code == 2
    assert "--model TARGET" in refused.stderr
    result = invoke("run", file, "--model", f"{source}:Net", "--device", "cpu", "--calls", 2)
    assert result.exit_code == 0, result.output
    assert "built again" in result.stdout


def test_in_place_of_a_winner_that_cannot_be_saved_the_best_is_that_can_be(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphwright.strategies.fused import FUSED

    monkeypatch.setattr(type(FUSED), "unsavable", "it is of this moment", raising=False)
    monkeypatch.setattr("graphwright.artifacts.substitute.TIMING_S", 0.02)
    file, alone = tmp_path / "net.gw", ("--strategies", "fused", "--device", "cpu")
    with choosing("fused"):
        result = invoke("tune", f"{source}:pair", *alone, "--fresh", "--save", file)
    assert result.exit_code == 0, result.output
    assert "fused was chosen" in " ".join(result.stdout.split())
    said = result.stdout.partition("\nNext, in Python:\n")[0].splitlines()[-1]
    assert re.search(r"^fused, \d\S* \S+ a call, cannot be saved: it is of this moment\. ", said)
    assert re.search(r"Saved in its place: eager, \d\S* \S+ a call\. ", said)
    assert f"Saved as {file}" in said
    assert "run it with --model" in said
    result = invoke("run", file, "--model", f"{source}:Net", "--device", "cpu", "--calls", 2)
    assert result.exit_code == 0, result.output
    assert "net.gw: pair by eager" in result.stdout
    assert "cannot be saved: it is of this moment" in " ".join(result.stdout.split())


def test_no_printed_line_ends_with_spaces(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.gw"
    for words in (
        ("doctor",),
        ("tune", f"{source}:pair", *QUICK, "--save", file),
        ("tune", f"{source}:pair", *QUICK, "--details"),
        ("run", file, "--model", f"{source}:Net", "--device", "cpu", "--calls", 2),
    ):
        printed = invoke(*words).stdout
        assert printed
        assert not re.search(r"[ \t]+$", printed, re.MULTILINE), printed


def test_the_spaces_between_two_writes_stay() -> None:
    stream = io.StringIO()
    unpadded = Unpadded(stream)
    for text in ("a  ", "b  \n", "  c ", "\n", "  "):
        assert unpadded.write(text) == len(text)
    assert stream.getvalue() == "a  b\n  c\n"


def test_columns_say_how_wide_what_is_piped_is(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("tune", f"{source}:pair", *QUICK, "--details")
    widths = {}
    for columns in ("60", "100", ""):
        monkeypatch.setenv("COLUMNS", columns)
        widths[columns] = max(map(len, invoke(*words).stdout.splitlines()))
    assert widths["60"] <= 60 < widths["100"] <= 100 < widths[""]


def test_what_is_excluded_is_not_tried(source: Path) -> None:
    names = "--strategies", "eager:no_grad,eager:inference_mode,torchscript"
    more = "--exclude", "torchscript", "--exclude", "eager:no_grad"
    result = invoke("tune", f"{source}:pair", *names, *more, "--device", "cpu", "--fresh")
    assert result.exit_code == 0, result.output
    table, _, _ = result.stdout.partition("Next, in Python:")
    assert "eager:inference_mode" in table
    assert "no_grad" not in table
    assert "torchscript" not in table


def test_a_winner_that_cannot_be_saved_is_a_sentence_after_the_table(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphwright.strategies.eager import NO_GRAD

    monkeypatch.setattr(type(NO_GRAD), "unsavable", "it is of this moment", raising=False)
    file, table = tmp_path / "net.gw", tmp_path / "table.md"
    with choosing("eager:no_grad"):
        files = ("--save", file, "--markdown", table)
        result = invoke("tune", f"{source}:pair", *QUICK, "--fresh", *files)
    assert result.exit_code == 2, result.output
    assert "was chosen" in result.stdout
    assert "cannot be saved: it is of this moment" in result.stderr
    assert "was chosen" in table.read_text()
    assert not file.exists()


def test_where_it_cannot_be_saved_is_said_before_tuning(source: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "no" / "net.gw", tmp_path):
        result = invoke("tune", f"{source}:pair", *QUICK, "--save", place)
        assert result.exit_code == 2
        assert "was chosen" not in result.output
    assert invoke("run", tmp_path / "absent.gw").exit_code == 2


def test_a_file_that_would_be_lost_is_refused_before_tuning(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuning, "run", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)
    Path("notes.txt").write_text("kept")
    for options, sentence in (
        (("--save", "models.py"), "no artifact, and would be lost"),
        (("--save", "notes.txt"), "no artifact, and would be lost"),
        (("--save", "/dev/null"), "no artifact, and would be lost"),
        (("--json", source), "would overwrite what is read"),
        (("--json", "new", "--save", "./new"), "--json and --save are one file"),
        (("--svg", "models.py/out.svg"), "no folder models.py"),
        (("--save", "models.py/out.gw"), "no folder models.py"),
        (("--save", "/proc/out.gw"), "cannot be written"),
        (("--json", "/proc/out.json"), "cannot be written"),
    ):
        for target in (f"{source}:pair", "models:pair"):
            result = invoke("tune", target, *QUICK, *options)
            assert result.exit_code == 2, result.output
            assert sentence in result.stderr
    result = invoke("check", f"{source}:pair", "--device", "cpu", "--json", source)
    assert result.exit_code == 2
    assert source.read_text() == SOURCE
    assert Path("notes.txt").read_text() == "kept"
    names = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert names == {"models.py", "notes.txt"}


def test_an_artifact_gives_way_to_another(source: Path, tmp_path: Path) -> None:
    for _ in range(2):
        result = invoke("tune", f"{source}:pair", *QUICK, "--save", tmp_path / "net.gw")
        assert result.exit_code == 0, result.output


def test_a_report_is_not_overwritten_by_its_picture(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    invoke("tune", f"{source}:pair", *QUICK, "--json", file)
    assert invoke("report", file, "--svg", file).exit_code == 2
    assert json.loads(file.read_text())["schema"] == "graphwright.tune"


def test_what_cannot_be_written_after_tuning_takes_nothing_else_with_it(
    source: Path, tmp_path: Path
) -> None:
    files = ("--json", "/dev/full", "--markdown", tmp_path / "out.md")
    result = invoke("tune", f"{source}:pair", *QUICK, *files)
    assert result.exit_code == 2
    assert "--json /dev/full cannot be written: No space left on device." in result.stderr
    assert "was chosen" in result.stdout
    assert "was chosen" in (tmp_path / "out.md").read_text()
    result = invoke("check", f"{source}:deciding", "--device", "cpu", "--json", "/dev/full")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert "breaks" in result.stdout


def _closed_pipe() -> int:
    """Where to write to, which nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.slow
def test_files_are_written_though_nobody_reads_what_is_printed(
    source: Path, tmp_path: Path
) -> None:
    files = [tmp_path / "out.json", tmp_path / "net.gw"]
    command = [sys.executable, "-m", "graphwright", "tune", f"{source}:pair", *QUICK, "--here"]
    nobody = _closed_pipe()
    done = subprocess.run(
        [*command, "--json", files[0], "--save", files[1]], stdout=nobody, stderr=nobody
    )
    os.close(nobody)
    assert done.returncode == 0
    assert all(file.stat().st_size for file in files)


@pytest.mark.slow
def test_results_in_stdout_s_place_stand_alone(source: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m graphwright tune {source}:pair {' '.join(QUICK)} --here"
    file, winner = tmp_path / "out.json", tmp_path / "net.gw"
    winner.touch()  # As mktemp leaves it.
    more = f"--json /dev/stdout --save {winner} >{file} 2>&-"
    subprocess.run(["sh", "-c", f"{command} {more}"], check=True, cwd=tmp_path)
    assert json.loads(file.read_text())["schema"] == "graphwright.tune"
    assert winner.stat().st_size
    closed = subprocess.run(["sh", "-c", f"{sys.executable} -m graphwright report none >&- 2>&-"])
    assert closed.returncode == 2


@pytest.mark.parametrize("write", [print, lambda text: Console().print(text)])
def test_printing_to_a_closed_pipe_is_no_failure_and_to_a_full_disk_is_a_sentence(
    write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(_closed_pipe(), "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with printing():
            write("text")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(GraphwrightError, match="No space left on device"), printing():
            write("text")


def test_what_cannot_be_remembered_is_a_sentence_with_its_remedy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_folder").touch()
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "no_folder"))
    with warnings.catch_warnings():
        warnings.simplefilter("default", RuntimeWarning)
        result = invoke("tune", f"{source}:pair", *QUICK, "--fresh")
    assert result.exit_code == 0
    assert "graphwright: The choice cannot be cached as" in result.stderr
    assert "Set GRAPHWRIGHT_CACHE_DIR to a folder" in result.stderr
    assert "RuntimeWarning" not in result.stderr


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (("run", "net.gw"), "graphwright.cli.run.run_artifact"),
        (("strategies",), "graphwright.strategies.base.probe"),
        (("check", "models:pair"), "graphwright.cli.targets.load_target"),
    ],
)
def test_ctrl_c_in_any_command_exits_130(
    command: tuple[str, ...], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    result = invoke(*command)
    assert result.exit_code == 130
    assert result.stderr.endswith("graphwright: interrupted.\n")


def test_an_interruption_before_the_first_row_prints_no_table(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Tuning, progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuning, "_refer", interrupted)
    result = invoke("tune", f"{source}:pair", *QUICK)
    assert result.exit_code == 130
    assert "Interrupted before anything was measured." in result.stdout
    assert "strategy" not in result.stdout


def test_ctrl_c_while_saving_does_not_cost_the_table(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphwright.artifacts.saving.save_best", interrupted)
    result = invoke("tune", f"{source}:pair", *QUICK, "--save", tmp_path / "net.gw")
    assert result.exit_code == 130
    assert "was chosen" in result.stdout


def test_help_says_what_is_needed_when() -> None:
    assert "[default: 10m]" in invoke("tune", "--help").stdout
    text = " ".join(invoke("run", "--help").stdout.split())
    assert text.count("needed where `strategies` says") == 2
    for command in ("tune", "run", "check", "strategies"):
        assert "TEXT" not in invoke(command, "--help").stdout


def test_nothing_is_saved_after_an_interruption(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Tuning) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuning, "_final_rounds", interrupted)
    file = tmp_path / "net.gw"
    result = invoke("tune", f"{source}:pair", *QUICK, "--fresh", "--save", file)
    assert result.exit_code == 130
    assert "interrupted: no winner was saved." in result.stderr
    assert "Interrupted" in result.stdout
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_prints_what_is_known_and_exits_130(source: Path) -> None:
    """A real process and a real SIGINT, sent as soon as the second row is on the screen.

    The third has no end, so that the run has none before that, however slow the host is.
    """
    command = [sys.executable, "-u", "-m", "graphwright", "tune", f"{source}:endless"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--strategies", "eager:no_grad,eager:inference_mode"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "eager:no_grad: " in line and "set up in" in line:  # No line of what takes long.
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Interrupted" in output
    assert "eager:no_grad" in output
    assert "Traceback" not in errors


def test_profile_names_what_bounds_a_model_and_writes_its_files(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.profiler.roofs._CPU_COPIES", (1 << 14, 1 << 20))
    monkeypatch.setattr("graphwright.profiler.roofs._CPU_SIZES", {"float32": 128})
    monkeypatch.setattr("graphwright.profiler.profiler.cores", lambda: 1)
    names = ("json", "trace", "roofline", "timeline")
    options = [word for name in names for word in (f"--{name}", str(tmp_path / name))]
    result = invoke("profile", f"{source}:pair", "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert "share of the time" in result.output
    assert json.loads((tmp_path / "json").read_text())["schema"] == "graphwright.profile"
    assert "traceEvents" in json.loads((tmp_path / "trace").read_text())
    assert (tmp_path / "roofline").read_text().startswith("<svg")
    assert (tmp_path / "timeline").read_text().startswith("<svg")


def test_profile_of_a_backward_pass(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.profiler.roofs._CPU_COPIES", (1 << 14, 1 << 20))
    monkeypatch.setattr("graphwright.profiler.roofs._CPU_SIZES", {"float32": 128})
    monkeypatch.setattr("graphwright.profiler.profiler.cores", lambda: 1)
    result = invoke("profile", f"{source}:pair", "--device", "cpu", "--training")
    assert result.exit_code == 0, result.output
    assert "forward and backward" in result.output


def test_run_writes_a_page(source: Path, tmp_path: Path) -> None:
    file, page = tmp_path / "out.gw", tmp_path / "out.html"
    assert invoke("tune", f"{source}:pair", *QUICK, "--fresh", "--save", file).exit_code == 0
    options = ("--model", f"{source}:Net", "--device", "cpu", "--calls", 2)
    result = invoke("run", file, *options, "--html", page)
    assert result.exit_code == 0, result.output
    text = page.read_text("utf-8")
    for part in ("It answers in ", "How it was loaded", "eager, when it was tuned", "<svg"):
        assert part in text
    assert "overwrite" in invoke("run", file, *options, "--html", file).stderr
