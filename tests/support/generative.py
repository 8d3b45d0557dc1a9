"""Language models of transformers beyond `tiny_architectures`, tiny, as their defaults call them.

Each is made of one set of sizes: those that its configuration knows.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from tiny_architectures import TARGET, TEXT, ids
from torch import nn

SIZES: dict[str, Any] = TEXT | {
    "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "n_embd": 32, "n_layer": 2, "n_head": 4,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "ffn_dim": 64, "state_size": 4,
}  # fmt: skip

# One of each kind of cache and family, for every run of the tests.
FEW = (
    "BartForConditionalGeneration", "Cohere2ForCausalLM", "FalconMambaForCausalLM",
    "GPTBigCodeForCausalLM", "Gemma3ForCausalLM", "Lfm2ForCausalLM", "MiniMaxForCausalLM",
    "MT5ForConditionalGeneration", "OlmoHybridForCausalLM", "Qwen2ForCausalLM",
)  # fmt: skip
MORE = (
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "AriaTextForCausalLM",
    "BartForCausalLM", "BertGenerationDecoder", "BertLMHeadModel", "BigBirdForCausalLM",
    "BigBirdPegasusForCausalLM", "BigBirdPegasusForConditionalGeneration", "BioGptForCausalLM",
    "BitNetForCausalLM", "BlenderbotForCausalLM", "BlenderbotForConditionalGeneration",
    "BlenderbotSmallForCausalLM", "BlenderbotSmallForConditionalGeneration", "CTRLLMHeadModel",
    "CamembertForCausalLM", "Cohere2MoeForCausalLM", "CohereForCausalLM", "CwmForCausalLM",
    "Data2VecTextForCausalLM", "DeepseekV4ForCausalLM", "DiffLlamaForCausalLM",
    "ElectraForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "ErnieForCausalLM",
    "Exaone4ForCausalLM", "ExaoneMoeForCausalLM", "FSMTForConditionalGeneration",
    "FlexOlmoForCausalLM", "FuyuForCausalLM", "GPTNeoXJapaneseForCausalLM",
    "Gemma4UnifiedForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM",
    "GlmForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM", "HYV3ForCausalLM", "HeliumForCausalLM",
    "HrmTextForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM", "InklingForCausalLM", "Jais2ForCausalLM",
    "LEDForConditionalGeneration", "LagunaForCausalLM", "Llama4ForCausalLM",
    "LongT5ForConditionalGeneration", "M2M100ForConditionalGeneration", "MBartForCausalLM",
    "MBartForConditionalGeneration", "MarianForCausalLM", "MarianMTModel",
    "MegatronBertForCausalLM", "MellumForCausalLM", "MiMoV2FlashForCausalLM",
    "MiniMaxM2ForCausalLM", "MiniMaxM3VLForCausalLM", "Ministral3ForCausalLM",
    "MinistralForCausalLM", "ModernBertDecoderForCausalLM", "MoshiForCausalLM", "MptForCausalLM",
    "MvpForCausalLM", "MvpForConditionalGeneration", "NanoChatForCausalLM", "NemotronForCausalLM",
    "NllbMoeForConditionalGeneration", "Olmo2ForCausalLM",
    "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM", "OpenAIGPTLMHeadModel",
    "PLBartForCausalLM", "PLBartForConditionalGeneration", "PegasusForCausalLM",
    "PegasusForConditionalGeneration", "PegasusXForConditionalGeneration", "PersimmonForCausalLM",
    "PhiForCausalLM", "PhimoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
    "RemBertForCausalLM", "RoFormerForCausalLM", "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM", "SeamlessM4TForTextToText", "SeamlessM4Tv2ForTextToText",
    "SeedOssForCausalLM", "SmolLM3ForCausalLM", "SolarOpenForCausalLM", "StableLmForCausalLM",
    "Starcoder2ForCausalLM", "SwitchTransformersForConditionalGeneration", "TrOCRForCausalLM",
    "UMT5ForConditionalGeneration", "VaultGemmaForCausalLM", "WhisperForCausalLM",
    "XGLMForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XLMWithLMHeadModel",
)  # fmt: skip


def build(name: str) -> nn.Module:
    """A model with random weights, in eval mode."""
    cls = getattr(transformers, name)
    default, named = cls.config_class(), inspect.signature(cls.config_class.__init__).parameters
    torch.manual_seed(0)
    sizes = {key: n for key, n in SIZES.items() if key in named or hasattr(default, key)}
    config = cls.config_class(**sizes)
    model: nn.Module = cls(config).eval()
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    """The arguments of a call."""
    given = {"input_ids": ids()}
    two_texts = "Conditional" in name or "TextToText" in name or name.endswith("MTModel")
    return given | ({"decoder_input_ids": ids(length=TARGET)} if two_texts else {})
