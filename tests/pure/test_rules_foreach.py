"""Rules of operators on lists of tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import Num, free_numbers

from .harness import P, R, S, Sample, SimTensor, combine, distribute, make_call, mesh_of, run_local, same

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def lists(n: int) -> list[list[torch.Tensor]]:
    return [[rn(5, 4), rn(3), rn(2, 3)] for _ in range(n)]


def _samples() -> list[Sample]:
    a, b, c = lists(3)
    pos = [t.abs() + 0.5 for t in c]
    return [
        Sample(aten._foreach_add.List, (a, b), {"alpha": 0.5}),
        Sample(aten._foreach_add_.List, (a, b)),
        Sample(aten._foreach_add_.Scalar, (a, 2.0)),
        Sample(aten._foreach_add.ScalarList, (a, [1.0, 2.0, 3.0])),
        Sample(aten._foreach_mul_.Scalar, (a, 0.5)),
        Sample(aten._foreach_mul_.Tensor, (a, rn())),
        Sample(aten._foreach_div_.ScalarList, (a, [1.0, 2.0, 3.0])),
        Sample(aten._foreach_sqrt.default, (pos,)),
        Sample(aten._foreach_neg_.default, (a,)),
        Sample(aten._foreach_zero_.default, (a,)),
        Sample(aten._foreach_lerp_.Scalar, (a, b, 0.3)),
        Sample(aten._foreach_addcmul_.Scalar, (a, b, c, 0.3)),
        Sample(aten._foreach_addcdiv_.ScalarList, (a, b, pos, [0.1, 0.2, 0.3])),
        Sample(aten._foreach_maximum_.List, (a, b)),
        Sample(aten._foreach_maximum.Scalar, (a, 0.1)),
        Sample(aten._foreach_pow.Scalar, (pos, 2.0)),
        Sample(aten._foreach_copy_.default, (a, b)),
    ]


def prove(sample: Sample, shape: tuple[int, ...], have: list[Any]) -> Plan | None:
    """As harness.check, with the lists written in place compared too; None where the call is refused."""
    try:
        plan = propagate(make_call(sample, shape, have))
    except PlacementError:
        return None
    assert isinstance(plan, Plan)
    gen = torch.Generator().manual_seed(1)
    pieces = [distribute(t.clone(), p, shape, gen) for t, p in zip(sample.tensors(), have, strict=True)]
    ranks = [[p[r].clone() for p in pieces] for r in range(len(plan.which))]
    results = [run_local(plan.calls[w], ts) for w, ts in zip(plan.which, ranks, strict=True)]
    whole = Sample(
        sample.func, *torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (sample.args, sample.kwargs))
    )
    outs = whole.func(*whole.args, **whole.kwargs)
    if outs is not None:
        for o, want in enumerate(outs):
            assert same(combine([r[o] for r in results], plan.outs[o].placements, shape), want)  # type: ignore
    for i, want in enumerate(whole.tensors()):
        if plan.needs[i] == have[i]:
            assert same(combine([ts[i] for ts in ranks], have[i], shape), want), (sample.func, have, i)
    return plan


@pytest.mark.parametrize("sample", _samples(), ids=lambda s: str(s.func))
def test_elements_of_mixed_placements(sample: Sample) -> None:
    rng, legal = random.Random(0), 0
    n = len(sample.args[0])
    for shape in ((2,), (3,), (2, 2)):
        for _ in range(60):
            # The same placements down each element, with some inputs left Replicate and some Partial.
            per = [
                tuple(rng.choice([R, *[S(d) for d in range(t.ndim)], *[P()][rng.random() < 0.7 :]]) for _ in shape)
                for t in sample.args[0]
            ]
            have = []
            for i, t in enumerate(sample.tensors()):
                p = per[i % n] if t.ndim else (R,) * len(shape)
                have.append((R,) * len(shape) if i >= n and rng.random() < 0.3 else p)
            legal += prove(sample, shape, have) is not None
    assert legal > 5


def test_a_constant_is_added_to_one_share_only() -> None:
    plan = prove(_samples()[2], (2,), [(P(),), (S(0),), (R,)])
    assert plan is not None and {c.func for c in plan.calls} == {"dtorch.one_by_one", "aten._foreach_add_.Scalar"}


def test_one_call_serves_where_elements_need_no_care() -> None:
    plan = prove(_samples()[4], (2,), [(S(0),), (S(0),), (R,)])
    assert plan is not None and {c.func for c in plan.calls} == {"aten._foreach_mul_.Scalar"}


def test_in_place_never_moves_what_it_writes() -> None:
    assert prove(_samples()[1], (2,), [(R,), (R,), (R,), (S(0),), (R,), (R,)]) is None
    assert prove(_samples()[5], (2,), [(R,), (R,), (R,), (P(),)]) is None


def test_numbers_in_lists_ride_in_the_message() -> None:
    assert free_numbers(aten._foreach_addcdiv_.ScalarList) == (False, False, False, True)
    sample = _samples()[12]
    plan = propagate(make_call(sample, (2,), [(S(0),)] * 9))
    assert isinstance(plan, Plan) and all(isinstance(x, Num) for x in plan.calls[0].args[3])


def _optimizers() -> list[Sample]:
    p, grad, m, v = lists(4)
    v = [t.abs() for t in v]
    steps = [torch.tensor(3.0) for _ in p]
    adam = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.01,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    sgd = {
        "weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
        "is_first_step": False,
    }  # fmt: skip
    return [
        Sample(aten._fused_adamw_.default, (p, grad, m, v, [], steps), adam),
        Sample(aten._fused_adam_.default, (p, grad, m, v, [], steps), adam),
        Sample(aten._fused_sgd_.default, (p, grad, m), sgd),
    ]


@pytest.mark.parametrize("sample", _optimizers(), ids=lambda s: str(s.func))
def test_fused_optimizers(sample: Sample) -> None:
    rng = random.Random(0)
    n = len(sample.args[0])
    for shape in ((2,), (3,), (2, 2)):
        for _ in range(10):
            per = [tuple(rng.choice([R, *[S(d) for d in range(t.ndim)]]) for _ in shape) for t in sample.args[0]]
            have = [per[i % n] if t.ndim else (R,) * len(shape) for i, t in enumerate(sample.tensors())]
            plan = prove(sample, shape, have)
            assert plan is not None and {c.func.split(".")[1] for c in plan.calls} == {sample.func._schema.name[6:]}


def test_fused_optimizer_refuses_a_partial_gradient() -> None:
    sample = _optimizers()[2]
    assert prove(sample, (2,), [(R,)] * 3 + [(P(),)] * 3 + [(R,)] * 3) is None


def test_norms_of_shards_are_roots_of_summed_squares() -> None:
    tensors = [*lists(1)[0], rn(6)]
    want = aten._foreach_norm.Scalar(tensors)
    mesh = mesh_of((3,))
    placed = [(S(0),), (S(0),), (R,), (P(),)]
    SimTensor.counts.clear()
    got = aten._foreach_norm.Scalar([SimTensor.distribute(t, mesh, p) for t, p in zip(tensors, placed, strict=True)])
    for a, b in zip(got, want, strict=True):
        assert same(a.full(), b)
    # One for the tensor that is Partial itself, one for all sums of squares together.
    assert SimTensor.counts["redistribute"] == 2


@pytest.mark.parametrize("spoilt", [None, 0, 1, 2])
def test_a_grad_scaler_sees_what_is_infinite_on_any_rank(spoilt: int | None) -> None:
    """The flag is one for all ranks, or some would step and others not."""
    grads = [rn(5, 4), rn(6), rn(3, 3)]
    if spoilt is not None:
        grads[spoilt].view(-1)[-1] = float("inf")
    flag, inverse = torch.zeros(1), torch.full((1,), 0.25)
    whole = [t.clone() for t in grads]
    want = flag.clone()
    aten._amp_foreach_non_finite_check_and_unscale_.default(whole, want, inverse)
    for shape, placed in (((3,), [(S(0),), (S(0),), (P(),)]), ((2, 2), [(S(0), S(1)), (R, S(0)), (S(1), R)])):
        mesh = mesh_of(shape)
        rest = (R,) * len(shape)
        mine = [SimTensor.distribute(t.clone(), mesh, p) for t, p in zip(grads, placed, strict=True)]
        found = SimTensor.distribute(flag.clone(), mesh, rest)
        aten._amp_foreach_non_finite_check_and_unscale_.default(
            mine, found, SimTensor.distribute(inverse.clone(), mesh, rest)
        )
        assert same(found.full(), want)
        for a, b, p in zip(mine, whole, placed, strict=True):
            # An infinity that is spread over summands comes out as nan.
            assert a.placements == p
            assert same(a.full(), b) or (P() in p and spoilt == 2)
