"""llama.cpp as a peer: writes a checkpoint of Llama, Granite or GPT-2 as a GGUF file in float32, and generates from it.

The keys and values are in float32 too, so that its tokens equal the tokens of the other peers; llama.cpp's default is
float16. Shapes: B rows, L tokens of the prompts, N new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import addressof, c_float
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_NAMES = {"llama": ("model.layers.", _LLAMA), "granite": ("model.layers.", _LLAMA), "gpt2": ("transformer.h.", _GPT2)}
"""By model type: the prefix of its block names, and llama.cpp's names of its layers."""


def write_gguf(model: Any, path: Path) -> None:
    """Write a model of transformers as a file for llama.cpp, without a tokenizer."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), config.model_type)
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if config.model_type != "gpt2":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.hidden_size // heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    else:
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for name, value in _tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(value.detach().float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    blocks, names = _NAMES[config.model_type]
    for name, param in model.named_parameters(remove_duplicate=True):
        layer, _, leaf = name.rpartition(".")
        prefix = ""
        if layer.startswith(blocks):
            index, _, layer = layer[len(blocks) :].partition(".")
            prefix = f"blk.{index}."
        value = param
        if config.model_type == "gpt2" and leaf == "weight" and value.dim() == 2 and prefix:
            value = value.T  # Conv1D's are [in, out]
        if layer in ("self_attn.q_proj", "self_attn.k_proj"):
            # llama.cpp turns pairs of neighbours, transformers the halves of a head
            dim = config.hidden_size // config.num_attention_heads
            value = value.view(-1, 2, dim // 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        yield f"{prefix}{names[layer]}.{leaf}", value


class LlamaCpp:
    """A model in llama.cpp that generates greedily, with torch's number of threads.

    Attributes:
        config: Configuration of transformers.
    """

    def __init__(self, model: Any, path: Path) -> None:
        import llama_cpp

        self.config, self._api, self._path = model.config, llama_cpp, path
        if not path.exists():
            write_gguf(model, path)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._context: tuple[tuple[int, int], Any] | None = None
        self._drafter: LlamaCpp | None = None

    def eval(self) -> LlamaCpp:
        return self

    def generate(self, input_ids: Tensor, max_new_tokens: int, assistant_model: Any = None, **others: Any) -> Tensor:
        """Greedy tokens after prompts of one length, ``[B, L + N]``.

        Args:
            assistant_model: a model of transformers that drafts tokens, of one prompt.
        """
        api, (rows, length) = self._api, input_ids.shape
        if assistant_model is not None:
            return self._assisted(input_ids, max_new_tokens, assistant_model)
        context = self._context_of(rows, length + max_new_tokens)
        api.llama_memory_clear(api.llama_get_memory(context), True)
        made = [input_ids]
        for step in range(max_new_tokens):
            begin = 0 if step == 0 else length + step - 1
            made.append(self._decode(context, made[-1], begin)[:, -1:])
        return torch.cat(made, 1)

    def _assisted(self, input_ids: Tensor, new: int, assistant_model: Any) -> Tensor:
        """Verify the drafts of a small model in one decode, as llama.cpp's example ``speculative-simple`` does."""
        drafted = assistant_model.generation_config.num_assistant_tokens
        if self._drafter is None:
            self._drafter = LlamaCpp(assistant_model, self._path.with_suffix(".drafts.gguf"))
        text: list[int] = input_ids[0].tolist()
        end = len(text) + new
        context, small = (each._context_of(1, end + drafted) for each in (self, self._drafter))
        self._forget(context, 0)
        self._decode(context, input_ids[:, :-1], 0)
        known = 0  # positions of the text in the cache of the small model
        while len(text) < end:
            self._forget(small, known)
            drafts, given = list[int](), text[known:]
            for _ in range(min(drafted, end - len(text) - 1)):
                begin = len(text) + len(drafts) - len(given)
                given = self._drafter._decode(small, torch.tensor([given]), begin)[0, -1:].tolist()
                drafts += given
            self._forget(context, len(text) - 1)
            best = self._decode(context, torch.tensor([[text[-1], *drafts]]), len(text) - 1, every=True)[0].tolist()
            right = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
            if drafts:
                known = len(text) + min(right, len(drafts) - 1)
            text += best[: right + 1]
        return torch.tensor([text])

    def _forget(self, context: Any, begin: int) -> None:
        """Remove the keys and values of the positions from ``begin`` on."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, begin, -1)

    def _decode(self, context: Any, ids_BL: Tensor, begin: int, every: bool = False) -> Tensor:
        """Return the best next tokens ``[B, 1]`` after tokens at positions from ``begin`` on, or ``[B, L]`` of each."""
        rows, length = ids_BL.shape
        batch = self._api.llama_batch_init(rows * length, 0, 1)
        try:
            batch.n_tokens = rows * length
            for index, token in enumerate(ids_BL.flatten().tolist()):
                row, column = divmod(index, length)
                batch.token[index], batch.pos[index] = token, begin + column
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = every or column == length - 1
            if self._api.llama_decode(context, batch):
                raise RuntimeError("llama.cpp failed")
        finally:
            self._api.llama_batch_free(batch)
        chosen = range(rows * length) if every else range(length - 1, rows * length, length)
        return torch.tensor([self._best(context, index) for index in chosen]).view(rows, -1)

    def _best(self, context: Any, index: int) -> int:
        pointer = self._api.llama_get_logits_ith(context, index)
        logits = (c_float * self.config.vocab_size).from_address(addressof(pointer.contents))
        return int(np.ctypeslib.as_array(logits).argmax())

    def _context_of(self, rows: int, length: int) -> Any:
        api = self._api
        if self._context is not None and self._context[0] == (rows, length):
            return self._context[1]
        params = api.llama_context_default_params()
        params.n_seq_max, params.n_ctx = rows, rows * length
        params.n_batch = params.n_ubatch = rows * length
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.type_k = params.type_v = 0  # float32
        params.flash_attn_type = 0  # for which the values would have to be transposed
        context = api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp has no memory for its keys and values")
        self._context = (rows, length), context
        return context
