"""`AdaptableModel`: hooks into ``peft`` when it adds adapters to a model. Does not import ``peft``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oslo_models.contracts import require
from oslo_models.distributed.callers import peft_call
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.rng import default_generator
from oslo_models.installed import require_first_version


class AdaptableModel(PreTrainedModel):
    """Makes the adapters of a parallel model parallel too.

    ``peft`` wraps layers without knowing that they are sharded, and then sets ``peft_config`` on the model. The setter
    then *adopts* the new adapters (`adoption.adopt`).
    """

    mesh: ParallelMesh | None = None
    _peft_config: dict[str, Any] | None = None
    _adopted: dict[str, Any] = {}
    _rng_before_adapters: Tensor | None = None

    @property
    def peft_config(self) -> dict[str, Any]:
        """The adapter configurations by adapter name. ``peft`` sets and reads them."""
        if self._peft_config is None:
            raise AttributeError(f"{type(self).__name__} has no adapters")
        return self._peft_config

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        self._peft_config = configs
        self.adopt_adapters(are_new=True)

    @peft_config.deleter
    def peft_config(self) -> None:
        self._peft_config, self._adopted = None, {}

    def adopt_adapters(self, are_new: bool = False) -> None:
        """Adopt adapters that were added since the last call. This is a collective of all ranks if there are any.

        Args:
            are_new: whether ``peft`` has just added them with random values. Otherwise their values are kept.

        Raises:
            ImportError: ``peft`` is too old for sharded models.
        """
        configs = self._peft_config
        if configs is None or self.mesh is None or self.mesh.world.size == 1:
            return
        if len(configs) == len(self._adopted) and all(self._adopted.get(name) is configs[name] for name in configs):
            return
        require_first_version("peft")
        from oslo_models.modeling.adapters.adoption import adopt

        require("modeling.adapters")

        new = [name for name in configs if self._adopted.get(name) is not configs[name]]
        adopt(self, new, self._rng_before_adapters if are_new else None)
        self._adopted = dict(configs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Like ``nn.Module.named_modules``.

        ``peft`` lists the modules right before it wraps layers. This method then records the random state and checks
        the new adapter.

        Raises:
            ValueError: a pipeline stage has no layer of the new adapter, the adapter combines others in a way that
                needs full adapters, or DoRA targets a layer that takes full tensors. Raised on every rank.
        """
        if (call := peft_call()) is not None and call.function == "inject_adapter":
            self._rng_before_adapters = default_generator(torch.get_default_device()).get_state()
            if self.mesh is not None and self.mesh.is_sharded:
                from oslo_models.modeling.adapters.support import check_combination, check_magnitudes

                check_combination(call)
                check_magnitudes(self, call.arguments["self"], call.arguments["peft_config"])
            if self.mesh is not None and self.mesh.pp.size > 1 and "key_list" not in call.arguments:
                from oslo_models.modeling.adapters.support import check_stages

                check_stages(self, call.arguments["self"], call.arguments["peft_config"])
        return super().named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Like ``nn.Module.get_submodule``. ``peft`` requests BERT's embeddings to build a prompt encoder."""
        call = peft_call() if target == "embeddings.word_embeddings" else None
        if call is not None and call.function == "_setup_prompt_encoder" and self.mesh and self.mesh.is_sharded:
            from oslo_models.modeling.adapters.peft_model import become_sharded
            from oslo_models.modeling.adapters.prompts import vocabulary_for_prompts

            peft_model = call.arguments["self"]
            vocabulary = vocabulary_for_prompts(self, peft_model, call.arguments["adapter_name"])
            become_sharded(peft_model)
            return vocabulary
        return super().get_submodule(target)

    def load_adapter(self, peft_model_id: str | Path | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter like transformers. On a sharded model, this is a collective of all ranks.

        Raises:
            ValueError: the model is sharded, and an argument is none of ``peft_model_id``, ``adapter_name``,
                ``peft_config``, ``adapter_state_dict`` and ``is_trainable``.
        """
        if self.mesh is None:
            return super().load_adapter(peft_model_id, *args, **kwargs)
        from oslo_models.modeling.adapters.loading import load_adapter

        return load_adapter(self, peft_model_id, *args, **kwargs)

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        if self.mesh is None:
            return super().add_adapter(adapter_config, adapter_name)
        return self._switching().add(self, adapter_config, adapter_name)

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        if self.mesh is None:
            return super().set_adapter(adapter_name)
        return self._switching().select(self, adapter_name)

    def enable_adapters(self) -> None:
        if self.mesh is None:
            return super().enable_adapters()
        return self._switching().enable(self, True)

    def disable_adapters(self) -> None:
        if self.mesh is None:
            return super().disable_adapters()
        return self._switching().enable(self, False)

    def active_adapters(self) -> list[str]:
        if self.mesh is None:
            return super().active_adapters()
        return self._switching().active(self)

    def delete_adapter(self, adapter_names: str | list[str]) -> None:
        if self.mesh is None:
            return super().delete_adapter(adapter_names)
        return self._switching().delete(self, adapter_names)

    def row_adapters(self) -> Any:
        """Return the `RowAdapters` of the present adapters."""
        from oslo_models.modeling.adapters.rows import RowAdapters

        return RowAdapters(self)

    @staticmethod
    def _switching() -> Any:
        from oslo_models.modeling.adapters import switching

        return switching
