"""Every example runs and gives what it promises; the classics are tuned on small budgets."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CLASSICS = [
    "mlp",
    pytest.param("cnn", marks=pytest.mark.slow),
    "rnn",
    pytest.param("conv_relu_pool", marks=[pytest.mark.exhaustive, pytest.mark.long]),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured for a moment each: what is chosen is not the point."""
    for name in ("SCREENING_S", "FINAL_S_EACH"):
        monkeypatch.setattr(f"graphwright.tuning.tuner.{name}", 0.1)


@pytest.mark.parametrize("name", CLASSICS)
def test_a_classic_is_tuned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    chosen = module.main(["torchscript:optimize", "eager:no_grad", "eager+graph"], 30.0)
    printed = capsys.readouterr().out
    assert f"{chosen} was chosen" in printed
    assert chosen is not None


def test_the_classics_have_the_sizes_that_they_are_known_by() -> None:
    sizes: dict[str, Any] = {
        "mlp": ((32, 1024), (32, 10)),
        "cnn": ((32, 1, 28, 28), (32, 10)),
        "rnn": ((32, 50, 64), (32, 10)),
        "conv_relu_pool": ((64, 32, 56, 56), (64, 64, 28, 28)),
    }
    for name, (given, expected) in sizes.items():
        model, inputs = getattr(importlib.import_module(name), name)()
        assert inputs[0].shape == given
        with torch.no_grad():
            assert model(*inputs).shape == expected


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_network_is_tuned_over_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("tune_shapes")
    calls = module.main(["torchscript:freeze"], 30.0)
    assert sum(calls.values()) == 18
    printed = capsys.readouterr().out
    assert all(f"batch={batch}" in printed for batch in module.SHARES)
    # Where eager itself is the fastest, nothing is padded.
    assert ("tuned, padded to a bucket" in calls) == ("eager was chosen" not in printed)


def test_a_resnet_is_fused(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("resnet").main(count=1, size=64, rounds=3) > 0
    printed = capsys.readouterr().out
    assert "20 × batch norm folded" in printed
    assert "times as fast" in printed


@pytest.mark.slow
def test_minilm_embeds_real_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    minilm = importlib.import_module("minilm")
    similarity = minilm.main(["eager:no_grad"], 30.0)
    assert 0.1 < similarity < 1
    assert "Nearest in meaning" in capsys.readouterr().out


@pytest.mark.slow
def test_minilm_is_served_by_buckets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = importlib.import_module("minilm_buckets")
    model, tokenizer = example.load()
    model.encoder.layer = model.encoder.layer[:1]  # It has every operation that all six have.
    monkeypatch.setattr(example, "load", lambda: (model, tokenizer))
    told = example.main(count=12, smallest=(8, 32))
    assert told.graphs == 2
    assert told.hits == 6
    assert told.padded > 0
    assert not told.eager
    printed = capsys.readouterr().out
    assert all("×".join(map(str, bucket)) in printed for bucket in told.buckets)


@pytest.mark.slow
def test_a_sentence_transformer_is_accelerated(capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module("sentence_transformer")
    options = {"strategies": ["torchscript:freeze"], "isolate": False, "budget_s": 10.0}
    example.main((1, 2, 8), remember=False, progress=False, **options)
    printed = capsys.readouterr().out
    assert "SentenceTransformer.encode" in printed
    off = re.search(r"off by more than (\S+)\.\n", printed)
    assert off is not None
    assert float(off[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers_pipeline", "diffusers_pipeline"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_pipeline_is_accelerated(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module(name)
    options = {"strategies": ["onnxruntime"], "isolate": False, "budget_s": 20.0}
    example.main(remember=False, progress=False, **options)
    printed = capsys.readouterr().out  # Whether it gains beyond the noise is the machine's affair.
    assert re.search(r"Pipeline: \S+ \S+ before, \S+ \S+ now", printed)
    off = re.search(r"off by more than (\S+?)[.,]?( of 1\.)?\n", printed)
    assert off is not None
    assert float(off[1]) < 1e-5


def test_the_sentences_differ_in_length() -> None:
    minilm = importlib.import_module("minilm")
    words = sorted(len(sentence.split()) for sentence in minilm.SENTENCES)
    assert len(words) == 32
    assert words[0] <= 3
    assert words[-1] >= 35
    _, batch = minilm.minilm()
    mask = batch["attention_mask"]
    assert set(mask.unique().tolist()) == {0, 1}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_digits_are_learnt_by_a_graphed_step(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    share, off = importlib.import_module("train_digits").main()
    assert share >= 0.98
    assert off < 1e-2
    printed = capsys.readouterr().out
    assert "largest difference of a loss" in printed
    assert printed.count("\n") > 10


@pytest.mark.slow
@pytest.mark.long
def test_an_operator_of_one_s_own_is_measured_beside_pytorch_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("extension")
    assert module.main((64, 33), 60.0) is not None
    (row,) = [s for s in capsys.readouterr().out.splitlines() if " extension " in s]
    assert any(f" {status} " in row for status in ("ok", "chosen", "slower")), row
    x, gate = torch.randn(6, 5).t(), torch.randn(5, 6)[:, ::1]
    torch.testing.assert_close(module.operators().gated_add(x, gate, 0.5), module.Plain()(x, gate))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_licence_is_learnt_and_recited_by_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("generate")
    same, factor = module.main()
    assert same == len(module.PROMPTS)
    assert factor > 0
    printed = capsys.readouterr().out
    # What it was asked to go on with, as the licence does.
    assert "Unless required by applicable law or agreed to in writing, software" in printed
    assert "0 launches without a graph" in printed
    assert ("The gain is on a GPU" in printed) is not torch.cuda.is_available()
