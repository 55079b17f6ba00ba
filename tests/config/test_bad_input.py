"""Bad arguments raise on every rank before anything starts, with a message that names the fix."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

import oslo_models
from oslo_models import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoForCausalLM,
    registry,
)
from oslo_models.config.arguments import Arguments

from support import draws, zoo
from support.pool import Pool

CONFIG = dict(vocab_size=53, n_positions=16, n_embd=24, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=1)


def from_config(cls: type = GPT2LMHeadModel, config: Any = None, **kwargs: Any) -> None:
    """In a worker, construct with ``kwargs``; a value ``{"of rank": [...]}`` differs between ranks."""
    cls.from_config_with_parallel(config or GPT2Config(**CONFIG), **_own(kwargs))


def from_pretrained(path: Path, **kwargs: Any) -> None:
    GPT2LMHeadModel.from_pretrained_with_parallel(path, **_own(kwargs))


def _own(kwargs: dict[str, Any]) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    return {key: value["of rank"][rank] if isinstance(value, dict) else value for key, value in kwargs.items()}


def refused(pool: Pool, world: int, function: Any, *args: Any, kind: type = ValueError, **kwargs: Any) -> list[str]:
    """Return the error message of every rank."""
    return [str(error) for error in pool.run(world, _call, function, args, kwargs, expect=kind)]


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function(*args, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "gpt2"
    transformers.GPT2LMHeadModel(GPT2Config(**CONFIG)).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_parallel_sizes_must_be_positive_integers(pool: Pool, name: str, value: object) -> None:
    for message in refused(pool, 2, from_config, **{name: value}):
        assert message == f"{name} must be an integer of at least 1, got {value!r}"


def test_tensor_parallel_size_is_at_most_the_number_of_heads(pool: Pool) -> None:
    for message in refused(pool, 2, from_config, tensor_parallel_size=5):
        assert message == "tensor_parallel_size=5 is more than num_attention_heads=4 of GPT2Config; use 1 to 4"


@pytest.mark.parametrize(
    ("model_type", "heads"),
    [("mamba2", "the 6 heads of each mixer"), ("qwen3_next", "the 3 heads of each linear_attn")],
)
def test_heads_that_are_not_of_attention_are_named(model_type: str, heads: str) -> None:
    cls: Any = getattr(oslo_models, zoo.main_head(model_type))
    with pytest.raises(ValueError, match=f"tensor_parallel_size=7 is more than {heads} of .*Config; use 1 to"):
        cls.from_config_with_parallel(zoo.config(model_type), 7)


def stated(config: Any, path: str) -> Any:
    """Return the value of ``"decoder.num_attention_heads"`` or of ``"per_layer_config[1].num_attention_heads"``."""
    for part in path.split("."):
        name, _, place = part.partition("[")
        config = getattr(config, name)
        config = config[int(place.rstrip("]"))] if place else config
    return config


def refusals(cls: Any, config: PreTrainedConfig) -> Iterator[str]:
    """Yield the messages about sizes that this configuration does not support."""
    plan = cls.plan(config)
    too_many = 2 if plan.single_rank_reason else (plan.max_ranks() or 0) + 1
    for check in (partial(plan.check_ranks, cls.__name__, config), partial(plan.check_stages, cls.__name__)):
        try:
            check(too_many)
        except ValueError as error:
            yield str(error)


def test_refusals_state_the_values_of_the_configuration(seed: int) -> None:
    """Draw each type with independent numbers of heads, and ask for one rank more than it allows."""
    wrong, named = [], set()
    for model_type in registry.ARCHITECTURES:
        name = zoo.main_head(model_type)
        config = next(draws.draws(name, model_type, seed)).config
        for message in refusals(registry.find(name), config):
            for path, value in re.findall(r"([\w.\[\]]+)=([\w']+(?:\.\d+)?)", message):
                if not path.endswith("parallel_size"):
                    named.add(path)
                    wrong += [message] if repr(stated(config, path)) != value else []
    assert not wrong, "\n".join(wrong)
    assert {"num_attention_heads", "num_key_value_heads", "decoder_attention_heads"} < named


@pytest.mark.parametrize(
    ("model_type", "changes", "limit"),
    [
        (
            "jetmoe",
            {"num_key_value_heads": 1, "num_experts_per_tok": 2},
            "num_key_value_heads=1 of JetMoeConfig; use 1",
        ),
        (
            "laguna",
            {"num_attention_heads_per_layer": [6, 2]},
            "num_attention_heads_per_layer[1]=2 of LagunaConfig; use 1 to 2",
        ),
        ("bart", {"decoder_attention_heads": 1}, "decoder_attention_heads=1 of BartConfig; use 1"),
        ("diffllama", {}, "the 1 indivisible group of heads of each self_attn of DiffLlamaConfig; use 1"),
    ],
)
def test_the_attribute_that_limits_ranks_is_named(model_type: str, changes: dict[str, Any], limit: str) -> None:
    config = zoo.config(model_type, **changes)
    if model_type == "diffllama":
        config.num_attention_heads, config.num_key_value_heads = 2, 2
    message, *_ = refusals(registry.find(zoo.main_head(model_type)), config)
    assert re.fullmatch(f"tensor_parallel_size=[23] is more than {re.escape(limit)}", message)


def test_pipeline_parallel_size_is_at_most_the_number_of_blocks(pool: Pool) -> None:
    for message in refused(pool, 4, from_config, pipeline_parallel_size=4):
        assert "pipeline_parallel_size=4 is more than the 3 blocks of GPT2LMHeadModel; use 1 to 3" in message


def test_world_smaller_than_the_mesh_is_rejected(pool: Pool) -> None:
    for message in refused(pool, 2, from_config, tensor_parallel_size=2, pipeline_parallel_size=2):
        assert "needs 4 processes, but the world size is 2" in message and "torchrun --nproc-per-node=4" in message


def test_world_size_must_be_a_multiple_of_the_mesh(pool: Pool) -> None:
    for message in refused(pool, 3, from_config, tensor_parallel_size=2):
        assert "world size 3 is not a multiple" in message and "1 processes would be left over" in message
        assert "start 2 or 4 processes" in message


def test_parallel_sizes_without_a_launcher_are_rejected(warm: None) -> None:
    code = (
        "from oslo_models import GPT2Config, GPT2LMHeadModel\n"
        f"GPT2LMHeadModel.from_config_with_parallel(GPT2Config(**{CONFIG!r}), tensor_parallel_size=2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "torchrun --nproc-per-node=2" in done.stderr and "deploy=True" in done.stderr


def test_deploy_and_deployment_must_agree(pool: Pool) -> None:
    for message in refused(pool, 1, from_config, deploy=True, deployment=False):
        assert "deploy=True and deployment=False are the same argument" in message
    pool.run(1, _call, from_config, (), {"deploy": False, "deployment": False})
    for wrong in ("no", "", 0, 1, []):
        for message in refused(pool, 1, from_config, deployment=wrong):
            assert f"deployment must be True, False or None, got {wrong!r}" in message


def test_arguments_that_differ_between_ranks_are_named(pool: Pool, saved: Path) -> None:
    for message in refused(pool, 2, from_config, tensor_parallel_size={"of rank": [2, 1]}, seed={"of rank": [3, 4]}):
        assert "tensor_parallel_size: rank 0 has 2, rank 1 has 1" in message
        assert "seed: rank 0 has 3, rank 1 has 4" in message
        assert "resize_token_embeddings" not in message
    for message in refused(
        pool, 2, from_pretrained, saved, tensor_parallel_size=2, dtype={"of rank": ["float32", "float64"]}
    ):
        assert "dtype: rank 0 has 'float32', rank 1 has 'float64'" in message
    other = GPT2Config(**{**CONFIG, "n_embd": 48})
    for message in refused(pool, 2, _different_configs, other, tensor_parallel_size=2):
        assert "config.n_embd: rank 0 has 24, rank 1 has 48" in message


def _different_configs(other: GPT2Config, **kwargs: Any) -> None:
    from_config(config=other if torch.distributed.get_rank() else None, **kwargs)


def test_bad_argument_on_one_rank_raises_on_all(pool: Pool) -> None:
    messages = refused(pool, 2, from_config, tensor_parallel_size={"of rank": [2, 0]})
    assert messages[1] == "tensor_parallel_size must be an integer of at least 1, got 0"
    assert "rank 1 failed: tensor_parallel_size must be an integer of at least 1, got 0" in messages[0]


@pytest.mark.parametrize("seed_value", [-1, "7", 1.5, True])
def test_seed_must_be_a_non_negative_integer(pool: Pool, seed_value: object) -> None:
    for message in refused(pool, 1, from_config, seed=seed_value):
        assert message == f"seed must be an integer of at least 0, got {seed_value!r}"


@pytest.mark.parametrize("value", [0, -1.5, True, "60", None, float("inf"), float("nan")])
def test_timeout_must_be_a_positive_number(pool: Pool, value: object) -> None:
    for message in refused(pool, 2, from_config, timeout=value):
        assert message == f"timeout must be a number of seconds greater than 0, got {value!r}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2,1", "tensor_parallel_shares must be a list of integers such as"),
        ([2, 0], "each of tensor_parallel_shares must be an integer of at least 1, got 0"),
        ([2, 1.5], "each of tensor_parallel_shares must be an integer of at least 1, got 1.5"),
        ([2, 1, 1], "tensor_parallel_shares=[2, 1, 1] has 3 shares for tensor_parallel_size=2"),
    ],
)
def test_shares_must_be_an_integer_for_each_rank(value: object, message: str) -> None:
    """Before the process group is needed, as in a call without a launcher."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Arguments(tensor_parallel_size=2, tensor_parallel_shares=value).check({})  # type: ignore[arg-type]


