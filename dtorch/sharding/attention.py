"""Rules of fused scaled dot product attention.

Batch and heads are free, and so are the queries unless the mask is causal; keys must be whole. Where there are fewer
key heads than query heads (grouped queries), heads are cut in proportion.
"""

from __future__ import annotations

from .rule import Call, Dims, Flow, Rule, linear, rule

__all__: list[str] = []

_WHY = "Keys, values and the head size must be whole on every rank (and queries too, under a causal mask)."


def _mask(call: Call) -> Dims | None:
    mask = call.arg("attn_mask")
    if mask is None:
        return None
    return tuple("" if s == 1 else f for s, f in zip(mask.shape, "bhqk"[-mask.ndim :], strict=True))


def _causal(call: Call) -> bool:
    return bool(call.arg("is_causal", False))


@rule("_scaled_dot_product_flash_attention_for_cpu")
def attention(call: Call) -> Rule | None:
    """Query [b, h, q, d], key and value [b, h, k, d] to [b, h, q, d] and the log of the softmax's sum [b, h, q]."""
    if call.arg("dropout_p", 0.0):
        return None
    mask = _mask(call)
    query, key = tuple("bhqd"), tuple("bhkd")
    return Rule(
        (query, key, key, *([] if mask is None else [mask])),
        (query, tuple("bhq")),
        whole=frozenset("dkq") if _causal(call) else frozenset("dk"),
        # Linear in the values.
        flows=tuple(Flow(kind, frozenset({2}), (kind, "same")) for kind in ("sum", "avg")),
        why=_WHY,
    )


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(call: Call) -> Rule | None:
    """Sharded queries make the gradients of keys and values Partial, sharded keys that of queries."""
    if call.arg("dropout_p", 0.0):
        return None
    mask = _mask(call)
    query, key, rows = tuple("bhqd"), tuple("bhkd"), tuple("bhq")
    causal = _causal(call)
    return Rule(
        (query, query, key, key, query, rows, *([] if mask is None else [mask])),
        (query, key, key),
        whole=frozenset("dkq") if causal else frozenset("d"),
        reduce={} if causal else {"q": (None, "sum", "sum"), "k": ("sum", None, None)},
        flows=linear((0,)),
        why=_WHY,
    )
