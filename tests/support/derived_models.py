"""Models without a written plan: plain modules, and classes like in a user's file or a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, TokenClassifierOutput


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(tokens, 11), nn.GELU(), nn.Linear(11, tokens))
        self.channels = nn.Sequential(
            nn.Linear(channels, 19), nn.GELU(), nn.Dropout(0.1), nn.Linear(19, channels), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-mixer of images ``[rows, 3, 12, 12]``."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 10, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(9, 10) for _ in range(2))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network of images ``[rows, 3, 12, 12]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, padding=1)
        self.layers = nn.Sequential(ResidualBlock(7, 7, 1), ResidualBlock(7, 12, 2))
        self.up = nn.ConvTranspose2d(12, 5, 2, 2)
        self.fc = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.up(self.layers(self.stem(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int, flash: bool, rate: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width, self.flash = heads, width, flash
        self.dropout = nn.Dropout(rate)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, flash: bool, rate: float = 0.1) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, flash, rate)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """A GPT with tied embeddings; returns logits and, with targets, the loss."""

    def __init__(self, flash: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(37, 20), nn.Embedding(16, 20)
        self.blocks = nn.ModuleList(GPTBlock(20, 5, flash) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(20), nn.Linear(20, 37, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class LSTMLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 9, padding_idx=1)
        self.lstm = nn.LSTM(9, 14, num_layers=2, batch_first=True, dropout=0.1)
        self.decoder = nn.Linear(14, 37)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(ids))[0])


class HandWrittenViT(nn.Module):
    """A vision transformer of images ``[rows, 3, 12, 12]``, one block by hand and one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(1, 10, 12))
        self.norm, self.qkv, self.proj = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.block = nn.TransformerEncoderLayer(12, 4, 17, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.position
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, N, 3, 3, C // 3).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * (C // 3) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))
        return self.head(self.block(x)[:, 0])


class TorchTransformer(nn.Module):
    """torch's encoder and decoder of sequences ``[rows, tokens, 12]``; both ignore the last token of all rows."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 12, "nhead": 3, "dim_feedforward": 16, "dropout": 0.0}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(**sizes)

    def forward(self, x: Tensor) -> Tensor:
        x, padding = x.transpose(0, 1), torch.arange(x.shape[1]).expand(x.shape[:2]) == x.shape[1] - 1
        memory = self.encoder(x, src_key_padding_mask=padding)
        return self.decoder(x, memory, memory_key_padding_mask=padding).transpose(0, 1)


PLAIN: dict[str, Any] = {
    "mixer": (Mixer, (3, 12, 12)),
    "resnet": (ResNet, (3, 12, 12)),
    "nanogpt": (NanoGPT, 9),
    "lstm": (LSTMLanguageModel, 9),
    "vit": (HandWrittenViT, (3, 12, 12)),
    "torch": (TorchTransformer, (5, 12)),
}
"""For each plain module, its class and the shape or number of tokens of one input row."""


def plain(name: str, seed: int) -> tuple[nn.Module, Tensor]:
    """A plain module in float64, and an input of four rows."""
    torch.manual_seed(seed)
    cls, shape = PLAIN[name]
    model = cls().double()
    for param in {id(param): param for param in model.parameters()}.values():
        param.data += 0.05 * torch.randn_like(param)
    inputs = torch.randint(2, 37, (4, shape)) if isinstance(shape, int) else torch.randn(4, *shape).double()
    return model, inputs


# Classes of transformers' kind in a file of a user --------------------------------------------------------------------


class TinyConfig(PreTrainedConfig):
    model_type = "derive_tiny"

    def __init__(self, vocab_size: int = 37, width: int = 20, depth: int = 3, heads: int = 5, **kwargs: Any) -> None:
        self.vocab_size, self.width, self.depth, self.heads = vocab_size, width, depth, heads
        self.hidden_size, self.num_hidden_layers = width, depth
        super().__init__(**kwargs)


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model with a custom attention, like models defined in checkpoint repositories."""

    config_class = TinyConfig
    base_model_prefix = ""
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(GPTBlock(config.width, config.heads, True, 0.0) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss, logits=logits)


class GatedConfig(PreTrainedConfig):
    model_type = "derive_gated"

    def __init__(self, vocab_size: int = 41, width: int = 24, depth: int = 2, heads: int = 3, **kwargs: Any) -> None:
        self.vocab_size, self.width, self.depth, self.heads = vocab_size, width, depth, heads
        self.hidden_size, self.num_hidden_layers = width, depth
        super().__init__(**kwargs)


class GatedBlock(nn.Module):
    """Attention of torch, a convolution over tokens, and a gated MLP with one projection for gate and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attn(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.conv(self.norms[1](x).transpose(1, 2)).transpose(1, 2)
        gate, values = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * values)


class GatedForTokenClassification(PreTrainedModel):
    """An encoder, like models defined in checkpoint repositories."""

    config_class = GatedConfig
    base_model_prefix = ""

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(GatedBlock(config.width, config.heads) for _ in range(config.depth))
        self.classifier = nn.Linear(config.width, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, padding)
        logits = self.classifier(hidden)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits)