def test_shares_and_expert_parallelism_are_refused_together() -> None:
    Arguments(tensor_parallel_size=2, expert_parallel_size=2, tensor_parallel_shares=[1, 1]).check({})
    with pytest.raises(ValueError, match=r"tensor_parallel_shares=\[2, 1\] and expert_parallel_size=2"):
        Arguments(tensor_parallel_size=2, expert_parallel_size=2, tensor_parallel_shares=[2, 1]).check({})


@pytest.mark.parametrize("value", ["12", 3, [1, 0, 2], [1.0, 2], [True, 2]])
def test_blocks_per_stage_must_be_a_list_of_positive_integers(pool: Pool, value: object) -> None:
    for message in refused(pool, 2, from_config, pipeline_parallel_size=2, blocks_per_stage=value):
        assert "blocks_per_stage must be" in message


@pytest.mark.parametrize("value", [[3], [1, 1, 1], [2, 2], [1, 1]])
def test_blocks_per_stage_must_match_stages_and_blocks(pool: Pool, saved: Path, value: list[int]) -> None:
    for function, arguments in ((from_config, ()), (from_pretrained, (saved,))):
        for message in refused(pool, 2, function, *arguments, pipeline_parallel_size=2, blocks_per_stage=value):
            assert f"blocks_per_stage={value} has {len(value)} stages and {sum(value)} blocks" in message
            assert "the 3 blocks of GPT2LMHeadModel (3 of transformer.h, in this order)" in message


