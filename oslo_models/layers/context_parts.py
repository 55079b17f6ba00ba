"""Context parallelism: each rank holds a part of the tokens of every row, through whole blocks.

Hidden states become `ContextPart`, a `ShardedActivation` over the cp axis. transformers' code sees whole shapes.
Attention exchanges heads (`context_attention`). Everything else computes the local tokens (`context_rules` and the
rules of `ShardedActivation`), or gathers all tokens.

There are two conventions for gradients. Outside of blocks, a whole tensor has the same gradient on all ranks, as
between tensor-parallel layers. Inside of blocks, the gradient of a whole tensor is the sum of the gradients of all
ranks. A part has its part of the gradient everywhere. So a block's parameters need one sum, at the end of its backward
pass, whether they computed parts or whole tensors. Experts over the cp axis or replicas sum their gradients themselves.
FSDP2 over the cp axis averages gradients itself. It gets the parts, multiplied by the number of ranks.

Long prompts are divided in calls without gradients. Each rank gathers their keys and values into its whole cache.

Source of the exchange: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from oslo_models.distributed.autograd_collectives import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
)
from oslo_models.distributed.collectives import reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import default_generator, stable_hash
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.sharded_activation import Rule, ShardedActivation, ShardSpec, gathered
from oslo_models.layers.token_division import TOKENS, TokenDivision, hidden_states_of, with_hidden_states

CONTEXT_RULES: dict[Any, Rule] = {}
"""``rule(function, args, kwargs)`` for torch functions of a `ContextPart`, before the rules of `ShardedActivation`."""


class ContextPart(ShardedActivation):
    """This rank's tokens of an activation.

    Attributes:
        state: whether a block is running, which decides the convention for gradients.
    """

    state: ContextParts

    @classmethod
    def of(cls, local: Tensor, state: ContextParts, spec: ShardSpec, full_size: int) -> ContextPart:
        """Make a part from its local tokens. The arguments are those of `ShardedActivation.from_local`."""
        made: Any = cls.from_local(local, state.axis, spec, full_size)
        made.state = state
        return made

    def with_local(self, local: Tensor, spec: ShardSpec | None = None, full_size: int | None = None) -> ContextPart:
        spec = spec or self.spec
        return self.of(local, self.state, spec, self.full_shape[self.spec.dim] if full_size is None else full_size)

    def remaker(self) -> Callable[[Tensor], ContextPart]:
        return partial(self.of, state=self.state, spec=self.spec, full_size=self.full_shape[self.spec.dim])

    def full(self, why: str = "") -> Tensor:
        """Gather the tokens on every rank. A collective."""
        gather, dim, sizes = gather_to if self.state.is_inside else gather_from, self.spec.dim, self.sizes()
        if self.spec.parts == 1:
            return gather(self.tp, self.local(), dim, sizes)
        return gather(self.tp, self.local().unflatten(dim, (self.spec.parts, -1)), dim + 1, sizes).flatten(dim, dim + 1)

    def sizes(self) -> list[int]:
        """Return each rank's number of elements of one part of the sharded dimension."""
        return self.spec.sizes(self.full_shape[self.spec.dim], self.tp.size)

    def slice_of(self, x: Tensor, dim: int) -> Tensor:
        """Return the local tokens of a whole tensor ``x``: divide its dimension ``dim`` like this activation."""
        if not self.state.is_inside and x.requires_grad:
            return super().slice_of(x, dim)
        sizes = self.spec.sizes(x.shape[dim], self.tp.size)
        start, size = sum(sizes[: self.tp.rank]), sizes[self.tp.rank]
        if self.spec.parts == 1:
            return x.narrow(dim, start, size)
        return x.unflatten(dim, (self.spec.parts, -1)).narrow(dim + 1, start, size).flatten(dim, dim + 1)

    def copy_of(self, x: Tensor) -> Tensor:
        """Return a whole tensor ``x`` that every rank uses. Outside of blocks, its gradient is all-reduced."""
        return x if self.state.is_inside else copy_to(self.tp, x)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = CONTEXT_RULES.get(func)
        if rule is not None:
            result = rule(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)


