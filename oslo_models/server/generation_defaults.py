"""Defaults of a checkpoint's ``generation_config``: the server applies, replaces or refuses each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oslo_models.server.errors import RequestError
from oslo_models.server.schema import MOST_BEAMS, Generation

_REPLACED: Mapping[str, Any] = {
    "num_return_sequences": 1,  # set by `n` of the request
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "prompt_lookup_num_tokens": None,  # these three change the speed, not the text
    "assistant_early_exit": None,
    "use_mtp": None,
    "stop_strings": None,  # the server searches for them itself
}
"""Options for the form of results, which the server sets, and options without an effect on the text."""
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "num_beam_groups": (1,),
    "token_healing": (False,),
}
"""Unsupported decoding options, with the values that disable them."""
_NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""Sampling as OpenAI documents it. The defaults of transformers differ: top_k=50."""
_SAMPLING = (*_NEUTRAL, "min_p")


class GenerationDefaults:
    """Arguments of `generate` for requests of one model.

    A value of the request takes precedence over the checkpoint's ``generation_config``, and this over OpenAI's default.

    Args:
        config: the generation configuration of the model.

    Attributes:
        stops: stop strings of the checkpoint; they end the answers to all requests.
        max_new_tokens: limit of new tokens in the checkpoint's configuration.

    Raises:
        ValueError: the checkpoint asks for an unsupported decoding option.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        for name, neutral in _REFUSED.items():
            if (value := self._value(name)) is not None and value not in neutral:
                raise ValueError(
                    f"the model's generation_config has {name}={value!r}, which the server does not support"
                )
        self._replaced = {name: value for name, value in _REPLACED.items() if self._value(name) not in (None, value)}
        stops = self._value("stop_strings") or []
        self.stops = [stops] if isinstance(stops, str) else stops
        if not (isinstance(self.stops, list) and all(isinstance(each, str) for each in self.stops)):
            raise ValueError(f"the model's generation_config has stop_strings={stops!r:.80}, which are no texts")
        if not (isinstance(beams := self._value("num_beams") or 1, int) and beams <= MOST_BEAMS):
            raise ValueError(f"the model's generation_config has num_beams={beams!r:.80}; the limit is {MOST_BEAMS}")
        if self._value("use_cache") is False and (size := self._value("prefill_chunk_size")):
            raise ValueError(
                f"the model's generation_config has prefill_chunk_size={size!r:.80} and use_cache=False, and chunks "
                "need a cache: remove one of them"
            )
        self.max_new_tokens: int | None = self._value("max_new_tokens")

    def _value(self, name: str) -> Any:
        return getattr(self._config, name, None)

    def settings(self, request: Generation) -> dict[str, Any]:
        """Return the arguments of `generate` for a request.

        Raises:
            RequestError: beams cannot be combined with another option of the request.
        """
        names = (*_SAMPLING, "repetition_penalty", "num_beams", "no_repeat_ngram_size")
        given = {name: value for name in names if (value := getattr(request, name)) is not None}
        self._check_beams(request)
        samples = self._samples(request)
        if samples:
            given["top_k"] = max(given.get("top_k", self._value("top_k") or 0), 0)
            given = {**{name: value for name, value in _NEUTRAL.items() if self._value(name) is None}, **given}
        else:
            given = {name: value for name, value in given.items() if name not in _SAMPLING}
        if request.logit_bias:
            given["sequence_bias"] = {**self._biases(), **{(key,): bias for key, bias in request.logit_bias.items()}}
        if request.min_tokens:
            given["min_new_tokens"] = request.min_tokens
        return {**self._replaced, **given, "do_sample": samples}

    def _samples(self, request: Generation) -> bool:
        """Return whether to sample, from the options of the request, or else from the checkpoint."""
        if request.temperature == 0 or request.top_p == 0:
            return False
        if request.temperature is not None:
            return True
        asked = request.top_p is not None or (request.top_k or 0) > 0 or request.min_p
        return bool(asked or self._value("do_sample")) and self._value("temperature") != 0

    def _check_beams(self, request: Generation) -> None:
        """Raise for options that need a single sequence, if the request uses several beams."""
        beams = request.num_beams or self._value("num_beams") or 1
        asked = {
            "stream": request.stream,
            "stop": request.stops or self.stops,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "logprobs": request.logprobs_asked is not None,
            "structured output or a forced tool_choice": request.grammar,
        }
        if beams > 1 and (found := [name for name, value in asked.items() if value]):
            origin = "" if request.num_beams else f" (num_beams={beams} is from the model's generation_config)"
            message = f"num_beams cannot be combined with {', '.join(found)}{origin}: pass num_beams=1"
            raise RequestError(400, message, None, "num_beams")

    def _biases(self) -> dict[tuple[int, ...], float]:
        """Return the ``sequence_bias`` of the checkpoint. JSON files store it as pairs."""
        own = self._value("sequence_bias") or {}
        pairs = own.items() if isinstance(own, Mapping) else own
        return {tuple(tokens): bias for tokens, bias in pairs}