@pytest.mark.parametrize("value", [0, -1, "sometimes", 1.5, None])
def test_check_inputs_rejects_other_values(pool: Pool, value: object) -> None:
    for message in refused(pool, 2, from_config, check_inputs=value):
        assert f'check_inputs must be True, False, "always" or an integer of at least 1, got {value!r}' == message


def _other_batches(sizes: dict[str, int], what: str, when: Any) -> None:
    """Call the model with another batch on the last rank in the third call."""
    model = GPT2LMHeadModel.from_config_with_parallel(GPT2Config(**CONFIG), seed=0, check_inputs=when, **sizes)
    for call in range(3):
        ids = torch.arange(2 * 5).view(2, 5)
        if call == 2 and model.mesh.world.rank == model.mesh.world.size - 1:
            ids = {"order": ids.flip(0), "shape": ids[:, :4], "value": ids + 1, "generate": ids + 1}[what]
        if what == "generate":
            model.generate(input_ids=ids, max_new_tokens=2)
        else:
            model.train_batch(input_ids=ids, labels=ids)


@pytest.mark.parametrize("what", ["order", "shape", "value", "generate"])
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_check_inputs_finds_batches_that_differ_between_ranks(pool: Pool, sizes: dict[str, int], what: str) -> None:
    for when in (True, "always", 2):
        for message in refused(pool, 2, _other_batches, sizes, what, when):
            assert "ranks that share one model were given different batches" in message
            assert "from oslo_models.integrations import Trainer, Accelerator" in message
            assert "  input_ids: ranks [0] have [2, 5] of int64" in message and "; ranks [1] have [2, " in message
            assert ("  labels: " in message) == (what != "generate")
    if what == "value":  # 4: the first and the fifth call
        for when in (False, 4):
            pool.run(2, _other_batches, sizes, what, when)


