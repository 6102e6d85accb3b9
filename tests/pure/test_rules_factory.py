"""Rules of factories."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.placement import Placement
from dtorch.sharding.infer import infer
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import Call

from .harness import P, R, S, Sample, abstract, check, check_all, combine, mesh_of, run_local, sweep

aten = torch.ops.aten

PLACED: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (S(0),)),
    ((3,), (S(0),)),
    ((8,), (S(0),)),
    ((2, 2), (S(0), S(0))),
    ((2, 2), (R, S(0))),
    ((2, 2), (R, R)),
]
MATRIX: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((3,), (S(1),)),
    ((2, 2), (S(1), S(0))),
    ((2, 3), (S(0), S(1))),
]
SHARES: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((3,), (P(),)),
    ((2, 2), (P(), S(0))),
    ((2, 2), (P("avg"), P())),
    ((2, 2), (P("max"), R)),
]


def make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], placed: Any) -> torch.Tensor:
    """The value that a factory's pieces stand for."""
    a, k = abstract(func, args, kwargs, [])
    plan = propagate(Call(func, a, k, infer(func, a, k), mesh=mesh_of(shape), placements=placed))
    assert isinstance(plan, Plan) and plan.outs[0].placements == placed  # type: ignore[union-attr]
    pieces = [run_local(plan.calls[w], [])[0] for w in plan.which]
    for rank, p in enumerate(pieces):
        assert tuple(p.shape) == plan.outs[0].local_shape(rank)  # type: ignore[union-attr]
    return combine(pieces, placed, shape)  # type: ignore[arg-type]


FORMULAS = [
    (aten.arange.default, (11,)),
    (aten.arange.start, (2, 17)),
    (aten.arange.start_step, (0.1, 3.0, 0.07)),
    (aten.linspace.default, (0.0, 1.0, 37)),
    (aten.logspace.default, (0.0, 2.0, 13)),
    (aten.eye.default, (5,)),
    (aten.eye.m, (5, 7)),
    (aten.tril_indices.default, (4, 5)),
    (aten.triu_indices.default, (4, 5, 1)),
]
FILLED = [
    (aten.zeros.default, ([5, 7],), {}),
    (aten.ones.default, ([5, 7],), {"dtype": torch.int32}),
    (aten.full.default, ([5, 7], 3.5), {}),
    (aten.full.default, ([5, 7], 3), {}),
]


@pytest.mark.parametrize("func, args", FORMULAS, ids=str)
def test_formulas_are_bit_equal_to_the_whole(func: Any, args: tuple[Any, ...]) -> None:
    want = func(*args)
    for shape, placed in PLACED + (MATRIX if want.ndim > 1 else []):
        assert torch.equal(make(func, args, {}, shape, placed), want), (shape, placed)


@pytest.mark.parametrize("func, args, kwargs", FILLED, ids=str)
def test_fills(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    want = func(*args, **kwargs)
    for shape, placed in PLACED + MATRIX + SHARES:
        if want.dtype.is_floating_point or P("avg") not in placed:
            torch.testing.assert_close(make(func, args, kwargs, shape, placed), want)


def test_strides_asked_for_are_those_of_the_pieces() -> None:
    func, args = aten.empty_strided.default, ([6, 4], [1, 6])
    a, k = abstract(func, args, {}, [])
    plan = propagate(Call(func, a, k, infer(func, a, k), mesh=mesh_of((2,)), placements=(S(0),)))
    assert isinstance(plan, Plan)
    assert run_local(plan.calls[0], [])[0].stride() == (1, 3)  # type: ignore[union-attr]


x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LIKE = [
    Sample(aten.zeros_like.default, (x,)),
    Sample(aten.ones_like.default, (x,)),
    Sample(aten.full_like.default, (x, 2.5)),
    Sample(aten.new_zeros.default, (x, [3, 2])),
    Sample(aten.new_ones.default, (x, [5, 4])),
    Sample(aten.new_full.default, (x, [5, 4], 2.5)),
    Sample(aten.tril.default, (x, 1)),
    Sample(aten.triu.default, (x.t(), -1)),
    Sample(aten.tril_.default, (torch.ones(2, 5, 7), 2)),
]


@pytest.mark.parametrize("sample", LIKE, ids=str)
def test_every_placement_of_the_model(sample: Sample) -> None:
    for n in (2, 3):
        legal, wrong = check_all(sample, n, kinds=("sum", "avg", "max", "min"))
        assert legal == len(sample.args[0].shape) + (5 if sample.args[0].dtype.is_floating_point else 1)
        assert not wrong, wrong


def test_meshes() -> None:
    report = sweep(LIKE)
    assert not report.wrong, str(report)
    assert len(report.checked) == 9, str(report)


def test_like_a_partial_is_no_share() -> None:
    plan = check(LIKE[1], (2,), [(P(),)])
    assert plan.outs[0].placements == (R,)  # type: ignore[union-attr]


def test_triangle_of_a_shard_follows_its_offset() -> None:
    check(Sample(aten.tril.default, (torch.ones(6, 6),)), (3,), [(S(1),)])
    check(Sample(aten.tril.default, (torch.ones(5, 7), 1)), (2, 2), [(S(0), S(1))])
