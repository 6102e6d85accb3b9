"""What torch refuses of a whole tensor is refused of a sharded one, in the same words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.placement import Placement

PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize(
    ("dtype", "shape", "call"),
    [
        (torch.int64, (6, 5), lambda t: t.std()),
        (torch.uint8, (6, 5), lambda t: t.var(0)),
        (torch.bool, (6, 5), lambda t: torch.var_mean(t, 1)),
        (torch.bool, (6, 5), lambda t: t.argmax()),
        (torch.bool, (6, 5), lambda t: t.argmin(1)),
        (torch.complex64, (6, 5), lambda t: t.argmax(0)),
        (torch.float32, (0, 5), lambda t: t.max()),
        (torch.float32, (0, 5), lambda t: t.min()),
    ],
)
def test_reductions(
    dtype: torch.dtype, shape: tuple[int, ...], call: Callable[[torch.Tensor], torch.Tensor], placement: Placement
) -> None:
    plain = torch.ones(shape).to(dtype)
    t = dtorch.distribute_tensor(plain, init_device_mesh("cpu", 2), [placement])
    with pytest.raises(RuntimeError) as wanted:
        call(plain)
    with pytest.raises(RuntimeError) as got:
        found = call(t)
        (found[0] if isinstance(found, tuple) else found).to_torch()
    assert str(got.value).partition("\n")[0] == str(wanted.value)


@pytest.mark.parametrize("dim", [0, 1])
def test_logsumexp_of_complex_numbers(dim: int) -> None:
    plain = torch.complex(torch.arange(30.0).reshape(6, 5), torch.ones(6, 5))
    t = dtorch.distribute_tensor(plain, init_device_mesh("cpu", 2), [Shard(0)])
    with dtorch.auto_redistribute():
        assert torch.allclose(t.logsumexp(dim).to_torch(), plain.logsumexp(dim))


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    "call",
    [
        torch.linalg.inv,
        torch.linalg.cholesky,
        lambda t: torch.linalg.solve(t, torch.ones(2, 1)),
        lambda t: torch.linalg.lu_solve(*torch.linalg.lu_factor(t), torch.ones(2, 1)),
    ],
    ids=["inv", "cholesky", "solve", "lu"],
)
def test_singular_matrices(call: Callable[[torch.Tensor], torch.Tensor], batch: tuple[int, ...]) -> None:
    """Raised by the call itself: its result is not to be had without."""
    plain = torch.zeros(*batch, 2, 2)
    with pytest.raises(RuntimeError) as wanted:
        call(plain)
    with pytest.raises(type(wanted.value)) as got:
        call(dtorch.zeros(*batch, 2, 2, device_mesh=init_device_mesh("cpu", 2)))
    assert str(got.value).partition("\n")[0] == str(wanted.value).partition("\n")[0]
