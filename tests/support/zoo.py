"""Tiny models of every architecture of the zoo, with sizes that no power of two divides, and a batch for each class.

A new architecture adds its sizes to `MORE` under its model type. Its classes come from the registry by themselves.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto
from transformers.models.umt5 import modeling_umt5

from oslo_models import registry

from support.input_names import IMAGES, SOUNDS

TOKENS = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_GPT2: dict[str, Any] = {"n_embd": 24, "n_inner": 35, "n_layer": 2, "n_head": 6, "n_positions": 32}
_GPT_NEO: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_layers": 2, "num_heads": 6, "max_position_embeddings": 32},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 4},
}
_GPTJ: dict[str, Any] = {**_GPT2, "rotary_dim": 4, "tie_word_embeddings": False}
_LLAMA: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True},
}
_BERT: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6},
    "max_position_embeddings": 32,
}
_T5: dict[str, Any] = {
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 35,
    "num_layers": 2,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}

FOUNDING = ("bert", "gpt2", "gpt_neo", "gptj", "llama", "t5")
"""The model types of `VARIANTS`, on which everything is tested; test_zoo.py tests the types of `MORE`."""

VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    # the main variant of each architecture bears its name
    "bert": ("bert", _BERT),
    "bert-untied": ("bert", {**_BERT, "tie_word_embeddings": False}),
    "bert-decoder": ("bert", {**_BERT, "is_decoder": True, "add_cross_attention": True}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied": ("gpt2", {**_GPT2, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-cross": ("gpt2", {**_GPT2, "add_cross_attention": True}),
    "gpt2-12-heads": ("gpt2", {**_GPT2, "n_embd": 48, "n_head": 12}),
    "gpt_neo": ("gpt_neo", _GPT_NEO),
    "gpt_neo-untied": ("gpt_neo", {**_GPT_NEO, "tie_word_embeddings": False}),
    "gptj": ("gptj", _GPTJ),
    "gptj-tied": ("gptj", {**_GPTJ, "tie_word_embeddings": True}),
    "llama": ("llama", _LLAMA),  # 2 key-value heads: replicated on 3 ranks and on 4
    "llama-untied": ("llama", {**_LLAMA, "tie_word_embeddings": False, "num_key_value_heads": 6}),
    "llama-9-heads": ("llama", {**_LLAMA, "hidden_size": 27, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-one-kv": ("llama", {**_LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "t5": ("t5", _T5),
    "t5-gated-untied": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}

_KV: dict[str, Any] = {key: value for key, value in _LLAMA.items() if key != "head_dim"}
_UNTIED: dict[str, Any] = {**_KV, "tie_word_embeddings": False}
_WINDOW: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_SIZE: dict[str, Any] = {key: value for key, value in _BERT.items() if key != "intermediate_size"}

_BART: dict[str, Any] = {
    **{"d_model": 24, "encoder_attention_heads": 6, "decoder_attention_heads": 4, "max_position_embeddings": 32},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 35, "decoder_ffn_dim": 33},
    **{"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    **{"decoder_start_token_id": 2, "scale_embedding": True, "forced_eos_token_id": None},
}
_RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 6}
_DEBERTA_V2: dict[str, Any] = {
    **{"position_buckets": 4, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    **{"share_att_key": True, "position_biased_input": False},
}
_XLM: dict[str, Any] = {"emb_dim": 24, "n_layers": 2, "n_heads": 6, "max_position_embeddings": 32}

_REFORMER: dict[str, Any] = {
    # transformers can generate only with fewer heads than positions in a chunk
    **{"hidden_size": 24, "feed_forward_size": 35, "num_attention_heads": 3, "attention_head_size": 4, "hash_seed": 1},
    **{"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_hashes": 2},
    **{"num_buckets": 4, "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [10, 14], "max_position_embeddings": 32},
}

_MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11}

_LATENT: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 6, "max_position_embeddings": 32, "tie_word_embeddings": True, "q_lora_rank": 10},
    **{"kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 5, "v_head_dim": 3, **_MIXTURE},
    **{"n_routed_experts": 5, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}

_INDEXED = {"index_topk": 4, "index_head_dim": 6, "index_n_heads": 3}

_GRANITE = {**_KV, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
_MOE_OF_GRANITE = {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 13}
_SPARSE = {**_MIXTURE, "mlp_layer_types": ["dense", "sparse"]}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 4}

_PATCHES = {"image_size": 12, "patch_size": 4}
_VIT: dict[str, Any] = {**_BERT, **_PATCHES, "encoder_stride": 4, "problem_type": "single_label_classification"}
_DINO: dict[str, Any] = {**_VIT, "mlp_ratio": 2, "layerscale_value": 0.7}
_CLIP = {**_BERT, "projection_dim": 7}
_OWL = {"text_config": {**_BERT, **TOKENS}, "vision_config": {**_BERT, **_PATCHES}, "projection_dim": 24}
_WAV2VEC2: dict[str, Any] = {
    **_BERT,
    **{"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 5, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 10},
    **{"codevector_dim": 8, "proj_codevector_dim": 8, "num_codevectors_per_group": 4, "num_negatives": 3},
    **{"tdnn_dim": [10, 12], "tdnn_kernel": [3, 2], "tdnn_dilation": [1, 1], "xvector_output_dim": 10},
    **{"apply_spec_augment": False, "layerdrop": 0.0},
}
_WINDOWS: dict[str, Any] = {
    **{"image_size": 24, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [3, 4], "window_size": 2},
    **{"encoder_stride": 8, "mlp_ratio": 2.0, "problem_type": "single_label_classification"},
}
_CONVOLUTIONS: dict[str, Any] = {
    **{"image_size": 24, "num_stages": 2, "hidden_sizes": [9, 10], "depths": [1, 2]},
    **{"patch_size": 4, "problem_type": "single_label_classification"},
}
_MASKED: dict[str, Any] = {
    **{**_VIT, "decoder_num_attention_heads": 3, "decoder_hidden_size": 12, "decoder_num_hidden_layers": 1},
    **{"decoder_intermediate_size": 17},
}
_DETR: dict[str, Any] = {
    **{"d_model": 16, "encoder_attention_heads": 8, "decoder_attention_heads": 4, "num_queries": 5},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 35, "decoder_ffn_dim": 33},
    "backbone_config": {
        **{"model_type": "resnet", "layer_type": "basic", "depths": [1, 1, 1, 1]},
        **{"embedding_size": 4, "hidden_sizes": [4, 6, 8, 10], "out_features": [f"stage{i}" for i in (1, 2, 3, 4)]},
    },
}
_SAMPLING: dict[str, Any] = {
    **{**_DETR, "d_model": 96, "encoder_attention_heads": 6, "decoder_attention_heads": 3, "decoder_n_points": 3},
    "backbone_config": {**_DETR["backbone_config"], "out_features": ["stage2", "stage3", "stage4"]},
}
_TWO_STAGES = {"two_stage": True, "with_box_refine": True, "two_stage_num_proposals": 5}
_RT_DETR: dict[str, Any] = {
    **{"d_model": 24, "encoder_hidden_dim": 24, "encoder_attention_heads": 6, "decoder_attention_heads": 3},
    **{"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 35, "decoder_ffn_dim": 33, "num_queries": 5},
    **{"encoder_in_channels": [6, 8, 10], "decoder_in_channels": [24, 24, 24], "decoder_n_points": 3},
    **{"num_denoising": 4, "auxiliary_loss": False},
    "backbone_config": {**_SAMPLING["backbone_config"], "model_type": "rt_detr_resnet"},
}
_GROUNDING_DINO: dict[str, Any] = {
    **{**_SAMPLING, "num_feature_levels": 4, "encoder_n_points": 2, "encoder_ffn_dim": 30, "max_text_len": 12},
    "text_config": {**_BERT, **TOKENS, "model_type": "bert", "vocab_size": 110},  # with the separator of texts, 102
}
_SPEECH: dict[str, Any] = {**_BART, "max_target_positions": 32, "suppress_tokens": None, "begin_suppress_tokens": None}

_SEAMLESS: dict[str, Any] = {
    **{"hidden_size": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 35, "decoder_ffn_dim": 33},
    **{"encoder_attention_heads": 6, "decoder_attention_heads": 4, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    **{"speech_encoder_layers": 2, "speech_encoder_attention_heads": 3, "speech_encoder_intermediate_size": 35},
    **{"speech_encoder_layerdrop": 0.0, "feature_projection_input_dim": 5, "conv_depthwise_kernel_size": 3},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "max_source_positions": 40},
    **{"adaptor_kernel_size": 4, "adaptor_stride": 2, "max_position_embeddings": 64, "decoder_start_token_id": 2},
    **{"t2u_vocab_size": 29, "t2u_encoder_layers": 2, "t2u_decoder_layers": 2, "t2u_encoder_ffn_dim": 17},
    **{"t2u_decoder_ffn_dim": 19, "t2u_encoder_attention_heads": 4, "t2u_decoder_attention_heads": 3},
    **{"t2u_max_position_embeddings": 64, "unit_hifi_gan_vocab_size": 31, "unit_embed_dim": 8, "lang_embed_dim": 3},
    **{"spkr_embed_dim": 5, "upsample_initial_channel": 8, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]},
    **{"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]], "vocoder_num_langs": 3},
    **{"vocoder_num_spkrs": 3, "vocoder_offset": 0},
}
_LINEAR: dict[str, Any] = {
    **{"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
_QSA: dict[str, Any] = {
    **{"indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 8},
    **{"indexer_budget": 4, "indexer_compress_ratio": 2, "hc_count": 3, "hc_lowrank": 7},
}
_MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_expand": 2},
    **{"mamba_chunk_size": 4},
}

_SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
}

_DELTA = {"layer_types": ["linear_attention", "full_attention"]}

_BYTES: dict[str, Any] = {**_BERT, "vocab_size": TOKENS["vocab_size"]}

_TOWER: dict[str, Any] = {**_BERT, "image_size": 16, "patch_size": 4}
_QWEN_SEEING: dict[str, Any] = {"image_token_id": 98, "vision_start_token_id": 97, "pad_token_id": 0}
_OMNI: dict[str, Any] = {"vision_start_token_id": 97, "audio_start_token_id": 95, "pad_token_id": 0}
_QWEN_TOWER: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 24, "intermediate_size": 35, "num_heads": 6, "patch_size": 4, "out_hidden_size": 24},
}
_SEEING: dict[str, Any] = {"image_token_id": 98, "pad_token_id": 0}
_SAM: dict[str, Any] = {
    **{**_BERT, "image_size": 16, "patch_size": 2, "mlp_dim": 35, "output_channels": 5, "window_size": 3},
    "global_attn_indexes": [1],
}
_OPT: dict[str, Any] = {**_SIZE, "ffn_dim": 35, "word_embed_proj_dim": 24, "dropout": 0.0}
_KOSMOS: dict[str, Any] = {
    **{"embed_dim": 24, "layers": 2, "ffn_dim": 35, "attention_heads": 6, "max_position_embeddings": 32},
}
_WITH_QFORMER: dict[str, Any] = {
    "vision_config": {**_TOWER, "patch_size": 8, "initializer_range": 0.02},
    "qformer_config": {
        **{"hidden_size": 18, "num_attention_heads": 3, "intermediate_size": 26, "num_hidden_layers": 2},
        **{"vocab_size": 31, "max_position_embeddings": 16, "cross_attention_frequency": 2},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    **{"num_query_tokens": 3, "image_token_index": 98},
}
_LONGER: dict[str, Any] = {"max_position_embeddings": 64, "sliding_window": None}
_GLM_TOWER = {"image_size": 16, "attention_bias": True}
_GLM_SEEING = {**_SEEING, "image_start_token_id": 97, "image_end_token_id": 96, "video_token_id": 95}

_MARKS = ("image_start", "image_end", "slice_start", "slice_end", "newline")


_HEARING: dict[str, Any] = {"audio_token_id": 98, "pad_token_id": 0}
_EAR: dict[str, Any] = {
    **{"d_model": 24, "encoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 6},
    **{"num_mel_bins": 5, "max_source_positions": 8},
}
_EAR_BY_LAYER: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_mel_bins": 5, "max_source_positions": 8},
}
_TOKENIZER: dict[str, Any] = {
    **{"model_type": "vibevoice_acoustic_tokenizer_encoder", "kernel_size": 3, "num_filters": 3, "ffn_expansion": 2},
    **{"downsampling_ratios": [2, 2], "depths": [1, 1, 2]},
}
_CONFORMER: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_mel_bins": 8, "conv_kernel_size": 3, "layerdrop": 0.0},
}
_GRANITE_HEARING: dict[str, Any] = {
    "text_config": {**_GRANITE, **TOKENS, "model_type": "granite"},
    "projector_config": {
        **{"model_type": "blip_2_qformer", "hidden_size": 18, "intermediate_size": 31, "num_hidden_layers": 2},
        **{"num_attention_heads": 3, "encoder_hidden_size": 22, "cross_attention_frequency": 1},
    },
    **{"audio_token_index": 98, "pad_token_id": 0, "window_size": 4, "downsample_rate": 2},
}
_GRANITE_EAR: dict[str, Any] = {
    **{"input_dim": 7, "num_layers": 2, "hidden_dim": 22, "num_heads": 6, "dim_head": 4, "feedforward_mult": 2},
    **{"output_dim": 9, "context_size": 4, "max_pos_emb": 5, "conv_kernel_size": 3},
}
_INKLING2: dict[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key != "intermediate_size"},
    **{**_MIXTURE, "n_routed_experts": 5, "route_scale": 2.0, "tie_word_embeddings": False},
    **{"layer_types": ["hybrid_sliding", "hybrid"], "n_layers_per_attn_res_block": 2},
    **{"swa_num_attention_heads": 5, "swa_num_key_value_heads": 5, "swa_head_dim": 4, "sliding_window_size": 4},
    **{"d_rel": 3, "rel_extent": 5, "log_scaling_n_floor": 3, "conv_kernel_size": 3, "unpadded_vocab_size": 97},
    **{"qk_l2_clip_threshold": 0.2, "rel_l2_clip_threshold": 0.1, "final_logit_softcapping": 3.0},
}
_INKLING2_LOOP: dict[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key != "intermediate_size"},
    **{**_MIXTURE, "n_routed_experts": 5, "route_scale": 2.0, "tie_word_embeddings": False},
    **{"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"]},
    **{"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_gate_rank": 5, "loop_num_passes": 2},
    **{"swa_num_attention_heads": 5, "swa_num_key_value_heads": 5, "swa_head_dim": 4, "sliding_window_size": 4},
    **{"d_rel": 3, "rel_extent": 5, "log_scaling_n_floor": 3, "conv_kernel_size": 3, "unpadded_vocab_size": 97},
    **{"n_layers_per_attn_res_block": 1, "final_logit_softcapping": 3.0},
}
_INKLING2_TOWER: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"model_type": "inkling2_vision", "patch_size": 4, "posemb_grid_size": 3, "projection_hidden_dim": 20},
    **{"text_hidden_size": 24, "layer_scale_init_value": 0.7},
}
_INKLING: dict[str, Any] = {
    **{**_LLAMA, **_SPARSE, "layer_types": ["hybrid", "hybrid_sliding"], "tie_word_embeddings": False},
    **{"n_routed_experts": 5, "n_shared_experts": 2, "route_scale": 2.0, "logits_mup_width_multiplier": 2.0},
    **{"swa_num_attention_heads": 5, "swa_num_key_value_heads": 5, "swa_head_dim": 4, "sliding_window_size": 4},
    **{"d_rel": 3, "rel_extent": 5, "log_scaling_n_floor": 3, "conv_kernel_size": 3},
}


def _mrope(*sections: int) -> dict[str, Any]:
    """Return positions of time, height and width, with so many frequencies each."""
    return {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)}


MORE: dict[str, Mapping[str, Any]] = {
    "afmoe": {**_LLAMA, **_WINDOW, **_MIXTURE, "num_shared_experts": 2, "num_dense_layers": 1},
    "albert": {**_BERT, "embedding_size": 20, "inner_group_num": 2},
    "apertus": _KV,
    "apertus1p5_text": {**_KV, "tie_word_embeddings": False, "output_vocab_size": 97},
    "arcee": _LLAMA,
    "bart": _BART,
    "bert-generation": {**_BERT, "is_decoder": True},
    "big_bird": {**_BERT, "attention_type": "original_full", "is_decoder": True},
    "bigbird_pegasus": {**_BART, "attention_type": "original_full"},
    "biogpt": _BERT,
    "bitnet": _KV,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "bloom": {"hidden_size": 24, "n_layer": 2, "n_head": 6},
    "camembert": _BERT,
    "canine": {
        **{**_BERT, "num_hash_functions": 2, "num_hash_buckets": 17, "local_transformer_stride": 4},
        **{"downsampling_rate": 2, "upsampling_kernel_size": 3},
    },
    "clip": {"text_config": {**_CLIP, **TOKENS}, "vision_config": {**_CLIP, **_PATCHES}, "projection_dim": 7},
    "codegen": {**_GPTJ, "n_embd": 48, "n_head": 12},
    "cohere": {**_KV, "use_qk_norm": True},
    "cohere2": {**_KV, **_WINDOW},
    "cohere2_moe": {**_KV, **_WINDOW, **_SPARSE, "prefix_dense_intermediate_size": 17, "num_shared_experts": 1},
    "convnext": {**_CONVOLUTIONS, "layer_scale_init_value": 0.7},
    "convnextv2": _CONVOLUTIONS,
    "convbert": {**_BERT, "embedding_size": 20, "conv_kernel_size": 3},
    "ctrl": {"n_embd": 24, "n_head": 6, "dff": 35, "n_layer": 2, "n_positions": 32},
    "cwm": {**_LLAMA, **_WINDOW},
    "deberta": {**_BERT, **_RELATIVE, "embedding_size": 20, "type_vocab_size": 2},
    "deberta-v2": {**_BERT, **_RELATIVE, **_DEBERTA_V2},
    "data2vec-audio": {**_WAV2VEC2, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "data2vec-vision": {
        **{
            **_VIT,
            "num_hidden_layers": 3,
            "use_relative_position_bias": True,
            "use_shared_relative_position_bias": True,
        },
        **{"out_indices": [1, 2, 3, 4], "pool_scales": [1, 2], "auxiliary_channels": 6},
    },
    "beit": {**_VIT, "use_relative_position_bias": True, "drop_path_rate": 0.0, "use_mask_token": False},
    "deit": _VIT,
    "depth_anything": {
        "backbone_config": {
            **{**_DINO, "model_type": "dinov2", "out_indices": [1, 2], "reshape_hidden_states": False},
        },
        **{"patch_size": 4, "reassemble_factors": [2, 1], "neck_hidden_sizes": [4, 5], "fusion_hidden_size": 6},
        **{"head_hidden_size": 3, "reassemble_hidden_size": 24},
    },
    "deformable_detr": {**_SAMPLING, "num_feature_levels": 4, "encoder_n_points": 2},
    **dict.fromkeys(("conditional_detr", "detr", "table-transformer"), _DETR),
    "dinov2": {**_DINO, "use_swiglu_ffn": True},
    "dinov2_with_registers": _DINO,
    "dinov3_vit": {**_VIT, "layerscale_value": 0.7, "num_register_tokens": 2, "pos_embed_rescale": None},
    "distilbert": {"dim": 24, "hidden_dim": 35, "n_layers": 2, "n_heads": 6, "max_position_embeddings": 32},
    "data2vec-text": {**_BERT, "is_decoder": True},
    "dots1": {
        **_KV,
        **_MIXTURE,
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {**_LATENT, "kv_lora_rank": 8, "qk_nope_head_dim": 6},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "ernie": {**_BERT, "use_task_id": True},
    "ernie4_5_moe": {**_KV, **_MIXTURE, "moe_num_experts": 5, "moe_k": 2, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": {**_LLAMA, **_MIXTURE, "moe_topk": 2},
    "exaone_moe": {**_LLAMA, **_MIXTURE, **_WINDOW, "mlp_layer_types": ["dense", "sparse"], "n_group": 1},
    "solar_open": {**_LLAMA, **_MIXTURE, "n_routed_experts": 5, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gpt_oss": {**_LLAMA, **_WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2},
    "dpr": _BERT,
    "dpt": {
        **{**_VIT, "reassemble_factors": [2, 1], "neck_hidden_sizes": [4, 5], "backbone_out_indices": [0, 1]},
        "fusion_hidden_size": 6,
    },
    "electra": {**_BERT, "embedding_size": 20},
    "encoder-decoder": {
        "encoder": {**_BERT, **TOKENS, "model_type": "bert", "hidden_size": 18},
        "decoder": {**_BERT, **TOKENS, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 2,
    },
    "ernie4_5": _LLAMA,
    "esm": {**_BERT, "mask_token_id": 2},
    "esmc": {**_BERT, "mask_token_id": 2},
    "eurobert": {**_LLAMA, "mask_token_id": 2},
    "exaone4": {**_KV, **_WINDOW},
    "falcon": {**_KV, "num_kv_heads": 2, "new_decoder_architecture": True},
    "flaubert": _XLM,
    "flex_olmo": {**_KV, **_MIXTURE},
    "funnel": {
        **{"block_sizes": [2, 1], "num_decoder_layers": 1, "d_model": 24, "n_head": 6, "d_head": 4, "d_inner": 35},
        **{"max_position_embeddings": 32, "pad_token_id": 0},
    },
    "fnet": {key: value for key, value in _BERT.items() if key != "num_attention_heads"},
    "fsmt": {**_BART, "langs": ["en", "de"], "src_vocab_size": TOKENS["vocab_size"]},
    "flint": {**_LLAMA, **_MIXTURE, **_WINDOW, "mlp_only_layers": [1]},
    "gemma": _LLAMA,
    "gemma2": {**_LLAMA, **_WINDOW, "query_pre_attn_scalar": 6},
    "gemma3": {
        **{
            "text_config": {**_LLAMA, **_WINDOW, **TOKENS, "model_type": "gemma3_text", "query_pre_attn_scalar": 6},
            **_SEEING,
        },
        **{"vision_config": {**_TOWER, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    },
    "gemma3_text": {**_LLAMA, **_WINDOW, "query_pre_attn_scalar": 6},
    "glm": {**_LLAMA, "head_dim": 8},
    "glm4": {**_LLAMA, "head_dim": 8},
    "glm4_moe": {**_KV, **_MIXTURE, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt_bigcode": _GPT2,
    "gpt_neox": _BERT,
    "gpt_neox_japanese": {**_SIZE, "intermediate_multiple_size": 2},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, **_MIXTURE, "num_local_experts": 5},
    "granite_swa": {**_GRANITE, **_WINDOW, "layer_rope_theta": [500.0, 10000.0]},
    "granitemoe_swa": {**_MOE_OF_GRANITE, **_WINDOW, "layer_rope_theta": [10000.0, 0]},
    "granitemoeshared": _MOE_OF_GRANITE,
    "gte": {**_BERT, "type_vocab_size": 2},
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), _GROUNDING_DINO),
    "helium": {**_LLAMA, "head_dim": 4},
    "idefics3": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "idefics3_vision"}, "scale_factor": 2},
    },
    "smolvlm": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "smolvlm_vision"}, "scale_factor": 2},
    },
    "ijepa": _VIT,
    "hubert": {**_WAV2VEC2, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
    "hunyuan_v1_dense": _LLAMA,
    "hy_v3": {**_LLAMA, **_SPARSE},
    "hyperclovax": {**_GRANITE, "use_post_norm": True},
    "ibert": _BERT,
    "internvl": {
        **{"text_config": {**_KV, **TOKENS, "model_type": "qwen2"}, **_SEEING},
        **{
            "vision_config": {**_TOWER, "model_type": "internvl_vision"},
            "downsample_ratio": 0.5,
            "image_seq_length": 4,
        },
    },
    "jais2": _KV,
    "jina_embeddings_v3": {**_BERT, "type_vocab_size": 2},
    "kolibri1": {
        **{**_LLAMA, **_MIXTURE, **_WINDOW, "shared_expert_intermediate_size": 13},
        "intermediate_size": None,
    },
    "deepseek_ocr2": {
        "text_config": {
            **{**_UNTIED, **TOKENS, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11},
            **{"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1},
        },
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [6, 24]},
            "encoder_config": {**_KV, "num_key_value_heads": 3},
        },
        **_SEEING,
    },
    "laguna": {
        **{**_LLAMA, **_SPARSE, "shared_expert_intermediate_size": 13},
        "num_attention_heads_per_layer": [6, 4],
    },
    "layoutlm": _BERT,
    "layoutlmv3": {
        **{**_BERT, "max_2d_position_embeddings": 1024, "coordinate_size": 3, "shape_size": 6, "input_size": 12},
        **{"patch_size": 4, "rel_pos_bins": 8, "max_rel_pos": 12, "rel_2d_pos_bins": 6, "max_rel_2d_pos": 20},
    },
    "lilt": {**_BERT, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 20},
    "llava_next": {
        **{"text_config": {**_LLAMA, **TOKENS, **_LONGER, "model_type": "mistral"}, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "num_attention_heads": 3, "patch_size": 8},
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
    },
    "llava_onevision": {
        **{"text_config": {**_UNTIED, **TOKENS, **_LONGER, "model_type": "qwen2"}, **_SEEING, "video_token_id": 96},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 8, "vision_use_head": False},
        **{"image_grid_pinpoints": [[16, 16], [16, 32], [32, 32]], "vision_aspect_ratio": "anyres_max_1"},
    },
    "glm4v": {
        "text_config": {**_UNTIED, **TOKENS, "model_type": "glm4v_text", "rope_parameters": _mrope(1, 1, 0)},
        **{"vision_config": {**_QWEN_TOWER, **_GLM_TOWER, "model_type": "glm4v_vision"}, **_GLM_SEEING},
    },
    "glm46v": {
        "text_config": {**_UNTIED, **TOKENS, "model_type": "glm4v_text", "rope_parameters": _mrope(1, 1, 0)},
        **{"vision_config": {**_QWEN_TOWER, **_GLM_TOWER, "model_type": "glm4v_vision"}, **_GLM_SEEING},
    },
    "glm4v_moe": {
        "text_config": {
            **{
                **_UNTIED,
                **TOKENS,
                **_MIXTURE,
                "model_type": "glm4v_moe_text",
                "rope_parameters": {**_mrope(1, 1, 0), "partial_rotary_factor": 1.0},
            },
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 5},
        },
        **{"vision_config": {**_QWEN_TOWER, **_GLM_TOWER, "model_type": "glm4v_moe_vision"}, **_GLM_SEEING},
    },
    "glm_ocr": {
        "text_config": {
            **_UNTIED,
            "head_dim": 6,
            **TOKENS,
            "model_type": "glm_ocr_text",
            "rope_parameters": _mrope(1, 1, 1),
        },
        **{"vision_config": {**_QWEN_TOWER, **_GLM_TOWER, "model_type": "glm_ocr_vision"}, **_GLM_SEEING},
    },
    "aria": {
        "text_config": {
            **{**_LLAMA, **TOKENS, "model_type": "aria_text", "moe_num_experts": 5, "moe_topk": 2, "head_dim": 4},
        },
        "vision_config": {**_TOWER, "model_type": "idefics3_vision"},
        **{"projector_patch_to_query_dict": {16: 4}, **_SEEING},
    },
    "cohere_compass": {
        "text_config": {
            **{**_KV, **_WINDOW, **TOKENS, "model_type": "cohere_compass_text", "logit_scale": 0.5},
            **{"num_hidden_layers": 3, "layer_types": [*_WINDOW["layer_types"], "sliding_attention"]},
            "rope_parameters": {"sliding_attention": _mrope(1, 1, 0), "full_attention": None},
        },
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "cohere_compass_vision"},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **_QWEN_SEEING,
    },
    "deepseek_vl_hybrid": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 8},
        "high_res_vision_config": {
            **_SAM,
            "model_type": "sam_vision_model",
            "image_size": 24,
            "num_attention_heads": 3,
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **{**_KV, **TOKENS, "model_type": "ernie4_5_vl_moe_text", "num_hidden_layers": 3, "moe_k": 2},
            **{"hidden_size": 36, "moe_num_experts": 5, "moe_num_shared_experts": 1},
            "moe_intermediate_size": [11, 9],
            "rope_parameters": _mrope(1, 1, 1),
        },
        "vision_config": {
            **{"depth": 2, "hidden_size": 24, "intermediate_size": 35, "num_heads": 6, "patch_size": 4},
            "model_type": "ernie4_5_vl_moe_vision",
        },
        **{**_SEEING, "image_start_token_id": 96, "image_end_token_id": 95},
    },
    "exaone4_5": {
        "text_config": {**_KV, **_WINDOW, **TOKENS, "model_type": "exaone4"},
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "exaone4_5_vision", "window_size": 8, "fullatt_block_indexes": [1]},
            "num_key_value_heads": 3,
        },
        **{**_SEEING, "video_token_id": 96},
    },
    "gemma4_unified": {
        "text_config": {
            **{**_LLAMA, **_WINDOW, **TOKENS, "model_type": "gemma4_unified_text", "global_head_dim": 8},
            **{"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
        },
        "vision_config": {
            **{"model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 14},
            **{"mm_posemb_size": 5, "output_proj_dims": 14},
        },
        **{**_SEEING, "video_token_id": 96, "audio_token_id": 95},
    },
    "granite_docling": {
        "text_config": {
            **{**_GRANITE, **TOKENS, "model_type": "granite_docling_text", "num_hidden_layers": 3},
            "attention_multiplier": 0.4,
        },
        "vision_config": {
            **{**_TOWER, "model_type": "granite_docling_vision", "out_hidden_size": 24, "scale_factor": 2},
            "deepstack_visual_indexes": [0],
        },
        **_SEEING,
    },
    "florence2": {
        **{"text_config": {**_BART, **TOKENS, "model_type": "bart"}, **_SEEING},
        "vision_config": {
            **{"model_type": "florence_vision", "depths": [1, 1], "embed_dim": [12, 24], "num_heads": [3, 6]},
            **{"num_groups": [4, 3], "patch_size": [3, 3], "patch_stride": [4, 2], "patch_padding": [1, 1]},
            **{"patch_prenorm": [False, True], "window_size": 3, "drop_path_rate": 0.0, "mlp_ratio": 2.0},
            **{"projection_dim": 24, "max_position_embeddings": 8, "max_temporal_embeddings": 5},
        },
    },
    "mistral4": {**_LATENT, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "video_llama_3": {
        **{"text_config": {**_KV, **TOKENS, "model_type": "qwen2"}, **_SEEING, "video_token_id": 96},
        "vision_config": {**_TOWER, "model_type": "video_llama_3_vision"},
    },
    "blip": {
        "text_config": {**_BERT, **TOKENS, "sep_token_id": 2},
        "vision_config": {**_TOWER, "patch_size": 8, "initializer_range": 0.02},
    },
    "blip-2": {**_WITH_QFORMER, "text_config": {**_OPT, **TOKENS, "model_type": "opt"}},
    "instructblip": {**_WITH_QFORMER, "text_config": {**_OPT, **TOKENS, "model_type": "opt"}},
    "instructblipvideo": {
        **{key: value for key, value in _WITH_QFORMER.items() if key != "image_token_index"},
        **{"text_config": {**_T5, **TOKENS, "model_type": "t5"}, "video_token_index": 98},
    },
    "git": {**_BERT, **TOKENS, "vision_config": {**_TOWER, "patch_size": 8}},
    "idefics": {
        **{**_BERT, **TOKENS, "qk_layer_norms": True},
        **{"freeze_text_layers": False, "freeze_vision_layers": False},
        "vision_config": {
            **{"embed_dim": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 3},
            **{"image_size": 16, "patch_size": 8, "model_type": "idefics_vision"},
        },
        "perceiver_config": {
            **{"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 5},
        },
    },
    "kosmos-2": {
        "text_config": {**_KOSMOS, **TOKENS, "model_type": "kosmos_2_text_model"},
        **{"vision_config": {**_TOWER, "patch_size": 8}, "latent_query_num": 3},
    },
    "kosmos-2.5": {
        "text_config": {**_KOSMOS, **TOKENS, "model_type": "kosmos_2_5_text_model"},
        "vision_config": {**_BERT, "patch_embed_hidden_size": 12, "head_dim": 5, "max_num_patches": 17},
        "latent_query_num": 3,
    },
    "pp_formulanet": {
        "text_config": {
            **{**TOKENS, "d_model": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_layers": 2, "decoder_layers": 2, "decoder_ffn_dim": 33, "max_position_embeddings": 32},
            **{"decoder_start_token_id": 2, "forced_eos_token_id": None},
        },
        "vision_config": {
            **{**_SAM, "model_type": "pp_formulanet_vision", "post_conv_in_channels": 5, "post_conv_mid_channels": 4},
            **{"post_conv_out_channels": 6, "decoder_hidden_size": 24},
        },
        "decoder_start_token_id": 2,
    },
    "ultrabert": {**_LLAMA, **_WINDOW, "prediction_head_size": 13},
    "udop": {**_T5, **TOKENS, "image_size": 16, "patch_size": 4, "max_2d_position_embeddings": 12},
    "pix2struct": {
        "text_config": {
            **{"vocab_size": 101, "hidden_size": 24, "d_kv": 4, "d_ff": 35, "num_layers": 2, "num_heads": 6},
            **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0},
        },
        "vision_config": {
            **{"hidden_size": 24, "patch_embed_hidden_size": 12, "d_ff": 35, "d_kv": 5, "num_hidden_layers": 2},
            **{"num_attention_heads": 6, "seq_len": 17, "initializer_range": 0.02, "dropout_rate": 0.0},
        },
    },
    "got_ocr2": {
        **{"text_config": {**_KV, **TOKENS, "model_type": "qwen2"}, **_SEEING},
        "vision_config": {**_SAM, "model_type": "got_ocr2_vision"},
    },
    "granite4_vision": {
        "text_config": {
            **{**_UNTIED, **TOKENS, **_LONGER, "model_type": "granite4_vision_text", "embedding_multiplier": 3.0},
            **{"num_hidden_layers": 3, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.4},
        },
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4},
        "qformer_config": {
            **{"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 20, "vocab_size": 9},
            **{"use_qformer_text_input": False, "cross_attention_frequency": 1},
            **{"hidden_size": 64, "num_attention_heads": 1, "encoder_hidden_size": 64},  # as newer releases derive them
        },
        **{"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]], "downsample_rate": "1/2", **_SEEING},
        **{"deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [2], "projector_dropout": 0.0},
    },
    "hunyuan_vl": {
        "text_config": {
            **{**_LLAMA, **TOKENS, "model_type": "hunyuan_vl_text", "head_dim": 8},
            "rope_parameters": _mrope(1, 1, 1, 1),
        },
        "vision_config": {**_TOWER, "model_type": "hunyuan_vl_vision", "max_image_size": 12, "num_key_value_heads": 6},
        **{**_SEEING, "im_newline_id": 97, "im_start_id": 96, "im_end_id": 95},
    },
    "hyperclovax_vision_v2": {
        "text_config": {**_GRANITE, **TOKENS, "model_type": "hyperclovax", "use_post_norm": True},
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "qwen2_5_vl_vision", "window_size": 8, "fullatt_block_indexes": [1]},
        },
        **{**_SEEING, "video_token_id": 96},
    },
    "idefics2": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "mistral", "sliding_window": None}, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "idefics2_vision"},
        "perceiver_config": {
            **{"model_type": "idefics2_perceiver", "hidden_size": 24, "resampler_n_latents": 4, "resampler_depth": 2},
            **{"resampler_n_heads": 6, "resampler_head_dim": 5, "num_key_value_heads": 2},
        },
    },
    "janus": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_SEEING},
        "vision_config": {
            **{**_TOWER, "model_type": "janus_vision_model", "patch_size": 8, "mlp_ratio": 2, "projection_dim": 24},
            "num_image_tokens": 4,
        },
        "vq_config": {
            **{"model_type": "janus_vqgan", "embed_dim": 5, "num_embeddings": 9, "latent_channels": 32},
            **{"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_hidden_layers": 2},
            **{"projection_dim": 24, "image_token_embed_dim": 24},
        },
    },
    "lfm2_vl": {
        "text_config": {**_KV, **TOKENS, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {
            **{**_BERT, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 9},
            "vision_use_head": False,
        },
        **{**_SEEING, "projector_hidden_size": 26},
    },
    "lfm3_vl": {
        "text_config": {
            **{**_LLAMA, **_WINDOW, **TOKENS, "model_type": "lfm3", "num_hidden_layers": 3},
            "layer_types": [*_WINDOW["layer_types"], "conv"],
        },
        "vision_config": {
            **{**_TOWER, "model_type": "lfm3_vl_vision", "num_key_value_heads": 2, "conv_kernel_size": 3},
            "layer_types": ["conv", "full_attention"],
        },
        **{**_SEEING, "video_token_id": 96, "vision_start_token_id": 97, "projector_hidden_size": 26},
    },
    "llava_next_video": {
        **{"text_config": {**_LLAMA, **TOKENS, **_LONGER, "model_type": "llama"}, **_SEEING, "video_token_id": 96},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "num_attention_heads": 3, "patch_size": 8},
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
    },
    "minimax_m3_vl": {
        "text_config": {
            **{**_LLAMA, **_SPARSE, **TOKENS, "model_type": "minimax_m3_vl_text", "num_local_experts": 5},
            **{"intermediate_size": 11, "dense_intermediate_size": 35, "shared_intermediate_size": 13},
            **{"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8},
            **{"index_block_size": 2, "index_topk_blocks": 2, "swiglu_limit": 0.5},
        },
        "vision_config": {**_TOWER, "model_type": "minimax_m3_vl_vision", "hidden_size": 36},
        **{**_SEEING, "video_token_id": 96, "projector_hidden_size": 26},
    },
    "ovis2": {
        **{"text_config": {**_KV, **TOKENS, "model_type": "qwen2"}, **_SEEING, "hidden_size": 24, "vocab_size": 101},
        "vision_config": {
            **{**_TOWER, "model_type": "ovis2_vision", "hidden_stride": 2, "vocab_size": 13},
            "num_visual_indicator_tokens": 2,
        },
        "visual_indicator_token_ids": [97, 96],
    },
    "qianfan_ocr": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "qwen3"}, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "qianfan_ocr_vision", "drop_path_rate": 0.0},
        "downsample_ratio": 0.5,
    },
    "video_llava": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_SEEING, "video_token_id": 96},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "num_attention_heads": 3, "patch_size": 8},
    },
    "llava": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, "image_seq_length": 4, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "num_attention_heads": 3, "patch_size": 8},
    },
    "longformer": {**_BERT, "attention_window": 4},
    "longt5": {**_T5, "local_radius": 2},
    "luke": {**_BERT, "entity_vocab_size": 17, "entity_emb_size": 10},
    "lxmert": {
        **{key: value for key, value in _BERT.items() if key != "num_hidden_layers"},
        **{"l_layers": 2, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 7, "num_qa_labels": 5},
        **{"num_object_labels": 6, "num_attr_labels": 4},
    },
    "led": {
        **{**_BART, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
        "attention_window": 4,
    },
    "m2m_100": _BART,
    "marian": _BART,
    "markuplm": {
        **{**_BERT, "max_depth": 3, "xpath_unit_hidden_size": 4, "max_xpath_tag_unit_embeddings": 9},
        **{"max_xpath_subs_unit_embeddings": 8, "tag_pad_id": 7, "subs_pad_id": 6},
    },
    "mbart": _BART,
    "megatron-bert": _BERT,
    "mellum": {**_LLAMA, **_SPARSE, **_WINDOW},
    "mistral3": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "mistral"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "pixtral"}, "spatial_merge_size": 2},
    },
    "pixtral": _TOWER,
    "minicpm3": {**_LATENT, "scale_depth": 1.4, "dim_model_base": 12},
    "minimax": {
        **{**_LLAMA, **_MIXTURE, "num_local_experts": 5, "block_size": 4, "mlp_alpha_factor": 1.25},
        **{"layer_types": ["full_attention", "linear_attention"], "full_attn_beta_factor": 0.75},
        "linear_attn_alpha_factor": 1.5,
    },
    "minimax_m2": {**_KV, **_MIXTURE, "num_local_experts": 5},
    "minimax_m3_vl_text": {
        **{**_LLAMA, **_SPARSE, "num_local_experts": 5, "intermediate_size": 11, "dense_intermediate_size": 35},
        **{"shared_intermediate_size": 13, "layer_types": ["full_attention", "minimax_m3_sparse"]},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 2, "swiglu_limit": 0.5},
    },
    "ministral": {**_LLAMA, **_WINDOW},
    "ministral3": {
        **_LLAMA,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1},
    },
    "mistral": {**_LLAMA, "sliding_window": 4},
    "mixtral": {**_LLAMA, **_MIXTURE, "num_local_experts": 5},
    "mllama": {
        "text_config": {
            **{**_UNTIED, **TOKENS, "model_type": "mllama_text_model", "num_hidden_layers": 3},
            "cross_attention_layers": [1],
        },
        "vision_config": {
            **{key: value for key, value in _TOWER.items() if key != "num_attention_heads"},
            **{"model_type": "mllama_vision_model", "attention_heads": 6, "num_global_layers": 1},
            **{"intermediate_layers_indices": [0], "vision_output_dim": 48},
        },
        **_SEEING,
    },
    "mobilebert": {**_BERT, "embedding_size": 20, "intra_bottleneck_size": 18, "num_feedforward_networks": 2},
    "modernbert": {**_BERT, **_WINDOW, "local_attention": 4},
    "mpnet": _BERT,
    "mpt": {"d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2},
    "mt5": _T5,
    "nanochat": _KV,
    "nemotron": {**_LLAMA, "head_dim": 4},
    "nllb-moe": {**_BART, "num_experts": 5, "encoder_sparse_step": 2, "decoder_sparse_step": 1},
    "nomic_bert": _BERT,
    "olmo": _KV,
    "olmo2": _KV,
    "olmo3": {**_KV, **_WINDOW},
    "olmoe": {**_KV, **_MIXTURE},
    "omniasr_ctc": {
        "audio_config": {
            **{**_BERT, **{key: _WAV2VEC2[key] for key in ("conv_dim", "conv_kernel", "conv_stride")}},
            **{"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
        },
        "vocab_size": TOKENS["vocab_size"],
    },
    "openai-gpt": _GPT2,
    "opt": {**_SIZE, "ffn_dim": 35, "word_embed_proj_dim": 20},
    "paligemma": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "gemma"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 8}, "projection_dim": 24},
    },
    "paddleocr_vl": {
        "text_config": {
            **{**_UNTIED, **TOKENS, "model_type": "paddleocr_vl_text", "head_dim": 6},
            "rope_parameters": _mrope(1, 1, 1),
        },
        **{"vision_config": {**_TOWER, "model_type": "paddleocr_vl_vision"}, **_QWEN_SEEING},
    },
    "pegasus": _BART,
    "pegasus_x": {**_BART, "num_global_tokens": 3, "block_size": 4},
    "persimmon": _BERT,
    "phi": {**_BERT, "qk_layernorm": True},
    "phi3": _KV,
    "plbart": _BART,
    "prophetnet": {
        **{"hidden_size": 24, "num_encoder_attention_heads": 6, "num_decoder_attention_heads": 4, "num_buckets": 5},
        **{"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 35, "decoder_ffn_dim": 33},
        **{"max_position_embeddings": 32, "relative_max_distance": 6, "decoder_start_token_id": 2, "eps": 0.1},
    },
    "qwen2": _KV,
    "qwen2_moe": {**_KV, **_MIXTURE, "shared_expert_intermediate_size": 13, "mlp_only_layers": [1]},
    "qwen3": _LLAMA,
    "qwen3_moe": {**_LLAMA, **_MIXTURE, "mlp_only_layers": [1]},
    "rag": {
        "question_encoder": {**_BERT, **TOKENS, "model_type": "dpr"},
        "generator": {**_BART, **TOKENS, "model_type": "bart"},
        **{"n_docs": 2, "decoder_start_token_id": 2, "label_smoothing": 0.1},
    },
    "reformer": {**_REFORMER, "is_decoder": True, "axial_pos_embds": False},
    "rembert": {**_BERT, "input_embedding_size": 20, "output_embedding_size": 18},
    "roberta": _BERT,
    "roformer": {**_BERT, "embedding_size": 20, "is_decoder": True},
    "seed_oss": _LLAMA,
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": {
        **{**_SEAMLESS, "position_embeddings_type": "relative_key", "char_vocab_size": 31},
        **{"left_max_position_embeddings": 4, "right_max_position_embeddings": 2},
        **{"t2u_variance_predictor_embed_dim": 24, "t2u_variance_predictor_hidden_dim": 9},
    },
    "segformer": {
        **{"image_size": 32, "num_encoder_blocks": 2, "depths": [2, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 12]},
        **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 3], "mlp_ratios": [2, 3]},
        **{"decoder_hidden_size": 10, "problem_type": "single_label_classification"},
    },
    "sam": {
        "vision_config": {**_SAM, "output_channels": 24, "num_pos_feats": 12},
        "prompt_encoder_config": {"hidden_size": 24, "image_size": 16, "patch_size": 2, "mask_input_channels": 8},
        "mask_decoder_config": {
            **{"hidden_size": 24, "mlp_dim": 17, "num_hidden_layers": 2, "num_attention_heads": 3},
            **{"iou_head_hidden_dim": 7, "num_multimask_outputs": 2},
        },
    },
    "sam_hq": {
        "vision_config": {**_SAM, "output_channels": 24, "num_pos_feats": 12},
        "prompt_encoder_config": {"hidden_size": 24, "image_size": 16, "patch_size": 2, "mask_input_channels": 8},
        "mask_decoder_config": {
            **{"hidden_size": 24, "mlp_dim": 17, "num_hidden_layers": 2, "num_attention_heads": 3, "vit_dim": 24},
            **{"iou_head_hidden_dim": 7, "num_multimask_outputs": 2},
        },
    },
    "siglip2": {"text_config": {**_BERT, **TOKENS}, "vision_config": {**_BERT, "patch_size": 4, "num_patches": 9}},
    "siglip": {"text_config": {**_BERT, **TOKENS}, "vision_config": {**_BERT, **_PATCHES}},
    **dict.fromkeys(("owlv2", "owlvit"), _OWL),
    "metaclip_2": {"text_config": {**_CLIP, **TOKENS}, "vision_config": {**_CLIP, **_PATCHES}, "projection_dim": 7},
    "hiera": {
        **{"image_size": [16, 16], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1]},
        **{"embed_dim": 6, "depths": [1, 2, 1], "num_heads": [1, 3, 6], "num_query_pool": 2, "mlp_ratio": 2.0},
        **{"masked_unit_size": [4, 4], "masked_unit_attention": [True, False, False]},
        "problem_type": "single_label_classification",
    },
    "donut-swin": _WINDOWS,
    "pvt": {
        **{"image_size": 32, "num_encoder_blocks": 2, "depths": [2, 1], "sequence_reduction_ratios": [2, 1]},
        **{"hidden_sizes": [8, 12], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 3]},
        **{"mlp_ratios": [2, 3], "problem_type": "single_label_classification"},
    },
    "pvt_v2": {
        **{"image_size": 32, "num_encoder_blocks": 2, "depths": [2, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 12]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 3], "mlp_ratios": [2, 3]},
        "problem_type": "single_label_classification",
    },
    "kimi_k25": {
        "text_config": {**_LATENT, **TOKENS, "model_type": "deepseek_v3"},
        "vision_config": {
            **{**_BERT, "model_type": "kimi_k25_vision", "patch_size": 4, "pos_emb_height": 3, "pos_emb_width": 3},
        },
        **{**_SEEING, "video_token_id": 96, "vision_start_token_id": 97, "projection_hidden_size": 24},
    },
    "muse_glimmer": {
        "text_config": {
            **{**_LLAMA, **TOKENS, **_WINDOW, "model_type": "muse_glimmer_text", "layer_rope_theta": [100.0, 0]},
            **{"tie_word_embeddings": False, "final_logit_softcapping": 3.0},
        },
        "vision_config": {
            **{**_BERT, "model_type": "muse_glimmer_vision", "patch_size": 4, "pos_emb_height": 2, "pos_emb_width": 2},
            "layer_types": ["window_attention", "full_attention"],
        },
        **{**_SEEING, "video_token_id": 96, "out_hidden_size": 96, "projector_hidden_size": 20},
    },
    "apertus1p5": {
        "text_config": {**_UNTIED, **TOKENS, "model_type": "apertus1p5_text", "output_vocab_size": 97},
        "vision_config": {
            **{"model_type": "apertus1p5_vision_tokenizer", "codebook_size": 8, "embed_dim": 4, "latent_channels": 4},
            **{"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1},
        },
        "audio_config": {
            **{"model_type": "wavtokenizer_encoder", "num_filters": 4, "upsampling_ratios": [2, 2]},
            **{"kernel_size": 3, "last_kernel_size": 3, "num_lstm_layers": 1, "hidden_size": 8, "codebook_dim": 8},
            "codebook_size": 4,
        },
        **{**_SEEING, "audio_token_id": 96, "image_token_offset": 70, "audio_token_offset": 78},
    },
    "cosmos3_omni": {
        "text_config": {
            **{**_LLAMA, **TOKENS, "num_hidden_layers": 3, "model_type": "qwen3_vl_text"},
            "rope_parameters": _mrope(1, 1, 1),
        },
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "qwen3_vl_vision", "num_position_embeddings": 16},
            "deepstack_visual_indexes": [0],
        },
        **_QWEN_SEEING,
    },
    "inkling2": {
        "text_config": {**_INKLING2, **TOKENS, "model_type": "inkling2_text"},
        **{"vision_config": _INKLING2_TOWER, **_SEEING},
    },
    "inkling2_loop": {
        "text_config": {**_INKLING2_LOOP, **TOKENS, "model_type": "inkling2_loop_text"},
        **{"vision_config": _INKLING2_TOWER, **_SEEING},
    },
    "inkling_mm_model": {
        "text_config": {**_INKLING, **TOKENS, "model_type": "inkling_text"},
        "vision_config": {"model_type": "inkling_vision", "patch_size": 2, "num_hidden_layers": 3},
        "audio_config": {"model_type": "inkling_audio", "n_mel_bins": 3, "mel_vocab_size": 5},
        **{**_SEEING, "audio_token_id": 96},
    },
    "molmo2": {
        "text_config": {
            **{**_LLAMA, **TOKENS, "model_type": "molmo2_text", "tie_word_embeddings": False},
            **{"additional_vocab_size": 5, "rope_scaling_layers": [1]},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
        "vision_config": {
            **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6},
            **{"num_key_value_heads": 2, "head_dim": 5, "image_size": [16, 16], "patch_size": 4},
        },
        "adapter_config": {
            **{"hidden_size": 24, "intermediate_size": 17, "num_attention_heads": 3, "num_key_value_heads": 3},
            **{"head_dim": 4, "text_hidden_size": 24, "vision_feature_layer": [1, 0]},
        },
        **{"image_patch_id": 98, "pad_token_id": 0},
    },
    "step3p7": {
        "text_config": {
            **{**_LLAMA, **_WINDOW, **_SPARSE, **TOKENS, "model_type": "step3p5", "tie_word_embeddings": False},
            **{"num_sliding_attention_heads": 4, "n_routed_experts": 5, "share_expert_dim": 13},
            "moe_router_scaling_factor": 2.0,
        },
        "vision_config": {
            **{**_BERT, "model_type": "step3p5_vision", "image_size": 16, "patch_size": 2, "mlp_ratio": 1.5},
            "layer_scale_init_value": 0.7,
        },
        **_SEEING,
    },
    "cosmos3_edge": {
        "text_config": {
            **{**_UNTIED, **TOKENS, "model_type": "cosmos3_edge_text", "head_dim": 8},
            "rope_parameters": _mrope(2, 1, 1),
        },
        "vision_config": {**_BERT, "model_type": "cosmos3_edge_vision", "patch_size": 4, "num_patches": 16},
        **{**_QWEN_SEEING, "video_token_id": 96, "projector_hidden_size": 20},
    },
    "cvt": {
        **{"embed_dim": [8, 12, 24], "num_heads": [1, 3, 6], "depth": [1, 2, 3], "mlp_ratio": [2.0, 1.5, 1.0]},
        **{"problem_type": "single_label_classification"},
    },
    "efficientnet": {
        **{
            "image_size": 32,
            "in_channels": [32, 8],
            "out_channels": [8, 16],
            "kernel_sizes": [3, 5],
            "strides": [1, 2],
        },
        **{"num_block_repeats": [1, 2], "expand_ratios": [1, 3], "width_coefficient": 1.0, "depth_coefficient": 1.0},
        **{"hidden_dim": 1280, "problem_type": "single_label_classification"},
    },
    "bit": {
        **{"image_size": 32, "embedding_size": 6, "hidden_sizes": [16, 24], "depths": [2, 1], "num_groups": 2},
        **{"layer_type": "bottleneck", "problem_type": "single_label_classification"},
    },
    "imagegpt": {**_GPT2, "problem_type": "single_label_classification"},
    "mobilevit": {
        **{"image_size": 64, "hidden_sizes": [18, 24, 12], "neck_hidden_sizes": [6, 7, 8, 9, 10, 11, 13]},
        **{"num_attention_heads": 3, "expand_ratio": 1.5, "aspp_out_channels": 7, "atrous_rates": [1, 2, 3]},
        "problem_type": "single_label_classification",
    },
    "mobilevitv2": {
        **{"image_size": 64, "n_attn_blocks": [1, 2, 1], "base_attn_unit_dims": [128, 192, 128]},
        **{"width_multiplier": 0.2, "aspp_out_channels": 7, "atrous_rates": [1, 2, 3]},
        "problem_type": "single_label_classification",
    },
    "poolformer": {
        **{"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [9, 10], "mlp_ratio": 2.5},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "layer_scale_init_value": 0.7},
        "problem_type": "single_label_classification",
    },
    "regnet": {
        **{"image_size": 32, "embedding_size": 6, "hidden_sizes": [12, 20], "depths": [2, 1], "groups_width": 4},
        "problem_type": "single_label_classification",
    },
    "resnet": {
        **{"image_size": 32, "embedding_size": 6, "hidden_sizes": [12, 20], "depths": [2, 1]},
        "problem_type": "single_label_classification",
    },
    "swiftformer": {
        **{"image_size": 64, "depths": [2, 1, 2], "embed_dims": [8, 9, 10], "mlp_ratio": 3},
        **{"downsamples": [True, True, True], "layer_scale_init_value": 0.7},
        "problem_type": "single_label_classification",
    },
    "focalnet": {
        **{"image_size": 24, "patch_size": 4, "embed_dim": 10, "depths": [2, 1], "focal_levels": [2, 1]},
        **{"focal_windows": [3, 3], "mlp_ratio": 2.0, "drop_path_rate": 0.0, "encoder_stride": 8},
        **{"use_layerscale": True, "layerscale_value": 0.7, "problem_type": "single_label_classification"},
    },
    "chameleon": {
        **{**_UNTIED, "image_token_id": 98},  # as in `vocabulary_map`
        "vq_config": {
            **{"num_embeddings": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "num_res_blocks": 1},
            **{"channel_multiplier": [1, 1, 1, 1], "resolution": 16},
        },
        # codes of images are named by letters for digits
        "vocabulary_map": {"<image>": 98, **{f"IMGIMG{letter}.": 80 + i for i, letter in enumerate("ABCDEFGH")}},
    },
    "emu3": {
        "text_config": {**_UNTIED, **TOKENS, "model_type": "emu3_text_model", "attention_dropout": 0.0},
        "vq_config": {
            **{"codebook_size": 8, "embed_dim": 4, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
            **{"num_res_blocks": 1, "hidden_size": 32, "temporal_downsample_factor": 2},
        },
        "vocabulary_map": {
            **{"<image>": 98, "<|extra_200|>": 97},
            **{f"<|visual token {code:06d}|>": 80 + code for code in range(8)},
        },
    },
    "fuyu": {
        "text_config": {**_BERT, **TOKENS, "model_type": "persimmon", "qk_layernorm": True},
        **{"image_size": 16, "patch_size": 4, **_SEEING},
    },
    "vision-encoder-decoder": {
        "encoder": {**_BERT, **_PATCHES, "model_type": "vit", "hidden_size": 18},
        "decoder": {**_BERT, **TOKENS, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 2,
    },
    "smollm3": {**_KV, "no_rope_layers": [1, 0]},
    "squeezebert": {**_BERT, "intermediate_size": 36, "embedding_size": 24},
    "speech_to_text": {**_SPEECH, "input_feat_per_channel": 5, "conv_channels": 8, "max_source_positions": 30},
    "stablelm": _KV,
    "starcoder2": _KV,
    # one sparse block in the encoder and two in the decoder; experts exceed their token capacity
    "switch_transformers": {
        **{**_T5, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2},
        **{"num_experts": 5, "expert_capacity": 2, "router_jitter_noise": 0.0},
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "t5gemma": {
        "encoder": {  # with blocks on both of two stages
            **{**_LLAMA, **TOKENS, "num_hidden_layers": 4, "layer_types": 2 * _WINDOW["layer_types"]},
            **{"sliding_window": 4, "query_pre_attn_scalar": 6},
        },
        "decoder": {**_LLAMA, **_WINDOW, **TOKENS, "query_pre_attn_scalar": 5, "hidden_size": 18, "head_dim": 4},
        "vocab_size": TOKENS["vocab_size"],
    },
    "tapas": _BERT,
    "umt5": _T5,
    "vaultgemma": {**_LLAMA, **_WINDOW, "query_pre_attn_scalar": 6},
    "visual_bert": {**_BERT, "visual_embedding_dim": 7},
    "unispeech": _WAV2VEC2,
    "unispeech-sat": {**_WAV2VEC2, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
    "videomae": {**_MASKED, "num_frames": 4},
    "vit": _VIT,
    "vit_mae": {**_MASKED, "mask_ratio": 0.5},
    "vit_msn": _VIT,
    "sew": {**_WAV2VEC2, "squeeze_factor": 2, "num_conv_pos_embeddings": 4},
    "wav2vec2": _WAV2VEC2,
    "wav2vec2-bert": {
        **{**_WAV2VEC2, "feature_projection_input_dim": 5, "conv_depthwise_kernel_size": 3, "add_adapter": False},
        **{
            "position_embeddings_type": "relative",
            "max_source_positions": 40,
        },
    },
    "wav2vec2-conformer": {**_WAV2VEC2, "conv_depthwise_kernel_size": 3, "max_source_positions": 40},
    "wavlm": {**_WAV2VEC2, "num_buckets": 8, "max_bucket_distance": 12},
    # transformers fails on a text of padding alone, unless padding is also the end token, as in its checkpoints
    "whisper": {**_SPEECH, "pad_token_id": 1, "num_mel_bins": 5, "max_source_positions": 9, "classifier_proj_size": 10},
    "xglm": {"d_model": 24, "ffn_dim": 35, "num_layers": 2, "attention_heads": 6, "max_position_embeddings": 32},
    "xlm": {**_XLM, "n_langs": 2},
    "xlm-roberta": _BERT,
    "xlnet": {"d_model": 24, "n_layer": 2, "n_head": 6, "d_inner": 35},
    "yolos": {**_VIT, "image_size": [12, 8], "num_detection_tokens": 3, "use_mid_position_embeddings": False},
    "youtu": _LATENT,
    "jamba": {
        **{**_KV, "num_experts": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 5},
        **{"mamba_d_conv": 3, "mamba_dt_rank": 4},
    },
    "nemotron_h": {
        **{**_KV, **_MIXTURE, "head_dim": 4, "n_routed_experts": 5, "moe_shared_expert_intermediate_size": 13},
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "moe_latent_size": 10},
        **{"mamba_num_heads": 6, "mamba_head_dim": 4, "n_groups": 3, "ssm_state_size": 5, "conv_kernel": 3},
        **{"chunk_size": 4, "num_hidden_layers": None},
    },
    "roberta-prelayernorm": _BERT,
    "xlm-roberta-xl": {**_BERT, "type_vocab_size": 2},
    "modernbert-decoder": {**_BERT, **_WINDOW, "local_attention": 4},
    "mamba": {"hidden_size": 24, "state_size": 5, "num_hidden_layers": 2, "conv_kernel": 3, "intermediate_size": 48},
    "falcon_mamba": {"hidden_size": 24, "state_size": 5, "num_hidden_layers": 2, "conv_kernel": 3},
    "mamba2": {
        **{"hidden_size": 24, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 5, "num_hidden_layers": 2},
        **{"conv_kernel": 3, "chunk_size": 4},
    },
    "bamba": {**_KV, **_MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True},
    "granitemoehybrid": {**_MOE_OF_GRANITE, **_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {
        **{**_KV, **_MAMBA, "mamba_d_ssm": 48, "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0]},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.5, 2.0]},
    },
    "axk1": {**_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v32": {**_LATENT, **_INDEXED, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        **{"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 6, "q_lora_rank": 10},
        **{"max_position_embeddings": 32, "tie_word_embeddings": True, "partial_rotary_factor": 4 / 6},
        **{"num_experts_per_tok": 2, "n_routed_experts": 5, "moe_intermediate_size": 11, "swiglu_limit": 0.5},
        **{**_INDEXED, "index_topk": 2, "o_groups": 2, "o_lora_rank": 5, "sliding_window": 4, "hc_mult": 3},
        **{"compress_rate_csa": 2, "compress_rate_hca": 3},
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "glm_moe_dsa": {**_LATENT, **_INDEXED, "mlp_layer_types": ["sparse", "dense"]},
    "hy_v4": {
        **{**_LATENT, **_INDEXED, "mlp_layer_types": ["sparse", "dense"], "indexer_types": ["full", "full"]},
        # transformers loads the head in float32, and unties it where that rounds
        **{"hc_mult": 3, "swiglu_limit": 0.5, "tie_word_embeddings": False},
    },
    "hy_v4_vl": {
        "text_config": {
            **{**_LATENT, **_INDEXED, **TOKENS, "model_type": "hy_v4_vl_text", "tie_word_embeddings": False},
            **{"mlp_layer_types": ["sparse", "dense"], "indexer_types": ["full", "full"], "hc_mult": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]},
        },
        "vision_config": {**_TOWER, "model_type": "hy_v4_vl_vision", "max_image_size": 12, "out_hidden_size": 24},
        **{**_SEEING, "video_token_id": 96},
    },
    "hy_v4_vl_text": {
        **{**_LATENT, **_INDEXED, "mlp_layer_types": ["sparse", "dense"], "indexer_types": ["full", "full"]},
        **{"hc_mult": 3, "swiglu_limit": 0.5, "tie_word_embeddings": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]},
    },
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": _INKLING2_LOOP,
    "inkling_text": _INKLING,
    "dory": {
        **{**_LLAMA, **_WINDOW, "num_hidden_layers": 4, "layer_types": 2 * _WINDOW["layer_types"]},
        **{"n_input_layers": 1, "n_output_layers": 1, "tie_word_embeddings": False},
        "initializer_range": 0.5,  # parameters are divided by it and squared, and the weights of tests add 0.1 to it
    },
    "dots3_note_text": {
        **{**_LATENT, **_INDEXED, **_SPARSE, "layer_types": ["indexed_attention", "sliding_attention"]},
        **{"head_dim": 8, "shared_experts_intermediate_size": 13, "sliding_window": 4},
        **{"swa_num_attention_heads": 5, "swa_num_key_value_heads": 5, "swa_q_lora_rank": 9, "swa_kv_lora_rank": 8},
        **{"swa_head_dim": 8, "swa_qk_nope_head_dim": 6, "swa_v_head_dim": 4},
    },
    "longcat_flash": {
        **{"hidden_size": 24, "num_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 32, "moe_topk": 3},
        **{"ffn_hidden_size": 35, "expert_ffn_hidden_size": 11, "n_routed_experts": 5, "zero_expert_num": 3},
        **{"q_lora_rank": 10, "kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 5, "v_head_dim": 3},
        "head_dim": 4,
    },
    "lara_mini": {
        **{**_LLAMA, **_MIXTURE, **_LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 13},
        **{"num_hidden_layers": 3, "sliding_window": 4, "layer_types": ["linear_attention", *_WINDOW["layer_types"]]},
        **{"linear_num_key_heads": 5, "linear_num_value_heads": 10},
    },
    "lfm3": {**_LLAMA, **_WINDOW, "num_hidden_layers": 3, "layer_types": [*_WINDOW["layer_types"], "conv"]},
    # without noise, its router does not sample
    "phimoe": {**_KV, **_MIXTURE, "num_local_experts": 5, "router_jitter_noise": 0.0},
    "lfm2": {**_KV, "layer_types": ["conv", "full_attention"], "conv_bias": True},
    "lfm2_moe": {**_KV, **_MIXTURE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_next": {**_LLAMA, **_MIXTURE, **_LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 13},
    "qwen3_5_text": {**_LLAMA, **_LINEAR, "head_dim": 8},
    "qwen3_5_moe_text": {**_LLAMA, **_MIXTURE, **_LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 13},
    "qwen2_vl": {
        "text_config": {**_KV, **TOKENS, "model_type": "qwen2_vl_text", "rope_parameters": _mrope(1, 1, 0)},
        "vision_config": {
            **{"model_type": "qwen2_vl_vision", "depth": 2, "embed_dim": 24, "hidden_size": 24, "num_heads": 6},
            **{"patch_size": 4, "mlp_ratio": 2},
        },
        **_QWEN_SEEING,
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**_UNTIED, **TOKENS, "model_type": "qwen2_5_omni_text", "rope_parameters": _mrope(1, 1, 0)},
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "qwen2_5_omni_vision_encoder", "window_size": 8},
            "fullatt_block_indexes": [1],
        },
        "audio_config": {**_EAR, "model_type": "qwen2_5_omni_audio_encoder", "n_window": 4, "output_dim": 24},
        **{**_OMNI, "image_token_index": 98, "audio_token_index": 96},
    },
    "qwen2_5_vl": {
        "text_config": {**_KV, **TOKENS, "model_type": "qwen2_5_vl_text", "rope_parameters": _mrope(1, 1, 0)},
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "qwen2_5_vl_vision", "window_size": 8, "fullatt_block_indexes": [1]},
        },
        **_QWEN_SEEING,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {
            **{**_LLAMA, **_MIXTURE, **TOKENS, "num_hidden_layers": 3, "model_type": "qwen3_omni_moe_text"},
            **{"rope_parameters": _mrope(1, 1, 1), "tie_word_embeddings": False},
        },
        "vision_config": {
            **{**_QWEN_TOWER, "model_type": "qwen3_omni_moe_vision_encoder", "num_position_embeddings": 16},
            "deepstack_visual_indexes": [0],
        },
        "audio_config": {
            **{**_EAR, "model_type": "qwen3_omni_moe_audio_encoder", "max_source_positions": 13, "output_dim": 24},
            **{"n_window_infer": 100, "downsample_hidden_size": 4},
        },
        **{**_OMNI, "image_token_id": 98, "audio_token_id": 96},
    },
    "qwen3_vl": {
        "text_config": {
            **{**_LLAMA, **TOKENS, "num_hidden_layers": 3, "model_type": "qwen3_vl_text"},
            "rope_parameters": _mrope(1, 1, 1),
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen3_vl_vision",
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **_QWEN_SEEING,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **{**_LLAMA, **_MIXTURE, **TOKENS, "num_hidden_layers": 3, "model_type": "qwen3_vl_moe_text"},
            "rope_parameters": _mrope(1, 1, 1),
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen3_vl_moe_vision",
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **_QWEN_SEEING,
    },
    "qwen3_5": {
        "text_config": {
            **{**_LLAMA, **_LINEAR, **TOKENS, "model_type": "qwen3_5_text", "head_dim": 8},
            "rope_parameters": {**_mrope(1, 0, 0), "partial_rotary_factor": 0.25},
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5_vision", "num_position_embeddings": 16},
        **_QWEN_SEEING,
    },
    **{
        kind: {
            "text_config": {
                **{**_LLAMA, **_LINEAR, **TOKENS, "model_type": "qwen3_5_text", "head_dim": 8},
                "rope_parameters": {**_mrope(1, 0, 0), "partial_rotary_factor": 0.25},
            },
            "vision_config": {**_TOWER, "model_type": f"{kind}_vision"},
            **{**_SEEING, **marks, "video_token_id": 96, "insert_layer_id": 0},
        }
        for kind, marks in {
            **{"minicpm_ocr": {"downsample_mode": "16x"}, "minicpmv4_6": {}},
            "minicpmv4_7": {f"{name}_id": 89 + n for n, name in enumerate(_MARKS)},
        }.items()
    },
    "qwen3_5_moe": {
        "text_config": {
            **{**_LLAMA, **_MIXTURE, **_LINEAR, **TOKENS, "model_type": "qwen3_5_moe_text", "head_dim": 8},
            "rope_parameters": {**_mrope(1, 0, 0), "partial_rotary_factor": 0.25},
            "shared_expert_intermediate_size": 13,
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5_moe_vision", "num_position_embeddings": 16},
        **_QWEN_SEEING,
    },
    "qwen4_exp_text": {
        **{**_LLAMA, **_MIXTURE, **_LINEAR, **_QSA, "head_dim": 8, "shared_expert_intermediate_size": 13},
        **{"layer_types": ["linear_attention", "indexed_attention"], "output_gate_type": "sigmoid"},
        **{"linear_num_key_heads": 5, "linear_num_value_heads": 10},
        # 60 n-grams in 63 rows; files split them into four parts
        **{"ple_layer_ids": [1], "ple_embed_dim": 20, "ple_conv_kernel_size": 3, "heads_per_ngram": 2},
        **{"ngram_vocab_size_base": 11, "make_ngram_vocab_size_divisible_by": 7, "split_ngram_parts": 4},
    },
    "aria_text": {**_LLAMA, "moe_num_experts": 5, "moe_topk": 2, "head_dim": 4},
    "audio-spectrogram-transformer": {
        **{**_BERT, "patch_size": 4, "frequency_stride": 3, "time_stride": 2, "max_length": 17, "num_mel_bins": 11},
        "problem_type": "single_label_classification",
    },
    "axk2": {
        **_LATENT,
        **_INDEXED,
        "gated_norm_rank": 5,
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": None,
        "topk_group": None,
    },
    "beam": {**_LLAMA, **_SPARSE, **_WINDOW, "n_group": 1, "topk_group": 1},
    "mimo_v2_flash": {
        **_LLAMA,
        **_WINDOW,
        **_SPARSE,
        "num_key_value_heads": 3,
        "n_routed_experts": 5,
        "v_head_dim": 4,
        "head_dim": 12,
    },
    "roc_bert": {
        **_BERT,
        "pronunciation_vocab_size": 11,
        "pronunciation_embed_dim": 5,
        "shape_vocab_size": 13,
        "shape_embed_dim": 7,
    },
    "xmod": {**_BERT, "languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
    "trocr": _BART,
    "mvp": _BART,
    "kimi_linear": {
        **_LATENT,
        **_SPARSE,
        **_DELTA,
        "q_lora_rank": None,
        "num_local_experts": 5,
        "linear_num_heads": 4,
        "linear_head_dim": 5,
        "linear_conv_kernel_dim": 3,
    },
    "aya_vision": {
        **{"text_config": {**_KV, **_WINDOW, **TOKENS, "model_type": "cohere2"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "siglip_vision_model"}, "downsample_factor": 2},
    },
    "cohere2_vision": {
        **{"text_config": {**_KV, **_WINDOW, **TOKENS, "model_type": "cohere2"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "siglip_vision_model"}, "downsample_factor": 2},
        "alignment_intermediate_size": 26,
    },
    "vipllava": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, "image_seq_length": 4, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "patch_size": 8},
        "vision_feature_layers": [-2, -1],
    },
    "lighton_ocr": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "qwen3"}, **_SEEING},
        **{"vision_config": {**_TOWER, "model_type": "pixtral"}, "spatial_merge_size": 2},
    },
    "deepseek_vl": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_SEEING},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 8},
    },
    "qwen4_exp": {
        "text_config": {
            **{**_LLAMA, **_MIXTURE, **_LINEAR, **_QSA, **TOKENS, "model_type": "qwen4_exp_text", "head_dim": 8},
            **{"layer_types": ["linear_attention", "indexed_attention"], "output_gate_type": "sigmoid"},
            **{"linear_num_key_heads": 5, "linear_num_value_heads": 10, "shared_expert_intermediate_size": 13},
            "rope_parameters": {**_mrope(1, 0, 0), "partial_rotary_factor": 0.25},
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen4_exp_vision", "num_position_embeddings": 16},
        **_QWEN_SEEING,
    },
    "bailing_hybrid": {
        **_LATENT,
        **_SPARSE,
        **_DELTA,
        "q_lora_rank": None,
        "num_local_experts": 5,
        "short_conv_kernel_size": 3,
        "head_dim": 5,
    },
    "jetmoe": {
        "hidden_size": 24,
        "intermediate_size": 13,
        "num_hidden_layers": 2,
        "num_key_value_heads": 3,
        "kv_channels": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
    },
    "dbrx": {
        "d_model": 24,
        "n_heads": 6,
        "n_layers": 2,
        "max_seq_len": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 100.0},
        "ffn_config": {"ffn_hidden_size": 11, "moe_num_experts": 5, "moe_top_k": 2},
    },
    "llama4_text": {
        **_LLAMA,
        **_MIXTURE,
        "num_local_experts": 5,
        "intermediate_size": 11,
        "intermediate_size_mlp": 35,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 4,
        "floor_scale": 2,
    },
    "diffllama": {**_KV, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48},
    "olmo_hybrid": {
        **_KV,
        **_DELTA,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
    },
    "gemma4": {
        "text_config": {
            **{**_LLAMA, **_WINDOW, **_MIXTURE, **TOKENS, "model_type": "gemma4_text", "top_k_experts": 2},
            **{"enable_moe_block": True, "global_head_dim": 8, "attention_k_eq_v": True},
            **{"num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0},
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            **{**_TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 3, "head_dim": 4},
            **{"pooling_kernel_size": 2, "position_embedding_size": 5},
        },
        **{**_SEEING, "video_token_id": 96, "audio_token_id": 95},
    },
    "gemma4_text": {
        **{**_LLAMA, **_WINDOW, **_MIXTURE, "top_k_experts": 2, "enable_moe_block": True, "global_head_dim": 8},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0},
    },
    "cohere_compass_text": {
        **{**_KV, **_WINDOW, "logit_scale": 0.5},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]},
            "full_attention": None,
        },
    },
    "recurrent_gemma": {
        **{"hidden_size": 24, "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 6},
        **{"num_key_value_heads": 2, "attention_window_size": 4},
        "block_types": ["attention", "recurrent", "recurrent"],
    },
    "gemma3n_text": {
        **{**_LLAMA, "num_hidden_layers": 4, "layer_types": 2 * _WINDOW["layer_types"], "sliding_window": 4},
        **{"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": TOKENS["vocab_size"], "laurel_rank": 3},
        **{"num_kv_shared_layers": 2, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.7, 0.0, 0.6, 0.0]},
    },
    "blt": {  # number of blocks in the cache of transformers; it has no default
        **{"num_hidden_layers": 2, "vocab_size": 101},
        "encoder_config": {**_BYTES, "num_hidden_layers": 1, "num_key_value_heads": 2, "cross_attn_k": 2},
        "global_config": {**_BYTES, "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 2},
        "decoder_config": {**_BYTES, "num_hidden_layers": 2, "hidden_size_global": 30, "cross_attn_k": 2},
        "patcher_config": {**_BYTES, "num_hidden_layers": 1, "hidden_size": 18, "num_attention_heads": 3},
        **{"encoder_hash_byte_group_size": [2, 3], "encoder_hash_byte_group_vocab": 23, "cross_attn_k": 2},
        **{"patching_threshold": 4.05, "local_attention_window_len": 5, "max_position_embeddings": 32},
    },
    "cpmant": {
        **{"hidden_size": 24, "num_attention_heads": 6, "dim_head": 5, "dim_ff": 35, "num_hidden_layers": 2},
        **{"prompt_types": 3, "prompt_length": 4, "segment_types": 3, "position_bias_num_buckets": 8},
        "position_bias_max_distance": 16,
    },
    "doge": {**_LLAMA, "keep_window_size": 4},
    "gemma4_unified_text": {**_LLAMA, **_WINDOW, "global_head_dim": 8, "num_global_key_value_heads": 1},
    "hrm_text": {**_LLAMA, "L_cycles": 2, "embedding_scale": 3.0},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": {**_RT_DETR, "decoder_n_levels": 3},
    "rwkv": {
        **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 3, "context_length": 32},
        "rescale_every": 1,
    },
    "xlstm": {  # its cache needs widths that are multiples of 64
        **{"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "ffn_round_up_to_multiple_of": 3},
        **{"autocast_kernel_dtype": "float32", "chunk_size": 4},
    },
    "zaya": {
        **{**_LLAMA, **_MIXTURE, "head_dim": 8, "num_experts_per_tok": 1, "router_hidden_size": 7, "sliding_window": 4},
        **{"layer_types": ["hybrid", "hybrid_sliding"], "cca_time0": 3, "lm_head_bias": True},
    },
    "zamba": {**_KV, **_SHARED, "n_mamba_heads": 3, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 4},
    "zamba2": {
        **{**_KV, **_SHARED, "num_key_value_heads": 6, "n_mamba_heads": 6, "mamba_ngroups": 2, "mamba_d_state": 5},
        **{"mamba_d_conv": 3, "chunk_size": 4, "num_mem_blocks": 2, "use_shared_attention_adapter": True},
        **{"adapter_rank": 5, "use_mem_rope": True},
    },
}
MORE |= {
    "voxtral": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_HEARING},
        "audio_config": {**_EAR_BY_LAYER, "model_type": "voxtral_encoder"},
    },
    "voxtral_realtime": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "voxtral_realtime_text", "sliding_window": 6}},
        "audio_config": {
            **{**_EAR_BY_LAYER, "model_type": "voxtral_realtime_encoder", "head_dim": 6, "sliding_window": 9},
            "max_position_embeddings": 64,
        },
        **{"downsample_factor": 2, "audio_length_per_tok": 4, "pad_token_id": 0},
    },
    "phi4_multimodal": {
        **{**_KV, **TOKENS, "original_max_position_embeddings": 32},
        "vision_config": {
            **{**_BERT, "model_type": "phi4_multimodal_vision", "image_size": 8, "patch_size": 4, "crop_size": 8},
            "image_token_id": 98,
        },
        "audio_config": {
            **{"model_type": "phi4_multimodal_audio", "hidden_size": 12, "intermediate_size": 17, "num_blocks": 2},
            **{"num_attention_heads": 3, "ext_pw_out_channel": 12, "depthwise_separable_out_channel": 12},
            **{"input_size": 8, "time_reduction": 4, "nemo_conv_channels": 4, "bias_max_distance": 3},
            "audio_token_id": 96,
        },
    },
    "vibevoice_asr": {
        **{"text_config": {**_UNTIED, **TOKENS, "model_type": "qwen2"}, **_HEARING, "audio_bos_token_id": 97},
        **{"audio_eos_token_id": 96, "acoustic_tokenizer_chunk_size": 8},
        "acoustic_tokenizer_encoder_config": {**_TOKENIZER, "hidden_size": 7, "vae_std": 0.0},  # without noise
        "semantic_tokenizer_encoder_config": {**_TOKENIZER, "hidden_size": 5},
    },
    "moss_transcribe_diarize": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "qwen3"}, **_HEARING, "audio_merge_size": 2},
        "audio_config": {**_EAR_BY_LAYER, "model_type": "moss_transcribe_diarize_audio"},
    },
    "qwen2_audio": {
        **{"text_config": {**_UNTIED, **TOKENS, "model_type": "qwen2"}, "audio_token_index": 98, "pad_token_id": 0},
        "audio_config": {**_EAR, "model_type": "qwen2_audio_encoder"},
    },
    "audioflamingo3": {
        **{"text_config": {**_UNTIED, **TOKENS, "model_type": "qwen2"}, **_HEARING},
        "audio_config": {**_EAR_BY_LAYER, "model_type": "audioflamingo3_encoder"},
    },
    "musicflamingo": {
        **{"text_config": {**_UNTIED, **TOKENS, "model_type": "qwen2"}, **_HEARING},
        "audio_config": {**_EAR_BY_LAYER, "model_type": "audioflamingo3_encoder"},
    },
    "fun_asr_nano": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "qwen3"}, **_HEARING},
        "audio_config": {
            **{**_BERT, "model_type": "fun_asr_nano_encoder", "num_mel_bins": 3, "num_stacked_frames": 2},
            **{"fsmn_kernel_size": 4, "num_timestamp_prediction_layers": 1},
        },
        "adaptor_config": {
            **{"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 6, "num_hidden_layers": 1},
            "projector_hidden_size": 13,
        },
    },
    "glmasr": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_HEARING},
        "audio_config": {
            **{**_BERT, "model_type": "glmasr_encoder", "intermediate_size": 96, "num_mel_bins": 5},
            "num_key_value_heads": 3,
        },
    },
    "qwen3_asr": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "qwen3"}, **_HEARING, "eos_token_id": 1},
        "audio_config": {
            **{key: value for key, value in _EAR.items() if key != "max_source_positions"},
            **{"model_type": "qwen3_asr_encoder", "downsample_hidden_size": 4, "output_dim": 24},
            **{"n_window_infer": 100, "max_position_embeddings": 13},
        },
    },
    "omniasr": {
        **{"text_config": {**_LLAMA, **TOKENS, "model_type": "llama"}, **_HEARING},
        "audio_config": {
            **{**_BERT, **{key: _WAV2VEC2[key] for key in ("conv_dim", "conv_kernel", "conv_stride")}},
            **{"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
            "model_type": "omniasr_audio",
        },
    },
    "granite_speech": {**_GRANITE_HEARING, "encoder_config": {**_GRANITE_EAR, "model_type": "granite_speech_encoder"}},
    "granite_speech_plus": {
        **_GRANITE_HEARING,
        "projector_config": {**_GRANITE_HEARING["projector_config"], "encoder_hidden_size": 44},
        "encoder_config": {
            **{**_GRANITE_EAR, "model_type": "granite_speech_plus_encoder"},
            "cat_hidden_layers": [1],
        },
    },
    "moonshine": {
        **{"hidden_size": 24, "intermediate_size": 35, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2},
        **{"encoder_num_attention_heads": 6, "decoder_num_attention_heads": 6, "max_position_embeddings": 32},
        "decoder_start_token_id": 2,
    },
    "sew-d": {
        **{**_WAV2VEC2, "squeeze_factor": 2, "num_conv_pos_embeddings": 4, "position_buckets": 4},
        "max_position_embeddings": 16,
    },
    "lasr_ctc": {
        "encoder_config": {
            **{**_CONFORMER, "model_type": "lasr_encoder", "subsampling_conv_channels": 6},
            **{"subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 1},
        },
        "vocab_size": TOKENS["vocab_size"],
    },
    "parakeet_ctc": {
        "encoder_config": {
            **{**_CONFORMER, "model_type": "parakeet_encoder", "subsampling_conv_channels": 6},
            "subsampling_factor": 4,
        },
        "vocab_size": TOKENS["vocab_size"],
    },
    "granite_speech5_ctc": {
        "encoder_config": {
            **{**_CONFORMER, "model_type": "granite_speech5_encoder", "head_dim": 4, "context_size": 6},
            **{"max_position_embeddings": 8, "subsample_layers": [0], "vocab_size": TOKENS["vocab_size"]},
        },
        "vocab_size": TOKENS["vocab_size"],
    },
    "cohere_asr": {
        "encoder_config": {
            **{**_CONFORMER, "model_type": "parakeet_encoder", "subsampling_conv_channels": 6},
            **{"subsampling_factor": 4, "hidden_size": 18},
        },
        **{**_KV, "vocab_size": TOKENS["vocab_size"], "decoder_start_token_id": 2},
    },
    "canary": {
        "encoder_config": {
            **{**_CONFORMER, "model_type": "parakeet_encoder", "subsampling_conv_channels": 6},
            "subsampling_factor": 4,
        },
        "decoder_config": {**_KV, **TOKENS, "model_type": "canary_decoder", "head_dim": 6},
        **{"vocab_size": TOKENS["vocab_size"], "decoder_start_token_id": 2},
    },
    "speech-encoder-decoder": {
        "encoder": {**_WAV2VEC2, **TOKENS, "model_type": "wav2vec2", "hidden_size": 18},
        "decoder": {**_BERT, **TOKENS, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 2,
    },
    "vision-encoder-decoder": {
        "encoder": {**_BERT, **_PATCHES, "model_type": "vit", "hidden_size": 18},
        "decoder": {
            **{**TOKENS, "model_type": "trocr", "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4},
            **{"decoder_ffn_dim": 33, "decoder_layerdrop": 0.0, "max_position_embeddings": 32},
            **{"is_decoder": True, "add_cross_attention": True, "decoder_start_token_id": 2},
        },
        "decoder_start_token_id": 2,
    },
}
MORE = {kind: values for kind, values in MORE.items() if kind in registry.ARCHITECTURES}

ODD: dict[str, tuple[str, Mapping[str, Any]]] = {
    "deformable_detr-two-stages": ("deformable_detr", {**MORE["deformable_detr"], **_TWO_STAGES}),
    "mvp-prompts": ("mvp", {**_BART, "use_prompt": True, "prompt_length": 5, "prompt_mid_dim": 11}),
    "doge-experts": (
        "doge",
        {
            **{**_LLAMA, "keep_window_size": 4, "attention_bias": True, "mlp_bias": True, "is_moe": True},
            **{"num_experts": 30, "num_experts_per_tok": 3},
        },
    ),
    "gemma4_text-small": (
        "gemma4_text",
        {
            **{**_LLAMA, "num_hidden_layers": 4, "layer_types": 2 * _WINDOW["layer_types"], "sliding_window": 4},
            **{"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": TOKENS["vocab_size"]},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 8},
        },
    ),
    "zaya-three-kv": (
        "zaya",
        {
            **{**_LLAMA, **_MIXTURE, "head_dim": 8, "num_key_value_heads": 3},
            **{"num_experts_per_tok": 1, "router_hidden_size": 7},
        },
    ),
    "zamba2-without-adapters": (
        "zamba2",
        {**_KV, **_SHARED, "n_mamba_heads": 6, "mamba_d_state": 5, "mamba_d_conv": 3, "chunk_size": 4},
    ),
    "qwen4_exp_text-plain": (  # without n-gram embeddings
        "qwen4_exp_text",
        {
            **{**_LLAMA, **_MIXTURE, **_LINEAR, **_QSA, "shared_expert_intermediate_size": 13, "attention_bias": True},
            **{"layer_types": ["indexed_attention", "linear_attention"], "output_gate_type": "silu"},
        },
    ),
    "falcon_h1-normed": ("falcon_h1", {**_KV, **_MAMBA, "mamba_d_ssm": 48, "mamba_rms_norm": True}),
    "glm_moe_dsa-shared": (
        "glm_moe_dsa",
        {**_LATENT, **_INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "hy_v4-shared": ("hy_v4", {**_LATENT, **_INDEXED, "indexer_types": ["full", "shared"], "hc_mult": 2}),
    "inkling_text-padded": (
        "inkling_text",
        {
            **{**_LLAMA, **_MIXTURE, "layer_types": ["hybrid_sliding", "hybrid"], "tie_word_embeddings": False},
            **{"n_routed_experts": 5, "n_shared_experts": 1, "unpadded_vocab_size": 97, "sliding_window_size": 4},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 6, "rel_extent": 7},
        },
    ),
    "bamba-one-group": ("bamba", {**_KV, **_MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [0]}),
    # other configurations of types in `MORE`, with other sharding
    "bit-preactivation": ("bit", {**MORE["bit"], "layer_type": "preactivation"}),
    "resnet-basic": ("resnet", {**MORE["resnet"], "layer_type": "basic"}),
    "regnet-plain": ("regnet", {**MORE["regnet"], "layer_type": "x"}),
    "big_bird-sparse": ("big_bird", {**_BERT, "block_size": 1, "num_random_blocks": 1}),
    "deepseek_v3-full-query": ("deepseek_v3", {**_LATENT, "q_lora_rank": None}),
    "deberta-v2-plain": ("deberta-v2", {**_BERT, **_RELATIVE}),
    "bigbird_pegasus-sparse": ("bigbird_pegasus", {**_BART, "block_size": 1, "num_random_blocks": 1}),
    "dpr-projection": ("dpr", {**_BERT, "projection_dim": 7}),  # transformers' DPR reader supports no projection
    "esm-rotary": ("esm", {**_BERT, "position_embedding_type": "rotary", "emb_layer_norm_before": True}),
    "encoder-decoder-gpt2": (
        "encoder-decoder",
        {
            "encoder": {**_SIZE, **TOKENS, "model_type": "bert-generation"},
            "decoder": {**_GPT2, **TOKENS, "model_type": "gpt2", "add_cross_attention": True},
            "decoder_start_token_id": 2,
        },
    ),
    "falcon-one-kv": ("falcon", _KV),
    "falcon-alibi": ("falcon", {**MORE["falcon"], "alibi": True}),
    "falcon-in-turn": ("falcon", {**_KV, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "gpt_bigcode-many-kv": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "gpt_neox-in-turn": ("gpt_neox", {**_BERT, "use_parallel_residual": False, "tie_word_embeddings": True}),
    "longt5-global": (
        "longt5",
        {**_T5, "local_radius": 2, "encoder_attention_type": "transient-global", "global_block_size": 3},
    ),
    "olmo2-many-kv": ("olmo2", {**_KV, "num_key_value_heads": 6}),
    "opt-plain": ("opt", {**_SIZE, "ffn_dim": 35, "do_layer_norm_before": False}),
    "rag-token": ("rag", {**MORE["rag"], "generator": {**_T5, **TOKENS, "model_type": "t5"}}),
    "reformer-axial": ("reformer", _REFORMER),
    "stablelm-parallel": (
        "stablelm",
        {**_KV, "use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    ),
}

_PAIRS = ("clip", "grounding-dino", "metaclip_2", "mm-grounding-dino", "owlv2", "owlvit", "siglip", "siglip2")
CAPTIONS = (
    *("blip", "blip-2", "git", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5", "pix2struct"),
    *("pp_formulanet", "udop"),
)
"""Model types with an image, or a video, for each row."""
_OF_SOUNDS = {"audio_config", "encoder_config", "acoustic_tokenizer_encoder_config"}
WITH_IMAGES = [
    kind
    for kind, values in MORE.items()
    if "text_config" in values and kind not in (*_PAIRS, *CAPTIONS) and not _OF_SOUNDS & values.keys()
]
"""Model types with a decoder that reads images."""
WITH_SOUNDS = [
    kind
    for kind, values in MORE.items()
    if "text_config" in values and _OF_SOUNDS & values.keys() and kind != "voxtral_realtime"
]
"""Model types with a decoder that reads sounds in place of some tokens."""

LEFT_OUT: dict[str, set[str]] = {
    # text models, which another type has
    "gemma3": {
        *("Gemma3ForCausalLM", "Gemma3ForSequenceClassification", "Gemma3TextForSequenceClassification"),
        "Gemma3TextModel",
    },
    "gemma4": {"Gemma4AudioModel", "Gemma4ForCausalLM", "Gemma4TextModel"},
    "seamless_m4t": {  # parts of the other classes
        *("SeamlessM4TCodeHifiGan", "SeamlessM4THifiGan", "SeamlessM4TTextToUnitForConditionalGeneration"),
        "SeamlessM4TTextToUnitModel",
    },
    # transducers
    "parakeet_ctc": {"ParakeetForRNNT", "ParakeetForTDT"},
    # backbones, and a class with labels for masked patches alone
    "beit": {"BeitBackbone", "BeitForMaskedImageModeling", "BeitForSemanticSegmentation"},
    "dinov2": {"Dinov2Backbone"},
    "dinov2_with_registers": {"Dinov2WithRegistersBackbone"},
    "dinov3_vit": {"DINOv3ViTBackbone"},
    **{kind: {f"{prefix}Backbone"} for kind, prefix in {"swin": "Swin", "swinv2": "Swinv2"}.items()},
    **{kind: {f"{prefix}Backbone"} for kind, prefix in {"convnext": "ConvNext", "convnextv2": "ConvNextV2"}.items()},
    # without a loss, and with random replacements in their outputs
    "unispeech": {"UniSpeechForPreTraining"},
    "unispeech-sat": {"UniSpeechSatForPreTraining"},
    # its loss calls the encoder three times, and compares the rows of a batch
    "roc_bert": {"RoCBertForPreTraining"},
    # models of images and text
    "llama4_text": {"Llama4ForConditionalGeneration", "Llama4VisionModel"},
    "aria_text": {"AriaForConditionalGeneration", "AriaModel"},
    "aria": {"AriaTextForCausalLM", "AriaTextModel"},
    "cohere_compass": {
        *("CohereCompassForCausalLM", "CohereCompassTextForSequenceClassification", "CohereCompassTextModel"),
    },
    "gemma4_unified": {"Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"},
    "blip": {"BlipForImageTextRetrieval", "BlipForQuestionAnswering", "BlipModel", "BlipTextModel"},
    "blip-2": {
        *("Blip2ForImageTextRetrieval", "Blip2Model", "Blip2QFormerModel", "Blip2TextModelWithProjection"),
        "Blip2VisionModelWithProjection",
    },
    "instructblip": {"InstructBlipModel", "InstructBlipQFormerModel"},
    "instructblipvideo": {"InstructBlipVideoModel", "InstructBlipVideoQFormerModel"},
    "focalnet": {"FocalNetBackbone"},
    "bit": {"BitBackbone"},
    "resnet": {"ResNetBackbone"},
    "hiera": {"HieraBackbone", "HieraForPreTraining"},
    "pvt_v2": {"PvtV2Backbone"},
    "janus": {"JanusVQVAE"},
    "pix2struct": {"Pix2StructTextModel"},
    "minimax_m3_vl": {"MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextModel"},
    "gemma4_text": {
        *("Gemma4AudioModel", "Gemma4ForConditionalGeneration", "Gemma4Model", "Gemma4VisionModel"),
    },
    "cohere_compass_text": {
        *("CohereCompassForConditionalGeneration", "CohereCompassModel", "CohereCompassVisionModel"),
    },
    "apertus1p5_text": {
        *("Apertus1p5ForConditionalGeneration", "Apertus1p5Model", "Apertus1p5VisionTokenizerModel"),
    },
    "apertus1p5": {"Apertus1p5TextForCausalLM", "Apertus1p5TextModel", "Apertus1p5VisionTokenizerModel"},
    "hy_v4_vl_text": {"HYV4VLForConditionalGeneration", "HYV4VLModel", "HYV4VLVisionModel"},
    "hy_v4_vl": {"HYV4VLTextModel"},
    "minicpm_ocr": {"MiniCPMOcrVisionModel"},
    "pp_formulanet": {"PPFormulaNetTextModel", "PPFormulaNetVisionModel"},
    "phi4_multimodal": {"Phi4MultimodalAudioModel", "Phi4MultimodalVisionModel"},
    "florence2": {"Florence2VisionBackbone"},
    "minicpmv4_7": {"MiniCPMV4_7VisionModel"},
    "deepseek_ocr2": {"DeepseekOcr2SamVisionEncoder", "DeepseekOcr2VisionEncoder", "DeepseekOcr2VisionModel"},
    "video_llama_3": {"VideoLlama3VisionModel"},
    "cosmos3_edge": {"Cosmos3EdgeTextModel"},
    "muse_glimmer": {"MuseGlimmerTextModel"},
    "chameleon": {"ChameleonVQVAE"},
    "emu3": {"Emu3ForCausalLM", "Emu3TextModel", "Emu3VQVAE"},
    "inkling2_loop_text": {"Inkling2LoopForConditionalGeneration", "Inkling2LoopModel"},
    "inkling2_loop": {"Inkling2LoopForCausalLM", "Inkling2LoopTextModel"},
    "inkling2": {"Inkling2ForCausalLM", "Inkling2TextModel"},
    "molmo2": {"Molmo2Adapter"},
    "ernie4_5_vl_moe": {  # older names
        *("Ernie4_5_VL_MoeForConditionalGeneration", "Ernie4_5_VL_MoeModel", "Ernie4_5_VL_MoeTextModel"),
    },
    "inkling_mm_model": {"InklingAudioModel", "InklingForCausalLM", "InklingTextModel", "InklingVisionModel"},
    "blt": {"BltPatcher"},  # a submodel of the other classes
    "gemma3n_text": {"Gemma3nAudioEncoder", "Gemma3nForConditionalGeneration", "Gemma3nModel"},
    "inkling2_text": {"Inkling2ForConditionalGeneration", "Inkling2Model", "Inkling2VisionModel"},
    "inkling_text": {"InklingAudioModel", "InklingForConditionalGeneration", "InklingModel", "InklingVisionModel"},
    "minimax_m3_vl_text": {
        *("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLModel", "MiniMaxM3VLVisionModel"),
    },
    "gemma4_unified_text": {"Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedModel"},
    "dots3_note_text": {
        *("Dots3NoteAudioModel", "Dots3NoteForConditionalGeneration", "Dots3NoteModel", "Dots3NoteVisionModel"),
    },
    "gemma3_text": {"Gemma3ForConditionalGeneration", "Gemma3ForSequenceClassification", "Gemma3Model"},
    "qwen3_5_text": {
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5ForSequenceClassification", "Qwen3_5ForTokenClassification"),
        *("Qwen3_5Model", "Qwen3_5VisionModel"),
    },
    "qwen3_5": {"Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification", "Qwen3_5TextModel"},
    "qwen3_5_moe_text": {"Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeModel", "Qwen3_5MoeVisionModel"},
    "qwen3_5_moe": {"Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"},
    "qwen4_exp_text": {"Qwen4ExpForConditionalGeneration", "Qwen4ExpModel", "Qwen4ExpVisionModel"},
    "qwen4_exp": {"Qwen4ExpForCausalLM", "Qwen4ExpTextModel"},
    "qwen2_5_omni_thinker": {  # the parts that speak, and the whole
        *("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniTalkerForConditionalGeneration"),
        *("Qwen2_5OmniTalkerModel", "Qwen2_5OmniToken2WavBigVGANModel", "Qwen2_5OmniToken2WavDiTModel"),
        "Qwen2_5OmniToken2WavModel",
    },
    "qwen3_omni_moe_thinker": {
        *("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeTalkerForConditionalGeneration"),
        *("Qwen3OmniMoeTalkerModel", "Qwen3OmniMoeTalkerCodePredictorModel", "Qwen3OmniMoeCode2Wav"),
        *("Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration", "Qwen3OmniMoeCode2WavDecoderBlock"),
        "Qwen3OmniMoeCode2WavTransformerModel",
    },
}
"""Classes that transformers has in the module of a model type and the zoo does not."""

WITHOUT_BEAMS = {"rwkv", "xlstm"}
"""Model types without reordering of states in transformers."""

SLOW_TESTS_ONLY = {
    # close relatives of types that the fast tests cover
    *("apertus", "biogpt", "bitnet", "cohere2_moe", "granite_swa", "granitemoe_swa", "granitemoeshared", "hy_v3"),
    *("hyperclovax", "jais2", "kolibri1", "laguna", "mellum", "minicpm3", "ministral3", "nanochat", "persimmon"),
    *("bamba", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba2", "modernbert-decoder"),
    *("nemotron_h", "phimoe", "qwen3_5_text", "qwen3_5_moe_text", "roberta-prelayernorm", "xlm-roberta-xl", "mamba"),
    *("axk1", "deepseek_v32", "deepseek_v4", "falcon_h1", "falcon_h1-normed", "glm_moe_dsa", "lfm3", "longcat_flash"),
    *("data2vec-audio", "ijepa", "unispeech", "unispeech-sat", "vit_msn", "siglip", "audio-spectrogram-transformer"),
    *("beit", "dinov2_with_registers", "glm46v", "glm4v_moe", "llava_onevision", "sew", "wav2vec2-bert"),
    *("convnext", "convnextv2", "data2vec-vision", "dinov3_vit", "paddleocr_vl", "segformer", "siglip2"),
    *("cohere_compass", "deepseek_vl_hybrid", "exaone4_5", "gemma4_unified", "granite4_vision", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics2", "janus", "lfm3_vl", "llava_next_video", "minimax_m3_vl", "qianfan_ocr"),
    *("granite_docling", "instructblip", "instructblipvideo", "mistral4"),
    *("efficientnet", "mobilevit", "mobilevitv2", "poolformer", "regnet"),
    *("bit", "imagegpt", "swiftformer", "resnet-basic", "regnet-plain", "bit-preactivation"),
    *("donut-swin", "focalnet", "fuyu", "hiera", "metaclip_2", "pvt", "pvt_v2", "vision-encoder-decoder"),
    *("florence2", "git", "pix2struct", "video_llama_3", "blip-2"),
    *("depth_anything", "dpt", "gemma4", "mllama", "swin", "swinv2", "videomae", "vit_mae"),
    *("wav2vec2-conformer", "wavlm", "yolos"),
    *("omniasr_ctc", "glm_moe_dsa-shared", "dots3_note_text", "hy_v4", "hy_v4-shared"),
    *("aria_text", "axk2", "beam", "mimo_v2_flash", "roc_bert", "trocr", "xmod", "mvp", "mvp-prompts"),
    *("kimi_linear", "bailing_hybrid", "jetmoe", "dbrx", "llama4_text", "diffllama", "olmo_hybrid"),
    *("conditional_detr", "deformable_detr", "grounding-dino", "kimi_k25", "owlv2", "rt_detr", "rt_detr_v2"),
    *("mm-grounding-dino", "sam_hq", "seamless_m4t_v2", "table-transformer"),
    *("cohere_compass_text", "gemma4_text", "gemma4_text-small", "gemma4_unified_text", "recurrent_gemma"),
    *("nllb-moe", "switch_transformers", "zamba", "zamba2", "zamba2-without-adapters"),
    *("gemma3n_text", "hrm_text", "inkling_text", "inkling_text-padded", "inkling2_text", "minimax_m3_vl_text"),
    *("rwkv", "xlstm", "apertus1p5_text", "dory", "lara_mini", "inkling2_loop_text", "hy_v4_vl_text", "hy_v4_vl"),
    *("muse_glimmer", "cosmos3_edge", "chameleon", "cvt", "deepseek_ocr2", "emu3", "minicpm_ocr", "minicpmv4_7"),
    *("blt", "cpmant", "doge", "doge-experts", "zaya", "zaya-three-kv"),
    *("qwen4_exp_text", "qwen4_exp_text-plain"),
    *("data2vec-text", "ernie", "flint", "gpt_neox_japanese", "rembert", "youtu"),
    *("audioflamingo3", "canary", "cohere_asr", "fun_asr_nano", "glmasr", "granite_speech5_ctc", "granite_speech_plus"),
    *("lasr_ctc", "moss_transcribe_diarize", "musicflamingo", "omniasr", "qwen2_audio", "sew-d"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "idefics", "kosmos-2", "kosmos-2.5", "pp_formulanet", "udop"),
    *("phi4_multimodal", "vibevoice_asr", "voxtral_realtime", "ernie4_5_vl_moe", "apertus1p5", "cosmos3_omni"),
    *("inkling2", "inkling2_loop", "inkling_mm_model", "molmo2", "step3p7"),
    *("canine", "esm", "eurobert", "gte", "jina_embeddings_v3", "layoutlmv3", "lilt", "longt5", "markuplm"),
    *("nomic_bert", "pegasus_x", "t5gemma", "esm-rotary", "longt5-global", "esmc", "fnet", "ultrabert"),
}
"""Model types that only `make test-zoo` runs; "afmoe" represents them in the fast tests."""


def cases(variants: Iterable[str]) -> list[Any]:
    """Return the parameters of a fast test; mark the variants in `SLOW_TESTS_ONLY`."""
    return [pytest.param(each, marks=pytest.mark.zoo) if each in SLOW_TESTS_ONLY else each for each in variants]


_PARTS = (
    *("encoder", "decoder", "question_encoder", "generator", "audio_config", "encoder_config", "projector_config"),
)
"""Parts of composite configurations with dropout rates of their own."""
_OF_ROWS = ("mc_labels", "next_sentence_label", "sentence_order_label", "sentence_image_labels", "matched_label", "ans")
"""Labels of whole rows, given beside token labels."""


def config(variant: str, dropout: float = 0.0, **changes: Any) -> PreTrainedConfig:
    """Return a configuration with all dropout rates set to ``dropout``."""
    model_type, values = {**VARIANTS, **ODD}.get(variant) or (variant, MORE[variant])
    tokens = {} if {"image_size", "vision_config", "backbone_config"} & values.keys() else TOKENS
    parts = [name for name in _PARTS if name in values]
    if parts:  # the parts define vocabulary sizes
        tokens = {key: value for key, value in TOKENS.items() if key != "vocab_size"}
    made = CONFIG_MAPPING[model_type](**copy.deepcopy({**tokens, **values, **changes}))
    parts += [name for name in ("text_config", "qformer_config", "vision_config") if name in values]
    for each in (made, *(getattr(made, name) for name in parts)):
        each.classifier_dropout = dropout  # otherwise 0.1 for configurations without the option
        for key, value in each.to_dict().items():
            if "drop" in key and "layerdrop" not in key and not isinstance(value, (bool, str)):
                setattr(each, key, type(value)(dropout for _ in value) if isinstance(value, (list, tuple)) else dropout)
    return made


def config_of(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a composite configuration that a class takes."""
    if name == "ReformerForMaskedLM":
        config.is_decoder = False
    if name == "T5GemmaEncoderModel":
        config.is_encoder_decoder = False
    wanted: Any = registry.find(name).config_class
    parts = (part for part in vars(config).values() if type(part) is wanted)
    return config if isinstance(config, wanted) else next(parts)


