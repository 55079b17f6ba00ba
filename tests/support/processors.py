"""Processors of tiny models of text and images."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from support import zoo

SIDE = 16
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
)


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for each token, and "<image>" as a special token in any text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    config = zoo.config("llava")
    table = {f"w{i}": i for i in range(config.text_config.vocab_size) if i != config.image_token_id}
    made = Tokenizer(models.WordLevel({**table, "<image>": config.image_token_id}, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1")
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    return tokenizer


def llava_processor() -> Any:
    """Return the processor of the tiny LLaVA."""
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return LlavaProcessor(
        CLIPImageProcessorPil(**sizes, do_convert_rgb=True),
        words(),
        patch_size=zoo.config("llava").vision_config.patch_size,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )
