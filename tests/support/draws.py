"""Random configurations for every model type, so that tests cover more than the configurations written by hand.

Sizes that do not divide, three to six heads, fewer key-value heads, and the options that the configuration of a type
knows: biases, tied weights, norms, position embeddings, windows, activations, attention implementations, losses. An
option that the class of transformers cannot run is left out, and the draw says so.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from support import zoo

Values = dict[str, Any]

HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
    *("num_encoder_attention_heads", "num_decoder_attention_heads"),
)
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
MLP_WIDTHS = (
    *("intermediate_size", "n_inner", "dff", "d_ff", "d_inner", "ffn_dim", "hidden_dim", "feed_forward_size"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)
DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "l_layers", "r_layers", "x_layers"),
)
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
RECURRENT = {"linear_attention", "conv"}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")

NO_OPTIONS = {
    # options that change the outputs, the execution or the kind of model
    *("two_stage", "with_box_refine", "two_stage_bbox_embed_share"),  # need another option
    "use_decoder_only_language_model",  # follows from the text model
    "moe_apply_router_weight_on_input",  # transformers refuses it
    "output_router_logits",  # pipeline stages refuse its auxiliary loss; separate tests cover it
    *("return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_cache", "gradient_checkpointing"),
    *("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "use_bfloat16", "chunk_size"),
    *("chunk_size_feed_forward", "is_composition", "init_std", "use_weighted_layer_sum", "apply_spec_augment"),
    # heads that another class has; a second loss
    *("add_pooling_layer", "auxiliary_loss", "use_timm_backbone", "use_pretrained_backbone", "add_fpn"),
    # options for training from scratch
    # options that another option implies, tables of a model type, and keys that are no model options
    *("is_gated_act", "early_stopping", "use_intermediate_ffn_before_adapter"),
    "is_hybrid",  # DPT with a convolutional network as embedding
    "legacy",  # DeBERTa: the head applies the word embedding, which is sharded
    *("reduce_loss", "do_deduplication", "exclude_bos_score", "do_marginalize", "output_retrieved", "dummy"),
    *("sparse", "causal", "asm", "quant_mode", "force_dequantize", "separate_cls", "truncate_seq"),
}


@dataclass
class Draw:
    """A randomly drawn configuration.

    Attributes:
        text: description of the draw, shown beside a failure.
        options: the drawn options.
    """

    config: PreTrainedConfig
    text: str
    options: Values = field(default_factory=dict)


def _sizes(values: Values, model_type: str, draw: random.Random) -> None:
    """Replace the sizes of a compact configuration by random, mutually consistent sizes."""
    heads = [key for key in HEADS if key in values]
    for key in heads:
        values[key] = draw.randint(3, 6)
    for key in KEY_VALUE_HEADS:
        if key in values:
            count = values[heads[0]] if heads else 6  # JetMoE's configuration has no number of query heads
            values[key] = draw.choice([n for n in range(1, count + 1) if count % n == 0])
    for key in MLP_WIDTHS:
        if key in values:
            values[key] = draw.randint(17, 45)
    if "head_dim" in values:
        values["head_dim"] = draw.choice((4, 6, 8))
    for key in WIDTHS:
        if key in values:
            # an explicit head width allows any hidden size that is a multiple of the number of heads
            values[key] = draw.choice((4, 6, 8)) * math.lcm(*(values[head] for head in heads)) if heads else values[key]
    if "d_kv" in values:
        values["d_kv"] = draw.randint(3, 7)
    for key in ("embedding_size", "word_embed_proj_dim"):
        if key in values:
            values[key] = draw.randint(5, 25)
    depth = draw.randint(2, 3)
    for key in DEPTHS:
        if key in values:
            values[key] = depth if key in ("num_hidden_layers", "num_layers") else draw.randint(2, 3)
    for key in ("layer_types", "mlp_layer_types", "layer_rope_theta"):
        if key in values:
            kinds = sorted(set(values[key]))
            values[key] = [draw.choice(kinds) for _ in range(depth)]
            if not set(values[key]) - RECURRENT:  # transformers' cache counts its tokens in a block of attention
                values[key][draw.randrange(depth)] = draw.choice([kind for kind in kinds if kind not in RECURRENT])
    if values.get("sliding_window"):
        values["sliding_window"] = draw.randint(2, 7)
    if model_type in FITTING:
        FITTING[model_type](values, draw)


def _fit_laguna(values: Values, draw: random.Random) -> None:
    own = [n for n in range(3, 7) if n % values["num_key_value_heads"] == 0]
    values["num_attention_heads_per_layer"] = [draw.choice(own) for _ in range(values["num_hidden_layers"])]


def _fit_gpt_neo(values: Values, draw: random.Random) -> None:
    values["num_layers"] = 2 * draw.randint(1, 2)
    values["attention_types"] = [[["global", "local"], values["num_layers"] // 2]]
    values["window_size"] = draw.randint(2, 6)


def _fit_latent_attention(values: Values, draw: random.Random) -> None:
    values["num_key_value_heads"] = values["num_attention_heads"]
    values["kv_lora_rank"], values["qk_nope_head_dim"] = 2 * draw.randint(2, 5), 2 * draw.randint(1, 3)
    values["q_lora_rank"], values["v_head_dim"] = draw.choice((None, 9)), draw.randint(3, 5)


def _fit_low_rank_query(values: Values, draw: random.Random) -> None:
    _fit_latent_attention(values, draw)
    values["q_lora_rank"] = 9


def _fit_indexers(values: Values, draw: random.Random) -> None:
    _fit_low_rank_query(values, draw)
    if "indexer_types" in values:  # the first block has no choices to share, and two stages need two choices
        between = range(values["num_hidden_layers"] - 2)
        values["indexer_types"] = ["full", *(draw.choice(values["indexer_types"]) for _ in between), "full"]


def _fit_deepseek_v4(values: Values, draw: random.Random) -> None:
    heads = values["num_attention_heads"]
    values["o_groups"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    values["o_lora_rank"], values["hc_mult"] = draw.randint(3, 7), draw.randint(1, 4)
    values["compress_rate_csa"], values["compress_rate_hca"] = draw.randint(1, 4), draw.randint(1, 4)
    values["index_topk"], values["index_head_dim"] = draw.randint(1, 4), 2 * draw.randint(2, 4)


def _fit_dots3_note(values: Values, draw: random.Random) -> None:
    _fit_low_rank_query(values, draw)
    values["swa_num_attention_heads"] = values["swa_num_key_value_heads"] = draw.randint(3, 6)
    values["swa_kv_lora_rank"], values["swa_v_head_dim"] = draw.randint(5, 9), draw.randint(3, 5)


def _fit_diffllama(values: Values, draw: random.Random) -> None:
    heads = values["num_attention_heads"] = draw.choice((4, 6))  # keys and values come in pairs of heads
    values["num_key_value_heads"], values["hidden_size"] = draw.choice((2, heads)), heads * draw.choice((4, 6, 8))


def _fit_inkling(values: Values, draw: random.Random) -> None:
    heads = values["swa_num_attention_heads"] = draw.randint(3, 6)
    values["swa_num_key_value_heads"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    values["swa_head_dim"], values["sliding_window_size"] = draw.choice((4, 6, 8)), draw.randint(2, 7)
    values["d_rel"], values["rel_extent"] = draw.randint(2, 4), draw.randint(2, 9)
    values["conv_kernel_size"] = draw.randint(2, 4)
    for key in ("n_shared_experts", "n_layers_per_attn_res_block"):
        if key in values:
            values[key] = draw.randint(1, 3)


def _fit_inkling2_loop(values: Values, draw: random.Random) -> None:
    _fit_inkling(values, draw)
    values["n_layers_per_attn_res_block"] = values["loop_layer_index_start"] = 1
    values["loop_layer_index_end"] = draw.randint(2, values["num_hidden_layers"])
    values["loop_num_passes"], values["loop_gate_rank"] = draw.randint(1, 3), draw.randint(2, 6)


def _fit_inkling_vision(values: Values, draw: random.Random) -> None:
    values["num_hidden_layers"] = draw.randint(3, 4)  # fewer need scipy


def _fit_step3p7(values: Values, draw: random.Random) -> None:
    count = values["num_key_value_heads"]
    values["num_sliding_attention_heads"] = draw.choice([n for n in range(3, 7) if n % count == 0])
    values["share_expert_dim"] = draw.randint(7, 15)


def _fit_apertus1p5(values: Values, draw: random.Random) -> None:
    values["output_vocab_size"] = draw.randint(30, 61)


def _fit_dory(values: Values, draw: random.Random) -> None:
    depth = values["num_hidden_layers"] = len(values["layer_types"])
    values["n_input_layers"] = draw.randint(0, depth - 1)
    values["n_output_layers"] = draw.randint(0, depth - 1 - values["n_input_layers"])
    values["n_recurrent_loops"] = draw.randint(1, 3)
    values["recurrent_kv_cache_mode"] = draw.choice(("per_loop", "last_loop"))


def _fit_omniasr(values: Values, draw: random.Random) -> None:
    values["num_conv_pos_embeddings"], values["num_conv_pos_embedding_groups"] = 2 * draw.randint(1, 3), 2


def _fit_gptj(values: Values, draw: random.Random) -> None:
    values["rotary_dim"] = draw.choice(range(2, values["n_embd"] // values["n_head"] + 1, 2))


def _fit_codegen(values: Values, draw: random.Random) -> None:
    values["n_head"] = draw.choice((4, 8, 12))  # the projection has four parts
    values["n_embd"] = values["n_head"] * draw.choice((4, 6))
    _fit_gptj(values, draw)


def _fit_convbert(values: Values, draw: random.Random) -> None:
    values["num_attention_heads"] = draw.choice((4, 6))  # half of the heads convolve
    values["hidden_size"] = values["num_attention_heads"] * draw.choice((4, 6))


def _fit_minimax(values: Values, draw: random.Random) -> None:
    values["block_size"] = draw.randint(2, 5)


def _fit_minimax_m3(values: Values, draw: random.Random) -> None:
    values["index_n_heads"] = values["num_key_value_heads"]
    values["index_block_size"], values["index_topk_blocks"] = draw.randint(1, 3), draw.randint(1, 3)


def _fit_mobilebert(values: Values, draw: random.Random) -> None:
    values["intra_bottleneck_size"] = values["num_attention_heads"] * draw.choice((3, 4, 5))
    values["num_feedforward_networks"] = draw.randint(1, 3)


def _fit_squeezebert(values: Values, draw: random.Random) -> None:
    values["num_attention_heads"], values["intermediate_size"] = draw.choice((3, 4, 5, 6)), 4 * draw.randint(5, 10)
    values["hidden_size"] = values["num_attention_heads"] * draw.choice((4, 8))  # four groups of convolutions
    values["embedding_size"] = values["hidden_size"]


def _fit_funnel(values: Values, draw: random.Random) -> None:
    values["block_sizes"] = [draw.randint(1, 2) for _ in range(2)]
    values["d_model"], values["d_head"] = 2 * draw.randint(9, 14), 2 * draw.randint(2, 4)


def _fit_reformer(values: Values, draw: random.Random) -> None:
    values["num_attention_heads"] = 3  # with as many heads as chunk positions, transformers cannot generate
    values["attn_layers"] = [draw.choice(("local", "lsh")) for _ in range(draw.randint(2, 3))]
    if values.get("axial_pos_embds", True):
        values["hidden_size"], first = 24, draw.randint(6, 14)
        values["axial_pos_embds_dim"] = [first, 24 - first]


def _fit_wavlm(values: Values, draw: random.Random) -> None:
    _fit_wav2vec2(values, draw)
    values["num_buckets"], values["max_bucket_distance"] = 4 * draw.randint(2, 4), draw.randint(9, 30)


def _fit_windows(values: Values, draw: random.Random) -> None:
    heads = values["num_heads"] = [draw.randint(3, 6) for _ in range(draw.randint(1, 3))]
    values["depths"], values["window_size"] = [draw.randint(1, 2) for _ in heads], draw.randint(1, 4)
    values["embed_dim"] = math.lcm(*heads) * (1 if math.lcm(*heads) > 12 else draw.randint(1, 3))
    values["image_size"] = 32 if len(heads) > 2 else draw.choice((24, 32))
    values["encoder_stride"] = 4 * 2 ** (len(heads) - 1)


def _fit_hiera(values: Values, draw: random.Random) -> None:
    values["embed_dim"], values["num_heads"] = 6, [draw.choice((1, 2, 3)), draw.choice((3, 4)), draw.choice((4, 6))]
    values["depths"] = [draw.randint(1, 2) for _ in range(3)]


def _fit_florence(values: Values, draw: random.Random) -> None:
    values["num_heads"], values["num_groups"] = ([draw.randint(3, 6) for _ in range(2)] for _ in range(2))
    pairs = zip(values["num_heads"], values["num_groups"], strict=True)
    values["embed_dim"] = [math.lcm(*pair) * (1 if math.lcm(*pair) > 12 else 2) for pair in pairs]


def _fit_kosmos(values: Values, draw: random.Random) -> None:
    values["embed_dim"], values["layers"] = values["attention_heads"] * draw.choice((4, 6, 8)), draw.randint(2, 3)


def _fit_idefics_vision(values: Values, draw: random.Random) -> None:
    values["embed_dim"] = values["num_attention_heads"] * draw.choice((4, 6, 8))


def _fit_phi4_audio(values: Values, draw: random.Random) -> None:
    values["ext_pw_out_channel"] = values["depthwise_separable_out_channel"] = values["hidden_size"]


def _fit_cvt(values: Values, draw: random.Random) -> None:
    values["num_heads"] = [draw.choice((1, 2)), draw.randint(3, 4), draw.randint(3, 6)]
    values["embed_dim"] = [heads * draw.randint(2, 4) for heads in values["num_heads"]]
    values["depth"] = [draw.randint(1, 2), 2, 3]  # transformers needs a block more than the number of the stage


def _fit_convolutions(values: Values, draw: random.Random) -> None:
    values["num_stages"] = draw.randint(1, 3)
    for key, least, most in (("depths", 1, 2), ("hidden_sizes", 5, 11)):
        values[key] = [draw.randint(least, most) for _ in range(values["num_stages"])]


def _fit_mobile_blocks(values: Values, draw: random.Random) -> None:
    values["in_channels"], values["out_channels"] = [32, 8], [8, draw.choice((8, 16))]
    values["expand_ratios"] = [draw.randint(1, 4) for _ in range(2)]
    values["num_block_repeats"], values["hidden_dim"] = [draw.randint(1, 2) for _ in range(2)], 1280


def _fit_mobilevit(values: Values, draw: random.Random) -> None:
    values["hidden_sizes"] = [values["num_attention_heads"] * draw.randint(3, 6) for _ in range(3)]
    values["neck_hidden_sizes"] = [draw.randint(5, 11) for _ in range(7)]


def _fit_mobilevitv2(values: Values, draw: random.Random) -> None:
    values["n_attn_blocks"] = [draw.randint(1, 2) for _ in range(3)]
    values["width_multiplier"] = draw.choice((0.2, 0.25))


def _fit_pooling(values: Values, draw: random.Random) -> None:
    values["depths"] = [draw.randint(1, 2) for _ in range(2)]
    values["hidden_sizes"] = [draw.randint(5, 11) for _ in range(2)]


def _fit_residual(values: Values, draw: random.Random) -> None:
    values["depths"] = [draw.randint(1, 2) for _ in range(2)]
    values["hidden_sizes"] = [8 * draw.randint(2, 4) for _ in range(2)]  # divided by four inside, and into groups


def _fit_swiftformer(values: Values, draw: random.Random) -> None:
    values["depths"], values["embed_dims"] = [2, 1, draw.randint(1, 2)], [draw.randint(5, 11) for _ in range(3)]


def _fit_segformer(values: Values, draw: random.Random) -> None:
    count = values["num_encoder_blocks"] = draw.randint(1, 3)
    heads = values["num_attention_heads"] = [draw.randint(1, 4) for _ in range(count)]
    values["hidden_sizes"] = [each * draw.randint(2, 5) for each in heads]
    values["sr_ratios"] = [draw.choice((1, 2)) for _ in heads]
    for key, least, most in (("depths", 1, 2), ("mlp_ratios", 1, 4)):
        values[key] = [draw.randint(least, most) for _ in heads]
    values["patch_sizes"], values["strides"] = [3 for _ in heads], [2 for _ in heads]
    if "sequence_reduction_ratios" in values:  # PVT
        values["sequence_reduction_ratios"] = values.pop("sr_ratios")
        values["patch_sizes"] = values["strides"] = [4, *(2 for _ in heads[1:])]


def _fit_data2vec_vision(values: Values, draw: random.Random) -> None:
    values["num_hidden_layers"] = 3  # its segmentation reads four hidden states
    values["auxiliary_channels"] = draw.randint(3, 7)


def _fit_dinov3(values: Values, draw: random.Random) -> None:
    # a quarter of a head for each coordinate
    values["hidden_size"] = values["num_attention_heads"] * draw.choice((4, 8))
    values["num_register_tokens"] = draw.randint(0, 3)


def _fit_masked(values: Values, draw: random.Random) -> None:
    heads = values["decoder_num_attention_heads"] = draw.randint(1, 4)
    values["decoder_hidden_size"] = 4 * heads  # sines and cosines of two coordinates
    values["hidden_size"] = values["num_attention_heads"] * draw.choice((4, 8))
    values["decoder_num_hidden_layers"], values["decoder_intermediate_size"] = draw.randint(1, 2), draw.randint(7, 20)


def _fit_yolos(values: Values, draw: random.Random) -> None:
    values["num_detection_tokens"] = draw.randint(1, 5)


def _fit_wav2vec2(values: Values, draw: random.Random) -> None:
    values["num_conv_pos_embedding_groups"] = 2
    values["num_conv_pos_embeddings"] = draw.randint(3, 6)


def _fit_voxtral_encoder(values: Values, draw: random.Random) -> None:
    values["intermediate_size"] = 2 * values["hidden_size"]  # the projector joins two positions


def _fit_glmasr_encoder(values: Values, draw: random.Random) -> None:
    values["intermediate_size"] = 4 * values["hidden_size"]  # the projector joins four positions


def _fit_moonshine(values: Values, draw: random.Random) -> None:
    heads = draw.randint(3, 6)  # transformers builds both stacks with the same number of heads
    values["encoder_num_attention_heads"] = values["decoder_num_attention_heads"] = heads
    values["hidden_size"] = heads * draw.choice((4, 6, 8))
    for stack in ("encoder", "decoder"):
        values[f"{stack}_num_hidden_layers"] = draw.randint(2, 3)


def _fit_detr(values: Values, draw: random.Random) -> None:
    # the mask convolutions halve the width repeatedly, with norms in groups of eight, and concatenate the heads
    values["encoder_attention_heads"], values["d_model"] = 8, draw.choice((16, 32))
    values["decoder_attention_heads"] = draw.choice((4, 8))


def _fit_sampling(values: Values, draw: random.Random) -> None:
    # norms in 32 groups, and heads with a power of two as width
    sizes = ((32, 4, 8), (32, 8, 4), (96, 3, 6), (96, 6, 3))
    values["d_model"], values["encoder_attention_heads"], values["decoder_attention_heads"] = draw.choice(sizes)


def _fit_seamless(values: Values, draw: random.Random) -> None:
    heads = (values["encoder_attention_heads"], values["decoder_attention_heads"])
    for stack in ("speech_encoder", "t2u_encoder", "t2u_decoder"):
        values[f"{stack}_attention_heads"] = draw.choice(heads)
    if "t2u_variance_predictor_embed_dim" in values:
        values["t2u_variance_predictor_embed_dim"] = values["hidden_size"]


def _fit_rt_detr(values: Values, draw: random.Random) -> None:
    # heads with a power of two as width, and sines and cosines of two coordinates
    encoder, decoder = values["encoder_attention_heads"], values["decoder_attention_heads"]
    values["encoder_hidden_dim"], values["d_model"] = encoder * draw.choice((4, 8)), decoder * draw.choice((4, 8))
    values["decoder_in_channels"] = [values["encoder_hidden_dim"]] * 3


def _fit_helium(values: Values, draw: random.Random) -> None:
    values["hidden_size"] = values["num_attention_heads"] * values["head_dim"]


def _fit_phi(values: Values, draw: random.Random) -> None:
    values["hidden_size"] = values["num_attention_heads"] * draw.choice((4, 8))  # half of a head is rotated, in pairs


def _fit_mamba2(values: Values, draw: random.Random) -> None:
    heads = values["num_heads"]
    values["head_dim"] = 2 * values["hidden_size"] // heads
    values["n_groups"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])


def _fit_mamba_beside_attention(values: Values, draw: random.Random) -> None:
    heads = values["mamba_n_heads"]  # must divide twice the width
    values["hidden_size"] *= heads // math.gcd(heads, 2 * values["hidden_size"])


def _fit_mimo(values: Values, draw: random.Random) -> None:
    values["head_dim"] = draw.choice((6, 12))  # a third is rotated, in pairs
    # sliding attention has twice as many heads of keys and values
    heads = values["num_attention_heads"] = draw.choice((4, 6))
    values["num_key_value_heads"] = draw.choice([n for n in range(1, heads // 2 + 1) if heads % (2 * n) == 0])


def _fit_longcat(values: Values, draw: random.Random) -> None:
    values["head_dim"] = values["qk_rope_head_dim"]  # the rotary positions use it


def _fit_two_kinds(values: Values, draw: random.Random) -> None:
    values["layer_types"][:2] = draw.sample(["linear_attention", "full_attention"], 2)  # transformers requires both


def _fit_roformer(values: Values, draw: random.Random) -> None:
    values["embedding_size"] = draw.choice((values["hidden_size"], 20))


def _fit_lilt(values: Values, draw: random.Random) -> None:
    heads = values["num_attention_heads"] = draw.choice((3, 6))  # six tables share the width, two streams each head
    values["hidden_size"] = heads * draw.choice((4, 6, 8))


def _fit_layoutlmv3(values: Values, draw: random.Random) -> None:
    values["coordinate_size"] = draw.randint(1, 2)
    values["shape_size"] = values["hidden_size"] // 2 - 2 * values["coordinate_size"]


def _fit_smollm3(values: Values, draw: random.Random) -> None:
    values["no_rope_layers"] = [draw.randint(0, 1) for _ in range(values["num_hidden_layers"])]


def _fit_luke(values: Values, draw: random.Random) -> None:
    values["entity_emb_size"] = draw.randint(5, 14)


def _fit_prophetnet(values: Values, draw: random.Random) -> None:
    values["ngram"] = draw.randint(1, 3)
    # transformers sizes the cache of the decoder by the encoder's layers
    values["num_decoder_layers"] = min(values["num_decoder_layers"], values["num_encoder_layers"])


def _fit_albert(values: Values, draw: random.Random) -> None:
    values["num_hidden_groups"] = draw.randint(1, values["num_hidden_layers"])
    values["inner_group_num"] = draw.randint(1, 2)


def _fit_gemma4(values: Values, draw: random.Random) -> None:
    heads = values["num_attention_heads"]
    values["num_global_key_value_heads"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if "num_kv_shared_layers" in values:  # each kind of block comes once before the blocks that share key-value states
        values["num_hidden_layers"], values["layer_types"] = 4, 2 * ["sliding_attention", "full_attention"]


def _fit_mllama_text(values: Values, draw: random.Random) -> None:
    depth = values["num_hidden_layers"] = draw.randint(2, 4)
    values["cross_attention_layers"] = sorted(draw.sample(range(1, depth), draw.randint(1, depth - 1)))


def _fit_gemma4_vision(values: Values, draw: random.Random) -> None:
    values["head_dim"] = draw.choice((4, 8))  # half of a head for rows, in pairs


def _fit_gemma3n(values: Values, draw: random.Random) -> None:
    values["num_hidden_layers"], values["layer_types"] = 4, 2 * ["sliding_attention", "full_attention"]
    # higher sparsity leaves few features, and the gradients of their norm are huge
    values["activation_sparsity_pattern"] = [draw.choice((0.0, 0.3, 0.6)) for _ in range(4)]


def _fit_rotary_grid(values: Values, draw: random.Random) -> None:
    heads = values["num_heads" if "num_heads" in values else "num_attention_heads"]
    # half of a head for rows, in pairs
    values["embed_dim" if "embed_dim" in values else "hidden_size"] = heads * draw.choice((4, 8))


def _fit_rotary_volume(values: Values, draw: random.Random) -> None:
    # a third of a head for times, rows and columns each, in pairs
    values["hidden_size"] = values["num_attention_heads"] * draw.choice((6, 8))


def _fit_qwen4(values: Values, draw: random.Random) -> None:
    if "ple_layer_ids" in values:  # otherwise its embeddings have the size of a real checkpoint
        linear = [number for number, kind in enumerate(values["layer_types"], 1) if kind == "linear_attention"]
        values["ple_layer_ids"] = draw.sample(linear, draw.randint(0, len(linear)))
        values["ngram_size"], values["heads_per_ngram"] = draw.randint(2, 3), draw.randint(1, 3)
        values["ple_embed_dim"] = 12 * draw.randint(1, 2)  # divisible into one part per head
    values["hc_count"], values["hc_lowrank"] = draw.randint(2, 4), draw.randint(3, 9)
    values["indexer_compress_ratio"] = draw.randint(1, 3)
    values["indexer_budget"] = values["indexer_compress_ratio"] * draw.randint(1, 3)


def _fit_blt(values: Values, draw: random.Random) -> None:
    """A submodel of BLT. Submodels exchange hidden states, and the cache of transformers has two blocks."""
    heads = values["num_attention_heads"] = draw.choice((3, 4, 6))
    values["hidden_size"], values["num_hidden_layers"] = 24, draw.randint(1, 2)
    values["num_key_value_heads"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if "hidden_size_global" in values:
        values["hidden_size_global"] = 24


def _fit_xlstm(values: Values, draw: random.Random) -> None:
    values["hidden_size"], values["num_heads"] = 128, draw.choice((4, 8))  # sizes that the cache supports


def _fit_zamba(values: Values, draw: random.Random) -> None:
    values["layers_block_type"] = ["hybrid", *draw.choices(["hybrid", "linear_attention"], k=3)]
    values["num_hidden_layers"] = 4
    heads = [n for n in range(2, 7) if 2 * values["hidden_size"] % n == 0]  # must divide twice the width
    count = values["n_mamba_heads"] = draw.choice(heads)
    if "mamba_ngroups" in values:
        values["mamba_ngroups"] = draw.choice([n for n in range(1, count + 1) if count % n == 0])
    if values.get("use_shared_attention_adapter"):  # adapters of keys and queries have the same width
        values["num_key_value_heads"] = values["num_attention_heads"]


def _fit_qwen_tower(text: Values, tower: Values) -> None:
    if "deepstack_visual_indexes" in tower:  # a stage begins after the blocks that add features
        text["num_hidden_layers"] = 3
        if "layer_types" in text:
            text["layer_types"] = [*text["layer_types"], "sliding_attention"][:3]
    if "embed_dim" in tower or "out_hidden_size" in tower:
        tower["hidden_size" if "embed_dim" in tower else "out_hidden_size"] = text["hidden_size"]


def _fit_sections(text: Values, draw: random.Random) -> None:
    if "partial_rotary_factor" in text["rope_parameters"]:  # Qwen3.5
        text["head_dim"] = 8
    if len(text["rope_parameters"]["mrope_section"]) == 4:  # HunYuan-VL
        text["head_dim"] = 8
        return
    if text["model_type"] == "ernie4_5_vl_moe_text":  # as many for rows as for columns, and some for times
        heads, half = text["num_attention_heads"], draw.choice((3, 4))
        text["hidden_size"], text["rope_parameters"]["mrope_section"] = 2 * half * heads, [1, 1, half - 2]
        return
    sections = {2: [1, 0, 0], 4: [1, 1, 0], 6: [1, 1, 1], 8: [2, 1, 1]}
    width = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    width = text.get("qk_rope_head_dim", width)
    rotated = int(width * text["rope_parameters"].get("partial_rotary_factor", 1.0))
    text["rope_parameters"]["mrope_section"] = sections[rotated]


FITTING: dict[str, Callable[[Values, random.Random], None]] = {
    "albert": _fit_albert,
    "apertus1p5_text": _fit_apertus1p5,
    "axk2": _fit_low_rank_query,
    "bamba": _fit_mamba_beside_attention,
    "blt": _fit_blt,
    "codegen": _fit_codegen,
    "axk1": _fit_low_rank_query,
    "bailing_hybrid": _fit_low_rank_query,
    "convbert": _fit_convbert,
    **dict.fromkeys(("convnext", "convnextv2"), _fit_convolutions),
    "cvt": _fit_cvt,
    "efficientnet": _fit_mobile_blocks,
    "mobilevit": _fit_mobilevit,
    "mobilevitv2": _fit_mobilevitv2,
    "poolformer": _fit_pooling,
    **dict.fromkeys(("bit", "regnet", "resnet"), _fit_residual),
    "swiftformer": _fit_swiftformer,
    "data2vec-vision": _fit_data2vec_vision,
    "deepseek_v2": _fit_latent_attention,
    "deepseek_v3": _fit_latent_attention,
    "deepseek_v32": _fit_low_rank_query,
    "deepseek_v4": _fit_deepseek_v4,
    "deformable_detr": _fit_sampling,
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), _fit_rt_detr),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), _fit_seamless),
    **dict.fromkeys(("conditional_detr", "detr", "table-transformer"), _fit_detr),
    "diffllama": _fit_diffllama,
    "dinov3_vit": _fit_dinov3,
    "dory": _fit_dory,
    "dots3_note_text": _fit_dots3_note,
    "florence_vision": _fit_florence,
    "funnel": _fit_funnel,
    "gemma3n_text": _fit_gemma3n,
    "gemma4_text": _fit_gemma4,
    "gemma4_unified_text": _fit_gemma4,
    "gemma4_vision": _fit_gemma4_vision,
    "glm4_moe_lite": _fit_latent_attention,
    "glm_moe_dsa": _fit_indexers,
    **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), _fit_indexers),
    "gpt_neo": _fit_gpt_neo,
    "gptj": _fit_gptj,
    "granitemoehybrid": _fit_mamba_beside_attention,
    "glmasr_encoder": _fit_glmasr_encoder,
    "helium": _fit_helium,
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "wav2vec2-bert"), _fit_wav2vec2),
    **dict.fromkeys(("wav2vec2-conformer", "wav2vec2"), _fit_wav2vec2),
    "idefics_vision": _fit_idefics_vision,
    "inkling_vision": _fit_inkling_vision,
    "inkling2_loop_text": _fit_inkling2_loop,
    "inkling2_text": _fit_inkling,
    "inkling_text": _fit_inkling,
    "kimi_linear": _fit_latent_attention,
    **dict.fromkeys(("kosmos_2_text_model", "kosmos_2_5_text_model"), _fit_kosmos),
    "laguna": _fit_laguna,
    "layoutlmv3": _fit_layoutlmv3,
    "lilt": _fit_lilt,
    "llama4_text": _fit_smollm3,
    "longcat_flash": _fit_longcat,
    "luke": _fit_luke,
    "mamba2": _fit_mamba2,
    "mimo_v2_flash": _fit_mimo,
    "minicpm3": _fit_latent_attention,
    "minimax": _fit_minimax,
    "minimax_m3_vl_text": _fit_minimax_m3,
    "mllama_text_model": _fit_mllama_text,
    "mobilebert": _fit_mobilebert,
    "moonshine": _fit_moonshine,
    "olmo_hybrid": _fit_two_kinds,
    **dict.fromkeys(("omniasr_audio", "omniasr_ctc"), _fit_omniasr),
    "persimmon": _fit_phi,
    "phi": _fit_phi,
    "phi4_multimodal_audio": _fit_phi4_audio,
    "prophetnet": _fit_prophetnet,
    **dict.fromkeys(("qwen2_5_vl_vision", "qwen2_vl_vision", "qwen3_vl_vision"), _fit_rotary_grid),
    **dict.fromkeys(("qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision"), _fit_rotary_grid),
    **dict.fromkeys(("qwen4_exp_vision", "glm4v_vision", "glm4v_moe_vision", "glm_ocr_vision"), _fit_rotary_grid),
    **dict.fromkeys(("paddleocr_vl_vision", "exaone4_5_vision", "lfm3_vl_vision"), _fit_rotary_grid),
    **dict.fromkeys(("cohere_compass_vision", "ernie4_5_vl_moe_vision", "kimi_k25_vision"), _fit_rotary_grid),
    **dict.fromkeys(("qwen2_5_omni_vision_encoder", "qwen3_omni_moe_vision_encoder"), _fit_rotary_grid),
    **dict.fromkeys(("video_llama_3_vision", "muse_glimmer_vision"), _fit_rotary_grid),
    **dict.fromkeys(("inkling2_vision", "step3p5_vision"), _fit_rotary_grid),
    "minimax_m3_vl_vision": _fit_rotary_volume,
    "qwen4_exp_text": _fit_qwen4,
    "reformer": _fit_reformer,
    "roformer": _fit_roformer,
    "segformer": _fit_segformer,
    "smollm3": _fit_smollm3,
    "hiera": _fit_hiera,
    **dict.fromkeys(("pvt", "pvt_v2"), _fit_segformer),
    **dict.fromkeys(("donut-swin", "swin", "swinv2"), _fit_windows),
    "squeezebert": _fit_squeezebert,
    "step3p5": _fit_step3p7,
    **dict.fromkeys(("videomae", "vit_mae"), _fit_masked),
    "voxtral_encoder": _fit_voxtral_encoder,
    "wavlm": _fit_wavlm,
    "xlstm": _fit_xlstm,
    "yolos": _fit_yolos,
    "youtu": _fit_latent_attention,
    "zamba": _fit_zamba,
    "zamba2": _fit_zamba,
}
"""Adjusts drawn sizes to the constraints of a model type."""

EXTRA: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "*": {
        "tie_word_embeddings": (True, False),
        "attn_implementation": ("eager", "sdpa"),
        **dict.fromkeys(ACTIVATIONS, ("gelu", "relu", "gelu_new", "silu")),
        "attention_probs_dropout_prob": (0.0,),
        "partial_rotary_factor": (0.5, 1.0),
        "rope_theta": (100.0, 10000.0),
    },
    "big_bird": {"attention_type": ("original_full", "block_sparse")},
    "bigbird_pegasus": {"attention_type": ("original_full", "block_sparse")},
    "dpt": {"readout_type": ("ignore", "add", "project")},
    "esm": {"position_embedding_type": ("absolute", "rotary")},
    "eurobert": {"classifier_pooling": ("bos", "mean", "late")},
    "ultrabert": {"classifier_pooling": ("cls", "mean")},
    "dinov3_vit": {"pos_embed_rescale": (2.0,), "pos_embed_shift": (0.3,), "pos_embed_jitter": (1.5,)},
    "deberta": {"pos_att_type": (["c2p"], ["p2c"], ["c2p", "p2c"])},
    "deberta-v2": {"pos_att_type": (["c2p"], ["p2c"], ["c2p", "p2c"]), "conv_kernel_size": (0, 3)},
    "funnel": {"attention_type": ("relative_shift", "factorized"), "pooling_type": ("mean", "max")},
    "hubert": {"feat_extract_norm": ("group", "layer")},
    "llava_next_video": {"spatial_pool_mode": ("max", "conv")},
    "longt5": {
        "encoder_attention_type": ("local", "transient-global"),
        "feed_forward_proj": ("relu", "gated-gelu"),
    },
    "mistral": {"sliding_window": (None, 3)},
    "opt": {"do_layer_norm_before": (True, False)},
    "sew-d": {"pos_att_type": (["c2p"], ["p2c"], ["c2p", "p2c"]), "feat_extract_norm": ("group", "layer")},
    "t5gemma": {"is_encoder_decoder": (False,)},
    "t5": {"feed_forward_proj": ("relu", "gated-gelu", "gated-silu", "silu")},
    "mt5": {"feed_forward_proj": ("relu", "gated-gelu", "gated-silu")},
    "udop": {"feed_forward_proj": ("relu", "gated-gelu")},
    "umt5": {"feed_forward_proj": ("relu", "gated-gelu", "gated-silu")},
    "wav2vec2": {"feat_extract_norm": ("group", "layer")},
    "wav2vec2-bert": {"position_embeddings_type": ("relative", "relative_key", "rotary", None)},
    "wav2vec2-conformer": {
        **{"position_embeddings_type": ("relative", "rotary", None), "feat_extract_norm": ("group", "layer")},
    },
    "wavlm": {"feat_extract_norm": ("group", "layer")},
    "xlnet": {"attn_type": ("bi", "uni")},
}
"""Non-boolean options by model type; ``*`` lists options for every configuration that knows them."""


def _options(config: PreTrainedConfig, model_type: str, draw: random.Random) -> Values:
    """Draw some options of a configuration, with values that differ from it."""
    known, found = config.to_dict(), {}
    for key, value in sorted(known.items()):
        if isinstance(value, bool) and key not in NO_OPTIONS and draw.random() < 0.3:
            found[key] = not value
    for table in (EXTRA["*"], EXTRA.get(model_type, {})):
        for key, choices in table.items():
            if (key in known or key == "attn_implementation") and draw.random() < 0.4:
                value = draw.choice(choices)
                if value != known.get(key):
                    found[key] = value
    if config.model_type == "step3p5":  # its configuration resets it when it is loaded
        found.pop("hidden_act", None)
    return found


def _configured(
    name: str, variant: str, seed: int, options: Mapping[str, Any] | None = None
) -> tuple[PreTrainedConfig, str, random.Random]:
    """Return the configuration of a class with random sizes and given options, its description and the generator."""
    draw = random.Random(seed)
    model_type, given = {**zoo.VARIANTS, **zoo.ODD}.get(variant) or (variant, zoo.MORE[variant])
    values = copy.deepcopy(dict(given))
    before = copy.deepcopy(values)
    parts = [key for key, value in values.items() if isinstance(value, dict) and key != "backbone_config"]
    for part in parts:
        own = values[part]
        _sizes(own, own.get("model_type", "" if part == "rope_parameters" else model_type), draw)
    if model_type in ("siglip", "siglip2"):
        values["text_config"]["projection_size"] = values["vision_config"]["hidden_size"]
    if model_type in ("sam", "sam_hq"):  # two position features for each channel of the decoder
        heads = values["mask_decoder_config"]["num_attention_heads"] = draw.randint(3, 5)
        width = values["mask_decoder_config"]["hidden_size"] = 8 * heads
        values["prompt_encoder_config"]["hidden_size"] = values["vision_config"]["output_channels"] = width
        values["vision_config"]["num_pos_feats"] = width // 2
        if "vit_dim" in values["mask_decoder_config"]:
            values["mask_decoder_config"]["vit_dim"] = values["vision_config"]["hidden_size"]
    if "text_config" in values and "backbone_config" in values:  # Grounding DINO
        values["decoder_attention_heads"] = draw.choice((3, 6))
        values["encoder_ffn_dim"], values["decoder_ffn_dim"] = 6 * draw.randint(4, 7), draw.randint(17, 45)
        values["encoder_layers"], values["decoder_layers"] = draw.randint(1, 3), draw.randint(2, 3)
    if model_type in ("owlv2", "owlvit"):
        values["projection_dim"] = values["text_config"]["hidden_size"]
    if model_type == "paligemma":
        values["projection_dim"] = values["text_config"]["hidden_size"]
    if model_type == "depth_anything":
        _sizes(values["backbone_config"], "dinov2", draw)
        values["reassemble_hidden_size"] = values["backbone_config"]["hidden_size"]
    if model_type == "janus":
        for part in ("vision_config", "vq_config"):
            values[part]["projection_dim"] = values["text_config"]["hidden_size"]
        values["vq_config"]["image_token_embed_dim"] = values["text_config"]["hidden_size"]
    if model_type == "ovis2":
        values["hidden_size"] = values["text_config"]["hidden_size"]
    if model_type == "idefics2":
        values["perceiver_config"]["hidden_size"] = values["text_config"]["hidden_size"]
    if model_type == "granite4_vision":
        values["vision_config"] |= {"hidden_size": 64, "num_attention_heads": draw.choice((4, 8))}
        values["text_config"]["num_hidden_layers"] = values["vision_config"]["num_hidden_layers"] = 3
        values["qformer_config"]["num_hidden_layers"] = draw.randint(1, 2)
    if model_type == "granite_docling":
        values["text_config"]["num_hidden_layers"] = 3
    if model_type in ("granite_docling", "hy_v4_vl"):
        values["vision_config"]["out_hidden_size"] = values["text_config"]["hidden_size"]
    if model_type == "florence2":
        values["vision_config"]["projection_dim"] = values["text_config"]["d_model"]
    if model_type == "pp_formulanet":
        values["vision_config"]["decoder_hidden_size"] = values["text_config"]["d_model"]
        # transformers sizes the cache of a decoder by the encoder's layers
        values["text_config"]["encoder_layers"] = values["text_config"]["decoder_layers"]
    if model_type == "kimi_k25":
        values["projection_hidden_size"] = values["vision_config"]["hidden_size"]
        values["text_config"]["q_lora_rank"] = 10  # transformers saves other queries as if they were of the tower
    if model_type == "muse_glimmer":
        values["out_hidden_size"] = 4 * values["vision_config"]["hidden_size"]
    if model_type in ("blip-2", "instructblip") and "word_embed_proj_dim" in values["text_config"]:
        values["text_config"]["word_embed_proj_dim"] = values["text_config"]["hidden_size"]
    if model_type == "pix2struct":
        text = values["text_config"]
        text["num_heads"], text["d_kv"] = draw.randint(3, 6), draw.choice((4, 6))
        values["vision_config"]["hidden_size"] = text["hidden_size"] = text["num_heads"] * text["d_kv"]
    if model_type == "mllama":
        values["vision_config"]["vision_output_dim"] = 2 * values["vision_config"]["hidden_size"]
    if model_type == "molmo2":
        values["adapter_config"]["hidden_size"] = values["vision_config"]["hidden_size"]
        values["adapter_config"]["text_hidden_size"] = values["text_config"]["hidden_size"]
    if "text_hidden_size" in values.get("vision_config", {}):
        values["vision_config"]["text_hidden_size"] = values["text_config"]["hidden_size"]
    if "output_dim" in values.get("audio_config", {}):
        values["audio_config"]["output_dim"] = values["text_config"]["hidden_size"]
    if model_type == "fun_asr_nano":
        width = values["text_config"]["hidden_size"]
        values["adaptor_config"] |= {"hidden_size": width, "num_attention_heads": 2, "intermediate_size": width // 4}
    if model_type == "canary":  # the decoder reads the hidden states of the encoder
        encoder, decoder = values["encoder_config"], values["decoder_config"]
        decoder["hidden_size"] = encoder["hidden_size"]
        decoder["num_attention_heads"] = decoder["num_key_value_heads"] = encoder["num_attention_heads"]
    if "projector_config" in values:
        encoder = values["encoder_config"]
        width = encoder["hidden_dim"] * (1 + len(encoder.get("cat_hidden_layers", ())))
        values["projector_config"]["encoder_hidden_size"] = width
    if "depth" in values.get("vision_config", {}):
        _fit_qwen_tower(values["text_config"], values["vision_config"])
    if "mrope_section" in values.get("text_config", {}).get("rope_parameters", {}):
        _fit_sections(values["text_config"], draw)
    if not parts:
        _sizes({} if model_type == "clip" else values, model_type, draw)
        if "vocab_size" in zoo.config(variant).to_dict() and not {"image_size", "backbone_config"} & values.keys():
            values["vocab_size"] = draw.randint(61, 131)
            if "unpadded_vocab_size" in values:
                values["unpadded_vocab_size"] = draw.randint(59, values["vocab_size"])
            if "vocab_size_per_layer_input" in values:
                values["vocab_size_per_layer_input"] = values["vocab_size"]
    changes = {key: value for key, value in values.items() if before.get(key) != value}
    given, text = dict(options or {}), f"{variant} with {changes}"
    attention = given.pop("attn_implementation", None)
    if name.endswith("ForCausalLM") and {"encoder_layers", "decoder_layers"} <= values.keys():
        # transformers sizes the cache of a decoder by the encoder's layers
        changes["decoder_layers"] = min(values["decoder_layers"], values["encoder_layers"])
    config = zoo.config(variant, **{**changes, **given} if not parts else changes)
    config = zoo.config_of(name, config)
    for key in given if parts else ():
        setattr(config, key, given[key])
        if key == "tie_word_embeddings" and hasattr(config, "text_config"):
            config.text_config.tie_word_embeddings = given[key]  # Qwen2-VL reads its own value, or else this one
    if attention is not None:
        config._attn_implementation = attention
    return config, text, draw


def variants(model_type: str) -> list[str]:
    """Return the configurations of `zoo` that draws for a model type start from."""
    named = {**zoo.VARIANTS, **zoo.ODD}
    return [
        *([model_type] if model_type in zoo.MORE else []),
        *(name for name, (kind, _) in named.items() if kind == model_type),
    ]


def draws(name: str, model_type: str, seed: int) -> Iterator[Draw]:
    """Yield configurations for a class, each with fewer options than the previous one, then with other sizes."""
    choose = random.Random(f"{name} {seed}")
    starts = variants(model_type)
    choose.shuffle(starts)
    for attempt in range(8):
        yield from _draws(name, starts[attempt % len(starts)], model_type, choose, seed)


def _draws(name: str, variant: str, model_type: str, choose: random.Random, seed: int) -> Iterator[Draw]:
    size_seed = choose.randrange(2**31)
    config, text, draw = _configured(name, variant, size_seed)
    options = _options(config, model_type, draw)
    while True:
        config, text, _ = _configured(name, variant, size_seed, options)
        shown = f"{name}: {text}, options {options}, seed {seed}"
        yield Draw(config, shown, dict(options))
        if not options:
            return
        options.pop(choose.choice(sorted(options)))


def kind_of_labels(name: str, config: PreTrainedConfig, batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return ``batch``; labels of row classes may change to another ``problem_type``."""
    kind = random.Random(f"labels {name} {seed}").choice((None, "regression", "multi_label_classification"))
    labels = batch.get("labels")
    of_texts = name.endswith("ForSequenceClassification") and "input_ids" in batch
    if kind is None or not of_texts or labels is None or labels.dim() != 1:
        return batch
    config.problem_type = kind
    shape, generator = (len(labels), config.num_labels), torch.Generator().manual_seed(seed)
    if kind == "regression":
        return {**batch, "labels": torch.randn(shape, generator=generator, dtype=torch.float64)}
    return {**batch, "labels": torch.randint(2, shape, generator=generator).double()}
