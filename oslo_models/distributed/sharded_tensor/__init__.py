"""Parameters that know their sharding, so that external tools give correct results or raise an error.

Optimizers, checkpoint libraries and gradient clipping see a local shard as an ordinary parameter. Elementwise tools are
correct anyway. For all others, `ShardedParameter` and the tensors derived from it (gradients, optimizer states, values
of ``state_dict()``) implement torch's protocols:

* gradient norms are norms of the full model (``torch.nn.utils.clip_grad_norm_`` and all its callers);
* ``torch.distributed.checkpoint`` saves and loads shards as chunks of full tensors, at any parallel sizes;
* elementwise functions run on the local tensor and return a shard (`shard_functions`);
* norms, sums, means and a few other reductions cover the full tensor, with gradients of every order;
* random numbers are drawn for the full tensor, and each rank keeps its shard.

Every other function raises outside of the layer, since it would treat the local shard as the full tensor.
"""

from oslo_models.distributed.sharded_tensor import block_states as block_states  # registers its hook
from oslo_models.distributed.sharded_tensor import handlers as handlers  # fills the tables
from oslo_models.distributed.sharded_tensor.autograd import without_override
from oslo_models.distributed.sharded_tensor.sharding import Sharding
from oslo_models.distributed.sharded_tensor.tensors import (
    Shard,
    ShardedParameter,
    WeightView,
    gather_shards,
    layer_context,
    local_tensor,
    mark,
    mark_buffer,
    mark_parameter,
    replace_parameter,
    unmark_parameter,
)

__all__ = [
    "Shard",
    "ShardedParameter",
    "Sharding",
    "WeightView",
    "gather_shards",
    "layer_context",
    "local_tensor",
    "mark",
    "mark_buffer",
    "mark_parameter",
    "replace_parameter",
    "unmark_parameter",
    "without_override",
]
