"""``F.linear`` of three dims: sharded batches, even or not, and sharded sequences run where they lie."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import PlacementError, Replicate, Shard, nn

R, S = Replicate(), Shard


@pytest.mark.parametrize("batch", [4, 3, 1])
@pytest.mark.parametrize("auto", [False, True])
def test_values_and_gradients_on_every_placement(batch: int, auto: bool) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    plain = [torch.randn(*s).requires_grad_() for s in ((batch, 5, 8), (6, 8), (6,))]
    F.linear(*plain).square().sum().backward()
    for combo in itertools.product((R, S(0), S(1), S(2)), (R, S(0), S(1)), (R, S(0))):
        args = [dtorch.distribute_tensor(t.detach(), mesh, [p]) for t, p in zip(plain, combo, strict=True)]
        args = [t.requires_grad_() for t in args]
        try:
            with dtorch.auto_redistribute(auto):
                F.linear(*args).square().sum().backward()
        except PlacementError:
            # The weight Replicate, the input's rows wherever they are: data and sequence parallelism need no word more.
            assert not auto and not (combo[1:] == (R, R) and combo[0] != S(2)), combo
            continue
        for t, want in zip(args, plain, strict=True):
            torch.testing.assert_close(t.grad.to_torch(), want.grad, rtol=1e-4, atol=1e-4)


def test_a_model_trains_on_a_batch_that_the_ranks_do_not_divide() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    x, y = torch.randn(3, 5, 8), torch.randint(0, 4, (3, 5))
    want = F.cross_entropy(model(x).transpose(1, 2), y)
    want.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with dtorch.device_mesh(mesh):
        ours = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    ours.load_state_dict(model.state_dict())
    xs, ys = (dtorch.distribute_tensor(t, mesh, [S(0)]) for t in (x, y))
    loss = F.cross_entropy(ours(xs).transpose(1, 2), ys)
    loss.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    for p, want_grad in zip(ours.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad.to_torch(), want_grad, rtol=1e-4, atol=1e-5)
