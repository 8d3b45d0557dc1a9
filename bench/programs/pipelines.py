"""Pipelines of libraries accelerated in place, beside torch.compile of their models.

    scripts/bench pipelines [--only NAME …] [--out DIR]

Stable Diffusion 1.5's parts and a diffusion transformer of Flux's kind with 8 blocks (diffusers,
random weights, 10 steps), Whisper-tiny (30 s of sound, 32 tokens) and BERT (a text classification
pipeline of transformers), on a GPU in half precision; tiny on a CPU, where only the script is
tried. Each program runs in a process of its own for each way: as it is, its models compiled by
torch.compile with its default and with mode="reduce-overhead", and by `gw.accelerate(program)`.
Compiler caches are empty. Results are compared with those before, of the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import graphwright as gw
from graphwright.calls.objects import flatten_result
from graphwright.report.environment import environment

from ..common.processes import figures_of
from ..common.record import SCHEMA, commit, write
from ..common.rendering import Result, Table, machine, marked, target, verdict

ROUNDS, LIMIT_S = 7, 200
EAGER, COMPILED, REDUCE_OVERHEAD, OURS = "eager", "torch.compile", "reduce-overhead", "accelerate"
WAYS = (EAGER, COMPILED, REDUCE_OVERHEAD, OURS)


@dataclass(frozen=True)
class Program:
    """A program and what it is called with.

    Attributes:
        target: the program itself.
        models: names of its modules that are compiled, as attributes.
        run: runs a call of it.
        calls: those that are timed and accelerated.
    """

    target: Any
    models: Sequence[str]
    run: Callable[[Any, Any], Any]
    calls: Sequence[Any]


def on_gpu() -> bool:
    return torch.cuda.is_available()


def placed(module: torch.nn.Module) -> Any:
    """A module where it runs: in half precision on a GPU."""
    return module.eval().cuda().half() if on_gpu() else module.eval()


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Random values where programs run, the same for each seed."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.cuda().half() if on_gpu() else made


def stable_diffusion(decodes: bool) -> Program:
    """Ten steps of Stable Diffusion 1.5, with or without the decoder behind them."""
    import diffusers

    small: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4}
    few: dict[str, Any] = small | {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    }
    whole = {"cross_attention_dim": 768, "sample_size": 64, "attention_head_dim": 8}
    unet = diffusers.UNet2DConditionModel(**(whole if on_gpu() else few | {"sample_size": 8}))
    decoder: dict[str, Any] = {"sample_size": 512, "block_out_channels": (128, 256, 512, 512)}
    decoder |= {"layers_per_block": 2}
    levels = 4 if on_gpu() else 2
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        **(decoder if on_gpu() else small | {"sample_size": 16}),
    )
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = (placed(vae), None, None, placed(unet), scheduler, None, None)
    pipe = diffusers.StableDiffusionPipeline(*parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    size, width = (512, 768) if on_gpu() else (16, 16)

    def draw(program: Any, seed: int) -> Any:
        return program(
            prompt_embeds=noise(1, 77, width, seed=seed),
            negative_prompt_embeds=noise(1, 77, width, seed=seed + 1),
            num_inference_steps=10,
            height=size,
            width=size,
            generator=torch.Generator(program.device).manual_seed(seed),
            output_type="pt" if decodes else "latent",
        ).images

    return Program(pipe, ("unet", "vae.decoder") if decodes else ("unet",), draw, (1, 2))


class Diffusion:
    """A loop of ten steps around a diffusion transformer of Flux's kind."""

    def __init__(self) -> None:
        import diffusers

        size: dict[str, Any] = {"num_layers": 4, "num_single_layers": 4}
        if not on_gpu():
            size |= {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16}
            size |= {"pooled_projection_dim": 16, "in_channels": 16, "axes_dims_rope": (2, 2, 4)}
        self.transformer = placed(diffusers.FluxTransformer2DModel(**size))
        self.side = 64 if on_gpu() else 4

    def __call__(self, seed: int) -> torch.Tensor:
        config, side = self.transformer.config, self.side
        latents = noise(1, side * side // 4, config.in_channels, seed=seed)
        text = noise(1, 64, config.joint_attention_dim, seed=seed + 1)
        pooled = noise(1, config.pooled_projection_dim, seed=seed + 2)
        places = torch.zeros(latents.shape[1], 3, device=latents.device)
        guidance = torch.full((1,), 3.5, device=latents.device)
        with torch.no_grad():
            for step in range(10):
                time_ = torch.full((1,), 1 - step / 10, device=latents.device, dtype=latents.dtype)
                found = self.transformer(
                    hidden_states=latents,
                    timestep=time_,
                    guidance=guidance if config.guidance_embeds else None,
                    pooled_projections=pooled,
                    encoder_hidden_states=text,
                    txt_ids=torch.zeros(64, 3, device=latents.device),
                    img_ids=places,
                ).sample
                latents = latents - 0.1 * found
        return latents


def diffusion_transformer() -> Program:
    return Program(Diffusion(), ("transformer",), lambda program, seed: program(seed), (1, 2))


def whisper() -> Program:
    """Speech recognition of 30 s: the encoder once, then 32 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4}
    size |= {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    size |= {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    tiny = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 50}
    tiny |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = placed(WhisperForConditionalGeneration(WhisperConfig(**(size if on_gpu() else tiny))))
    frames = 3000 if on_gpu() else 100

    def recognise(program: Any, seed: int) -> Any:
        sound = noise(1, 80, frames, seed=seed)
        starts = torch.full((1, 1), 1, device=sound.device)
        with torch.no_grad():
            return program.generate(
                sound, decoder_input_ids=starts, min_new_tokens=32, max_new_tokens=32
            )

    return Program(model, ("forward",), recognise, (1, 2))


def bert() -> Program:
    """A text classification pipeline, one sentence a call."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertTokenizerFast,
        TextClassificationPipeline,
    )

    file = Path(__file__).parents[2] / "examples" / "sentences.txt"
    sentences = file.read_text(encoding="utf-8").splitlines()
    words = sorted({word.strip(".,!?").lower() for line in sentences for word in line.split()})
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary.write_text("\n".join([*special, *words]), encoding="utf-8")
        tokenizer = BertTokenizerFast(vocab_file=str(vocabulary), model_max_length=128)
    tiny = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    model = placed(BertForSequenceClassification(BertConfig(**({} if on_gpu() else tiny))))
    pipe = TextClassificationPipeline(
        model=model, tokenizer=tokenizer, device="cuda" if on_gpu() else "cpu"
    )
    return Program(pipe, ("model",), lambda program, text: program(text), sentences[:6])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "stable-diffusion-1.5, ten steps": lambda: stable_diffusion(False),
    "stable-diffusion-1.5 with its decoder": lambda: stable_diffusion(True),
    "diffusion transformer, 8 blocks": diffusion_transformer,
    "whisper-tiny, 32 tokens": whisper,
    "bert, text classification": bert,
}


