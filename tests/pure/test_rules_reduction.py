"""Reductions and their recipes against torch on the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.executor import kernels
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import Recipe, signature

from .harness import (
    MESHES,
    WIDE,
    P,
    Placements,
    R,
    S,
    Sample,
    SimTensor,
    capture,
    check,
    check_all,
    make_call,
    mesh_of,
    quiet,
    run_local,
    some,
    sweep,
)

aten = torch.ops.aten

OPS = frozenset(
    "sum nansum mean any all count_nonzero amax amin max min aminmax argmax argmin var std var_mean std_mean logsumexp "
    "prod median nanmedian mode kthvalue linalg.vector_norm norm max_reduction_with_dim max_reduction_no_dim "
    "min_reduction_with_dim min_reduction_no_dim".split()
)
STEMS = OPS - {o for o in OPS if "reduction" in o or "." in o} | {"linalg_vector_norm"}


def rn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape, generator=g, dtype=torch.float64) * 3).to(dtype)


def test_op_db_samples_combine() -> None:
    for dtype in (torch.float64, torch.int64):
        samples = capture(
            lambda f: signature(f).stem in STEMS and not signature(f).has_out,
            ops=lambda name: name in OPS,
            cap=12 if WIDE else 3,
            per_op=20 if WIDE else 3,
            dtype=dtype,
        )
        assert len({s.func for s in samples}) >= 20
        report = sweep(samples, cap=40 if WIDE else 3, variants=2)
        assert not report.wrong, report
        assert not report.unruled, report.unruled


HAND = [
    Sample(aten.sum.dim_IntList, (rn(5, 4), [0])),
    Sample(aten.sum.default, (rn(5, 4),)),
    Sample(aten.sum.dim_IntList, (rn(5, 4, dtype=torch.int32), [1], True)),
    Sample(aten.mean.dim, (rn(5, 4), [0])),
    Sample(aten.mean.default, (rn(3, 4),)),
    Sample(aten.amax.default, (rn(3, 4), [0])),
    Sample(aten.max.default, (rn(3, 4),)),
    Sample(aten.min.default, (rn(3, 4, dtype=torch.int64),)),
    Sample(aten.any.dim, (rn(3, 4) > 2, 0)),
    Sample(aten.all.default, (rn(3, 4) > -9,)),
    Sample(aten.count_nonzero.dim_IntList, (rn(3, 4).round(), [0])),
    Sample(aten.aminmax.default, (rn(3, 4),), {"dim": 0}),
    Sample(aten.var.correction, (rn(5, 4), [0])),
    Sample(aten.var.correction, (rn(5, 4, dtype=torch.complex128), [0])),
    Sample(aten.std_mean.correction, (rn(5, 4),), {"correction": 0, "keepdim": True}),
    Sample(aten.var_mean.correction, (rn(5, 4), [0, 1])),
    Sample(aten.logsumexp.default, (rn(5, 4) * 300, [0])),
    Sample(aten.argmax.default, (rn(5, 4).round(),)),
    Sample(aten.argmin.default, (rn(5, 4).round(), 0, True)),
    Sample(aten.argmax.default, (rn(3, 4, dtype=torch.int64), 1)),
    Sample(aten.max.dim, (rn(5, 4).round(), 0)),
    Sample(aten.min.dim, (rn(3, 4).round(), 1, True)),
    Sample(aten.linalg_vector_norm.default, (rn(5, 4),)),
    Sample(aten.linalg_vector_norm.default, (rn(5, 4), 3.5, [0], True)),
    Sample(aten.linalg_vector_norm.default, (rn(3, 4), float("inf"), [0])),
    Sample(aten.linalg_vector_norm.default, (rn(3, 4), float("-inf"))),
    Sample(aten.linalg_vector_norm.default, (rn(3, 4).round(), 0)),
    Sample(aten.linalg_vector_norm.default, (rn(3, 4), 1)),
    Sample(aten.linalg_vector_norm.default, (rn(3, 4, dtype=torch.complex128), 2)),
    Sample(aten.norm.Scalar, (rn(5, 4),)),
    Sample(aten.median.dim, (rn(5, 4), 0)),
    Sample(aten.prod.dim_int, (rn(5, 4), 0)),
]


@pytest.mark.parametrize("sample", HAND, ids=str)
def test_every_placement_on_every_mesh(sample: Sample) -> None:
    """What is legal is right; sharded dims always are, where there is a recipe."""
    x = sample.tensors()[0]
    kinds = [R, *[S(d) for d in range(x.ndim)], *([] if x.dtype == torch.bool else [P(), P("max")])]
    recipes = signature(sample.func).stem not in ("median", "prod")
    for shape in MESHES:
        for have in some(itertools.product(kinds, repeat=len(shape))):
            placed: Placements = tuple(have)
            if P() in placed and P("max") in placed:
                continue
            try:
                check(sample, shape, [placed])
            except PlacementError:
                assert not recipes or any(p.is_partial() for p in placed), (shape, placed)


def test_special_values() -> None:
    x = rn(4, 3)
    x[2, 1] = float("nan")
    x[0, 0] = x[3, 0] = float("inf")
    x[:, 2] = float("-inf")
    for sample in (
        Sample(aten.argmax.default, (x,)),
        Sample(aten.argmax.default, (x, 0)),
        Sample(aten.max.dim, (x, 0)),
        Sample(aten.logsumexp.default, (x, [0])),
        Sample(aten.amax.default, (x, [0])),
    ):
        check(sample, (2,), [(S(0),)])


def test_no_degrees_of_freedom() -> None:
    with quiet():
        check(Sample(aten.var.correction, (rn(2, 3), [0]), {"correction": 2}), (2,), [(S(0),)])
        check(Sample(aten.var.correction, (rn(1, 3), [0])), (2,), [(S(0),)])


def test_mean_of_uneven_pieces_divides_by_the_global_count() -> None:
    plan = propagate(make_call(Sample(aten.mean.default, (rn(5, 4),)), (2,), [(S(0),)]))
    assert isinstance(plan, Plan)
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]
    shares = [run_local(plan.calls[w], [rn(n, 4) * 0 + 1])[0] for w, n in zip(plan.which, (3, 2), strict=True)]
    assert [round(s.item(), 6) for s in shares if s is not None] == [0.6, 0.4]


def test_half_precision_sums_of_a_mean_do_not_overflow() -> None:
    x = torch.full((64, 64), 60000.0, dtype=torch.float16)
    check(Sample(aten.mean.default, (x,)), (2,), [(S(0),)])


def test_half_precision_recipes_work_in_float32() -> None:
    x = rn(64, 8, dtype=torch.bfloat16)
    for sample in (
        Sample(aten.var.correction, (x, [0])),
        Sample(aten.logsumexp.default, (x, [0])),
        Sample(aten.linalg_vector_norm.default, (x * 1000,)),
    ):
        placed = SimTensor.distribute(sample.tensors()[0], mesh_of((2,)), (S(0),))
        got = sample.func(placed, *sample.args[1:])
        want = sample.func(*sample.args)
        assert got.dtype == want.dtype
        assert torch.allclose(got.full().float(), want.float(), rtol=0.01)


def test_what_a_recipe_moves_is_small() -> None:
    SimTensor.counts.clear()
    x = SimTensor.distribute(rn(6, 4), mesh_of((2, 2)), (S(0), S(1)))
    out = aten.var.correction(x, [0])
    assert out.placements == (R, S(0))
    assert SimTensor.counts["redistribute"] == 2  # a mean and a sum of squares


def test_a_norm_of_a_partial_is_refused() -> None:
    for order in (1, 2, float("inf")):
        with pytest.raises(PlacementError):
            propagate(make_call(Sample(aten.linalg_vector_norm.default, (rn(4, 4), order)), (2,), [(P(),)]))
    for func, dim in ((aten.var.correction, [0]), (aten.argmax.default, 0), (aten.max.dim, 0)):
        with pytest.raises(PlacementError):
            propagate(make_call(Sample(func, (rn(4, 4), dim)), (2,), [(P(),)]))


def test_equal_and_allclose_give_the_client_a_bool() -> None:
    mesh, x = mesh_of((2,)), rn(5, 4)
    for have in ((S(0),), (R,)):
        call = make_call(Sample(aten.equal.default, (x, x)), (2,), [have, have])
        recipe = propagate(call)
        assert isinstance(recipe, Recipe)
        a, b = SimTensor.distribute(x, mesh, have), SimTensor.distribute(x, mesh, have)
        hits = aten.all.default(aten.eq.Tensor(a, b))
        assert hits.full().item() is True
        far = SimTensor.distribute(rn(4, 4), mesh, have)
        assert recipe.fn(aten.equal.default, (a, far), {}) is False


def test_first_index() -> None:
    x = torch.tensor([[1.0, 5.0], [5.0, 2.0]])
    extreme = torch.tensor([[5.0]])
    assert kernels.first_index(x, extreme, [0, 1], False, [0, 0], [2, 2]).item() == 1
    assert kernels.first_index(x, extreme, [0, 1], False, [4, 0], [8, 2]).item() == 9
    assert kernels.first_index(x, torch.tensor([[7.0]]), [0, 1], False, [0, 0], [2, 2]).item() == 4
    assert kernels.first_index(torch.ones(0, 2), torch.ones(1, 2), [0], False, [3], [3]).tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (5,)])
def test_products_of_shards_are_multiplied(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Uneven and empty pieces too: an empty one multiplies by nothing, however many there are."""
    x = (torch.randn(3, 4, dtype=torch.float64) * 3).round().abs().add(1).to(dtype)
    for placed in [
        (S(0),) * len(shape),
        (S(1),) * len(shape),
        (S(0), S(1))[: len(shape)],
        (R,) * (len(shape) - 1) + (S(1),),
    ]:
        check(Sample(aten.prod.default, (x,)), shape, [placed])
        for dim in (0, 1):
            check(Sample(aten.prod.dim_int, (x, dim)), shape, [placed])
            check(Sample(aten.prod.dim_int, (x, dim, True), {"dtype": torch.float64}), shape, [placed])
    check(Sample(aten.prod.default, (torch.ones(0, 3),)), shape, [(S(0),) * len(shape)])


@pytest.mark.parametrize("name", ["_is_all_true", "_is_any_true"])
def test_verdicts_over_all_elements(name: str) -> None:
    func = getattr(aten, name).default
    for values in ([True] * 5, [False] * 5, [True, True, False, True, True]):
        legal, wrong = check_all(Sample(func, (torch.tensor(values),)), 2, kinds=("max",))
        assert legal == 2 and not wrong, wrong