def test_dtype_and_torch_dtype_must_be_valid_and_agree(pool: Pool, saved: Path) -> None:
    for message in refused(pool, 1, from_pretrained, saved, dtype="float33"):
        assert "dtype must be a floating torch.dtype, its name or \"auto\", got 'float33'" in message
    for message in refused(pool, 1, from_pretrained, saved, dtype="float16", torch_dtype="float32"):
        assert "dtype='float16' and torch_dtype='float32' differ" in message
    pool.run(1, _call, from_pretrained, (saved,), {"dtype": "float16", "torch_dtype": torch.float16})


@pytest.mark.parametrize("name", ["device_map", "tp_plan", "distributed_config", "load_in_4bit", "gguf_file"])
def test_arguments_that_exclude_parallel_loading_are_rejected(pool: Pool, saved: Path, name: str) -> None:
    for message in refused(pool, 1, from_pretrained, saved, **{name: "auto"}):
        assert message.startswith(f"{name}='auto' ")


def test_quantised_checkpoint_is_rejected(pool: Pool, saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for message in refused(pool, 1, from_pretrained, tmp_path):
        assert "stacked experts, quantised as mxfp4" in message and "dequantize=True" in message
    for message in refused(pool, 1, from_pretrained, tmp_path, dequantize=1):
        assert message == "dequantize must be True or False, got 1"
    for changed, reason in (
        ({"bits": 3}, "as gptq cannot be read from this checkpoint: bits=3 "),
        ({"dynamic": {"+:.*down.*": {"bits": 5}}}, ": bits=5 "),
        ({"checkpoint_format": "marlin"}, 'checkpoint_format="marlin" is packed for one kernel'),
        (
            {"quant_method": "hqq"},
            "quantised as hqq cannot be read from this checkpoint: the formats that can are fp8, ",
        ),
    ):
        config["quantization_config"] = {**settings, **changed}
        (tmp_path / "config.json").write_text(json.dumps(config))
        for message in refused(pool, 1, from_pretrained, tmp_path, dequantize=True):
            assert reason in message


@pytest.mark.parametrize("size", [52, 0, "60", True])
def test_resize_token_embeddings_must_be_at_least_the_vocabulary(pool: Pool, size: object) -> None:
    for message in refused(pool, 1, from_config, resize_token_embeddings=size):
        assert message == f"resize_token_embeddings must be an integer of at least vocab_size=53, got {size!r}"


def _resize_sharded() -> None:
    GPT2LMHeadModel.from_config_with_parallel(GPT2Config(**CONFIG), tensor_parallel_size=2).resize_token_embeddings(60)


def test_resizing_sharded_embeddings_after_construction_is_rejected(pool: Pool) -> None:
    for message in refused(pool, 2, _resize_sharded, kind=RuntimeError):
        assert "pass resize_token_embeddings=60 to from_pretrained_with_parallel" in message


def test_checkpoint_of_another_architecture_is_rejected(pool: Pool, saved: Path) -> None:
    for message in refused(pool, 2, GPTNeoForCausalLM.from_pretrained_with_parallel, saved, tensor_parallel_size=2):
        assert "is a gpt2 checkpoint and GPTNeoForCausalLM is for gpt_neo; use GPT2LMHeadModel" in message


def test_config_of_another_class_is_rejected(pool: Pool) -> None:
    for message in refused(pool, 1, from_config, cls=GPTNeoForCausalLM):
        assert "config must be a GPTNeoConfig for GPTNeoForCausalLM" in message


def test_mismatched_shapes_are_rejected_unless_ignored(pool: Pool, saved: Path) -> None:
    for message in refused(pool, 2, from_pretrained, saved, tensor_parallel_size=2, n_inner=90):
        assert "transformer.h.0.mlp.c_fc.weight: (24, 96) in the checkpoint, (24, 90) in the model" in message
        assert "ignore_mismatched_sizes=True" in message
    options = {"tensor_parallel_size": 2, "n_inner": 90, "ignore_mismatched_sizes": True}
    pool.run(2, _call, from_pretrained, (saved,), options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/directory", "there is no directory /no/such/directory"),
        ("./nowhere", "there is no directory"),
        ("no-such-model", "neither a directory nor a model on the hub"),
    ],
)
def test_missing_checkpoint_is_named(pool: Pool, name: str, message: str) -> None:
    for text in refused(pool, 2, from_pretrained, name, tensor_parallel_size=2, local_files_only=True, kind=OSError):
        assert message in text


