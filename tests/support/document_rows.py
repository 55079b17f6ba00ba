"""The features that the documents of the predecessors promise, and the tests that show them here.

``make table`` writes the tables of docs/migration/documents.md from this file. A new test of a feature is added to its
row.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

PAGE = ROOT / "docs" / "migration" / "documents.md"
BEGIN, END = "<!-- rows:begin -->", "<!-- rows:end -->"


@dataclass(frozen=True)
class Row:
    """A feature in our words, the tests that show it (below tests/), and differences from the document."""

    feature: str
    tests: tuple[str, ...]
    note: str = ""


def _row(feature: str, *tests: str, note: str = "") -> Row:
    return Row(feature, tests, note)


_CHAPTERS = "documents/test_training_chapters.py::test_"
_MODELS, _EXTRA = f"{_CHAPTERS}model_parallelism_chapter_runs_as_printed", f"{_CHAPTERS}additional_parameters_chapter_"
_STEP, _STAGES = f"{_CHAPTERS}training_chapter_without_pipeline_matches", f"{_CHAPTERS}training_chapter_with_pipeline_"
_STEP, _STAGES, _EXTRA = f"{_STEP}_one_process", f"{_STAGES}matches_one_process", f"{_EXTRA}runs_as_printed"
_MPU = "distributed/test_mpu.py::test_"
_GROUPS = f"{_MPU}sizes_make_the_groups"
_COLLECTIVES = f"{_MPU}collectives_have_the_gradients_of_megatron"
_DATA = "documents/test_data_chapter.py::test_data_processing_chapter_runs_as_printed"
_DEEPSPEED = "documents/test_deepspeed_chapter.py::test_deepspeed_chapter_runs_as_printed"
_FUSION = "documents/test_fusion_chapters.py::test_kernel_fusion_chapters_run_as_printed"
_DEPLOYED = "documents/test_deployment_chapter.py::test_deployment_chapter_runs_as_printed"
_TUTORIAL = "documents/test_tutorial.py::test_"
_PRINTED = f"{_TUTORIAL}tutorial_runs_as_printed"
_SERVED = "documents/test_parallelformers_document.py::test_parallelformers_document_runs_as_printed"
_THREADS = "documents/test_tensor_parallel_document.py::test_tensor_parallel_document_runs_as_printed"
_DISPATCH = "documents/test_tensor_parallel_document.py::test_tensor_parallel_dispatch_block_runs"
_BAD = "config/test_bad_input.py::test_"
_FAULTS = "pipeline/test_schedule_faults.py::test_broken_micro_batch_loop_raises_on_every_rank"

OSLO_1 = {
    "A1": _row(
        "started by `python -m torch.distributed.launch`, `torchrun` or `deepspeed`; `MPU.initialize_distributed()`",
        f"{_CHAPTERS}launcher_commands_of_the_chapter_run",
        _GROUPS,
        note="gloo on the CPU as well as NCCL",
    ),
    "A2": _row(
        "model classes, configurations, base classes and layers under the names of transformers",
        "models/test_zoo.py::test_names_that_oslo_1_exported_are_there",
        "models/test_zoo.py::test_base_classes_of_transformers_are_exported",
        note="no `*LayerPolicy` and no `Fused*` classes: a [plan](../concepts/plan.md) and `fuse()` take their places",
    ),
    "A3": _row("`from_pretrained_with_parallel`", _MODELS, f"{_BAD}directory_without_a_checkpoint_is_named"),
    "A4": _row(
        "models from the hub", _MODELS, "checkpoint/test_checkpoint.py::test_reading_a_shard_needs_memory_for_the_shard"
    ),
    "A5": _row("models from a merged directory", _MODELS),
    "A6": _row(
        "models from split files",
        _MODELS,
        "checkpoint/test_resharding.py::test_split_checkpoint_of_four_ranks_loads_at_other_sizes",
        note="at any sizes",
    ),
    "A7": _row(
        "`from_config_with_parallel`",
        _MODELS,
        "checkpoint/test_pipeline_checkpoint.py::test_from_config_seed_gives_the_same_weights_on_every_mesh",
        note="the configuration is not changed",
    ),
    "A8": _row(
        "rules for the sizes",
        f"{_BAD}tensor_parallel_size_is_at_most_the_number_of_heads",
        f"{_BAD}world_size_must_be_a_multiple_of_the_mesh",
        note="no power of two is needed",
    ),
    "A9": _row("`seed=`", _EXTRA, note="set before anything is drawn, not after"),
    "A10": _row(
        "`resize_token_embeddings=`",
        _EXTRA,
        f"{_BAD}resizing_sharded_embeddings_after_construction_is_rejected",
    ),
    "A11": _row("`micro_batch_size=`, `set_micro_batch_size()`", _EXTRA, note="the method exists without stages too"),
    "A12": _row(
        "keyword arguments of transformers (`pad_token_id`, `torch_dtype`)",
        _MODELS,
        f"{_BAD}arguments_of_transformers_and_of_classes_are_taken",
    ),
    "A13": _row(
        "`parallelize(model, tensor_parallel_size=...)`",
        "documents/test_parallelformers_document.py::test_parallelize_of_oslo_shards_an_existing_model",
    ),
    "A14": _row("`MPU(2, 2)` makes the groups of a layout", _GROUPS),
    "A15": _row("groups of the tensor, pipeline, data and model axes", _GROUPS),
    "A16": _row(
        "`get_p2p_communication_groups()`",
        _GROUPS,
        f"{_MPU}tensors_go_from_stage_to_stage",
        note="made by the first call",
    ),
    "A17": _row("`get_embedding_tied_group()`", _GROUPS, note="made by the first call"),
    "A18": _row("sizes of the groups", _GROUPS),
    "A19": _row("positions in the groups", _GROUPS),
    "A20": _row("`get_tensor_parallel_src_rank()`", _GROUPS),
    "A21": _row("`is_pipeline_first_stage()`, `is_pipeline_last_stage()`", _GROUPS),
    "A22": _row("lists of global ranks", _GROUPS, note="lists of one model do not grow with the next"),
    "A23": _row(
        "`model_parallel_is_initialized()`, `destroy_model_parallel()`", _GROUPS, note="the groups are destroyed"
    ),
    "A24": _row("`broadcast`, `reduce`, `scatter`, `gather` with gradients", _COLLECTIVES),
    "A25": _row(
        "`p2p(tensor, src_stage, dst_stage)`", f"{_MPU}tensors_go_from_stage_to_stage", note="a send, not a broadcast"
    ),
    "A26": _row(
        "`make_pipeline_partition(num_items, num_parts)`",
        f"{_MPU}pipeline_partition_leaves_the_rest_to_the_last_stage",
        note="stages themselves are balanced by parameters, or set by `blocks_per_stage`",
    ),
    "A27": _row(
        "`mpu=model.mpu` for DeepSpeed; `model.base_model.mpu`",
        _DEEPSPEED,
        f"{_MPU}two_models_of_one_class_have_groups_and_modules_of_their_own",
    ),
    "A28": _row(
        "`model.gpu_modules()`", _STAGES, f"{_MPU}two_models_of_one_class_have_groups_and_modules_of_their_own"
    ),
    "A29": _row(
        "`model.gpu_parameters()`", _STAGES, f"{_MPU}two_models_of_one_class_have_groups_and_modules_of_their_own"
    ),
    "A30": _row("`is_tensor_parallelized()` and its like", _MODELS),
    "A31": _row(
        "`DistributedDataParallel` over the data-parallel group",
        _STEP,
        _STAGES,
        note="with stages, all micro-batches are averaged, not the first alone",
    ),
    "A32": _row("`DistributedSampler` with the data-parallel rank", _STAGES),
    "A33": _row("a training step without stages", _STEP),
    "A34": _row(
        "a training step with stages, `for micro_output in model(...)`",
        _STAGES,
        "pipeline/test_shared_outputs.py::test_losses_and_logits_are_known_in_the_body_of_the_loop",
        note="before the last stage, numbers inside the loop with `share_loss=True`, logits with `share_logits=True`",
    ),
    "A35": _row(
        "losses of micro-batches",
        "pipeline/test_micro_batch_loss.py::test_micro_batch_losses_add_up",
        note="they add up to the loss of the batch; in OSLO 1, gradients were too large by their number",
    ),
    "A36": _row("`backward()` in the body of the loop, on every rank", _STAGES, _FAULTS),
    "A37": _row("mixed precision with a `GradScaler`", f"{_CHAPTERS}mixed_precision_chapter_runs_as_printed"),
    "A38": _row(
        "gradients of tied embeddings on two stages",
        "pipeline/test_pipeline.py::test_train_step_of_language_model_matches_one_process",
        note="counted once, and kept if the loop is left early",
    ),
    "A39": _row(
        "DeepSpeed engines",
        _DEEPSPEED,
        "pipeline/test_deepspeed.py::test_deepspeed_settings_unsupported_on_stages_are_rejected",
    ),
    "A40": _row(
        "`gradient_checkpointing_enable()`, `_disable()`",
        f"{_CHAPTERS}activation_checkpointing_chapter_runs_as_printed",
    ),
    "A41": _row(
        "`save_pretrained_with_parallel` and its arguments",
        _MODELS,
        "checkpoint/test_save_arguments.py::test_arguments_of_saving",
        note="the text says `save_with_merge`, the code `save_with_merging`: both work",
    ),
    "A42": _row("split files `pytorch_model_tp=0_pp=0.bin`", _MODELS, f"{_BAD}saving_into_a_file_is_rejected"),
    "A43": _row(
        "what a split file holds",
        "checkpoint/test_resharding.py::test_oslo_1_split_files_load_without_a_manifest",
        "pipeline/test_stage.py::test_each_parameter_is_on_the_stages_that_use_it",
        note="the weights of its own stage only; files of OSLO 1 load",
    ),
    "A44": _row(
        "saving from one process",
        "checkpoint/test_checkpoint_saving.py::test_merged_files_equal_the_files_of_transformers",
        "checkpoint/test_save_arguments.py::test_one_process_saves_files_for_transformers",
    ),
    "A45": _row(
        "merged checkpoints",
        _MODELS,
        "checkpoint/test_checkpoint_saving.py::test_merging_needs_memory_for_one_tensor",
        note="`model.safetensors`, as transformers writes now; `pytorch_model.bin` with `safe_serialization=False`",
    ),
    "A46": _row(
        "`save_config`, `save_function`, `state_dict`",
        "checkpoint/test_checkpoint_saving.py::test_save_function_writes_bin_files",
        "checkpoint/test_save_arguments.py::test_arguments_of_saving",
        "checkpoint/test_save_arguments.py::test_checkpoints_are_uploaded_to_a_hub",
    ),
    "A47": _row(
        "`model.fuse()`", _FUSION, "fusion/test_fusion.py::test_unfuse_restores_every_bit", note="`unfuse()` undoes it"
    ),
    "A48": _row(
        "`fuse([GPT2MLP])`",
        _FUSION,
        "fusion/test_fusion.py::test_fuse_selects_modules_by_class",
        "fusion/test_fusion.py::test_fuse_rejects_unknown_classes",
    ),
    "A49": _row(
        "bias, GeLU and dropout in one kernel",
        "fusion/test_fusion.py::test_fused_loss_and_gradients_match_transformers",
        "kernels/test_kernels.py::test_kernels_match_torch_in_the_triton_interpreter",
        note="each GeLU keeps its own formula",
    ),
    "A50": _row(
        "scale, mask and softmax in one kernel; those of Apex",
        "kernels/test_kernels.py::test_fully_masked_softmax_rows_match_transformers",
        "fusion/test_fusion_on_gpus.py::test_fuse_with_apex_calls_its_norms_and_softmax",
    ),
    "A51": _row(
        "`generate(..., fused_no_repeat_ngram_blocking=True)`",
        _FUSION,
        "fusion/test_ngrams.py::test_block_repeats_matches_transformers",
        "fusion/test_ngrams.py::test_block_repeats_handles_more_than_1024_tokens",
    ),
    "A52": _row(
        "`DatasetPreprocessor`",
        _DATA,
        "data/test_preprocess.py::test_eod_token_outside_the_vocabulary_is_rejected",
        "data/test_preprocess.py::test_tokenizer_may_be_given_by_its_name",
        note="the text says `chunk_size`, the code `chunksize`: both work",
    ),
    "A53": _row("`preprocess(iterable, save_file_name, log_interval)`", _DATA),
    "A54": _row("`open_jsonl(file, json_key)`", _DATA, "data/test_preprocess.py::test_bad_jsonl_line_is_named"),
    "A55": _row(
        "files of the `mmap` kind",
        "data/test_indexed_dataset.py::test_mmap_index_has_the_layout_of_megatron",
        "data/test_indexed_dataset.py::test_megatron_core_reads_and_writes_the_same_files",
    ),
    "A56": _row(
        "files of the `lazy` and `cached` kinds",
        "data/test_indexed_dataset.py::test_lazy_index_has_the_layout_of_fairseq",
    ),
    "A57": _row(
        "`DatasetForCausalLM`",
        _DATA,
        "data/test_causal_lm.py::test_samples_match_oslo_1",
        "data/test_causal_lm.py::test_split_holds_the_tokens_of_its_documents_only",
        note="`end_weight` is 1.0 by default, not 0.0; splits count documents, not samples",
    ),
    "A58": _row(
        "its index files",
        "data/test_causal_lm.py::test_splits_of_one_name_have_separate_indices",
        note='the test set is made with `split_type="valid"`, which works, and `max_seq_length=test`, a typing error',
    ),
    "A59": _row("`DatasetBlender`", _DATA, "data/test_blend.py::test_blender_keeps_the_weights_at_every_prefix"),
    "A60": _row(
        "`DistributedProxySampler`",
        _DATA,
        "data/test_sampling.py::test_proxy_sampler_over_one_index_and_over_a_batch_sampler",
    ),
    "A61": _row("`InfiniteDataLoader`", _DATA, "data/test_sampling.py::test_infinite_loader_rejects_an_empty_loader"),
    "A62": _row(
        "`deployment=True`",
        "server/test_serve.py::test_flask_script_of_the_documents_runs",
        f"{_BAD}deploy_and_deployment_must_agree",
    ),
    "A63": _row("deployment of merged and of split checkpoints", _DEPLOYED),
    "A64": _row(
        "`fuse()` of a deployed model", _DEPLOYED, note="reaches the workers; it changed only the application's copy"
    ),
    "A65": _row("no loop over micro-batches in a deployed model with stages", _DEPLOYED),
    "A66": _row(
        "`.cpu()`, `.cuda()`, `.to()` end the workers", _DEPLOYED, note="the model that comes back has its weights"
    ),
    "A67": _row("memory of a deployed model by device", _DEPLOYED),
    "A68": _row(
        "shared memory in containers",
        _DEPLOYED,
        note="workers map no file below /dev/shm, so `--shm-size` is not needed",
    ),
    "A69": _row("the seed of the workers", "deploy/test_deploy.py::test_generate_samples_by_its_seed"),
}

OSLO_2 = {
    "B1": _row("the same launchers as OSLO 1", _PRINTED, f"{_CHAPTERS}launcher_commands_of_the_chapter_run"),
    "B2": _row(
        "`initialize(model, config)` with a dict or a JSON file",
        _PRINTED,
        f"{_TUTORIAL}unsupported_parallel_configurations_are_rejected",
        note="the first line of the printed file, `// oslo-config.json`, is its name and no JSON",
    ),
    "B3": _row(
        "sections of the configuration",
        f"{_TUTORIAL}unsupported_parallel_configurations_are_rejected",
        "compat/test_oslo2_sections.py::test_activation_checkpointing_gives_the_gradients_of_one_process",
        "compat/test_oslo2_sections.py::test_kernel_fusion_fuses",
        "compat/test_oslo2_sections.py::test_tp_mapping_names_layers_of_the_model",
        "compat/test_oslo2_sections.py::test_tp_mapping_of_a_class_that_the_zoo_lacks",
    ),
    "B4": _row(
        "`enable`",
        _PRINTED,
        f"{_TUTORIAL}unsupported_models_are_rejected",
        note="some examples lack it, which sharded nothing: true by default here",
    ),
    "B5": _row(
        "rules for `tensor_parallel_size`",
        f"{_TUTORIAL}unsupported_parallel_configurations_are_rejected",
        note="two of the printed rules are the wrong way round: at most as many as heads",
    ),
    "B6": _row("inference as usual", _PRINTED, f"{_TUTORIAL}architectures_of_the_tutorial_match_one_process"),
    "B7": _row(
        "training with an optimizer that was made before",
        _PRINTED,
        f"{_TUTORIAL}tutorial_with_stages_matches_one_process",
    ),
    "B8": _row(
        "`save_parallelized`, files `pytorch_model_tp_0_pp_0.bin`",
        _PRINTED,
        "checkpoint/test_save_arguments.py::test_checkpoints_are_uploaded_to_a_hub",
    ),
    "B9": _row(
        "`from_parallelized`", _PRINTED, f"{_TUTORIAL}missing_weights_are_rejected", note="missing weights are an error"
    ),
    "B10": _row(
        "`save_parallelized(..., merge_checkpoints=True)`",
        _PRINTED,
        note="`model.safetensors`, as transformers writes now; `pytorch_model.bin` with `safe_serialization=False`",
    ),
    "B11": _row("eleven architectures", f"{_TUTORIAL}architectures_of_the_tutorial_match_one_process"),
    "B12": _row("stages", f"{_TUTORIAL}tutorial_with_stages_matches_one_process", note="the tutorial had none"),
    "B13": _row("no resizing after `initialize`", f"{_TUTORIAL}architectures_of_the_tutorial_match_one_process"),
}

PARALLELFORMERS = {
    "C1": _row("`parallelize(model, num_gpus, fp16, ...)`", _SERVED),
    "C2": _row("environment variables", _SERVED, note="not written, `CUDA_VISIBLE_DEVICES` least of all"),
    "C3": _row(
        "`verbose='simple'` and `'detail'`",
        _SERVED,
        "deploy/test_deploy_start.py::test_arguments_are_checked_before_anything_starts",
    ),
    "C4": _row(
        "`generate` and calls with tensors on the CPU",
        _SERVED,
        "deploy/test_remote_module.py::test_attributes_equal_the_full_model",
        "deploy/test_remote_module.py::test_methods_of_clip_run_in_the_workers",
    ),
    "C5": _row(
        "a Flask application",
        "server/test_serve.py::test_flask_script_of_the_documents_runs",
        "deploy/test_running_batch.py::test_threads_get_the_answers_of_a_single_thread",
        note="any number of requests at a time, and no `__main__` guard",
    ),
    "C6": _row(
        "`memory_allocated()`, `memory_reserved()`, `memory_chached()`",
        _SERVED,
        note="numbers of bytes; `memory_cached` too",
    ),
    "C7": _row(
        "`.cuda()`, `.cpu()`, `.to()` end the workers",
        _SERVED,
        "compat/test_back_and_forth.py::test_model_goes_through_the_front_doors_in_any_order",
    ),
    "C8": _row("the list of models", "deploy/test_deploy_zoo.py::test_deployed_architectures_answer_as_transformers"),
    "C9": _row(
        "`custom_policies`",
        "compat/test_policies.py::test_a_model_with_a_policy_answers_as_before",
        "compat/test_policies.py::test_policies_that_do_not_fit_are_refused",
    ),
}

TENSOR_PARALLEL = {
    "D1": _row(
        "`tensor_parallel(module, device_ids, ...)`",
        _THREADS,
        "compat/test_tensor_parallel.py::test_tensor_parallel_step_of_every_architecture_matches_transformers",
        "compat/test_any_model.py::test_plain_modules_train_as_on_one_process",
        "compat/test_any_model.py::test_architectures_that_the_zoo_lacks_train_as_on_one_process",
        "compat/test_any_model.py::test_code_of_a_checkpoint",
        "compat/test_any_model.py::test_code_of_an_encoder",
        "compat/test_tensor_parallel_config.py::test_a_transformer_written_by_hand_trains_as_on_one_process",
        "compat/test_tensor_parallel_config.py::test_rules_that_do_not_fit_are_refused",
    ),
    "D2": _row(
        "all GPUs by default; devices of the CPU",
        _THREADS,
        "compat/test_tensor_parallel.py::test_gpus_that_are_not_there_are_named",
    ),
    "D3": _row(
        "beam search and training",
        _THREADS,
        "compat/test_tensor_parallel.py::test_tensor_parallel_generation_matches_transformers",
    ),
    "D4": _row(
        "`sharded`: other parameters over the devices",
        "compat/test_tensor_parallel_weights.py::test_sharded_step_matches_transformers",
        "compat/test_tensor_parallel_weights.py::test_devices_hold_each_parameter_once",
    ),
    "D5": _row(
        "`distributed=True`",
        "compat/test_tensor_parallel.py::test_tensor_parallel_inside_a_process_group",
        note="a model, not a tuple",
    ),
    "D6": _row(
        "`save_tensor_parallel`",
        _THREADS,
        note="`torch.save` needs the name of a file where the document has a directory",
    ),
    "D7": _row(
        "`convert_state_dict`, `infer_sharded_device_map`",
        _DISPATCH,
        note="the printed loop goes over `state_dict`, not over the converted one",
    ),
    "D8": _row(
        "`TENSOR_PARALLEL_USE_NATIVE=1`",
        "compat/test_tensor_parallel_weights.py::test_native_collectives_are_the_only_ones",
        note="nothing to switch: devices of one process exchange tensors by copies and sums of torch",
    ),
    "D9": _row(
        "adapters and quantised weights",
        "ecosystem/test_quantized_tensor_parallel.py::test_weights_of_torchao_are_sharded",
        "ecosystem/test_peft_threads.py::test_models_that_have_adapters_are_sharded_with_them",
        "compat/test_tensor_parallel_config.py::test_a_module_without_weights_is_loaded_after_it_is_sharded",
        note="torchao; adapters of peft, added before or after; layers of bitsandbytes are refused with the way out",
    ),
}

DOCUMENTS = {
    "OSLO 1, usage": OSLO_1,
    "OSLO 2, tutorials": OSLO_2,
    "parallelformers, readme": PARALLELFORMERS,
    "tensor_parallel, readme": TENSOR_PARALLEL,
}
NOT_SHOWN: set[str] = set()
"""Rows without a test. The page says so; a row leaves this set when it gets one."""


def rows() -> dict[str, Row]:
    """All rows by their numbers."""
    return {number: row for document in DOCUMENTS.values() for number, row in document.items()}


def known_tests() -> set[str]:
    """``folder/file.py::test`` of each test function, found without importing it."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def table(document: dict[str, Row]) -> str:
    """A table with a row per feature: its number, the feature, the tests, and the differences."""
    lines = ["| | feature | shown by | different here |", "|---|---|---|---|"]
    for number, row in document.items():
        tests = "<br>".join(f"`{test}`" for test in row.tests) or "not shown"
        lines.append(f"| {number} | {row.feature} | {tests} | {row.note} |")
    return "\n".join(lines)


def update_page(text: str) -> str:
    """``text`` with the tables between its markers replaced by the current ones."""
    before, _, rest = text.partition(BEGIN)
    tables = "\n\n".join(f"## {name}\n\n{table(document)}" for name, document in DOCUMENTS.items())
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


def main(page: Path = PAGE) -> None:
    page.write_text(update_page(page.read_text()))


if __name__ == "__main__":
    main()
