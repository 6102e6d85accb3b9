"""Elementwise rules against torch on the whole."""

from __future__ import annotations

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import UNTAGGED_POINTWISE, signature

from .harness import WIDE, P, R, S, Sample, capture, check, check_all, every, make_call, sweep

aten = torch.ops.aten

# Enough of op_db to meet every branch of the rules; DTORCH_WIDE=1 runs all of it.
SOME = frozenset(
    "add sub rsub mul div where lerp addcmul addcdiv masked_fill clamp maximum minimum neg exp pow fmod copysign "
    "nn.functional.relu nn.functional.gelu nn.functional.leaky_relu nn.functional.elu nn.functional.softplus "
    "nn.functional.threshold nn.functional.logsigmoid nn.functional.prelu atan2 sigmoid float_power ge "
    "clone to fill heaviside frexp complex polar real conj round sgn".split()
)


def elementwise(func: torch._ops.OpOverload) -> bool:
    sig = signature(func)
    tagged = sig.pointwise or sig.stem in UNTAGGED_POINTWISE
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    apart = sig.stem == "equal" or sig.stem.startswith("_foreach")  # a verdict for the client; lists
    return tagged and not sig.has_out and not seeded and not apart


def test_op_db_samples_combine() -> None:
    cap, per_op = (12, 30) if WIDE else (2, 3)
    samples = capture(elementwise, ops=lambda name: WIDE or name in SOME, cap=cap, per_op=per_op)
    assert len({s.func for s in samples}) > (200 if WIDE else 50)
    report = sweep(samples, cap=30 if WIDE else 3, variants=3 if WIDE else 2)
    assert not report.wrong, report
    assert not report.unruled, report.unruled
    assert sum(report.checked.values()) > (50_000 if WIDE else 1_000)


def rn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    x = torch.randn(shape, generator=g, dtype=torch.float64) * 3
    return x.to(dtype)


HAND = [
    Sample(aten.add.Tensor, (rn(5, 4), rn(4))),
    Sample(aten.add.Tensor, (rn(5, 4), rn(5, 4)), {"alpha": -2.0}),
    Sample(aten.sub.Tensor, (rn(5, 4), rn(5, 1))),
    Sample(aten.rsub.Scalar, (rn(5, 4), 1)),
    Sample(aten.mul.Tensor, (rn(5, 4), rn(5, 4) > 0)),
    Sample(aten.div.Tensor, (rn(5, 4), 3)),
    Sample(aten.neg.default, (rn(5, 4),)),
    Sample(aten.erfc.default, (rn(5, 4),)),
    Sample(aten.masked_fill.Scalar, (rn(5, 4), rn(5, 4) > 0, 3.0)),
    Sample(aten.masked_fill.Tensor, (rn(5, 4), rn(5, 4) > 0, torch.tensor(2.0, dtype=torch.float64))),
    Sample(aten.where.self, (rn(5, 4) > 0, rn(5, 4), rn(1, 4))),
    Sample(aten.maximum.default, (rn(5, 4), rn(4, 5).t())),
    Sample(aten.fill_.Scalar, (rn(5, 4), 3.0)),
    Sample(aten.fill_.Tensor, (rn(5, 4), torch.tensor(2.0, dtype=torch.float64))),
    Sample(aten.zero_.default, (rn(5, 4),)),
    Sample(aten.copy_.default, (rn(5, 4), rn(4))),
    Sample(aten.copy_.default, (rn(5, 4, dtype=torch.int64), rn(5, 4, dtype=torch.int64))),
    Sample(aten._to_copy.default, (rn(5, 4),), {"dtype": torch.float32}),
    Sample(aten._to_copy.default, (rn(5, 4),), {"dtype": torch.int64}),
    Sample(aten._to_copy.default, (rn(5, 4),), {"dtype": torch.bool}),
    Sample(aten.add.Tensor, (rn(5, 4, dtype=torch.int64), 2)),
    Sample(aten.mul.Tensor, (rn(5, 4, dtype=torch.int64), rn(5, 4, dtype=torch.int64))),
    Sample(aten.add.Tensor, (rn(5, 4) > 0, rn(5, 4) > 1)),
    Sample(aten.clamp.Tensor, (rn(5, 4), rn(4), rn(5, 4).abs() + 3)),
    Sample(aten.floor_divide.default, (rn(5, 4), 2)),
    Sample(aten.div.Tensor_mode, (rn(5, 4), 2.0), {"rounding_mode": "floor"}),
    Sample(aten.log_sigmoid_forward.default, (rn(5, 4),)),
    Sample(aten.elu.default, (rn(5, 4), -1.0)),
    Sample(aten.threshold_backward.default, (rn(5, 4), rn(5, 4), 0)),
    Sample(aten.pow.Tensor_Scalar, (rn(5, 4), 2)),
]


