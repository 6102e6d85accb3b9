"""Under auto_redistribute an operator writes where its target cannot be written by way of a copy; the target stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Placement, Replicate, Shard

X = torch.arange(1.0, 13).view(4, 3)
WRITES: dict[str, Callable[[Any], Any]] = {
    "sqrt_": lambda t: t.sqrt_(),
    "mul_ by itself": lambda t: t.mul_(t),
    "cumsum_ 0": lambda t: t.cumsum_(0),
    "cumsum_ 1": lambda t: t.cumsum_(1),
    "add_ a constant": lambda t: t.add_(torch.ones(3)),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1, 3]), 7.0),
    "index_put_": lambda t: t.index_put_((torch.tensor([0, 2]), torch.tensor([1, 2])), torch.tensor([5.0, 6.0])),
    "renorm_": lambda t: t.renorm_(2, 1, 1.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("placement", [Partial(), Partial("avg"), Partial("max"), Shard(0), Shard(1)], ids=str)
def test_the_target_and_its_views_hold_what_was_written(write: str, placement: Placement) -> None:
    mesh = dtorch.init_device_mesh("cpu", (3,))
    want = X.clone()
    WRITES[write](want)
    t = dtorch.distribute_tensor(X, mesh, [placement])
    view = t[:]
    with dtorch.auto_redistribute():
        assert WRITES[write](t) is t
        assert t.placements == (placement,)
        torch.testing.assert_close(t.to_torch(), want)
        torch.testing.assert_close(view.to_torch(), want)
        WRITES[write](t)  # from the plan that is remembered
        WRITES[write](want)
        torch.testing.assert_close(t.to_torch(), want)


def test_strict_mode_still_refuses_after_a_plan_is_remembered() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    t = dtorch.distribute_tensor(X, mesh, [Partial()])
    with dtorch.auto_redistribute():
        t.sqrt_()
    with pytest.raises(dtorch.PlacementError, match="sqrt_"):
        t.sqrt_()
    torch.testing.assert_close(t.to_torch(), X.sqrt())


def test_arguments_that_are_written_but_not_returned() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    x, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    want_mean, want_var = mean.clone(), var.clone()
    want = torch.nn.functional.batch_norm(x, want_mean, want_var, training=True)
    at = dtorch.distribute_tensor(x, mesh, [Shard(0)])
    running = [dtorch.distribute_tensor(t, mesh, [Shard(0)]) for t in (mean, var)]
    with dtorch.auto_redistribute():
        got = torch.nn.functional.batch_norm(at, *running, training=True)
    torch.testing.assert_close(got.to_torch(), want)
    torch.testing.assert_close(running[0].to_torch(), want_mean)
    torch.testing.assert_close(running[1].to_torch(), want_var)
    assert running[0].placements == (Shard(0),)


def test_a_copy_that_stands_for_a_view_reaches_what_it_views() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    t, want = dtorch.distribute_tensor(X, mesh, [Shard(0)]), X.clone()
    with dtorch.auto_redistribute():
        t[1].cumsum_(0)
    want[1].cumsum_(0)
    assert t.placements == (Shard(0),) and torch.equal(t.to_torch(), want)


def test_gradients_through_a_write_by_way_of_a_copy() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    plain = X.clone().requires_grad_()
    (plain * 2).cumsum_(0).square().sum().backward()
    leaf = dtorch.distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
    with dtorch.auto_redistribute():
        (leaf * 2).cumsum_(0).square().sum().backward()
    torch.testing.assert_close(leaf.grad.to_torch(), plain.grad)
    assert leaf.grad.placements == (Shard(0),)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_conjugates_are_resolved_wherever_the_call_runs(placement: Placement) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    z = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2 + 0j]])
    t = dtorch.distribute_tensor(z, mesh, [placement])
    assert torch.equal(t.conj().real.to_torch(), z.conj().real)
    assert torch.equal(t.conj().imag.to_torch(), z.conj().imag)
    assert torch.equal(
        torch.view_as_real(t.conj().resolve_conj()).to_torch(), torch.view_as_real(z.conj().resolve_conj())
    )
    with dtorch.auto_redistribute():
        got = torch.linalg.lstsq(
            dtorch.distribute_tensor(torch.cat([z, z]), mesh, [Replicate()]), torch.cat([t, t + 1j])
        )
    want = torch.linalg.lstsq(torch.cat([z, z]), torch.cat([z, z + 1j]))
    # The residuals: squared absolute values, which torch takes as a product with the conjugate.
    torch.testing.assert_close(got.residuals.to_torch(), want.residuals)


def test_a_write_to_a_conjugate_is_not_lost() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    z = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2 + 0j]])
    t = dtorch.distribute_tensor(z, mesh, [Shard(0)])
    writes: list[Callable[[Any], Any]] = [
        lambda z: z.conj().imag.mul_(2),
        lambda z: z.conj().add_(1),
        lambda z: z.mH.real.add_(1),
        lambda z: z.H[1:].mul_(2j),
    ]
    for write in writes:
        with pytest.raises(dtorch.PlacementError, match="would not reach"):
            write(t)
    assert torch.equal(t.to_torch(), z)
    stale = t.conj()
    t.add_(1)
    with pytest.raises(dtorch.PlacementError, match="out of date"):
        stale.sum()
    assert torch.equal(t.conj().clone().add_(1j).to_torch(), (z + 1).conj() + 1j)
    z.add_(1)
    with dtorch.auto_redistribute():
        for write in writes:
            write(t), write(z)
            torch.testing.assert_close(t.to_torch(), z)
            torch.testing.assert_close((stale + 0).to_torch(), z.conj() + 0)