def test_directory_without_a_checkpoint_is_named(pool: Pool, saved: Path, tmp_path: Path) -> None:
    for message in refused(pool, 1, from_pretrained, tmp_path, kind=OSError):
        assert "holds no config.json" in message
    for message in refused(pool, 1, from_pretrained, saved / "config.json", kind=OSError):
        assert "is a file" in message


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("micro_batchsize", "micro_batch_size"),
        ("Seed", "seed"),
        ("local_file_only", "local_files_only"),
        ("attn_implementaton", "attn_implementation"),
        ("n_layr", "n_layer"),
        ("max_batchsize", "max_batch_size"),
    ],
)
def test_misspelled_arguments_are_corrected(pool: Pool, saved: Path, wrong: str, meant: str) -> None:
    for function, arguments in ((from_config, ()), (from_pretrained, (saved,))):
        for message in refused(pool, 2, function, *arguments, **{wrong: 2}):
            assert message.endswith(f"GPT2LMHeadModel has no argument {wrong}; did you mean {meant}?")
    for message in refused(pool, 1, from_config, deploy=True, **{wrong: 2}):
        assert message.endswith(f"GPT2LMHeadModel has no argument {wrong}; did you mean {meant}?")


def test_arguments_that_nothing_takes_are_named(pool: Pool, saved: Path) -> None:
    for message in refused(pool, 2, from_pretrained, saved, colour="red"):
        assert message.endswith("has no argument colour, and GPT2Config has no attribute of that name")
    for message in refused(pool, 2, from_config, prefill_chunk_size=3):
        assert message.endswith("prefill_chunk_size=3 is for deploy=True")


def _valid_names(path: Path) -> None:
    loading = {"local_files_only": True, "low_cpu_mem_usage": True, "device_map": None, "trust_remote_code": False}
    model = GPT2LMHeadModel.from_pretrained_with_parallel(path, attn_implementation="eager", n_layer=2, **loading)
    assert (model.config.n_layer, model.config._attn_implementation) == (2, "eager")
    bert = oslo_models.BertModel.from_config_with_parallel(zoo.config("bert"), add_pooling_layer=False, dtype="float32")
    assert bert.pooler is None


def test_arguments_of_transformers_and_of_classes_are_taken(pool: Pool, saved: Path) -> None:
    pool.run(1, _valid_names, saved)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "micro_batch_size", "blocks_per_stage", "deploy"])
def test_transformers_constructors_name_the_parallel_ones(saved: Path, name: str) -> None:
    for construct in (
        lambda **given: GPT2LMHeadModel.from_pretrained(saved, **given),
        lambda **given: GPT2LMHeadModel(GPT2Config(**CONFIG), **given),
    ):
        with pytest.raises(TypeError, match=f"do not take {name}: call from_pretrained_with_parallel"):
            construct(**{name: [2, 1] if name == "blocks_per_stage" else 2})
    with pytest.raises(TypeError, match="call from_pretrained_with_parallel"):
        AutoModelForCausalLM.from_pretrained(saved, **{name: 2})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("GPT2LMHeadModell", "GPT2LMHeadModel"),
        ("GTP2LMHeadModel", "GPT2LMHeadModel"),
        ("LLamaForCausalLM", "LlamaForCausalLM"),
        ("AutoModelForCausualLM", "AutoModelForCausalLM"),
        ("paralelize", "parallelize"),
    ],
)
def test_misspelled_names_are_corrected(wrong: str, meant: str) -> None:
    expected = rf"oslo_models has no {wrong}; did you mean {meant}\?"
    with pytest.raises(AttributeError, match=expected):
        getattr(oslo_models, wrong)
    with pytest.raises(ImportError, match=expected):
        exec(f"from oslo_models import {wrong}")
    assert not hasattr(oslo_models, wrong)