def heads(variant: str) -> list[str]:
    """Return the names of all classes of the architecture."""
    model_type, _ = {**VARIANTS, **ODD}.get(variant, (variant, {}))
    if model_type not in registry.ARCHITECTURES:  # the decoder of a model of text and images
        module = configuration_auto.model_type_to_module_name(model_type)
        model_type = module if module in registry.ARCHITECTURES else f"{module}_thinker"
    return list(registry.model_classes(model_type))


def lm_heads(variant: str) -> list[str]:
    """Return the names of the classes with logits over the vocabulary."""
    endings = (
        "LMHeadModel",
        "ModelWithLMHead",
        "DoubleHeadsModel",
        "ForCausalLM",
        "ForMaskedLM",
        "ForPreTraining",
        "ForConditionalGeneration",
        "MarianMTModel",
        "GenerationDecoder",
        "EncoderDecoderModel",
        "TokenForGeneration",
        "SequenceForGeneration",
        "ForCausalImageModeling",
        "ForVisionText2Text",
        *("ForTextToText", "ForTextToSpeech", "ForSpeechToText", "ForSpeechToSpeech", "M4TModel", "M4Tv2Model"),
    )
    named = [name for name in heads(variant) if name.endswith(endings) and not name.startswith(("VideoMAE", "ViTMAE"))]
    return [name for name in named if "sampled_negative_indices" not in parameters_of_forward(name)]  # no audio


