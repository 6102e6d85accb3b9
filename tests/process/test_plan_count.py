"""The number of plans: flat in a loop whose numbers change every step, bounded where a number is in the key.

And what must not be confused, though Python calls it equal: 1 and True, 0.0 and -0.0, dim 0 and dim 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtorch.runtime import moves, plans
from dtorch.runtime.client import client
from dtorch.testing import assert_close

from ..soak.sizes import sizes_of_executors

X = torch.arange(48.0).reshape(8, 6) / 16 + 0.25


def count() -> int:
    """Plans of all operators."""
    return sum(len(op.plans) for op in plans._known)


def place(t: torch.Tensor, where: Placement | None) -> Any:
    if where is None:
        return dtorch.from_torch(t)
    mesh = init_device_mesh("cpu", 2)
    if isinstance(where, Partial):
        return distribute_tensor(t, mesh, [Replicate()]).redistribute(placements=[where])
    return distribute_tensor(t, mesh, [where])


PLACES = [None, Replicate(), Shard(0), Shard(1), Partial()]

# What a step i = 1, 2, … does with a tensor, another like it, and a mask.
Step = Callable[[Any, Any, Any, int], Any]
LINEAR: dict[str, Step] = {
    "t * i": lambda t, u, m, i: t * i,
    "t * 0.1i": lambda t, u, m, i: t * (0.1 * i),
    "t / i": lambda t, u, m, i: t / i,
    "t + 0.1i": lambda t, u, m, i: t + 0.1 * i,
    "i - t": lambda t, u, m, i: i - t,
    "add alpha": lambda t, u, m, i: torch.add(t, u, alpha=i),
    "sub alpha": lambda t, u, m, i: torch.sub(t, u, alpha=0.1 * i),
    "lerp": lambda t, u, m, i: torch.lerp(t, u, 0.01 * i),
    "mul_": lambda t, u, m, i: t.clone().mul_(0.1 * i),
    "fill_": lambda t, u, m, i: t.clone().fill_(i),
    "full_like": lambda t, u, m, i: torch.full_like(t, 0.1 * i),
    "foreach add": lambda t, u, m, i: torch._foreach_add([t, u], 0.1 * i)[0],
    "foreach mul list": lambda t, u, m, i: torch._foreach_mul([t, u], [0.1 * i, 0.2 * i])[1],
    "foreach alpha": lambda t, u, m, i: torch._foreach_sub([t, u], [u, t], alpha=i)[0],
    "foreach lerp": lambda t, u, m, i: torch._foreach_lerp([t], [u], 0.01 * i)[0],
}
OTHERS: dict[str, Step] = {
    "t ** i": lambda t, u, m, i: t ** (1 + i % 4),
    "i ** t": lambda t, u, m, i: i**t,
    "t // i": lambda t, u, m, i: t // i,
    "t % i": lambda t, u, m, i: t % i,
    "i / t": lambda t, u, m, i: i / t,
    "t > i": lambda t, u, m, i: t > 0.1 * i,
    "t == i": lambda t, u, m, i: t == i,
    "clamp": lambda t, u, m, i: t.clamp(-i, 0.1 * i),
    "clamp_min": lambda t, u, m, i: t.clamp_min(0.1 * i),
    "masked_fill": lambda t, u, m, i: t.masked_fill(m, 0.1 * i),
    "where": lambda t, u, m, i: torch.where(m, t, 2.0 * i),
    "where of numbers": lambda t, u, m, i: torch.where(m, 2.0 * i, 0.5 * i),
    "addcmul": lambda t, u, m, i: torch.addcmul(t, u, u, value=0.1 * i),
    "addcdiv": lambda t, u, m, i: torch.addcdiv(t, u, u, value=i),
    "foreach addcdiv": lambda t, u, m, i: torch._foreach_addcdiv([t], [u], [u], [0.1 * i])[0],
    "foreach pow": lambda t, u, m, i: torch._foreach_pow([t, u], 1 + i % 4)[1],
    "foreach clamp": lambda t, u, m, i: torch._foreach_clamp_min([t, u], 0.1 * i)[0],
    "leaky_relu": lambda t, u, m, i: F.leaky_relu(t, 0.01 * i),
    "softplus": lambda t, u, m, i: F.softplus(t, i),
    "hardtanh": lambda t, u, m, i: F.hardtanh(t, -i, i),
    "threshold": lambda t, u, m, i: F.threshold(t, 0.1 * i, i),
    "nan_to_num": lambda t, u, m, i: torch.nan_to_num(t, 0.1 * i, i, -i),
    "xlogy": lambda t, u, m, i: torch.xlogy(t, i),
    "huber_loss": lambda t, u, m, i: F.huber_loss(t, u, delta=0.1 * i),
    "index_fill": lambda t, u, m, i: t.index_fill(1, torch.tensor([0]), 0.1 * i),
    "group_norm eps": lambda t, u, m, i: F.group_norm(t, 2, eps=0.1 * i),
    "layer_norm eps": lambda t, u, m, i: F.layer_norm(t, (6,), eps=0.1 * i),
    "batch_norm": lambda t, u, m, i: F.batch_norm(t, None, None, training=True, momentum=0.01 * i, eps=0.1 * i),
    "attention scale": lambda t, u, m, i: F.scaled_dot_product_attention(*[t.view(8, 1, 1, 6)] * 3, scale=0.1 * i),
    "pad value": lambda t, u, m, i: F.pad(t.view(8, 1, 6), (0, 0, 1, 1), value=0.1 * i),
    "of a tensor": lambda t, u, m, i: t * torch.tensor(0.1 * i),
    "index": lambda t, u, m, i: t[torch.tensor([i % 8])],
    "clip_grad_norm": lambda t, u, m, i: _clipped(t, 0.1 * i),
}


# Norms and attention need whole rows, an index the whole of what it counts.
REFUSED: dict[str, list[Placement]] = {
    "layer_norm eps": [Shard(1)],
    "group_norm eps": [Shard(1)],
    "attention scale": [Shard(1)],
    "index_fill": [Shard(1)],
    "index": [Shard(0)],
}


def _clipped(t: Any, norm: float) -> Any:
    p = nn.Parameter(t.detach().clone())
    p.grad = t.detach().clone()
    nn.utils.clip_grad_norm_([p], norm)
    return p.grad


def steps(where: Placement | None) -> Iterator[tuple[str, Step]]:
    yield from LINEAR.items()
    if where == Partial():
        return
    for name, step in OTHERS.items():
        if where not in REFUSED.get(name, ()):
            yield name, step


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_numbers_that_change_make_no_plans(where: Placement | None) -> None:
    t, u = place(X, where), place(X * 2 + 1, where)
    mask = X > 1
    m = place(mask, None if where is None else Replicate() if where == Partial() else where)
    for name, step in steps(where):
        for i in (1, 2):
            step(t, u, m, i)
        before = count()
        for i in range(3, 9):
            got, want = step(t, u, m, i), step(X, X * 2 + 1, mask, i)
            assert_close(got.to_torch(), want, msg=lambda text, name=name: f"{name}: {text}")
        assert count() == before, f"{name} makes a plan at every step"


def test_factories_of_a_number_make_no_plans() -> None:
    mesh = init_device_mesh("cpu", 2)
    made = [
        lambda i: dtorch.full((4,), 0.1 * i),
        lambda i: dtorch.full((4,), 0.1 * i, device_mesh=mesh, placements=[Shard(0)]),
        lambda i: dtorch.ones(4).new_full((2,), i * 0.1),
    ]
    for make in made:
        make(1)
        before = count()
        for i in range(2, 8):
            assert_close(make(i).to_torch()[0], torch.tensor(0.1 * i))
        assert count() == before


@pytest.mark.parametrize("where", [None, Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("fused", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_training_step_makes_no_plans_after_the_first_ones(where: Placement | None, fused: dict[str, Any]) -> None:
    """Learning rate, step count, clip norm, loss scale and dropout all change, or draw, at every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 4))
    if where is not None:
        model.to(init_device_mesh("cpu", 2))
    else:
        model = model.to(dtorch.DeviceMesh("cpu", [0]))
    optimizer = dtorch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    x, target = place(X, where), place(torch.arange(8) % 4, where)
    seen = []
    for k in range(9):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target) * (1 + 0.1 * k)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 + 0.1 * k)
        optimizer.step()
        schedule.step()
        seen.append(count())
    assert seen[3:] == [seen[3]] * 6, seen
    assert math.isfinite(loss.item())


