"""Random operators: the values a single device would draw, wherever the pieces lie."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.executor import kernels_random as kernels
from dtorch.placement import Placement
from dtorch.sharding.infer import infer
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import Call

from .harness import P, R, S, Sample, abstract, combine, distribute, make_call, mesh_of, run_local

aten = torch.ops.aten


def run_draws(plan: Plan, sample: Sample, shape: tuple[int, ...], have: list[Any], seed: int) -> list[torch.Tensor]:
    """Output 0 of every rank; each starts from the same generator, and must leave it at the same place."""
    gen = torch.Generator().manual_seed(0)
    pieces = [distribute(t, p, shape, gen) for t, p in zip(sample.tensors(), have, strict=True)]
    ends, outs = [], []
    for rank, w in enumerate(plan.which):
        torch.manual_seed(seed)
        assert not plan.calls[w].empty
        outs.append(run_local(plan.calls[w], [p[rank].clone() for p in pieces])[0])
        ends.append(torch.get_rng_state())
    torch.manual_seed(seed)
    whole(sample)
    assert all(torch.equal(e, torch.get_rng_state()) for e in ends)
    return outs  # type: ignore[return-value]


def whole(sample: Sample) -> torch.Tensor:
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
    return sample.func(*args, **sample.kwargs)


def prove(sample: Sample, shape: tuple[int, ...], have: list[tuple[Placement, ...]]) -> Plan:
    plan = propagate(make_call(sample, shape, have))
    assert isinstance(plan, Plan)
    torch.manual_seed(7)
    want = whole(sample)
    got = run_draws(plan, sample, shape, have, 7)
    assert torch.equal(combine(got, plan.outs[0].placements, shape), want), f"{sample} {have}"  # type: ignore[union-attr]
    return plan


FILLS = [
    (aten.normal_.default, (1.0, 2.0)),
    (aten.uniform_.default, (-1.0, 1.0)),
    (aten.bernoulli_.float, (0.3,)),
    (aten.exponential_.default, (2.0,)),
    (aten.cauchy_.default, ()),
    (aten.log_normal_.default, ()),
    (aten.geometric_.default, (0.3,)),
    (aten.random_.default, ()),
    (getattr(aten.random_, "from"), (3, 17)),
    (aten.random_.to, (9,)),
    (aten.rand_like.default, ()),
    (aten.randn_like.default, ()),
    (aten.randint_like.low_dtype, (2, 30)),
    (aten.bernoulli.p, (0.4,)),
]
PLACED: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (S(0),)),
    ((3,), (S(1),)),
    ((8,), (S(0),)),
    ((2, 2), (S(0), S(1))),
    ((2, 2), (S(0), S(0))),
    ((2, 2), (R, S(1))),
    ((2, 2, 2), (S(1), R, S(0))),
]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("func, args", FILLS, ids=lambda x: str(x))
def test_fills_equal_the_whole(func: Any, args: tuple[Any, ...], skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WHOLE_BELOW", 0 if skip else 1 << 30)
    monkeypatch.setattr(kernels, "BLOCK", 64)
    for shape, placed in PLACED:
        for t in (torch.zeros(5, 7), torch.zeros(7, 5).t(), torch.zeros(16, 12)):
            prove(Sample(func, (t, *args)), shape, [placed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method, args", [(f._schema.name[6:], a) for f, a in FILLS[:9]], ids=str)
def test_skipping_ahead_is_bit_equal(
    dtype: torch.dtype, method: str, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WHOLE_BELOW", 0)
    monkeypatch.setattr(kernels, "BLOCK", 64)
    proved = 0
    for shape in ((5, 7), (48,), (100,), (6, 1, 8), (16, 3)):
        for order in {tuple(range(len(shape))), tuple(reversed(range(len(shape))))}:
            stride, step = [0] * len(shape), 1
            for d in reversed(order):
                stride[d], step = step, step * shape[d]
            torch.manual_seed(4)
            want = torch.empty_strided(shape, stride, dtype=dtype)
            getattr(want, method)(*args)
            after = torch.get_rng_state()
            for region in itertools.product(*[((0, s), (0, s // 2), (s // 2, s - s // 2), (s, 0)) for s in shape]):
                torch.manual_seed(4)
                local = torch.empty([n for _, n in region], dtype=dtype)
                kernels.random_slice_(local, method, shape, tuple(stride), region, *args)
                assert torch.equal(local, want[tuple(slice(a, a + n) for a, n in region)]), (shape, order, region)
                assert torch.equal(torch.get_rng_state(), after)
                proved += 1
    assert proved >= 200


def test_most_distributions_are_skipped_not_drawn_whole() -> None:
    # On builds whose MKL draws some of these by other means 0 is right, and the whole is drawn.
    assert kernels._words("uniform_", torch.float32, ()) == 1
    assert kernels._words("normal_", torch.float64, ()) == 2
    assert kernels._words("log_normal_", torch.float32, ()) == 0


def test_a_rank_holds_no_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WHOLE_BELOW", 0)
    monkeypatch.setattr(kernels, "BLOCK", 256)
    held = []
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        held.append(out.numel())
        return out

    monkeypatch.setattr(torch, "empty", counting)
    local = torch.zeros(8, 64)
    kernels.random_slice_(local, "uniform_", (512, 64), (64, 1), ((504, 8), (0, 64)))
    assert max(held) <= 256


@pytest.mark.parametrize("func", [aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float])
def test_filling_a_partial_in_place_is_refused(func: Any) -> None:
    sample = Sample(func, (torch.zeros(4), 0.5) if func is aten.bernoulli_.float else (torch.zeros(4),))
    with pytest.raises(PlacementError, match="gives every rank its own slice"):
        propagate(make_call(sample, (2,), [(P(),)]))


def test_like_a_partial_is_replicate() -> None:
    plan = prove(Sample(aten.rand_like.default, (torch.zeros(5, 4),)), (2,), [(P(),)])
    assert plan.outs[0].placements == (R,)  # type: ignore[union-attr]


def test_parameters_that_are_tensors() -> None:
    g = torch.Generator().manual_seed(0)
    p, mean, std = torch.rand(5, 7, generator=g), torch.randn(5, 7, generator=g), torch.rand(7, generator=g)
    for shape, placed in PLACED:
        on_last = tuple(S(0) if q == S(1) else R for q in placed)
        prove(Sample(aten.bernoulli.default, (p,)), shape, [placed])
        prove(Sample(aten.normal.Tensor_float, (mean, 2.0)), shape, [placed])
        prove(Sample(aten.normal.float_Tensor, (1.0, p)), shape, [placed])
        prove(Sample(aten.normal.Tensor_Tensor, (mean, std)), shape, [placed, on_last])
    for replacement in (False, True):
        for shape, placed in (((2,), (S(0),)), ((3,), (S(0),)), ((2, 2), (R, S(0)))):
            prove(Sample(aten.multinomial.default, (p, 3, replacement)), shape, [placed])
        with pytest.raises(PlacementError, match="dim of the classes must be whole"):
            propagate(make_call(Sample(aten.multinomial.default, (p, 3, replacement)), (2,), [(S(1),)]))


@pytest.mark.parametrize(
    "func, args",
    [
        (aten.rand.default, ([5, 7],)),
        (aten.randn.default, ([5, 7],)),
        (aten.randint.default, (9, [5, 7])),
        (aten.randint.low, (-3, 9, [5, 7])),
        (aten.normal.float_float, (1.0, 2.0, [5, 7])),
    ],
    ids=str,
)
def test_factories(func: Any, args: tuple[Any, ...]) -> None:
    for shape, placed in PLACED:
        sample = Sample(func, args)
        given, kwargs = abstract(func, args, {}, [])
        plan = propagate(Call(func, given, kwargs, infer(func, given, kwargs), mesh=mesh_of(shape), placements=placed))
        assert isinstance(plan, Plan) and plan.outs[0].placements == placed  # type: ignore[union-attr]
        torch.manual_seed(7)
        want = whole(sample)
        assert torch.equal(combine(run_draws(plan, sample, shape, [], 7), placed, shape), want)


def test_a_permutation_is_cut() -> None:
    func = aten.randperm.default
    call = Call(func, (7,), {}, infer(func, (7,), {}), mesh=mesh_of((3,)), placements=(S(0),))
    plan = propagate(call)
    assert isinstance(plan, Plan)
    torch.manual_seed(7)
    want = torch.randperm(7)
    assert torch.equal(combine(run_draws(plan, Sample(func, (7,)), (3,), [], 7), (S(0),), (3,)), want)


def test_dropout_masks_differ_across_shards_and_agree_across_replicas() -> None:
    mask = torch.zeros(8, 16)
    plan = prove(Sample(aten.bernoulli_.float, (mask, 0.5)), (2, 2), [(S(0), R)])
    ranks = run_draws(plan, Sample(aten.bernoulli_.float, (mask, 0.5)), (2, 2), [(S(0), R)], 3)
    assert torch.equal(ranks[0], ranks[1]) and torch.equal(ranks[2], ranks[3])
    assert not torch.equal(ranks[0], ranks[2])
