"""Fields of configurations whose names say nothing about sizes, or that have to agree with each other.

The one idea: most architectures shrink by the names of their fields; those that do not are named here, with
the values that make a small model of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FIELDS"]

_FOUR: Mapping[str, Any] = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
_PYRAMID: Mapping[str, Any] = {
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 2, 1],
    "num_attention_heads": [1, 2, 4, 8],
    "image_size": 64,
    "decoder_hidden_size": 32,
}
_WINDOWS: Mapping[str, Any] = {
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "image_size": 32,
    "window_size": 4,
    "hidden_size": 64,
}
_GLYPHS: Mapping[str, Any] = {
    "pronunciation_embed_dim": 16,
    "pronunciation_vocab_size": 20,
    "shape_embed_dim": 16,
    "shape_vocab_size": 20,
}
_HASHES: Mapping[str, Any] = {
    "attn_layers": ["local", "local"],
    "local_attn_chunk_length": 3,
    "axial_pos_embds": False,
    "feed_forward_size": 48,
}
_LATENTS: Mapping[str, Any] = {
    "num_latents": 8,
    "d_latents": 32,
    "d_model": 32,
    "num_blocks": 1,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "qk_channels": 32,
    "v_channels": 32,
}
_ONE_WIDTH: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 160,
    "num_kv_shared_layers": 0,
    "sliding_window": 8,
}
_BANDS: Mapping[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "rel_extent": 8,
    "d_rel": 4,
    "sliding_window_size": 8,
    "unpadded_vocab_size": 150,
}
_SOUNDS: Mapping[str, Any] = {"num_codebooks": 1}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "BitForImageClassification": {**_FOUR, "embedding_size": 16, "num_groups": 8},
    "BltForCausalLM": {
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "ConvNextForImageClassification": {**_FOUR, "image_size": 64},
    "ConvNextV2ForImageClassification": {**_FOUR, "image_size": 64},
    "CvtForImageClassification": {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 4]},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "max_seq_len": 24,
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "DonutSwinForImageClassification": _WINDOWS,
    "DoryForCausalLM": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "EfficientNetForImageClassification": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "hidden_dim": 320,
        "image_size": 32,
    },
    "EsmForMaskedLM": {"vocab_size": 160, "mask_token_id": 3, "pad_token_id": 0},
    "EsmcForMaskedLM": {"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 4},
    "FSMTForConditionalGeneration": {"src_vocab_size": 160, "tgt_vocab_size": 160},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "FocalNetForImageClassification": {"embed_dim": 16, "depths": [1, 1, 2, 1], "image_size": 64},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "Gemma3nForCausalLM": {
        **_ONE_WIDTH,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "Gemma4ForCausalLM": _ONE_WIDTH,
    "Gemma4UnifiedForCausalLM": _ONE_WIDTH,
    "GraniteMoeHybridForCausalLM": {
        "hidden_size": 32,
        "mamba_expand": 2,
        "layer_types": ["mamba", "attention"],
        "layers_block_type": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "num_hidden_layers": 2,
    },
    "HGNetV2ForImageClassification": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 24, 32],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 24, 32, 48],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "hidden_sizes": [16, 24, 32, 48],
    },
    "HieraForImageClassification": {
        "embed_dim": 16,
        "depths": [1, 1, 2, 1],
        "image_size": [64, 64],
        "patch_size": [7, 7],
    },
    "Inkling2ForCausalLM": _BANDS,
    "Inkling2LoopForCausalLM": _BANDS,
    "LagunaForCausalLM": {"num_attention_heads_per_layer": [4, 4], "num_hidden_layers": 2},
    "LevitForImageClassification": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 4, 4],
        "depths": [1, 1, 2],
        "key_dim": [8, 8, 8],
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "num_dense_layers": 1,
    },
    "LongcatFlashForCausalLM": {
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 24,
        "moe_topk": 2,
        "num_layers": 2,
    },
    "Mamba2ForCausalLM": {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "chunk_size": 8},
    "MobileBertForMaskedLM": {
        "hidden_size": 64,
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "true_hidden_size": 32,
    },
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.125, "image_size": 32},
    "MobileViTForImageClassification": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
        "image_size": 32,
        "patch_size": 2,
    },
    "MobileViTV2ForImageClassification": {
        "base_attn_unit_dims": [16, 24, 32],
        "n_attn_blocks": [1, 1, 2],
        "width_multiplier": 0.25,
        "image_size": 64,
        "patch_size": 2,
    },
    "MusicgenForCausalLM": _SOUNDS,
    "MusicgenMelodyForCausalLM": _SOUNDS,
    "OmniASRForConditionalGeneration": {
        "audio_config": {
            "conv_dim": [16] * 7,
            "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
        },
        "audio_token_id": 150,
    },
    "PerceiverForImageClassificationLearned": _LATENTS,
    "PerceiverForMaskedLM": {**_LATENTS, "max_position_embeddings": 5},
    "PoolFormerForImageClassification": {**_FOUR, "image_size": 32},
    "PvtForImageClassification": _PYRAMID,
    "PvtV2ForImageClassification": _PYRAMID,
    "RecurrentGemmaForCausalLM": {"lru_width": 32, "attention_window_size": 8},
    "Qwen3ASRForConditionalGeneration": {
        "audio_config": {"output_dim": 32, "downsample_hidden_size": 16},
        "audio_token_id": 150,
    },
    "ReformerForMaskedLM": {**_HASHES, "is_decoder": False},
    "ReformerModelWithLMHead": {**_HASHES, "is_decoder": True},
    "RegNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 2, 1],
        "groups_width": 8,
    },
    "ResNetForImageClassification": {**_FOUR, "embedding_size": 16},
    "RoCBertForCausalLM": _GLYPHS,
    "RoCBertForMaskedLM": _GLYPHS,
    "SegformerForImageClassification": _PYRAMID,
    "SwiftFormerForImageClassification": {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    "SwinForImageClassification": _WINDOWS,
    "Swinv2ForImageClassification": _WINDOWS,
    "TextNetForImageClassification": {"hidden_sizes": [8, 8, 16, 16, 32], "stem_out_channels": 8},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "xLSTMForCausalLM": {"hidden_size": 32, "embedding_dim": 32},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Arguments of the configuration by the name of the class; a mapping inside is a configuration inside."""
