"""Rules of losses."""

from __future__ import annotations

import pytest
import torch

from dtorch.sharding.plan import Plan
from dtorch.sharding.rule import Recipe

from .harness import P, R, S, Sample, SimTensor, check, check_all, mesh_of, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _elementwise(reduction: int) -> list[Sample]:
    x, t, p, q = rn(5, 4), rn(5, 4), torch.rand(5, 4, generator=g).double(), torch.rand(5, 4, generator=g).double()
    grad = rn(5, 4) if reduction == 0 else rn()
    return [
        Sample(aten.mse_loss.default, (x, t, reduction)),
        Sample(aten.mse_loss_backward.default, (grad, x, t, reduction)),
        Sample(aten.smooth_l1_loss.default, (x, t, reduction, 0.5)),
        Sample(aten.smooth_l1_loss_backward.default, (grad, x, t, reduction, 0.5)),
        Sample(aten.huber_loss.default, (x, t, reduction, 0.5)),
        Sample(aten.huber_loss_backward.default, (grad, x, t, reduction, 0.5)),
        Sample(aten.binary_cross_entropy.default, (p, q, None, reduction)),
        Sample(aten.binary_cross_entropy_backward.default, (grad, p, q, rn(5, 4), reduction)),
        Sample(aten.binary_cross_entropy_with_logits.default, (x, q, None, rn(4), reduction)),
        Sample(aten.soft_margin_loss.default, (x, t.sign(), reduction)),
    ]


TARGET = torch.tensor([1, 2, -100, 6, 0])


def _nll(reduction: int) -> list[Sample]:
    out = []
    for weight in (None, torch.rand(7, generator=g).double()):
        x = rn(5, 7)
        loss, total = aten.nll_loss_forward.default(x, TARGET, weight, reduction, -100)
        out += [
            Sample(aten.nll_loss_forward.default, (x, TARGET, weight, reduction, -100)),
            Sample(aten.nll_loss_backward.default, (rn(*loss.shape), x, TARGET, weight, reduction, -100, total)),
        ]
    x, t = rn(3, 4, 2, 3), torch.randint(0, 4, (3, 2, 3), generator=g)
    loss, total = aten.nll_loss2d_forward.default(x, t, None, reduction, 1)
    return [
        *out,
        Sample(aten.nll_loss2d_forward.default, (x, t, None, reduction, 1)),
        Sample(aten.nll_loss2d_backward.default, (rn(*loss.shape), x, t, None, reduction, 1, total)),
    ]


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_meshes(reduction: int) -> None:
    report = sweep(_elementwise(reduction) + _nll(reduction), cap=3, variants=2)
    assert not report.wrong, str(report)
    assert len(report.checked) == 14, str(report)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_every_placement(reduction: int) -> None:
    for sample in _elementwise(reduction)[:3] + _nll(reduction):
        legal, wrong = check_all(sample, 3, kinds=("sum",), cap=100)
        assert legal and not wrong, wrong[:3]


def test_mean_over_uneven_shards_is_over_the_global_count() -> None:
    plan = check(Sample(aten.mse_loss.default, (rn(5, 4), rn(5, 4))), (3,), [(S(0),), (S(0),)])
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]


def test_nll_mean_counts_weights_and_ignored_targets_of_the_whole_batch() -> None:
    for sample in _nll(1)[::2]:
        SimTensor.counts.clear()
        plan = check(sample, (3,), [(S(0),), (S(0),), *[(R,)] * (len(sample.tensors()) - 2)])
        assert isinstance(plan, Recipe)
        # Loss and weight travel together.
        assert SimTensor.counts["redistribute"] == 1


def test_nll_mean_with_every_target_ignored_is_nan() -> None:
    sample = Sample(aten.nll_loss_forward.default, (rn(4, 3), torch.full((4,), -100), None, 1, -100))
    check(sample, (2,), [(S(0),), (S(0),)])


def test_a_target_outside_the_sharded_classes_raises() -> None:
    sample = Sample(aten.nll_loss_forward.default, (rn(2, 4), torch.tensor([1, 4]), None, 2, -100))
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        check(sample, (2,), [(S(1),), (R,)], truth=[])


@pytest.mark.parametrize("placed", [(S(0),), (S(1),), (R,)], ids=str)
def test_cross_entropy_and_its_gradient(placed: tuple[object, ...]) -> None:
    x, target = rn(5, 7), TARGET.clamp(min=0)
    want = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(want, target).backward()
    mesh = mesh_of((2,))
    got = SimTensor.distribute(x, mesh, placed).requires_grad_()  # type: ignore[arg-type]
    t = SimTensor.distribute(target, mesh, placed if placed == (S(0),) else (R,))  # type: ignore[arg-type]
    with SimTensor.moving():
        loss = torch.nn.functional.cross_entropy(got, t)
        loss.backward()
    torch.testing.assert_close(loss.full(), torch.nn.functional.cross_entropy(x, target))  # type: ignore[attr-defined]
    torch.testing.assert_close(got.grad.full(), want.grad)  # type: ignore[union-attr]


def test_a_rank_without_samples_adds_nothing_to_a_sum() -> None:
    """torch's margin losses leave the sum over no samples as the memory was: an empty piece is not run at all."""
    x, classes, sets = torch.randn(5, 7, dtype=torch.float64), torch.randint(0, 7, (5,)), torch.randint(0, 7, (5, 7))
    for sample in (
        Sample(aten.multi_margin_loss.default, (x, classes, 1, 1.0, None, 1)),
        Sample(aten.multilabel_margin_loss_forward.default, (x, sets, 2)),
    ):
        plan = check(sample, (4,), [(S(0),), (S(0),)])
        assert isinstance(plan, Plan)
        assert [plan.calls[w].empty for w in plan.which][:3] == [False, False, False]  # 2, 2, 1 and no samples
        assert plan.calls[plan.which[3]].empty
