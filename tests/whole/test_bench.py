"""The benchmark of tune(): targets, tables and comparisons of made-up results, and one real run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import graphwright
from bench import __main__ as run
from bench import compare
from bench.busy import run as busy
from bench.common import processes
from bench.feeding import run as feeding
from bench.host_arguments import run as host_arguments
from bench.profile import run as predictions
from bench.streams import run as streams
from bench.training import table as training_table
from bench.tune import table as tune_table

ROOT = Path(__file__).parents[2]
Result = dict[str, Any]
H200 = {"gpu": "NVIDIA H200", "processor": "Xeon", "torch": "2.11.0"}


def way(latency_us: float, **more: Any) -> Result:
    """A row that was timed; each of six rounds is a little off the median."""
    rounds = [[latency_us * 1e-6 * (1 + 1e-4 * turn)] * 3 for turn in range(-3, 3)]
    return {"status": "ok", "latency_s": latency_us * 1e-6, "latency_samples": rounds, **more}


def chosen(latency_us: float, strategy: str = "inductor+graph", **more: Any) -> Result:
    return way(latency_us, **{"chosen": strategy, "elsewhere": {}, "notes": []} | more)


def result(**models: Result) -> Result:
    found: Result = {
        "schema": "graphwright.bench",
        "schema_version": 2,
        "benchmark": "tune",
        "commit": "abc",
        "quick": False,
        "options": [],
        "environment": H200,
        "models": models,
    }
    return found | {"targets": tune_table.targets(found)}


def model(mine: Result, **peers: float) -> Result:
    ways = {name.replace("_", "-"): way(latency) for name, latency in peers.items()}
    return {"report": None, "ways": {"graphwright.tune": mine, **ways}}


def met(found: Result, what: str) -> dict[str, bool | None]:
    """Which targets of a kind were met, by model."""
    return {t["model"]: t["met"] for t in found["targets"] if what in t["target"]}


# ------------------------------------------------------------ targets


def test_the_choice_may_be_slower_than_the_best_peer_by_3_percent_and_2_microseconds() -> None:
    found = result(
        at=model(chosen(104.9), eager=500, reduce_overhead=100),
        above=model(chosen(105.1), eager=500, reduce_overhead=100),
    )
    assert met(found, "best peer") == {"at": True, "above": False}


def test_a_peer_that_failed_is_no_peer_to_beat() -> None:
    one = model(chosen(105), eager=500)
    one["ways"]["reduce-overhead"] = {"status": "failed", "reason": "no"}
    assert met(result(one=one), "best peer") == {"one": True}


def test_a_choice_whose_calls_went_to_eager_misses_its_target() -> None:
    found = result(one=model(chosen(50, elsewhere={"eager: another signature": 7}), eager=100))
    assert met(found, "best peer") == {"one": False}


def test_a_model_that_failed_misses_its_target() -> None:
    found = result(one={"failed": "took over 150 s, at max-autotune"})
    assert met(found, "best peer") == {"one": False}


def test_means_are_geometric_and_say_over_how_many_models() -> None:
    found = result(
        a=model(chosen(10), eager=20, reduce_overhead=16),
        b=model(chosen(10), eager=180, reduce_overhead=16),
        c=model(chosen(10), eager=60),
        d={"failed": "exit status 1"},
    )
    means = {t["target"].split("'")[0].split()[-1]: t for t in found["targets"][-2:]}
    assert means["eager"]["value"] == pytest.approx(6.0)
    assert (means["eager"]["model"], means["eager"]["met"]) == ("3 of 4 models", True)
    assert means["reduce-overhead"]["value"] == pytest.approx(1.6)
    assert means["reduce-overhead"]["model"] == "2 of 4 models"


def test_a_mean_against_what_is_not_to_be_had_here_is_not_measured() -> None:
    here, failed = model(chosen(10), eager=60), model(chosen(10), eager=60)
    here["ways"]["reduce-overhead"] = {"status": "unavailable", "reason": "needs a CUDA device"}
    failed["ways"]["reduce-overhead"] = {"status": "failed", "reason": "no"}
    assert met(result(one=here), "reduce-overhead") == {"0 of 1 model": None}
    assert met(result(one=failed), "reduce-overhead") == {"0 of 1 model": False}
    early = {"failed": "took over 150 s, at torch.jit", "ways": {"eager": way(9)}}
    assert met(result(one=here, two=early), "reduce-overhead") == {"0 of 2 models": None}


# ------------------------------------------------------------ beside a load


def test_ratios_beside_a_load_are_right_or_marked() -> None:
    def run(fast: float, *unsteady: str) -> dict[str, Any]:
        return {"ratios": {"eager": {"fast": fast}}, "unsteady": dict.fromkeys(unsteady, "why")}

    quiet, right, marked = run(2.0), run(2.9), {"ratios": {}, "unsteady": {"fast": "why"}}
    assert busy.problems(quiet, [right] * 7 + [marked] * 3) == []
    assert busy.problems(quiet, [right, run(3.1), run(1.3)]) == [
        "busy run 2: fast vs eager is off by a factor of 1.55",
        "busy run 3: fast vs eager is off by a factor of 1.54",
    ]
    assert busy.problems(quiet, [right] * 6 + [marked] * 4) == [
        "4 of 10 busy runs have rows that are marked as unsteady"
    ]
    assert busy.problems(run(2.0, "fast"), []) == ["quiet: fast is marked as unsteady"]


# ------------------------------------------------------------ tables


def test_the_overview_has_the_choice_every_peer_and_both_factors() -> None:
    one = model(chosen(50), eager=500, reduce_overhead=100)
    one["ways"]["torch.jit"] = {"status": "wrong", "reason": "is off"}
    two = model(chosen(80, "eager+graph"), eager=400, reduce_overhead=100)
    two["ways"]["torch.jit"] = way(90)
    head, *rows = tune_table.overview(result(one=one, two=two, three={"failed": "x"}))
    assert head[:4] == ["model", "chosen", "tuned", "eager"]
    assert head[4:] == ["torch.jit", "reduce-overhead", "vs eager", "vs best peer"]
    assert rows[0][:6] == ["one", "inductor+graph", "50.0", "500.0", "wrong", "100.0"]
    assert rows[0][6:] == ["10.00×", "2.00× reduce-overhead"]
    assert rows[1][:6] == ["two", "eager+graph", "80.0", "400.0", "90.0", "100.0"]
    assert rows[1][6:] == ["5.00×", "1.12× torch.jit"]
    assert rows[2] == ["three", "failed", *["–"] * 6]


def test_a_model_is_a_line_as_it_is_done() -> None:
    one = model(chosen(50), eager=500, reduce_overhead=100)
    assert (
        tune_table.line("mlp", one)
        == "mlp: inductor+graph 50.0 µs; best peer reduce-overhead 100.0 µs, 2.00×"
    )
    ways = {"graphwright.tune": {"status": "ok", "setup_s": 60.0, "notes": []}}
    late = {"failed": "took over 150 s, at max-autotune", "ways": ways}
    assert tune_table.line("mlp", late) == "mlp: failed, took over 150 s, at max-autotune"


def test_markdown_says_which_targets_were_missed_and_how_it_was_run() -> None:
    found = result(one=model(chosen(50, notes=["a note"]), eager=500, reduce_overhead=49))
    text = tune_table.to_markdown(found)
    missed = (
        "1 of 3 targets met; missed: latency of the choice, ≤ 1.03 × the best peer + 2 µs (one)"
    )
    assert missed.replace("1 of 3", "2 of 3") not in text
    assert "| one | inductor+graph | 50.0 | 500.0 | 49.0 | 10.00× | 0.98× reduce-overhead |" in text
    assert "2 of 3 targets met; missed: geometric mean of reduce-overhead's latency" in text
    assert "(1 of 1 model: 0.980 against 1.500)." in text
    assert "- every model: tune: a note" in text
    assert "gpu NVIDIA H200" in text


def test_all_targets_met_is_said() -> None:
    found = result(one=model(chosen(50), eager=500, reduce_overhead=100))
    assert "3 of 3 targets met." in tune_table.to_markdown(found)


def test_committed_results_can_be_shown() -> None:
    for file in (ROOT / "bench" / "results").glob("tune*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        text = tune_table.to_markdown(data)
        for name in tune_table.reports(data):
            assert name in text


# ------------------------------------------------------------ comparisons


def verdicts(before: Result, after: Result) -> dict[str, str]:
    return {f"{c.model} {c.way}": c.verdict for c in compare.changes(before, after)}


def test_a_change_counts_beyond_3_percent_and_both_intervals() -> None:
    before = result(one=model(chosen(100), eager=100, torch_jit=100, torch_compile=100))
    wide = [[100e-6], [101e-6], [102e-6], [110e-6], [120e-6], [130e-6]]
    after = result(one=model(chosen(95), eager=104, torch_jit=102, torch_compile=105))
    after["models"]["one"]["ways"]["torch-compile"]["latency_samples"] = wide
    before["models"]["one"]["ways"]["torch-compile"]["latency_samples"] = wide
    assert verdicts(before, after) == {
        "one graphwright.tune": "faster",
        "one eager": "slower",
        "one torch-jit": "same",
        "one torch-compile": "same",
    }


def saved(folder: Path, name: str, data: Result) -> Path:
    file = folder / name
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


def compared(folder: Path, before: Result, after: Result) -> int:
    return compare.main(saved(folder, "A.json", before), saved(folder, "B.json", after))


@pytest.mark.parametrize(("latency", "code"), [(95, 0), (100, 0), (102, 0), (104, 1)])
def test_only_a_slower_choice_fails(latency: float, code: int, tmp_path: Path) -> None:
    before = result(one=model(chosen(100), eager=500))
    after = result(one=model(chosen(latency), eager=900))
    assert compared(tmp_path, before, after) == code


def test_a_choice_that_is_gone_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = result(one=model(chosen(100), eager=500))
    assert compared(tmp_path, before, result(one={"failed": "took over 150 s"})) == 1
    assert "lost (failed: took over 150 s)" in capsys.readouterr().out


def test_another_choice_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = result(one=model(chosen(100), eager=500))
    after = result(one=model(chosen(100, "eager+graph"), eager=500))
    assert compared(tmp_path, before, after) == 0
    assert "same (inductor+graph → eager+graph)" in capsys.readouterr().out


def test_capture_is_compared_by_its_own_ways(tmp_path: Path) -> None:
    def captured(latency: float) -> Result:
        ways = {"graphwright.graph": way(latency), "hand": way(2 * latency)}
        other = {"benchmark": "capture", "schema_version": 1, "models": {"one": {"ways": ways}}}
        return result() | other

    assert compared(tmp_path, captured(100), captured(99)) == 0
    assert compared(tmp_path, captured(100), captured(110)) == 1


def test_models_and_machines_that_differ_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = result(one=model(chosen(100), eager=500), two=model(chosen(9), eager=99))
    after = result(one=model(chosen(100), eager=500)) | {"environment": H200 | {"gpu": "A100"}}
    assert compared(tmp_path, before, after) == 0
    printed = capsys.readouterr().out
    assert "warning: other gpu: NVIDIA H200 in A, A100 in B" in printed
    assert "warning: only in A: two" in printed


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"benchmark": "capture", "schema_version": 1}, "A is a result of tune, B of capture"),
        ({"schema_version": 1}, "has schema version 1; of tune, version 2 can be compared"),
        ({"benchmark": "buckets"}, "is a result of buckets, and only tune, capture, training"),
        ({"schema": "else"}, "is no result of scripts/bench"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(
    other: Result, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, result(), result() | other) == 2
    assert sentence in capsys.readouterr().err


# ------------------------------------------------------------ runs


def test_a_process_that_hangs_or_fails_keeps_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "script.py").write_text(
        "import json, sys, time\n"
        "json.dump({'figures': {'a': 1}, 'doing': 'a peer'}, open(sys.argv[2], 'w'))\n"
        "time.sleep(60) if sys.argv[1] == 'hangs' else sys.exit('no luck')\n",
        encoding="utf-8",
    )
    kept = {"figures": {"a": 1}}
    for what, why in (("hangs", "took over 2 s"), ("fails", "exit status 1: no luck")):
        found = processes.figures_of("script", what, [], limit_s=2)
        assert found == kept | {"failed": f"{why}, at a peer"}


@pytest.mark.slow
def test_tune_runs_and_writes_what_the_tables_are_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A GPU would make a benchmark of this.
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    words, left_out = ["--strategies", "eager:no_grad"], ["torch.compile"]
    assert run.tune(["mlp"], tmp_path, words, left_out, quick=True) == 0
    found = json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"))
    assert (found["schema_version"], found["quick"]) == (2, True)
    ways = found["models"]["mlp"]["ways"]
    assert {name: row["status"] for name, row in ways.items()} == {
        "graphwright.tune": "ok",
        "eager": "ok",
        "torch.jit": "ok",
        "torch.compile": "unavailable",
        "reduce-overhead": "unavailable",
        "max-autotune": "unavailable",
        "make_graphed_callables": "unavailable",
    }
    assert ways["graphwright.tune"]["chosen"].startswith("eager")
    assert ways["graphwright.tune"]["elsewhere"] == {}
    assert capsys.readouterr().out.startswith("mlp: eager")
    assert compare.main(tmp_path / "tune.json", tmp_path / "tune.json") == 0
    assert tune_table.reports(found)["mlp"]["model"] == "mlp"
    report = tune_table.read(tune_table.reports(found)["mlp"])
    assert report is not None
    assert "<summary>mlp, latency" in tune_table.to_markdown(found)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nosuch"], "nosuch is none of mlp, cnn"),
        (["mlp", "--leave-out", "nosuch"], "nosuch is none of eager"),
        (["mlp", "--options", "--nosuch 3"], "unrecognized arguments: --nosuch 3"),
    ],
)
def test_wrong_words_are_said_before_anything_runs(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "tune", *words])
    with pytest.raises(SystemExit) as stopped:
        run.main()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def found(line: int, severity: str = "breaks") -> Result:
    return {"kind": "read", "severity": severity, "file": "/there/net.py", "line": line}


def test_predictions_are_set_against_captures() -> None:
    from bench.check.run import confusion, counts
    from bench.check.run import to_markdown as checked_to_markdown

    stopped = {"ok": False, "error": "refused", "file": "net.py", "line": 7}
    rows = [
        {"model": "works", "cpu": [found(3, "slow")], "capture": {"ok": True}},
        {"model": "stops", "cpu": [found(3, "frozen"), found(7)], "capture": stopped},
        {"model": "elsewhere", "cpu": [found(6, "hoisted")], "capture": stopped},
        {"model": "missed", "cpu": [], "capture": stopped},
        {"model": "alarm", "cpu": [found(7, "blocks")], "capture": {"ok": True}},
        {"model": "absent", "failed": "no such module"},
    ]
    assert confusion(rows, "cpu") == {
        "captured as predicted": ["works"],
        "stopped as predicted": ["stops"],
        "stopped elsewhere": ["elsewhere"],
        "missed": ["missed"],
        "false alarm": ["alarm"],
    }
    environment = {"torch": "2", "transformers": "5", "gpu": "one"}
    result = {"rows": rows, "environment": environment, "commit": "abc"}
    told = "\n".join(counts({**result, "rows": [r | {"cuda": r.get("cpu")} for r in rows]}))
    assert "2 of 5 models have nothing that stops a capture." in told
    assert "missed: missed" in told
    assert "Not run: absent (no such module)." in told
    page = checked_to_markdown({**result, "rows": [r | {"cuda": []} for r in rows]}, "check.json")
    assert "| stops | breaks: read | `net.py:7` | read | stops at `net.py:7` |" in page
    plain = [{"model": "works", "cpu": []}, {"model": "absent", "failed": "no"}]
    assert "plain capture" not in checked_to_markdown({**result, "rows": plain}, "check.json")


# ------------------------------------------------------------ training


def trained(eager: float, others: float, plain: float, compiled: float, **more: Any) -> Result:
    """A model of the training benchmark; all in milliseconds a step."""
    times = {
        "eager": eager,
        "torch.compile": others,
        "graphwright.graph_step": plain,
        "graphwright.inductor+graph_step": compiled,
    }
    ways = {
        name: {
            "status": "ok",
            "setup_s": 1.0,
            "latency_s": ms * 1e-3,
            "back_to_back_s": ms * 1e-3,
            "loss_relative_difference": 0.0,
        }
        for name, ms in times.items()
    }
    return {"ways": ways, **more}


def peaks(ours: int, torchs: int) -> Result:
    def row(reserved: int) -> Result:
        return {"status": "ok", "with_setup": {"reserved": reserved, "allocated": 1}}

    ways = ("graphwright.inductor+graph_step", "torch.cuda.make_graphed_callables")
    return {way: row(size * 2**20) for way, size in zip(ways, (ours, torchs), strict=True)}


def trainings(**models: Result) -> Result:
    found = result(**models) | {"benchmark": "training", "schema_version": 1}
    return found | {"targets": training_table.targets(found)}


def test_training_is_judged_by_the_better_of_the_two_graph_steps() -> None:
    found = trainings(
        mlp=trained(9.0, 5.0, 3.0, 2.0, memory=peaks(100, 100)),
        lstm=trained(4.0, 2.0, 2.1, 2.2, memory=peaks(100, 99)),
        resnet18_b64=trained(4.0, 2.0, 1.9, 1.8, memory=peaks(100, 99)),
    )
    assert met(found, "launch-bound") == {"mlp": True, "lstm": False}
    assert met(found, "≥ 1 / 1.03") == {"mlp": True, "lstm": False, "resnet18_b64": True}
    # The plain one is lstm's best, and its memory was not measured.
    assert met(found, "peak memory") == {"mlp": True, "lstm": None, "resnet18_b64": False}
    mean = [t for t in found["targets"] if "mean" in t["target"]]
    assert mean[0]["value"] == pytest.approx((2.5 * (2.0 / 2.1) * (2.0 / 1.8)) ** (1 / 3))
    assert (mean[0]["model"], mean[0]["met"]) == ("3 of 3 models", True)
    line = "mlp: inductor+graph_step 2.000 ms; torch.compile 5.000 ms; 2.50×"
    assert training_table.line("mlp", found["models"]["mlp"]) == line


def test_a_model_without_ours_misses_its_training_targets_and_the_mean() -> None:
    one = trained(9.0, 5.0, 3.0, 2.0)
    for name in training_table.OURS:
        one["ways"][name] = {"status": "wrong", "reason": "its loss is off"}
    found = trainings(mlp=one, gpt2=trained(9.0, 5.0, 3.0, 2.0))
    assert met(found, "launch-bound") == {"mlp": False, "gpt2": True}
    assert met(found, "mean") == {"1 of 2 models": False}
    assert met(found, "loss of plain") == {"mlp": False, "gpt2": True}
    page = training_table.to_markdown(found, "training.json")
    assert "wrong | wrong |" in page
    assert "- mlp: graph_step: its loss is off" in page


def test_a_loss_may_be_as_far_off_as_eager_is_off_itself() -> None:
    one, two = trained(9.0, 5.0, 3.0, 2.0), trained(9.0, 5.0, 3.0, 2.0)
    for each in (one, two):
        each["ways"]["graphwright.graph_step"]["loss_relative_difference"] = 0.05
    one["ways"]["eager"]["repeat_relative_difference"] = 0.02
    assert met(trainings(mlp=one, gpt2=two), "loss of plain") == {"mlp": True, "gpt2": False}


def test_a_way_that_ends_its_process_is_a_row_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures_of(module: str, what: str, options: list[str], limit_s: float) -> Result:
        found = trained(9.0, 5.0, 3.0, 2.0)
        if "reduce-overhead" in options:
            found["ways"]["reduce-overhead"] = {"status": "unavailable", "reason": "asked"}
            return {"environment": {}, "figures": found}
        return {"figures": {}, "failed": "exit status -11: , at reduce-overhead"}

    monkeypatch.setattr(run, "figures_of", figures_of)
    assert run.training(["mlp"], tmp_path, quick=True, compile_too=True, memory_too=True) == 0
    found = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))["models"]["mlp"]
    assert found["ways"]["eager"]["status"] == "ok"
    failed = {"status": "failed", "reason": "exit status -11: , at reduce-overhead"}
    assert found["ways"]["reduce-overhead"] == failed


@pytest.mark.slow
@pytest.mark.long
def test_training_runs_and_writes_what_the_tables_are_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    flags = {"compile_too": False, "memory_too": True}
    assert run.training(["mlp"], tmp_path, quick=True, **flags) == 0
    found = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    ways = found["models"]["mlp"]["ways"]
    ours = "ok" if hasattr(graphwright, "make_graphed_callables") else "unavailable"
    assert {name: row["status"] for name, row in ways.items()} == {
        "eager": "ok",
        "torch.compile": "unavailable",
        "reduce-overhead": "unavailable",
        "graphwright.inductor+graph_step": "unavailable",
        "graphwright.graph_step": "ok",
        "graphwright.make_graphed_callables": ours,
        "torch.cuda.make_graphed_callables": "unavailable",
    }
    assert ways["graphwright.graph_step"]["losses"] == ways["eager"]["losses"]
    assert len(ways["eager"]["losses"]) == 20
    assert ways["graphwright.graph_step"]["replays"] > 20
    assert sum(ways["graphwright.graph_step"]["eager_steps"].values()) <= 1
    assert "mlp: graph_step" in capsys.readouterr().out
    assert compare.main(tmp_path / "training.json", tmp_path / "training.json") == 0
    assert "## A step back to back, ms" in training_table.to_markdown(found, "training.json")


def test_targets_and_table_of_first_answers() -> None:
    from bench.cold_start.run import targets, to_markdown

    seconds = {
        "eager": [9.0, 8.0, 10.0],
        "saved": [4.0, 4.4, 4.2],
        "inductor, cold": [16.0, 16.8, 30.0],
        "inductor, warm": [9.0, 9.0, 9.0],
    }
    found = {
        "rounds": 3,
        "environment": {"gpu": "a GPU"},
        "models": {"bert": {"saved": "fused+graph", "seconds": seconds}},
    }
    share, beyond = targets(found)
    assert share["figure"] == pytest.approx(0.25)
    assert share["met"]
    assert beyond["figure"] == pytest.approx(-4.8)
    assert beyond["met"]
    assert "| bert | 9.0 (8.0 to 10.0) | `fused+graph` 4.2 (4.0 to 4.4) |" in to_markdown(found)
    seconds["saved"] = [4.3, 4.3, 4.2]
    assert not targets(found)[0]["met"]
    assert "0.26, MISSED" in to_markdown(found)


def test_an_answer_that_does_not_come_is_no_time(tmp_path: Path) -> None:
    from bench.cold_start.run import _answered

    with pytest.raises(RuntimeError, match="mlp, saved: no right answer came"):
        _answered("mlp", tmp_path, "saved", str(tmp_path / "caches"))


@pytest.mark.slow
def test_host_arguments_runs_and_is_right(tmp_path: Path) -> None:
    assert host_arguments.benchmark(tmp_path, rounds=2, quick=True) == 0
    found = json.loads((tmp_path / "host-arguments.json").read_text())
    assert len(found["ways"]) == 4
    assert all(len(way["samples"]) == 3 for way in found["ways"].values())


def test_streams_runs_and_is_right(tmp_path: Path) -> None:
    assert streams.benchmark(tmp_path, quick=True) == 0
    found = json.loads((tmp_path / "streams.json").read_text())
    assert found["targets"][0]["met"]
    assert found["models"]["head"]["1"]["ways"]["several"]["branches"] == 4


def test_feeding_runs_and_is_right(tmp_path: Path) -> None:
    assert feeding.benchmark(tmp_path, quick=True) == 0
    found = json.loads((tmp_path / "feeding.json").read_text())
    assert found["targets"][0]["met"]
    assert {"computing", "copying", "plain", "pinned", "prefetch"} <= {*found["ways"]}


def test_profile_s_predictions_stand_beside_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.profiler.roofs._CPU_COPIES", (1 << 14, 1 << 20))
    monkeypatch.setattr("graphwright.profiler.roofs._CPU_SIZES", {"float32": 128})
    monkeypatch.setattr("graphwright.profiler.profiler.cores", lambda: 1)
    # Times of tiny models on a busy machine meet no target: what counts is that all is there.
    predictions.benchmark(tmp_path, only=["tiny"], quick=True)
    found = json.loads((tmp_path / "profile.json").read_text())
    for row in found["models"].values():
        assert {"eager", "graph", "bf16+graph"} <= {*row["latency_s"]}
        assert row["causes"]
        assert {"graph", "fusion", "bf16"} <= {*row["remedies"]}
    assert len(found["targets"]) == 2 * 7
    assert "| tiny | " in predictions.to_markdown(found)


def test_predictions_are_counted_as_met_and_missed() -> None:
    def row(likely: float, measured: float, span: list[float], gain: float) -> dict[str, Any]:
        remedies = {
            "graph": {"likely": likely},
            "fusion": {"under_graph": span},
            "bf16": {"under_graph": None},
        }
        gains = {"graph": measured, "fused+graph": gain}
        # Two profiles; the host was twice as slow during the second one, and before it.
        eager = [[[measured] * 3] * 5, [[2 * measured] * 3] * 5]
        return {
            "remedies": remedies,
            "gains": gains,
            "seconds": 3.0,
            "figures": [{"call_s": likely}, {"call_s": 2 * likely}],
            "samples": {"eager": eager, "graph": [[[1.5] * 3] * 5] * 2},
            "latency_s": {"graph": 1.5},
        }

    models = {"a": row(2.0, 2.2, [1.0, 1.4], 1.2), "b": row(2.0, 3.0, [1.0, 1.6], 2.0)}
    graph, times, fusion, wide, *_ = predictions.targets(models)
    assert (graph["found"], graph["met"]) == ("1 of 2", False)
    assert (times["found"], times["met"]) == ("2 of 2", True)
    assert (fusion["found"], fusion["met"]) == ("1 of 2", False)
    assert not wide["met"]
