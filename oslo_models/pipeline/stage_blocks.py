"""`StageBlocks`: the blocks of one pipeline stage, indexed like the blocks of the full model."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn


class StageBlocks(nn.ModuleList):
    """List of the local blocks of a stage. Indexes and slices count the blocks of the full model.

    So ``layers[:2]`` selects the same blocks at every number of stages, and is empty on a stage without them. Iteration
    and ``len`` cover the local blocks.

    Attributes:
        full_count: number of blocks of the full model.
    """

    full_count: int

    @staticmethod
    def mark(blocks: nn.ModuleList, full_count: int) -> None:
        """Make a list with the remaining blocks of a stage an instance in place."""
        marked: Any = blocks
        marked.__class__, marked.full_count = StageBlocks, full_count

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            chosen = (str(i) for i in range(self.full_count)[index])
            return nn.ModuleList(self._modules[name] for name in chosen if name in self._modules)
        return self._modules[self._name_of(index)]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        setattr(self, self._name_of(index), module)

    def _name_of(self, index: int) -> str:
        position = range(self.full_count)[index]  # raises IndexError like a list
        if str(position) not in self._modules:
            raise IndexError(
                f"block {position} is on another pipeline stage; this stage has {', '.join(self._modules) or 'none'}. "
                "Iterate over the list, or select by a slice, which is empty where the blocks are on other stages"
            )
        return str(position)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "the number of blocks cannot change on a pipeline stage, since the other stages would not know of it: "
            "change the number in the configuration before the model is created, or use pipeline_parallel_size=1"
        )

    append = insert = extend = pop = __delitem__ = __iadd__ = _refuse
