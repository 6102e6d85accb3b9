"""Partials: every operator with a constant term, which only one rank may add; and sums of half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh

from .programs import Program
from .traps import Function, claim, claims, mixed, place, rows, same, summands

KINDS = ["sum", "avg", "max", "min"]
other = mixed(3, 4) * 0.5 + 1
cond = other > 1

CONSTANTS: dict[str, Function] = {
    "add": lambda t: t + 2.0,
    "add alpha": lambda t: torch.add(t, 3, alpha=-2),
    "add_": lambda t: t.clone().add_(2.0),
    "radd": lambda t: 2 + t,
    "add a constant": lambda t: t + torch.tensor(2.0),
    "add plain": lambda t: t + other,
    "add row": lambda t: t + other[0],
    "sub": lambda t: t - 1.5,
    "sub_": lambda t: t.clone().sub_(1.5, alpha=2),
    "rsub": lambda t: 1 - t,
    "rsub alpha": lambda t: torch.rsub(t, 1.5, alpha=-2),
    "mul": lambda t: t * -2.0,
    "mul 0": lambda t: t * 0.0,
    "mul plain": lambda t: t * other,
    "div": lambda t: t / -4.0,
    "div floor": lambda t: torch.div(t, 3, rounding_mode="floor"),
    "rdiv": lambda t: 1.0 / t,
    "floor_divide": lambda t: t // 2,
    "remainder": lambda t: t % 3,
    "fmod": lambda t: t.fmod(3),
    "neg": torch.neg,
    "positive": torch.positive,
    "pow 2": lambda t: t**2,
    "pow 1": lambda t: t**1,
    "pow 0": lambda t: t**0,
    "rpow": lambda t: 1.25**t,
    "square": torch.square,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil_": lambda t: t.clone().ceil_(),
    "round": torch.round,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "erfc": torch.erfc,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "relu": torch.relu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "threshold": lambda t: F.threshold(t, 0.5, 20.0),
    "leaky_relu": lambda t: F.leaky_relu(t, 0.1),
    "leaky_relu down": lambda t: F.leaky_relu(t, -0.1),
    "elu": F.elu,
    "prelu": lambda t: F.prelu(t, torch.tensor([-0.5], dtype=t.dtype)),
    "clamp": lambda t: t.clamp(-1, 2),
    "clamp_min": lambda t: t.clamp_min(0.5),
    "clamp_max_": lambda t: t.clone().clamp_max_(0.5),
    "clamp by tensors": lambda t: t.clamp(other - 2, other),
    "maximum": lambda t: torch.maximum(t, other),
    "minimum": lambda t: torch.minimum(other, t),
    "fmax": lambda t: torch.fmax(t, other),
    "where": lambda t: torch.where(cond, t, 0.0),
    "where itself": lambda t: torch.where(t > 1, t, -t),
    "where constant first": lambda t: torch.where(cond, 2.0, t),
    "masked_fill": lambda t: t.masked_fill(cond, 5.0),
    "masked_fill 0": lambda t: t.masked_fill(cond, 0.0),
    "masked_fill_": lambda t: t.clone().masked_fill_(cond, 5.0),
    "masked_scatter": lambda t: t.masked_scatter(cond, other),
    "nan_to_num": lambda t: torch.nan_to_num(t, 3.0, 2.0, 1.0),
    "addcmul": lambda t: torch.addcmul(t, other, other, value=0.5),
    "addcmul of it": lambda t: torch.addcmul(other, t, other),
    "addcdiv": lambda t: torch.addcdiv(t, other, other + 20, value=3),
    "addcdiv by it": lambda t: torch.addcdiv(other, other, t),
    "lerp": lambda t: torch.lerp(t, other, 0.3),
    "lerp to it": lambda t: torch.lerp(other, t, 0.3),
    "lerp by it": lambda t: torch.lerp(other, other * 2, t),
    "xlogy": lambda t: torch.xlogy(other.abs(), t.abs() + 1),
    "hypot": lambda t: torch.hypot(t, other),
    "atan2": lambda t: torch.atan2(t, other),
    "eq": lambda t: t == 1.25,
    "gt": lambda t: t > 0,
    "logical_not": torch.logical_not,
    "isnan": torch.isnan,
    "signbit": torch.signbit,
    "with itself": lambda t: t + t,
    "minus itself": lambda t: t - t,
    "times itself": lambda t: t * t,
    "to int": lambda t: t.to(torch.int64),
    "to bool": lambda t: t.bool(),
    "to complex": lambda t: t.to(torch.complex128),
}
MAKERS: dict[str, Function] = {
    "fill_": lambda t: t.clone().fill_(3),
    "fill": lambda t: torch.fill(t, 3.0),
    "zero_": lambda t: t.clone().zero_(),
    "copy_": lambda t: t.clone().copy_(other),
    "copy_ of it": lambda t: torch.zeros_like(t).copy_(t),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda t: torch.full_like(t, 4.5),
    "empty_like then fill": lambda t: torch.empty_like(t).fill_(2),
    "new_zeros": lambda t: t.new_zeros(3, 4),
    "new_ones": lambda t: t.new_ones(3, 4) + t,
    "new_full": lambda t: t.new_full((3, 4), 2.5),
    "new_tensor": lambda t: t.new_tensor([1.0, 2.0]),
    "new_empty then fill": lambda t: t.new_empty(3, 4).fill_(1),
    "tril": torch.tril,
    "triu": lambda t: t.triu(-1),
    "diag": torch.diag,
    "diag_embed": torch.diag_embed,
    "fill_diagonal_": lambda t: t.clone().fill_diagonal_(9.0),
    "pad": lambda t: F.pad(t, (1, 1), value=2.0),
    "pad 0": lambda t: F.pad(t, (1, 0, 0, 2)),
    "constant_pad_nd": lambda t: torch.constant_pad_nd(t, (1, 2), 3.0),
    "cat with ones": lambda t: torch.cat([t, torch.ones(1, 4, dtype=t.dtype)]),
    "stack with ones": lambda t: torch.stack([t, torch.ones_like(t)]),
    "index_fill": lambda t: t.index_fill(0, torch.tensor([1]), 5.0),
    "index_add": lambda t: t.index_add(0, torch.tensor([1]), torch.ones(1, 4, dtype=t.dtype)),
    "index_copy": lambda t: t.index_copy(0, torch.tensor([1]), torch.ones(1, 4, dtype=t.dtype)),
    "index_put": lambda t: t.index_put((torch.tensor([1]),), torch.tensor(5.0, dtype=t.dtype)),
    "setitem": lambda t: _with_row(t.clone()),
    "scatter": lambda t: t.scatter(0, torch.zeros(1, 4, dtype=torch.int64), 7.0),
    "scatter_add": lambda t: t.scatter_add(0, torch.zeros(1, 4, dtype=torch.int64), other),
    "scatter_reduce": lambda t: t.scatter_reduce(0, torch.zeros(1, 4, dtype=torch.int64), other, "amax"),
    "slice_scatter": lambda t: t.slice_scatter(torch.ones(1, 4, dtype=t.dtype), 0, 1, 2),
    "select_scatter": lambda t: t.select_scatter(torch.ones(4, dtype=t.dtype), 0, 1),
    "put": lambda t: t.put(torch.tensor([1, 2]), torch.ones(2, dtype=t.dtype)),
    "repeat": lambda t: t.repeat(2, 1),
    "expand": lambda t: t[:, None].expand(3, 2, 4),
    "unfold": lambda t: t.unfold(1, 2, 1),
    "flip": lambda t: t.flip(0),
    "slice": lambda t: t[1:, ::2],
    "view": lambda t: t.view(2, 6),
    "embedding of it": lambda t: F.embedding(torch.tensor([0, 2]), t),
    "embedding padded": lambda t: F.embedding(torch.tensor([0, 2]), t, padding_idx=0),
}
REDUCERS: dict[str, Function] = {
    "sum": torch.sum,
    "mean": lambda t: t.mean(1),
    "prod": torch.prod,
    "max": torch.max,
    "max dim": lambda t: t.max(0),
    "amin": lambda t: t.amin(0),
    "aminmax": torch.aminmax,
    "argmax": torch.argmax,
    "any": torch.any,
    "count_nonzero": torch.count_nonzero,
    "norm": torch.linalg.vector_norm,
    "norm 1": lambda t: t.norm(1),
    "var": torch.var,
    "std": lambda t: t.std(0),
    "var_mean": torch.var_mean,
    "logsumexp": lambda t: t.logsumexp(0),
    "softmax": lambda t: t.softmax(-1),
    "cumsum": lambda t: t.cumsum(0),
    "cumprod": lambda t: t.cumprod(0),
    "cummax": lambda t: t.cummax(0),
    "sort": lambda t: t.sort(),
    "topk": lambda t: t.topk(2),
    "median": torch.median,
    "addmm": lambda t: torch.addmm(other[:, :3], t, other.t()),
    "addmm to it": lambda t: torch.addmm(t, other, torch.eye(4, dtype=t.dtype), beta=0.5, alpha=2),
    "addmv": lambda t: torch.addmv(other[:, 0], t, other[0]),
    "addr": lambda t: torch.addr(t, other[:, 0], other[0]),
    "baddbmm": lambda t: torch.baddbmm(t[None], other[None], torch.eye(4, dtype=t.dtype)[None]),
    "mm": lambda t: t @ other.t(),
    "mm with itself": lambda t: t @ t.t(),
    "linear": lambda t: F.linear(t, other, other[:, 0].contiguous()),
    "linear by it": lambda t: F.linear(other, t, other[:, 0].contiguous()),
    "linear plus it": lambda t: F.linear(other, other, t[:, 0]),
    "conv1d": lambda t: F.conv1d(t[None], other[None, :, :2], other[0, :1]),
    "layer_norm": lambda t: F.layer_norm(t, (4,)),
    "layer_norm plus it": lambda t: F.layer_norm(other, (4,), bias=t[0]),
    "batch_norm": lambda t: F.batch_norm(t, None, None, training=True),
    "mse_loss": lambda t: F.mse_loss(t, other),
    "l1_loss": lambda t: F.l1_loss(t, other),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(other, t),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.tensor([0, 1, 3])),
    "nll_loss": lambda t: F.nll_loss(t, torch.tensor([0, 1, 3])),
    "kl_div": lambda t: F.kl_div(t, other.softmax(1), reduction="batchmean"),
    "bce_with_logits": lambda t: F.binary_cross_entropy_with_logits(t, other.sigmoid()),
    "item": lambda t: t.sum().item(),
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "bincount": lambda t: torch.bincount(t.abs().long().flatten()),
    "histc": lambda t: t.histc(4, -5, 5),
}
GROUPS = {"constants": CONSTANTS, "makers": MAKERS, "reducers": REDUCERS}


def _with_row(t: torch.Tensor) -> torch.Tensor:
    t[1] = 5.0
    return t


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS)
def test_of_a_partial(group: str, kind: str) -> None:
    two, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 2))
    plain = mixed(3, 4)
    claims(
        GROUPS[group], iter([("1-D", plain, summands(plain, two, kind)), ("2-D", plain, summands(plain, square, kind))])
    )


@pytest.mark.parametrize("placements", [[Partial(), Shard(0)], [Shard(1), Partial()], [Replicate(), Partial("max")]])
def test_of_a_partial_beside_a_shard(placements: list[Any]) -> None:
    plain = mixed(3, 4)
    ours = Program(init_device_mesh("cpu", (2, 2))).lay(plain, placements)
    claims({**CONSTANTS, **REDUCERS}, iter([(str(placements), plain, ours)]))


SCALARS: dict[str, Function] = {
    "add": lambda t: t + 2.0,
    "sub": lambda t: 1 - t,
    "fill_": lambda t: t.clone().fill_(3),
    "ones_like": torch.ones_like,
    "eye + it": lambda t: torch.eye(2, dtype=t.dtype) + t,
    "full": lambda t: torch.full((), 2.0, dtype=t.dtype) * t,
    "relu": torch.relu,
    "sqrt": lambda t: t.abs().sqrt(),
    "log": lambda t: t.abs().log(),
    "item": lambda t: t.item(),
    "bool": bool,
    "int": int,
    "format": lambda t: f"{t:.2f}",
    "expand": lambda t: t.expand(3),
    "stack": lambda t: torch.stack([t, t + 1]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_partial_without_dims(kind: str) -> None:
    plain = torch.tensor(-2.5, dtype=torch.float64)
    claims(SCALARS, iter([(kind, plain, summands(plain, init_device_mesh("cpu", (2,)), kind))]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_neither_overflows_nor_rounds_before_the_reduction(dtype: torch.dtype) -> None:
    """The whole is representable and sums of its parts are not: what reduces inside gives torch's value."""
    big, odd = (40000.0, 2048.0) if dtype == torch.float16 else (1e38, 256.0)
    plain = torch.tensor([[big, big, -big, -big], [odd, 1, 1, 0], [odd, 1, -odd, 0]], dtype=dtype)
    functions: dict[str, Function] = {
        "mean": lambda t: t[:1].mean(1),
        "norm": lambda t: torch.linalg.vector_norm(t[1:], dim=1),
        "norm 1": lambda t: t[1:].norm(1, dim=1),
        "norm of all": lambda t: t[1:].norm(),
        "var": lambda t: t[1:].var(1),
        "std_mean": lambda t: torch.std_mean(t[1:], 1),
        "logsumexp": lambda t: t.logsumexp(1),
        "cumsum": lambda t: t[1:].cumsum(1),
        "softmax": lambda t: t.softmax(1),
        "layer_norm": lambda t: F.layer_norm(t[1:], (4,)),
        "mse_loss": lambda t: F.mse_loss(t[1:], t[1:] * 0.5),
        "mean of what was summed": lambda t: t[1:].mean(1, dtype=torch.float32),
        "sum in float32": lambda t: t[1:].sum(1, dtype=torch.float32),
    }
    eps = torch.finfo(dtype).eps
    for layout in ("S1", "S0", "S1,S0"):
        for f in functions.values():
            claim(f, plain, place(plain, layout), eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_contraction_of_half_precision_rounds_once_a_rank(dtype: torch.dtype) -> None:
    """A rank's sum is rounded to the dtype as it is made; ranks' sums are added in float32 and rounded once more."""
    plain = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(512, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, eps = plain.double() @ weight.double(), torch.finfo(dtype).eps
    for n in (2, 4):
        mesh = init_device_mesh("cpu", (n,))
        ours = dtorch.distribute_tensor(plain, mesh, [Shard(1)]) @ dtorch.distribute_tensor(weight, mesh, [Shard(0)])
        sums = [a.double() @ b.double() for a, b in zip(plain.chunk(n, 1), weight.chunk(n, 0), strict=True)]
        bound = eps * (sum(s.abs() for s in sums) + exact.abs()) * 0.51
        assert ours.placements == [Partial()]
        assert ((ours.to_torch().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["half", "bfloat16", "float", "int"])
def test_a_cast_of_a_partial_rounds_the_sum_and_not_the_summands(name: str) -> None:
    parts = [torch.tensor([70000.0, 2049.5, 0.6]), torch.tensor([-69000.0, -2048.0, 0.6])]
    two = init_device_mesh("cpu", (2,))
    plain = parts[0] + parts[1]
    assert claim(lambda t: getattr(t, name)(), plain, dtorch.DTensor.from_local(parts, two, [Partial()])) == (
        name == "float"
    )


def test_rows_replicated_add_up_once() -> None:
    plain = rows(4, 4)
    for layout in ("S0", "S1", "S1,S0"):
        same(place(plain, layout).sum() + 1, plain.sum() + 1)
