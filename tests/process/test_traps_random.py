"""Random values: those of torch on one device, whatever the mesh; different across shards, equal across replicas."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import PlacementError, Replicate, Shard, init_device_mesh
from dtorch.placement import Placement

from .traps import Function, held, plain_of, writes

PLACES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "one": ((1,), (Replicate(),)),
    "R": ((2,), (Replicate(),)),
    "S0": ((2,), (Shard(0),)),
    "S1": ((2,), (Shard(1),)),
    "R,R": ((2, 2), (Replicate(), Replicate())),
    "S1,S0": ((2, 2), (Shard(1), Shard(0))),
    "S0,S0": ((2, 2), (Shard(0), Shard(0))),
}
DRAWS: dict[str, Function] = {
    "dropout": lambda t: F.dropout(t, 0.5),
    "dropout in place": lambda t: F.dropout(t.clone(), 0.3, inplace=True),
    "dropout of nothing": lambda t: F.dropout(t, 0.0),
    "dropout of all": lambda t: F.dropout(t, 1.0),
    "native_dropout": lambda t: torch.native_dropout(t, 0.5, True),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.4, training=True),
    "feature_dropout": lambda t: torch.feature_dropout(t, 0.5, True),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.5, training=True),
    "dropout1d": lambda t: F.dropout1d(t[None], 0.5),
    "dropout2d": lambda t: F.dropout2d(t[None, :, :, None], 0.5),
    "dropout3d": lambda t: F.dropout3d(t[None, :, :, None, None], 0.5),
    "nn.Dropout": lambda t: torch.nn.Dropout(0.25)(t),
    "rrelu": lambda t: F.rrelu(t - 1.5, training=True),
    "rrelu_": lambda t: F.rrelu(t - 1.5, training=True, inplace=True),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t),
    "gumbel_softmax hard": lambda t: F.gumbel_softmax(t, hard=True),
    "bernoulli": lambda t: torch.bernoulli(t / 4),
    "bernoulli p": lambda t: t.bernoulli(0.5),
    "bernoulli_": lambda t: t.clone().bernoulli_(0.25),
    "bernoulli_ by a tensor": lambda t: t.clone().bernoulli_(torch.full(t.shape, 0.5)),
    "poisson": lambda t: torch.poisson(t),
    "_sample_dirichlet": lambda t: torch._sample_dirichlet(t + 0.1),
    "_standard_gamma": lambda t: torch._standard_gamma(t + 0.1),
    "binomial": lambda t: torch.binomial(t.ceil() * 3, torch.full(t.shape, 0.5)),
    "multinomial": lambda t: torch.multinomial(t + 0.1, 2),
    "multinomial replacing": lambda t: torch.multinomial(t + 0.1, 5, replacement=True),
    "normal": lambda t: torch.normal(t, 1.0),
    "normal of std": lambda t: torch.normal(0.0, t + 0.5),
    "normal of both": lambda t: torch.normal(t, t + 1),
    "normal_": lambda t: t.clone().normal_(1.0, 2.0),
    "uniform_": lambda t: t.clone().uniform_(-1, 1),
    "exponential_": lambda t: t.clone().exponential_(2.0),
    "log_normal_": lambda t: t.clone().log_normal_(),
    "cauchy_": lambda t: t.clone().cauchy_(),
    "geometric_": lambda t: t.clone().geometric_(0.3),
    "random_": lambda t: t.clone().random_(100),
    "random_ from": lambda t: t.clone().random_(-5, 5),
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like": lambda t: torch.randn_like(t),
    "randint_like": lambda t: torch.randint_like(t, 9),
    "randn_like a dtype": lambda t: torch.randn_like(t, dtype=torch.float64),
    "init.normal_": lambda t: torch.nn.init.normal_(t.clone()),
    "init.xavier_uniform_": lambda t: torch.nn.init.xavier_uniform_(t.clone()),
    "init.kaiming_normal_": lambda t: torch.nn.init.kaiming_normal_(t.clone()),
    "init.trunc_normal_": lambda t: torch.nn.init.trunc_normal_(t.clone()),
    "init.orthogonal_": lambda t: torch.nn.init.orthogonal_(t.clone()),
    "init.sparse_": lambda t: torch.nn.init.sparse_(t.clone(), 0.2),
    "transposed": lambda t: F.dropout(t.t(), 0.5),
    "of a slice": lambda t: F.dropout(t[:, 1:3], 0.5),
    "of a view written": lambda t: t.clone()[:, :2].uniform_(),
    "twice": lambda t: (F.dropout(t, 0.5), F.dropout(t, 0.5)),
    "attention": lambda t: F.scaled_dot_product_attention(t[:, None, None], t[:, None, None], t[:, None, None],
                                                          dropout_p=0.5),
    "fractional_max_pool": lambda t: F.fractional_max_pool2d(t[None, None].expand(1, 3, -1, -1), 2, (3, 3)),
}  # fmt: skip
ROUNDED = {"gumbel_softmax", "attention", "init.orthogonal_", "init.trunc_normal_", "log_normal_"}
# torch makes plain random tensors inside these: they are dtorch's in ``with dtorch.device_mesh(mesh)``.
INSIDE = {"init.sparse_", "fractional_max_pool"}


def _values(n: int = 6, m: int = 8) -> torch.Tensor:
    return torch.rand(n, m, generator=torch.Generator().manual_seed(1)) * 3


def _placed(plain: torch.Tensor, place: str) -> dtorch.Tensor:
    shape, placements = PLACES[place]
    return dtorch.distribute_tensor(plain, init_device_mesh("cpu", shape), placements)


def _check(name: str, place: str, n: int) -> str:
    """What is wrong with draw `name` on `place`, and with the draw that follows it; "" where nothing is."""
    f, plain = DRAWS[name], _values(n)
    ours = _placed(plain, place)
    torch.manual_seed(3)
    wanted = [f(plain), torch.rand(4)]
    for auto in (False, True):
        dtorch.manual_seed(3)
        try:
            inside = dtorch.device_mesh(ours.device_mesh) if name in INSIDE else contextlib.nullcontext()
            with dtorch.auto_redistribute(auto), inside:
                got = [f(ours), dtorch.rand(4)]
        except PlacementError as error:
            if auto and not writes(error):
                return str(error)
            continue
        try:
            close = {"rtol": 1e-5, "atol": 1e-6} if name in ROUNDED else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(plain_of(got), plain_of(wanted), check_stride=False, **close)
            made = got[0]
            if isinstance(made, dtorch.Tensor) and not made._spec.is_partial and not close["rtol"]:
                held(made, wanted[0])
        except AssertionError as error:
            return f"auto={auto}: {error}"
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", PLACES)
def test_draws_are_those_of_one_device(place: str) -> None:
    wrong = []
    for name in DRAWS:
        for n in (6, 5) if place == "S0" else (5,):
            text = _check(name, place, n)
            if text:
                wrong.append(f"{name} of {n} rows on {place}: {text}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)


FACTORIES: dict[str, Function] = {
    "rand": lambda lib, **at: lib.rand(6, 5, **at),
    "randn": lambda lib, **at: lib.randn(6, 5, **at),
    "randn of many": lambda lib, **at: lib.randn(32, 16, **at),
    "randn in float64": lambda lib, **at: lib.randn(6, 5, dtype=torch.float64, **at),
    "rand in half": lambda lib, **at: lib.rand(6, 5, dtype=torch.float16, **at),
    "randint": lambda lib, **at: lib.randint(3, 40, (6, 5), **at),
    "randperm": lambda lib, **at: lib.randperm(7, **at),
    "normal": lambda lib, **at: lib.normal(1.0, 2.0, (6, 5), **at),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_draw_what_one_device_draws(name: str, place: str) -> None:
    shape, placements = PLACES[place]
    if name == "randperm" and Shard(1) in placements:
        placements = tuple(Shard(0) if p == Shard(1) else p for p in placements)
    torch.manual_seed(5)
    wanted = [FACTORIES[name](torch), torch.rand(3)]
    dtorch.manual_seed(5)
    made = FACTORIES[name](dtorch, device_mesh=init_device_mesh("cpu", shape), placements=placements)
    held(made, wanted[0])
    assert torch.equal(dtorch.rand(3).to_torch(), wanted[1])


@pytest.mark.parametrize("place", ["R", "S0", "S1,S0"])
def test_a_mask_is_the_same_in_backward_and_when_it_is_recomputed(place: str) -> None:
    for checkpointed in (False, True):
        grads = []
        for lib, t in ((torch, _values()), (dtorch, _placed(_values(), place))):
            lib.manual_seed(9)
            t.requires_grad_()
            f = lambda x: F.dropout(F.dropout(x * 2, 0.5).sin(), 0.25)  # noqa: E731
            out = torch.utils.checkpoint.checkpoint(f, t, use_reentrant=False) if checkpointed else f(t)
            out.sum().backward()
            grads.append(t.grad)
        torch.testing.assert_close(plain_of(grads[1]), grads[0])


def test_draws_on_a_part_of_the_mesh_leave_the_rest_in_step() -> None:
    """Executors that took no part in a draw must not draw other values afterwards."""
    square, two = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2,))
    torch.manual_seed(2)
    dtorch.manual_seed(2)
    for mesh, placements in ((square, [Shard(0), Shard(1)]), (two, [Replicate()]), (square, [Replicate(), Shard(0)]),
                             (two, [Shard(1)]), (square, [Replicate(), Replicate()])):  # fmt: skip
        wanted = torch.rand(4, 4)
        held(dtorch.rand(4, 4, device_mesh=mesh, placements=placements), wanted)
        held(F.dropout(dtorch.distribute_tensor(wanted, mesh, placements), 0.5), F.dropout(wanted, 0.5))


@pytest.mark.parametrize("place", ["R", "S0", "S1,S0"])
def test_a_generator_of_ones_own_draws_what_it_draws_in_torch(place: str) -> None:
    draws: dict[str, Function] = {
        "bernoulli": lambda t, g: torch.bernoulli(t / 4, generator=g),
        "bernoulli_": lambda t, g: t.clone().bernoulli_(0.5, generator=g),
        "normal_": lambda t, g: t.clone().normal_(generator=g),
        "uniform_": lambda t, g: t.clone().uniform_(generator=g),
        "multinomial": lambda t, g: torch.multinomial(t + 0.1, 2, generator=g),
        "poisson": lambda t, g: torch.poisson(t, generator=g),
        "normal": lambda t, g: torch.normal(t, 1.0, generator=g),
    }
    for name, f in draws.items():
        mine, theirs = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
        wanted = f(_values(), theirs)
        with dtorch.auto_redistribute():
            got = f(_placed(_values(), place), mine)
        assert torch.equal(plain_of(got), wanted), name
        assert torch.equal(mine.get_state(), theirs.get_state()), name


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)], ids=str)
def test_normal_draws_in_packed_order_whatever_the_strides_of_its_means(placement: Placement) -> None:
    mesh = dtorch.init_device_mesh("cpu", (3,))
    mean, std = torch.randn(2, 4, 3).permute(2, 1, 0), torch.rand(2, 4, 3).permute(2, 1, 0)
    torch.manual_seed(3)
    want = torch.normal(mean, std)
    args = [dtorch.distribute_tensor(t, mesh, [placement]) for t in (mean, std)]
    dtorch.manual_seed(3)
    torch.testing.assert_close(torch.normal(*args).to_torch(), want)
