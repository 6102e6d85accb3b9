"""Random numbers depend on the seed and the global index, never on the mesh: they are torch's, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard, init_device_mesh

R, S = Replicate(), Shard
ONE, TWO = DeviceMesh("cpu"), init_device_mesh("cpu", 2)
GRID = init_device_mesh("cpu", (2, 2))
OTHER = DeviceMesh("cpu", [1])

# Shapes: small and large (drawn in slices), uneven and empty shards, a tail that is no multiple of 16.
SHAPES = [(5, 3), (3, 16), (1, 7), (130, 129), (64, 512)]
PLACED = [
    (ONE, [R]),
    (TWO, [R]),
    (TWO, [S(0)]),
    (TWO, [S(1)]),
    (GRID, [S(0), S(1)]),
    (GRID, [S(0), S(0)]),
    (GRID, [R, S(1)]),
]

FACTORIES: dict[str, Callable[..., Any]] = {
    "rand": lambda lib, shape, **where: lib.rand(shape, **where),
    "randn": lambda lib, shape, **where: lib.randn(shape, **where),
    "randn float64": lambda lib, shape, **where: lib.randn(*shape, dtype=torch.float64, **where),
    "randint": lambda lib, shape, **where: lib.randint(-3, 1000, shape, **where),
}
FILLS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda t: t.normal_(1, 2),
    "uniform_": lambda t: t.uniform_(-1, 3),
    "exponential_": lambda t: t.exponential_(0.5),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "random_": lambda t: t.random_(2, 90),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "geometric_": lambda t: t.geometric_(0.2),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.3),
    "bernoulli": lambda t: torch.bernoulli(t),
    "normal": lambda t: torch.normal(t, 0.5),
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like": lambda t: torch.randn_like(t),
    "randint_like": lambda t: torch.randint_like(t, 100),
}


def seeded(seed: int = 11) -> None:
    torch.manual_seed(seed)
    dtorch.manual_seed(seed)


def states_agree() -> None:
    """The executors' generator stands where torch's does."""
    assert torch.equal(dtorch.get_rng_state(), torch.get_rng_state())


@pytest.mark.parametrize(("mesh", "placements"), PLACED, ids=str)
def test_factories(mesh: DeviceMesh, placements: list[Any]) -> None:
    seeded()
    for shape in SHAPES:
        for name, make in FACTORIES.items():
            made = make(dtorch, shape, device_mesh=mesh, placements=placements)
            assert made.placements == placements
            assert torch.equal(made.to_torch(), make(torch, shape)), (name, shape)
        n = shape[0] * shape[1]
        made = dtorch.randperm(n, device_mesh=mesh, placements=[S(0) if p == S(0) else R for p in placements])
        assert torch.equal(made.to_torch(), torch.randperm(n))
    states_agree()


@pytest.mark.parametrize(("mesh", "placements"), PLACED, ids=str)
def test_fills_and_functions(mesh: DeviceMesh, placements: list[Any]) -> None:
    seeded()
    for shape in SHAPES:
        for name, fill in FILLS.items():
            x = torch.rand(shape, generator=torch.Generator().manual_seed(1))
            got = fill(dtorch.distribute_tensor(x, mesh, placements))
            assert got.placements == placements, name
            assert torch.equal(got.to_torch(), fill(x.clone())), (name, shape)
        if S(1) not in placements:
            for replacement in (False, True):
                x = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
                got = torch.multinomial(dtorch.distribute_tensor(x, mesh, placements), 2, replacement)
                assert torch.equal(got.to_torch(), torch.multinomial(x, 2, replacement)), shape
    states_agree()


def test_other_memory_orders() -> None:
    """Draws follow the strides of the global tensor."""
    seeded()
    for placements in ([S(0)], [S(1)]):
        x = torch.zeros(40, 500)
        t = dtorch.distribute_tensor(x, TWO, placements)
        for fill in (lambda t: t.uniform_(), lambda t: t.normal_(), lambda t: t.exponential_()):
            fill(x.T)
            fill(t.T)
            assert torch.equal(t.to_torch(), x)
    states_agree()


def test_a_partial_tensor() -> None:
    t = dtorch.ones(4, 4, device_mesh=TWO, placements=[Partial()])
    seeded()
    assert torch.equal(torch.rand_like(t).to_torch(), torch.rand(4, 4))
    assert torch.equal(
        torch.nn.functional.dropout(t, 0.5).to_torch(), torch.nn.functional.dropout(torch.ones(4, 4), 0.5)
    )
    with pytest.raises(PlacementError):
        t.normal_()
    with pytest.raises(PlacementError, match="its ranks hold summands"):
        t.normal_(generator=torch.Generator())


def test_executors_agree_again_after_a_part_of_them_drew() -> None:
    seeded()
    for mesh in (ONE, TWO, OTHER, GRID, OTHER, DeviceMesh("cpu", [3, 0, 1]), ONE, OTHER, TWO):
        got = dtorch.rand(7, device_mesh=mesh, placements=[S(0), *[R] * (mesh.ndim - 1)])
        assert torch.equal(got.to_torch(), torch.rand(7)), mesh
        x = dtorch.ones(9, device_mesh=mesh)
        assert torch.equal(torch.nn.functional.dropout(x).to_torch(), torch.nn.functional.dropout(torch.ones(9)))
    states_agree()


def test_states_go_round() -> None:
    seeded(3)
    dtorch.rand(5, device_mesh=OTHER)
    state = dtorch.get_rng_state()
    first = dtorch.randn(20, device_mesh=TWO, placements=[S(0)]).to_torch()
    dtorch.set_rng_state(state)
    assert torch.equal(dtorch.randn(20, device_mesh=OTHER).to_torch(), first)
    # A state of torch's own generator is one too.
    dtorch.set_rng_state(torch.Generator().manual_seed(5).get_state())
    expected = torch.randn(20, generator=torch.Generator().manual_seed(5))
    assert torch.equal(dtorch.randn(20, device_mesh=GRID, placements=[R, S(0)]).to_torch(), expected)


def test_fork_rng() -> None:
    seeded()
    dtorch.rand(3)
    torch.rand(3)
    with dtorch.random.fork_rng():
        dtorch.manual_seed(1)
        dtorch.rand(100, device_mesh=TWO)
    with dtorch.random.fork_rng(enabled=False):
        pass
    assert torch.equal(dtorch.rand(5, device_mesh=TWO).to_torch(), torch.rand(5))
    states_agree()


def test_seed_and_initial_seed() -> None:
    seed = dtorch.seed()
    assert dtorch.initial_seed() == seed == torch.initial_seed()
    assert torch.equal(dtorch.rand(4, device_mesh=TWO).to_torch(), torch.rand(4))
    dtorch.manual_seed(-1)
    torch.manual_seed(-1)
    assert torch.equal(dtorch.rand(4).to_torch(), torch.rand(4))


@pytest.mark.parametrize(("mesh", "placements"), PLACED, ids=str)
def test_a_generator_of_ones_own(mesh: DeviceMesh, placements: list[Any]) -> None:
    seeded()
    where = {"device_mesh": mesh, "placements": placements}
    mine, theirs = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for _ in range(2):
        pairs = [
            (dtorch.rand(5, 3, generator=mine, **where), torch.rand(5, 3, generator=theirs)),
            (dtorch.randn(5, 3, generator=mine, **where), torch.randn(5, 3, generator=theirs)),
            (dtorch.randint(9, (5, 3), generator=mine, **where), torch.randint(9, (5, 3), generator=theirs)),
        ]
        x = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
        for call in (
            lambda t, g: t.normal_(generator=g),
            lambda t, g: t.uniform_(1, 2, generator=g),
            lambda t, g: t.T.exponential_(generator=g).T,
            lambda t, g: t.bernoulli_(0.4, generator=g),
            lambda t, g: torch.bernoulli(t, generator=g),
            lambda t, g: torch.normal(t, 1.0, generator=g),
            lambda t, g: torch.poisson(t, generator=g),
            lambda t, g: torch.nn.init.kaiming_uniform_(t, generator=g),
        ):
            t, plain = dtorch.distribute_tensor(x, mesh, placements), x.clone()
            got = call(t, mine)
            assert got.placements == placements
            pairs.append((got, call(plain, theirs)))
            pairs.append((t, plain))
        got = torch.multinomial(dtorch.distribute_tensor(x, mesh, placements), 4, True, generator=mine)
        pairs.append((got, torch.multinomial(x, 4, True, generator=theirs)))
        for got, expected in pairs:
            assert torch.equal(got.to_torch(), expected)
        assert torch.equal(mine.get_state(), theirs.get_state())
    states_agree()