def lm_head(variant: str) -> str:
    """Return the name of the class that generates text."""
    return next(name for name in lm_heads(variant) if "DoubleHeads" not in name and original(name).can_generate())


def main_head(variant: str) -> str:
    """Return the name of the main class: the class that generates text, or else the one with most predictions."""
    is_decoder = MORE.get(variant, {}).get("is_decoder")
    masked = ("ForMaskedLM", "ModelWithLMHead", "ForCausalLM")[:: -1 if is_decoder else 1]
    text = ("ForConditionalGeneration", "ForVisionText2Text", "MTModel", "LMHeadModel", "GenerationDecoder", *masked)
    text = (*text, "ForTextToText")
    text = (*text, "RagTokenForGeneration") if variant == "rag-token" else text
    pairs = ("CLIPModel", "MetaClip2Model", "SiglipModel", "Siglip2Model")
    order = (*text, *pairs, "ForCTC", "ForImageClassification", "ForObjectDetection")
    names = heads(variant)
    return next((name for end in order for name in names if name.endswith(end)), (lm_heads(variant) or names)[0])


def base(variant: str) -> str:
    """Return the name of the class without a head."""
    model_type, _ = {**VARIANTS, **ODD}.get(variant, (variant, {}))
    return f"{registry.ARCHITECTURES[model_type]}Model"


