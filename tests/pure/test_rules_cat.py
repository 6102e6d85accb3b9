"""Rules of cat, split, slice, select and their backwards."""

from __future__ import annotations

import pytest
import torch

from dtorch.errors import PlacementError

from .harness import P, R, S, Sample, check, check_all, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


SAMPLES = [
    Sample(aten.cat.default, ([rn(5, 4), rn(5, 2)], 1)),
    Sample(aten.cat.default, ([rn(5, 4), rn(2, 4), rn(0)],)),
    Sample(aten.cat.default, ([torch.arange(6).view(2, 3), torch.arange(3).view(1, 3)], 0)),
    Sample(aten.stack.default, ([rn(5), rn(5)], 0)),
    Sample(aten.stack.default, ([rn(3, 4), rn(3, 4)], -1)),
    Sample(aten.split.Tensor, (rn(5, 4), 2, 1)),
    Sample(aten.split_with_sizes.default, (rn(5, 7), [1, 4, 2], -1)),
    Sample(aten.unbind.int, (rn(3, 4, 2), 1)),
    Sample(aten.slice.Tensor, (rn(5, 6), 1, 1, 4)),
    Sample(aten.slice.Tensor, (rn(5, 6), 0, 0, 2**63 - 1)),
    Sample(aten.slice.Tensor, (rn(5, 6), 0, -3, -1)),
    Sample(aten.select.int, (rn(4, 5, 3), -2, 1)),
    Sample(aten.slice_backward.default, (rn(5, 3), [5, 6], 1, 1, 4, 1)),
    Sample(aten.slice_backward.default, (rn(5, 6), [5, 6], 1, 0, 6, 1)),
    Sample(aten.select_backward.default, (rn(4, 3), [4, 5, 3], 1, 2)),
    Sample(aten.diagonal_backward.default, (rn(4, 3), [3, 4, 3], 0, 0, 2)),
    Sample(aten.unfold_backward.default, (rn(4, 3, 2), [4, 5], 1, 2, 1)),
    Sample(aten.slice_scatter.default, (rn(5, 6), rn(5, 2), 1, 1, 3)),
    Sample(aten.select_scatter.default, (rn(5, 6), rn(6), 0, 1)),
    Sample(aten.diagonal_scatter.default, (rn(4, 3, 4), rn(3, 4), 0, 0, 2)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_placement(sample: Sample) -> None:
    for n in (2, 3):
        legal, wrong = check_all(sample, n, cap=150)
        assert legal and not wrong, wrong[:3]


def test_meshes() -> None:
    report = sweep(SAMPLES, cap=6)
    assert not report.wrong, str(report)
    assert len(report.checked) >= 13


@pytest.mark.parametrize(
    "sample",
    [
        Sample(aten.slice.Tensor, (rn(5, 4), 0, 0, 2)),
        Sample(aten.select.int, (rn(5, 4), 0, 0)),
        Sample(aten.split.Tensor, (rn(5, 4), 2, 0)),
        Sample(aten.cat.default, ([rn(5, 4), rn(5, 4)], 0)),
    ],
    ids=str,
)
def test_cut_along_a_sharded_dim_is_refused(sample: Sample) -> None:
    # Two rows of five over two ranks would be pieces of 2 and 0 rows: no placement says that.
    with pytest.raises(PlacementError, match="must be whole on every rank"):
        check(sample, (2,), [(S(0),)] * len(sample.tensors()))


def test_concatenating_a_partial_with_a_replicated_tensor() -> None:
    plan = check(Sample(aten.cat.default, ([rn(3), rn(2)], 0)), (2,), [(P(),), (R,)])
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]
