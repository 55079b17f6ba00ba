"""Computes the reference of a certificate: plain transformers in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from oslo_models.checkpoint import current_folder
from oslo_models.distributed.devices import free_memory
from oslo_models.planning.job import Job, run_rank
from oslo_models.planning.meta_run import GRADIENTS, WEIGHTS
from oslo_models.sharding.model_protocol import TransformersModel

NEW_TOKENS = 16
TEXT = "The quick brown fox jumps over the lazy dog. In the beginning the model was split, and every part was equal. "
"""The built-in text, repeated to the length."""
SHARE = 0.6
"""The part of the available memory that the reference may take."""


def blocks_that_fit(cls: Any, config: Any, dtype: torch.dtype) -> int | None:
    """Return how many blocks of each stack one process can hold with their gradients; ``None`` for all."""
    available = free_memory(torch.device("cpu"))
    if available is None:
        return None
    run = run_rank(Job(cls, config, "full", dtype=dtype, length=2), 0, 0)
    of_blocks = sum(size for name, size in run.modules.items() if name.rpartition(".")[2].isdecimal())
    total = run.peak[WEIGHTS] + max(run.peak[GRADIENTS], sum(run.modules.values()))
    limit = int(available * SHARE)
    if total <= limit:
        return None
    count = config.get_text_config().num_hidden_layers
    spare = limit - (total - 2 * of_blocks)
    blocks = int(spare * count / (2 * of_blocks))
    if blocks < 1:
        raise ValueError(
            f"one block of {cls.__name__} with its embeddings and gradients needs more than the "
            f"{limit / (1 << 30):.1f} GiB that a process may take here: verify on a machine with more memory"
        )
    return blocks


def truncate(config: Any, blocks: int | None) -> dict[str, Any]:
    """Return the options of a configuration that keep the first blocks of each stack.

    Raises:
        ValueError: the configuration has no option for it.
    """
    if blocks is None:
        return {}
    names = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
    stored = config.to_dict()
    depth = next((stored[name] for name in names if isinstance(stored.get(name), int)), None)
    if depth is None or not 1 <= blocks <= depth:
        raise ValueError(
            f"--blocks {blocks}: {type(config).__name__} has {depth or 'no count of'} blocks; use 1 to {depth}"
        )
    found: dict[str, Any] = {name: min(blocks, stored[name]) for name in names if isinstance(stored.get(name), int)}
    if isinstance(stored.get("layer_types"), list):
        found["layer_types"] = stored["layer_types"][:blocks]
    return found


def compute_reference(
    cls: Any,
    directory: Path,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    text: str | None,
    length: int,
    scratch: Path,
) -> list[str]:
    """Write the batch, the loss, all gradients, the greedy tokens and the plain files. Return notes for the user."""
    original = getattr(transformers, cls.__name__)
    model = original.from_pretrained(current_folder(directory, "config.json"), dtype=dtype, **options).eval()
    batch, notes = make_batch(model, directory, text, length)
    loss = model(**batch).loss
    loss.backward()
    tokens = None
    if model.can_generate():
        prompt = {name: value for name, value in batch.items() if name != "labels"}
        tokens = model.generate(**prompt, **generation_options(model))
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    same: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    aliases = {name: same[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
    save_file({name: grad.contiguous() for name, grad in gradients.items()}, scratch / "gradients.safetensors")
    for param in model.parameters():
        param.grad = None
    largest = max((float(grad.abs().max()) for grad in gradients.values() if grad.numel()), default=0.0)
    del gradients
    model.save_pretrained(scratch / "plain")
    torch.save({"batch": batch, "tokens": tokens, "loss": loss.detach()}, scratch / "reference.pt")
    (scratch / "names.json").write_text(json.dumps({"aliases": aliases, "largest": largest}))
    return notes


def make_batch(
    model: TransformersModel, directory: Path, text: str | None, length: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Return two rows of tokens of the text, by default of `TEXT`, and notes for the user."""
    notes = []
    size = model.config.get_text_config().vocab_size
    ids = torch.empty(0, dtype=torch.long)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(current_folder(directory, "config.json"))
        ids = torch.tensor(tokenizer(text or TEXT * 100, add_special_tokens=False)["input_ids"], dtype=torch.long)
        ids = ids[ids < size]
    except (OSError, ValueError, KeyError, ImportError) as error:
        if text is not None:
            raise ValueError(f"--text needs the tokenizer of the checkpoint, and none loads: {error}") from error
    if text is None and len(ids.unique()) < 3:  # some tokenizers load without their files, and know no token
        notes.append("the checkpoint has no tokenizer that loads here: the text is random tokens")
        ids = torch.randint(2, size, (2 * length + 1,), generator=torch.Generator().manual_seed(0))
    if len(ids) < 3:
        raise ValueError(f"--text has {len(ids)} tokens: give at least three")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > NEW_TOKENS:
        length = min(length, limit - NEW_TOKENS)
    length = min(length, len(ids) - 1)
    rows = torch.stack((ids[:length], ids[1 : length + 1]))
    of_row = type(model).__name__.endswith("ForSequenceClassification")
    labels = torch.zeros(2, dtype=torch.long) if of_row else rows
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": labels}, notes


def generation_options(model: TransformersModel) -> dict[str, Any]:
    """Return the options of greedy generation of a fixed number of tokens."""
    end = model.config.get_text_config().eos_token_id
    pad = model.config.get_text_config().pad_token_id
    first = end[0] if isinstance(end, list) else end
    fixed = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    return {**fixed, "pad_token_id": pad if pad is not None else first if first is not None else 0}
