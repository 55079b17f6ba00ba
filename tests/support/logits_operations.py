"""Operations that user code applies to logits, and the variants of cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VOCAB = 23
"""Divides neither by 2 nor by 3."""

SHAPE = (3, 5, VOCAB)

Loss = dict[str, Any]

LOSSES: list[Loss] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 4},
    {"ignore_index": -1, "reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "reduction": "none"},
    {"label_smoothing": 1.0, "reduction": "sum"},
    {"weight": torch.linspace(0.1, 2, VOCAB, dtype=torch.float64)},
]

LABELS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda target: target,
    "some ignored": lambda target: target.masked_fill(target % 3 == 0, -100),
    "all ignored": lambda target: torch.full_like(target, -100),
    "the first word": torch.zeros_like,
    "the last word": lambda target: torch.full_like(target, VOCAB - 1),
    "none": lambda target: target[:0],
}

TENSOR = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)

PER_TOKEN = torch.linspace(-1, 2, 15, dtype=torch.float64).view(3, 5, 1)

TARGET = torch.arange(15).view(3, 5)

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "mask of rows": lambda x: x[torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % 3 > 0],
    "softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "F.log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmax of all": lambda x: x.argmax(),
    "topk": lambda x: x.topk(4).values,
    "topk's indices": lambda x: x.topk(4).indices,
    "max": lambda x: x.max(dim=-1)[0],
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(1),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "[:, -1]": lambda x: x[:, -1],
    "[:, -1, :]": lambda x: x[:, -1, :],
    "[0]": lambda x: x[0],
    "[1:]": lambda x: x[1:],
    "[..., :-1, :]": lambda x: x[..., :-1, :],
    "[..., 7]": lambda x: x[..., 7],
    "[..., -1:]": lambda x: x[..., -1:],
    "[..., :20]": lambda x: x[..., :20],
    "[..., :9]": lambda x: x[..., :9],
    "[..., :-3]": lambda x: x[..., :-3],
    "[..., :30]": lambda x: x[..., :30],
    "[..., 2:]": lambda x: x[..., 2:],
    "[:, :, 3:20]": lambda x: x[:, :, 3:20],
    "[0, 1, 2]": lambda x: x[0, 1, 2],
    "[None]": lambda x: x[None],
    "[:, None]": lambda x: x[:, None],
    "[...]": lambda x: x[...],
    "[...,]": lambda x: x[...,],
    "[1, ...]": lambda x: x[1, ...],
    "[..., None]": lambda x: x[..., None],
    "[..., 0, :]": lambda x: x[..., 0, :],
    "[mask]": lambda x: x[PER_TOKEN.squeeze(-1) > 0],
    "[indices]": lambda x: x[torch.tensor([2, 0])],
    "[arange, position]": lambda x: x[torch.arange(3), torch.tensor([0, 4, 2])],
    "gather": lambda x: x.gather(-1, TARGET.unsqueeze(-1)),
    "index_select": lambda x: x.index_select(-1, torch.tensor([22, 0])),
    "+ number": lambda x: x + 2,
    "- number": lambda x: 2 - x,
    "* number": lambda x: 3 * x,
    "/ number": lambda x: x / 3,
    "negative": lambda x: -x,
    "power": lambda x: x**2,
    "* scalar tensor": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "tensor * ": lambda x: TENSOR * x,
    "* tensor": lambda x: x * TENSOR,
    "+ tensor": lambda x: x + TENSOR,
    "tensor -": lambda x: TENSOR - x,
    "/ tensor": lambda x: x / (TENSOR + 3),
    "* tensor of tokens": lambda x: x * PER_TOKEN,
    "torch.mul(tensor, x)": lambda x: torch.mul(TENSOR, x),
    "x * x": lambda x: x * x,
    "x - x.max": lambda x: x - x.max(-1, keepdim=True).values,
    "@": lambda x: x @ TENSOR,
    "> number": lambda x: x > 0.5,
    "tanh": lambda x: x.tanh() * 30,
    "capped": lambda x: torch.tanh(x / 30) * 30,
    "sigmoid": lambda x: x.sigmoid(),
    "masked_fill": lambda x: x.masked_fill(TENSOR > 0, -9.0),
    "where": lambda x: torch.where(TENSOR > 0, x, x - 5),
    "cat": lambda x: torch.cat([x, x], dim=1),
    "stack": lambda x: torch.stack([x, 2 * x]),
    "view(-1, vocab)": lambda x: x.view(-1, VOCAB),
    "view(-1, x.size(-1))": lambda x: x.view(-1, x.size(-1)),
    "view(size)": lambda x: x.view(torch.Size((15, VOCAB))),
    "view(-1)": lambda x: x.view(-1),
    "view of all words twice": lambda x: x[0, :1].view(VOCAB),
    "view_as": lambda x: x.view_as(torch.empty(15, VOCAB)),
    "reshape(5, 3, -1)": lambda x: x.reshape(5, 3, -1),
    "reshape((5, 3, vocab))": lambda x: x.reshape((5, 3, VOCAB)),
    "flatten": lambda x: x.flatten(0, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x[:1].expand(4, -1, -1),
    "split": lambda x: x.split(7, dim=-1)[1],
    "chunk": lambda x: x.chunk(3, dim=0)[2],
    "unbind": lambda x: x.unbind(1)[1],
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0),
    "contiguous": lambda x: x[..., :-1, :].contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "float": lambda x: x.float().double(),
    "to(copy=True)": lambda x: x[:, -1].to(copy=True, dtype=torch.float64),
    "to(device)": lambda x: x.to("cpu"),
    "shape": lambda x: x.shape,
    "size()": lambda x: x.size(),
    "size(-1)": lambda x: x.size(-1),
    "size(dim=1)": lambda x: x.size(dim=1),
    "len": len,
    "numel": lambda x: x.numel(),
    "nelement": lambda x: x.nelement(),
    "dim": lambda x: (x.dim(), x.ndim, x.dtype, x.device, x.requires_grad, x.is_floating_point()),
    "tolist": lambda x: x.detach().tolist(),
    "item": lambda x: x[0, 0, 0].item(),
    "iteration": lambda x: sum(row.sum() for row in x),
    "new_zeros": lambda x: x.new_zeros(x.shape) + x,
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "equal": lambda x: torch.equal(x, x + 0),
    "allclose": lambda x: torch.allclose(x, x),
    "of keyword arguments": lambda x: torch.softmax(input=x, dim=-1),
    "cross entropy by keywords": lambda x: F.cross_entropy(input=x.view(-1, VOCAB), target=TARGET.view(-1)),
    "cross entropy of the first words": lambda x: F.cross_entropy(x[..., :20].view(-1, 20), TARGET.view(-1)),
    "cross entropy, words in dim 1": lambda x: F.cross_entropy(x.transpose(1, 2), TARGET),
    "cross entropy with probabilities": lambda x: F.cross_entropy(x.view(15, VOCAB), TENSOR.softmax(-1).expand(15, -1)),
    "nll_loss": lambda x: F.nll_loss(x.view(-1, VOCAB).log_softmax(-1), TARGET.view(-1)),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), TENSOR.softmax(-1).expand(3, 5, VOCAB), reduction="sum"),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid().round()),
    "linear": lambda x: F.linear(x, TENSOR.view(1, -1)),
    "CrossEntropyLoss": lambda x: torch.nn.CrossEntropyLoss()(x.view(-1, VOCAB), TARGET.view(-1)),
}


def changed(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    x = x * 1
    change(x)
    return x


def divide_by_two(x: Tensor) -> Tensor:
    x /= 2
    return x


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "x /= 2": divide_by_two,
    "mul_": lambda x: changed(x, lambda y: y.mul_(2)),
    "add_": lambda x: changed(x, lambda y: y.add_(TENSOR)),
    "masked_fill_": lambda x: changed(x, lambda y: y.masked_fill_(TENSOR > 0, -9.0)),
    "x[..., words] =": lambda x: changed(x, lambda y: y.__setitem__((..., [0, 22]), -9.0)),
    "x[:, -1] =": lambda x: changed(x, lambda y: y.__setitem__((slice(None), -1), TENSOR)),
}
