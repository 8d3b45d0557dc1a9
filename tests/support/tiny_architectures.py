"""Architectures of transformers, tiny and with random weights, and calls of them.

Shared by the tests of captures and of buckets, and by bench/architectures/run.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.export import Dim
from torch.utils import _pytree as pytree

import graphwright as gw

Inputs = dict[str, Any]
# (step) or (step, batch, length) -> the arguments of a call; those of step 0 are the sample.
Make = Callable[..., Inputs]
CALLS = 5
BATCH, LENGTH, TARGET, SIDE, WORDS = 2, 12, 7, 32, 99
SAMPLES, FRAMES = 2000, 32
IMAGE_TOKEN = 98
ITEM = "Tensor.item()"


def ids(batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS - 2, (batch, length))


def mask(step: int, batch: int, length: int, *, left: bool = False) -> torch.Tensor:
    """Ones for the sample and for one of the calls; else padded, each row by another length."""
    real = length - torch.randperm(max(length // 2, batch))[:batch] - 1
    if step in (0, CALLS - 2):
        real[:] = length
    places = torch.arange(length).flip(0) if left else torch.arange(length)
    return (places < real.clamp(min=1)[:, None]).long()


def text(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    return {"input_ids": ids(batch, length), "attention_mask": mask(step, batch, length)}


def unpadded(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    return {"input_ids": ids(batch, length)}


def prompt(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    padded = mask(step, batch, length, left=True)
    return {"input_ids": ids(batch, length), "attention_mask": padded, "use_cache": False}


def codes(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    """Those of four codebooks, in rows."""
    return {"input_ids": torch.randint(0, WORDS, (4 * batch, length)), "use_cache": False}


def target(batch: int) -> Inputs:
    return {"decoder_input_ids": ids(batch, TARGET), "use_cache": False}


def two_texts(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    seen = {"decoder_attention_mask": mask(step, batch, TARGET)}
    return text(step, batch, length) | target(batch) | seen


def boxes(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    corners = torch.randint(0, 500, (batch, length, 4)).sort(dim=-1).values
    return text(step, batch, length) | {"bbox": corners}


def image(step: int, batch: int = BATCH, side: int = SIDE) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def large_image(step: int, batch: int = BATCH) -> Inputs:
    return image(step, batch, 2 * SIDE)


def video(step: int, batch: int = 1) -> Inputs:
    return {"pixel_values": torch.randn(batch, 4, 3, SIDE, SIDE)}


def text_and_image(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    return text(step, batch, length) | image(step, batch)


def image_in_text(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    patches = torch.full((batch, 16), IMAGE_TOKEN)
    words = torch.cat([patches, ids(batch, length)], dim=1)
    return {"input_ids": words, "use_cache": False} | image(step, batch)


def wave(step: int, batch: int = BATCH, length: int = SAMPLES) -> Inputs:
    padded = mask(step, batch, length)
    return {"input_values": torch.randn(batch, length), "attention_mask": padded}


def wave_and_text(step: int, batch: int = BATCH, length: int = SAMPLES) -> Inputs:
    return {"input_values": torch.randn(batch, length)} | target(batch)


def spectrum(step: int, batch: int = BATCH) -> Inputs:
    return {"input_values": torch.randn(batch, 32, 16)}


def features(step: int, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    padded = mask(step, batch, length)
    return {"input_features": torch.randn(batch, length, 20), "attention_mask": padded}


def mel_and_text(step: int, batch: int = BATCH) -> Inputs:
    return {"input_features": torch.randn(batch, 16, 32)} | target(batch)


def frames_and_text(step: int, batch: int = BATCH, length: int = FRAMES) -> Inputs:
    padded = mask(step, batch, length)
    frames = {"input_features": torch.randn(batch, length, 16), "attention_mask": padded}
    return frames | target(batch)


def series(step: int, batch: int = BATCH) -> Inputs:
    return {"past_values": torch.randn(batch, 16, 2)}


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEEP = {"num_hidden_layers": 2, "num_attention_heads": 4}
CORE = {"hidden_size": 32, "intermediate_size": 64} | DEEP
TEXT = CORE | TOKENS | {"vocab_size": WORDS, "max_position_embeddings": 64}
EMBED16 = TEXT | {"embedding_size": 16}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT = TOKENS | {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4}
T5 = TOKENS | {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}
BART = TOKENS | {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
VISION = CORE | {"image_size": SIDE, "patch_size": 8}
SPEECH = CORE | {
    "vocab_size": WORDS,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
PAIR = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
TWO_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
RESNET = TWO_STAGES | {"embedding_size": 8, "layer_type": "basic"}
WINDOWS = {"image_size": SIDE, "patch_size": 2, "embed_dim": 16, "window_size": 4}
HALVES = {"depths": [1, 2], "num_heads": [2, 4]}
FOUR_STAGES = {
    "image_size": 2 * SIDE,
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 2],
}
DETECTOR = {key: value for key, value in BART.items() if key != "vocab_size"} | {
    "backbone_config": RESNET | {"model_type": "resnet", "out_features": ["stage2"]}
}
RECURRENT = TEXT | {"num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32}
LLAVA = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
    "image_token_id": IMAGE_TOKEN,
}
MAMBA = TOKENS | {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Line:
    """Tokens, samples or frames in a row: dimension 1 of some arguments.

    Attributes:
        arguments: their names.
        bucket: the length to fill up to.
        least: what convolutions and the like need.
    """

    arguments: tuple[str, ...]
    bucket: int = 16
    least: int = 1

    @property
    def masked(self) -> bool:
        """Whether one of the arguments tells padding from data."""
        return "attention_mask" in self.arguments


TOKENS_AND_MASK = ("input_ids", "attention_mask")
LINES = {
    unpadded: Line(("input_ids",)),
    codes: Line(("input_ids",)),
    text: Line(TOKENS_AND_MASK),
    prompt: Line(TOKENS_AND_MASK),
    two_texts: Line(TOKENS_AND_MASK),
    boxes: Line((*TOKENS_AND_MASK, "bbox")),
    text_and_image: Line(TOKENS_AND_MASK),
    features: Line(("input_features", "attention_mask")),
    frames_and_text: Line(("input_features", "attention_mask"), bucket=40, least=4),
    wave: Line(("input_values", "attention_mask"), bucket=2400, least=400),
    wave_and_text: Line(("input_values",), bucket=2400, least=1000),
}
FULL_BATCH = 4
# Corners have an order, which values drawn one by one would not keep.
BOXES = {"attention_mask": 0, "bbox": 0}
# CLIP and its like find the end of a text by its largest id.
IDS = {"attention_mask": 0, "input_ids": 0}


@dataclass(frozen=True)
class Case:
    model: str
    inputs: Make
    config: dict[str, Any]
    # All of these words are in the error, where the call cannot be captured.
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model}-refused" if self.refused else self.model

    @property
    def line(self) -> Line | None:
        """Where the calls have a sequence dimension, and which."""
        return LINES.get(self.inputs)

    @property
    def pad(self) -> dict[str, int] | None:
        """What a user would declare to fill the arguments up with."""
        declared = {boxes: BOXES, text_and_image: IDS}.get(self.inputs, {"attention_mask": 0})
        given = self.inputs(0)
        return {name: value for name, value in declared.items() if name in given} or None

    def build(self) -> torch.nn.Module:
        """The model."""
        kind = getattr(transformers, self.model)
        return kind(kind.config_class(**self.config)).eval()

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """By dimension the smallest size, and that of the bucket."""
        line = self.line
        return {"batch": (1, FULL_BATCH)} | ({"length": (line.least, line.bucket)} if line else {})

    def bucketed(self, model: torch.nn.Module, names: Sequence[str]) -> gw.GraphedModule:
        """Graphs of the model in one bucket over these dimensions."""
        dims = {name: Dim(name, min=low) for name, (low, _) in self.bounds.items() if name in names}
        shapes = {}
        for name, value in self.inputs(0).items():
            along = ("batch", "length") if self.line and name in self.line.arguments else ("batch",)
            if isinstance(value, torch.Tensor):
                shapes[name] = {axis: dims[dim] for axis, dim in enumerate(along) if dim in dims}
        full = {name: [self.bounds[name][1]] for name in names}
        return gw.graph(
            model,
            on_miss="error",
            dynamic_shapes=shapes,
            buckets=gw.Buckets(**full),
            pad=self.pad,
        )

    def calls(self, names: Sequence[str], count: int) -> Iterator[Inputs]:
        """Calls of other sizes in these dimensions: the smallest, one below the bucket's, any."""
        for step in range(1, count + 1):
            sizes = {}
            for name in names:
                low, full = self.bounds[name]
                drawn = int(torch.randint(low, full + 1, ()))
                sizes[name] = {1: low, 2: full - 1}.get(step, drawn)
            yield self.inputs(step, **sizes)


