"""Rules of convolution, pooling and resampling."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dtorch.errors import PlacementError

from .harness import P, R, S, Sample, SimTensor, check, mesh_of, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def conv(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, groups: int = 1, transposed: bool = False
) -> list[Sample]:
    n = x.ndim - 2
    args = ([1] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
    y = aten.convolution.default(x, w, b, *args)
    sizes = None if b is None else list(b.shape)
    mask = [True, True, b is not None]
    return [
        Sample(aten.convolution.default, (x, w, b, *args)),
        Sample(aten.convolution_backward.default, (rn(*y.shape), x, w, sizes, *args, mask)),
    ]


CONVS = [
    *conv(rn(5, 3, 4, 4), rn(4, 3, 3, 3), rn(4)),
    *conv(rn(5, 3, 6), rn(4, 3, 3), None),
    *conv(rn(3, 4, 5), rn(8, 1, 3), rn(8), groups=4),
    *conv(rn(2, 4, 5), rn(6, 2, 3), rn(6), groups=2),
    *conv(rn(3, 4, 5), rn(4, 3, 3), rn(3), transposed=True),
    *conv(rn(3, 4, 5), rn(4, 2, 3), rn(8), groups=4, transposed=True),
]

x, y = rn(3, 4, 6, 6), rn(3, 4, 3, 3)
_, where = aten.max_pool2d_with_indices.default(x, [2, 2])
WINDOWS = [
    Sample(aten.avg_pool2d.default, (x, [2, 2])),
    Sample(aten.avg_pool2d_backward.default, (y, x, [2, 2], [], [0, 0], False, True, None)),
    Sample(aten.max_pool2d_with_indices.default, (x, [2, 2])),
    Sample(aten.max_pool2d_with_indices_backward.default, (y, x, [2, 2], [], [0, 0], [1, 1], False, where)),
    Sample(aten._adaptive_avg_pool2d.default, (x, [3, 3])),
    Sample(aten._adaptive_avg_pool2d_backward.default, (y, x)),
    Sample(aten.upsample_nearest2d.default, (y, [6, 6])),
    Sample(aten.upsample_nearest2d_backward.default, (x, [6, 6], [3, 4, 3, 3])),
    Sample(aten.upsample_bilinear2d.default, (y, [6, 6], False)),
    Sample(aten.upsample_bilinear2d_backward.default, (x, [6, 6], [3, 4, 3, 3], False)),
    Sample(aten.im2col.default, (x, [2, 2], [1, 1], [0, 0], [2, 2])),
]


def test_meshes() -> None:
    report = sweep(CONVS + WINDOWS, cap=5, variants=2)
    assert not report.wrong, str(report)
    assert len(report.checked) == 13, str(report)


def test_spatially_sharded_convolution_is_refused() -> None:
    for dim in (2, 3):
        with pytest.raises(PlacementError, match="The spatial dims must be whole"):
            check(CONVS[0], (2,), [(S(dim),), (R,), (R,)])


def test_bias_is_added_once_where_input_channels_are_sharded() -> None:
    plan = check(CONVS[0], (3,), [(S(1),), (S(1),), (R,)])
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]


def test_empty_pieces_answer_zeros() -> None:
    # torch raises for some and forgets the bias for others.
    check(CONVS[0], (8,), [(S(0),), (R,), (R,)])
    check(CONVS[0], (5,), [(S(1),), (S(1),), (R,)])
    plan = check(CONVS[1], (8,), [(S(0),), (S(0),), (R,)])
    assert [s.placements for s in plan.outs] == [(S(0),), (P(),), (P(),)]  # type: ignore[union-attr]


def test_a_cut_through_a_group_is_refused() -> None:
    check(CONVS[4], (2,), [(S(1),), (S(0),), (S(0),)])
    with pytest.raises(PlacementError):
        check(CONVS[6], (2,), [(S(1),), (S(0),), (S(0),)])


def test_a_small_network_and_its_gradients() -> None:
    w1, w2 = rn(4, 3, 3, 3), rn(2, 4, 3, 3)

    def net(image: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.conv2d(image, a, padding=1).relu(), 2)
        return F.conv2d(h, b, padding=1).square().sum()

    image = rn(5, 3, 6, 6)
    plain = [t.clone().requires_grad_() for t in (w1, w2)]
    net(image, *plain).backward()
    for first, second, data in (((R,), (R,), (S(0),)), ((S(0),), (S(1),), (R,))):
        mesh = mesh_of((2,))
        ws = [SimTensor.distribute(w, mesh, p).requires_grad_() for w, p in ((w1, first), (w2, second))]
        with SimTensor.moving():
            net(SimTensor.distribute(image, mesh, data), *ws).backward()
        for got, want in zip(ws, plain, strict=True):
            torch.testing.assert_close(got.grad.full(), want.grad)  # type: ignore[union-attr]