def test_unsupported_model_types_and_classes_are_named(tmp_path: Path) -> None:
    page = r'docs/develop/architecture.md \("Adding an architecture"\)'
    with pytest.raises(ValueError, match=f"no class for 'moshi'; it has: .*{page}"):
        AutoModelForCausalLM.from_config_with_parallel(transformers.MoshiConfig())
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(ValueError, match=f"no class for 'lama'; did you mean llama\\? it has: .*{page}"):
        AutoModelForCausalLM.from_pretrained_with_parallel(tmp_path)
    with pytest.raises(ValueError, match=r"AutoModelForCausalLM has no class for 'musicgen_decoder'; it has: .*gpt2"):
        AutoModelForCausalLM.from_config_with_parallel(transformers.MusicgenDecoderConfig())
    with pytest.raises(
        ValueError, match=r"MaskedLM has no class for 'gpt2'; it has: .*bert.* Classes of gpt2: .*GPT2Model"
    ):
        AutoModelForMaskedLM.from_config_with_parallel(GPT2Config())
    with pytest.raises(AttributeError, match=r"has no Emu3VQVAE; architectures: .*gpt2.*Adding an architecture"):
        oslo_models.Emu3VQVAE  # noqa: B018


def _save_into_a_file(path: Path, **kwargs: Any) -> None:
    model = GPT2LMHeadModel.from_config_with_parallel(GPT2Config(**CONFIG), tensor_parallel_size=2)
    model.save_pretrained_with_parallel(path, **kwargs)


def test_saving_into_a_file_is_rejected(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for kwargs in ({}, {"save_with_merging": True}):
        for message in refused(pool, 2, _save_into_a_file, tmp_path / "file", kind=OSError, **kwargs):
            assert "it is a file; name a directory" in message
    assert (tmp_path / "file").read_text() == "mine"
    for message in refused(pool, 2, _save_into_a_file, tmp_path / "new", max_shard_size="1MB"):
        assert "is for save_with_merging=True" in message
    for message in refused(pool, 2, _save_into_a_file, tmp_path / "new", shards=3):
        assert "unknown arguments ['shards']" in message


def _calls(pp: int) -> list[str]:
    model = GPT2LMHeadModel.from_config_with_parallel(
        GPT2Config(**CONFIG), tensor_parallel_size=2 // pp, pipeline_parallel_size=pp
    )
    messages = []
    ids = torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="empty") as empty:
        model(input_ids=ids[:0], labels=ids[:0])
    messages.append(str(empty.value))
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        model.set_micro_batch_size(0)
    if pp > 1:
        model.set_micro_batch_size(2)
        with pytest.raises(ValueError, match="micro") as uneven:
            model(input_ids=ids, labels=ids)
        messages.append(str(uneven.value))
    with pytest.raises(ValueError, match="streamer"):
        model.generate(ids, num_beams=2, streamer=transformers.TextStreamer(None), max_new_tokens=2)
    with pytest.raises(RuntimeError, match="save_pretrained_with_parallel"):
        model.save_pretrained("nowhere")
    return messages


@pytest.mark.parametrize("pp", [1, 2])
def test_empty_batches_and_uneven_micro_batches_are_rejected(pool: Pool, pp: int) -> None:
    for messages in pool.run(2, _calls, pp):
        assert messages[0] == "the batch is empty: input_ids has shape (0, 4)"
        if pp > 1:
            assert "a batch of 3 rows cannot be divided into micro-batches of micro_batch_size=2" in messages[1]
