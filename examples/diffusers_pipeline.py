"""A pipeline of diffusers, tiny and with random weights, accelerated in place with two LoRAs.

pip install diffusers peft
python examples/diffusers_pipeline.py
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

LORAS = ("pencil", "oil")


def pipeline() -> Any:
    """Stable Diffusion's parts in small: UNet with two LoRAs, decoder, scheduler."""
    import diffusers
    from peft import LoraConfig

    torch.manual_seed(0)
    sizes = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **sizes,
    )
    lora = {"r": 4, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}
    for name in LORAS:
        unet.add_adapter(LoraConfig(**lora), adapter_name=name)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
        **sizes,
    )
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = (vae.eval(), None, None, unet.eval(), scheduler, None, None)
    made = diffusers.StableDiffusionPipeline(*parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made.to("cuda" if torch.cuda.is_available() else "cpu")


def draw(pipe: Any, lora: str) -> Any:
    """One image with one of the LoRAs, the same at each call."""
    pipe.unet.set_adapter(lora)
    generator = torch.Generator(pipe.device).manual_seed(1)
    prompt = torch.rand(1, 7, 16, generator=generator, device=pipe.device)
    return pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=torch.zeros_like(prompt),
        num_inference_steps=10,
        height=16,
        width=16,
        generator=generator,
        output_type="np",
    ).images


def seconds(pipe: Any) -> float:
    """The time of ten images, the LoRAs in turns, the least of three."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for number in range(10):
            draw(pipe, LORAS[number % 2])
        found.append(time.perf_counter() - began)
    return min(found)


def main(**options: Any) -> float:
    """Accelerate, and compare images and times. Returns how many times as fast it is."""
    import graphwright as gw

    pipe = pipeline()
    expected, before_s = [draw(pipe, lora) for lora in LORAS], seconds(pipe)
    with gw.accelerate(pipe, LORAS, run=draw, **options) as accelerated:
        found, after_s = [draw(pipe, lora) for lora in LORAS], seconds(pipe)
        print(accelerated.explain())
    off = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    print(f"Ten images take {after_s:.2f} s instead of {before_s:.2f} s.")
    print(f"No pixel is off by more than {off:.1e}, of 1.")
    return before_s / after_s


if __name__ == "__main__":
    main()
