"""Table Transformer: DETR with norms before the layers. Its backbone is replicated. Its loss needs scipy."""

from typing import Any

from transformers import TableTransformerConfig
from transformers.models.table_transformer import modeling_table_transformer as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, RowParallel
from oslo_models.modeling.blocks import qkv
from oslo_models.models.detr import CLASSES_AND_BOXES, DetrParallel


class TableTransformerParallel(DetrParallel):
    """Sharding plan of the Table Transformer family."""

    images = ("backbone", "input_projection", "query_position_embeddings")
    after = {"encoder.layernorm": Norm(), "decoder.layernorm": Norm()}

    @classmethod
    def attention(cls, config: Any, stack: str, name: str) -> Entries:
        heads = cls.heads(config, stack)
        local = LocalAttributes({"num_heads": heads.local_count}, width=heads)
        return {name: local, **qkv(name, heads), f"{name}.out_proj": RowParallel(heads)}

    @classmethod
    def mlp(cls) -> Entries:
        return {"fc1": ColumnParallel(), "fc2": RowParallel()}


class TableTransformerModel(TableTransformerParallel, hf.TableTransformerModel):
    pass


class TableTransformerForObjectDetection(TableTransformerParallel, hf.TableTransformerForObjectDetection):
    head_plan = CLASSES_AND_BOXES
