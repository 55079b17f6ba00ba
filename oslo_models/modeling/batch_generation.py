"""`generate_batch`: many prompts in one running batch, on the ranks of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import GenerationConfig, PreTrainedModel

from oslo_models.contracts import require
from oslo_models.deploy.generation_limits import settings_of
from oslo_models.deploy.running_batch.admission import (
    bounds,
    reason_against,
    reason_against_draft_model,
    reason_against_drafts,
    unsupported_setting,
)
from oslo_models.deploy.running_batch.limits import DEFAULT_DRAFTED, BatchLimits, check_drafted
from oslo_models.deploy.running_batch.prompt_sounds import reads_sounds
from oslo_models.deploy.running_batch.sampling import CommonDraws
from oslo_models.deploy.running_batch.slot_states import has_index, has_states
from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.distributed.rng import default_generator, stable_hash, synchronize
from oslo_models.modeling.exact_rollouts import reason_of_layers

_NEW_TOKENS = 20
"""Default number of new tokens of `generate`."""
_UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), (None, 0, 0.0)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "top_h"), (None, 1, 1.0)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), (None,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn"), (None,)),
}
"""Settings that change the distribution of tokens unless they have one of these values."""
_USER_CODE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer")
"""Arguments of `generate` that are not in generation configurations."""


class BatchGeneratingModel(PreTrainedModel):
    """The part of `ParallelModel` that generates for many prompts."""

    @torch.no_grad()
    def generate_batch(
        self: Any,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        *args: Any,
        num_return_sequences: int | None = None,
        max_batch_size: int | None = None,
        speculative_tokens: int | None = None,
        speculative_model: Any = None,
        common_draws: bool = False,
        adapter_names: Sequence[str] | None = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Generate for many prompts of different lengths in one running batch.

        A row leaves the batch after its last token, and the next prompt takes its slot. Equal prompts, such as the
        completions of one group, are computed once. An encoder-decoder encodes its prompts. Each sequence has the
        tokens that ``generate`` returns for its prompt alone. The method runs on the ranks of a training or evaluating
        model with its present weights and adapters, without dropout. Its memory is free again when it returns. A
        collective.

        Args:
            inputs: token ids of the prompts, equal on all ranks of one model replica.
            generation_config: settings of ``generate``. Default: the model's.
            continuous_batching_config: as in transformers. Only ``return_logprobs`` has an effect; the other fields
                tune the memory of transformers' engine.
            record_timestamps: record the time of each token (``time.perf_counter``).
            progress_bar: show the number of complete sequences on the first rank.
            *args: further arguments of transformers' method, without effect.
            num_return_sequences: sequences for each prompt. Default: as ``generation_config`` says.
            max_batch_size: maximum number of rows that are decoded together. Default: up to 64, as many as have keys
                and values of 16 GiB on each GPU, or 4 GiB on CPUs.
            speculative_tokens: maximum drafted tokens of a row in one step, for speculative decoding. The heads of a
                model with ``mtp_heads=True`` draft them. Others are found by prompt lookup: they followed the last
                occurrence of the row's newest tokens. Sequences stay the same. Default: none.
            speculative_model: a model of this library with the same vocabulary that drafts these tokens (default: 4).
                The first rank of the last stage calls a full model, such as ``LlamaForCausalLM.from_pretrained(name)``.
                All ranks call a sharded model together, such as ``LlamaForCausalLM.from_pretrained_with_parallel(name,
                tensor_parallel_size=2)``: each then reads its share of the weights for every drafted token.
            common_draws: draw the tokens of all sequences together from torch's default generator, as ``generate`` does
                for a padded batch of all prompts. Default: a separate generator for each sequence.
            adapter_names: the LoRA adapter of each prompt, as in ``peft``; ``"__base__"`` for none. Rows with different
                adapters are computed in one step. Default: the active adapters for all prompts.
            streamer: its ``put(number, token)`` gets each token of sequence ``number``, and ``end(number)`` is called
                after the last one. It may be set on some ranks only.
            **kwargs: settings of ``generate``, such as ``max_new_tokens``.

        Returns:
            A ``GenerationOutput`` of transformers for each sequence, in the order of the prompts. Sequences of one
            prompt follow each other. On all ranks.

        Raises:
            ValueError: a prompt is empty or has a token outside the vocabulary; or the model or a setting needs another
                decoding method; or a sequence would be longer than the model allows; or ``speculative_tokens`` is out
                of range, or the model cannot have drafted tokens. ``common_draws`` has more sequences than rows of the
                batch, drafted tokens, or padding that the model reads. ``adapter_names`` has an unknown adapter, or the
                model has adapters other than LoRA of linear layers. The ranks of one replica got different arguments.
                On every rank.
        """
        if self.mesh is None:
            if num_return_sequences is not None:
                raise ValueError(
                    f"num_return_sequences={num_return_sequences} of a full model belongs into generation_config"
                )
            if speculative_tokens is not None or speculative_model is not None:
                raise ValueError(
                    "speculative_tokens and speculative_model need a sharded model; generate of a full model takes "
                    "prompt_lookup_num_tokens and assistant_model"
                )
            if adapter_names is not None:
                raise ValueError(
                    f"adapter_names={adapter_names!r} needs a sharded model; generate of a PeftModel takes it, too"
                )
            if common_draws:
                raise ValueError("common_draws=True needs a sharded model; generate of a full model draws so")
            options = (continuous_batching_config, record_timestamps, progress_bar, *args)
            return super().generate_batch(inputs, generation_config, *options, **kwargs)
        from oslo_models.deploy.running_batch.admission import reason_against_padding
        from oslo_models.deploy.running_batch.offline import limits_of
        from oslo_models.deploy.running_batch.row_adapters import ModelAdapters

        with agree(self.mesh.model, "checking the prompts of generate_batch"):
            given, prompts, copies = _checked(self, inputs, generation_config, num_return_sequences, kwargs)
            adapters = ModelAdapters(self).numbers(adapter_names, len(prompts))
            start = _first_tokens(self, settings_of(given, self.generation_config))
            length = _longest(self, prompts, start, settings_of(given, self.generation_config))
            if max_batch_size is not None and max_batch_size < 1:
                raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
            drafted = _drafted(self, speculative_tokens, speculative_model, length)
            by_heads = bool(drafted) and speculative_model is None and _has_heads(self)
            limits = limits_of(self, len(prompts) * copies, length, max_batch_size, drafted, by_heads)
            if common_draws and (drafted or len(prompts) * copies > limits.rows):
                what = "drafted tokens" if drafted else f"{len(prompts) * copies} sequences in {limits.rows} rows"
                raise ValueError(
                    f"common_draws=True does not work with {what}: all sequences have to begin together. Pass fewer "
                    "prompts or a larger max_batch_size, and no drafts; or leave it out"
                )
            reason = reason_against_padding(self.config)
            if common_draws and reason is not None and len({*map(len, prompts)}) > 1:
                raise ValueError(
                    "common_draws=True does not work with prompts of different lengths, which generate would pad, for "
                    f"{type(self).__name__}: {reason}. Pass prompts of one length, or leave it out"
                )
            keeps_logprobs = bool(getattr(continuous_batching_config, "return_logprobs", False))
            if keeps_logprobs and self.has_exact_rollouts:
                _check_exact(self, settings_of(given, self.generation_config))
        planned: dict[str, Any] = {"hash of inputs": stable_hash(*map(str, prompts)), "num_return_sequences": copies}
        planned |= {"maximum length": length, "max_batch_size": max_batch_size, "return_logprobs": keeps_logprobs}
        planned |= {"speculative_tokens": speculative_tokens, "speculative_model": speculative_model is not None}
        planned |= {"sharded speculative_model": getattr(speculative_model, "mesh", None) is not None}
        planned |= {"common_draws": common_draws, "adapter_names": adapters, "decoder_start_token_id": start}
        require_equal(self.mesh.model, planned, "arguments of generate_batch")  # else ranks would plan other steps
        if not prompts:
            return {}
        return _generate(
            self,
            prompts,
            start,
            adapters,
            given,
            (copies, limits),
            keeps_logprobs=keeps_logprobs,
            keeps_times=record_timestamps,
            shows_progress=progress_bar,
            streamer=streamer,
            draft_model=speculative_model,
            has_common_draws=common_draws,
        )


