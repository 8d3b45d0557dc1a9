"""The load test of servers, on a server that is made up: its figures, its search, its ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_v2_server
import numpy as np
import pytest
import torch

from bench.serving import peers, run, traffic
from bench.serving.apps.common import FILE, Options, answers
from bench.serving.search import highest

FAKE = fake_v2_server.__file__
Figures = dict[str, Any]


def fake(mode: str) -> peers.Server:
    return peers.Server(
        "uvicorn", "v2", lambda given: [sys.executable, FAKE, str(given.port), mode]
    )


def given() -> Options:
    return Options("", peers.free_port(), 1, 0.0, 1, "cpu")


@contextmanager
def trial(folder: Path, mode: str, seconds: float = 1.0) -> Iterator[run.Trial]:
    """A load on a server that answers as the mode says."""
    requests = traffic.drawn(32, seed=0)
    traffic.save(folder / "requests.npz", requests)
    np.save(folder / "answers.npy", np.stack([fake_v2_server.answer(ids) for ids in requests]))
    options = given()
    with peers.running(fake(mode), options, requests[0]):
        yield run.Trial(options.port, "v2", folder, seconds)


def test_every_answer_of_a_right_server_is_counted_and_right(tmp_path: Path) -> None:
    with trial(tmp_path, "right") as right:
        opened, closed = right.load(rate=100.0), right.load(clients=3)
    assert 60 < opened["due"] < 140
    for found in (opened, closed):
        assert found["statuses"] == {"200": found["due"]}
        assert (found["wrong"], found["swapped"]) == (0, 0)
        names = ("p50_s", "p90_s", "p99_s", "p99.9_s", "max_s")
        assert found["p50_s"] > 0
        assert sorted(found[name] for name in names) == [found[name] for name in names]
    assert closed["connections"] == 3
    assert closed["answered_per_s"] == pytest.approx(closed["due"] / closed["seconds"])


@pytest.mark.parametrize(("mode", "swapped"), [("swaps", True), ("lies", False)])
def test_wrong_answers_are_found_and_those_of_others_told_apart(
    tmp_path: Path, mode: str, swapped: bool
) -> None:
    with trial(tmp_path, mode) as wrong:
        found = wrong.load(clients=1, seconds=0.3)
    assert found["due"] // 4 <= found["wrong"] <= found["due"] // 4 + 1
    assert found["swapped"] == (found["wrong"] if swapped else 0)
    assert not run.passes(found, bound_s=10.0)


@pytest.mark.slow
def test_an_open_loop_counts_the_waiting_that_a_closed_one_leaves_out(tmp_path: Path) -> None:
    with trial(tmp_path, "slow") as slow:
        one = slow.load(clients=1)
        opened = slow.load(rate=2 / fake_v2_server.SLOW_S, connections=1)
    assert one["p50_s"] < 5 * fake_v2_server.SLOW_S
    # In a second twice as much falls due as is answered.
    assert opened["max_s"] > 0.5
    assert opened["p50_s"] > 3 * one["p50_s"]
    assert opened["behind_s"] < opened["max_s"] / 2


@pytest.mark.slow
def test_what_is_refused_and_what_is_never_answered_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "END_S", 0.5)  # it would wait for what it never answers
    with trial(tmp_path, "full") as full:
        found = full.load(clients=1, seconds=0.3)
    assert set(found["statuses"]) == {"200", "503"}
    assert abs(found["statuses"]["503"] - found["statuses"]["200"]) <= 1
    with trial(tmp_path, "stuck") as stuck:
        found = stuck.load(rate=20.0, drain_s=0.5)
    assert found["statuses"] == {"200": 2, "unanswered": found["due"] - 2}
    assert found["p50_s"] >= 0.5
    assert not run.passes(found, bound_s=10.0)


def test_requests_whose_server_is_gone_are_broken(tmp_path: Path) -> None:
    with trial(tmp_path, "right") as right:
        pass
    found = right.load(rate=50.0, seconds=0.2, drain_s=0.5)
    assert found["statuses"] == {"broken": found["due"]}


@pytest.mark.parametrize("mode", ["right", "stays"])
def test_a_server_ends_whatever_it_does_about_sigterm(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "END_S", 1.0)
    began: list[Any] = []

    def interrupted() -> None:
        with peers.running(fake(mode), given(), traffic.drawn(1, 0)[0]) as process:
            assert process.poll() is None
            began.append(process)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    [process] = began
    assert (process.returncode == -signal.SIGKILL) == (mode == "stays")
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_servers_that_do_not_start_are_rows(tmp_path: Path) -> None:
    traffic.save(tmp_path / "requests.npz", traffic.drawn(1, 0))
    row = run.served(fake("ends"), given(), tmp_path, 1.0)
    assert row == {"status": "failed", "reason": "it ended: no model today"}
    assert run.bad(row)
    missing = peers.Server("no_such_module", "raw", lambda given: ["false"])
    row = run.served(missing, given(), tmp_path, 1.0)
    assert row == {"status": "not installed"}
    assert not run.bad(row)


@pytest.mark.slow
def test_the_stages_of_a_low_load_are_told(tmp_path: Path) -> None:
    with trial(tmp_path, "right", seconds=0.2) as right:
        right.load(clients=2)
        before = run.stages(right.port)["request"]
        found = right.low()
        now = run.stages(right.port)["request"]
    assert found["stages_s"] == {
        "request": fake_v2_server.REQUEST_S,
        "queue": fake_v2_server.QUEUE_S,
    }
    assert now[1] - before[1] == found["due"] > 0
    assert run.stages(peers.free_port()) == {}


def test_the_search_comes_near_the_highest_rate() -> None:
    for limit in (3.0, 20.0, 333.0):
        passed, failed = highest(lambda rate, most=limit: rate <= most, 20, runs=20, seconds=60)
        assert failed is not None
        assert passed <= limit < failed <= 1.1 * passed


def test_the_search_ends_by_itself() -> None:
    tried: list[float] = []
    assert highest(lambda rate: bool(tried.append(rate)), 8, runs=4, seconds=60) == (0.0, 1.0)
    assert tried == [8, 4, 2, 1]
    assert highest(lambda rate: False, 8, runs=9, seconds=60, lowest=3) == (0.0, 4.0)
    assert highest(lambda rate: True, 8, runs=3, seconds=60) == (32, None)
    assert highest(lambda rate: True, 8, runs=3, seconds=0) == (0.0, None)


def test_a_whole_benchmark_of_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(module: str, what: str, words: list[str], limit_s: float) -> Figures:
        assert module == "bench.serving.bare"
        expected = [fake_v2_server.answer(ids) for ids in traffic.load(Path(what))]
        np.save(words[words.index("--answers") + 1], np.stack(expected))
        return {"p50_s": 0.002, "low": {"p50_s": 0.001}}

    real = run.figures_of
    monkeypatch.setattr(
        run,
        "figures_of",
        lambda *given: (figures if given[0] == "bench.serving.bare" else real)(*given),
    )
    monkeypatch.setattr(run, "RUNS", 2)
    # Far below what it does, and far above.
    monkeypatch.setattr(run, "FIRST", {"cpu": 5.0, "cuda": 5.0})
    monkeypatch.setitem(run.BOUND_S, "cpu", 1.0)
    monkeypatch.setitem(run.BOUND_S, "cuda", 1.0)
    monkeypatch.setattr(run, "SERVERS", {"one": fake("right")})
    options: dict[str, Any] = {"seconds": 0.3, "threads": 1}
    assert run.benchmark(tmp_path, [], modes=["eager"], **options) == 0
    row = json.loads((tmp_path / "serving.json").read_text())["servers"]["one"]["eager"]
    assert (row["highest_rate"], row["failed_rate"], row["wrong"]) == (10.0, None, 0)
    assert [one["rate"] for one in row["runs"]] == [5.0, 10.0]
    assert "1.0 ms" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="two: none of one"):
        run.benchmark(tmp_path, ["two"], modes=["eager"], **options)


def test_modes_of_several_runs_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(module: str, what: str, words: list[str], limit_s: float) -> Figures:
        return {"p50_s": 0.002, "low": {"p50_s": 0.001}}

    monkeypatch.delenv(FILE, raising=False)
    monkeypatch.setattr(run, "figures_of", figures)
    monkeypatch.setattr(run, "to_text", lambda result: "")
    monkeypatch.setattr(run, "served", lambda *given: {"status": "ok", "wrong": 0})
    joined = {"eager": "a", "tuned": "b"}
    for commit, mode, seconds, expected in (
        ("a", "eager", 0.3, {"eager": "a"}),
        ("b", "tuned", 0.3, joined),
        ("c", "tuned", 0.5, {"tuned": "c"}),  # Loads of another length belong to another table.
    ):
        monkeypatch.setattr(run, "commit", lambda commit=commit: commit)
        with monkeypatch.context() as patched:
            patched.setenv(FILE, "")
            run.benchmark(tmp_path, ["FastAPI"], modes=[mode], seconds=seconds, threads=1)
        result = json.loads((tmp_path / "serving.json").read_text())
        found = {mode: row["commit"] for mode, row in result["servers"]["FastAPI"].items()}
        assert found == expected
        assert list(result["bare"]) == list(expected)


def test_requests_are_short_mostly_and_kept_as_they_are(tmp_path: Path) -> None:
    requests = traffic.drawn(1000, seed=1)
    lengths = [len(ids) for ids in requests]
    assert (min(lengths), max(lengths)) == (8, 128)
    assert np.median(lengths) < np.mean(lengths) < 40
    traffic.save(tmp_path / "requests.npz", requests)
    for kept, again in zip(
        traffic.load(tmp_path / "requests.npz"), traffic.drawn(1000, seed=1), strict=True
    ):
        assert kept.tolist() == again.tolist()


def test_a_batch_of_peers_is_padded_and_masked() -> None:
    texts = [np.array([5, 6, 7]), np.array([9])]

    def target(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids * 10 + attention_mask

    found = answers(target, "cpu", [text.tobytes() for text in texts])
    rows = [np.frombuffer(one, np.float32).tolist() for one in found]
    assert rows == [[51, 61, 71], [91, 0, 0]]
