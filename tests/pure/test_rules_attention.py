"""Rules of fused attention."""

from __future__ import annotations

import pytest
import torch

from dtorch.errors import PlacementError

from .harness import P, R, S, Sample, check, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def sdpa(b: int, h: int, hk: int, lq: int, lk: int, d: int, causal: bool, mask: torch.Tensor | None) -> list[Sample]:
    q, k, v = rn(b, h, lq, d), rn(b, hk, lk, d), rn(b, hk, lk, d)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    kw = {} if mask is None else {"attn_mask": mask}
    out, lse = forward(q, k, v, 0.0, causal, **kw)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return [
        Sample(forward, (q, k, v, 0.0, causal), kw),
        Sample(backward, (rn(b, h, lq, d), q, k, v, out, lse, 0.0, causal), kw),
    ]


SAMPLES = [
    *sdpa(3, 5, 5, 4, 6, 8, False, None),
    *sdpa(2, 3, 3, 5, 5, 4, True, None),
    *sdpa(2, 4, 2, 5, 5, 4, True, None),
    *sdpa(2, 6, 3, 3, 4, 4, False, None),
    *sdpa(2, 3, 3, 4, 5, 4, False, rn(4, 5)),
    *sdpa(2, 3, 3, 4, 5, 4, False, rn(2, 1, 4, 5)),
    *sdpa(1, 2, 2, 3, 3, 4, True, None),
]


def encoder(padding: torch.Tensor | None) -> list[Sample]:
    x, width = rn(3, 4, 6), 6
    weights = (rn(18, 6), rn(18), rn(6, 6), rn(6))
    norms = (True, False, 1e-5, rn(6), rn(6), rn(6), rn(6))
    forward = aten._transformer_encoder_layer_fwd.default
    mask = () if padding is None else (padding, 1)
    masked = () if padding is None else (padding, False, True, 1)
    return [
        Sample(forward, (x, width, 2, *weights, *norms, rn(8, 6), rn(8), rn(6, 8), rn(6), *mask), {}),
        Sample(aten._native_multi_head_attention.default, (x, x, x, width, 2, *weights, *masked), {}),
    ]


def test_fused_encoders() -> None:
    padding = torch.tensor([[False] * 4, [False, False, False, True], [False, False, True, True]])
    report = sweep([*encoder(None), *encoder(padding)], cap=6)
    assert not report.wrong, str(report)
    assert len(report.checked) == 2 and sum(report.checked.values()) > 10, str(report)


def test_meshes() -> None:
    report = sweep(SAMPLES, cap=6)
    assert not report.wrong, str(report)
    assert len(report.checked) == 2 and sum(report.checked.values()) > 200, str(report)


def test_sharded_keys_are_refused_forward() -> None:
    with pytest.raises(PlacementError, match="Keys, values and the head size must be whole"):
        check(SAMPLES[0], (2,), [(R,), (S(2),), (S(2),)])


def test_sharded_queries_under_a_causal_mask_are_refused() -> None:
    check(SAMPLES[0], (2,), [(S(2),), (R,), (R,)])
    with pytest.raises(PlacementError):
        check(SAMPLES[2], (2,), [(S(2),), (R,), (R,)])


def test_grouped_query_heads_are_cut_in_proportion() -> None:
    check(SAMPLES[4], (2,), [(S(1),), (S(1),), (S(1),)])
    # Four query heads over three ranks are 2, 2 and 0; two key heads are 1, 1 and 0.
    check(SAMPLES[4], (3,), [(S(1),), (S(1),), (S(1),)])
    with pytest.raises(PlacementError):
        check(SAMPLES[4], (4,), [(S(1),), (S(1),), (S(1),)])


def test_empty_heads_never_reach_the_kernel() -> None:
    # The kernel divides by the number of heads: with none the process would die.
    plan = check(SAMPLES[-2], (4,), [(S(1),), (S(1),), (S(1),)])
    assert [plan.calls[w].empty for w in plan.which] == [False, False, True, True]  # type: ignore[union-attr]


def test_backward_of_sharded_queries_leaves_key_gradients_partial() -> None:
    plan = check(SAMPLES[1], (2,), [(S(2),), (S(2),), (R,), (R,), (S(2),), (S(2),)])
    assert [s.placements for s in plan.outs] == [(S(2),), (P(),), (P(),)]  # type: ignore[union-attr]
