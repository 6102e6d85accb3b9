"""Rules of lookups and writes by index, and of operators along one whole dim."""

from __future__ import annotations

import re

import pytest
import torch

from dtorch.errors import PlacementError

from .harness import P, R, S, Sample, check, check_all, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def ri(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=g)


LOOKUPS = [
    Sample(aten.gather.default, (rn(5, 4), 1, ri(4, 5, 3))),
    Sample(aten.gather.default, (rn(5, 4), 0, ri(5, 2, 4))),
    Sample(aten.gather.default, (rn(5, 4), 0, ri(5, 2, 3))),
    Sample(aten.gather.default, (ri(9, 5, 4), 0, ri(5, 7, 4))),
    Sample(aten.index_select.default, (rn(5, 4), 0, ri(5, 3))),
    Sample(aten.index_select.default, (rn(5, 4), 1, torch.tensor(2))),
    Sample(aten.take.default, (rn(5, 4), ri(20, 3, 4))),
    Sample(aten.index.Tensor, (rn(5, 4, 3), [None, ri(4, 2, 3)])),
    Sample(aten.index.Tensor, (rn(5, 4), [torch.tensor([-1, 0, -5, 3])])),
    Sample(aten.index.Tensor, (rn(5, 4, 3), [ri(5, 4), ri(4, 4)])),
    Sample(aten.index.Tensor, (rn(5, 4, 3), [ri(5, 4, 1), None, ri(3, 3)])),
    Sample(aten.embedding.default, (rn(7, 4), ri(7, 5, 2))),
    Sample(aten.embedding.default, (rn(3, 4), ri(3, 5), 1)),
    Sample(aten.embedding_dense_backward.default, (rn(5, 2, 4), ri(7, 5, 2), 7, -1, False)),
    Sample(aten.embedding_dense_backward.default, (rn(5, 4), ri(3, 5), 3, 1, True)),
]
unique = torch.tensor([4, 0, 2])
WRITES = [
    Sample(aten.scatter.src, (rn(5, 4), 0, torch.tensor([[4, 0, 1, 2], [1, 3, 2, 0]]), rn(2, 4))),
    Sample(aten.scatter.value, (rn(5, 4), 1, ri(4, 5, 2), 1.5)),
    Sample(aten.scatter_.value, (torch.zeros(5, 6, dtype=torch.int64), -1, ri(6, 5, 1), 1)),
    Sample(aten.scatter_add.default, (rn(5, 4), 0, ri(5, 3, 4), rn(3, 4))),
    Sample(aten.scatter_add_.default, (rn(5, 4), 1, ri(4, 5, 6), rn(5, 6))),
    Sample(aten.scatter_add.default, (rn(5, 4), 0, ri(5, 3, 4), rn(4, 4))),
    Sample(aten.scatter_reduce.two, (rn(5, 4), 0, ri(5, 3, 4), rn(3, 4), "amax")),
    Sample(aten.index_add.default, (rn(5, 4), 0, ri(5, 3), rn(3, 4)), {"alpha": 2.0}),
    Sample(aten.index_add_.default, (rn(5, 4), 1, ri(4, 6), rn(5, 6))),
    Sample(aten.index_copy.default, (rn(5, 4), 0, unique, rn(3, 4))),
    Sample(aten.index_fill.int_Scalar, (rn(5, 4), 0, unique, 3.0)),
    Sample(aten.index_fill.int_Tensor, (rn(5, 4), 0, unique, torch.tensor(3.0, dtype=torch.float64))),
    Sample(aten.index_put.default, (rn(5, 4), [ri(5, 6)], rn(6, 4), True)),
    Sample(aten.index_put.default, (rn(5, 4, 3), [None, ri(4, 2, 3)], rn(2, 3, 3), True)),
    Sample(aten.index_put.default, (rn(5, 4), [unique], rn(3, 4))),
    Sample(aten.index_put_.default, (rn(5, 4), [None, torch.tensor([3, -4])], torch.tensor(2.0, dtype=torch.float64))),
    Sample(aten.index_put.default, (rn(5, 4, 3), [ri(5, 4), ri(4, 4)], rn(4, 3), True)),
    Sample(aten.index_put_.default, (rn(5, 4), [rn(5, 4) > 0], torch.tensor(2.0, dtype=torch.float64))),
    Sample(aten.index_put.default, (rn(5, 4), [rn(5) > 0], torch.tensor([2.0], dtype=torch.float64))),
]


@pytest.mark.parametrize("sample", LOOKUPS + WRITES, ids=str)
def test_every_placement(sample: Sample) -> None:
    legal, wrong = check_all(sample, 2, kinds=("sum", "max"), cap=150)
    assert legal and not wrong, wrong[:3]
    legal, wrong = check_all(sample, 3, kinds=("sum",), cap=100)
    assert legal and not wrong, wrong[:3]


def test_meshes() -> None:
    report = sweep(LOOKUPS + WRITES, cap=5, variants=2)
    assert not report.wrong, str(report)
    assert len(report.checked) >= 18, str(report)


def test_vocabulary_sharded_embedding_is_a_sum() -> None:
    plan = check(Sample(aten.embedding.default, (rn(7, 4), ri(7, 5))), (3,), [(S(0),), (R,)])
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sample",
    [
        Sample(aten.embedding.default, (rn(7, 4), torch.tensor([1, 7]))),
        Sample(aten.index.Tensor, (rn(7, 4), [torch.tensor([-8])])),
        Sample(aten.gather.default, (rn(7, 4), 0, torch.tensor([[9, 0, 0, 0]]))),
    ],
    ids=str,
)
def test_an_index_outside_a_sharded_dim_raises(sample: Sample) -> None:
    # Masked away on every rank it would read as zeros.
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        sample.func(*sample.args)
    with pytest.raises(wanted.type, match=re.escape(str(wanted.value))):
        check(sample, (2,), [(S(0),), (R,)], truth=[])


def test_gradient_of_a_lookup_becomes_partial() -> None:
    sample = Sample(aten.index_put.default, (torch.zeros(5, 4, dtype=torch.float64), [ri(5, 6)], rn(6, 4), True))
    plan = check(sample, (2,), [(R,), (S(0),), (S(0),)])
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]


def test_in_place_accumulation_never_moves_self() -> None:
    sample = Sample(aten.index_put_.default, (rn(5, 4), [ri(5, 6)], rn(6, 4), True))
    with pytest.raises(PlacementError):
        check(sample, (2,), [(R,), (S(0),), (S(0),)])
