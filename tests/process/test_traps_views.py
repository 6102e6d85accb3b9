"""Writes through views: every view, every operator in place; the base sees them on every rank, or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import PlacementError, Replicate, init_device_mesh

from .traps import Function, claim, held, mixed, place, plain_of, same, writes

aten: Any = torch.ops.aten

VIEWS: dict[str, Function] = {
    "itself": lambda d: d,
    "select": lambda d: d[0],
    "select last": lambda d: d.select(1, -1),
    "slice": lambda d: d[:2],
    "slice inside": lambda d: d[1:4],
    "slice of columns": lambda d: d[:, 1:3],
    "slice with steps": lambda d: d[::2],
    "both": lambda d: d[1:, 2],
    "nothing": lambda d: d[1:1],
    "ellipsis": lambda d: d[..., 1],
    "narrow": lambda d: d.narrow(0, 0, 1),
    "new dim": lambda d: d[:, None],
    "unsqueeze": lambda d: d.unsqueeze(0),
    "squeeze": lambda d: d[:, None].squeeze(1),
    "t": lambda d: d.t(),
    "T": lambda d: d.T,
    "mT": lambda d: d.mT,
    "H": lambda d: d.H,
    "mH": lambda d: d.mH,
    "adjoint": lambda d: d.adjoint(),
    "transpose": lambda d: d.transpose(0, 1)[0],
    "permute": lambda d: d.permute(1, 0),
    "movedim": lambda d: d.movedim(0, 1)[1],
    "moveaxis": lambda d: d.moveaxis(1, 0),
    "swapaxes": lambda d: d.swapaxes(0, 1),
    "swapdims": lambda d: d.swapdims(0, 1)[:, 0],
    "view": lambda d: d.view(-1),
    "view in two": lambda d: d.view(-1, 2, 2),
    "view of a part": lambda d: d.view(-1)[3:],
    "view_as": lambda d: d.view_as(torch.empty(d.numel() // 2, 2)),
    "reshape": lambda d: d.reshape(2, -1),
    "flatten": lambda d: d.flatten(),
    "unflatten": lambda d: d.unflatten(1, (2, 2))[:, 0],
    "ravel": lambda d: d.ravel(),
    "contiguous": lambda d: d.contiguous(),
    "split": lambda d: d.split(2)[0],
    "split_with_sizes": lambda d: d.split([1, d.shape[0] - 1])[1],
    "split of columns": lambda d: d.split(3, 1)[1],
    "chunk": lambda d: d.chunk(2)[0],
    "tensor_split": lambda d: d.tensor_split(2)[1],
    "hsplit": lambda d: d.hsplit(2)[0],
    "vsplit": lambda d: d.vsplit([1])[1],
    "unbind": lambda d: d.unbind()[-1],
    "unbind of columns": lambda d: d.unbind(1)[1],
    "unsafe_split": lambda d: d.unsafe_split(2)[0],
    "unsafe_split_with_sizes": lambda d: d.unsafe_split_with_sizes([1, d.shape[0] - 1])[1],
    "unsafe_chunk": lambda d: d.unsafe_chunk(2, 1)[1],
    "diagonal": lambda d: d.diagonal(),
    "diagonal below": lambda d: d.diagonal(-1),
    "unfold": lambda d: d.unfold(1, 2, 2),
    "unfold of rows": lambda d: d.unfold(0, 1, 2),
    "as_strided": lambda d: d.as_strided((2, 2), (4, 1), 1),
    "as_strided rows": lambda d: d.as_strided((d.shape[0], 4), (4, 1)),
    "expand": lambda d: d.expand(1, *d.shape),
    "expand wide": lambda d: d[:, None].expand(-1, 2, -1),
    "expand_as": lambda d: d.expand_as(torch.empty(1, *d.shape)),
    "broadcast_to": lambda d: torch.broadcast_to(d, (1, *d.shape)),
    "atleast_3d": lambda d: torch.atleast_3d(d),
    "detach": lambda d: d.detach()[0],
    "data": lambda d: d.data,
    "alias": lambda d: aten.alias(d)[:, 0],
    "real": lambda d: d.real,
    "resolve_conj": lambda d: d.resolve_conj(),
    "to its dtype": lambda d: d.to(d.dtype),
    "type_as": lambda d: d.type_as(d),
    "view_as_complex": lambda d: torch.view_as_real(torch.view_as_complex(d.view(-1, 2, 2)))[..., 0],
    "view of a dtype": lambda d: d.view(torch.int64).view(torch.float64),
    "clone": lambda d: d.clone(),
    "an index": lambda d: d[torch.tensor([0])],
}
WRITES: dict[str, Function] = {
    "add_": lambda v, d: v.add_(1),
    "copy_": lambda v, d: v.copy_(torch.arange(float(v.numel())).reshape(v.shape)),
    "=": lambda v, d: v.__setitem__(..., -3.0),
    "out=": lambda v, d: torch.mul(v, 2, out=v),
    "sub_ itself": lambda v, d: v.sub_(v),
    "mul_": lambda v, d: v.mul_(torch.full(v.shape, 3.0)),
    "div_": lambda v, d: v.div_(4),
    "pow_": lambda v, d: v.pow_(2),
    "neg_": lambda v, d: v.neg_(),
    "abs_": lambda v, d: v.abs_(),
    "ceil_": lambda v, d: v.ceil_(),
    "sigmoid_": lambda v, d: v.sigmoid_(),
    "relu_": lambda v, d: v.relu_(),
    "F.relu": lambda v, d: F.relu(v, inplace=True),
    "leaky_relu_": lambda v, d: F.leaky_relu_(v, 0.5),
    "clamp_": lambda v, d: v.clamp_(-1, 3),
    "addcmul_": lambda v, d: v.addcmul_(v, torch.full(v.shape, 2.0, dtype=v.dtype), value=0.5),
    "lerp_": lambda v, d: v.lerp_(torch.zeros(v.shape, dtype=v.dtype), 0.25),
    "fill_": lambda v, d: v.fill_(1),
    "zero_": lambda v, d: v.zero_(),
    "fill_ by a tensor": lambda v, d: v.fill_(torch.tensor(2.0)),
    "+=": lambda v, d: v.__iadd__(1),
    "/=": lambda v, d: v.__itruediv__(2),
    "init.ones_": lambda v, d: torch.nn.init.ones_(v),
    "init.constant_": lambda v, d: torch.nn.init.constant_(v, 0.5),
    "masked_fill_": lambda v, d: v.masked_fill_(torch.arange(v.numel()).reshape(v.shape) % 2 == 0, 9.0),
    "where it is": lambda v, d: v.__setitem__(v > 2, 0.0),
    "masked_scatter_": lambda v, d: v.masked_scatter_(v > 2, torch.zeros(v.shape, dtype=v.dtype)),
    "[0] =": lambda v, d: v.__setitem__(0, 8.0),
    "[-1:] =": lambda v, d: v.__setitem__(slice(-1, None), torch.tensor(8.0)),
    "[tensor] =": lambda v, d: v.__setitem__(torch.tensor([0, -1]), 8.0),
    "index_fill_": lambda v, d: v.index_fill_(0, torch.tensor([0]), 6.0),
    "index_add_": lambda v, d: v.index_add_(0, torch.tensor([0]), torch.ones((1, *v.shape[1:]), dtype=v.dtype)),
    "index_copy_": lambda v, d: v.index_copy_(0, torch.tensor([0]), torch.ones((1, *v.shape[1:]), dtype=v.dtype)),
    "scatter_": lambda v, d: v.scatter_(0, torch.zeros((1, *v.shape[1:]), dtype=torch.int64), 5.0),
    "scatter_add_": lambda v, d: v.scatter_add_(0, torch.zeros(v.shape, dtype=torch.int64), v.clone()),
    "put_": lambda v, d: v.put_(torch.tensor([0, -1]), torch.tensor([1.0, 2.0], dtype=v.dtype)),
    "index_put_": lambda v, d: v.index_put_((torch.tensor([0, 0]),), torch.tensor(1.0).double(), accumulate=True),
    "cumsum_": lambda v, d: v.cumsum_(0),
    "tril_": lambda v, d: v.tril_(),
    "triu_": lambda v, d: v.triu_(1),
    "fill_diagonal_": lambda v, d: v.fill_diagonal_(4.0),
    "renorm_": lambda v, d: v.renorm_(2, 0, 1.0),
    "addmm_": lambda v, d: v.addmm_(torch.ones(v.shape[0], 2).double(), torch.ones(2, v.shape[-1]).double()),
    "addr_": lambda v, d: v.addr_(torch.ones(v.shape[0]).double(), torch.ones(v.shape[-1]).double()),
    "logical_not_": lambda v, d: v.logical_not_(),
    "foreach": lambda v, d: torch._foreach_add_([v, d], 1.0),
    "foreach mul": lambda v, d: torch._foreach_mul_([v], [2.0]),
    "uniform_": lambda v, d: v.uniform_(),
    "normal_": lambda v, d: v.normal_(),
    "bernoulli_": lambda v, d: v.bernoulli_(0.5),
    "dropout": lambda v, d: F.dropout(v, 0.5, inplace=True),
    "the base": lambda v, d: d.mul_(2),
    "the base's row": lambda v, d: d[0].zero_(),
    "swapped": lambda v, d: v.transpose_(0, 1).zero_(),
}
SOME_VIEWS = ["itself", "slice inside", "t", "select", "view of a part", "slice of columns"]


def _compare(view: str, write: str, layout: str, auto: bool, n: int) -> str:
    """What is wrong with `write` through `view` of `n` rows laid as `layout`; "" where nothing is."""
    plain, d = mixed(n), place(mixed(n), layout)
    others = [lambda t: t[1:3], lambda t: t.t(), lambda t: t[:, :2].flatten(0, 0)]
    wanted: Any = None
    torch.manual_seed(3)
    dtorch.manual_seed(3)
    before = plain.clone()
    kin = [f(plain) for f in others] if auto else []
    try:
        v = VIEWS[view](plain)
        WRITES[write](v, plain)
    except Exception as error:
        wanted = error
    try:
        with dtorch.auto_redistribute(auto):
            siblings = [f(d) for f in others] if auto else []
            ours = VIEWS[view](d)
            WRITES[write](ours, d)
            after, seen = plain_of(ours), plain_of(siblings)
    except PlacementError as error:
        if auto and not writes(error):
            return f"refused: {error}"
        plain = before  # what is refused has written nothing
    except Exception as error:
        return "" if isinstance(error, type(wanted)) else f"torch: {wanted!r}, dtorch: {error!r}"
    else:
        if wanted is not None:
            return f"torch refuses: {wanted!r}"
        try:
            same(after, v)
            # Others see it too, but for what no version tells of.
            if view != "data" and not view.startswith("unsafe"):
                same(seen, kin)
        except AssertionError as error:
            return f"the view: {error}"
    try:
        held(d, plain)
    except AssertionError as error:
        return f"the base: {error}"
    return ""


def _table(views: Any, writes: Any, layout: str, auto: bool, *sizes: int) -> None:
    wrong = []
    for n in sizes:
        for view in views:
            for write in writes:
                text = _compare(view, write, layout, auto, n)
                if text:
                    wrong.append(f"{view} | {write} of {n} rows, {layout}, auto={auto}: {text}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("auto", [False, True], ids=["strict", "auto"])
@pytest.mark.parametrize("layout", ["S0", "S1", "S0 of 3", "S0,S0"])
def test_every_view(layout: str, auto: bool) -> None:
    few = {name: WRITES[name] for name in ("add_", "out=" if auto else "copy_")}
    _table(VIEWS, few, layout, auto, 5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("auto", [False, True], ids=["strict", "auto"])
@pytest.mark.parametrize("layout", ["S0", "S0 of 3", "S1,S0"])
def test_every_write(layout: str, auto: bool) -> None:
    _table(SOME_VIEWS, WRITES, layout, auto, 5)


COMPLEX_VIEWS: dict[str, Function] = {
    "real": lambda z: z.real,
    "imag": lambda z: z.imag,
    "real of a row": lambda z: z[0].real,
    "view_as_real": lambda z: torch.view_as_real(z)[..., 0],
    "view_as_real of rows": lambda z: torch.view_as_real(z[:2])[..., 1],
    "conj": lambda z: z.conj()[1:],
    "mH": lambda z: z.mH[0],
    "adjoint": lambda z: z.adjoint()[:, 1],
}


@pytest.mark.parametrize("layout", ["S0", "S1", "S1,S0"])
@pytest.mark.parametrize("name", COMPLEX_VIEWS)
def test_views_of_complex_numbers(name: str, layout: str) -> None:
    for auto in (False, True):
        plain = torch.complex(mixed(5), mixed(5).flip(0))
        d, before = place(plain, layout), plain.clone()
        try:
            with dtorch.auto_redistribute(auto):
                COMPLEX_VIEWS[name](d).mul_(2)
        except PlacementError as error:
            assert not auto or writes(error)
            plain = before
        else:
            COMPLEX_VIEWS[name](plain).mul_(2)
        held(d, plain)


@pytest.mark.parametrize("layout", ["S0", "S1,S0"])
def test_parts_of_a_conjugate(layout: str) -> None:
    """A conjugate is lazy: its parts are those of the conjugate, in a backward too."""
    plain = torch.complex(mixed(5), mixed(5).flip(0))
    d = place(plain, layout)
    functions: list[Function] = [
        lambda z: z.conj().imag,
        lambda z: z.conj().real,
        lambda z: z.H.real,
        lambda z: z.mH.imag[1:2],
        lambda z: (z * z.conj()).imag,
        lambda z: torch.view_as_real(z.conj().resolve_conj()),
    ]
    for f in functions:
        claim(f, plain, d)
    grads = []
    for a, b in ((mixed(5), mixed(5).flip(0)), (place(mixed(5), layout), place(mixed(5).flip(0), layout))):
        a.requires_grad_(), b.requires_grad_()
        (torch.complex(a, b).conj() * torch.complex(b, a)).imag.square().sum().backward()
        grads.append((a.grad, b.grad))
    same(grads[1], grads[0])


def test_a_write_through_a_replicated_view_reaches_every_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for view in VIEWS:
        plain = mixed(4)
        d = dtorch.distribute_tensor(plain, mesh, [Replicate(), Replicate()])
        try:
            VIEWS[view](plain).mul_(2)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                plain_of(VIEWS[view](d).mul_(2))
            continue
        VIEWS[view](d).mul_(2)
        held(d, plain)


def test_a_slice_made_by_a_free_move_is_no_alias() -> None:
    """``Shard(0) + Replicate()`` cuts the replica: a write to the result reaches neither."""
    mesh = init_device_mesh("cpu", (2,))
    shard, whole = (dtorch.distribute_tensor(mixed(4), mesh, [p]) for p in (dtorch.Shard(0), Replicate()))
    for f in (lambda a, b: a + b, lambda a, b: a.copy_(b), torch.maximum, lambda a, b: torch.cat([a, b], 1)):
        f(shard, whole).zero_()
        held(whole, mixed(4))
    moved = whole.redistribute(placements=[dtorch.Shard(0)])
    moved.zero_()
    back = moved.redistribute(placements=[Replicate()])
    back.add_(1)
    held(whole, mixed(4))
    held(moved, torch.zeros(4, 4, dtype=torch.float64))
