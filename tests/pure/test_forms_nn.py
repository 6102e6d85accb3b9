"""Closed forms of losses, norms and operators on lists give what torch's kernels give."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtorch import Replicate
from dtorch.sharding import infer as inference
from dtorch.sharding.infer import infer
from dtorch.spec import TensorSpec
from dtorch.testing.plans import abstract, flat_outputs, mesh_of

from .harness import Sample, meta_of

aten: Any = torch.ops.aten
X, Y = torch.rand(4, 6, 3, 2) * 0.8 + 0.1, torch.rand(4, 6, 3, 2)
LAST = X.to(memory_format=torch.channels_last)
SWAPPED = X.transpose(0, 1)
LOSSES = [aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
          aten.binary_cross_entropy_with_logits, aten.soft_margin_loss]  # fmt: skip


def inferred(sample: Sample) -> list[Any]:
    mesh = mesh_of((1,))
    specs = [TensorSpec.of(tuple(t.shape), tuple(t.stride()), t.dtype, mesh, (Replicate(),)) for t in sample.tensors()]
    args, kwargs = abstract(sample.func, sample.args, sample.kwargs, specs)

    def plain(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(plain(v) for v in x)
        return getattr(x, "value", x)

    return list(infer(sample.func, plain(args), {k: plain(v) for k, v in kwargs.items()}))


def agree(sample: Sample) -> None:
    want = [meta_of(t) for t in flat_outputs(sample.func(*sample.args, **sample.kwargs))]
    got = inferred(sample)
    assert len(got) == len(want), sample
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            same = [s == t for n, s, t in zip(a.shape, a.stride, b.stride, strict=True) if n > 1]
            assert (a.shape, a.dtype) == (b.shape, b.dtype), sample
            assert all(same) or not torch.Size(a.shape).numel(), (sample, a, b)


@pytest.mark.parametrize("op", LOSSES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses(op: Any, dtype: torch.dtype) -> None:
    for (x, y), reduction in itertools.product(
        [(X, Y), (LAST, LAST), (SWAPPED, SWAPPED), (LAST, Y), (X[:0], Y[:0])], range(3)
    ):
        x, y = x.to(dtype), y.to(dtype)
        extra = [None] if op is aten.binary_cross_entropy else [None, None] if "logits" in str(op) else []
        agree(Sample(op.default, (x, y, *extra, reduction)))
        if extra:
            agree(Sample(op.default, (x, y, torch.rand_like(x), *extra[1:], reduction)))
    with pytest.raises(RuntimeError):
        inferred(Sample(op.default, (X, Y[:3], *([None] if op is aten.binary_cross_entropy else []))))


def test_backward_of_losses() -> None:
    for (x, y), reduction in itertools.product([(X, Y), (LAST, LAST), (SWAPPED, SWAPPED)], range(3)):
        g = torch.ones_like(x) if reduction == 0 else torch.tensor(1.0)
        agree(Sample(aten.mse_loss_backward.default, (g, x, y, reduction)))
        agree(Sample(aten.smooth_l1_loss_backward.default, (g, x, y, reduction, 1.0)))
        agree(Sample(aten.huber_loss_backward.default, (g, x, y, reduction, 1.0)))
        agree(Sample(aten.binary_cross_entropy_backward.default, (g, x, y, None, reduction)))
        agree(Sample(aten.soft_margin_loss_backward.default, (g, x, y, reduction)))


@pytest.mark.parametrize(
    "x", [X, LAST, SWAPPED, X[:, :, :1, :1], X.double(), X.bfloat16(), X[:0]], ids=lambda x: str(x.stride())
)
def test_norms(x: torch.Tensor) -> None:
    c = x.shape[1]
    rows = [torch.rand(c, dtype=x.dtype) for _ in range(4)]
    wide = [r.float() for r in rows]
    for a in (rows, wide, [None] * 4) if x.dtype == torch.bfloat16 else (rows, [None] * 4):
        if x.is_contiguous() and x.numel():
            n, pixels = x.shape[0], x[0, 0].numel()
            agree(Sample(aten.native_group_norm.default, (x, *a[:2], n, c, pixels, 2, 1e-5)))
        if x.numel() == 0:
            continue
        for training in (True, False):
            if training or a[2] is not None:
                agree(Sample(aten.native_batch_norm.default, (x, *a, training, 0.1, 1e-5)))
        if a[2] is not None:
            agree(Sample(aten._native_batch_norm_legit_no_training.default, (x, *a, 0.1, 1e-5)))
        agree(Sample(aten._native_batch_norm_legit.no_stats, (x, *a[:2], True, 0.1, 1e-5)))


CONVOLUTIONS = [
    ((2, 4, 7, 6), (6, 4, 3, 2), [1, 1], [0, 0], [1, 1], 1),
    ((2, 4, 7, 6), (6, 2, 3, 2), [2, 1], [1, 0], [1, 2], 2),
    ((2, 4, 7, 6), (4, 1, 3, 3), [1, 1], [1, 1], [1, 1], 4),
    ((2, 4, 1, 1), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    ((2, 1, 7, 6), (6, 1, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    ((2, 4, 9), (6, 4, 3), [2], [1], [1], 1),
    ((2, 4, 5, 6, 4), (6, 4, 3, 3, 1), [1, 1, 1], [1, 0, 0], [1, 1, 1], 1),
    ((2, 3, 32, 32), (64, 3, 3, 3), [1, 1], [1, 1], [1, 1], 1),
]


@pytest.mark.parametrize(("x", "w", "stride", "pad", "dilation", "groups"), CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_convolutions(
    x: Any, w: Any, stride: Any, pad: Any, dilation: Any, groups: int, last: bool, dtype: Any
) -> None:
    a, b, bias = torch.rand(x, dtype=dtype), torch.rand(w, dtype=dtype), torch.rand(w[0], dtype=dtype)
    if last and a.ndim == 4 and x[1] > 1:
        a = a.to(memory_format=torch.channels_last)
    rest = (stride, pad, dilation, False, [0] * len(stride), groups)
    agree(Sample(aten.convolution.default, (a, b, None, *rest)))
    agree(Sample(aten.convolution.default, (a, b, bias, *rest)))
    if last:
        return
    grad = torch.ones_like(aten.convolution.default(a, b, bias, *rest))
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        agree(Sample(aten.convolution_backward.default, (grad, a, b, [w[0]], *rest, mask)))


def test_lists() -> None:
    a = [X, LAST, torch.arange(4), SWAPPED.double()]
    b = [Y, Y, torch.arange(4), SWAPPED.double()]
    for func, args, kwargs in [
        (aten._foreach_add.List, (a, b), {"alpha": 2}),
        (aten._foreach_add.Scalar, (a, 1.5), {}),
        (aten._foreach_mul.ScalarList, (a, [1.5, 2, True, 0.5]), {}),
        (aten._foreach_div.Tensor, (a, torch.tensor(2.0)), {}),
        (aten._foreach_maximum.Scalar, (a, 1.0), {}),
        (aten._foreach_addcmul.Scalar, (a, b, b), {"value": 2}),
        (aten._foreach_addcdiv.ScalarList, (a[:2], b[:2], b[:2], [1.0, 2.0]), {}),
        (aten._foreach_lerp.Scalar, ([X, LAST], [Y, Y], 0.1), {}),
        (aten._foreach_sqrt.default, (a,), {}),
        (aten._foreach_pow.ScalarAndTensor, (2.0, [X, Y]), {}),
    ]:
        agree(Sample(func, args, kwargs))
    assert inferred(Sample(aten._foreach_add_.Scalar, ([X.clone()], 1))) == [None]
    with pytest.raises(RuntimeError, match="size"):
        inferred(Sample(aten._foreach_add.List, ([X], [torch.ones(5)])))
    with pytest.raises(RuntimeError):
        inferred(Sample(aten._foreach_add.List, ([X], [X, X])))


def test_what_is_common_needs_no_meta_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def meta(func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} went through its meta kernel")

    monkeypatch.setattr(inference, "by_meta", meta)
    rows = [torch.rand(6) for _ in range(4)]
    for sample in (
        Sample(aten.mse_loss.default, (X, Y)),
        Sample(aten.binary_cross_entropy_with_logits.default, (X, Y)),
        Sample(aten.native_group_norm.default, (X, *rows[:2], 4, 6, 6, 2, 1e-5)),
        Sample(aten.native_batch_norm.default, (X, *rows, True, 0.1, 1e-5)),
        Sample(aten._foreach_add.List, ([X], [Y])),
    ):
        inferred(sample)