@pytest.mark.parametrize("sample", HAND, ids=str)
def test_every_combination_that_is_legal_is_right(sample: Sample) -> None:
    for n in (2, 3):
        legal, wrong = check_all(sample, n, kinds=("sum", "avg", "max", "min"), cap=200 if WIDE else 60)
        assert legal >= 3
        assert not wrong, wrong[:3]


def legal(sample: Sample, *have: object) -> bool:
    try:
        plan = check(sample, (2,), [(p,) for p in have])  # type: ignore[misc]
    except PlacementError:
        return False
    assert isinstance(plan, Plan)
    return True


def test_a_number_counts_once_in_a_sum() -> None:
    assert legal(Sample(aten.add.Tensor, (rn(4, 4), 2.0)), P())
    assert legal(Sample(aten.rsub.Scalar, (rn(4, 4), 1)), P())  # 1 - x
    assert legal(Sample(aten.fill_.Scalar, (rn(4, 4), 2.0)), P())
    assert legal(Sample(aten.masked_fill.Scalar, (rn(4, 4), rn(4, 4) > 0, 2.0)), P(), R)
    plan = propagate(make_call(Sample(aten.add.Tensor, (rn(4, 4), 2.0)), (2,), [(P("avg"),)]))
    assert isinstance(plan, Plan)
    assert len(plan.calls) == 1  # in an average it counts everywhere


def test_negation_swaps_max_and_min() -> None:
    for op, into in (("max", "min"), ("min", "max")):
        plan = check(Sample(aten.neg.default, (rn(4, 4),)), (2,), [(P(op),)])
        assert isinstance(plan, Plan)
        assert plan.outs[0].placements == (P(into),)  # type: ignore[union-attr]
    assert not legal(Sample(aten.mul.Tensor, (rn(4, 4), -1.0)), P("max"))
    assert legal(Sample(aten.mul.Tensor, (rn(4, 4), 2.0)), P("max"))


def test_functions_whose_domain_ends_do_not_pass_max() -> None:
    for name in ("sqrt", "log", "log1p", "acosh", "square", "abs", "cos"):
        assert not legal(Sample(getattr(aten, name).default, (rn(4, 4).abs() + 2,)), P("max"))
    for name in ("relu", "exp", "sigmoid", "tanh", "floor"):
        assert legal(Sample(getattr(aten, name).default, (rn(4, 4),)), P("max"))


def test_what_is_not_linear_does_not_pass_sum() -> None:
    for name in ("relu", "exp", "abs", "floor", "sign"):
        assert not legal(Sample(getattr(aten, name).default, (rn(4, 4),)), P())
    assert not legal(Sample(aten.mul.Tensor, (rn(4, 4), rn(4, 4))), P(), P())
    assert not legal(Sample(aten.div.Tensor, (rn(4, 4), rn(4, 4))), R, P())
    assert not legal(Sample(aten._to_copy.default, (rn(4, 4),), {"dtype": torch.int32}), P())


def test_tags_that_lie_are_not_trusted() -> None:
    for name in ("rrelu_with_noise", "bernoulli"):
        func = getattr(aten, name).default
        assert torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.pointwise not in func.tags
    assert legal(Sample(aten.frexp.Tensor, (rn(4, 4),)), S(0))  # two outputs, both cut


def test_dims_of_size_one_broadcast_or_are_cut() -> None:
    assert legal(Sample(aten.add.Tensor, (rn(1, 4), rn(1, 4))), S(0), S(0))
    assert not legal(Sample(aten.add.Tensor, (rn(1, 4), rn(5, 4))), S(0), S(0))
    assert legal(Sample(aten.add.Tensor, (rn(1, 4), rn(5, 4))), R, S(0))


def test_every_lists_all_combinations() -> None:
    assert len(every(Sample(aten.mul.Tensor, (rn(4, 4), rn(4))), ("sum",))) == 4 * 3