# ---- numbers that are in the key ------------------------------------------------------------------------


def test_positions_make_plans_that_are_dropped() -> None:
    """t[i] and t[i:i+4] have a plan for each i: as many as the cache holds, here and on the executors."""
    t = dtorch.arange(400)
    bound = client().config.plan_cache
    object.__setattr__(client().config, "plan_cache", 16)
    try:
        op = dtorch.runtime.dispatch.operator(torch.ops.aten.select.int)
        for _ in range(2):
            for i in range(100):
                assert t[i].item() == i
                assert t[i : i + 4].sum().item() == 4 * i + 6
                assert dtorch.arange(i, i + 4).sum().item() == 4 * i + 6
                assert len(op.plans) <= 16
    finally:
        object.__setattr__(client().config, "plan_cache", bound)


def test_plans_of_uploads_fetches_and_moves_are_bounded() -> None:
    mesh = init_device_mesh("cpu", 2)
    c = client()
    bound = c.config.plan_cache
    object.__setattr__(c.config, "plan_cache", 16)
    try:
        for n in [*range(100, 200), *range(100, 110)]:
            x = torch.arange(float(n))
            there = distribute_tensor(x, mesh, [Shard(0)])
            pieces = dtorch.DTensor.from_local([x, x], mesh, [Shard(0)], shape=(2 * n,))
            assert there.redistribute(placements=[Replicate()]).to_torch().equal(x)
            assert there.to_local(0).equal(x[: -(-n // 2)]) and pieces.to_local(1).equal(x)
        for plans_of in (c.values._uploads, c.values._piecewise, c.values._fetches, moves._moves):
            assert 0 < len(plans_of) <= 16
        defined = sizes_of_executors(mesh)[0].plans
        for n in range(200, 300):
            distribute_tensor(torch.ones(n), mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_torch()
        assert sizes_of_executors(mesh)[0].plans <= defined + 16  # executors forget them too, a quarter behind
    finally:
        object.__setattr__(c.config, "plan_cache", bound)


def test_views_that_are_in_use_outlive_their_plans() -> None:
    t = dtorch.zeros(64)
    bound = client().config.plan_cache
    object.__setattr__(client().config, "plan_cache", 4)
    try:
        rows = [t[i : i + 2] for i in range(60)]
        for i, row in enumerate(rows):
            row += i
        want = torch.zeros(64)
        for i in range(60):
            want[i : i + 2] += i
        assert_close(t.to_torch(), want)
    finally:
        object.__setattr__(client().config, "plan_cache", bound)


# ---- what must not be confused ------------------------------------------------------------------------------

SAME: dict[str, list[Callable[[Any], Any]]] = {
    "dims": [lambda t: t.sum([0]), lambda t: t.sum([1]), lambda t: t.sum([0, 1]), lambda t: t.sum([-1])],
    "int, bool, float": [lambda t: t.int() + 1, lambda t: t.int() + True, lambda t: t.int() + 1.0],
    "bool of bools": [lambda t: (t > 1) * True, lambda t: (t > 1) * 1, lambda t: (t > 1) * 1.0],
    "keepdim": [lambda t: t.sum(0, True), lambda t: t.sum(0, False)],
    "zeros": [lambda t: t * 0.0, lambda t: t * -0.0, lambda t: 1 / (t * -0.0), lambda t: torch.copysign(t, -0.0)],
    "copysign": [lambda t: torch.copysign(t, 0.0), lambda t: torch.copysign(t, -0.0)],
    "full": [lambda t: torch.full_like(t, 0.0), lambda t: torch.full_like(t, -0.0), lambda t: torch.full_like(t, 1)],
    "new_full": [lambda t: t.new_full((2,), 1), lambda t: t.new_full((2,), True), lambda t: t.new_full((2,), 1.5)],
    "not numbers": [
        lambda t: t * math.nan,
        lambda t: t * math.inf,
        lambda t: t * -math.inf,
        lambda t: t.clamp(max=math.inf),
        lambda t: t.clamp(max=-math.inf),
    ],
    "nan_to_num": [lambda t: (t / 0).nan_to_num(posinf=0.0), lambda t: (t / 0).nan_to_num(posinf=-0.0)],
    "pow": [lambda t: t**2, lambda t: t**2.0, lambda t: t**True, lambda t: t.int() ** 2, lambda t: t.int() ** 2.0],
    "large": [lambda t: t.long() + (1 << 62), lambda t: t.long() + float(1 << 62), lambda t: t.long() * (1 << 40)],
    "norms": [lambda t: t.norm(p=1), lambda t: t.norm(p=2.0), lambda t: t.norm(p=math.inf), lambda t: t.norm(p=-1)],
    "eps": [lambda t: F.layer_norm(t, (6,), eps=0.0), lambda t: F.layer_norm(t, (6,), eps=1.0)],
    "where": [
        lambda t: torch.where(t > 1, 1, 0),
        lambda t: torch.where(t > 1, 1.0, 0.0),
        lambda t: torch.where(t > 1, True, False),
    ],
    "rounding": [lambda t: t.round(decimals=0), lambda t: t.round(decimals=1), lambda t: t.round()],
}  # fmt: skip


@pytest.mark.parametrize("where", [None, Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("kind", SAME)
def test_equal_arguments_of_different_meaning_have_different_plans(kind: str, where: Placement | None) -> None:
    t = place(X, where)
    for order in (1, -1):
        for k, call in enumerate(SAME[kind][::order]):
            got, want = call(t).to_torch(), call(X)
            assert got.dtype == want.dtype, (kind, k)
            assert_close(got, want, equal_nan=True)
            if want.is_floating_point():
                assert torch.equal(got.signbit(), want.signbit()), (kind, k, "a zero of the other sign")