def errors(found: Any, expected: Any, mask: torch.Tensor | None) -> tuple[float, float]:
    """Largest errors of a call's outputs, relative to each one's root mean square.

    That is taken for 0.1 at least: one number near 0 is often the difference of larger ones.

    Args:
        found: the outputs.
        expected: what eager returns.
        mask: of the call, where it has one: 0 at padding of the caller's own.

    Returns:
        that of what belongs to data, and that of what belongs to the caller's padding.
    """
    worst = [0.0, 0.0]
    mine, tree = pytree.tree_flatten(found)
    theirs, expected_tree = pytree.tree_flatten(expected)
    assert tree == expected_tree
    for have, want in zip(mine, theirs, strict=True):
        if not isinstance(want, torch.Tensor):
            assert have == want
            continue
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        scale = max(0.1, float(want.double().square().mean().sqrt()))
        apart = (have.double() - want.double()).abs().nan_to_num(nan=math.inf) / scale
        apart[(have == want) | (have.isnan() & want.isnan())] = 0
        data = torch.ones(apart.shape[:2], dtype=torch.bool)
        if mask is not None and mask.shape == apart.shape[:2]:
            data = mask.bool()
        for index, part in enumerate((apart[data], apart[~data])):
            worst[index] = max([worst[index], *part.flatten().tolist()])
    return worst[0], worst[1]


