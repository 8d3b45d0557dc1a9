"""Libraries that look at a model before they call it: transformers, accelerate, diffusers."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import graphwright as gw

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WORDS = 16, 12


def on_forward(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(model: Any) -> Any:
        model.forward = wrap(model.forward)
        return model

    return wrapped


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 256}
    tokens = {"pad_token_id": 0, "eos_token_id": 299, "bos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, initializer_range=0.3)).eval()


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **none, intermediate_size=64, vocab_size=100)
    return BertForSequenceClassification(config)


def rows() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    mask = torch.ones(WORDS, dtype=torch.long)
    ids = torch.randint(0, 100, (ROWS, WORDS))
    return [
        {"input_ids": ids[n], "attention_mask": mask, "labels": n % 2, "unknown": n}
        for n in range(ROWS)
    ]


def batch() -> dict[str, torch.Tensor]:
    data = rows()[:8]
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in names}


GENERATE = {
    "graph_of_forward": on_forward(gw.graph),
    "eager_on_miss": on_forward(lambda forward: gw.graph(forward, on_miss="eager")),
    "training": lambda model: gw.make_graphed_callables(
        model, (), sample_kwargs={"input_ids": torch.ones(2, 7, dtype=torch.long)},
        allow_unused_input=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", GENERATE)
def test_generate_with_left_padding_gives_the_same_tokens(way: str) -> None:
    """GPT-2's positions come from the mask, if forward is seen to take `position_ids`."""
    ids = torch.randint(3, 298, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = ids[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = gpt2().generate(ids, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs eagerly", gw.FallbackWarning)
        assert torch.equal(GENERATE[way](gpt2()).generate(ids, **options), expected)


TRAINER: dict[str, Callable[[Any], Any]] = {
    "graph": gw.graph,
    "graph_of_forward": on_forward(gw.graph),
    "fuse": lambda model: gw.fuse(model.eval()),
    "tune": lambda model: gw.tune(
        model.eval(), kwargs=batch(), strategies=["eager"], isolate=False, progress=False
    ),
    "graph_of_fuse": lambda model: gw.graph(gw.fuse(model.eval())),
    "training": lambda model: gw.make_graphed_callables(
        model, (), sample_kwargs=batch(), allow_unused_input=True
    ),
}


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    settings = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = TrainingArguments(str(folder), save_strategy="no", **settings, **options)
    return Trainer(model=model, args=arguments, eval_dataset=rows(), train_dataset=rows())


@pytest.mark.parametrize("way", TRAINER)
def test_trainer_evaluates_predicts_and_saves(way: str, tmp_path: Path) -> None:
    eager = trainer(bert(), tmp_path)
    mine = trainer(TRAINER[way](bert()), tmp_path)
    assert mine.label_names == eager.label_names
    assert mine.evaluate()["eval_loss"] == pytest.approx(eager.evaluate()["eval_loss"], rel=1e-5)
    expected, got = eager.predict(rows()), mine.predict(rows())
    torch.testing.assert_close(torch.from_numpy(got[0]), torch.from_numpy(expected[0]))
    mine.save_model(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["architectures"] == ["BertForSequenceClassification"]
    again = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.state_dict(), bert().state_dict())


@pytest.mark.parametrize("way", ["graph", "graph_of_forward", "training"])
def test_trainer_trains(way: str, tmp_path: Path) -> None:
    eager, model = bert(), bert().train()
    trainer(eager, tmp_path, num_train_epochs=2, max_grad_norm=1.0).train()
    mine = TRAINER[way](model)
    trainer(mine, tmp_path, num_train_epochs=2, max_grad_norm=1.0).train()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    if way == "training":
        assert mine.forward.statistics.replays == 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        return self.layer(x).relu() * times


@contextlib.contextmanager
def accelerator(precision: str) -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    try:
        yield Accelerator(cpu=True, mixed_precision=precision)
    finally:
        AcceleratorState._reset_state(True)


PREPARE: dict[str, Callable[[Any], Any]] = {
    "graph": gw.graph,
    "graph_of_forward": on_forward(gw.graph),
    "fuse": gw.fuse,
    "training": lambda model: gw.make_graphed_callables(model, (torch.ones(2, 4),)),
}


def gained(way: str, made: Any) -> int:
    """How many calls were answered by what was gained."""
    if way == "fuse":
        return int(made.calls["fused"])
    statistics = (made if way == "graph" else made.forward).statistics
    return int(statistics.replays if way == "training" else statistics.hits)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("way", PREPARE)
@torch.no_grad()
def test_accelerate_prepares_and_unwraps(way: str, precision: str) -> None:
    model = Net().eval()
    x, plain = torch.randn(2, 4), copy.deepcopy(model)
    made = PREPARE[way](model)
    for _ in range(2):
        torch.testing.assert_close(made(x), plain(x))
    before = gained(way, made)
    with accelerator(precision) as prepares:
        twin = prepares.prepare(copy.deepcopy(plain))
        prepared = prepares.prepare(made)
        assert prepared is made
        for _ in range(3):
            torch.testing.assert_close(prepared(x), twin(x))
        if precision == "no":
            assert gained(way, made) == before + 3
        unwrapped = prepares.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert unwrapped is made
        for _ in range(3):
            torch.testing.assert_close(unwrapped(x, times=2), plain(x, times=2))
        torch.testing.assert_close(prepares.get_state_dict(prepared), plain.state_dict())


@pytest.mark.parametrize("wrap", [gw.graph, gw.fuse, lambda unet: gw.graph(torch.compile(unet))])
def test_diffusers_saves_a_component_and_loads_it(wrap: Any, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    channels = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
    unet = diffusers.UNet2DModel(**channels, **sizes, **blocks).eval()
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=4)
    pipe = diffusers.DDPMPipeline(unet, scheduler)
    pipe.unet = wrap(unet)
    pipe.save_pretrained(tmp_path)
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    assert type(again.unet) is diffusers.UNet2DModel
    torch.testing.assert_close(again.unet.state_dict(), unet.state_dict())
    assert diffusers.DDPMPipeline(pipe.unet, scheduler).unet is pipe.unet
