"""`FusableModel`: methods to fuse a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache
from typing_extensions import Self

from oslo_models import registry
from oslo_models.cache_argument import NAMES, generation_name
from oslo_models.contracts import holds
from oslo_models.distributed.device_collectives import watched_steps
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import gather_objects, require_equal
from oslo_models.distributed.stopping import UserErrors, agreed
from oslo_models.distributed.symmetric_memory import connect, disconnect
from oslo_models.fusion.block_timing import decide_blocks
from oslo_models.fusion.decoding import Decoders, graphs_run_in_this_thread, rounded_length, without_waiting
from oslo_models.fusion.float8 import check_float8, in_float8
from oslo_models.fusion.growing_cache import let_grow
from oslo_models.fusion.narrow_weights import check_narrow, narrow
from oslo_models.fusion.ngram_processors import fuse_processors
from oslo_models.fusion.self_check import apply_checked
from oslo_models.fusion.swap import Fusion, FusionCandidate, FusionReport, choose_backend
from oslo_models.fusion.timing import decide, use_huge_pages
from oslo_models.layers.token_division import TokenDivision
from oslo_models.layers.vocab_parallel import has_backward_hooks
from oslo_models.modeling.apply_plan import entries_of_blocks
from oslo_models.modeling.quantizing import check_not_quantized

_GENERATION = "transformers.generation.utils.GenerationMixin"
_NGRAMS = (
    f"{_GENERATION}._get_logits_processor",
    "transformers.generation.logits_process.NoRepeatNGramLogitsProcessor.__call__",
    "transformers.generation.logits_process.EncoderNoRepeatNGramLogitsProcessor.__call__",
)
_COMPILED = ("greedy_search", "sample")
"""The ``GenerationMode`` values with steps that transformers compiles. Beam search would use the cache eagerly."""


class FusableModel(PreTrainedModel):
    """The methods of `ParallelModel` that replace modules and generation steps with faster ones."""

    mesh: ParallelMesh | None = None
    gather_logits: bool | None = None
    token_division: TokenDivision | None = None
    _fusion: Fusion | None = None
    _fuses_ngrams: bool = False
    _fuses_ngrams_by_default: bool = False
    _decodes_in_graphs: bool = False
    _decoders: Decoders | None = None
    _user_errors: UserErrors | None = None

    def fuse(
        self,
        modules: list[type] | None = None,
        backend: str = "auto",
        measure: bool = True,
        weights: str | None = None,
        float8: str | None = None,
        symmetric_memory: bool = False,
        check: bool = True,
    ) -> Self:
        """Replace modules of this model in place with faster modules that compute the same up to rounding.

        Only modules that become faster on this device are replaced. `fusion_report` lists them. Parameter names and
        values stay the same, and `unfuse` undoes everything. Call this on every rank of the model.

        On a CPU, linear layers are timed against torch's, once per machine, with the current number of threads. With
        another number of threads they run torch's, until you call ``unfuse`` and ``fuse`` again. On GPUs, ``generate``
        without beams uses a static cache and CUDA graphs, which its first call compiles. To avoid both, pass
        ``cache_implementation="dynamic"``.

        In training with labels, ``output.logits`` is ``None`` (as with tensor parallelism) unless
        ``gather_logits=True``: the loss is computed without logits. Under ``torch.compile``, plain expressions run
        instead, and the compiler fuses them.

        Args:
            modules: the layer classes in which to replace modules, such as ``[GPT2MLP, GPT2Attention]``. ``None`` means
                everywhere.
            backend: ``"triton"``, ``"apex"`` (NVIDIA's), ``"torch"``, or ``"auto"`` for the fastest available backend.
            measure: whether to time linear layers on a CPU. ``False`` fuses all layers that the kernel supports, even
                if they become slower.
            weights: on a CPU, ``"bfloat16"`` or ``"int8"`` (one scale per output of the full weight). Linear layers
                then compute with copies of their weights in this dtype, so that decoding reads fewer bytes. The
                parameters do not change. Such a model computes without gradients only.
            float8: ``"tensorwise"`` (one scale per tensor; output gradients in e5m2) or ``"rowwise"`` (one scale per
                row). The linear layers that tensor parallelism shards multiply in float8 in forward and backward pass,
                with single-process scales. Parameters keep their dtype. This needs an Ada or newer GPU, for rows Hopper
                or newer, or a CPU, which is slow.
            symmetric_memory: on GPUs of one host with access to each other's memory, use one torch kernel in place of
                NCCL for all-reduces of up to 128 KiB in compiled code, which includes the decoding of ``generate``. The
                kernel is used after its sums have matched NCCL's.
            check: whether to compare the first module of each replaced class with its original on a few random tokens.
                A class that differs by more than rounding stays unfused everywhere, with a warning and a note in the
                report.

        Returns:
            The model itself.

        Raises:
            ValueError: the model has no such class, or the backend, ``weights``, ``float8`` or ``symmetric_memory`` is
                not available, or the model has exact rollouts. The model is unchanged.
        """
        if self.token_division is not None:
            raise ValueError(f"fuse() does not support {self.token_division.option}: leave one of them out")
        if getattr(self, "has_exact_rollouts", False):
            raise ValueError("fuse replaces layers that use_exact_rollouts needs: fused kernels sum in other orders")
        if modules is not None and not (isinstance(modules, list) and all(isinstance(cls, type) for cls in modules)):
            raise ValueError(f"modules must be a list of classes such as [GPT2MLP], or None, got {modules!r}")
        check_not_quantized(
            dict(self.named_parameters()), "fused modules compute with plain weights only: leave fuse out"
        )
        names = None if modules is None else sorted(cls.__name__ for cls in modules)
        if self.mesh is not None:
            given = {"modules": names, "backend": backend, "measure": measure, "weights": weights}
            given |= {"float8": float8, "symmetric_memory": symmetric_memory, "check": check}
            require_equal(self.mesh.model, given, "arguments of fuse")
        chosen = choose_backend(backend, self.device)
        if weights is not None:
            check_narrow(weights, self.device, self.dtype, chosen)
        if float8 is not None:
            check_float8(float8, self.device, self.dtype, weights)
        found = list(
            self._fusion.fusion_candidates if self._fusion is not None else self._fusion_candidates(chosen, float8)
        )
        known = {cls for candidate in found for cls in candidate.classes} | set(type(self).__mro__)
        offered = self._layer_names({cls.__name__ for candidate in found for cls in candidate.classes})
        if unknown := [cls.__name__ for cls in modules or () if cls not in known and cls.__name__ not in offered]:
            raise ValueError(f"{type(self).__name__} has no {', '.join(unknown)} to fuse in; it has {sorted(offered)}")
        fusion = self._fusion or Fusion(chosen, weights, float8)
        for name, before, now in (
            ("backend", fusion.backend, chosen),
            ("weights", fusion.weights, weights),
            ("float8", fusion.float8, float8),
        ):
            if before != now:
                raise ValueError(f"the model is fused with {name}={before!r}: call unfuse() first")
        if symmetric_memory and self.mesh is not None:
            connect(self.mesh.tp, self.device)
        self._fusion = fusion
        selected = None if modules is None else self._with_own_classes(set(modules))
        if chosen == "torch" and self.device.type == "cpu":
            tp = None if self.mesh is None else self.mesh.tp
            if weights is not None:
                found = narrow(self, found, selected, tp, weights)
            use_huge_pages(self, found, selected)
            found = decide(self, found, selected, tp, measure)
            found = self._apply_fusion(fusion, found, selected, check)
            fusion.fusion_candidates = decide_blocks(self, found, selected, tp, measure)
            return self
        self._apply_fusion(fusion, found, selected, check)
        return self

    def _apply_fusion(
        self, fusion: Fusion, found: list[FusionCandidate], selected: set[type] | None, check: bool
    ) -> list[FusionCandidate]:
        """Replace the candidates' modules. Return the candidates. ``check`` drops deviating ones."""
        if check:
            return apply_checked(self, fusion, found, selected)
        fusion.apply(self, found, selected)
        return found

    def unfuse(self) -> Self:
        """Undo `fuse`: results are again bit-identical to the unfused model. Return the model itself."""
        if self._fusion is not None:
            self._fusion.undo()
            self._fusion = self._decoders = None
            if self.mesh is not None:
                disconnect(self.mesh.tp)
        return self

    def fusion_report(self) -> FusionReport:
        """Report which modules `fuse` replaced or skipped, and why, or would replace. ``print`` shows a table."""
        fusion = self._fusion
        if fusion is None:
            fusion = Fusion(choose_backend("auto", self.device))
            fusion.apply(self, self._fusion_candidates(fusion.backend), set())
        return fusion.report()

    def _fusion_candidates(self, backend: str, float8: str | None = None) -> Iterable[FusionCandidate]:
        from oslo_models.fusion import module_context, rules  # they import several transformers architectures

        found = rules.fusion_candidates(self, backend)
        if float8 is None:
            return found
        entries = entries_of_blocks(self, self.plan(self.config), self._prefix())
        return in_float8(self, found, module_context.module_contexts(self, backend), entries, float8)

    def fused_adamw(self, **options: Any) -> torch.optim.AdamW:
        """Return torch's fused ``AdamW`` for this rank's parameters. It reads them in one pass instead of a dozen.

        Args:
            **options: arguments of ``torch.optim.AdamW``.
        """
        return torch.optim.AdamW(self.parameters(), fused=True, **options)

    def use_lazy_logits(self) -> bool:
        """Tell fused LM heads whether the next forward may return lazy logits, because only its loss is needed."""
        heads = self._fusion.heads() if self._fusion is not None else ()
        lazy = torch.is_grad_enabled() if self.gather_logits is None else not self.gather_logits
        lazy = lazy and self._fusion is not None and self._fusion.weights is None  # narrow weights compute the logits
        lazy = lazy and not any(map(has_backward_hooks, heads))  # backward hooks compare shapes
        for head in heads:
            head.lazy = lazy
        return lazy and bool(heads)

    def _layer_names(self, here: set[str]) -> set[str]:
        """Return the names of all layer classes that ``fuse(modules)`` accepts, from all ranks."""
        exported = registry.names(self.config.model_type) if self.config.model_type in registry.ARCHITECTURES else []
        layers = {name for name in exported if name.endswith(("Attention", "MLP", "Block", "Layer"))}
        everywhere = [here] if self.mesh is None else gather_objects(self.mesh.model, sorted(here))
        return layers.union(*everywhere)

    def _with_own_classes(self, modules: set[type]) -> set[type]:
        """Return ``modules``, plus this model's class if they contain its transformers class."""
        return modules | {type(self)} if modules.intersection(type(self).__mro__) else modules

    # Generation -------------------------------------------------------------------------------------------------------

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start transformers' continuous batching. All of its entry points call this method.

        Raises:
            RuntimeError: the model is sharded. A thread of each rank would form different batches.
        """
        if self.mesh is not None and self.mesh.model.size > 1:
            raise RuntimeError(
                "transformers' manager of continuous batching (init_continuous_batching) does not run on a sharded "
                f"{type(self).__name__}: call generate_batch for a list of prompts, or load it with deploy=True: its "
                "calls of generate join one running batch"
            )
        return super().init_continuous_batching(*args, **kwargs)

    def fuse_ngram_blocking(self, wanted: bool | None) -> None:
        """Set whether the next ``generate`` blocks repeated n-grams with `oslo_kernels.ngrams`."""
        if wanted is None:
            wanted = getattr(self.config, "fused_no_repeat_ngram_blocking", self._fuses_ngrams_by_default)
        self._fuses_ngrams = bool(wanted)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Override transformers' method: use a static cache with compiled decoding if that is faster.

        Otherwise use a dynamic cache that grows in place.
        """
        method = f"{_GENERATION}._prepare_cache_for_generation"
        is_fused = self._fusion is not None
        if is_fused and holds(method, "generate uses the cache that transformers chooses"):
            self._prepare_faster_cache(*args, **kwargs)
        else:
            super()._prepare_cache_for_generation(*args, **kwargs)
        if self.stage is not None and self.stage.cache_layers is not None:
            model_kwargs: Mapping[str, Any] = kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[1]
            for name in NAMES:
                self.stage.cache_layers.restrict(model_kwargs.get(name))

    def _prepare_faster_cache(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
    ) -> Any:
        plain = generation_config.cache_implementation is None and model_kwargs.get(generation_name()) is None
        plain = plain and generation_config.use_cache is not False and not generation_config.disable_compile
        rows = limit = 0
        compiles = self._decodes_in_graphs and getattr(generation_mode, "value", generation_mode) in _COMPILED
        if compiles and plain and graphs_run_in_this_thread():
            rows = batch_size * (generation_config.num_return_sequences or 1)
            limit = self._cached_positions()
            length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            if rows * length <= limit:
                generation_config.cache_implementation = "static"
                self._previous_max_cache_length = -1  # else transformers lengthens the cache to the last call's length
                rounded = rounded_length(length)
                max_cache_length = rounded if rows * rounded <= limit else length
                if self._decoders is not None:
                    self._decoders.make_room(self, rows, max_cache_length, limit)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args
        )
        made = model_kwargs.get(generation_name())
        if plain and generation_config.num_beams in (None, 1):
            let_grow(made)  # beam search replaces it for each token
        if limit and generation_config.cache_implementation == "static" and type(made) is StaticCache:
            self._decoders = self._decoders or Decoders()
            model_kwargs[generation_name()] = self._decoders.cache(self, rows, max_cache_length, made, limit)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' greedy search or sampling, with captured decoding steps if there are any."""
        sample = super()._sample
        if self._decodes_in_graphs:
            sample = without_waiting(sample, self.device, kwargs.get("generation_config"), kwargs.get("streamer"))
        sample = partial(sample, *args, **kwargs)
        return sample() if self._decoders is None else self._decoders.run(sample, kwargs.get(generation_name()))

    def get_compiled_call(self, compile_config: Any) -> Any:
        """Override transformers' method: return the compiled forward, and the same one for each use of a kept cache."""
        decoder = None if self._decoders is None else self._decoders.running()
        call = super().get_compiled_call(compile_config) if decoder is None else decoder.step(self, compile_config)
        return call if self.mesh is None else watched_steps(call, self.mesh.tp, self.device)

    def _release_caches(self) -> None:
        """Release the static caches and compiled steps that `generate` keeps: their memory is needed otherwise."""
        self._decoders = None

    def train(self, mode: bool = True) -> Self:
        """Override torch's method: release kept caches when training begins."""
        if mode and not self.training:
            self._release_caches()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Override torch's method, which moves or casts parameters: caches for the former device are of no use."""
        self._release_caches()
        return super()._apply(fn, recurse)

    def _cached_positions(self) -> int:
        """Return the maximal number of positions of a static cache.

        Each step reads all positions. At this limit, this takes as long as reading the weights.
        """
        config = self.config.get_text_config(decoder=True)
        block = config.per_layer_config[0]  # blocks may have different numbers of heads
        heads = block.num_attention_heads
        width = config.hidden_size * (getattr(block, "num_key_value_heads", None) or heads) // heads
        weights = sum(param.numel() for param in self.parameters()) * (1 if self.mesh is None else self.mesh.tp.size)
        return weights // (2 * config.num_hidden_layers * width)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """Override transformers' method: the ranks agree on criteria that may differ between them."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        return criteria if self.mesh is None else agreed(criteria, self.mesh.model, self._user_errors)

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        if self._fuses_ngrams and all(holds(each, "n-grams are blocked by transformers") for each in _NGRAMS):
            in_place = not (generation_config.output_logits and generation_config.return_dict_in_generate)
            encoder_ids = kwargs.get("encoder_input_ids", args[1] if len(args) > 1 else None)
            processors = fuse_processors(processors, encoder_ids, in_place)
        return processors if self._user_errors is None else self._user_errors.processors(processors)
