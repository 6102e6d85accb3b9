"""What random programs do to memory: views, writes, writes through views, indexing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import dtorch

from .programs import OPERATORS, Digits, Maker, Pair, Program, Step, simple

# -- views ------------------------------------------------------------------------------------------------------------


def _view(ndim: int, f: Callable[..., Any]) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        a = p.pick(d, ndim=ndim)
        i = d.below(a.plain.ndim)
        j = d.below(a.plain.ndim)
        m, n = d.below(4), d.below(4)
        return [a], lambda t: f(t, i, j, m, n), False

    return make


_VIEWS: dict[str, tuple[int, Callable[..., Any]]] = {
    "flatten": (1, lambda t, i, j, m, n: t.flatten()),
    "view flat": (1, lambda t, i, j, m, n: t.view(-1)),
    "flatten two": (2, lambda t, i, j, m, n: t.flatten(0, 1)),
    "unflatten": (1, lambda t, i, j, m, n: t.unflatten(i, (2, -1)) if t.shape[i] and t.shape[i] % 2 == 0 else t),
    "transpose": (1, lambda t, i, j, m, n: t.transpose(i, j)),
    "unsqueeze": (1, lambda t, i, j, m, n: t.unsqueeze(i)),
    "squeeze": (1, lambda t, i, j, m, n: t.squeeze(i)),
    "squeeze all": (1, lambda t, i, j, m, n: t.squeeze()),
    "select": (1, lambda t, i, j, m, n: t.select(i, m)),
    "slice": (1, lambda t, i, j, m, n: t.narrow(i, min(m, t.shape[i]), min(n, t.shape[i] - min(m, t.shape[i])))),
    "slice 0": (1, lambda t, i, j, m, n: t[m:]),
    "slice step": (1, lambda t, i, j, m, n: t[:: m + 1]),
    "ellipsis": (1, lambda t, i, j, m, n: t[..., :m]),
    "row": (1, lambda t, i, j, m, n: t[-1]),
    # Elements that share memory are read, not written: what a write would leave there is anyone's guess.
    "expand": (
        1,
        lambda t, i, j, m, n: t.unsqueeze(0).expand(3, *t.shape).clone(memory_format=torch.contiguous_format),
    ),
    "diagonal": (2, lambda t, i, j, m, n: t.diagonal()),
    "unfold": (1, lambda t, i, j, m, n: t.unfold(i, 2, 1) * 2 if t.shape[i] >= 2 else t),
    "chunk": (1, lambda t, i, j, m, n: t.chunk(2, i)),
    "split": (1, lambda t, i, j, m, n: t.split(2, i)),
    "unbind": (1, lambda t, i, j, m, n: t.unbind(i)[:2]),
    "movedim": (1, lambda t, i, j, m, n: t.movedim(i, j)),
    "reshape last": (2, lambda t, i, j, m, n: t.reshape(t.shape[0], math.prod(t.shape[1:]))),
    "data": (1, lambda t, i, j, m, n: t.data),
    "view_as": (1, lambda t, i, j, m, n: t.view(t.shape)),
    "T": (1, lambda t, i, j, m, n: t.mT if t.ndim >= 2 else t),
}
for _name, (_ndim, _f) in _VIEWS.items():
    OPERATORS[_name] = _view(_ndim, _f)


# -- writes -----------------------------------------------------------------------------------------------------------

for _name, _g in {
    "add_ 1": lambda t: t.add_(1.0),
    "mul_ 2": lambda t: t.mul_(2.0),
    "mul_ -1": lambda t: t.mul_(-1.0),
    "fill_": lambda t: t.fill_(0.75),
    "zero_": lambda t: t.zero_(),
    "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    "relu_": lambda t: t.relu_(),
    "neg_": lambda t: t.neg_(),
    "no_grad add_": lambda t: torch.no_grad()(lambda: t.add_(0.5))(),
    "view of a detached += 1": lambda t: t.detach().unsqueeze(0).add_(1),
    "unsqueeze_": lambda t: t.clone().unsqueeze_(0),
    "t_": lambda t: t.clone().t_() if t.ndim <= 2 else t,
    "first row += 1": lambda t: _write(t, lambda t: t[0].add_(1) if t.ndim and len(t) else None),
    "last rows = 0": lambda t: _write(t, lambda t: t[-2:].zero_() if t.ndim else None),
    "t[1:] = 2": lambda t: _write(t, lambda t: t.__setitem__(slice(1, None), 2.0) if t.ndim else None),
    "t[0] = 3": lambda t: _write(t, lambda t: t.__setitem__(0, 3.0) if t.ndim and len(t) else None),
    "column = 1": lambda t: _write(t, lambda t: t.__setitem__((..., 0), 1.0) if t.ndim and t.shape[-1] else None),
    "flat view += 1": lambda t: _write(t, lambda t: t.view(-1).add_(1.0)),
    "transposed *= 2": lambda t: _write(t, lambda t: t.t().mul_(2.0) if t.ndim <= 2 else None),
    "diagonal fill": lambda t: _write(t, lambda t: t.diagonal().fill_(1.0) if t.ndim >= 2 else None),
    "mask = 0": lambda t: _write(t, lambda t: t.__setitem__(t > 0, 0.0)),
    "mask rows": lambda t: _write(t, lambda t: t.__setitem__(t[:, 0] > 0, 0.0) if t.ndim == 2 and t.shape[1] else None),
    "fill_diagonal_": lambda t: _write(t, lambda t: t.fill_diagonal_(5.0) if t.ndim == 2 and t.numel() else None),
    "cumsum_": lambda t: _write(t, lambda t: t.cumsum_(0) if t.ndim else None),
    "write to expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape).add_(1.0),
    "reverse rows": lambda t: _write(t, lambda t: t.copy_(t.flip(0).clone()) if t.ndim else None),
}.items():
    simple(_name, _g, steep=_name.startswith("mask"))


def _write(t: torch.Tensor, f: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    f(t)
    return t


_IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": lambda a, b: a.add_(b),
    "sub_": lambda a, b: a.sub_(b, alpha=0.5),
    "mul_": lambda a, b: a.mul_(b),
    "copy_": lambda a, b: a.copy_(b),
    "lerp_": lambda a, b: a.lerp_(b.expand(a.shape), 0.5),
    "addcmul_": lambda a, b: a.addcmul_(b, b, value=0.5),
    "setitem": lambda a, b: _write(a, lambda a: a.__setitem__(slice(None), b)),
    "setitem ...": lambda a, b: _write(a, lambda a: a.__setitem__(..., b)),
    "detached add_": lambda a, b: _write(a, lambda a: a.detach().add_(b)),
    "data mul_": lambda a, b: _write(a, lambda a: a.data.mul_(b)),
    "out=": lambda a, b: _write(a, lambda a: torch.add(a.detach(), b.detach(), out=a.detach())),
}


def _in_place(f: Callable[..., Any]) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        a = p.pick(d, floating=True)
        return [a, p.into(d, a)], f, False

    return make


for _name, _f in _IN_PLACE.items():
    OPERATORS[_name] = _in_place(_f)


# -- indexing ---------------------------------------------------------------------------------------------------------


def _set(t: torch.Tensor, index: torch.Tensor, value: Any) -> torch.Tensor:
    t[index] = value
    return t


def _indexed(f: Callable[..., Any], shape: Callable[..., tuple[int, ...]], extra: bool = False) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        a = p.pick(d, floating=True, ndim=1)
        i = d.below(a.plain.ndim)
        index = p.indices(a.plain.shape[i], shape(a.plain, i))
        if extra:
            index = torch.unique(index)
        plain_index = d.below(3) == 0
        at = p.placements(d, tuple(index.shape), partial=False)
        ours = index.clone() if plain_index else dtorch.distribute_tensor(index, p.mesh, at)
        return [a, Pair(index, ours)], lambda t, x: f(t, i, x), False

    return make


def _pairs(t: torch.Tensor, i: int) -> tuple[int, ...]:
    """Two elements along dim `i`."""
    return (*t.shape[:i], 2, *t.shape[i + 1 :])


_INDEXED: dict[str, tuple[Callable[..., Any], Callable[..., tuple[int, ...]], bool]] = {
    "index_select": (lambda t, i, x: t.index_select(i, x), lambda t, i: (3,), False),
    "gather": (lambda t, i, x: t.gather(i, x), _pairs, False),
    "index": (lambda t, i, x: t.movedim(i, 0)[x], lambda t, i: (2, 2), False),
    "index 2": (lambda t, i, x: t.movedim(i, -1)[..., x], lambda t, i: (3,), False),
    "embedding": (lambda t, i, x: F.embedding(x, t) if t.ndim == 2 and i == 0 else t, lambda t, i: (2, 3), False),
    "index_add": (lambda t, i, x: t.index_add(i, x, t.index_select(i, x)), lambda t, i: (3,), False),
    "scatter_add": (lambda t, i, x: t.scatter_add(i, x, torch.ones_like(x, dtype=t.dtype)), _pairs, False),
    "index_fill_": (lambda t, i, x: t.index_fill_(i, x, 1.5), lambda t, i: (2,), False),
    "scatter_": (lambda t, i, x: t.scatter_(i, x, 0.25), _pairs, False),
    "index_copy_": (lambda t, i, x: t.index_copy_(i, x, t.index_select(i, x) * 0), lambda t, i: (3,), True),
    "index_put_": (lambda t, i, x: _set(t, x, 0.5) if i == 0 else t, lambda t, i: (3,), False),
    "index_put rows": (lambda t, i, x: _set(t, x, t[x] * 2) if i == 0 else t, lambda t, i: (3,), True),
    "one_hot": (lambda t, i, x: F.one_hot(x, t.shape[i]), lambda t, i: (3,), False),
}  # fmt: skip
for _name, (_f, _shape, _extra) in _INDEXED.items():
    OPERATORS[_name] = _indexed(_f, _shape, _extra)