def compile_models(program: Program, mode: str | None) -> None:
    """Put compiled models in the places of a program's own."""
    for name in program.models:
        *path, last = name.split(".")
        owner = program.target
        for each in path:
            owner = getattr(owner, each)
        setattr(owner, last, torch.compile(getattr(owner, last), mode=mode))


def measured(name: str, way: str) -> Result:
    """A program before and after, in this process."""
    device = torch.device("cuda" if on_gpu() else "cpu")
    torch.manual_seed(0)
    program = PROGRAMS[name]()
    run, target_, calls = program.run, program.target, program.calls
    for _ in range(2):
        expected = [_leaves(run(target_, call)) for call in calls]
    chosen: list[str] = []
    began = time.perf_counter()
    if way == OURS:
        found = gw.accelerate(target_, list(calls), run=run, progress=False)
        chosen = [str(part) for part in found.parts]
    elif way != EAGER:
        compile_models(program, None if way == COMPILED else way)
    results = [_leaves(run(target_, call)) for call in calls]
    for call in calls:
        run(target_, call)
    _wait()
    setup_s = time.perf_counter() - began
    seconds = []
    for _ in range(ROUNDS):
        for call in calls:
            _wait()
            began = time.perf_counter()
            run(target_, call)
            _wait()
            seconds.append(time.perf_counter() - began)
    return {
        "setup_s": setup_s,
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "off": max(map(_difference, results, expected)),
        "chosen": chosen,
        "environment": environment(device),
    }


