"""`tensor_parallel` with ``sharded=True``, and loading weights one tensor at a time."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

pytest.importorskip("accelerate")

import accelerate

import oslo_models
from oslo_models.compat.tensor_parallel import parts, wrapper
from oslo_models.compat.tensor_parallel.zero3 import held_once
from oslo_models.sharding.layout import Layout

from support import zoo
from support.float64 import lifted_casts
from support.reference import TOLERANCE, full_gradients, shard_differences
from support.tensor_parallel import check_tensor_parallel_step, tensor_parallel_model, transformers_model

# Parameters outside sharded layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "n"), [("gpt2", 3), ("llama-one-kv", 2), ("qwen3", 2), ("bert", 2)])
def test_sharded_step_matches_transformers(variant: str, n: int, seed: int) -> None:
    check_tensor_parallel_step(zoo.main_head(variant), variant, n, seed, sharded=True)


@pytest.mark.parametrize("variant", ["gpt2", "bart"])
def test_sharded_parameters_exist_once(variant: str, seed: int) -> None:
    """torch therefore counts every parameter once, and a recomputed block reads the same weights again."""
    model = transformers_model(variant, seed)
    other, batch = tensor_parallel_model(model, sharded=True), zoo.batch(zoo.lm_head(variant), model.config, seed)
    assert sum(param.numel() for param in other.parameters()) == sum(param.numel() for param in model.parameters())
    other.activation_checkpointing_enable()
    for each in (model, other):
        with lifted_casts():
            each(**batch).loss.backward()
    lines = []
    for part in other.parts:
        own = {key: param.grad for key, param in part.named_parameters(remove_duplicate=False)}
        lines += shard_differences(part, "gradient of", own, full_gradients(model), TOLERANCE)
    assert not lines, "\n".join(lines)
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0).item() for each in (model, other)]
    assert norms[0] == pytest.approx(norms[1], abs=TOLERANCE)


def bytes_of_storages(model: torch.nn.Module) -> int:
    storages = [param.untyped_storage() for param in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("variant", ["llama-one-kv", "gpt2", "qwen3"])
def test_devices_hold_each_parameter_once(variant: str, seed: int) -> None:
    """By default, all devices together hold each parameter once, including key-value heads shared by four devices."""
    model = transformers_model(variant, seed)
    assert bytes_of_storages(tensor_parallel_model(model, 4)) == bytes_of_storages(model)
    assert bytes_of_storages(tensor_parallel_model(model, 4, sharded=False)) > bytes_of_storages(model)
    check_tensor_parallel_step(zoo.main_head(variant), variant, 4, seed)


def test_shared_rows_are_split_among_those_that_need_them() -> None:
    needed = Layout((20,), 0, (((0, 8), (8, 12)), ((0, 8), (12, 16)), ((16, 20), (8, 12))))
    same, held = held_once(needed, 3)
    assert same is needed and held.ranges == (((0, 4), (8, 10)), ((4, 8), (12, 16)), ((16, 20), (10, 12)))
    assert held_once(Layout((5, 2)), 2)[1].ranges == (((0, 3),), ((3, 5),))


def test_shards_move_to_their_devices_with_the_first_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[str] = []
    for module in (parts, wrapper):
        monkeypatch.setattr(module, "move_part", lambda part, device: moves.append(str(device)) or part)
    model = transformers_model("gpt2", seed).eval()
    other, inputs = tensor_parallel_model(model, delay_init=True, output_device_index=1), torch.tensor([[5, 6, 7]])
    made = len(moves)
    other.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    model.load_state_dict(other.state_dict())
    for _ in range(2):
        torch.testing.assert_close(other(inputs).logits, model(inputs).logits, rtol=0, atol=TOLERANCE)
    assert len(moves) == made + 2
    for index in (2, True, "0"):
        with pytest.raises(ValueError, match="output_device_index must be from 0 to 1, got"):
            tensor_parallel_model(model, output_device_index=index)
    with pytest.raises(ValueError, match="pass one of them"):
        tensor_parallel_model(model, output_device_index=0, output_device="cpu")


def test_native_collectives_are_the_only_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOR_PARALLEL_USE_NATIVE", "1")
    with pytest.warns(UserWarning, match="TENSOR_PARALLEL_USE_NATIVE is set and changes nothing"):
        tensor_parallel_model(transformers_model("gpt2", seed))


def test_sharded_param_names_selects_parameters(seed: int) -> None:
    model = transformers_model("gpt2", seed)
    names = ["transformer.wpe.weight", "transformer.ln_f.bias"]
    model.transformer.ln_f.bias.requires_grad_(False)
    other = tensor_parallel_model(model, sharded=False, sharded_param_names=names)
    some, all_trained = (
        dict(other.named_parameters()),
        dict(tensor_parallel_model(model, sharded=True).named_parameters()),
    )
    positions = model.config.n_positions
    for rank in range(2):
        assert some[f"parts.{rank}.{names[0]}"].shape == (positions // 2, 24)
        assert some[f"parts.{rank}.{names[1]}"].shape == (12,)
        assert some[f"parts.{rank}.transformer.ln_f.weight"].shape == (24,)
        assert all_trained[f"parts.{rank}.transformer.ln_f.weight"].shape == (12,)
        assert all_trained[f"parts.{rank}.{names[1]}"].shape == (24,)
    inputs = torch.tensor([[5, 6, 7]])
    found = [each.eval().generate(inputs, num_beams=2, max_new_tokens=5, pad_token_id=0) for each in (model, other)]
    assert torch.equal(*found)


# Weights loaded one at a time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", ["assigned", "converted", "set by accelerate"])
def test_weights_are_loaded_into_an_empty_model_one_by_one(how: str, sharded: bool, seed: int) -> None:
    model = transformers_model("gpt2", seed)
    with accelerate.init_empty_weights():
        empty = hf.GPT2LMHeadModel(model.config).double()
    other = tensor_parallel_model(empty, 3, sharded=sharded)
    assert all(param.is_meta for param in other.parameters())
    state = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}  # as it is saved
    for key, value in state.items():
        if how == "assigned":
            other.load_state_dict({key: value}, strict=False, assign=True)
            continue
        brought = oslo_models.convert_state_dict({key: value}, other.tensor_parallel_config, len(other.devices))
        if how == "converted":
            other.load_state_dict(brought, strict=False, assign=True)
            continue
        for name, share in brought.items():
            device = oslo_models.infer_sharded_device_map(other)[".".join(name.split(".")[:2])]
            accelerate.utils.set_module_tensor_to_device(other, name, device, value=share)
    other.tie_weights()
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items() if key in state)
    params = list(other.parameters())
    assert sum(param.untyped_storage().nbytes() for param in params) == sum(param.nbytes for param in params)
    assert len({param.data_ptr() for param in params}) == len(params)
    inputs = torch.tensor([[5, 6, 7]])
    found = [each.eval().generate(inputs, max_new_tokens=5, pad_token_id=0) for each in (model, other)]
    assert torch.equal(*found)


def test_mismatched_weights_are_rejected() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"such as .*init_empty_weights"):
        tensor_parallel_model(hf.LlamaForCausalLM(zoo.config("llama")))
    other = tensor_parallel_model(hf.GPT2LMHeadModel(zoo.config("gpt2")))
    layouts = other.tensor_parallel_config
    with pytest.raises(ValueError, match=r"the shape \[5, 5\] instead of"):
        oslo_models.convert_state_dict({"lm_head.weight": torch.ones(5, 5)}, layouts, 2)
    with pytest.raises(ValueError, match="world_size=3, but the model is sharded over 2"):
        oslo_models.convert_state_dict({"lm_head.weight": torch.ones(5, 5)}, layouts, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for parts\.1\.lm_head\.weight"):
        other.load_state_dict({"lm_head.weight": torch.ones(5, 5)}, strict=False)
