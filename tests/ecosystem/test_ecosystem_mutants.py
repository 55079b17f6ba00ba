"""Without one of the guards behind docs/ecosystem.md, the test named in its row fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oslo_models.server.schema import CompletionRequest

from support import pipelines
from support.float64 import lifted_casts
from support.mutants import Edit, assert_is_caught
from support.pool import Pool

SHARD, ADAPT, PEFT = "distributed.sharded_tensor", "modeling.adapters", "ecosystem/test_peft.py"
ACCELERATOR, TRAINER, TRL = "integrations.accelerator", "integrations.trainer", "integrations.trl"
PARAMETERS, OPTIONS = "modeling/test_sharded_parameters.py", "ecosystem/test_trainer_options.py"
LLAMA, STAGES = {"variant": "llama", "tp": 3}, {"sizes": "pp=2"}
CLIPS, DCP = (
    "test_torch_clips_gradients_by_the_norm_of_the_full_model",
    "test_torch_distributed_checkpoint_goes_on_at_other_sizes",
)
LORA, SAVED = "test_lora_trains_as_on_one_process", "test_adapters_are_saved_byte_for_byte_as_by_peft"
REFUSES, MISUSE = "test_unsupported_calls_are_refused_by_name", "test_misuse_is_refused_on_every_rank"
REPLICAS, PROMPTS = "test_replicas_are_the_processes", "test_prompts_train_as_on_one_process"
TORCHAO = "test_unsupported_calls_of_torchao_on_shards_are_refused"
UNSUITABLE = "test_unsuitable_arguments_are_refused_before_training"
SHARDS = {"size": "tensor_parallel_size"}
PICKLED = "test_pickling_a_parallel_model_is_refused"
DAMAGED, OPTIONAL = "test_no_compressed_file_ends_quietly", "test_optional_outputs_of_the_main_class"
AFMOE = {"model_type": "afmoe"}
BUBBLE = "test_zero_bubble_holds_more_on_later_stages"
DIVIDED = "test_divided_tokens_take_less_activations"
LLAMA_CONFIG = pipelines.config("llama", architectures=["LlamaForCausalLM"])
OTHER_SIZES = {"variant": "llama-one-kv", "saved": (2, 1), "loaded": (3, 1)}

Row = tuple[str, str, str, str, dict[str, Any]]
"""A function of the library, a piece of its source and the replacement; the test and its arguments."""

FAST: dict[str, list[Row]] = {
    PARAMETERS: [
        (
            f"{SHARD}.sharding:Sharding.counted",
            "if self.counts else []",
            "if True else []",
            CLIPS,
            {"variant": "gpt2", "tp": 1, "pp": 2},
        ),
        (
            f"{SHARD}.operations:product",
            "weight is not None and not _computes_with_part(weight)",
            "False",
            "test_products_outside_of_layers_are_refused",
            {},
        ),
        (
            f"{SHARD}.tensors:mixing",
            "part is None or",
            "part is not None or",
            "test_optimizer_that_treats_shards_as_matrices_is_refused",
            {},
        ),
    ],
    "modeling/test_ddp_wrapping.py": [
        (
            "distributed.callers:require_replicas",
            "set(ranks) <= set(replicas.ranks)",
            "True",
            "test_ddp_over_stages_is_rejected",
            {},
        ),
    ],
    PEFT: [
        (f"{ADAPT}.support:check_config", "initial not in _DATA_FREE", "False", REFUSES, {"kind": "PiSSA"}),
    ],
    "ecosystem/test_in_place_quantization.py": [
        (
            "modeling.replaced_layers:ShardedLayers._look_again",
            "type(module) is not nn.Identity",
            "False",
            "test_replaced_layers_are_refused_and_wrapped_ones_are_not",
            {},
        ),
    ],
}
"""One of each kind. By the file of the test."""

SLOW: dict[str, list[Row]] = {
    "planning/test_plan.py": [
        ("planning.job:_construct", "job.schedule", "model.schedule", BUBBLE, {}),
        ("layers.deferred_gradients:_is_deferrable", "and not x.is_meta", "", BUBBLE, {}),
        ("layers.token_parts:_begins_region", "and not local.is_meta", "", DIVIDED, {}),
        ("planning.job:_construct", '"sequence_parallel": job.sequence_parallel', "", DIVIDED, {}),
        (
            "planning.serving:_run_batch",
            "for own in limits_of_groups(limits, stages)",
            "for own in [limits]",
            "test_plan_has_the_cache_that_a_server_reserves",
            {"config": LLAMA_CONFIG, "tp": 1, "pp": 2},
        ),
    ],
    "planning/test_verify.py": [
        (
            "planning.reference:blocks_that_fit",
            "total <= limit",
            "True",
            "test_a_model_that_one_process_cannot_hold_is_truncated",
            {},
        ),
    ],
    "recipes/test_recipes.py": [
        (
            "modeling.forward:call_base_model",
            "within_model(model, kwargs)",
            "nullcontext()",
            "test_divided_tokens_do_not_change_a_recipe",
            {"case": "sft"},
        ),
    ],
    "recipes/test_joining.py": [
        ("recipes.joining:_per_machine", "times or 1", "1", "test_variables_of_a_task", {}),
    ],
    "server/test_request_semantics.py": [
        (
            "server.generation_defaults:GenerationDefaults.settings",
            'self._value("top_k") or 0',
            'self._value("top_k") or 50',
            "test_sampling_without_top_k_reaches_every_token_unless_the_checkpoint_limits_it",
            {"kind": CompletionRequest},
        ),
    ],
    "data/test_damaged_files.py": [
        (
            "data.readers:_ZstdFile.readinto",
            "self._frame is not None",
            "False",
            DAMAGED,
            {"ending": ".txt.zst", "on_error": "skip"},
        ),
        (
            "data.readers:_open",
            "not path.stat().st_size",
            "False",
            DAMAGED,
            {"ending": ".jsonl.gz", "on_error": "stop"},
        ),
        (
            "data.readers:_check_column",
            '"null",',
            '"null", "binary",',
            "test_columns_that_are_no_texts_are_refused",
            {},
        ),
    ],
    "pipeline/test_same_call.py": [
        (
            "pipeline.batch_rows:divide_rows",
            "name not in OF_ALL_ROWS and not",
            "False and not",
            "test_only_arguments_with_rows_are_divided",
            {},
        ),
        (
            "pipeline.pipeline:Pipeline._end_open_loop",
            "self.runner.abandoned = False",
            "pass",
            "test_a_second_loop_of_a_model_is_refused",
            {},
        ),
        (
            "pipeline.schedule:Schedule.__iter__",
            "if self._finished:",
            "if False:",
            "test_a_second_loop_of_a_model_is_refused",
            {},
        ),
        (
            "pipeline.pipeline:Pipeline._generation_step",
            "requested > 0 else length",
            "requested > 0 else 1",
            "test_assisted_decoding_on_stages_gives_the_tokens_of_greedy_decoding",
            {"variant": "t5"},
        ),
        (
            "pipeline.caches:CacheLayers.restrict",
            "own = list(layers[self.start : self.stop])",
            "own = list(layers[: self.stop - self.start])",
            "test_generate_continues_with_a_cache_that_the_user_made",
            {"variant": "gemma3_text"},
        ),
        (
            "pipeline.stage_runner:StageRunner._is_given",
            'batch.get("encoder_outputs") is not None',
            "False",
            "test_encoder_outputs_give_the_loss_of_one_process",
            {"name": "T5ForConditionalGeneration", "blocks": [2, 2]},
        ),
        (
            "pipeline.ties:untie_different",
            "not _are_equal(values[members[0]], values[name])",
            "False",
            "test_merged_adapters_of_stages_are_saved_and_trained_as_on_one_process",
            {"trains_head": True},
        ),
        (
            "distributed.stopping:UserErrors.vote",
            "ReduceOp.MAX",
            "ReduceOp.MIN",
            "test_ranks_stop_at_the_same_token",
            {"tp": 2, "pp": 1},
        ),
        (
            "sharding.layer_lists:is_layer_list",
            "_NAME.search(name) is not None",
            'name == "layer_types"',
            "test_lists_follow_the_layers_to_their_stage",
            {"kind": "theta of each layer"},
        ),
        (
            "modeling.forward:_refuse_outputs_of_blocks",
            'value("return_dict_in_generate")',
            "False",
            "test_generate_refuses_outputs_of_other_stages",
            {"variant": "llama"},
        ),
    ],
    "checkpoint/test_checkpoint.py": [
        (
            "modeling.construction:_from_pretrained",
            'bool(info["missing_keys"] or info["mismatched_keys"])',
            "True",
            "test_loading_a_complete_checkpoint_draws_no_random_numbers",
            {},
        ),
        (
            "modeling.construction:join",
            ", generator=generator)",
            ")",
            "test_loading_a_complete_checkpoint_draws_no_random_numbers",
            {},
        ),
    ],
    "deploy/test_fork_server.py": [
        (
            "deploy.fork_server:serve",
            "None if workers else IDLE_SECONDS * 1e3",
            "None",
            "test_server_without_workers_ends_and_is_no_zombie",
            {},
        ),
    ],
    "modeling/test_same_classes.py": [
        (
            "auto:_Auto.class_for",
            "(config.model_type, module, config.get_text_config().model_type)",
            "(config.model_type, module)",
            "test_auto_class_finds_the_text_model_of_each_multimodal_type",
            {},
        ),
    ],
    "models/test_optional_outputs.py": [
        ("pipeline.split:_count_attentions", "isinstance(module, kind)", "not name", OPTIONAL, {"model_type": "jamba"}),
        (
            "pipeline.split:_count_attentions",
            "isinstance(module, kind)",
            "not name",
            OPTIONAL,
            {"model_type": "longcat_flash"},
        ),
        ("models.codegen:CodeGenParallel.attention_groups", "4", "1", OPTIONAL, {"model_type": "codegen"}),
        ("modeling.attention_outputs:_all_heads", "weights.dim() - 3", "1", OPTIONAL, {"model_type": "longt5"}),
        ("models.diffllama:DiffLlamaParallel.attention_groups", "2", "1", OPTIONAL, {"model_type": "diffllama"}),
        ("models.rwkv:RecurrentStateLayer.forward", "self.completes", "False", OPTIONAL, {"model_type": "rwkv"}),
        ("sharding.local_config:LocalConfig.get_text_config", "text is self._full", "False", OPTIONAL, AFMOE),
        (
            "modeling.attention_outputs:_all_heads",
            "weights.dim() < 4",
            "False",
            OPTIONAL,
            {"model_type": "qwen2_vl"},
        ),
    ],
    "modeling/test_around_shards.py": [
        (
            "distributed.callers:require_replicas",
            "set(ranks) <= set(replicas.ranks)",
            "True",
            "test_zero_redundancy_optimizer_over_stages_is_refused",
            {},
        ),
        (
            "modeling.replaced_layers:_require_no_parameters",
            "own and inner and",
            "False and",
            "test_wrapper_with_parameters_around_a_sharded_layer_is_refused",
            {},
        ),
        (
            "modeling.attention_outputs:AttentionOutputs.full",
            "or not value",
            "or True",
            "test_attentions_of_a_stack_called_by_itself_have_all_heads",
            {"variant": "t5", "name": "T5ForConditionalGeneration"},
        ),
        (
            "layers.cross_entropy:_gradient",
            "copy_to(shard.axis, grad_N)",
            "grad_N",
            "test_smoothed_cross_entropy_has_derivatives_of_every_order",
            {},
        ),
    ],
    "modeling/test_shard_functions.py": [
        (
            "distributed.callers:computes_initial_bounds",
            "is _FANS",
            "is None",
            "test_terms_of_a_loss_have_the_gradients_of_one_process",
            {},
        ),
        (
            f"{SHARD}.tensors:writes",
            'name == "__setitem__" or',
            "False and",
            "test_terms_of_a_loss_have_the_gradients_of_one_process",
            {},
        ),
    ],
    "ecosystem/test_compile.py": [
        (
            f"{SHARD}.tensors:Shard.__torch_function__",
            "torch.compiler.is_compiling()",
            "False",
            "test_attributes_of_shards_break_no_graph",
            {"mode": lifted_casts},
        ),
    ],
    PARAMETERS: [
        (
            f"{SHARD}.reductions:norm",
            "sharding.counted(local_tensor(shard))",
            "[local_tensor(shard)]",
            CLIPS,
            {"variant": "llama-one-kv", "tp": 2, "pp": 1},
        ),
        (
            "distributed.partial_norm:PartialNorm.__torch_function__",
            "first._reduced(local, first.mesh.weights)",
            "first._reduced(local, first.mesh.tp)",
            CLIPS,
            {"variant": "gpt2", "tp": 1, "pp": 2},
        ),
        ("distributed.checkpoint_chunks:_offsets", "index.start for", "0 * index.start for", DCP, OTHER_SIZES),
        (f"{SHARD}.operations:size", "type(args[0]) is Shard", "False", DCP, OTHER_SIZES),
        (f"{SHARD}.operations:new_empty", "type(args[0]) is Shard", "False", DCP, OTHER_SIZES),
        (f"{SHARD}.tensors:Shard.set_", "type(self) is Shard", "False", DCP, OTHER_SIZES),
        (
            "modeling.training:_refuse_full_state_dict",
            "options.full_state_dict",
            "False",
            "test_full_state_dict_of_torch_is_refused",
            {},
        ),
        (
            f"{SHARD}.operations:lookup",
            "weight is not None",
            "False",
            "test_products_outside_of_layers_are_refused",
            {},
        ),
        (
            f"{SHARD}.operations:view",
            "not _is_weight(source) and not _stays_marked(source)",
            "True",
            "test_products_outside_of_layers_are_refused",
            {},
        ),
    ],
    "modeling/test_counting.py": [
        (
            "modeling.counting:CountableModel.num_parameters",
            "prod(self.layouts[name].shape) if name in self.layouts else param.numel()",
            "param.numel()",
            "test_num_parameters_equals_the_full_model",
            {"variant": "llama", "sizes": (2, 1)},
        ),
    ],
    "ecosystem/test_accelerator.py": [
        (f"{ACCELERATOR}:Accelerator.num_processes.fget", "self.mesh is None", "True", REPLICAS, {}),
        (f"{ACCELERATOR}:Accelerator.process_index.fget", "self.mesh is None", "True", REPLICAS, {}),
        (f"{ACCELERATOR}:Accelerator.check_trigger", "self.mesh is None", "True", REPLICAS, {}),
        (
            f"{ACCELERATOR}:Accelerator.use_model",
            "self.mesh is None and self._dataloaders and model.is_model_parallelized()",
            "False",
            MISUSE,
            {"how": "loader first", "message": "prepare the model first"},
        ),
        (
            f"{ACCELERATOR}:Accelerator._check_setting",
            "state.num_processes != mesh.world.size",
            "False",
            MISUSE,
            {"how": "one process", "message": r"sees 1 process\(es\) of 2"},
        ),
        (
            f"{ACCELERATOR}:Accelerator.get_state_dict",
            "parallel is None or not parallel.is_model_parallelized()",
            "True",
            MISUSE,
            {"how": "state dict", "message": "save_with_merging=True"},
        ),
        (
            f"{ACCELERATOR}:Accelerator.clip_grad_norm_",
            "model is None or",
            "True or",
            "test_norm_without_gradients_on_one_stage_equals_the_other",
            {},
        ),
        (
            f"{ACCELERATOR}:Accelerator.prepare_model",
            "process_group=parallel.mesh.dp.group, ",
            "",
            "test_loop_equals_one_process",
            {"sizes": "tp=2, dp=2"},
        ),
        (
            f"{ACCELERATOR}:Accelerator.load_state",
            "model.load_optimizer(optimizer, folder)",
            "pass",
            "test_save_state_and_load_state",
            {"sizes": "tp=2"},
        ),
        (
            "integrations.stages:autocast_micro_batches",
            "model.forward = MethodType(autocast_forward, model)",
            "pass",
            "test_mixed_precision_reaches_every_micro_batch",
            STAGES,
        ),
    ],
    "ecosystem/test_trainer.py": [
        (
            f"{TRAINER}:ParallelTrainerMixin.floating_point_ops",
            "self._mesh.model.size",
            "1",
            "test_training_equals_one_process",
            {"sizes": "tp=2"},
        ),
    ],
    "ecosystem/test_trainer_evaluation.py": [
        (
            "integrations.stages:EvaluationStages.__call__",
            "if not _has_gaps(value)",
            "if True",
            "test_predictions_of_stages_leave_out_fields_of_other_stages",
            {},
        ),
        (
            "integrations.stages:_concatenate",
            ".sum()",
            ".mean()",
            "test_evaluation_equals_one_process",
            STAGES,
        ),
    ],
    "ecosystem/test_trainer_checkpoints.py": [
        (
            f"{TRAINER}:ParallelTrainerMixin._load_optimizer_and_scheduler",
            'self.lr_scheduler.load_state_dict(state["scheduler"])',
            "pass",
            "test_resumed_training_equals_uninterrupted_training",
            {"sizes": "tp=2"},
        ),
        (
            f"{TRAINER}:ParallelTrainerMixin._load_from_checkpoint",
            "not _is_complete(folder)",
            "False",
            "test_bad_checkpoints_are_refused",
            {"how": "incomplete", "message": "has no valid"},
        ),
        (
            f"{TRAINER}:ParallelTrainerMixin._load_best_model",
            "self._parallel.from_parallelized(self.state.best_model_checkpoint)",
            "pass",
            "test_best_model_is_loaded_and_saved_for_transformers",
            {"sizes": "tp=2"},
        ),
    ],
    OPTIONS: [
        (
            f"{TRAINER}:ParallelTrainerMixin._validate_args",
            "self.model_accepts_loss_kwargs = False",
            "pass",
            "test_accumulated_means_of_classification",
            {"tp": 2, "pp": 1},
        ),
        (
            f"{TRAINER}:ParallelTrainerMixin._share",
            "broadcast_tensors(self._mesh.model, send_to_device(batch, device), 0, device)",
            "batch",
            "test_ranks_of_a_replica_share_batches",
            {"sizes": "pp=2", "streams": True},
        ),
        (
            f"{TRAINER}:ParallelTrainerMixin._agree_on_control",
            "bool(flag)",
            "getattr(control, name)",
            "test_a_callback_on_one_rank_speaks_for_all",
            {},
        ),
        (
            f"{TRAINER}:ParallelTrainerMixin._validate_args",
            "self._staged is not None and self.compute_loss_func is not None",
            "False",
            UNSUITABLE,
            {"what": "loss function"},
        ),
        (
            f"{TRAINER}:ParallelTrainerMixin.hyperparameter_search",
            "self._parallel is None",
            "True",
            "test_search_of_hyperparameters_is_refused",
            {},
        ),
    ],
    PEFT: [
        (
            f"{ADAPT}.adoption:_adopt_linear",
            "tuner.lora_B if outputs",
            "tuner.lora_B if not outputs",
            LORA,
            {**LLAMA, "options": "all linear"},
        ),
        (f"{ADAPT}.initial_values:_copy_shards", "leaf in values", "False", LORA, {**LLAMA, "options": "all linear"}),
        (
            f"{ADAPT}.layers:_AddsBeforeSharing.forward",
            "shared: Tensor = base.share(output)",
            "shared: Tensor = output",
            "test_adapters_of_latent_attention_train_as_on_one_process",
            {"kind": "LoRA"},
        ),
        (
            f"{ADAPT}.experts:_shared",
            "copy_to(base.tp, factor)",
            "factor",
            "test_adapters_of_experts_train_as_on_one_process",
            {"variant": "mixtral", "tp": 2, "ep": 1, "kind": "stacks"},
        ),
        (
            f"{ADAPT}.experts:_shared",
            "if layout.overlaps",
            "if False",
            "test_adapters_of_experts_train_as_on_one_process",
            {"variant": "mixtral", "tp": 4, "ep": 2, "kind": "stacks"},
        ),
        (
            f"{ADAPT}.experts:_shared",
            "base.mesh.dp.size",
            "1",
            "test_adapters_of_experts_over_replicas_train_as_one_process",
            {"tp": 1, "ep": 2, "wrapper": "DDP"},
        ),
        (
            f"{ADAPT}.adoption:_adopt_ia3",
            "layout is not None and layout.overlaps",
            "False",
            "test_ia3_trains_as_on_one_process",
            {**LLAMA, "options": "defaults"},
        ),
        (
            f"{ADAPT}.saving:gather_parameters",
            "gathered[name] = full",
            "gathered[name] = full * 2",
            SAVED,
            {"kind": "LoRA", "tp": 2, "pp": 2},
        ),
        (
            f"{ADAPT}.prompts:local_heads",
            "copy_to(tp, x)[:, start:stop]",
            "x[:, start:stop]",
            PROMPTS,
            {"variant": "llama-9-heads", "tp": 2, "kind": "prefix tuning"},
        ),
        (
            f"{ADAPT}.support:check_config",
            "config.peft_type not in INJECTED",
            "False",
            REFUSES,
            {"kind": "LoHa"},
        ),
        (
            f"{ADAPT}.support:check_layer",
            "isinstance(base, VocabParallelHead)",
            "False",
            REFUSES,
            {"kind": "IA3 on the head"},
        ),
        (
            f"{ADAPT}.support:check_combination",
            'kind not in ("cat", "linear")',
            "False",
            "test_combinations_of_whole_adapters_are_refused",
            {},
        ),
        (
            f"{ADAPT}.support:check_stages",
            "any(stages) and not all(stages)",
            "False",
            "test_adapters_of_one_stage_are_refused_on_all",
            {"targets": ["q_proj"], "layers": [0], "message": "has no layer on"},
        ),
    ],
    "ecosystem/test_peft_zoo.py": [
        (
            f"{ADAPT}.support:check_layer",
            'isinstance(getattr(base, "weight", None), ShardedParameter)',
            "False",
            "test_layers_that_a_mixer_does_not_call_are_refused",
            {},
        ),
    ],
    "ecosystem/test_trl.py": [
        (
            "integrations.trl.trainers:SFTTrainer.compute_loss",
            ", **items",
            "",
            "test_supervised_fine_tuning_on_stages",
            {"case": "alone"},
        ),
        (
            f"{TRL}.head:_score",
            "logit_scaling(model.config, temperature)",
            "logit_scaling(model.config, 2 * temperature)",
            "test_tensor_parallel",
            {"kind": "SFT"},
        ),
        (f"{TRL}.head:_score_parts", "copy_to(cp, each)", "each", "test_tokens_divided_over_ranks", {"case": "SFT"}),
        (
            f"{TRL}.head:_score_parts",
            "target_N[start : start + size]",
            "target_N[:size]",
            "test_tokens_divided_over_ranks",
            {"case": "SFT"},
        ),
        (f"{TRL}.refusals:check_trl_arguments", "if given:", "if False:", REFUSES, {"what": "offloading"}),
        (f"{TRL}.refusals:check_trl_arguments", "mesh.pp.size > 1", "False", REFUSES, {"what": "stages, DPO"}),
        (
            f"{TRAINER}:ParallelTrainerMixin._check_class",
            "of_trl is not None",
            "False",
            "test_other_trainers_of_trl_are_refused",
            {},
        ),
        (
            f"{TRL}.mixins:TRLMixin._check_class",
            "of_trl is not self.trl_class",
            "False",
            "test_trainers_below_ours_are_refused",
            {},
        ),
        (
            "layers.divergence:_Divergence.backward",
            "- ctx.mean_gap_N[rows, None]",
            "",
            "test_losses_over_a_batch_and_generated_completions",
            {"kind": "distillation"},
        ),
        (
            "deploy.running_batch.sampling:CommonDraws.next",
            "self._noise_BV[number]",
            "self._noise_BV[0]",
            "test_losses_over_a_batch_and_generated_completions",
            {"kind": "distillation"},
        ),
        (
            f"{TRL}.rollouts:generating_in_batch",
            "del changed.generate",
            "pass",
            "test_completions_come_from_the_running_batch",
            {"kind": "DistillationTrainer"},
        ),
    ],
    "modeling/test_copying.py": [
        ("modeling.saving:SavableModel.__reduce_ex__", "self.mesh is not None", "False", PICKLED, SHARDS),
        ("distributed.mesh:Axis.__reduce_ex__", "self.group is None", "True", PICKLED, SHARDS),
        (
            f"{SHARD}.tensors:Shard.__deepcopy__",
            ".clone(memory_format=torch.preserve_format)",
            "",
            "test_copy_of_a_sharded_model_computes_as_one_process",
            {"variant": "llama"},
        ),
    ],
    "modeling/test_selective_checkpointing.py": [
        (
            "layers.linear:add_bias",
            "torch.is_grad_enabled() and has_dispatch_mode()",
            "False",
            "test_step_with_selective_checkpointing_matches_one_process",
            {"variant": "gpt2", "policy": "everything"},
        ),
    ],
    "ecosystem/test_peft_threads.py": [
        (
            "compat.tensor_parallel.adapters:shard_with_adapters",
            "if tuner.merged:",
            "if False:",
            "test_options_without_support_for_threads_are_refused",
            {},
        ),
        (
            "compat.tensor_parallel.adapters:_follow_first_part",
            "vars(module)[state] = copy.copy(vars(first)[state])",
            "pass",
            "test_many_adapters",
            {},
        ),
    ],
    "ecosystem/test_peft_deployed.py": [
        (
            "deploy.engine:Engine.call",
            "self._restoring not in (None, threading.get_ident())",
            "False",
            "test_deployed_model_computes_with_its_active_adapters",
            {"tp": 2, "pp": 1},
        ),
        (
            "deploy.adapters:_without",
            "call[1][1] not in names",
            "True",
            "test_deployed_model_computes_with_its_active_adapters",
            {"tp": 2, "pp": 1},
        ),
    ],
    "server/test_adapters.py": [
        (
            "server.adapter_turns:AdapterTurns._admit",
            "any(call.adapter != self._turn for call in self._waiting)",
            "False",
            "test_adapters_take_turns_in_the_order_of_arrival",
            {},
        ),
        (
            "server.adapter_turns:AdapterTurns._switch_to",
            "self._active = _UNKNOWN",
            "self._active = adapter",
            "test_cancelled_calls_leave_the_queue_and_failed_switches_are_tried_again",
            {},
        ),
    ],
    "checkpoint/test_quantized.py": [
        (
            "checkpoint.quantized.packed:_product",
            "packing.compute_dtype or given",
            "torch.float32",
            "test_adapters_train_over_quantized_weights",
            {"name": "gptq"},
        ),
    ],
}
"""Other cases; `make test-zoo` runs them."""

QUANTIZED: dict[str, list[Row]] = {
    "ecosystem/test_in_place_quantization.py": [
        ("modeling.quantizing:quantize_linear_layers", "if problems", "if False", TORCHAO, {}),
        ("modeling.quantizing:check_not_quantized", "is_quantized(tensor)", "False", TORCHAO, {}),
        (
            "modeling.replaced_layers:_is_sharded",
            "isinstance(",
            "not isinstance(",
            "test_float8_training_is_refused",
            {},
        ),
    ],
    "ecosystem/test_qlora.py": [
        (
            "modeling.packing:check_combination",
            "settings is not None",
            "False",
            "test_weights_that_stay_quantized",
            {"tp": 2, "pp": 1, "dtype": torch.bfloat16},
        ),
        (
            "checkpoint.quantized.packed:PackedWeight.__torch_dispatch__",
            "argument.alias_info.is_write",
            "False",
            "test_weights_that_stay_quantized",
            {"tp": 2, "pp": 1, "dtype": torch.bfloat16},
        ),
        (
            "modeling.adapters.initial_values:_type_of_adapters",
            "dtype.itemsize < 4",
            "False",
            "test_over_bitsandbytes_in_bfloat16",
            {},
        ),
    ],
}
"""Tests of quantisation; its libraries have to be installed."""


QUANTIZATION = (pytest.mark.zoo, pytest.mark.quantization)


def cases() -> list[Any]:
    found = []
    for table, marks in ((FAST, ()), (SLOW, pytest.mark.zoo), (QUANTIZED, QUANTIZATION)):
        for file, rows in table.items():
            for function, old, new, test, arguments in rows:
                name = f"{function.partition(':')[2]}-{old[:20]}-{test}"
                found.append(pytest.param(file, Edit(function, old, new), test, arguments, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("file", "edit", "name", "arguments"), cases())
def test_guard_is_needed(
    request: pytest.FixtureRequest, pool: Pool, file: str, edit: Edit, name: str, arguments: dict[str, Any]
) -> None:
    """The test passes, and fails with the mistake."""
    assert_is_caught(request, pool, edit, file, name, arguments)