def _has_heads(model: Any) -> bool:
    """Return whether a model was loaded with its MTP heads."""
    return hasattr(model, "mtp_step")


def _drafted(model: Any, count: int | None, draft_model: Any, length: int) -> int:
    """Return the maximum number of drafted tokens of a row in one step.

    Raises:
        ValueError: see `BatchGeneratingModel.generate_batch`.
    """
    if count is not None:
        check_drafted(count)
    elif draft_model is None:
        return 0
    count, name = count or DEFAULT_DRAFTED, type(model).__name__
    if (reason := reason_against_drafts(model.config, length)) is not None:
        raise ValueError(f"speculative_tokens={count} is not possible for {name}: {reason}. Leave it out")
    if draft_model is None:
        return count
    if not isinstance(draft_model, BatchGeneratingModel):
        raise ValueError(
            f"speculative_model must be a model of this library, such as {name}.from_pretrained(...), got "
            f"{type(draft_model).__name__}"
        )
    mesh = draft_model.mesh
    if mesh is not None and (mesh.tp.ranks != model.mesh.model.ranks or draft_model.token_division is not None):
        raise ValueError(
            f"speculative_model={type(draft_model).__name__} must be a full model or sharded by tensor_parallel_size="
            f"{model.mesh.model.size} alone, because all ranks of {name} call it, got tensor_parallel_size="
            f"{mesh.tp.size}, pipeline_parallel_size={mesh.pp.size}"
        )
    if (reason := reason_against_draft_model(model.config, draft_model.config, length)) is not None:
        raise ValueError(f"speculative_model={type(draft_model).__name__} cannot draft tokens for {name}: {reason}")
    return count


