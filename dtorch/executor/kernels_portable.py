"""Operators that torch's composites choose on a CPU and that no other device has, by means every device has.

The client's proxies are CPU tensors to torch, so a composite such as ``scaled_dot_product_attention`` picks the CPU's
operator whatever the mesh (the table is in ``device.py``). Forwards go to the public function, which picks the
device's own best kernel. Backwards run that forward again under autograd: what the CPU's forward saves for its backward
means nothing here. Results have the shapes and dtypes of the CPU's operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["portable_attention", "portable_attention_backward", "portable_rnn_layer", "portable_rnn_layer_backward"]

_LSTM = 2  # at::native's number of the only layer that torch hands to mkldnn


def _gradients(forward: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of `inputs`, given those of what ``forward(*inputs)`` returns."""
    with torch.inference_mode(False), torch.enable_grad():
        # Clones: an executor's values are inference tensors, which autograd does not take.
        leaves = [t.clone().requires_grad_() for t in inputs]
        made = forward(*leaves)
        outs = made if isinstance(made, tuple) else (made,)
        pairs = [(out, grad.clone()) for out, grad in zip(outs, grads, strict=True) if grad is not None]
        found: Any = torch.autograd.grad(
            [out for out, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True
        )
        return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def portable_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``_scaled_dot_product_flash_attention_for_cpu``; the second result is there for its shape alone."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, length = query.shape[:3]
    # The CPU's lies transposed.
    return out, query.new_empty((batch, length, heads), dtype=kind).transpose(1, 2)


def portable_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_scaled_dot_product_flash_attention_for_cpu_backward``."""
    mask = None if attn_mask is None else _normal(attn_mask)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale)

    grads = _gradients(forward, (query, key, value), (grad_out,))
    return grads[0], grads[1], grads[2]


def _normal(t: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return t.clone()


def _lstm(
    input: Tensor, weights: Sequence[Tensor], hx: Tensor, cx: Tensor, reverse: bool, mode: int, bias: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction over `input` (time first): output, last hidden state, last cell state.

    `train` where a backward follows, which cuDNN refuses otherwise; it changes no value.
    """
    if mode != _LSTM:
        raise NotImplementedError(f"mkldnn_rnn_layer of mode {mode}: torch uses it for LSTM (mode {_LSTM}) alone")
    if input.numel() == 0:
        # Nothing of the batch lies here; the kernels want something.
        return input @ weights[0].t()[:, : hx.shape[-1]], hx * 1, cx * 1
    steps = input.flip(0) if reverse else input
    # Shapes (batch, hidden) and (1, batch, hidden) both occur.
    states = [t.reshape(1, *t.shape[-2:]) for t in (hx, cx)]
    out, hy, cy = torch.lstm(steps, states, list(weights if bias else weights[:2]), bias, 1, 0.0, train, False, False)
    return (out.flip(0) if reverse else out), hy.reshape(hx.shape), cy.reshape(cx.shape)


def portable_rnn_layer(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx_: Tensor,
    cx_: Tensor,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mkldnn_rnn_layer``; the last result, its workspace, is empty."""
    weights = (weight0, weight1, weight2, weight3)
    out, hy, cy = _lstm(input, weights, hx_, cx_, reverse, mode, has_biases, False)
    return out, hy, cy, input.new_empty(0, dtype=torch.uint8)


def portable_rnn_layer_backward(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    weight4: Tensor,
    hx_: Tensor,
    cx_tmp: Tensor,
    output: Tensor,
    hy_: Tensor,
    cy_: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: Tensor,
) -> tuple[Tensor, ...]:
    """``mkldnn_rnn_layer_backward``: gradients of input, the four weights, and both states."""

    def forward(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, h: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return _lstm(x, (a, b, c, d), h, s, reverse, mode, has_biases, True)

    inputs = (input, weight1, weight2, weight3, weight4, hx_, cx_tmp)
    found = _gradients(forward, inputs, (grad_output, grad_hy, grad_cy))
    if not has_biases:
        # Matrices stand in for biases there; the operator's gradients of them are vectors of zeros.
        found[3:5] = [t.new_zeros(t.shape[0]) for t in (weight3, weight4)]
    return tuple(found)
