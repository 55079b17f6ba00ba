"""Fingerprints of the originals, with their versions: written by ``python -m oslo_models.contracts``."""

RECORDED: dict[str, dict[str, str]] = {
    "torch.nn.modules.dropout.Dropout.forward": {
        "406c782336f7a447": "2.11.0 2.13.0 2.14.1",
    },
    "torch.nn.modules.linear.Linear.forward": {
        "60866444a8a520a7": "2.11.0 2.13.0 2.14.1",
    },
    "torch.nn.modules.normalization.LayerNorm.forward": {
        "3ffaf65b1a1e8486": "2.11.0 2.13.0 2.14.1",
    },
    "torch.nn.modules.sparse.Embedding.forward": {
        "3b2a1dfa8c2492a2": "2.11.0 2.13.0 2.14.1",
    },
    "transformers.activations.FastGELUActivation.forward": {
        "52eada4715441971": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.activations.GELUActivation.forward": {
        "214614f620509972": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.activations.GELUTanh.forward": {
        "214614f620509972": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.activations.NewGELUActivation.forward": {
        "697466aa9a368923": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.activations.SiLUActivation.forward": {
        "2919d397715bdc88": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.cache_utils.DynamicLayer.reset": {
        "6dbbbaa8e9325f24": "5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "ebfdbef6ad6962ec": "5.17.0",
    },
    "transformers.cache_utils.DynamicLayer.update": {
        "6db8265ed12c9fa9": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.generation.logits_process.EncoderNoRepeatNGramLogitsProcessor.__call__": {
        "f7617a9a4ac32b6a": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.generation.logits_process.EncoderNoRepeatNGramLogitsProcessor.__call__ _get_generated_ngrams": {
        "4cc37e6fb7c6198f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.generation.logits_process.NoRepeatNGramLogitsProcessor.__call__": {
        "175ccabe5a7ac8bd": "5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "40ee67cc88430dca": "5.17.0",
    },
    "transformers.generation.logits_process.SuppressTokensAtBeginLogitsProcessor.__call__": {
        "c9934c5651b67824": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.generation.logits_process.SuppressTokensLogitsProcessor.__call__": {
        "83f0df9fd56a57ca": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.generation.utils.GenerationMixin._sample": {
        "7edfaaeacb1211e9": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "d37b3983e64d7975": "5.24.0",
    },
    "transformers.generation.utils.GenerationMixin._sample _undo_generation_steps": {
        "98ce5f69e31dc4b1": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.integrations.moe._default_apply_gate": {
        "3c6208c0640f1b6f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.integrations.moe.batched_mm_experts_forward": {
        "45159a7b470c1346": "5.17.0",
        "5bdc519e6704752b": "5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "c780c7539714bc8b": "5.18.0 5.19.0",
    },
    "transformers.integrations.moe.batched_mm_experts_forward _batched_linear": {
        "8622c08ebb70a1ec": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.integrations.moe.use_experts_implementation": {
        "59c3985816b5d1e3": "5.17.0",
        "85f586c84cc8014e": "5.18.0 5.19.0",
        "bcdf91dfd769a30c": "5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.integrations.moe.use_experts_implementation _default_apply_gate": {
        "3c6208c0640f1b6f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": {
        "4b7a61afe9386099": "5.19.0 5.20.0",
        "6cd40ca24038d2f8": "5.23.0",
        "8be1e1c28e38999d": "5.17.0 5.18.0",
        "af5c90b532de4be4": "5.24.0",
        "b2f883a4ac28e1c6": "5.21.0 5.22.0",
    },
    "transformers.integrations.sdpa_attention.sdpa_attention_forward create_position_bias_mask": {
        "7572e6ebff26d379": "5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "b19ac5d54bf0692b": "5.17.0 5.18.0 5.19.0",
    },
    "transformers.integrations.sdpa_attention.sdpa_attention_forward pack_gqa": {
        "05109dcb9f2b24b4": "5.23.0 5.24.0",
    },
    "transformers.integrations.sdpa_attention.sdpa_attention_forward repeat_kv": {
        "bab06b83488119ca": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.integrations.sdpa_attention.sdpa_attention_forward use_gqa_in_sdpa": {
        "10470f3df884286f": "5.23.0 5.24.0",
        "239495208d52ca8c": "5.18.0 5.19.0 5.20.0 5.21.0 5.22.0",
        "85b8f2a2bd22b188": "5.17.0",
    },
    "transformers.models apply_rotary_pos_emb": {
        "0039ee81fa77c4b0": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "1db7b5419d6e6c93": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "2796e01c018714f9": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "3219d2b8665bcb35": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "cd7d2a9277377a0d": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models dropout_add": {
        "42dce6d6d3afecca": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models eager_attention_forward": {
        "1dcce6a35bac2805": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "513313251ea7c1e3": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "a3abc2e08abfa85c": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "adfc526df8cbc8f4": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "b0b600be44cf6b2c": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "bafdc5d890468b19": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
        "c1a74f4c88b09723": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models repeat_kv": {
        "bab06b83488119ca": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models rotate_half": {
        "de799915a61fcacf": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.bert.modeling_bert.BertIntermediate.forward": {
        "13940621a508d1ab": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.bert.modeling_bert.BertOutput.forward": {
        "7ea4b9ca1ff124ed": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.bert.modeling_bert.BertSelfAttention.forward selects": {
        "8256f796eb72c80f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.bloom.modeling_bloom.BloomAttention.forward": {
        "0ed83923f9b04ca9": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.bloom.modeling_bloom.BloomMLP.forward": {
        "0f7ea07fbf57b754": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.cohere.modeling_cohere.CohereDecoderLayer.forward": {
        "23c639f94d73f973": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "60e32978466d25b5": "5.24.0",
    },
    "transformers.models.exaone4.modeling_exaone4.Exaone4Attention.forward": {
        "52178177a58fd330": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "d343ae9dbd2f4961": "5.24.0",
    },
    "transformers.models.flex_olmo.modeling_flex_olmo.FlexOlmoDecoderLayer.forward": {
        "a062be015d58798a": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "e2374ba822212f6c": "5.24.0",
    },
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm.forward": {
        "e9f8d4488882289d": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gemma2.modeling_gemma2.Gemma2Attention.forward": {
        "0876851ee7f8f4dd": "5.24.0",
        "9e9966eb49ac1438": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.gemma2.modeling_gemma2.Gemma2Attention.forward selects": {
        "8256f796eb72c80f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer.forward": {
        "e0825f66945db922": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "e3a4f753fbdf8d92": "5.24.0",
    },
    "transformers.models.gemma3.modeling_gemma3.Gemma3Attention.forward": {
        "50f66514187df6f9": "5.24.0",
        "db67c7e5e2da2f28": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention.forward": {
        "0e1ef4e7c6eabbe9": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "7c878e725e5e81f1": "5.24.0",
    },
    "transformers.models.gpt2.modeling_gpt2.GPT2Block.forward": {
        "ca5a068825f9da36": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "fb3fde70b374a759": "5.24.0",
    },
    "transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward": {
        "930ab4fc57335505": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoBlock.forward": {
        "4a32426e9976abf3": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention.forward": {
        "192d02c30a28022d": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer.forward": {
        "c1487c59602d9701": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP.forward": {
        "b860cb32435b3399": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.gptj.modeling_gptj.GPTJBlock.forward": {
        "0f6a1f368efe5b7c": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "7de07d7d9e19da5f": "5.24.0",
    },
    "transformers.models.gptj.modeling_gptj.GPTJMLP.forward": {
        "eb7e936212c447fa": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1Attention.forward": {
        "60b9df2d24f05d1b": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "611de43f5d68aabc": "5.24.0",
    },
    "transformers.models.llama.modeling_llama.LlamaAttention.forward": {
        "811d94d8f2139e4f": "5.24.0",
        "e625a2433adc21ff": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.llama.modeling_llama.LlamaAttention.forward selects": {
        "8256f796eb72c80f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward": {
        "6ffdf9b1891c8d39": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "bb157daaa56fa5ea": "5.24.0",
    },
    "transformers.models.llama.modeling_llama.LlamaMLP.forward": {
        "057f6863a89189ca": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.llama.modeling_llama.LlamaRMSNorm.forward": {
        "d7ca4c52a1152ddb": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.mistral.modeling_mistral.MistralAttention.forward": {
        "2bf362f89579c179": "5.24.0",
        "c3e5a79046595dea": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.olmo2.modeling_olmo2.Olmo2Attention.forward": {
        "100b985501ad85c1": "5.24.0",
        "93e6018eed47fa35": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.olmo2.modeling_olmo2.Olmo2DecoderLayer.forward": {
        "21c0517edc983b60": "5.24.0",
        "e2b92ed9d96d5a95": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm.forward": {
        "076c705fbd08f177": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.olmo3.modeling_olmo3.Olmo3Attention.forward": {
        "8d43e27ec13adcb4": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "b89d1c0d57b42cb7": "5.24.0",
    },
    "transformers.models.opt.modeling_opt.OPTAttention.forward selects": {
        "8256f796eb72c80f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.phi.modeling_phi.PhiAttention.forward": {
        "248125ef3819bbcd": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "8551f3e3429b3e68": "5.24.0",
    },
    "transformers.models.phi.modeling_phi.PhiDecoderLayer.forward": {
        "d0e82c0ff9b0fe0a": "5.24.0",
        "dc203647b8f757dc": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.phi3.modeling_phi3.Phi3Attention.forward": {
        "c18cb387120750ea": "5.24.0",
        "f739d1d17c615735": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer.forward": {
        "4e8d5925c3820025": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "d57ead3f887c9a49": "5.24.0",
    },
    "transformers.models.phi3.modeling_phi3.Phi3MLP.forward": {
        "6c610f640bb50ffb": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.qwen2.modeling_qwen2.Qwen2Attention.forward": {
        "52c39da3a4935645": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "bb118c51dbc5a248": "5.24.0",
    },
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention.forward": {
        "00c52c549e9dccb6": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "d30ef946239b2770": "5.24.0",
    },
    "transformers.models.reformer.modeling_reformer.ReformerLayer._init_attention_seed": {
        "e0eee0502834757e": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.reformer.modeling_reformer.ReformerLayer._init_feed_forward_seed": {
        "398df676c052e031": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.seed_oss.modeling_seed_oss.SeedOssAttention.forward": {
        "1c9261b96fee11e5": "5.24.0",
        "ee1a157971252bf6": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.smollm3.modeling_smollm3.SmolLM3Attention.forward": {
        "ada320a424046434": "5.24.0",
        "df0be9d5dd40fce4": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
    },
    "transformers.models.stablelm.modeling_stablelm.StableLmAttention.forward": {
        "7681eb2f3dfc0664": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "b9a0fc53d32dd83a": "5.24.0",
    },
    "transformers.models.starcoder2.modeling_starcoder2.Starcoder2Attention.forward": {
        "314723012e23d0c0": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0",
        "395f708b6d17c054": "5.24.0",
    },
    "transformers.models.t5.modeling_t5.T5Attention.forward selects": {
        "8256f796eb72c80f": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.t5.modeling_t5.T5LayerFF.forward": {
        "7026f12d55b8f09a": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.t5.modeling_t5.T5LayerNorm.forward": {
        "60d7001cd8bfbd63": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate": {
        "52fec8f9be02b4aa": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate _get_attr_from_logit_processors": {
        "9667cbba1d66208d": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate _pad_to_max_length": {
        "e374bd944a3e4107": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
    "transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate_with_fallback": {
        "58cbd78ad348da01": "5.22.0 5.23.0",
        "662abfd751fdda56": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0",
        "66871f971563b830": "5.24.0",
    },
    "transformers.pytorch_utils.Conv1D.forward": {
        "33a322376435eb57": "5.17.0 5.18.0 5.19.0 5.20.0 5.21.0 5.22.0 5.23.0 5.24.0",
    },
}
