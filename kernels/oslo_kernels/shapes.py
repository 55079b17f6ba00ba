"""Checks the tensors of an operation before a kernel takes their addresses: a wrong size would read other memory."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Shapes"]


class Shapes:
    """The required shapes of an operation's tensors.

    Each text describes one tensor by its sizes, separated by spaces. An integer is the size itself. A name stands for
    the same size everywhere. Other forms:

    * ``*s``: any number of dimensions, only at the beginning; ``#s``: the product of their sizes
    * ``h+g``, ``h*w``, ``2*n``: a sum or product of earlier sizes; a single new name may follow ``2*``
    * ``b?``: the size ``b`` or 1, the same in each tensor
    * ``t<w``: a new name for a size of at most ``w``
    * ``...``: any shape
    * a last ``!``: the tensor is contiguous
    """

    def __init__(self, name: str, *texts: str) -> None:
        self.name, self.texts = name, texts
        self._tokens = [text.split() for text in texts]
        self._check = lru_cache(maxsize=1024)(self._check_all)  # decoding repeats a few shapes

    def check(self, args: tuple[Any, ...]) -> None:
        """Check the arguments of a call, with one text for each tensor or ``None`` before other arguments.

        Raises:
            ValueError: a tensor has another shape, a dtype without fractions, or gaps where it may have none.
        """
        given = args[: len(self._tokens)]
        self._check(tuple(None if x is None else (x.shape, x.dtype, x.is_contiguous()) for x in given))

    def _check_all(self, given: tuple[tuple[torch.Size, torch.dtype, bool] | None, ...]) -> None:
        known: dict[str, Any] = {}
        for number, (tokens, each) in enumerate(zip(self._tokens, given, strict=False)):  # the last may have defaults
            if each is None:
                continue
            shape, dtype, is_contiguous = each
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(f"{self.name}: argument {number} is {dtype}: cast it to a floating dtype")
            if tokens[-1] == "!" and not is_contiguous:
                raise ValueError(f"{self.name}: argument {number} is not contiguous: pass x.contiguous()")
            if not _fits(shape, tokens, known):
                shapes = [None if x is None else tuple(x[0]) for x in given]
                raise ValueError(f"{self.name}: argument {number} of shapes {shapes} is not [{self.texts[number]}]")


def _fits(shape: torch.Size, tokens: list[str], known: dict[str, Any]) -> bool:
    """Return whether a shape fits. Add the sizes of new names to ``known``."""
    tokens = [token for token in tokens if token != "!"]
    if tokens[0] == "...":
        return True
    if tokens[0].startswith("*"):
        rest = len(tokens) - 1
        if len(shape) < rest or known.setdefault(tokens[0], shape[: len(shape) - rest]) != shape[: len(shape) - rest]:
            return False
        shape, tokens = shape[len(shape) - rest :], tokens[1:]
    return len(shape) == len(tokens) and all(_is(size, token, known) for size, token in zip(shape, tokens, strict=True))


def _is(size: int, token: str, known: dict[str, Any]) -> bool:
    if token.isdigit():
        return size == int(token)
    if token[0] == "#":
        return size == prod(known[f"*{token[1:]}"])
    if token[-1] == "?":
        return bool(size in (1, known[token[:-1]]) and known.setdefault(token, size) == size)
    if "<" in token:
        name, _, limit = token.partition("<")
        return bool(size <= known[limit] and known.setdefault(name, size) == size)
    if "+" in token:
        return size == sum(known[name] for name in token.split("+"))
    if "*" in token:
        first, _, name = token.partition("*")
        factor = int(first) if first.isdigit() else known[first]
        return bool(size % factor == 0 and known.setdefault(name, size // factor) * factor == size)
    return bool(known.setdefault(token, size) == size)


def one_device(arguments: tuple[Any, ...]) -> torch.device:
    """Return the device of all tensors among the arguments.

    Raises:
        ValueError: they are on several devices.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = tensors[0].device
    for x in tensors:
        if x.device != device:
            raise ValueError(f"a kernel reads tensors of one device, got {device} and {x.device}")
    return device
