"""The ops that are ours: `OPS` maps each op's name to its one declaration (see opdef.py)."""

from trtforge.plugins.kv_cache_update import KV_CACHE_UPDATE
from trtforge.plugins.opdef import DOMAIN, DOMAIN_VERSION, OPSET, OpDef
from trtforge.plugins.paged_attention import PAGED_ATTENTION
from trtforge.plugins.quant_embedding import QUANT_EMBEDDING
from trtforge.plugins.quant_linear import QUANT_LINEAR

__all__ = ["DOMAIN", "DOMAIN_VERSION", "OPS", "OPSET", "OpDef"]

OPS: dict[str, OpDef] = {
    op.name: op for op in (KV_CACHE_UPDATE, PAGED_ATTENTION, QUANT_EMBEDDING, QUANT_LINEAR)
}