def case(model: str, inputs: Make, *base: dict[str, Any], **own: Any) -> Case:
    refused = own.pop("refused", ())
    merged = {key: value for part in base for key, value in part.items()} | own
    return Case(model, inputs, merged, refused)


CASES = [
    # Encoders of text
    case("BertModel", text, TEXT),
    case("RobertaModel", text, TEXT),
    case("DistilBertModel", text, TOKENS, vocab_size=WORDS, dim=32, n_layers=2, n_heads=4),
    case("AlbertModel", text, EMBED16),
    case("ElectraModel", text, EMBED16),
    case("MPNetModel", text, TEXT),
    case("ConvBertModel", text, TEXT, embedding_size=32),
    case("FNetModel", unpadded, TEXT),
    case("ModernBertModel", text, TEXT, cls_token_id=1, sep_token_id=2),
    case("RoFormerModel", text, TEXT, embedding_size=32),
    case("BigBirdModel", text, TEXT, attention_type="original_full"),
    case("XLNetModel", text, TOKENS, vocab_size=WORDS, d_model=32, n_layer=2, n_head=4),
    case("LayoutLMModel", boxes, TEXT),
    # Decoders
    case("GPT2LMHeadModel", prompt, GPT),
    case("GPTJForCausalLM", prompt, GPT, rotary_dim=4),
    case("GPTNeoXForCausalLM", prompt, TEXT),
    case("OPTForCausalLM", prompt, TEXT, ffn_dim=64, word_embed_proj_dim=32),
    case("BloomForCausalLM", prompt, TOKENS, vocab_size=WORDS, hidden_size=32, n_head=4, n_layer=2),
    case("FalconForCausalLM", prompt, TEXT, alibi=True),
    case("LlamaForCausalLM", prompt, GROUPED),
    case("MistralForCausalLM", prompt, GROUPED, sliding_window=4),
    case("MixtralForCausalLM", prompt, EXPERTS),
    case("Qwen3ForCausalLM", prompt, GROUPED),
    case("Gemma2ForCausalLM", prompt, GROUPED, sliding_window=4),
    case("Phi3ForCausalLM", prompt, TEXT),
    case("GptOssForCausalLM", prompt, EXPERTS, sliding_window=4),
    case("DogeForCausalLM", prompt, GROUPED, attn_implementation="eager"),
    # Recurrent ones
    case("MambaForCausalLM", prompt, MAMBA, state_size=8),
    case("Mamba2ForCausalLM", prompt, MAMBA, state_size=8, num_heads=8, head_dim=8, chunk_size=4),
    case("RwkvForCausalLM", unpadded, MAMBA, attention_hidden_size=32, use_cache=False),
    # Encoders with decoders
    case("T5ForConditionalGeneration", two_texts, T5),
    case("UMT5Model", two_texts, T5, attn_implementation="eager"),
    case("BartModel", two_texts, BART),
    case("PegasusModel", two_texts, BART),
    case("M2M100Model", two_texts, BART),
    # Images and video
    case("ViTModel", image, VISION),
    case("DeiTModel", image, VISION),
    case("BeitModel", image, VISION),
    case("Dinov2Model", image, VISION),
    case("ViTMAEModel", image, VISION),  # draws random numbers
    case("ConvNextModel", image, TWO_STAGES, num_stages=2),
    case("ResNetModel", image, RESNET),
    case("RegNetModel", image, TWO_STAGES, embedding_size=8, groups_width=4),
    case("SwinModel", image, WINDOWS, HALVES),
    case("Swinv2Model", image, WINDOWS, HALVES),
    case("MobileNetV2Model", image, image_size=SIDE, depth_multiplier=0.25),
    case("SegformerForSemanticSegmentation", large_image, FOUR_STAGES, decoder_hidden_size=16),
    case("DetrForObjectDetection", large_image, DETECTOR, num_queries=5),
    case("VideoMAEModel", video, VISION, num_frames=4, tubelet_size=2),
    # Sound
    case("Wav2Vec2Model", wave, SPEECH),
    case("HubertModel", wave, SPEECH),
    case("SEWModel", wave, SPEECH, squeeze_factor=2),
    case("Wav2Vec2BertModel", features, TEXT, feature_projection_input_dim=20),
    case("ASTModel", spectrum, CORE, max_length=32, num_mel_bins=16, patch_size=4),
    case("WhisperModel", mel_and_text, BART, max_source_positions=16, num_mel_bins=16),
    case("Speech2TextModel", frames_and_text, BART, input_feat_per_channel=16, conv_channels=32),
    case("MoonshineModel", wave_and_text, TEXT),
    # Several kinds at once, and series of numbers
    case("CLIPModel", text_and_image, PAIR),
    case("SiglipModel", text_and_image, PAIR, text_config=TEXT | {"projection_size": 32}),
    case("ChineseCLIPModel", text_and_image, PAIR),
    case("OwlViTModel", text_and_image, PAIR),
    case("GitModel", text_and_image, TEXT, vision_config=VISION, use_cache=False),
    case("PatchTSTModel", series, num_input_channels=2, context_length=16, patch_length=4),
    # Refused: Python reads a value, for the reason that stands above it
    # Is attention global anywhere?
    case("LongformerModel", text, TEXT, attention_window=4, refused=(ITEM, "longformer.py")),
    # How many image tokens are there?
    case("LlavaForConditionalGeneration", image_in_text, LLAVA, refused=("formatting", "llava.py")),
    # How many tokens does each expert get?
    case("JetMoeForCausalLM", prompt, MAMBA, kv_channels=8, refused=("Tensor.tolist()", "jetmoe")),
    # Refused: shapes that depend on values
    case("SwitchTransformersModel", two_texts, T5, num_experts=4, refused=("nonzero", "switch")),
    case("SuperPointForKeypointDetection", large_image, refused=("aten.nonzero.default",)),
    case("XmodModel", text, TEXT, default_language="en_XX", refused=("aten.index.Tensor",)),
    # Its layers keep their last states, which no call reads.
    case("RecurrentGemmaForCausalLM", prompt, RECURRENT),
    # Refused: what Python does itself. Random numbers are drawn, even where nothing depends on
    # them; TorchScript makes a tensor of a size.
    case("MusicgenForCausalLM", codes, TEXT, ffn_dim=64, refused=("Python's random",)),
    case("DebertaV2Model", text, TEXT, refused=("made anew", "deberta_v2.py")),
    # Refused: other numbers than eager's once they are told that a capture is under way, since
    # with scaled_dot_product_attention eager forgets to be causal where nothing is padded.
    case("DogeForCausalLM", prompt, GROUPED, refused=("computes something else",)),
    case("UMT5Model", two_texts, T5, refused=("computes something else",)),
]