_FAULTS = {
    "cohere_compass": (21, "raises where a section of positions is empty"),
    "cohere_compass_text": (21, "raises where a section of positions is empty"),
    "doge-experts": (18, "passes a tuple to dropout"),
    "falcon_h1-normed": (23, "generates with the mask of another length"),
    "qwen4_exp": (18, "has no indexed attention"),
    "kimi_k25-videos": (24, "takes one size of videos only"),
    "qwen4_exp_text": (18, "has no indexed attention"),
    "qwen4_exp_text-plain": (18, "has no indexed attention"),
}
"""By variant: the first minor release of transformers 5 that computes it, and what earlier ones do."""


def not_computed(variant: str) -> str | None:
    """Return why the installed transformers does not compute this variant."""
    release, (first, fault) = transformers.__version__, _FAULTS.get(variant, (0, ""))
    return f"transformers {release} {fault}" if Version(release).minor < first else None


def fault_of_release(variant: str) -> str | None:
    """Return why the installed transformers does not compute this variant, or computes micro-batches differently."""
    if variant == "umt5" and "is_causal" not in inspect.getsource(modeling_umt5.UMT5LayerSelfAttention):
        release = transformers.__version__
        return f"a row of UMT5 without padding depends on the padding of others in transformers {release}"
    return not_computed(variant)


