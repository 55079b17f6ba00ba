"""The ``PeftModel`` of a sharded model: a subclass of the class that ``peft`` constructs."""

from __future__ import annotations

from functools import cache
from typing import Any

from peft import PeftModel, PeftType
from peft.utils.other import AuxiliaryTrainingWrapper

from oslo_models.distributed.object_exchange import agree
from oslo_models.installed import require_first_version
from oslo_models.modeling.adapters.layouts import adapter_layouts
from oslo_models.modeling.adapters.prompts import local_heads
from oslo_models.modeling.adapters.saving import save_peft_model
from oslo_models.modeling.original_class import original_class


class ShardedPeftModel(PeftModel):
    """Mixin for the ``PeftModel`` of a sharded model. It precedes ``peft``'s class.

    Attributes:
        plain_class: the class that ``peft`` chose.
    """

    plain_class: type

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The model's ignored parameters for ``DistributedDataParallel``, by their names in the ``PeftModel``."""
        model: Any = self.get_base_model()
        experts = set(model.expert_parameters())
        return [name for name, param in self.named_parameters() if param in experts]

    def save_pretrained(
        self,
        save_directory: str,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        path_initial_model_for_weight_conversion: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save adapters like ``PeftModel.save_pretrained``. This is a collective of all ranks.

        World rank 0 writes the files. ``is_main_process`` has no effect.

        Raises:
            ValueError: ``path_initial_model_for_weight_conversion`` or ``state_dict`` is passed. This method gathers
                the shards itself.
            OSError: the directory cannot be written. Raised on every rank.
        """
        if path_initial_model_for_weight_conversion is not None or kwargs.pop("state_dict", None) is not None:
            raise ValueError(
                "a sharded model saves its own adapters: leave out state_dict and "
                "path_initial_model_for_weight_conversion"
            )
        options = {"safe_serialization": safe_serialization, **kwargs}
        if self._is_prompt_learning:
            self._save_prompts(save_directory, selected_adapters, save_embedding_layers, options)
            return
        save_peft_model(self, save_directory, selected_adapters, save_embedding_layers, **options)

    def _save_prompts(self, save_directory: str, selected: Any, save_embedding_layers: Any, options: Any) -> None:
        """Save prompt encoders. Every rank holds a full copy."""
        model: Any = self.get_base_model()
        world = model.mesh.world
        with agree(world, f"saving adapters to {save_directory}"):
            wrappers = (module for module in self.modules() if isinstance(module, AuxiliaryTrainingWrapper))
            if save_embedding_layers is True or any(map(adapter_layouts, wrappers)):
                raise ValueError(
                    "prompts of a sharded model are saved without embeddings or other sharded modules: leave out "
                    "save_embedding_layers=True and modules_to_save that are sharded"
                )
            if world.rank == 0:
                super().save_pretrained(
                    save_directory, selected_adapters=selected, save_embedding_layers=False, **options
                )

    def _get_base_model_class(self, *args: Any, **kwargs: Any) -> type:
        """Return the transformers class, so that the saved adapter loads without this library."""
        cls: type = super()._get_base_model_class(*args, **kwargs)
        original: type = original_class(cls)
        return original

    def get_prompt(self, *args: Any, **kwargs: Any) -> Any:
        prompt = super().get_prompt(*args, **kwargs)
        if self.active_peft_config.peft_type != PeftType.PREFIX_TUNING:
            return prompt
        model: Any = self.get_base_model()
        return local_heads(model, prompt)

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().add_adapter(*args, **kwargs)
        model: Any = self.get_base_model()
        model.adopt_adapters(are_new=True)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_adapter(*args, **kwargs)
        model: Any = self.get_base_model()
        model._mark_parameters()  # with low_cpu_mem_usage, they are new objects
        return result


def become_sharded(peft_model: Any) -> None:
    """Change the class of a ``PeftModel`` to the sharded one, in place.

    Raises:
        ImportError: ``peft`` is too old for sharded models.
    """
    require_first_version("peft")
    if not isinstance(peft_model, ShardedPeftModel):
        peft_model.__class__ = _sharded_class(type(peft_model))  # type: ignore[arg-type]


@cache
def _sharded_class(cls: Any) -> type:
    return type(cls.__name__, (ShardedPeftModel, cls), {"__module__": cls.__module__, "plain_class": cls})