class ContextParts(TokenDivision):
    """Divides hidden states over the ranks of the cp axis, through all blocks of a stack.

    Attributes:
        tp: axis of the ranks that shard the layers.
        device: device of the model.
        draws: whether the model draws random numbers in blocks.
        prepare: called with each module of a block before it runs. Adapters may have replaced modules.
        averaged: names of each module's parameters that FSDP2 shards over these ranks too.
        is_inside: whether a block with divided hidden states is running.
    """

    def __init__(self, axis: Axis, tp: Axis, device: torch.device, draws: bool) -> None:
        super().__init__(axis, f"context_parallel_size={axis.size}")
        self.tp, self.device, self.draws = tp, device, draws
        self.prepare: Callable[[nn.Module], None] = lambda module: None
        self.averaged: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self.is_inside = False
        self._block: nn.Module | None = None
        self._overridden: list[tuple[nn.Module, str]] = []

    # Calls of blocks --------------------------------------------------------------------------------------------------

    def watch(self, block: nn.Module, gathers: bool) -> None:
        """Divide the hidden states at the entry of a block.

        Args:
            gathers: whether to gather the hidden states at its exit.
        """
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(partial(self._leave, gathers), always_call=True)

    def watches(self, module: nn.Module) -> bool:
        """Return whether a module is a block that divides hidden states."""
        return self._enter in module._forward_pre_hooks.values()

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._block is not None:  # a block inside of a block
            return None
        hidden = self._divided(block, hidden_states_of(args, kwargs))
        if hidden is None:
            return None
        args, kwargs = with_hidden_states(hidden, args, kwargs)
        if torch.is_grad_enabled():  # otherwise keep containers that the block changes, such as caches
            args, kwargs = tree_map_only(Tensor, self._inner, (args, kwargs))
        self._begin(block)
        return args, kwargs

    def _leave(self, gathers: bool, block: nn.Module, args: Any, output: Any) -> Any:
        if self._block is not block:
            return None
        self._end()
        output = tree_map_only(Tensor, self._outer, output)
        return tree_map_only(ContextPart, ContextPart.full, output) if gathers else output

    def _begin(self, block: nn.Module) -> None:
        self._block, self.is_inside = block, True
        for module in block.modules():
            self.prepare(module)
        if not torch.is_grad_enabled():
            return
        owners = [
            (module, name, param)
            for module in block.modules()
            for name, param in module._parameters.items()
            if param is not None and param.requires_grad and not _is_over_replicas(param)
        ]
        params = list({id(param): param for _, _, param in owners}.values())
        if not params:
            return
        averaged = {id(param) for module, name, param in owners if name in self.averaged.get(module, ())}
        are_averaged = tuple(id(param) in averaged for param in params)
        aliases = dict(zip(map(id, params), _SummedParameters.apply(self.axis, are_averaged, *params), strict=True))
        for module, name, param in owners:
            vars(module)[name] = aliases[id(param)]
            self._overridden.append((module, name))

    def _end(self) -> None:
        for module, name in self._overridden:
            vars(module).pop(name, None)
        self._overridden.clear()
        self._block, self.is_inside = None, False

    def _mark(self, local: Tensor, spec: ShardSpec, length: int) -> ContextPart:
        return ContextPart.of(local, self, spec, length)

    def _inner(self, x: Tensor) -> Tensor:
        """Return a tensor for use inside of a block. The sum over the ranks of its gradients is its gradient."""
        if isinstance(x, ContextPart) or not x.requires_grad or not torch.is_grad_enabled():
            return x
        inner: Tensor | None = getattr(x, "_oslo_inner", None)
        return copy_to(self.axis, x) if inner is None else inner

    def _outer(self, x: Tensor) -> Tensor:
        """Return a tensor of a block for use outside. All ranks have the same gradient."""
        if isinstance(x, ContextPart) or not x.requires_grad or not torch.is_grad_enabled():
            return x
        outer: Tensor = _Shared.apply(x, self.axis.size)
        outer._oslo_inner = x  # type: ignore[attr-defined]  # the next block needs no communication
        return outer

    # Messages between pipeline stages ---------------------------------------------------------------------------------

    def count(self, length: int) -> int:
        """Return the number of this rank's tokens of a row."""
        return self._sizes(length)[self.axis.rank]

    def part(self, local: Tensor, length: int) -> ContextPart:
        """Return hidden states of rows of ``length`` tokens from this rank's tokens."""
        return self._mark(local, ShardSpec(TOKENS, length), length)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens of hidden states. A collective if they are divided in another way."""
        if isinstance(hidden, ContextPart) and hidden.spec == ShardSpec(TOKENS, hidden.full_shape[TOKENS]):
            return hidden.local()
        return self._part_of(gathered(hidden)).local()

    # Mixers -----------------------------------------------------------------------------------------------------------

    def divide_sum(self, product: Tensor, bias: Tensor | None) -> ContextPart:
        """Return this rank's tokens of a sum over the ranks and their tensor-parallel ranks, in a block.

        Args:
            product: the product of local features, ``[rows, tokens, out]``.
            bias: the bias of the layer, ``[out]``.
        """
        length = product.shape[TOKENS]
        local = reduce_from(self.tp, reduce_scatter_from(self.axis, product, TOKENS, self._sizes(length)))
        return self.part(local if bias is None else local + bias.to(local.dtype), length)

    # Encoders ---------------------------------------------------------------------------------------------------------

    def watch_encoder(self, encoder: nn.Module, divides_prompts: Callable[[], bool]) -> None:
        """Divide long inputs of an encoder that ``generate`` calls outside of the model's forward."""
        calls: list[AbstractContextManager[None] | None] = []

        def enter(*_: Any) -> None:
            is_own = self.is_prompt and not self._in_model and not torch.compiler.is_compiling()
            calls.append(self.within_model(divides_prompts) if is_own else None)
            if (call := calls[-1]) is not None:
                call.__enter__()

        def leave(encoder: nn.Module, args: Any, output: Any) -> Any:
            if (call := calls.pop()) is None:
                return None
            call.__exit__(None, None, None)
            return gathered(output)

        encoder.register_forward_pre_hook(enter)
        encoder.register_forward_hook(leave, always_call=True)

    # Random numbers ---------------------------------------------------------------------------------------------------

    def random_stream(self) -> AbstractContextManager[None]:
        """Return a context in which each rank draws other random numbers. All ranks then continue with equal ones."""
        return self._own_stream() if self.draws and self.device.type != "meta" else nullcontext()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        generator = default_generator(self.device)
        if generator.device.type == "cuda":
            key = stable_hash(generator.initial_seed(), generator.get_offset())
            generator.set_offset(generator.get_offset() + 4)
        else:
            key = int(torch.randint(2**62, (), generator=generator))
        common = generator.get_state()
        generator.manual_seed(stable_hash("cp", key, self.axis.rank))
        try:
            yield
        finally:
            generator.set_state(common)

    # Checkpointing ----------------------------------------------------------------------------------------------------

    def _recompute(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(self._running, self._block)

    @contextmanager
    def _running(self, block: nn.Module | None) -> Iterator[None]:
        """Run a part of a block again, if its hooks have been called outside of the checkpointing function."""
        if block is None or self._block is block:
            yield
            return
        self._begin(block)
        try:
            yield
        finally:
            self._end()


class _SummedParameters(torch.autograd.Function):
    """Return aliases of a block's parameters. The backward pass sums their gradients over the ranks, in one message.

    Gradients that FSDP2 averages over the ranks are multiplied by their number instead.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, are_averaged: tuple[bool, ...], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.are_averaged = axis, are_averaged
        ctx.set_materialize_grads(False)
        with without_override():
            aliases = tuple(param.detach() for param in params)
        ctx.kinds = [(alias.shape, alias.dtype, alias.device) for alias in aliases]
        return aliases

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        summed: list[Tensor | None] = [None] * len(grads)
        for dtype in dict.fromkeys(dtype for _, dtype, _ in ctx.kinds):
            chosen = [index for index, (_, each, _) in enumerate(ctx.kinds) if each is dtype]
            device = ctx.kinds[chosen[0]][2]
            # Not all ranks use an expert. Without gradients on any rank, a parameter gets none, as in one process.
            used = torch.tensor([grads[index] is not None for index in chosen], dtype=dtype, device=device)
            parts = [used, *(_flat(grads[index], *ctx.kinds[index]) for index in chosen if not ctx.are_averaged[index])]
            flat = reduce_fresh(ctx.axis, torch.cat(parts))
            used, *sums = flat.split([len(part) for part in parts])
            if used.is_meta:  # a plan has no values: gradients of all ranks are alike
                used = torch.tensor([grads[index] is not None for index in chosen])
            found = iter(sums)
            for index, is_used in zip(chosen, used.tolist(), strict=True):
                shape = ctx.kinds[index][0]
                if not ctx.are_averaged[index]:
                    grad = next(found)
                    summed[index] = grad.view(shape) if is_used else None
                elif is_used:  # on some rank, so that FSDP2 gets gradients of equal parameters on all ranks
                    summed[index] = (_flat(grads[index], *ctx.kinds[index]) * ctx.axis.size).view(shape)
        return None, None, *summed


def _is_over_replicas(param: Tensor) -> bool:
    """Return whether a parameter belongs to experts whose layer sums the gradients over all ranks."""
    sharding = getattr(param, "sharding", None)
    return sharding is not None and bool(sharding.is_over_replicas)


def _flat(grad: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    if grad is None:
        return torch.zeros(shape.numel(), dtype=dtype, device=device)
    with without_override():
        return grad.reshape(-1).to(dtype)


class _Shared(torch.autograd.Function):
    """Identity. All ranks compute the gradient, and each gets its share of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None