def _checked(
    model: Any,
    inputs: Sequence[Any],
    config: GenerationConfig | None,
    num_return_sequences: int | None,
    kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], list[list[int]], int]:
    """Return the arguments of `generate` for each prompt, the prompts, and the number of sequences for each.

    Raises:
        ValueError: see `BatchGeneratingModel.generate_batch`.
    """
    name, instead = type(model).__name__, "call generate"
    reason = reason_against(model.config) if model.can_generate() else "it generates no text"
    reason = "its prompts are sounds" if reason is None and reads_sounds(model.config) else reason
    if model.mesh.has_experts_over_replicas:
        reason = "its experts are divided over ranks with other tokens, which would compute different numbers of steps"
    if reason is None and model.token_division is not None:
        option = model.token_division.option
        if has_states(model.config):
            reason = f"its blocks keep states of rows, which was not tested with {option}"
        elif has_index(model.config):
            reason = f"its blocks keep keys of an indexer, which was not tested with {option}"
        elif model.config.is_encoder_decoder:
            reason = f"it is an encoder-decoder, which was not tested with {option}"
    if reason is not None:
        raise ValueError(f"generate_batch does not run {name}: {reason}; {instead}")
    given = {**kwargs, **({} if config is None else {"generation_config": config})}
    others = [key for key in kwargs if key not in _USER_CODE and not hasattr(model.generation_config, key)]
    if others or any(key.startswith("_") for key in kwargs):
        raise ValueError(
            f"generate_batch has no argument {', '.join(others) or '_'}: it takes settings of generate, and prompts as "
            "lists of token ids without padding"
        )
    setting = settings_of(given, model.generation_config)
    copies = num_return_sequences or setting("num_return_sequences") or 1
    if copies > 1 and not setting("do_sample"):
        raise ValueError(f"num_return_sequences={copies} needs do_sample=True: greedy sequences would be equal")
    given = {**given, "num_return_sequences": 1}
    if (unsupported := unsupported_setting(given, model.generation_config)) is not None:
        raise ValueError(f"generate_batch does not support {unsupported}: leave it out, or {instead}")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = [each.tolist() if isinstance(each, Tensor) else [int(token) for token in each] for each in inputs]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"inputs[{number}] is empty: pass at least one token for each prompt")
        if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
            raise ValueError(f"inputs[{number}] has the token {wrong[0]}; the vocabulary has {vocabulary}")
    return given, prompts, copies


def _check_exact(model: Any, setting: Callable[[str], Any]) -> None:
    """Raise ``ValueError`` if a training forward would compute other log-probabilities."""
    if (reason := reason_of_layers(model)) is not None:
        raise ValueError(f"generate_batch has no exact log-probabilities: {reason}")
    for name, values in _UNCHANGED.items():
        if setting(name) not in values:
            raise ValueError(
                f"{name}={setting(name)!r} changes the distribution of the tokens, and a training forward does not: "
                "with use_exact_rollouts and return_logprobs, set the temperature only, and top_k=0"
            )


def _first_tokens(model: Any, setting: Callable[[str], Any]) -> list[int]:
    """Return the first token of the decoder of an encoder-decoder, or no token.

    Raises:
        ValueError: the settings have no such token, or several.
    """
    if not model.config.is_encoder_decoder:
        return []
    token = setting("decoder_start_token_id")
    token = setting("bos_token_id") if token is None else token
    if not isinstance(token, int):
        raise ValueError(
            f"decoder_start_token_id={token!r}: generate_batch needs the token with which the decoder of "
            f"{type(model).__name__} begins, one for all prompts"
        )
    return [token]