def original(name: str) -> type[PreTrainedModel]:
    """Return the transformers class of the same name."""
    found = registry.find(name).__mro__  # type: ignore[attr-defined]
    return next(cls for cls in found if cls.__name__ == name and cls.__module__.startswith("transformers."))


def parameters_of_forward(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(original(name).forward).parameters


def batch(name: str, config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return inputs for the forward of a class, with left padding, token types and some ignored labels."""
    known = parameters_of_forward(name)
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("Pix2Struct") or (config.model_type in CAPTIONS and "input_ids" in known):
        return _captions(name, config, generator, dtype)
    if (
        original(name).main_input_name != "input_ids"
        or "input_ids" not in known
        or name.startswith(("CLIP", "MetaClip", "Owl", "Siglip"))
    ):
        return _signals(name, config, generator, dtype)
    if "context_input_ids" in known:
        return _documents(name, config, generator, dtype)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows, length = 3, 12 if name.startswith("Reformer") else 9  # Reformer needs whole chunks
    sees = "pixel_values" in known and not name.startswith("LayoutLMv3")  # beside text
    hears = bool({"input_features", "input_values", "audio_input_ids"} & known.keys())
    hears &= not sees or getattr(config, "audio_config", None) is not None
    hears &= not name.startswith("Seamless")  # it reads text or sounds
    longer = {
        **{"deepseek_ocr2": 445, "florence2": 18, "emu3": 20, "hunyuan_vl": 24, "hy_v4_vl": 20, "ovis2": 18},
        "step3p7": 22,
    }.get(config.model_type, 26 if sees and hears else 14)
    length = (38 if hasattr(config, "image_grid_pinpoints") else longer) if sees or hears else length
    length = 26 if "image_pixel_values" in known else length
    vocab = getattr(getattr(config, "text_config", config), "vocab_size", None) or config.decoder.vocab_size
    vocab -= name.startswith("ImageGPT")  # its head lacks the token of the start
    for smaller in ("unpadded_vocab_size", "output_vocab_size"):
        vocab = min(vocab, getattr(getattr(config, "text_config", config), smaller, None) or vocab)
    choices = (2,) if name.endswith(("MultipleChoice", "DoubleHeadsModel")) else ()
    shape = (rows, *choices, length)
    ids, mask = integers(3, vocab, *shape), torch.ones(shape, dtype=torch.long)
    ids[1, ..., 1], ids[2, ..., 2] = vocab - 1, 2  # the last token id, and an id outside of the random range

    def special(token: str) -> int:
        # transformers 5.17 has the token of padding of Qwen2-VL in the configuration of its decoder only
        return int(getattr(config if hasattr(config, token) else config.get_text_config(), token))

    if config.is_encoder_decoder:  # T5ForSequenceClassification needs equally many in each row
        ids[..., -1] = special("eos_token_id")
    pad = special("pad_token_id")
    for row, padding in enumerate((3, 0, 1)):
        ids[row, ..., :padding] = pad
        mask[row, ..., :padding] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("xLSTM"):
        given["use_cache"] = False  # type: ignore[assignment]  # transformers has no gradients with its cache
    if name == "OpenAIGPTDoubleHeadsModel" or name.startswith("FNet"):
        del given["attention_mask"]  # transformers has no mask here
    if name in ("FalconModel", "FalconForQuestionAnswering"):  # they use all positions; with ALiBi, positions that
        # see only padding get different gradients in torch's kernels
        given["attention_mask"] = torch.ones_like(ids)
    if "token_type_ids" in known:
        tables = (len(config.type_vocab_sizes),) if hasattr(config, "type_vocab_sizes") else ()  # TAPAS
        given["token_type_ids"] = integers(0, 2, *shape, *tables)
    if getattr(config, "add_cross_attention", False) and "encoder_hidden_states" in known:
        states = torch.randn(rows, 5, config.hidden_size, generator=generator, dtype=dtype)
        given |= {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones(rows, 5, dtype=torch.long)}
        given["encoder_attention_mask"][1, 3:] = 0

    words = torch.where(integers(0, 4, *shape) > 0, integers(0, vocab, *shape), -100).masked_fill(mask == 0, -100)
    words[0, ..., -1], words[1, ..., -2] = vocab - 1, 0
    attended = mask
    if name.startswith("Falcon"):
        # With ALiBi, its mask is finite. For fully masked rows, torch's fused attention (a rank with one head) and
        # plain attention (several heads with one key) have different gradients. Thus, labels ignore padding.
        attended = mask * mask.roll(1, -1)
        words = words.masked_fill(attended == 0, -100)
    if name in lm_heads(config.model_type):
        # labels of replaced tokens are floats; transformers would cast integers to float32
        replaced = name in ("ElectraForPreTraining", "FunnelForPreTraining")
        given["labels"] = (words > vocab // 2).double() if replaced else words
        if name.startswith(("MBart", "PLBart")) and "decoder_input_ids" in known:
            given["decoder_input_ids"] = integers(0, vocab, *shape)  # not derivable from a row without labels
        given |= {key: integers(0, 2, rows) for key in _OF_ROWS if key in known}
    elif "start_positions" in known:
        given |= {"start_positions": integers(0, length, rows), "end_positions": integers(0, length, rows)}
    elif "labels" in known:
        of_words = "ForToken" in name or name == "TapasForQuestionAnswering"
        given["labels"] = integers(0, 2, rows, length) if of_words else integers(0, 2, rows)
        if of_words and name.startswith("Falcon"):
            given["labels"] = given["labels"].masked_fill(attended == 0, -100)
    elif "decoder_input_ids" in known:
        given["decoder_input_ids"] = integers(0, vocab, rows, length - 2)
    if "decoder_attention_mask" in known:
        side = given.get("decoder_input_ids", ids)
        given["decoder_attention_mask"] = torch.ones_like(side)
        given["decoder_attention_mask"][2, -2:] = 0
    if "global_attention_mask" in known:
        given["global_attention_mask"] = torch.zeros_like(ids)
        given["global_attention_mask"][..., 4] = 1
    if "bbox" in known:
        corner = integers(0, 8, *shape, 2)
        given["bbox"] = torch.cat((corner, corner + integers(0, 8, *shape, 2)), -1)
    if "xpath_tags_seq" in known:
        given |= {f"xpath_{kind}_seq": integers(0, 8, *shape, config.max_depth) for kind in ("tags", "subs")}
    if name.startswith("LayoutLMv3"):  # patches follow the text
        side = config.input_size
        given["pixel_values"] = torch.randn(rows, 3, side, side, generator=generator, dtype=dtype)
    if "entity_ids" in known:
        given |= _entities(name, config, shape, integers)
    if {"visual_feats", "visual_embeds"} & known.keys():
        given |= _regions(name, config, shape, given.get("labels"), generator, dtype)
    if sees:
        given |= _images(name, config, ids, generator, dtype)
    if name == "ChameleonForConditionalGeneration":  # it predicts no codes of images
        codes = [token for text, token in config.vocabulary_map.items() if text.startswith("IMG")]
        given["labels"] = given["labels"].masked_fill(torch.isin(given["labels"], torch.tensor(codes)), -100)
    if hears:
        given |= _sounds(config, given["input_ids"], generator, dtype)
    if "image_pixel_values" in known:
        given |= _images_and_sounds(config, ids, generator, dtype)
    return given


IMAGES_OF_ROWS = (1, 0, 2)
"""Number of images in each row of a batch of text and images."""
_TILES = {(16, 16): 4 + 2 * 3, (9, 30): 4 + 2 * 5, (30, 17): 4 + 4 * 3}
TILED: dict[str, dict[tuple[int, int], int]] = {
    **dict.fromkeys(("granite4_vision", "llava_next", "llava_next_video"), _TILES),
    **{kind: {(8, 8): 4, (4, 8): 2, (8, 4): 2} for kind in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
    # by the number of tiles
    "deepseek_ocr2": {(0, 0): 145, (1, 0): 145 + 144, (0, 1): 145},
    "step3p7": {(1, 0): 8, (2, 0): 12, (0, 0): 4},
    "llava_onevision": {(16, 16): 4 + 2 * 3, (20, 30): 4 + 1 * 3, (30, 30): 4 + 2 * 3},
}
"""Heights and widths of images, with their tokens, of model types that divide images into tiles of 4 patches, or that
take patches of all images as one row."""


def _images(name: str, config: Any, ids: Tensor, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return images, and the tokens with a placeholder for each of their features."""
    ids, token, side = ids.masked_fill(ids == config.image_token_id, 3), config.image_token_id, _TOWER["image_size"]
    each = {"florence2": 5, "emu3": 6, "hunyuan_vl": 8, "hy_v4_vl": 6}.get(config.model_type, 4)
    tokens = iter([*TILED[config.model_type].values()] if config.model_type in TILED else [each] * sum(IMAGES_OF_ROWS))
    around = getattr(config, "visual_indicator_token_ids", ())  # only beside images
    starts = [getattr(config, f"{kind}_start_token_id", None) for kind in ("audio", "vision")]
    among_sounds = starts[0] is not None  # its positions count the tokens before and after each item
    if config.model_type == "ernie4_5_vl_moe":  # older releases of transformers count them
        around = (config.image_start_token_id, config.image_end_token_id)
    for indicator in (*around, *(starts if among_sounds else ())):
        ids = ids.masked_fill(ids == indicator, 3)
    for row, images in enumerate(IMAGES_OF_ROWS):
        start = 4
        for count in islice(tokens, images):
            ids[row, start : start + count] = token
            if (before := getattr(config, "vision_start_token_id", None)) is not None:
                ids[row, start - 1] = before
            if around:
                ids[row, start - 1], ids[row, start + count] = around[0], around[1]
            start += count + 1 + among_sounds
    given = {"input_ids": ids}
    if "image_grid_thw" in (known := parameters_of_forward(name)):
        if "mm_token_type_ids" in known:
            given["mm_token_type_ids"] = (ids == token).long()
        if "moe_mm_token_type_ids" in known:
            given["moe_mm_token_type_ids"] = ((ids == token) | (ids == config.image_start_token_id)).long()
        if "image_merge_sizes" in known:
            given["image_merge_sizes"] = torch.full((sum(IMAGES_OF_ROWS),), 2)
        grids, patches = _patches(config.vision_config, generator, dtype)
        return {**given, "image_grid_thw": grids, "pixel_values": patches}
    if "target_sizes" in known:  # MiniCPM-V
        sizes = torch.tensor([*TILED[config.model_type]])
        pixels = torch.randn(1, 3, 4, 4 * int(sizes.prod(-1).sum()), generator=generator, dtype=dtype)
        types = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in known else {}
        return {**given, **types, "pixel_values": pixels, "target_sizes": sizes}
    if "pixel_values_local" in known:  # DeepSeek-OCR 2 and Step 3.7
        counts = torch.tensor([*TILED[config.model_type]])[:, 0]
        own, tiles = (torch.randn(n, 3, side, side, generator=generator, dtype=dtype) for n in (3, int(counts.sum())))
        return {**given, "pixel_values": own, "pixel_values_local": tiles, "num_local_patches": counts}
    if "image_token_pooling" in known:  # Molmo 2; each token pools the patches of a square, one of them three
        squares = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
        pooling = torch.cat([squares + 16 * image for image in range(sum(IMAGES_OF_ROWS))])
        pooling[5, 3] = -1
        given |= {"image_token_pooling": pooling, "mm_token_type_ids": (ids == token).long()}
        given["image_grids"] = torch.tensor(sum(IMAGES_OF_ROWS) * [[2, 2, 0, 0]])
        return {**given, "pixel_values": torch.randn(sum(IMAGES_OF_ROWS), 16, 48, generator=generator, dtype=dtype)}
    if config.model_type == "inkling_mm_model":  # a token for each patch of two frames
        patches = torch.randn(each * sum(IMAGES_OF_ROWS), 2, 2, 2, 3, generator=generator, dtype=dtype)
        return {**given, "pixel_values": patches}
    if config.model_type in TILED:
        sizes = torch.tensor([*TILED[config.model_type]])
        pixels = torch.randn(len(sizes), 5, 3, side, side, generator=generator, dtype=dtype)
        return {**given, "pixel_values": pixels, "image_sizes": sizes}
    pixels = torch.randn(sum(IMAGES_OF_ROWS), 3, side, side, generator=generator, dtype=dtype)
    if name.startswith("Mllama"):
        return {**given, **_tiles_of_rows(ids, side, generator, dtype)}
    if name.startswith(("GraniteDocling", "Idefics", "SmolVLM")):  # by row, padded to the most images of a row
        given["pixel_values"] = torch.zeros(len(IMAGES_OF_ROWS), max(IMAGES_OF_ROWS), *pixels.shape[1:], dtype=dtype)
        places = [(row, place) for row, images in enumerate(IMAGES_OF_ROWS) for place in range(images)]
        for (row, place), image in zip(places, pixels, strict=True):
            given["pixel_values"][row, place] = image
    else:
        given["pixel_values"] = pixels
    if name.startswith("GraniteDocling"):
        given["pixel_attention_mask"] = given["pixel_values"].flatten(2).any(-1)
    if "spatial_shapes" in known:  # LFM2-VL
        shapes = torch.tensor([[4, 4], [2, 8], [4, 4]])
        given |= {"spatial_shapes": shapes, "pixel_attention_mask": torch.ones(len(shapes), 16, dtype=torch.long)}
        given["pixel_values"] = torch.randn(len(shapes), 16, 48, generator=generator, dtype=dtype)
    if name.startswith("Fuyu"):  # by patch of each image
        given["pixel_values"] = torch.randn(len(pixels), 4, 48, generator=generator, dtype=dtype)
    if "pixel_mask" in known:  # Aria, without the last column of patches of an image
        given["pixel_mask"] = torch.ones(len(pixels), side, side, dtype=torch.long)
        given["pixel_mask"][1, :, -4:] = 0
    if "high_res_pixel_values" in known:
        given["high_res_pixel_values"] = torch.randn(len(pixels), 3, 24, 24, generator=generator, dtype=dtype)
    if "image_position_ids" in known:  # Gemma 4, by patch
        places = torch.arange(2 if "Unified" in name else 4)  # patches are not pooled
        given["pixel_values"] = torch.rand(len(pixels), len(places) ** 2, 48, generator=generator, dtype=dtype)
        given["image_position_ids"] = torch.cartesian_prod(places, places).flip(-1).repeat(len(pixels), 1, 1)
        given["mm_token_type_ids"] = (ids == token).long()
    if name.startswith(("Apertus1p5", "Emu3", "Mistral3", "LightOn")):
        given["image_sizes"] = torch.full((len(pixels), 2), side)
    if "token_type_ids" in parameters_of_forward(name):  # PaliGemma's mark its answers, Gemma 3's its images
        given["token_type_ids"] = ((ids == token) ^ name.startswith("PaliGemma")).long()
    return given


FRAMES = {
    **dict.fromkeys(("audioflamingo3_encoder", "qwen2_audio_encoder", "voxtral_encoder"), (16, 16, 12, 8)),
    **dict.fromkeys(("moss_transcribe_diarize_audio", "voxtral_realtime_encoder"), (16, 16, 12, 8)),
    **dict.fromkeys(("fun_asr_nano_encoder", "inkling_audio"), (4, 4, 3, 2)),
    "wavtokenizer_encoder": (16, 16, 11, 8),
    "glmasr_encoder": (32, 32, 28, 20),
    "omniasr_audio": (50, 50, 40, 30),
    "vibevoice_acoustic_tokenizer_encoder": (16, 16, 12, 8),
    **dict.fromkeys(("qwen3_asr_encoder", "qwen3_omni_moe_audio_encoder"), (100, 32, 20, 16)),
    "qwen2_5_omni_audio_encoder": (16, 16, 12, 8),
}
"""By encoder of sounds: the frames of a batch, and of its sounds without padding. These have 4, 3 and 2 tokens."""


def _features(encoder: Any, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return three sounds for an encoder, with a mask if it reads one."""
    kind = encoder.model_type
    if kind.startswith("granite"):  # marks the features of the projector, of which each window of four frames has two
        kept = torch.arange(6) < torch.tensor([[4], [3], [2]])
        sounds = torch.randn(3, 10, encoder.input_dim, generator=generator, dtype=dtype)
        return {"input_features": sounds, "input_features_mask": kept}
    frames, *lengths = FRAMES[kind]
    mask = (torch.arange(frames) < torch.tensor(lengths)[:, None]).long()
    if kind == "inkling_audio":  # tokens of each frequency
        codes = torch.randint(encoder.mel_vocab_size, (3, frames, encoder.n_mel_bins), generator=generator)
        return {"audio_input_ids": codes, "audio_input_ids_mask": mask}
    if kind in ("omniasr_audio", "vibevoice_acoustic_tokenizer_encoder", "wavtokenizer_encoder"):
        return {"input_values": torch.randn(3, 1, frames, generator=generator, dtype=dtype), "padding_mask": mask}
    if kind == "fun_asr_nano_encoder":
        sounds = torch.randn(3, frames, encoder.input_size, generator=generator, dtype=dtype)
        return {"input_features": sounds, "input_features_mask": mask}
    sounds = torch.randn(3, encoder.num_mel_bins, frames, generator=generator, dtype=dtype)
    if kind.startswith("voxtral"):  # reads padding
        return {"input_features": sounds}
    named = kind in ("qwen2_5_omni_audio_encoder", "qwen2_audio_encoder", "qwen3_omni_moe_audio_encoder")
    name = "feature_attention_mask" if named else "input_features_mask"
    return {"input_features": sounds, name: mask}


def _sounds(config: Any, ids: Tensor, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return sounds, and the tokens with a placeholder for each of their features."""
    if config.model_type == "voxtral_realtime":  # each token has its part of a sound
        shape = (len(ids), config.audio_config.num_mel_bins, ids.shape[1] * config.audio_length_per_tok)
        return {"input_features": torch.randn(shape, generator=generator, dtype=dtype)}
    ids, token = ids.masked_fill(ids == config.audio_token_id, 3), config.audio_token_id
    counts = iter((4, 4, 4) if config.model_type == "voxtral" else (4, 3, 2))
    before = getattr(config, "audio_start_token_id", None)
    for row, sounds in enumerate(IMAGES_OF_ROWS):
        images = (ids[row] == getattr(config, "image_token_id", -1)).nonzero()
        start = int(images.max()) + 3 if len(images) else 4
        for count in islice(counts, sounds):
            ids[row, start : start + count] = token
            if before is not None:
                ids[row, start - 1] = before
            start += count + 1 + (before is not None)
    parts = ("encoder_config", "audio_config", "acoustic_tokenizer_encoder_config")
    encoder = next(getattr(config, part) for part in parts if hasattr(config, part))
    return {"input_ids": ids, **_features(encoder, generator, dtype)}


def _images_and_sounds(config: Any, ids: Tensor, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return images of one tile, and sounds, of Phi-4 Multimodal, and the tokens with their placeholders."""
    image, sound = config.vision_config.image_token_id, config.audio_config.audio_token_id
    ids, lengths = ids.masked_fill((ids == image) | (ids == sound), 3), iter((4, 3, 2))
    for row, count in enumerate(IMAGES_OF_ROWS):
        start = 4
        for token, size in (*[(image, 5)] * count, *[(sound, each) for each in islice(lengths, count)]):
            ids[row, start : start + size] = token
            start += size + 1
    count, side = sum(IMAGES_OF_ROWS), config.vision_config.image_size
    return {
        "input_ids": ids,
        "image_pixel_values": torch.randn(count, 2, 3, side, side, generator=generator, dtype=dtype),
        "image_sizes": torch.full((count, 2), side),
        "image_attention_mask": torch.ones(count, 2, 2, 2, dtype=torch.long),
        "audio_input_features": torch.randn(count, 16, 8, generator=generator, dtype=dtype),
        "audio_embed_sizes": torch.tensor([4, 3, 2]),
        "audio_attention_mask": (torch.arange(16) < torch.tensor([[16], [12], [8]])).long(),
    }


def _tiles_of_rows(ids: Tensor, side: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the images of each row, each of one to four tiles. Tokens see images from the fifth token on."""
    ratios, tiles = torch.tensor([[2, 0], [0, 0], [1, 8]]), torch.tensor([[2, 0], [0, 0], [1, 4]])
    shown = (torch.arange(4) < tiles[..., None]).long()
    seen = shown[:, None].repeat(1, ids.shape[1], 1, 1)
    seen[:, :4] = 0
    shown[..., 0] = 1  # as transformers does for rows without images
    pixels = torch.randn(*tiles.shape, 4, 3, side, side, generator=generator, dtype=dtype)
    given = {"pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": shown}
    return {**given, "cross_attention_mask": seen}


def _patches(config: Any, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the patches of all images as one row, and the grid of each image."""
    if config.model_type == "inkling2_vision":  # of squares of patches
        grids, side = torch.tensor(sum(IMAGES_OF_ROWS) * [[1, 2, 2]]), config.spatial_merge_size * config.patch_size
        return grids, torch.randn(len(grids) * 4, side, side, 3, generator=generator, dtype=dtype)
    grids, side = torch.tensor(sum(IMAGES_OF_ROWS) * [[1, 4, 4]]), config.patch_size
    shape: tuple[int, ...] = (3, side, side)
    flat = ("temporal_patch_size", "temporal_merge_size", "max_image_size", "num_patches", "patch_temporal")
    if any(hasattr(config, name) for name in flat):
        frames = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", 1))
        shape = (3 * frames * side**2,)
    return grids, torch.randn(len(grids) * 16, *shape, generator=generator, dtype=dtype)


def _captions(name: str, config: Any, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return an image, or a video, for each row, a text with left padding, and labels."""
    rows, length, known = 3, 12, parameters_of_forward(name)
    given: dict[str, Tensor] = {}

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, :3] = 0
    if "flattened_patches" in known:  # each with its row and column
        places = torch.cartesian_prod(torch.arange(3), torch.arange(4)).repeat(rows, 1, 1) + 1
        patches = torch.randn(rows, length, 12, generator=generator, dtype=dtype)
        given = {"flattened_patches": torch.cat((places.to(dtype), patches), -1), "attention_mask": mask.flip(-1)}
        if "input_ids" not in known:  # Pix2Struct
            if "labels" in known:
                given["labels"] = integers(3, 101, rows, 7)
                given["labels"][2, -2:] = -100
            return given
    else:
        frames = (2,) if config.model_type in ("idefics", "instructblipvideo") else ()
        given = {"pixel_values": torch.randn(rows, *frames, 3, 16, 16, generator=generator, dtype=dtype)}
    ids = integers(3, 97, rows, length)
    if "image_embeds_position_mask" in known:  # Kosmos
        given["image_embeds_position_mask"] = torch.zeros_like(ids)
        given["image_embeds_position_mask"][:, 4 : 4 + config.latent_query_num] = 1
    if "image_attention_mask" in known:  # IDEFICS, with tokens that see neither image
        given["image_attention_mask"] = torch.ones(rows, length, 2, dtype=torch.long)
        given["image_attention_mask"][:, :5] = given["image_attention_mask"][1, :, 1] = 0
    if "bbox" in known:
        given["bbox"] = torch.rand(rows, length, 4, generator=generator, dtype=dtype)
    ids[:, 0] = 1  # BLIP overwrites the first token
    if hasattr(config, "num_query_tokens"):
        token = getattr(config, "image_token_index", None) or config.video_token_index
        ids[:, 4 : 4 + config.num_query_tokens * (2 if frames else 1)] = token
    given |= {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    given["input_ids"][:, 0] = 1
    if "qformer_input_ids" in known:
        given["qformer_input_ids"] = integers(3, 31, rows, 5)
        given["qformer_attention_mask"] = (torch.arange(5) < torch.tensor([[5], [3], [4]])).long()
    if "labels" in known:
        given["labels"] = ids.masked_fill((mask == 0) | (ids > 97), -100)
    elif "decoder_input_ids" in known:
        given["decoder_input_ids"] = integers(3, 97, rows, 7)
    return given


def text_only(config: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of text and images, or of text and sounds, without them."""
    ids = batch["input_ids"]
    for token in (getattr(config, name, -1) for name in ("image_token_id", "audio_token_id")):
        ids = ids.masked_fill(ids == token, 3)
    kept = {key: value for key, value in batch.items() if key not in (*IMAGES, *SOUNDS)}
    if "image_token_pooling" in batch:  # Molmo 2 needs the kinds of tokens in training
        kept["mm_token_type_ids"] = torch.zeros_like(ids)
    return {**kept, "input_ids": ids}


def _documents(name: str, config: Any, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return retrieved documents for each row, with left padding, and their scores."""
    rows, vocab = 3, config.generator.vocab_size
    size = (rows * config.n_docs, 9)
    ids, mask = torch.randint(3, vocab, size, generator=generator), torch.ones(size, dtype=torch.long)
    ids[1, :3], mask[1, :3] = config.generator.pad_token_id, 0
    words = torch.randint(3, vocab, (rows, 7), generator=generator)
    words[2, -2:] = config.generator.pad_token_id
    scores = torch.randn(rows, config.n_docs, generator=generator, dtype=dtype)
    given = {"context_input_ids": ids, "context_attention_mask": mask, "doc_scores": scores}
    if name not in lm_heads("rag"):
        return {**given, "decoder_input_ids": words}
    return {**given, "labels": words, "reduce_loss": True}  # type: ignore[dict-item]


def _entities(name: str, config: PreTrainedConfig, shape: tuple[int, ...], integers: Any) -> dict[str, Tensor]:
    """Return two entities of up to three tokens for each row."""
    shape = (*shape[:-1], 2)
    given = {"entity_ids": integers(1, config.entity_vocab_size, *shape)}
    given |= {"entity_token_type_ids": integers(0, 2, *shape), "entity_position_ids": integers(3, 9, *shape, 3)}
    given["entity_attention_mask"] = torch.ones_like(given["entity_ids"])
    given["entity_position_ids"][0, ..., 2], given["entity_attention_mask"][1, ..., 1] = -1, 0
    if name.endswith("MaskedLM"):
        given["entity_labels"] = integers(0, config.entity_vocab_size, *shape)
    if name.endswith("EntitySpanClassification"):
        given |= {f"entity_{end}_positions": integers(0, 9, *shape) for end in ("start", "end")}
        given["labels"] = integers(0, 2, *shape)
    return given


def _regions(
    name: str,
    config: PreTrainedConfig,
    shape: tuple[int, ...],
    labels: Tensor | None,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return four image regions in each row, one of them masked, and the labels that they change."""
    rows, length, size = shape[0], shape[-1], (*shape[:-1], 4)

    def floats(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype)

    mask = torch.ones(size, dtype=torch.long)
    mask[1, ..., 3] = 0
    if name.startswith("Lxmert"):
        given = {"visual_feats": floats(*size, config.visual_feat_dim), "visual_pos": floats(*size, 4)}
        return {**given, "visual_attention_mask": mask}
    given = {"visual_embeds": floats(*size, config.visual_embedding_dim), "visual_attention_mask": mask}
    if name.endswith("PreTraining") and labels is not None:
        given["labels"] = torch.cat((labels, torch.full(size, -100)), -1)
    elif name.endswith("QuestionAnswering"):
        given["labels"] = floats(rows, config.num_labels).softmax(-1)
    elif name.endswith("Alignment"):
        given["visual_attention_mask"] = torch.ones_like(mask)  # masked regions have the smallest number as logit
        given["region_to_phrase_position"] = torch.randint(-1, length, (rows, 3), generator=generator)
        given["labels"] = floats(rows, 3, 4).softmax(-1)
    return given


def ignored_label(name: str, config: Any) -> int:
    """Return the label that a loss ignores. Losses of Parakeet's relatives ignore -100 since transformers 5.21."""
    return int(config.pad_token_id) if name.startswith(("GraniteSpeech5", "Lasr", "Parakeet")) else -100


def _signals(name: str, config: Any, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `batch` of a class for images or audio: right-padded audio, and labels of its kind."""
    known, rows, positions = parameters_of_forward(name), 3, 19
    if config.model_type in (*FRAMES, "granite_speech_encoder", "granite_speech_plus_encoder"):
        features = _features(config, generator, dtype)
        if "hidden_states" in known:
            return {"hidden_states": features["input_features"]}
        return {key: value for key, value in features.items() if key in known}
    channels = (1,) if "padding_mask" in known else ()
    shapes: dict[str, tuple[int, ...]] = {"input_values": (rows, *channels, 200), "input_ids": (rows, 9)}
    if name.startswith("AST"):  # takes spectrograms
        shapes["input_values"] = (rows, config.max_length, config.num_mel_bins)
    if name.startswith("Moonshine"):  # nine positions, so that the mask hides some
        shapes["input_values"] = (rows, 4000)
    if "pixel_values" in known:
        images = getattr(config, "vision_config", getattr(config, "encoder", config))
        sizes = (getattr(images, key, 64) for key in ("image_size", "patch_size"))
        side, patch = (each if isinstance(each, int) else each[0] for each in sizes)
        shapes["pixel_values"] = (rows, 3, side, side)
        positions = (side // patch) ** 2
        if isinstance(images.to_dict().get("image_size"), list):  # YOLOS
            shapes["pixel_values"] = (rows, 3, *images.image_size)
        if hasattr(images, "tubelet_size"):  # VideoMAE
            shapes["pixel_values"] = (rows, images.num_frames, 3, side, side)
            positions *= images.num_frames // images.tubelet_size
        if "spatial_shapes" in known:  # SigLIP 2
            shapes["pixel_values"] = (rows, 8, 3 * patch**2)
    if "input_features" in known:
        positions = 29
        whisper = name.startswith("Whisper")  # takes audio of a fixed length, with features before frames
        frames = 2 * getattr(config, "max_source_positions", 0)
        shapes["input_features"] = (rows, config.num_mel_bins, frames) if whisper else (rows, 29, 5)
        if name.startswith(("Canary", "CohereAsr", "GraniteSpeech5", "Lasr", "Parakeet")):  # a position for each label
            encoder = getattr(config, "encoder_config", config)
            width = encoder.num_mel_bins * (4 if name.startswith("Granite") else 1)
            shapes["input_features"] = (rows, 61, width)
    if "pixel_position_ids" in known:
        places = torch.cartesian_prod(*2 * [torch.arange(4)]).flip(-1).repeat(rows, 1, 1)
        return {
            "pixel_values": torch.rand(rows, 16, 48, generator=generator, dtype=dtype),
            "pixel_position_ids": places,
        }
    if "aspect_ratio_ids" in known:
        tiles = _tiles_of_rows(torch.zeros(rows, 9), side, generator, dtype)
        return {key: value for key, value in tiles.items() if key in known}
    if "image_grid_thw" in known:
        grids, patches = _patches(config, generator, dtype)
        return {"pixel_values": patches, "image_grid_thw": grids}
    if "grid_thw" in known:
        grids, patches = _patches(config, generator, dtype)
        if "pixel_values" in known:
            return {"pixel_values": patches[None] if name.startswith("Paddle") else patches, "grid_thw": grids}
        return {"hidden_states": patches, "grid_thw": grids}
    if name.startswith("Molmo2"):
        return {"pixel_values": torch.randn(rows, 16, 48, generator=generator, dtype=dtype)}
    main = original(name).main_input_name if "input_ids" in known else next(key for key in shapes if key in known)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    given = {main: torch.randn(shapes[main], generator=generator, dtype=dtype)}
    if main == "input_ids":  # and images
        given = {main: integers(3, 101, *shapes[main])}
        given[main][:, -2] = 1
        if "pixel_values" in known:
            given |= {"pixel_values": torch.randn(shapes["pixel_values"], generator=generator, dtype=dtype)}
            if "return_loss" in known:
                given["return_loss"] = True  # type: ignore[assignment]
            else:  # two texts for each image
                given[main] = torch.cat((given[main], integers(3, 101, *shapes[main])))
    if "attention_mask" in known and main != "pixel_values" and not name.startswith(("AST", "Whisper")):
        given["attention_mask"] = torch.ones(len(given[main]), shapes[main][1], dtype=torch.long)
        given["attention_mask"][1, -shapes[main][1] // 4 :] = 0
    if "padding_mask" in known:
        given["padding_mask"] = torch.ones(rows, 200, dtype=torch.long)
        given["padding_mask"][1, -50:] = 0
    if name.endswith(("ForConditionalGeneration", "ForCTC", "EncoderDecoderModel", "ToText", "ToSpeech")):
        vocab = getattr(config, "decoder", config).vocab_size
        given["labels"] = integers(3, vocab, rows, 7)
        given["labels"][2, -2:] = ignored_label(name, config)
    elif name.endswith("ForAudioFrameClassification"):
        given["labels"] = torch.nn.functional.one_hot(integers(0, 2, rows, positions), 2)
    elif "sampled_negative_indices" in known:
        given["mask_time_indices"] = integers(0, 2, rows, positions).bool()
        given["sampled_negative_indices"] = integers(0, rows * positions, rows, positions, config.num_negatives)
    elif name.endswith("ForSemanticSegmentation"):
        given["labels"] = integers(0, 2, rows, *shapes[main][-2:])
        given["labels"][0, :3] = config.semantic_loss_ignore_index
    elif "labels" in known and not (
        name.startswith("RTDetr") or name.endswith(("ForObjectDetection", "Segmentation", "ForDepthEstimation"))
    ):
        # the first two need another package, and the last is not trained
        given["labels"] = integers(0, 2, rows)
    elif "decoder_input_ids" in known:
        given["decoder_input_ids"] = integers(0, config.vocab_size, rows, 7)
    if "inputs" in known:
        given["inputs"] = given.pop("input_values")
    if "pixel_mask" in known:
        given["pixel_mask"] = torch.ones(shapes[main][0], *shapes[main][2:], dtype=torch.long)
        given["pixel_mask"][1, :, -40:] = 0
    if "pixel_mask" in known and "input_ids" in known:  # Grounding DINO, with two texts for each image
        given |= {"input_ids": integers(3, 100, rows, 9), "attention_mask": torch.ones(rows, 9, dtype=torch.long)}
        given["input_ids"][:, 0], given["input_ids"][:, 4], given["input_ids"][:, -3] = 101, 102, 102
        given["input_ids"][2, -2:], given["attention_mask"][2, -2:] = 0, 0
    if name.endswith("ForMaskedImageModeling"):
        given["bool_masked_pos"] = integers(0, 2, rows, positions).bool()
    if name.startswith("VideoMAE") and "bool_masked_pos" in known:  # as many patches of each video
        order = torch.rand(rows, positions, generator=generator).argsort(-1)
        given["bool_masked_pos"] = order < positions // 2
    if "noise" in known:
        given["noise"] = torch.rand(rows, positions, generator=generator, dtype=dtype)
    if "input_points" in known:  # two objects of an image, each with three points, one of them padding
        given["input_points"] = torch.rand(rows, 2, 3, 2, generator=generator, dtype=dtype) * shapes[main][-1]
        given["input_labels"] = torch.tensor([[1, 0, -1], [1, 1, -10]]).repeat(rows, 1, 1)
    if "spatial_shapes" in known:
        given["spatial_shapes"] = torch.tensor([[2, 4], [2, 3], [1, 5]])
        given["pixel_attention_mask"] = (torch.arange(8) < given["spatial_shapes"].prod(-1, keepdim=True)).long()
    return given
