"""Models of text and sounds, and models that transcribe: batches whose rows have different numbers of sounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq, registry

from support import zoo
from support.float64 import lifted_casts
from support.generation import GREEDY, Tokens, generate_tokens, token_differences
from support.pipelines import loop_differences, model_on_stages
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    parallel_model,
    reference_model,
    reference_step,
    step_differences,
)


def check_batches(steps: list[Step], tokens: list[Tokens], tp: int, towers: str) -> None:
    lines = []
    for step, expected in zip(steps, tokens, strict=True):
        options = {"gather_logits": True, "tower_parallel": towers}
        model = parallel_model(step.name, step.config, step.weights, tp, **options)
        lines += step_differences(
            model, step, optional=("image_outputs.",) if towers == "images" else ()
        ) + token_differences(model, step.batch, expected, GREEDY)
    assert not lines, "\n".join(lines)


def check_on_stages(steps: list[Step], tokens: list[Tokens], sizes: tuple[int, int]) -> None:
    tp, pp = sizes
    lines = []
    for step, expected in zip(steps, tokens, strict=True):
        cls: Any = registry.find(step.name)
        rows = len(step.batch["input_ids"])
        size = rows // 3 if cls.loss_is_mean else rows  # of one process, batch norms see all sounds
        model = model_on_stages(step.name, step.config, step.weights, tp, pp, micro_batch_size=size)
        model.requires_grad_(True)  # as loading leaves it
        named = [name for name, _ in model.named_parameters()]
        assert (model.stage.index == 0) == any(part in name for name in named for part in ("audio_tower", "encoder."))
        lines += loop_differences(model.train(), step) + token_differences(model, step.batch, expected, GREEDY)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(2)
@pytest.mark.stacks
@pytest.mark.parametrize("model_type", zoo.WITH_SOUNDS)
def test_sounds_in_any_rows_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    """Rows with 1, 0 and 2 sounds, with 2, 0 and 1, and without sounds, on ranks and stages."""
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    batch = zoo.batch(name, config, seed)
    others = zoo.batch(name, config, seed + 1)
    backwards = {key: value.flip(0) for key, value in others.items()}
    batches = (batch, backwards, zoo.text_only(config, batch))
    steps = [reference_step(name, config, seed, batch=each) for each in batches]
    model = reference_model(name, config, seed)
    tokens = [generate_tokens(model, step.batch, GREEDY) for step in steps]
    for tp, towers in ((2, "weights"), (3, "weights"), (3, "images")):
        if towers == "weights" or model_type.endswith("_thinker"):
            pool.run(tp, check_batches, steps, tokens, tp, towers)
    for sizes in ((1, 2), (2, 2)):
        pool.run(sizes[0] * sizes[1], check_on_stages, steps, tokens, sizes)


def refuse_on_stages(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 1, 2, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match="does not fit input_ids: the 2 sounds have"):
        model(**{**batch, **{key: batch[key][1:] for key in ("input_features", "feature_attention_mask")}})
    one = batch["input_ids"].clone()  # an older layout, in which each sound has one token
    one[(one == config.audio_token_id) & (one.roll(1, -1) == config.audio_token_id)] = 3
    with pytest.raises(ValueError, match="does not fit input_ids: the 3 sounds have"):
        model(**{**batch, "input_ids": one})
    prompt = {key: value for key, value in batch.items() if key != "labels"}
    wrong = prompt["input_features"][:, 1:]  # the encoder fails, on the first stage
    with pytest.raises(RuntimeError) as caught:
        model.generate(**{**prompt, "input_features": wrong}, max_new_tokens=2)
    assert (model.stage.index == 0) != ("another stage" in str(caught.value))
    assert model.generate(**prompt, max_new_tokens=2).shape[1] == prompt["input_ids"].shape[1] + 2


def test_sounds_that_do_not_fit_are_refused_on_every_rank(pool: Pool, seed: int) -> None:
    name, config = "Qwen2AudioForConditionalGeneration", zoo.config("qwen2_audio")
    pool.run(2, refuse_on_stages, name, config, zoo.batch(name, config, seed))


def refuse_micro_batches(config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find("GraniteSpeechForConditionalGeneration")
    model = cls.from_config_with_parallel(config, 1, 2, micro_batch_size=1, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"depends on the whole batch.*set_micro_batch_size\(3\)"):
        model(**batch)


def test_losses_behind_batch_norms_need_the_whole_batch(pool: Pool, seed: int) -> None:
    config = zoo.config("granite_speech")
    batch = zoo.batch("GraniteSpeechForConditionalGeneration", config, seed)
    pool.run(2, refuse_micro_batches, config, batch)


def check_transcripts(name: str, config: PreTrainedConfig, weights: Any, batch: Any, expected: Any) -> None:
    model = parallel_model(name, config, weights, 2).eval()
    with lifted_casts():
        output = model.generate(**batch, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert not differences("logits", output.logits, expected.logits, TOLERANCE)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model_type", ["granite_speech5_ctc", "lasr_ctc", "parakeet_ctc"])
def test_transcripts_of_ctc_models_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    batch = {key: value for key, value in zoo.batch(name, config, seed).items() if key != "labels"}
    model = reference_model(name, config, seed).eval()
    with lifted_casts():
        expected = model.generate(**batch, return_dict_in_generate=True)
    pool.run(2, check_transcripts, name, config, model.state_dict(), batch, expected)


CODES = {
    **{"text_decoder_lang_to_code_id": {"eng": 5}, "t2u_lang_code_to_id": {"eng": 3}},
    **{"vocoder_lang_code_to_id": {"eng": 1}, "char_to_id": {chr(97 + i): 3 + i for i in range(26)}},
    "id_to_text": {str(i): chr(97 + i % 26) * (1 + i % 3) for i in range(101)},
}
"""Tables of languages and of characters in the generation configuration of SeamlessM4T."""


def speak(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    for name, table in CODES.items():
        setattr(model.generation_config, name, table)
    with lifted_casts():
        spoken: tuple[Tensor, ...] = model.eval().generate(**batch, tgt_lang="eng", max_new_tokens=6)
    return spoken


def check_speech(name: str, config: PreTrainedConfig, weights: Any, batch: Any, expected: tuple[Tensor, ...]) -> None:
    waveform, lengths = speak(parallel_model(name, config, weights, 2), batch)
    assert torch.equal(lengths, expected[1])
    assert not differences("waveform", waveform, expected[0], TOLERANCE)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name",
    [
        *("SeamlessM4TForTextToSpeech", "SeamlessM4Tv2ForTextToSpeech"),
        *("SeamlessM4TForSpeechToSpeech", "SeamlessM4Tv2ForSpeechToSpeech"),
    ],
)
def test_speech_of_seamless_m4t_matches_transformers(pool: Pool, name: str, seed: int) -> None:
    config = zoo.config("seamless_m4t_v2" if "v2" in name else "seamless_m4t")
    batch = {key: value for key, value in zoo.batch(name, config, seed).items() if "label" not in key}
    batch = {key: value for key, value in batch.items() if not key.startswith("decoder")}
    model = reference_model(name, config, seed)
    expected = speak(model, batch)
    assert expected[0].abs().max() > 0
    pool.run(2, check_speech, name, config, model.state_dict(), batch, expected)


@pytest.mark.parametrize("model_type", ["voxtral", "qwen3_asr", "granite_speech"])
def test_auto_classes_of_texts_and_of_transcripts_agree(model_type: str) -> None:
    config, name = zoo.config(model_type), zoo.main_head(model_type)
    for auto in (AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq):
        assert auto.class_for(config) is registry.find(name)


def test_encoders_with_adapters_have_one_stage() -> None:
    config = zoo.config("speech-encoder-decoder")
    cls: Any = registry.find("SpeechEncoderDecoderModel")
    assert not cls.plan(config).pipeline.single_stage_reason
    config.encoder.add_adapter = True
    with pytest.raises(ValueError, match="with add_adapter=True, the decoder reads a shorter sequence"):
        cls.from_config_with_parallel(config, pipeline_parallel_size=2)
