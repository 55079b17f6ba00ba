"""Base of sequence and context parallelism: where hidden states are divided, and how checkpointing keeps the parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from oslo_models.distributed.autograd_collectives import scatter_to
from oslo_models.distributed.callers import is_of_fully_shard
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec

TOKENS = 1
"""Dimension of the tokens in hidden states, ``[rows, tokens, features]``."""

LEAST_PROMPT = 512
"""Least number of tokens of a row that are divided without gradients. Messages outweigh the computation of fewer."""


class TokenDivision(ABC):
    """Divides the tokens of one model's hidden states over the ranks of an axis.

    Hidden states are divided at the entry of a block, in calls of the parallel model with gradients. In compiled code,
    and with fewer tokens than ranks, they stay whole. So they do without gradients, except for prompts of at least
    `LEAST_PROMPT` tokens where `within_model` allows them.

    Attributes:
        axis: axis of the ranks.
        option: the argument of the model that divides tokens, for messages.
    """

    def __init__(self, axis: Axis, option: str) -> None:
        self.axis, self.option = axis, option
        self._in_model = self._in_checkpoint = False
        self._divides_prompts: Callable[[], bool] = _never

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDivision:
        return self  # a copied model does not run at the same time

    @contextmanager
    def within_model(self, divides_prompts: Callable[[], bool] | None = None) -> Iterator[None]:
        """Allow blocks to divide hidden states within the context.

        Args:
            divides_prompts: whether to divide long prompts without gradients. Called before a prompt is divided.
        """
        before = self._in_model, self._divides_prompts
        self._in_model, self._divides_prompts = True, divides_prompts or _never
        try:
            yield
        finally:
            self._in_model, self._divides_prompts = before
            self._end()

    @property
    def is_prompt(self) -> bool:
        """Whether tokens are divided without gradients, outside of checkpointing."""
        return not (torch.is_grad_enabled() or self._in_checkpoint)

    @abstractmethod
    def _end(self) -> None:
        """Forget the block that is running."""

    @abstractmethod
    def _recompute(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context in which a part of the running block is computed again."""

    @abstractmethod
    def _mark(self, local: Tensor, spec: ShardSpec, length: int) -> ShardedActivation:
        """Return an activation of this rank's tokens."""

    @abstractmethod
    def divide_sum(self, product: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return this rank's tokens of a sum over the ranks and a bias, or ``None`` if hidden states are whole."""

    def _divided(self, block: nn.Module, hidden: Any) -> ShardedActivation | None:
        """Return this rank's part of a block's hidden states, or ``None`` if the block computes all tokens.

        Raises:
            RuntimeError: another checkpointing function computes the block again, with its local tokens.
        """
        if not isinstance(hidden, Tensor):
            return None
        if isinstance(hidden, ShardedActivation):
            return hidden
        if not self._in_model:
            self._require_recomputation(block)
            return None
        return self._part_of(hidden) if self._divides(hidden) else None

    def _require_recomputation(self, block: nn.Module) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(
                f"{self.option}: a {type(block).__name__} is computed again in the backward pass, and its "
                "checkpointing function does not know which tokens this rank holds: call "
                "model.gradient_checkpointing_enable() instead"
            )

    def _divides(self, hidden: Tensor) -> bool:
        if torch.compiler.is_compiling() or not hidden.is_floating_point() or hidden.dim() != 3:
            return False
        length = hidden.shape[TOKENS]
        if self.is_prompt and not (length >= LEAST_PROMPT and self._divides_prompts()):
            return False
        return self.divides(length)

    def divides(self, length: int) -> bool:
        """Return whether every rank holds some tokens of rows of this length."""
        return min(self._sizes(length)) > 0

    def _sizes(self, length: int) -> list[int]:
        return ShardSpec(TOKENS, length).sizes(length, self.axis.size)

    def _part_of(self, x: Tensor) -> ShardedActivation:
        length = x.shape[TOKENS]
        return self._mark(scatter_to(self.axis, x, TOKENS, self._sizes(length)), ShardSpec(TOKENS, length), length)

    def checkpointing(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpointing function that passes parts through ``checkpoint``, which loses their marks.

        Args:
            checkpoint: a function like ``torch.utils.checkpoint.checkpoint``, which calls its first argument with the
                others.
        """

        def on_parts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args)  # nothing to recompute
            makers, recompute, returned = [maker_of(arg) for arg in args], self._recompute(), list[Any]()

            def on_local(*given: Any) -> Any:
                before = self._in_model, self._in_checkpoint
                self._in_model, self._in_checkpoint = True, True
                try:
                    with recompute():
                        result = function(*(make(arg) for make, arg in zip(makers, given, strict=True)))
                finally:
                    self._in_model, self._in_checkpoint = before
                leaves, structure = tree_flatten(result)
                returned[:] = [maker_of(leaf) for leaf in leaves]
                return tree_unflatten([local_of(leaf) for leaf in leaves], structure)

            leaves, structure = tree_flatten(checkpoint(on_local, *(local_of(arg) for arg in args), **kwargs))
            return tree_unflatten([make(leaf) for make, leaf in zip(returned, leaves, strict=True)], structure)

        vars(on_parts)["keywords"] = getattr(checkpoint, "keywords", {})  # divided towers refuse use_reentrant=True
        return on_parts


def loses_parts(module: nn.Module) -> bool:
    """Return whether hooks of ``fully_shard`` at a module would lose the marks of parts."""
    return any(map(is_of_fully_shard, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def keep_parts(module: nn.Module) -> None:
    """Pass local tensors through the hooks of ``fully_shard`` at a module. Its forward hook gets the raw outputs."""
    before: Any = module._forward_pre_hooks
    after: Any = module._forward_hooks
    before.update({key: partial(_before_forward, hook) for key, hook in before.items() if is_of_fully_shard(hook)})
    for key, hook in [*after.items()]:
        if is_of_fully_shard(hook):
            after[key] = partial(_after_forward, hook)
            after.move_to_end(key, last=False)


def _before_forward(hook: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    if not torch.is_grad_enabled() or not _has_parts(leaves):  # without gradients, it adds no nodes to the graph
        return hook(module, args, kwargs)
    result = hook(module, *tree_unflatten(map(local_of, leaves), structure))
    if result is None:
        return None
    found, structure = tree_flatten(result)
    return tree_unflatten([maker_of(leaf)(each) for leaf, each in zip(leaves, found, strict=True)], structure)


def _after_forward(hook: Callable[..., Any], module: nn.Module, args: Any, output: Any) -> Any:
    leaves, structure = tree_flatten(output)
    if not torch.is_grad_enabled() or not _has_parts(leaves):
        return hook(module, args, output)
    given = [_Local.apply(leaf.local()) if isinstance(leaf, ShardedActivation) else leaf for leaf in leaves]
    result = hook(module, args, tree_unflatten(given, structure))
    if result is None:
        return None
    found, structure = tree_flatten(result)
    return tree_unflatten(map(_with_hooks, leaves, given, found), structure)


def _has_parts(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, ShardedActivation) for leaf in leaves)


def _with_hooks(leaf: Any, given: Any, found: Any) -> Any:
    """Return an output of a module, with the hooks that ``fully_shard`` has registered at its local tensor.

    The output itself gets them, because recorders of hidden states have read it already.
    """
    if not isinstance(leaf, ShardedActivation):
        return found
    with torch._C.DisableTorchFunctionSubclass():
        for hook in (given._backward_hooks or {}).values():
            leaf.register_hook(hook)
    return leaf if found is given else leaf.remaker()(found)


class _Local(torch.autograd.Function):
    """Identity. Its result is no view: in-place operations on a view would drop the hooks of ``fully_shard``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states among the arguments of a block."""
    return args[0] if args else kwargs.get("hidden_states")


def with_hidden_states(hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def maker_of(value: Any) -> Callable[[Any], Any]:
    """Return a function that makes ``value`` from its local tensor. It does not keep the tensor."""
    return value.remaker() if isinstance(value, ShardedActivation) else _same


def _same(value: Any) -> Any:
    return value


def _never() -> bool:
    return False


def local_of(value: Any) -> Any:
    """Return the local tensor of an activation. Return other values as they are."""
    return value.local() if isinstance(value, ShardedActivation) else value