def _wait() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def _leaves(result: Any) -> list[Any]:
    return [
        each.detach().double().cpu() if isinstance(each, torch.Tensor) else each
        for each in flatten_result(result)[0]
    ]


def _difference(mine: Sequence[Any], its: Sequence[Any]) -> float:
    """The largest difference of two results; infinite where texts or shapes differ."""
    worst = 0.0
    for a, b in zip(mine, its, strict=True):
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape:
                return float("inf")
            worst = max(worst, float((a - b).abs().max()))
        elif isinstance(a, float):
            worst = max(worst, abs(a - b))
        elif a != b:
            return float("inf")
    return worst


def targets(result: Result) -> list[Result]:
    """What is asked: ahead of the best of torch.compile in the time of a call and of set-up."""
    found = []
    for name, ways in result["programs"].items():
        mine = ways.get(OURS, {})
        others = [ways.get(way, {}) for way in (COMPILED, REDUCE_OVERHEAD)]
        for what, key in (("time of a call", "median_s"), ("set-up", "setup_s")):
            known = [each[key] for each in others if key in each]
            if key not in mine or not known:
                found.append(target(f"{what}: a figure", name, None, 1, "", False))
                continue
            ratio = min(known) / mine[key]
            asked = f"{what}: times the best of torch.compile"
            found.append(target(asked, name, ratio, 1.0, "", ratio >= 1))
    return found


def to_markdown(result: Result) -> str:
    """The table of a result."""
    table: Table = [["program", "way", "a call, ms", "set-up, s", "off by", "chosen"]]
    for name, ways in result["programs"].items():
        for way, row in ways.items():
            if "median_s" not in row:
                table.append([name, way, "–", "–", "–", row.get("failed", "–")[-80:]])
                continue
            chosen = "; ".join(each.split("  ")[-1] for each in row["chosen"])
            figures = [f"{row['median_s'] * 1e3:,.1f}", f"{row['setup_s']:.0f}"]
            table.append([name, way, *figures, f"{row['off']:.1e}", chosen])
    return "\n".join(
        [
            "### Pipelines, accelerated in place, beside torch.compile of their models",
            "",
            *marked(table),
            "",
            verdict(result["targets"]),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path, only: Sequence[str] = ()) -> int:
    """Measure all, the file written after each; the number of targets missed."""
    where = out / f"pipelines-{'h200' if on_gpu() else 'cpu'}.json"
    result: Result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "pipelines",
        "environment": {},
        "programs": {},
    }
    if where.exists():
        result |= json.loads(where.read_text(encoding="utf-8"))
    result["commit"] = commit()
    before = {name: os.environ.get(name) for name in _CACHES}
    for name in PROGRAMS:
        if only and not any(each in name for each in only):
            continue
        ways = result["programs"].setdefault(name, {})
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                os.environ.update(dict.fromkeys(_CACHES, folder))
                found = figures_of("bench.programs.pipelines", name, [way], LIMIT_S)
            result["environment"] = found.pop("environment", result["environment"])
            ways[way] = found
            print(name, way, found.get("median_s"), found.get("failed", ""), flush=True)
            result["targets"] = targets(result)
            write(where, result)
    for variable, value in before.items():
        os.environ.pop(variable)
        if value is not None:
            os.environ[variable] = value
    print(to_markdown(result))
    print(f"wrote {where}")
    return sum(each["met"] is False for each in result["targets"])


# Where compilers and tune() keep what they have made.
_CACHES = ("GRAPHWRIGHT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path, help="the JSON to write")
    parser.add_argument("way")
    given = parser.parse_args()
    given.file.write_text(json.dumps(measured(given.name, given.way)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
