"""The contracts: foreign code that the library replaces, overrides, copies or imports. It may change in any release."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGES = ("transformers", "torch", "peft", "trl", "accelerate", "deepspeed", "lightning")
"""Private names, private methods and forwards of these packages are listed here."""


@dataclass(frozen=True)
class LayerContract:
    """A kind of layer that fused modules replace. Layer names have the form ``model.Class``.

    Attributes:
        operation: the name of the kind in the report of `fuse`.
        originals: the copied layers. The copy covers the forward and the functions of its file that it calls.
        replaced_by: the fused modules, below ``oslo_models.fusion``.
        selects: keep the forward, and replace only the attention function that it selects.
    """

    operation: str
    originals: tuple[str, ...]
    replaced_by: tuple[str, ...]
    selects: bool = False


@dataclass(frozen=True)
class Contract:
    """A function that this library overrides, copies or imports.

    Attributes:
        original: the dotted name of the function.
        used_by: the overrides, or the modules with the copy or the import, below ``oslo_models``.
        parameters: the names of the parameters that this library relies on, in this order.
        is_copied: this library copies the behaviour, so the source has to match a checked release.
    """

    original: str
    used_by: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    is_copied: bool = False


def _layers(operation: str, originals: str, replaced_by: str, selects: bool = False) -> LayerContract:
    return LayerContract(operation, tuple(originals.split()), tuple(replaced_by.split()), selects)


_NORM, _BLOCK, _ATTENTION = "root mean square norm", "block", "attention"
_ON_CPU = "rotary_attention.CPURotaryAttention decode_attention.DecodingAttention"
LAYERS: dict[str, LayerContract] = {
    "RMS_NORMS": _layers(
        _NORM, "llama.LlamaRMSNorm t5.T5LayerNorm", "norms.FusedRMSNorm norms.CPURMSNorm apex.ApexRMSNorm"
    ),
    "GEMMA_NORMS": _layers(_NORM, "gemma.GemmaRMSNorm", "norms.FusedGemmaNorm norms.CPUGemmaNorm"),
    "OLMO2_NORMS": _layers(_NORM, "olmo2.Olmo2RMSNorm", "norms.FusedOlmo2Norm norms.CPURMSNorm"),
    "GATED_MLPS": _layers("MLP", "llama.LlamaMLP", "mlps.FusedGatedMLP decoder_blocks.DecodingBlock"),
    "PACKED_MLPS": _layers("MLP", "phi3.Phi3MLP", "mlps.FusedPackedMLP"),
    "NEOX_MLPS": _layers("MLP", "gpt_neox.GPTNeoXMLP", "mlps.FusedGELUMLP"),
    "GPT2_MLPS": _layers("MLP", "gpt2.GPT2MLP", "mlps.FusedGELUMLP decoder_blocks.DecodingBlock"),
    "GPTJ_MLPS": _layers("MLP", "gptj.GPTJMLP", "mlps.FusedGELUMLP"),
    "BERT_INTERMEDIATES": _layers("MLP", "bert.BertIntermediate", "mlps.FusedGELUMLP"),
    "LLAMA_BLOCKS": _layers(_BLOCK, "llama.LlamaDecoderLayer", "modules.FusedLlamaBlock decoder_blocks.DecodingBlock"),
    "PHI3_BLOCKS": _layers(_BLOCK, "phi3.Phi3DecoderLayer", "modules.FusedPhi3Block"),
    "GEMMA2_BLOCKS": _layers(_BLOCK, "gemma2.Gemma2DecoderLayer", "modules.FusedGemma2Block"),
    "OLMO2_BLOCKS": _layers(
        _BLOCK, "olmo2.Olmo2DecoderLayer flex_olmo.FlexOlmoDecoderLayer", "modules.FusedOlmo2Block"
    ),
    "NEOX_BLOCKS": _layers(_BLOCK, "gpt_neox.GPTNeoXLayer", "parallel_blocks.FusedNeoXBlock"),
    "GPTJ_BLOCKS": _layers(_BLOCK, "gptj.GPTJBlock", "parallel_blocks.FusedGPTJBlock"),
    "PHI_BLOCKS": _layers(_BLOCK, "phi.PhiDecoderLayer", "parallel_blocks.FusedPhiBlock"),
    "COHERE_BLOCKS": _layers(_BLOCK, "cohere.CohereDecoderLayer", "parallel_blocks.FusedCohereBlock"),
    "gpt2.GPT2Block": _layers(_BLOCK, "gpt2.GPT2Block", "modules.FusedGPT2Block decoder_blocks.DecodingBlock"),
    "gpt_neo.GPTNeoBlock": _layers(_BLOCK, "gpt_neo.GPTNeoBlock", "modules.FusedGPTNeoBlock"),
    "BERT_OUTPUTS": _layers("residual", "bert.BertOutput", "modules.FusedBertOutput"),
    "T5_FEED_FORWARDS": _layers("residual", "t5.T5LayerFF", "modules.FusedT5FeedForward"),
    "bloom.BloomMLP": _layers("residual", "bloom.BloomMLP", "modules.FusedBloomMLP"),
    "bloom.BloomAttention": _layers(_ATTENTION, "bloom.BloomAttention", "attention.FusedBloomAttention"),
    "gpt2.GPT2Attention": _layers(
        _ATTENTION,
        "gpt2.GPT2Attention",
        "attention.FusedEagerAttention decode_attention.DecodingAttention decoder_blocks.DecodingBlock",
    ),
    "CALL_EAGER_ATTENTION": _layers(
        _ATTENTION,
        "llama.LlamaAttention bert.BertSelfAttention opt.OPTAttention t5.T5Attention gemma2.Gemma2Attention",
        "attention.FusedEagerAttention apex.ApexEagerAttention decode_attention.DecodingAttention",
        selects=True,
    ),
    **{
        original: _layers(_ATTENTION, original, f"rotary_attention.{fused} {_ON_CPU}")
        for original, fused in {
            "exaone4.Exaone4Attention": "FusedExaone4Attention",
            "gemma2.Gemma2Attention": "FusedGemma2Attention",
            "gemma3.Gemma3Attention": "FusedQwen3Attention",
            "gpt_neox.GPTNeoXAttention": "FusedGPTNeoXAttention",
            "hunyuan_v1_dense.HunYuanDenseV1Attention": "FusedHunYuanAttention",
            "llama.LlamaAttention": "FusedLlamaAttention",
            "mistral.MistralAttention": "FusedMistralAttention",
            "olmo2.Olmo2Attention": "FusedOlmo2Attention",
            "olmo3.Olmo3Attention": "FusedOlmo3Attention",
            "phi.PhiAttention": "FusedPhiAttention",
            "phi3.Phi3Attention": "FusedPhi3Attention",
            "qwen2.Qwen2Attention": "FusedQwen2Attention",
            "qwen3.Qwen3Attention": "FusedQwen3Attention",
            "seed_oss.SeedOssAttention": "FusedSeedOssAttention",
            "smollm3.SmolLM3Attention": "FusedSmolLM3Attention",
            "stablelm.StableLmAttention": "FusedPartialRotaryAttention",
            "starcoder2.Starcoder2Attention": "FusedStarcoder2Attention",
        }.items()
    },
}
"""Layer contracts, by table name in `oslo_models.fusion.known_layers`, or by layer name."""


def _contract(original: str, used_by: str, parameters: str = "", is_copied: bool = False) -> Contract:
    return Contract(original, tuple(used_by.split()), tuple(parameters.split()), is_copied)


_GENERATION, _CACHES = "transformers.generation", "transformers.cache_utils"
_TRAINER, _REWARDED = "integrations.trainer.ParallelTrainerMixin", "integrations.trl.mixins.RewardedMixin"
_LINEARS = (
    "fusion.modules.FusedLinear fusion.lazy_logits.LazyHead deploy.running_batch.head_product._FastLinear "
    "layers.gathered._GatheredColumn layers.gathered._SlicedRow layers.linear.GroupRowParallelLinear "
    "layers.linear.InnerRowParallelLinear layers.linear.KeyValueParallelLinear layers.linear.KeyValueRowLinear "
    "layers.linear._ColumnParallel layers.linear._RowParallel "
    "layers.vocab_parallel.VocabParallelHead models.deepseek_v2.LatentLinear"
)
_MLPS = "fusion.mlps fusion.decoder_blocks"
CONTRACTS: tuple[Contract, ...] = (
    # transformers: generation and caches
    _contract(
        f"{_GENERATION}.utils.GenerationMixin._prepare_position_ids_for_generation",
        "deploy.running_batch.prompt_images",
        "self inputs_tensor model_kwargs",
    ),
    *(
        _contract(
            f"transformers.models.whisper.generation_whisper.WhisperGenerationMixin.{name}",
            "deploy.windows",
            is_copied=True,
        )
        for name in ("generate", "generate_with_fallback")
    ),
    _contract(
        f"{_GENERATION}.utils.GenerationMixin._prepare_cache_for_generation",
        "modeling.fusing.FusableModel",
        "self generation_config model_kwargs generation_mode batch_size max_cache_length",
    ),
    _contract(
        f"{_GENERATION}.utils.GenerationMixin._sample",
        "modeling.fusing.FusableModel fusion.decoding deploy.running_batch.row deploy.running_batch.preparation",
        "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer",
        is_copied=True,
    ),
    _contract(f"{_GENERATION}.utils.GenerationMixin._get_stopping_criteria", "modeling.fusing.FusableModel", "self"),
    _contract(
        f"{_GENERATION}.utils.GenerationMixin._get_logits_processor",
        "modeling.fusing.FusableModel",
        "self generation_config input_ids_seq_length encoder_input_ids",
    ),
    _contract(
        f"{_GENERATION}.logits_process.NoRepeatNGramLogitsProcessor.__call__", "fusion.ngram_processors", is_copied=True
    ),
    _contract(
        f"{_GENERATION}.logits_process.EncoderNoRepeatNGramLogitsProcessor.__call__",
        "fusion.ngram_processors",
        is_copied=True,
    ),
    *(
        _contract(
            f"{_GENERATION}.logits_process.{name}LogitsProcessor.__call__",
            "fusion.suppressed_tokens",
            "self input_ids scores",
            is_copied=True,
        )
        for name in ("SuppressTokens", "SuppressTokensAtBegin")
    ),
    _contract(f"{_CACHES}.DynamicLayer.update", "fusion.growing_cache.GrowingLayer", is_copied=True),
    _contract(f"{_CACHES}.DynamicLayer.reset", "fusion.growing_cache.GrowingLayer", is_copied=True),
    # transformers: layers
    _contract("transformers.pytorch_utils.Conv1D.forward", "fusion.modules.FusedConv1D layers.linear", "self x", True),
    _contract(
        "transformers.activations.NewGELUActivation.forward", f"fusion.modules.TanhGELU {_MLPS}", "self input", True
    ),
    _contract("transformers.activations.FastGELUActivation.forward", _MLPS, is_copied=True),
    _contract("transformers.activations.GELUTanh.forward", _MLPS, is_copied=True),
    _contract("transformers.activations.GELUActivation.forward", _MLPS, is_copied=True),
    _contract("transformers.activations.SiLUActivation.forward", _MLPS, is_copied=True),
    _contract(
        "transformers.integrations.sdpa_attention.sdpa_attention_forward",
        "fusion.decode_attention layers.blockwise_attention",
        is_copied=True,
    ),
    _contract(
        "transformers.masking_utils.sdpa_mask",
        "layers.blockwise_attention layers.lazy_mask",
        "batch_size q_length kv_length q_offset kv_offset mask_function attention_mask allow_is_causal_skip use_vmap "
        "device",
    ),
    _contract("transformers.utils.output_capturing._active_collector", "models.wavlm"),
    _contract("transformers.integrations.moe.batched_mm_experts_forward", "fusion.experts", is_copied=True),
    _contract("transformers.integrations.moe.use_experts_implementation", "fusion.experts", is_copied=True),
    _contract("transformers.integrations.moe._default_apply_gate", "fusion.experts", is_copied=True),
    _contract("transformers.modeling_utils.PreTrainedModel._can_set_experts_implementation", "modeling.base", "cls"),
    _contract(
        "transformers.models.reformer.modeling_reformer.LSHSelfAttention._hash_vectors",
        "models.reformer.ShardedLSHSelfAttention",
        "self vectors",
    ),
    _contract(
        "transformers.models.reformer.modeling_reformer.ReformerLayer._init_attention_seed",
        "models.reformer.SynchronizedReformerLayer",
        is_copied=True,
    ),
    _contract(
        "transformers.models.reformer.modeling_reformer.ReformerLayer._init_feed_forward_seed",
        "models.reformer.SynchronizedReformerLayer",
        is_copied=True,
    ),
    _contract(
        "transformers.modeling_utils.PreTrainedModel._set_gradient_checkpointing",
        "modeling.training.TrainableModel",
        "self enable gradient_checkpointing_func",
    ),
    # transformers: Trainer
    _contract("transformers.trainer.Trainer._validate_args", f"{_TRAINER} integrations.trl.mixins.TRLMixin", "self"),
    _contract("transformers.trainer.Trainer._maybe_log_save_evaluate", _TRAINER, "self tr_loss"),
    _contract("transformers.trainer.Trainer._save_checkpoint", _TRAINER, "self model trial"),
    _contract("transformers.trainer.Trainer._save_optimizer_and_scheduler", _TRAINER, "self output_dir"),
    _contract("transformers.trainer.Trainer._save_rng_state", _TRAINER, "self output_dir"),
    _contract("transformers.trainer.Trainer._load_from_checkpoint", _TRAINER, "self resume_from_checkpoint model"),
    _contract("transformers.trainer.Trainer._load_optimizer_and_scheduler", _TRAINER, "self checkpoint"),
    _contract("transformers.trainer.Trainer._load_best_model", _TRAINER, "self"),
    # trl
    _contract(
        "trl.trainer.dpo_trainer.DPOTrainer._precompute_ref_logps",
        "integrations.trl.mixins.ReferencedMixin",
        "self dataset name batch_size",
    ),
    _contract(
        "trl.trainer.kto_trainer.KTOTrainer._precompute_ref_logps",
        "integrations.trl.kto.KTOTrainer",
        "self dataset name batch_size",
    ),
    *(
        _contract(
            f"trl.trainer.distillation_trainer.{name}", "integrations.trl.distillation.DistillationTrainer", parameters
        )
        for name, parameters in (
            ("DistillationTrainer._generate", "self"),
            ("DistillationTrainer._generate_single_turn", "self"),
            ("DistillationTrainer._compute_loss", "self"),
            (
                "_chunked_divergence_loss",
                "student_hidden_states teacher_hidden_states student_lm_head_weight teacher_lm_head_weight "
                "completion_mask beta",
            ),
        )
    ),
    *(
        _contract(f"trl.trainer.{kind.lower()}_trainer.{kind}Trainer.{method}", _REWARDED, parameters)
        for kind in ("GRPO", "RLOO")
        for method, parameters in (
            ("_generate", "self"),
            ("_generate_single_turn", "self"),
            ("_calculate_rewards", "self inputs prompts completions"),
            ("_load_optimizer_and_scheduler", "self checkpoint"),
            ("_save_checkpoint", "self model trial"),
        )
    ),
    *(
        _contract(
            f"trl.trainer.{kind.lower()}_trainer.{kind}Trainer._generate_and_score_completions",
            f"integrations.trl.trainers.{kind}Trainer",
            "self inputs",
        )
        for kind in ("GRPO", "RLOO")
    ),
    _contract(
        "trl.experimental.online_dpo.online_dpo_trainer.OnlineDPOTrainer._calculate_rewards_from_functions",
        "integrations.trl.experimental.OnlineDPOTrainer",
        "self",
    ),
    # peft
    _contract(
        "peft.peft_model.PeftModel._get_base_model_class", "modeling.adapters.peft_model.ShardedPeftModel", "self"
    ),
    _contract(
        "peft.tuners.lora.layer.Linear.forward",
        "modeling.adapters.layers._AddsBeforeSharing modeling.adapters.rows.MixesRows",
        "self x",
    ),
    _contract("peft.tuners.lora.layer.Embedding.forward", "modeling.adapters.layers._ParallelLoraEmbedding", "self x"),
    _contract(
        "peft.tuners.lora.layer.ParamWrapper.forward", "modeling.adapters.experts.ParallelParamWrapper", "self x"
    ),
    _contract(
        "peft.tuners.lora.layer.Embedding._embed",
        "modeling.adapters.layers.VocabParallelLoraEmbedding modeling.adapters.layers.FeatureParallelLoraEmbedding",
        "self input weight",
    ),
    _contract(
        "peft.tuners.lora.dora.DoraLinearLayer.forward",
        "modeling.adapters.layers.ParallelDoraLinear modeling.adapters.layers._ParallelDora",
        "self x lora_A lora_B scaling base_layer base_result",
    ),
    _contract(
        "peft.tuners.lora.dora.DoraEmbeddingLayer.forward",
        "modeling.adapters.layers._ParallelDora",
        "self x lora_A lora_B scaling base_layer embed_fn",
    ),
    # torch: layers
    _contract("torch.nn.modules.linear.Linear.forward", _LINEARS, "self input", True),
    _contract(
        "torch.nn.modules.normalization.LayerNorm.forward",
        "fusion.norms.FusedLayerNorm fusion.apex.ApexLayerNorm fusion.decoder_blocks",
        "self input",
        True,
    ),
    _contract("torch.nn.modules.batchnorm._BatchNorm.forward", "layers.channels.LocalBatchNorm", "self input"),
    _contract(
        "torch.nn.modules.conv.Conv2d.forward",
        "layers.channels.ColumnParallelConvolution layers.channels.RowParallelConvolution "
        "models.bit.GatheredConvolution models.poolformer.ConvolutionBeforeDrops",
        "self input",
    ),
    _contract(
        "torch.nn.modules.conv.Conv2d._conv_forward",
        "layers.channels.RowParallelConvolution",
        "self input weight bias",
    ),
    _contract(
        "torch.nn.modules.sparse.Embedding.forward",
        "layers.vocab_parallel.VocabParallelEmbedding layers.gathered.SummedEmbeddingLayer "
        "modeling.derived.tracing._Traced",
        "self input",
        True,
    ),
    _contract(
        "torch.nn.modules.dropout.Dropout.forward",
        "modeling.adapters.layers.ReplicatedDropout modeling.adapters.layers.ShardedDropout "
        "pipeline.placeholders.BoundaryDropout",
        "self input",
        True,
    ),
    _contract(
        "torch.nn.modules.activation.MultiheadAttention.forward",
        "layers.multihead_attention.HeadParallelAttention",
        "self query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal",
    ),
    _contract(
        "torch.nn.modules.module.Module._apply",
        "pipeline.placeholders.Placeholder compat.tensor_parallel.wrapper.ThreadedModule",
        "self fn recurse",
    ),
    # torch: private names
    _contract("torch.Tensor._make_wrapper_subclass", "checkpoint.quantized.packed layers.lazy_mask"),
    _contract("torch._C.DisableTorchFunction", "distributed.sharded_tensor"),
    _contract(
        "torch._C.DisableTorchFunctionSubclass",
        "distributed.partial_norm distributed.sharded_tensor fusion.float8 fusion.lazy_logits layers modeling pipeline",
    ),
    _contract("torch._C._are_functorch_transforms_active", "layers.blockwise_attention modeling.forward"),
    _contract(
        "torch._C._disabled_torch_function_impl",
        "checkpoint.quantized.packed distributed.sharded_tensor layers.lazy_mask",
    ),
    _contract("torch._C._dynamo.eval_frame.get_eval_frame_callback", "layers.divided_tower"),
    _contract("torch._C._autograd._top_saved_tensors_default_hooks", "layers.deferred_gradients"),
    _contract("torch._C._current_graph_task_id", "layers.token_division"),
    _contract("torch._C._len_torch_dispatch_stack", "distributed.collectives"),
    _contract("torch._addmm_activation", "fusion.mlps"),
    _contract("torch._assert_async", "layers.cross_entropy layers.token_statistics"),
    _contract("torch._foreach_mul_", "modeling.training"),
    _contract("torch._foreach_norm", "distributed.grad_overflow distributed.sharded_tensor modeling.training"),
    _contract("torch._inductor.list_mode_options", "fusion.decoding", "mode"),
    _contract("torch._inductor.cudagraph_trees.get_obj", "fusion.decoding", "local attr_name"),
    _contract("torch._utils._rebuild_parameter", "distributed.sharded_tensor", "data requires_grad backward_hooks"),
    _contract("torch.autograd.Variable._execution_engine.queue_callback", "distributed.grad_overflow modeling.forward"),
    _contract("torch.autograd.forward_ad._current_level", "modeling.forward"),
    _contract("torch.autograd._is_checkpoint_valid", "compat.tensor_parallel.autograd"),
    _contract("torch.distributed._symmetric_memory", "distributed.symmetric_memory"),
    _contract("torch.distributed.distributed_c10d._get_default_timeout", "distributed.mesh", "backend"),
    _contract("torch.distributed.distributed_c10d._set_pg_timeout", "distributed.mesh", "timeout group"),
    _contract(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler._stop_heartbeats",
        "recipes.machines",
    ),
    _contract("torch.nn.init._calculate_fan_in_and_fan_out", "distributed.callers", "tensor"),
    _contract("torch.nn.modules.conv._ConvNd", "layers.gathered modeling.derived.derivation modeling.initialization"),
    _contract("torch.nn.modules.dropout._DropoutNd", "modeling.derived.probe"),
    _contract("torch.nn.modules.module._global_forward_hooks", "fusion.decoder_blocks"),
    _contract("torch.nn.modules.module._global_forward_pre_hooks", "fusion.decoder_blocks"),
    _contract("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "layers.blockwise_attention"),
    _contract("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "layers.blockwise_attention"),
    _contract("torch.ops.aten._unsafe_view", "fusion.float8 layers.token_region"),
    _contract("torch.ops.mkldnn._reorder_linear_weight", "deploy.running_batch.head_product"),
    _contract("torch.overrides._get_current_function_mode_stack", "distributed.thread_group"),
    _contract("torch.testing._internal.distributed.fake_pg.FakeStore", "planning.fake_rank"),
    _contract("torch.utils._device.DeviceContext", "modeling.meta_device"),
    _contract("torch.utils._device._device_constructors", "modeling.meta_device"),
    _contract("torch.utils._python_dispatch.TorchDispatchMode", "modeling.initialization planning.meta_run"),
    _contract(
        "torch.utils._pytree", "compat checkpoint.quantized.packed deploy distributed layers modeling pipeline planning"
    ),
)
"""All other contracts, by package."""
