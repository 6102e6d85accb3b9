"""Rules of fused scaled dot product attention, and of torch.nn's fused encoder.

Batch and heads are free, and so are the queries unless the mask is causal; keys must be whole. Where there are fewer
key heads than query heads (grouped queries), heads are cut in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .infer import Outputs, by_meta, closed_form
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


@rule("_scaled_dot_product_flash_attention_for_cpu", free=("scale",))
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


@rule("_scaled_dot_product_flash_attention_for_cpu_backward", free=("scale",))
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


def _rows_of_mask(call: Call) -> Dims | None:
    """A padding mask [b, t] (type 1) is cut with the batch; any other is whole."""
    mask = call.arg("mask")
    if mask is None:
        return None
    return ("b", "") if call.arg("mask_type") == 1 and mask.ndim == 2 else ("",) * mask.ndim


@rule("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
def encoder(call: Call) -> Rule:
    """The fused encoder layer and attention of torch.nn in inference: batches are free."""
    rows = ("b", "", "")
    inputs = 1 if call.stem == "_transformer_encoder_layer_fwd" else 3
    mask = _rows_of_mask(call)
    weights = [("",) * spec.ndim for spec in call.specs[inputs : len(call.specs) - (mask is not None)]]
    outs = (
        [rows]
        if inputs == 1
        else [rows, None if call.outs[1] is None else ("b", *("",) * (len(call.outs[1].shape) - 1))]
    )
    return Rule(
        ((rows,) * inputs + tuple(weights) + (() if mask is None else (mask,))),
        tuple(outs),
        why="The fused layer wants whole sequences and whole weights on every rank.",
    )


@closed_form("_native_multi_head_attention")
def unwanted_weights(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """Weights that are not asked for are undefined; the meta kernel makes an empty tensor of them."""
    wanted = args[10] if len(args) > 10 else kwargs.get("need_weights", True)
    return None if wanted else (by_meta(func, args, kwargs)[0], None)