def _longest(model: Any, prompts: Sequence[list[int]], start: list[int], setting: Callable[[str], Any]) -> int:
    """Return the length of the longest possible sequence.

    Args:
        start: see `_first_tokens`.

    Raises:
        ValueError: the model has fewer positions, or no prompt leaves room for a new token.
    """
    if not prompts:
        return 0
    encoded = max(map(len, prompts)) if start else 0
    longest = len(start) or max(map(len, prompts))
    new, most = setting("max_new_tokens"), setting("max_length")
    total = longest + int(new) if new is not None else int(most) if most is not None else longest + _NEW_TOKENS
    if total <= longest:
        what = f"max_length={most}" if new is None else f"max_new_tokens={new}"
        raise ValueError(f"{what} leaves no room for new tokens after a prompt of {longest} tokens: use a larger value")
    for name, most in bounds(model.config):
        if encoded > most:
            raise ValueError(
                f"a prompt of {encoded} tokens is more than the {name}={most} of {type(model).__name__}: use shorter "
                "prompts"
            )
        if total > most:
            raise ValueError(
                f"a prompt of {longest} tokens and {total - longest} new ones are more than the "
                f"{name}={most} of {type(model).__name__}: use fewer new tokens or shorter prompts"
            )
    return max(total, len(start) + encoded)


def _generate(
    model: Any,
    prompts: Sequence[list[int]],
    start: list[int],
    adapters: Sequence[int],
    given: dict[str, Any],
    sizes: tuple[int, BatchLimits],
    keeps_logprobs: bool,
    keeps_times: bool,
    shows_progress: bool,
    streamer: Any,
    draft_model: Any,
    has_common_draws: bool,
) -> dict[str, Any]:
    """Complete the prompts on this rank.

    Args:
        start: see `_first_tokens`.
        adapters: of the prompts, see `row_adapters`.
        sizes: sequences for each prompt, limits of the batch.
    """
    from oslo_models.deploy.running_batch.offline import Generated, OfflineBatch, leader_of

    require("deploy.running_batch")
    copies, limits = sizes
    mesh, count = model.mesh, len(prompts) * copies
    synchronize(mesh.model, mesh.device)
    draws = CommonDraws(count, default_generator(mesh.device)) if has_common_draws else None
    seeds = [0] * count if has_common_draws else torch.randint(2**63 - 1, (count,), device="cpu").tolist()
    sequences = [
        Generated(number, [*start, *prompts[number // copies]], seeds[number], adapters[number // copies])
        for number in range(count)
    ]
    times: dict[int, list[float]] = {number: [] for number in range(count)}

    def on_token(number: int, token: int, ends: bool) -> None:
        if keeps_times:
            times[number].append(time.perf_counter())
        if streamer is not None:
            streamer.put(number, token)
            if ends:
                streamer.end(number)

    hidden = not shows_progress or mesh.model.rank > 0
    drafting = nullcontext() if draft_model is None else _drafting(draft_model)
    progress = tqdm(total=count, disable=hidden, unit="sequence")
    with drafting, _evaluating(model), model.generating(), model._keeping_rounded_weights(), progress as bar:
        watches = on_token if keeps_times or streamer is not None else None
        try:
            batch = OfflineBatch(model, limits, given, keeps_logprobs, watches, draft_model, draws)
            batch.run(sequences, bar.update)
            if has_common_draws:  # only the leader has drawn
                synchronize(mesh.model, mesh.device, leader_of(mesh))
        except torch.OutOfMemoryError:
            model._release_caches()
            raise
    return {
        f"req_{each.number // copies}" + (f"__child#{each.number % copies - 1}" if each.number % copies else ""): (
            _output(each, prompts, each.number // copies, times[each.number] if keeps_times else None)
        )
        for each in sequences
    }


def _output(sequence: Any, prompts: Sequence[list[int]], number: int, times: list[float] | None) -> Any:
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    return GenerationOutput(
        request_id=f"req_{number}",
        prompt_ids=prompts[number],
        generated_tokens=sequence.new,
        logprobs=sequence.logprobs,
        status=RequestStatus.FINISHED,
        timestamps=times,
    )


@contextmanager
def _drafting(model: Any) -> Iterator[None]:
    """Evaluate within the block. The calls of a sharded model are generation steps."""
    with _evaluating(model), nullcontext() if model.mesh is None else model.generating():
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate within the block. Afterwards, each module is in its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # selects the attention of the mode
        for module, mode in modes:
            module.training = mode
